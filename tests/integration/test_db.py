"""Pools: bounded in number and in time, quick to say what is wrong, quick to recover."""

import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import psycopg
import pytest
from psycopg import errors as pg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cli import shops
from dev.postgres import Server
from shared import db, redact
from shared.errors import DatabaseBusyError, DatabaseTimeoutError, StorageConfigurationError
from tests.proxy import Proxy

SHORT = db.Limits(statement=0.5, grace=0.3, wait=0.4)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def own_server(tmp_path):
    with Server(tmp_path / "server", durable=False) as server:
        yield server


@pytest.fixture
def proxy(postgres: Server) -> Iterator[Proxy]:
    with Proxy(postgres.port) as proxy:
        yield proxy


@pytest.fixture
def make_pool() -> Iterator[Callable[..., db.Pool]]:
    made: list[db.Pool] = []

    def make(conninfo: str, *, size: int = 1, **options) -> db.Pool:
        made.append(db.Pool(db.Target(conninfo=conninfo), size=size, **options))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def ask(connection):
    return connection.execute("select 1").fetchone()


def nap(connection):
    connection.execute("select pg_sleep(0.2)")


def backends(url: str, name: str = "hookledger") -> list[int]:
    """The server processes of our connections to that database."""
    with psycopg.connect(url) as probe:
        rows = probe.execute(
            "select pid from pg_stat_activity"
            " where datname = current_database() and application_name = %s",
            [name],
        ).fetchall()
    return [pid for (pid,) in rows]


def wait_for_backends(url: str, wanted: int) -> None:
    """A closed connection's process takes a moment to go."""
    deadline = time.monotonic() + 5
    while len(backends(url)) != wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(backends(url)) == wanted


def seconds(call: Callable[[], object], *, raises: type[BaseException] | None = None) -> float:
    started = time.monotonic()
    if raises is None:
        call()
    else:
        with pytest.raises(raises):
            call()
    return time.monotonic() - started


def at_once(count: int, call: Callable[[], object]) -> Counter[str]:
    """What `count` threads that call at the same time end with."""
    ends: Counter[str] = Counter()
    gate = threading.Barrier(count)

    def run():
        gate.wait()
        try:
            call()
            ends["done"] += 1
        except db.UNREACHABLE as error:
            ends[type(error).__name__] += 1

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


# Kept connections that died


def test_after_a_freeze_the_first_query_succeeds_though_the_sockets_are_reset(proxy, empty_url):
    pool = db.Pool(db.Target(conninfo=make_conninfo(empty_url, port=proxy.port)), size=3)
    assert at_once(3, lambda: pool.run(nap)) == {"done": 3}
    proxy.reset()
    assert seconds(lambda: pool.run(ask)) < 1
    assert proxy.accepted == 4
    pool.close()


def test_after_a_freeze_the_first_query_succeeds_though_the_sockets_are_forgotten(
    proxy, empty_url, make_pool
):
    clock = Clock()
    pool = make_pool(make_conninfo(empty_url, port=proxy.port), size=3, clock=clock)
    assert at_once(3, lambda: pool.run(nap)) == {"done": 3}
    proxy.swallow()
    clock.now += db.CHECK_AFTER_SECONDS
    took = seconds(lambda: pool.run(ask))
    assert took < 2 * db.CHECK_SECONDS, "one look tells for all three"
    assert proxy.accepted == 4


def test_a_connection_used_a_moment_ago_is_not_looked_at(proxy, empty_url, make_pool):
    clock = Clock()
    pool = make_pool(make_conninfo(empty_url, port=proxy.port), clock=clock)
    costs = []
    for idle in (0, db.CHECK_AFTER_SECONDS - 1, db.CHECK_AFTER_SECONDS):
        clock.now += idle
        before = proxy.round_trips
        pool.run(ask)
        costs.append(proxy.round_trips - before)
    assert costs[1:] == [1, 2]


def test_work_that_fails_runs_once(empty_url, make_pool):
    pool = make_pool(empty_url)
    pool.run(ask)
    calls = []

    def work(connection):
        calls.append(1)
        connection.execute("select pg_sleep(9)")

    pool.limits = SHORT
    pool.close()
    with pytest.raises(pg.QueryCanceled):
        pool.run(work)
    assert len(calls) == 1
    assert pool.run(ask) == (1,), "a slow statement is no broken database"


def test_a_connection_left_in_a_transaction_is_not_kept(empty_url, make_pool):
    pool = make_pool(empty_url)
    pool.run(lambda c: c.execute("begin"))
    assert pool.run(lambda c: c.info.transaction_status) == psycopg.pq.TransactionStatus.IDLE


def test_a_connection_whose_limits_could_not_be_set_is_closed(empty_url, monkeypatch):
    monkeypatch.setattr(db, "_LIMIT", "select 1/0")
    with pytest.raises(pg.DivisionByZero):
        db.connect(db.Target(conninfo=empty_url), db.Limits())
    wait_for_backends(empty_url, 0)


# Numbers


def test_two_hundred_tenants_stay_within_the_limit_and_idle_connections_are_closed(empty_url):
    clock = Clock()
    tenants = db.Tenants(pools_max=10, pool_size=2, limits=db.Limits(), clock=clock)
    targets = [
        db.Target(conninfo=make_conninfo(empty_url, options=f"-c my.tenant={n}"))
        for n in range(200)
    ]
    peak, stop = [0], threading.Event()

    def watch():
        with psycopg.connect(empty_url, autocommit=True) as probe:
            while not stop.is_set():
                (found,) = probe.execute(
                    "select count(*) from pg_stat_activity where datname = current_database()"
                    " and application_name = 'hookledger'"
                ).fetchone() or (0,)
                peak.append(found)

    def visit(start: int):
        for n in range(start, 200, 4):
            tenants.pool(targets[n]).run(ask)

    watcher = threading.Thread(target=watch)
    watcher.start()
    visitors = [threading.Thread(target=visit, args=(start,)) for start in range(4)]
    for thread in visitors:
        thread.start()
    for thread in visitors:
        thread.join()
    stop.set()
    watcher.join()
    assert 10 <= max(peak) <= 20
    clock.now += db.CLOSE_AFTER_SECONDS + 1
    tenants.pool(targets[0])
    wait_for_backends(empty_url, 0)
    tenants.close()


def test_the_least_recently_used_pool_makes_room(empty_url):
    tenants = db.Tenants(pools_max=2, pool_size=1, limits=db.Limits())
    targets = [
        db.Target(conninfo=make_conninfo(empty_url, options=f"-c my.tenant={n}")) for n in range(3)
    ]
    pools = [tenants.pool(target) for target in targets]
    assert tenants.pool(targets[0]) is not pools[0]
    assert tenants.pool(targets[2]) is pools[2]


def test_an_evicted_pool_closes_the_connection_that_comes_back(empty_url):
    tenants = db.Tenants(pools_max=1, pool_size=1, limits=db.Limits())
    pool = tenants.pool(db.Target(conninfo=empty_url))
    pool.run(lambda _: pool.retire())
    wait_for_backends(empty_url, 0)


def test_a_pool_in_use_does_not_make_room(empty_url):
    tenants = db.Tenants(pools_max=1, pool_size=1, limits=db.Limits())
    first, second = (
        db.Target(conninfo=make_conninfo(empty_url, options=f"-c my.tenant={n}")) for n in range(2)
    )
    pool = tenants.pool(first)
    pool.run(lambda _: tenants.pool(second))
    assert tenants.pool(first) is pool
    tenants.close()


def test_closing_the_tenants_closes_what_is_in_use_when_it_comes_back(empty_url):
    tenants = db.Tenants(pools_max=1, pool_size=1, limits=db.Limits())
    tenants.pool(db.Target(conninfo=empty_url)).run(lambda _: tenants.close())
    wait_for_backends(empty_url, 0)


def test_the_server_closes_what_a_frozen_instance_cannot(empty_url, make_pool):
    shown = make_pool(empty_url).run(lambda c: c.execute("show idle_session_timeout").fetchone())
    assert shown == ("10min",)


def test_who_waits_is_served_in_the_order_of_coming(empty_url, make_pool):
    pool = make_pool(empty_url, limits=db.Limits(wait=5))
    served: list[int] = []

    def work(n: int):
        def run(connection):
            served.append(n)
            nap(connection)

        return run

    threads = []
    for n in range(5):
        threads.append(threading.Thread(target=lambda n=n: pool.run(work(n))))
        threads[-1].start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert served == [0, 1, 2, 3, 4]


def test_a_busy_database_that_moves_is_waited_for(empty_url, make_pool):
    pool = make_pool(empty_url, size=2, limits=db.Limits(wait=0.9))
    assert at_once(6, lambda: pool.run(nap)) == {"done": 6}


def test_too_many_at_once_are_turned_away_and_the_others_served(empty_url, make_pool):
    pool = make_pool(empty_url, size=2, limits=db.Limits(wait=0.5))
    ends = at_once(8, lambda: pool.run(nap))
    assert ends["done"] >= 4
    assert ends["done"] + ends["DatabaseBusyError"] == 8
    assert pool.run(ask) == (1,), "and nobody afterwards"


# A tenant that hangs


def test_a_backend_that_hangs_costs_one_timeout_and_then_fails_at_once(own_server, make_pool):
    pool = make_pool(own_server.url(), limits=SHORT)
    pool.run(ask)
    (backend,) = backends(own_server.url())
    os.kill(backend, signal.SIGSTOP)
    try:
        slow = seconds(lambda: pool.run(ask), raises=DatabaseTimeoutError)
        quick = seconds(lambda: pool.run(ask), raises=DatabaseTimeoutError)
    finally:
        os.kill(backend, signal.SIGCONT)
    assert slow < 2 * SHORT.patience
    assert quick < 0.1


def test_a_server_that_hangs_holds_its_size_for_one_timeout_and_then_one_at_a_time(
    proxy, empty_url, make_pool
):
    clock = Clock()
    pool = make_pool(make_conninfo(empty_url, port=proxy.port), size=2, limits=SHORT, clock=clock)
    at_once(2, lambda: pool.run(nap))
    proxy.fall_silent()
    ends = at_once(12, lambda: pool.run(ask))
    assert ends == {"DatabaseTimeoutError": 2, "DatabaseBusyError": 10}
    assert seconds(lambda: pool.run(ask), raises=DatabaseTimeoutError) < 0.1
    before = proxy.accepted
    clock.now += db.FAIL_FAST_SECONDS
    took = seconds(lambda: at_once(12, lambda: pool.run(ask)))
    assert proxy.accepted == before + 1, "one finds out for all"
    assert took < SHORT.connect + 1
    proxy.recover()
    clock.now += db.FAIL_FAST_SECONDS
    assert pool.run(ask) == (1,)
    assert at_once(2, lambda: pool.run(ask)) == {"done": 2}


def test_newcomers_do_not_wait_where_nothing_moves(proxy, empty_url, make_pool):
    pool = make_pool(make_conninfo(empty_url, port=proxy.port), limits=SHORT)
    pool.run(ask)
    proxy.fall_silent()
    holder = threading.Thread(target=at_once, args=(1, lambda: pool.run(ask)))
    holder.start()
    time.sleep(SHORT.wait + 0.1)
    assert seconds(lambda: pool.run(ask), raises=DatabaseBusyError) < 0.1
    holder.join()


def test_other_tenants_are_unharmed_by_one_that_hangs(proxy, empty_url):
    tenants = db.Tenants(pools_max=5, pool_size=2, limits=db.Limits())
    well = db.Target(conninfo=empty_url)
    sick = db.Target(conninfo=make_conninfo(empty_url, port=proxy.port))

    def served(*, beside: int) -> int:
        """How often one thread is served by the well tenant in a second and a half."""
        stop, count = threading.Event(), 0

        def hang():
            while not stop.is_set():
                try:
                    tenants.pool(sick).run(ask)
                except db.UNREACHABLE:
                    time.sleep(0.01)  # what recording the failure takes, at least

        threads = [threading.Thread(target=hang) for _ in range(beside)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            tenants.pool(well).run(ask)
            count += 1
        stop.set()
        for thread in threads:
            thread.join()
        return count

    tenants.pool(sick).run(ask)
    alone = served(beside=0)
    proxy.fall_silent()
    assert served(beside=8) > alone / 3
    tenants.close()


# What is wrong


def fault(conninfo: str, limits: db.Limits = SHORT) -> psycopg.Error:
    with pytest.raises(psycopg.OperationalError) as caught:
        db.connect(db.Target(conninfo=conninfo), limits)
    return caught.value


def test_a_refused_connect_fails_fast_with_the_same_error(empty_url, make_pool):
    pool = make_pool(make_conninfo(empty_url, port=1))
    messages = set()
    for _ in range(3):
        with pytest.raises(psycopg.OperationalError) as caught:
            pool.run(ask)
        messages.add(str(caught.value))
    assert len(messages) == 1
    assert "refused" in messages.pop()


def test_a_connect_that_failed_is_tried_again_after_a_while(empty_url, make_pool):
    clock = Clock()
    pool = make_pool(make_conninfo(empty_url, port=1), clock=clock)
    for _ in range(2):
        with pytest.raises(psycopg.OperationalError, match="refused"):
            pool.run(ask)
        pool.target = db.Target(conninfo=empty_url)
    clock.now += db.FAIL_FAST_SECONDS
    assert pool.run(ask) == (1,)


@pytest.mark.parametrize(
    ("change", "kind", "code", "verdict"),
    [
        ({"password": "wrong"}, pg.InvalidPassword, "28P01", "permanent"),
        ({"user": "nobody_at_all"}, pg.InvalidPassword, "28P01", "permanent"),
        ({"dbname": "nowhere"}, db.DatabaseNotFoundError, "3D000", "permanent"),
        ({"port": 1}, psycopg.OperationalError, "connection_failed", "transient"),
        ({"host": "no-such-host.invalid"}, db.HostNotFoundError, "host_not_found", "transient"),
        ({"sslmode": "require"}, db.TlsError, "tls_failed", "permanent"),
        (
            {"sslmode": "verify-full", "sslrootcert": "/none"},
            db.TlsError,
            "tls_failed",
            "permanent",
        ),
    ],
)
def test_a_failed_connect_says_what_is_wrong(empty_url, change, kind, code, verdict):
    error = fault(make_conninfo(empty_url, **change))
    assert type(error) is kind
    assert (db.code(error), db.classify(error)) == (code, verdict)
    assert db.is_connection_failure(error)
    assert type(error)(str(error)).sqlstate == error.sqlstate, "raised again it says the same"


def test_a_server_that_is_full_is_transient_and_named(own_server):
    with psycopg.connect(own_server.url(), autocommit=True) as probe:
        probe.execute("create role few login password 'few' connection limit 0")
    error = fault(make_conninfo(own_server.url(), user="few", password="few"))
    assert (type(error), db.code(error)) == (pg.TooManyConnections, "53300")
    assert db.classify(error) == "transient"
    assert db.is_connection_failure(error)


def test_a_server_that_is_full_still_serves_over_the_connections_there_are(own_server, make_pool):
    with psycopg.connect(own_server.url(), autocommit=True) as probe:
        probe.execute("create role one login password 'one' connection limit 1")
    pool = make_pool(make_conninfo(own_server.url(), user="one", password="one"), size=2)
    pool.run(ask)
    assert at_once(2, lambda: pool.run(nap)) == {"done": 1, "TooManyConnections": 1}
    assert pool.run(ask) == (1,)
    pool._trip(pg.TooManyConnections("by somebody who came back later than the connection did"))
    assert pool.run(ask) == (1,)


def test_a_pool_that_was_evicted_before_its_use_serves_and_keeps_nothing(empty_url, make_pool):
    pool = make_pool(empty_url)
    pool.retire()
    assert pool.run(ask) == (1,)
    wait_for_backends(empty_url, 0)


def test_a_server_that_shuts_down_is_transient(own_server, make_pool):
    pool = make_pool(own_server.url(), limits=db.Limits())
    pool.run(ask)
    with psycopg.connect(own_server.url()):
        os.kill(own_server.pid or 0, signal.SIGTERM)  # waits for those who are connected
        time.sleep(0.3)
        error = fault(own_server.url())
        assert (type(error), db.code(error)) == (pg.CannotConnectNow, "57P03")
        assert db.classify(error) == "transient"
        assert db.is_connection_failure(error)
    pool.close()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("FATAL:  sorry, too many clients already", "53300"),
        ("FATAL:  remaining connection slots are reserved for roles with SUPERUSER", "53300"),
        ("FATAL:  Max client connections reached", "53300"),
        ("FATAL:  MaxClientsInSessionMode: max clients reached - in Session mode", "53300"),
        ("FATAL:  no more connections allowed (max_client_conn)", "53300"),
        ("FATAL:  the database system is starting up", "57P03"),
        ("FATAL:  the database system is in recovery mode", "57P03"),
        ("FATAL:  the database system is shutting down", "57P03"),
        ("FATAL:  the database system is not yet accepting connections", "57P03"),
        ('FATAL:  database "x" is not currently accepting connections', "57P03"),
        ("FATAL:  Tenant or user not found", "28000"),
        ('FATAL:  no pg_hba.conf entry for host "10.0.0.1", user "x", no encryption', "28000"),
        ("fe_sendauth: no password supplied", "28P01"),
        ("FATAL:  SASL authentication failed", "28P01"),
        ("SSL error: certificate verify failed", "tls_failed"),
        ('server certificate for "a" does not match host name "b"', "tls_failed"),
        ("SSL SYSCALL error: Connection reset by peer", "connection_failed"),
        ("SSL error: unexpected eof while reading", "connection_failed"),
        ("connection timeout expired", "connection_failed"),
    ],
)
def test_the_words_of_servers_and_poolers_have_a_code(words, code):
    target = db.Target(conninfo="host=127.0.0.1")
    explained = db._explained(psycopg.OperationalError(f"connection failed: {words}"), target)
    assert db.code(explained) == code
    assert db.is_connection_failure(explained)
    assert db.classify(explained) == ("permanent" if code[:2] in ("28", "tl") else "transient")


def test_a_server_that_accepts_and_never_greets_is_a_failed_connect_in_time(make_pool):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        conninfo = f"host=127.0.0.1 port={silent.getsockname()[1]} user=x dbname=x"
        pool = make_pool(conninfo, limits=SHORT)
        assert seconds(lambda: pool.run(ask), raises=pg.ConnectionTimeout) < SHORT.connect + 1
        assert seconds(lambda: pool.run(ask), raises=pg.ConnectionTimeout) < 0.1


def test_other_faults_are_no_connection_failures():
    assert not db.is_connection_failure(DatabaseBusyError("x"))
    assert not db.is_connection_failure(pg.QueryCanceled("x"))
    assert not db.is_connection_failure(StorageConfigurationError("x"))
    assert db.is_connection_failure(DatabaseTimeoutError("x"))
    assert db.classify(pg.DeadlockDetected("x")) == "transient"
    assert db.classify(pg.InvalidTextRepresentation("x")) == "permanent"


# TLS, and hosts with IPv6 only


@pytest.mark.parametrize(
    ("conninfo", "sslmode"),
    [
        ("host=db.example.com", "require"),
        ("postgresql://u:p@db.example.com/x", "require"),
        ("host=127.0.0.1", "prefer"),
        ("host=localhost", "prefer"),
        ("host=::1", "prefer"),
        ("host=/run/postgresql", "prefer"),
        ("dbname=x", "prefer"),
        ("host=localhost,db.example.com", "require"),
        ("host=localhost.example.com", "require"),
        ("host=127.0.0.1.example.com", "require"),
        ("host=localhost hostaddr=10.0.0.1", "require"),
        ("host=10.0.0.1 sslmode=", "require"),
        ("host=db.example.com sslmode=disable", "disable"),
        ("host=localhost sslmode=verify-full", "verify-full"),
    ],
)
def test_tls_is_required_wherever_a_connection_leaves_the_machine(conninfo, sslmode):
    assert conninfo_to_dict(db.with_tls(conninfo))["sslmode"] == sslmode


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("host=x sslmode=verify-full", "system"),
        ("host=x sslmode=verify-full sslrootcert=/ca.pem", "/ca.pem"),
        ("host=x sslmode=require", None),
    ],
)
def test_full_verification_without_a_ca_trusts_the_systems(given, kept):
    assert conninfo_to_dict(db.with_tls(given)).get("sslrootcert") == kept


def resolve_to(monkeypatch, *families: socket.AddressFamily) -> None:
    found = [(family, socket.SOCK_STREAM, 6, "", ("::", 0)) for family in families]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


def test_an_ipv6_only_host_out_of_reach_is_named_as_such_in_time(monkeypatch):
    resolve_to(monkeypatch, socket.AF_INET6)
    # 100::/64 is the block that leads nowhere. The address spares libpq the look-up of the name.
    conninfo = "host=db.abcdefgh.supabase.co hostaddr=100::1 user=x dbname=x"
    started = time.monotonic()
    error = fault(conninfo)
    assert time.monotonic() - started < SHORT.connect + 1
    assert (type(error), db.code(error)) == (db.Ipv6OnlyError, "ipv6_only")
    assert db.classify(error) == "permanent"
    assert db.is_connection_failure(error)
    assert "IPv4 pooler" in redact.message(error)


def test_an_ipv6_only_host_that_is_reached_is_mentioned_when_a_shop_is_connected(
    empty_url, monkeypatch
):
    resolve_to(monkeypatch, socket.AF_INET6)
    url = make_conninfo(empty_url, host="db.example.com", hostaddr="127.0.0.1")
    (hint,) = shops._provision(db.Target(conninfo=url))[1]
    assert "IPv6 addresses only" in hint


def test_a_host_with_several_addresses_takes_no_more_time(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))] * 4
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        port = silent.getsockname()[1]
        started = time.monotonic()
        assert type(fault(f"host=several.example.com port={port} user=x")) is pg.ConnectionTimeout
        assert time.monotonic() - started < SHORT.connect + 1


def test_the_next_address_is_tried_when_one_refuses(empty_url, monkeypatch):
    found = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 0)) for ip in ("127.0.0.9", "127.0.0.1")
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    target = db.Target(conninfo=make_conninfo(empty_url, host="several.example.com"))
    with db.connect(target, SHORT) as connection:
        assert ask(connection) == (1,)


def test_a_host_with_an_ipv4_address_is_not_blamed_on_ipv6(monkeypatch):
    resolve_to(monkeypatch, socket.AF_INET6, socket.AF_INET)
    assert type(fault("host=db.example.com hostaddr=100::1 user=x dbname=x")) is not (
        db.Ipv6OnlyError
    )
    assert not db.is_ipv6_only("host=db.example.com")


def test_who_answers_over_ipv6_but_refuses_is_not_blamed_on_ipv6(monkeypatch):
    resolve_to(monkeypatch, socket.AF_INET6)
    error = fault("host=db.example.com hostaddr=127.0.0.1 port=1 user=x dbname=x")
    assert db.code(error) == "connection_failed"
