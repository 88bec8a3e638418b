"""Connections to PostgreSQL: few, kept, bounded in time; and what a database's error means.

A pool of our own, because its callers need what a library's pool keeps to itself: the cause of a
failed connect, in the thread that asked, at once and not tried again behind its back
(docs/adr/0003-connections.md).
"""

import os
import re
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, ClassVar, Final, Literal, LiteralString, Self, TypeVar

import psycopg
from psycopg import errors as pg
from psycopg.abc import Params, PQGen
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus
from psycopg.rows import RowFactory

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
CHECK_SECONDS: Final = 1
CLOSE_AFTER_SECONDS: Final = 300
SWEEP_SECONDS: Final = 30
FAIL_FAST_SECONDS: Final = 3

_LIMIT: Final = """
select set_config('statement_timeout', %(statement)s, %(local)s),
       set_config('lock_timeout', %(lock)s, %(local)s),
       set_config('idle_in_transaction_session_timeout', %(idle)s, %(local)s),
       set_config('jit', 'off', %(local)s)"""

# A frozen instance cannot close what it no longer uses; the server does (PostgreSQL 14 and newer).
_CLOSE_WHEN_IDLE: Final = "select set_config('idle_session_timeout', %(close)s, false)"

# By SQLSTATE class: these need somebody to act; all others, and errors without one, may pass.
_PERMANENT_CLASSES: Final = ("0A", "21", "22", "23", "28", "3D", "3F", "42", "44", "54")

AUTHENTICATION_CLASS: Final = "28"

# By `code`: the database could not be reached, fell silent, or did not let us in.
CONNECTION_CLASSES: Final = ("08", AUTHENTICATION_CLASS, "3D")
CONNECTION_CODES: Final = (
    *("53300", "57P01", "57P02", "57P03"),
    *("connection_failed", "host_not_found", "ipv6_only", "tls_failed"),
    DatabaseTimeoutError.code,
)


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


class ConnectError(psycopg.OperationalError):
    """A connect that failed for a reason that has no SQLSTATE."""

    word: ClassVar[str] = "connection_failed"


class HostNotFoundError(ConnectError):
    """The host's name has no address; a paused project's may have lost it for a while."""

    word = "host_not_found"


class Ipv6OnlyError(ConnectError):
    """The host has no IPv4 address, and IPv6 does not lead there from here."""

    word = "ipv6_only"


class TlsError(ConnectError):
    """The server offers no TLS, or not with a certificate that is trusted."""

    word = "tls_failed"


class DatabaseNotFoundError(psycopg.OperationalError):
    """The server has no database of that name."""

    sqlstate = "3D000"


# libpq hands no SQLSTATE out when a connect fails, only the server's or pooler's words.
_CONNECT_FAULTS: Final = (
    (r"authentication failed|no password supplied", pg.InvalidPassword),
    (
        r'no pg_hba\.conf entry|role ".*" does not exist|no such user|user not found',
        pg.InvalidAuthorizationSpecification,
    ),
    (r'database ".*" does not exist|no such database', DatabaseNotFoundError),
    (
        r"too many (clients|connections)|slots are reserved|max client|no more connections allowed",
        pg.TooManyConnections,
    ),
    (r"database system is|accepting connections$", pg.CannotConnectNow),
    (r"could not translate host name|failed to resolve host", HostNotFoundError),
    (r"does not support SSL|certificate|sslmode|SSL error: (?!unexpected eof)", TlsError),
)
# Where Debian, Red Hat and macOS keep the authorities that they trust.
_SYSTEM_AUTHORITIES: Final = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
)
_IPV6_ONLY: Final = (
    "The host has IPv6 addresses only, and there is no way to them from here. Use the address of "
    "an IPv4 pooler (Supabase: port 5432 of the pooler's host is in session mode, port 6543 in "
    "transaction mode: `connect_shop --pooler-mode transaction`)."
)


class BoundedConnection(psycopg.Connection[Any]):
    """A connection that a silent server cannot hold for ever."""

    limits: Limits | None = None  # None while connecting
    patience: float | None = None  # seconds

    def wait(self, gen: PQGen[T], interval: float = 0.1, timeout: float | None = None) -> T:
        """As psycopg's, but never longer than `patience`; then the connection is closed."""
        try:
            return super().wait(gen, interval, timeout if timeout is not None else self.patience)
        except pg._WaitTimeout:
            self.pgconn.finish()
            raise DatabaseTimeoutError(
                f"The database did not answer within {self.patience:g} s; the connection was cut."
            ) from None

    def limit(self, limits: Limits) -> None:
        """Puts `limits` in force."""
        self.limits, self.patience = limits, limits.patience
        self.execute(_LIMIT, _timeouts(limits, local=False))
        if self.info.server_version >= 140000:
            self.execute(_CLOSE_WHEN_IDLE, {"close": f"{2 * CLOSE_AFTER_SECONDS}s"})

    def is_alive(self) -> bool:
        """Whether the server still answers; if not, the connection is closed."""
        self.patience, kept = CHECK_SECONDS, self.patience
        try:
            self.execute("select 1")
        except (psycopg.Error, DatabaseTimeoutError):
            self.close()
            return False
        finally:
            self.patience = kept
        return True


class PooledConnection(BoundedConnection):
    """Behind a transaction pooler: each transaction may be another session, and sets its limits."""

    def limit(self, limits: Limits) -> None:
        """Keeps `limits` for each transaction to come."""
        self.limits, self.patience = limits, limits.patience
        self.cursor_factory = _LimitedCursor

    def set_local_limits(self) -> None:
        """Puts the limits in force until the current transaction ends."""
        if self.limits:
            psycopg.Cursor(self).execute(_LIMIT, _timeouts(self.limits, local=True))

    @contextmanager
    def transaction(
        self, savepoint_name: str | None = None, force_rollback: bool = False
    ) -> Iterator[psycopg.Transaction]:
        """As psycopg's, with the limits in force."""
        outermost = self.info.transaction_status == TransactionStatus.IDLE
        with super().transaction(savepoint_name, force_rollback) as transaction:
            if outermost:
                self.set_local_limits()
            yield transaction


class _LimitedCursor(psycopg.Cursor[Any]):
    """A statement of its own goes in one round trip with its limits: one implicit transaction."""

    def execute(self, query: Any, params: Params | None = None, **options: Any) -> Self:
        connection = self.connection
        assert isinstance(connection, PooledConnection)
        if connection.info.transaction_status != TransactionStatus.IDLE:
            return super().execute(query, params, **options)
        with connection.pipeline():
            connection.set_local_limits()
            super().execute(query, params, **options)
        return self


def connect(target: Target, limits: Limits) -> BoundedConnection:
    """A connection in autocommit mode with `limits` in force; raises psycopg.OperationalError."""
    connection = _connected(target, limits)
    try:
        connection.limit(limits)
    except BaseException:
        connection.close()
        raise
    return connection


def with_tls(conninfo: str) -> str:
    """`conninfo`, with TLS required unless it says otherwise or never leaves this machine."""
    parts = {name: value for name, value in conninfo_to_dict(conninfo).items() if value != ""}
    parts.setdefault("sslmode", "prefer" if _is_loopback(parts) else "require")
    if parts["sslmode"] == "verify-full":
        parts.setdefault("sslrootcert", "system")
    return make_conninfo("", **parts)


def is_ipv6_only(conninfo: str) -> bool:
    """Whether the host's name leads to IPv6 addresses and to no others."""
    host = str(conninfo_to_dict(conninfo).get("host") or "")
    if not host or host.startswith("/"):
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return {family for family, *_ in found} == {socket.AF_INET6}


class Pool:
    """At most `size` connections to one database, opened on first use, by whoever needs one.

    Nothing runs in the background and nothing is opened before the first `run`: the server forks
    after import, and an instance has no processor between requests.
    """

    def __init__(
        self,
        target: Target,
        *,
        size: int,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.target = target
        self.limits = limits or Limits()
        self._clock = clock
        self._turns = _Turns(size)
        self._lock = threading.Lock()
        self._idle: list[tuple[BoundedConnection, float]] = []  # the last one used is the last
        self._retired = False
        self._broken_until = 0.0
        self._fault: Exception | None = None

    def run(self, work: Callable[[psycopg.Connection[Any]], T]) -> T:
        """What `work` returns, given a connection. `work` must be idempotent.

        It runs once more on a fresh connection when a kept one turns out to be dead. Raises what
        connecting and `work` raise, and DatabaseBusyError when no connection comes free in time.
        For a few seconds after a connect that failed or a server that fell silent, the same error
        is raised again at once; then one caller finds out whether it is over.
        """
        if not self._idle:
            self._refuse_while_broken()
        with self._turns.one(self.limits.wait):
            connection = self._kept()
            if connection is not None:
                try:
                    return self._attempt(connection, work)
                except psycopg.OperationalError:
                    if not connection.closed:
                        raise
                self.close()  # its neighbours died with it
            return self._attempt(self._opened(), work)

    @property
    def is_busy(self) -> bool:
        """Whether somebody is using a connection."""
        return self._turns.taken > 0

    def fetch(
        self,
        row_factory: RowFactory[T],
        statement: LiteralString,
        parameters: Mapping[str, Any] | None = None,
    ) -> list[T]:
        """The rows of one idempotent statement; otherwise as `run`."""

        def work(connection: psycopg.Connection[Any]) -> list[T]:
            with connection.cursor(row_factory=row_factory) as cursor:
                return cursor.execute(statement, parameters).fetchall()

        return self.run(work)

    def close(self) -> None:
        """Closes the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.close()

    def close_unused(self) -> None:
        """Closes the connections that have been idle for long."""
        oldest = self._clock() - CLOSE_AFTER_SECONDS
        with self._lock:
            unused = [kept for kept in self._idle if kept[1] < oldest]
            self._idle = self._idle[len(unused) :]
        for connection, _ in unused:
            connection.close()

    def retire(self) -> None:
        """Closes the idle connections, and those in use when they come back."""
        self._retired = True
        self.close()

    def _attempt(
        self, connection: BoundedConnection, work: Callable[[psycopg.Connection[Any]], T]
    ) -> T:
        try:
            return work(connection)
        except DatabaseTimeoutError as error:
            self._trip(error)
            self.close()  # its neighbours lead to the same silent server
            raise
        finally:
            self._keep(connection)

    def _opened(self) -> BoundedConnection:
        self._refuse_while_broken(but_one=True)
        try:
            return connect(self.target, self.limits)
        except UNREACHABLE as error:
            self._trip(error)
            raise

    def _kept(self) -> BoundedConnection | None:
        """The most recently used idle connection, if it is alive; if not, the others are not."""
        with self._lock:
            if not self._idle:
                return None
            connection, since = self._idle.pop()
        idle_for = self._clock() - since
        if idle_for < CHECK_AFTER_SECONDS:
            return connection
        if idle_for < CLOSE_AFTER_SECONDS and connection.is_alive():
            return connection
        connection.close()
        self.close()
        return None

    def _keep(self, connection: BoundedConnection) -> None:
        if connection.closed:
            return
        if connection.info.transaction_status != TransactionStatus.IDLE:
            connection.close()
            return
        now = self._clock()
        with self._lock:
            self._fault = None
            self._idle.append((connection, now))
            oldest = self._idle[0][1]
        if self._retired:
            self.close()
        elif now - oldest > CLOSE_AFTER_SECONDS:
            self.close_unused()

    def _refuse_while_broken(self, *, but_one: bool = False) -> None:
        with self._lock:
            if self._fault is None:
                return
            now = self._clock()
            if now >= self._broken_until:
                if but_one:  # until it knows more, the others need not wait with it
                    self._broken_until = now + self.limits.connect + self.limits.patience
                return
            # A fresh one: threads must not share, and pile tracebacks on, one exception.
            raise type(self._fault)(str(self._fault))

    def _trip(self, fault: Exception) -> None:
        with self._lock:
            self._fault = fault
            self._broken_until = self._clock() + FAIL_FAST_SECONDS


class _Turns:
    """At most `size` at once; who waits is served in the order of coming."""

    def __init__(self, size: int) -> None:
        self._lock = threading.Lock()
        self._size = size
        self._waiting: deque[threading.Event] = deque()
        self._moved_at = 0.0
        self.taken = 0

    @contextmanager
    def one(self, wait: float) -> Iterator[None]:
        """A turn; raises DatabaseBusyError after `wait` seconds.

        Nobody waits where nothing has come free for as long as that.
        """
        if not self._take(wait):
            raise DatabaseBusyError("Every connection to this database is in use; tried later.")
        try:
            yield
        finally:
            self._give_back()

    def _take(self, wait: float) -> bool:
        with self._lock:
            now = time.monotonic()
            if self.taken < self._size:
                self.taken += 1
                self._moved_at = now
                return True
            turn = threading.Event()
            self._waiting.append(turn)
        deadline = now + wait
        while not turn.is_set():
            left = min(deadline, self._moved_at + wait) - time.monotonic()
            if left <= 0:
                break
            turn.wait(left)
        with self._lock:
            if not turn.is_set():
                self._waiting.remove(turn)
        return turn.is_set()

    def _give_back(self) -> None:
        with self._lock:
            self._moved_at = time.monotonic()
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self.taken -= 1


class Tenants:
    """The pools of the tenants' databases: the least recently used one makes room for another."""

    def __init__(
        self,
        *,
        pools_max: int,
        pool_size: int,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pools_max = pools_max
        self._pool_size = pool_size
        self._limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._pools: OrderedDict[Target, Pool] = OrderedDict()
        self._swept_at = clock()

    def pool(self, target: Target) -> Pool:
        """The pool for `target`."""
        with self._lock:
            pool = self._pools.get(target)
            if pool is None:
                pool = self._pools[target] = Pool(
                    target, size=self._pool_size, limits=self._limits, clock=self._clock
                )
            self._pools.move_to_end(target)
            surplus = self._surplus(pool)
            unused = self._to_sweep()
        for other in surplus:
            other.retire()
        for other in unused:
            other.close_unused()
        return pool

    def close(self) -> None:
        """Closes every connection, those in use when they come back."""
        with self._lock:
            pools, self._pools = self._pools, OrderedDict()
        for pool in pools.values():
            pool.retire()

    def _surplus(self, wanted: Pool) -> list[Pool]:
        """Takes out what is too many: the least recently used ones that nobody is using."""
        excess = len(self._pools) - self._pools_max
        if excess <= 0:
            return []
        free = [pool for pool in self._pools.values() if pool is not wanted and not pool.is_busy]
        return [self._pools.pop(pool.target) for pool in free[:excess]]

    def _to_sweep(self) -> list[Pool]:
        """Every pool, once in a while."""
        now = self._clock()
        if now - self._swept_at < SWEEP_SECONDS:
            return []
        self._swept_at = now
        return list(self._pools.values())


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
    if isinstance(error, ValueError | TlsError | Ipv6OnlyError):
        return "permanent"
    sqlstate = getattr(error, "sqlstate", None) or ""
    return "permanent" if sqlstate[:2] in _PERMANENT_CLASSES else "transient"


def code(error: BaseException) -> str:
    """A stable code: our own, PostgreSQL's SQLSTATE, or a word for the rest."""
    if isinstance(error, HookledgerError):
        return error.code
    if isinstance(error, psycopg.Error) and error.sqlstate:
        return error.sqlstate
    if isinstance(error, psycopg.OperationalError):
        return error.word if isinstance(error, ConnectError) else ConnectError.word
    return "invalid_value" if isinstance(error, ValueError) else "unexpected"


def is_connection_failure(error: BaseException) -> bool:
    """Whether the database could not be reached, fell silent, or did not let us in."""
    found = code(error)
    return found[:2] in CONNECTION_CLASSES or found in CONNECTION_CODES


def _timeouts(limits: Limits, *, local: bool) -> dict[str, Any]:
    return {
        "local": local,
        "statement": f"{int(limits.statement * 1000)}ms",
        "lock": f"{int(limits.lock * 1000)}ms",
        "idle": f"{int(limits.statement * 10_000)}ms",
    }


def _connected(target: Target, limits: Limits) -> BoundedConnection:
    """A connection over the first of the host's addresses that answers.

    psycopg would give each address the whole time; here no other is begun once it is over.
    """
    pooled = target.pooler_mode == "transaction"
    kind = PooledConnection if pooled else BoundedConnection
    addresses = _addresses(target)
    deadline = time.monotonic() + limits.connect
    while True:
        try:
            return kind.connect(
                make_conninfo(
                    target.conninfo,
                    **_authorities(target),
                    **addresses.pop(0),
                    connect_timeout=limits.connect,
                    application_name="hookledger",
                    # A peer that vanished is noticed by the kernel, sooner than a slow statement.
                    tcp_user_timeout=limits.connect * 1000,
                ),
                autocommit=True,
                prepare_threshold=None if pooled else 5,
            )
        except psycopg.OperationalError as error:
            if not addresses or time.monotonic() >= deadline:
                raise _explained(error, target) from None


def _authorities(target: Target) -> dict[str, str]:
    """The system's authorities, where that is asked for: the wheel's OpenSSL looks elsewhere."""
    if conninfo_to_dict(target.conninfo).get("sslrootcert") != "system":
        return {}
    if "SSL_CERT_FILE" in os.environ or "SSL_CERT_DIR" in os.environ:
        return {}
    return {"sslrootcert": next(filter(os.path.exists, _SYSTEM_AUTHORITIES), "system")}


def _addresses(target: Target) -> list[dict[str, str]]:
    """Where to connect to, in the resolver's order; several hosts in one address are psycopg's."""
    parts = conninfo_to_dict(target.conninfo)
    host = str(parts.get("host") or "")
    if not host or host.startswith("/") or "," in host or parts.get("hostaddr"):
        return [{}]
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise HostNotFoundError(f'could not find the host "{host}": {error}') from None
    return [{"hostaddr": str(address[0])} for *_, address in found]


def _explained(error: psycopg.OperationalError, target: Target) -> psycopg.OperationalError:
    """The error of a failed connect, as the class that says what is wrong."""
    text = str(error)
    for words, kind in _CONNECT_FAULTS:
        if re.search(words, text, re.IGNORECASE | re.MULTILINE):
            return kind(text)
    if "refused" not in text and is_ipv6_only(target.conninfo):
        return Ipv6OnlyError(f"{text}\n{_IPV6_ONLY}")
    return error


def _is_loopback(parts: dict[str, Any]) -> bool:
    hosts = str(parts.get("hostaddr") or parts.get("host") or "localhost").split(",")
    return all(host == "localhost" or host.startswith("/") or _is_own(host) for host in hosts)


def _is_own(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
