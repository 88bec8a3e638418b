"""Connections to PostgreSQL: few, kept, bounded in time; and what a database's error means.

A pool of our own, because its callers need what a library's pool keeps to itself: the cause of a
failed connect, in the thread that asked, at once and not tried again behind its back
(docs/adr/0003-connections.md).
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar

import psycopg
from psycopg import errors as pg
from psycopg.abc import PQGen
from psycopg.conninfo import make_conninfo

from shared.config import PoolerMode
from shared.errors import (
    DatabaseBusyError,
    DatabaseTimeoutError,
    HookledgerError,
    PermanentError,
)

T = TypeVar("T")
ErrorClass = Literal["transient", "permanent"]

# A kept connection is looked at before use only after this long: a frozen instance wakes with dead
# sockets, and a look at every checkout costs a third of the throughput.
CHECK_AFTER_SECONDS: Final = 30
CLOSE_AFTER_SECONDS: Final = 300
FAIL_FAST_SECONDS: Final = 3

_LIMIT: Final = """
select set_config('statement_timeout', %(statement)s, %(local)s),
       set_config('lock_timeout', %(lock)s, %(local)s),
       set_config('idle_in_transaction_session_timeout', %(idle)s, %(local)s),
       set_config('jit', 'off', %(local)s)"""

# By SQLSTATE class: these need somebody to act; all others, and errors without one, may pass.
_PERMANENT_CLASSES: Final = ("0A", "21", "22", "23", "28", "3D", "3F", "42", "44", "54")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long things may take, in seconds."""

    connect: int = 2  # libpq knows nothing below 2
    statement: float = 3
    lock: float = 2
    wait: float = 1  # for a connection, when all are in use
    grace: float = 1  # longer than `statement`, for a server that has stopped answering

    @property
    def patience(self) -> float:
        """How long one round trip may take before the connection is cut from our side."""
        return self.statement + self.grace


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A database to connect to."""

    conninfo: str = field(repr=False)
    pooler_mode: PoolerMode = "none"


class BoundedConnection(psycopg.Connection[Any]):
    """A connection that a silent server cannot hold for ever."""

    patience: float | None = None  # seconds; None while connecting

    def wait(self, gen: PQGen[T], interval: float = 0.1, timeout: float | None = None) -> T:
        """As psycopg's, but never longer than `patience`; then the connection is closed."""
        try:
            return super().wait(gen, interval, timeout if timeout is not None else self.patience)
        except pg._WaitTimeout:
            self.pgconn.finish()
            raise DatabaseTimeoutError(
                f"The database did not answer within {self.patience} s; the connection was cut."
            ) from None


def connect(target: Target, limits: Limits) -> BoundedConnection:
    """A connection in autocommit mode with `limits` in force; raises psycopg.OperationalError."""
    transaction_pooler = target.pooler_mode == "transaction"
    connection = BoundedConnection.connect(
        make_conninfo(
            target.conninfo,
            connect_timeout=limits.connect,
            application_name="hookledger",
            # A peer that vanished without a word is noticed by the kernel as well.
            tcp_user_timeout=int(limits.patience * 1000),
        ),
        autocommit=True,
        prepare_threshold=None if transaction_pooler else 5,
    )
    connection.patience = limits.patience
    if not transaction_pooler:
        connection.execute(_LIMIT, _timeouts(limits, local=False))
    return connection


class Pool:
    """At most `size` connections to one database, opened on first use, by whoever needs one.

    Nothing runs in the background and nothing is opened before the first `run`: the server forks
    after import, and an instance has no processor between requests.
    """

    def __init__(self, target: Target, *, size: int, limits: Limits | None = None) -> None:
        self.target = target
        self.limits = limits or Limits()
        self._slots = threading.BoundedSemaphore(size)
        self._lock = threading.Lock()
        self._idle: list[tuple[BoundedConnection, float]] = []
        self._broken_until = 0.0
        self._fault: Exception | None = None

    def run(self, work: Callable[[psycopg.Connection[Any]], T]) -> T:
        """What `work` returns, given a connection. `work` must be idempotent.

        It runs once more on a fresh connection when a kept one turns out to be dead. Raises what
        connecting and `work` raise, and DatabaseBusyError when no connection comes free in time.
        For a few seconds after a connect that failed, a server that fell silent, or a wait in
        vain, the same error is raised again at once.
        """
        with self._slot():
            connection = self._kept()
            if connection is not None:
                try:
                    return self._attempt(connection, work)
                except psycopg.OperationalError:
                    if not connection.closed:
                        raise
                self.close()  # its neighbours died with it
            return self._attempt(self._opened(), work)

    def close(self) -> None:
        """Closes the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.close()

    def _attempt(
        self, connection: BoundedConnection, work: Callable[[psycopg.Connection[Any]], T]
    ) -> T:
        try:
            if self.target.pooler_mode == "transaction":
                return _in_transaction(connection, self.limits, work)
            return work(connection)
        except DatabaseTimeoutError as error:
            self._trip(error)
            raise
        finally:
            self._keep(connection)

    def _opened(self) -> BoundedConnection:
        try:
            return connect(self.target, self.limits)
        except (psycopg.OperationalError, DatabaseTimeoutError) as error:
            self._trip(error)
            raise

    @contextmanager
    def _slot(self) -> Iterator[None]:
        self._refuse_while_broken()
        if not self._slots.acquire(timeout=self.limits.wait):
            busy = DatabaseBusyError("Every connection to this database is in use; tried later.")
            self._trip(busy)
            raise busy
        try:
            self._refuse_while_broken()
            yield
        finally:
            self._slots.release()

    def _kept(self) -> BoundedConnection | None:
        """The most recently used idle connection that is still alive, if any."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection, since = self._idle.pop()
            idle_for = time.monotonic() - since
            if idle_for < CHECK_AFTER_SECONDS or (
                idle_for < CLOSE_AFTER_SECONDS and _alive(connection)
            ):
                return connection
            connection.close()

    def _keep(self, connection: BoundedConnection) -> None:
        if connection.closed:
            return
        if connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            connection.close()
            return
        now = time.monotonic()
        with self._lock:
            self._idle.append((connection, now))
            stale = [c for c, since in self._idle if now - since > CLOSE_AFTER_SECONDS]
            self._idle = [kept for kept in self._idle if kept[0] not in stale]
        for old in stale:
            old.close()

    def _refuse_while_broken(self) -> None:
        if self._fault is not None and time.monotonic() < self._broken_until:
            # A fresh one: threads must not share, and pile tracebacks on, one exception.
            raise type(self._fault)(str(self._fault))

    def _trip(self, fault: Exception) -> None:
        self._fault = fault
        self._broken_until = time.monotonic() + FAIL_FAST_SECONDS


class Tenants:
    """The pools of the tenants' databases: the least recently used one makes room for another."""

    def __init__(self, *, pools_max: int, pool_size: int, limits: Limits) -> None:
        self._pools_max = pools_max
        self._pool_size = pool_size
        self._limits = limits
        self._lock = threading.Lock()
        self._pools: OrderedDict[Target, Pool] = OrderedDict()

    def pool(self, target: Target) -> Pool:
        """The pool for `target`."""
        retired = None
        with self._lock:
            pool = self._pools.get(target) or Pool(
                target, size=self._pool_size, limits=self._limits
            )
            self._pools[target] = pool
            self._pools.move_to_end(target)
            if len(self._pools) > self._pools_max:
                _, retired = self._pools.popitem(last=False)
        if retired:
            retired.close()
        return pool

    def close(self) -> None:
        """Closes every idle connection."""
        with self._lock:
            pools, self._pools = self._pools, OrderedDict()
        for pool in pools.values():
            pool.close()


# What a call for a connection may end with when the database is out of reach or overrun.
UNREACHABLE: Final = (
    psycopg.OperationalError,
    DatabaseBusyError,
    DatabaseTimeoutError,
)


def classify(error: BaseException) -> ErrorClass:
    """Whether trying again helps by itself. What is unknown is transient."""
    if isinstance(error, HookledgerError):
        return "permanent" if isinstance(error, PermanentError) else "transient"
    if isinstance(error, ValueError):
        return "permanent"
    sqlstate = getattr(error, "sqlstate", None) or ""
    return "permanent" if sqlstate[:2] in _PERMANENT_CLASSES else "transient"


def code(error: BaseException) -> str:
    """A stable code: our own, PostgreSQL's SQLSTATE, or a word for the rest."""
    if isinstance(error, HookledgerError):
        return error.code
    if isinstance(error, psycopg.Error):
        return error.sqlstate or ("connection_failed" if is_connection_failure(error) else "client")
    return "invalid_value" if isinstance(error, ValueError) else "unexpected"


def is_connection_failure(error: BaseException) -> bool:
    """Whether the database could not be reached at all, or refused to let us in."""
    return isinstance(error, psycopg.OperationalError) and (
        error.sqlstate is None
        or error.sqlstate[:2] in ("08", "28", "3D")
        or error.sqlstate in ("53300", "57P01", "57P02", "57P03")
    )


def _in_transaction(
    connection: BoundedConnection,
    limits: Limits,
    work: Callable[[psycopg.Connection[Any]], T],
) -> T:
    """`work` behind a transaction pooler: limits set for this transaction, in its round trip."""
    with connection.pipeline(), connection.transaction():
        connection.execute(_LIMIT, _timeouts(limits, local=True))
        return work(connection)


def _timeouts(limits: Limits, *, local: bool) -> dict[str, Any]:
    return {
        "local": local,
        "statement": f"{int(limits.statement * 1000)}ms",
        "lock": f"{int(limits.lock * 1000)}ms",
        "idle": f"{int(limits.statement * 10_000)}ms",
    }


def _alive(connection: BoundedConnection) -> bool:
    try:
        connection.execute("select 1")
    except (psycopg.Error, DatabaseTimeoutError):
        connection.close()
        return False
    return True
