"""One run: stack and tenants come up, load and faults go on for a while, all heals, books close."""

import contextlib
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg.conninfo import make_conninfo

from dev import deliveries
from dev.postgres import Server
from dev.stack import SUBSCRIPTION, Stack
from shared import bootstrap, db, directory, migrate
from shared.rebuild import Rebuild, Scope
from tests.chaos import books
from tests.chaos.events import stream
from tests.chaos.faults import Mischief, Place
from tests.chaos.load import Load
from tests.proxy import Proxy

HEAL_SECONDS: Final = 240

# What the clock would do by itself in an hour.
_PASS_TIME: Final = """
with probes as (
  update subscriber_tenantincident set next_probe_at = now()
  where ended_at is null and kind = 'unavailable'
)
update subscriber_subscriberfailedevent set next_retry_at = now() - interval '1 second'
where status = 'pending' and lease_token is null"""
# What an operator would do who has seen that all is well.
_REQUEUE: Final = """
update subscriber_subscriberfailedevent
set status = 'pending', retry_count = 0, next_retry_at = now() - interval '1 second'
where status = 'failed' and error_type <> 'ValueError' and payload is not null"""
_WAITING: Final = """
select (select count(*) from subscriber_subscriberfailedevent
        where status = 'pending' and error_type <> 'ValueError')
     + (select count(*) from subscriber_subscriberfailedevent where lease_token is not null)
     + (select count(*) from subscriber_subscriberfailedevent
        where status = 'failed' and error_type <> 'ValueError')
     + (select count(*) from subscriber_tenantincident where ended_at is null)
     + (select count(*) from shopify_shopifyevent where needs_publish)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one run came to."""

    seed: int
    events: int
    refused: int  # deliveries that were not accepted, and sent again
    failed_events: int  # rows of the failure ledger
    faults: Counter[str]
    heal_seconds: float
    differences: list[str]

    def as_json(self) -> dict[str, Any]:
        """For the record."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def run(
    folder: Path, *, seed: int, seconds: float, tenants: int, say: Callable[[str], None]
) -> Result:
    """Raises what the harness itself fails for; what does not balance is in the result."""
    with _place(folder, tenants) as (place, shops):
        load = Load(place.stack, stream(random.Random(seed), list(shops)), seed)
        mischief = Mischief(place, seed)
        say(f"{len(shops)} tenants; load and faults for {seconds:.0f} s")
        load.start()
        mischief.start()
        time.sleep(seconds)
        mischief.finish()
        say(f"{sum(mischief.count.values())} faults are over; healing")
        begun = time.monotonic()
        load.finish()
        _heal(place)
        healed = time.monotonic() - begun
        _rebuild(place, shops)
        say("comparing")
        urls = {shop: place.urls[name] for shop, name in shops.items()}
        application_url = _application_url(place)
        with psycopg.connect(application_url) as connection:
            (failed,) = connection.execute(
                "select count(*) from subscriber_subscriberfailedevent"
            ).fetchone() or (0,)
        return Result(
            seed=seed,
            events=len(load.sent),
            refused=load.refused,
            failed_events=failed,
            faults=mischief.count,
            heal_seconds=round(healed, 1),
            differences=books.differences(
                load.sent, application_url, urls, set(_logged(place, "audit.not_written"))
            ),
        )


@contextmanager
def _place(folder: Path, tenants: int) -> Iterator[tuple[Place, dict[str, str]]]:
    """Everything up and connected; shops and their databases."""
    with ExitStack() as closing:
        application = Server(folder / "application")
        closing.callback(application.remove)
        closing.enter_context(application)
        application.create_database("hookledger")
        server = Server(folder / "tenants", settings={"max_connections": "400"})
        closing.callback(server.remove)
        closing.enter_context(server)
        proxy = closing.enter_context(Proxy(application.port))
        environ = {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "APP_DATABASE_URL": make_conninfo(application.url("hookledger"), port=proxy.port),
            "LEASE_SECONDS": "15",
            "RETRY_TIME_BUDGET_SECONDS": "10",
            "MAINTENANCE_TIME_BUDGET_SECONDS": "2",
        }
        stack = Stack(folder / "stack", environ=environ, retry_every=1)
        closing.callback(stack.remove)
        closing.enter_context(stack)
        names = {f"shop-{n}.myshopify.com": f"tenant_{n}" for n in range(tenants)}
        urls = {name: server.create_database(name) for name in names.values()}
        proxies = {name: closing.enter_context(Proxy(server.port)) for name in urls}
        core = bootstrap.core(stack.env)
        closing.callback(core.application.close)
        for shop, name in names.items():
            _connect(core, shop, name, urls[name], proxies[name].port)
        place = Place(
            stack=stack,
            application=application,
            application_proxy=proxy,
            tenant_server=server,
            tenants=proxies,
            urls=urls,
        )
        yield place, names


def _connect(core: bootstrap.Core, shop: str, name: str, url: str, port: int) -> None:
    with db.connect(db.Target(conninfo=url), migrate.LIMITS) as connection:
        migrate.apply(connection, migrate.Series.TENANT)
    target = db.Target(conninfo=make_conninfo(url, port=port, sslmode="disable"))
    core.application.run(
        lambda connection: directory.connect_shop(
            connection,
            core.keyring,
            shop_domain=shop,
            organization_id=name,
            target=target,
        )
    )


def _application_url(place: Place) -> str:
    return place.application.url("hookledger")


def _logged(place: Place, name: str) -> Iterator[str]:
    """The ids of the events that a function has logged so."""
    for function in place.stack.functions.values():
        for each in function.log_path.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, AttributeError):
                record = json.loads(each)
                if record.get("message") == name:
                    yield str(record.get("event_id"))


def _heal(place: Place) -> None:
    """Lets time pass and an operator requeue, until nothing waits any more."""
    assert place.stack.pubsub is not None
    deadline = time.monotonic() + HEAL_SECONDS
    retry_url = place.stack.functions["retry"].url
    while time.monotonic() < deadline:
        with psycopg.connect(_application_url(place), autocommit=True) as connection:
            connection.execute(_REQUEUE)
            connection.execute(_PASS_TIME)
            with contextlib.suppress(OSError, ValueError, HTTPException):
                deliveries.post(retry_url)
            (waiting,) = connection.execute(_WAITING).fetchone() or (1,)
        if not waiting and not place.stack.pubsub.broker.depth(SUBSCRIPTION):
            return
        time.sleep(0.2)


def _rebuild(place: Place, shops: dict[str, str]) -> None:
    """Snapshots whose table was dropped come back from the event ledger."""
    for name in shops.values():
        with db.connect(db.Target(conninfo=place.urls[name]), migrate.LIMITS) as connection:
            migrate.apply_again(connection, migrate.Series.TENANT)
            for _ in Rebuild(connection, Scope(organization_id=name)).batches():
                pass


def line(result: Result) -> str:
    """The result as one line of JSON."""
    return json.dumps(result.as_json())
