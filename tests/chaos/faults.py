"""What breaks: each fault begins, lasts for a while, and ends. Those of one target take turns."""

import contextlib
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, LiteralString

import psycopg

from dev.postgres import Server
from dev.stack import Stack
from shared import db, migrate
from tests.proxy import Proxy

AT_ONCE: Final = 2
LONGEST_SECONDS: Final = 6.0
DROPPED: Final = ("shopify_products", "shopify_customers")

_FULL: Final = """
create or replace function disk_is_full() returns trigger language plpgsql as $$
begin raise exception 'could not extend file' using errcode = '53100'; end $$;
create or replace trigger disk_is_full before insert on shopify_events
for each row execute function disk_is_full()"""
_ROOM: Final = "drop trigger if exists disk_is_full on shopify_events"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Everything that can be broken."""

    stack: Stack
    application: Server
    application_proxy: Proxy
    tenant_server: Server
    tenants: dict[str, Proxy]  # by database
    urls: dict[str, str]  # past the proxies

    def sql(self, database: str, statement: LiteralString) -> None:
        """Runs it in a tenant's database, past its proxy."""
        with psycopg.connect(self.urls[database], autocommit=True) as connection:
            connection.execute(statement)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One kind of it: what it takes hold of, and how to be in it."""

    target: str
    during: Callable[[Place, random.Random], contextlib.AbstractContextManager[Any]]


class Mischief:
    """Breaks things until told to stop, some at once, never two of one target."""

    def __init__(self, place: Place, seed: int) -> None:
        self._place = place
        self._stop = threading.Event()
        self._held: set[str] = set()
        self._lock = threading.Lock()
        self.count: Counter[str] = Counter()
        self.errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._break, args=(random.Random(seed + n),), daemon=True)
            for n in range(AT_ONCE)
        ]

    def start(self) -> None:
        """Begins."""
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Ends what lasts still; raises what went wrong with the faults themselves."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def _break(self, dice: random.Random) -> None:
        while not self._stop.wait(dice.random()):
            name = dice.choice(list(FAULTS))
            fault = FAULTS[name]
            if not self._take(fault.target):
                continue
            try:
                with fault.during(self._place, dice):
                    self.count[name] += 1
                    self._stop.wait(dice.random() * LONGEST_SECONDS)
            except BaseException as error:  # noqa: BLE001 - reported at the end
                self.errors.append(error)
            finally:
                with self._lock:
                    self._held.discard(fault.target)

    def _take(self, target: str) -> bool:
        with self._lock:
            if target in self._held:
                return False
            self._held.add(target)
            return True


def _some(place: Place, dice: random.Random) -> list[Proxy]:
    """A quarter of the tenants."""
    return dice.sample(list(place.tenants.values()), max(1, len(place.tenants) // 4))


@contextmanager
def _silent(proxies: list[Proxy]) -> Iterator[None]:
    for proxy in proxies:
        proxy.fall_silent()
    try:
        yield
    finally:
        for proxy in proxies:
            proxy.recover()
            proxy.reset()


@contextmanager
def _refusing(proxies: list[Proxy]) -> Iterator[None]:
    for proxy in proxies:
        proxy.refuses = True
        proxy.reset()
    try:
        yield
    finally:
        for proxy in proxies:
            proxy.refuses = False


@contextmanager
def _cut(proxies: list[Proxy]) -> Iterator[None]:
    for _ in range(5):
        for proxy in proxies:
            proxy.reset()
        time.sleep(0.05)
    yield


@contextmanager
def _killed(server: Server) -> Iterator[None]:
    server.stop("immediate")
    try:
        yield
    finally:
        server.start()


@contextmanager
def _full(place: Place, dice: random.Random) -> Iterator[None]:
    names = dice.sample(list(place.urls), max(1, len(place.urls) // 4))
    for name in names:
        place.sql(name, _FULL)
    try:
        yield
    finally:
        for name in names:
            place.sql(name, _ROOM)


@contextmanager
def _dropped(place: Place, dice: random.Random) -> Iterator[None]:
    name = dice.choice(list(place.urls))
    for table in DROPPED:
        with psycopg.connect(place.urls[name], autocommit=True) as connection:
            connection.execute(
                psycopg.sql.SQL("drop table if exists {}").format(psycopg.sql.Identifier(table))
            )
    yield


@contextmanager
def _migrated(place: Place, dice: random.Random) -> Iterator[None]:
    name = dice.choice(list(place.urls))
    with (
        contextlib.suppress(psycopg.Error),  # a lock that it did not get in time
        db.connect(db.Target(conninfo=place.urls[name]), migrate.LIMITS) as connection,
    ):
        migrate.apply_again(connection, migrate.Series.TENANT)
    yield


@contextmanager
def _locked(place: Place, dice: random.Random) -> Iterator[None]:
    name = dice.choice(list(place.urls))
    with psycopg.connect(place.urls[name]) as connection:
        connection.execute("set lock_timeout = '5s'")
        with contextlib.suppress(psycopg.errors.LockNotAvailable):
            connection.execute("lock table shopify_events in access exclusive mode")
        yield
        connection.rollback()


@contextmanager
def _dead(place: Place, name: str) -> Iterator[None]:
    function = place.stack.functions[name]
    function.stop(signal.SIGKILL)
    try:
        yield
    finally:
        function.start()


@contextmanager
def _publishes(place: Place, *, refuse: bool) -> Iterator[None]:
    assert place.stack.pubsub is not None
    broker = place.stack.pubsub.broker
    broker.refuse_publishes(refuse)
    broker.hang_publishes(0 if refuse else 10)
    try:
        yield
    finally:
        broker.refuse_publishes(False)
        broker.hang_publishes(0)


@contextmanager
def _no_pushes(place: Place) -> Iterator[None]:
    assert place.stack.pubsub is not None
    place.stack.pubsub.broker.pause_pushes(True)
    try:
        yield
    finally:
        place.stack.pubsub.broker.pause_pushes(False)


FAULTS: Final[dict[str, Fault]] = {
    "tenants hang": Fault(target="tenants", during=lambda p, d: _silent(_some(p, d))),
    "tenants refuse": Fault(target="tenants", during=lambda p, d: _refusing(_some(p, d))),
    "tenants' connections cut": Fault(
        target="tenants", during=lambda p, _: _cut(list(p.tenants.values()))
    ),
    "tenants' server killed": Fault(target="tenants", during=lambda p, _: _killed(p.tenant_server)),
    "tenants' disks full": Fault(target="tenants", during=_full),
    "tenant's tables dropped": Fault(target="tenants", during=_dropped),
    "tenant's tables locked": Fault(target="tenants", during=_locked),
    "tenant migrated": Fault(target="tenants", during=_migrated),
    "application hangs": Fault(
        target="application", during=lambda p, _: _silent([p.application_proxy])
    ),
    "application refuses": Fault(
        target="application", during=lambda p, _: _refusing([p.application_proxy])
    ),
    "application's connections cut": Fault(
        target="application", during=lambda p, _: _cut([p.application_proxy])
    ),
    "application's server killed": Fault(
        target="application", during=lambda p, _: _killed(p.application)
    ),
    "publishes refused": Fault(target="broker", during=lambda p, _: _publishes(p, refuse=True)),
    "publishes hang": Fault(target="broker", during=lambda p, _: _publishes(p, refuse=False)),
    "pushes paused": Fault(target="broker", during=lambda p, _: _no_pushes(p)),
    "webhook killed": Fault(target="webhook", during=lambda p, _: _dead(p, "webhook")),
    "subscriber killed": Fault(target="subscriber", during=lambda p, _: _dead(p, "subscriber")),
    "retry killed": Fault(target="retry", during=lambda p, _: _dead(p, "retry")),
}
