"""Poolers: nothing that a transaction pooler forbids, and one round trip an event all the same."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from psycopg import errors as pg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cli import shops
from dev.postgres import Server
from shared import db, migrate, store
from shared.errors import EventCollisionError
from shared.model import LedgerOutcome
from shared.parse import parse
from tests.integration.test_commands import run
from tests.proxy import Proxy
from tests.world import ORGANIZATION, envelope

PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
needs_pgbouncer = pytest.mark.skipif(
    PGBOUNCER is None, reason="needs pgbouncer (Debian: apt-get install pgbouncer)"
)
# What a session keeps, and a transaction pooler therefore loses or mixes up.
FORBIDDEN = (
    "prepare ",
    "deallocate",
    "listen ",
    "unlisten",
    "discard",
    "create temp",
    "declare ",
    "pg_advisory_lock",
    "pg_try_advisory_lock",
)


@pytest.fixture(params=["transaction", "session"])
def pooler_mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def pooled(
    tmp_path_factory: pytest.TempPathFactory, postgres: Server, tenant_url: str, pooler_mode: str
) -> Iterator[db.Target]:
    """The tenant database behind a PgBouncer with its strict defaults."""
    folder = tmp_path_factory.mktemp("pgbouncer")
    parts = conninfo_to_dict(tenant_url)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (folder / "users").write_text(f'"{parts["user"]}" "{parts["password"]}"\n')
    (folder / "pgbouncer.ini").write_text(
        f"""[databases]
* = host=127.0.0.1 port={postgres.port}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = scram-sha-256
auth_file = {folder / "users"}
pool_mode = {pooler_mode}
default_pool_size = 2
max_client_conn = 20
logfile = {folder / "log"}
"""
    )
    options = {}
    if os.geteuid() == 0:  # it refuses to run as root
        nobody = pwd.getpwnam("nobody")
        options = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        for path in (folder, *folder.iterdir()):
            os.chown(path, nobody.pw_uid, nobody.pw_gid)
        for parent in folder.parents:
            if parent.stat().st_uid == 0 and "pytest" in str(parent):
                parent.chmod(parent.stat().st_mode | 0o011)
    process = subprocess.Popen(
        [str(PGBOUNCER), str(folder / "pgbouncer.ini")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        **options,
    )
    url = make_conninfo(tenant_url, port=port)
    try:
        _await(url, process, folder / "log")
        yield db.Target(conninfo=url, pooler_mode=pooler_mode)  # type: ignore[arg-type]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)


def _await(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            return psycopg.connect(url).close()
        except psycopg.OperationalError:
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(log.read_text() if log.exists() else "pgbouncer did not start")
            time.sleep(0.05)


def write(pool: db.Pool, sent):
    return store.store(pool, ORGANIZATION, sent, parse(sent))


@needs_pgbouncer
def test_events_duplicates_and_collisions_go_through_a_pooler(pooled, tenant_url):
    pools = [db.Pool(pooled, size=2) for _ in range(2)]
    sent = [envelope({"id": n}) for n in range(12)]
    for n, event in enumerate(sent):
        assert write(pools[n % 2], event).ledger is LedgerOutcome.INSERTED
    assert write(pools[0], sent[0]).ledger is LedgerOutcome.DUPLICATE
    with pytest.raises(EventCollisionError):
        write(pools[1], replace(envelope({"id": 99}), event_id=sent[0].event_id))
    with psycopg.connect(tenant_url) as probe:
        assert probe.execute("select count(*) from shopify_events").fetchone() == (12,)
    for pool in pools:
        pool.close()


@needs_pgbouncer
def test_a_dropped_table_heals_through_a_pooler(pooled, tenant_url):
    pool = db.Pool(pooled, size=1)
    with psycopg.connect(tenant_url, autocommit=True) as probe:
        probe.execute("drop table shopify_orders, shopify_schema_version")
    assert write(pool, envelope({"id": 1})).ledger is LedgerOutcome.INSERTED
    with db.connect(pooled, migrate.LIMITS) as connection:
        assert migrate.pending(connection, migrate.Series.TENANT) == []
        assert migrate.drift(connection, migrate.Series.TENANT).differences == []
    pool.close()


@needs_pgbouncer
def test_a_pooler_that_nobody_mentioned_is_noticed_when_a_shop_is_connected(pooled, tenant_url):
    hints = {
        mode: shops._provision(db.Target(conninfo=url, pooler_mode=mode))[1]
        for mode, url in (("none", pooled.conninfo), (pooled.pooler_mode, pooled.conninfo))
    }
    assert "--pooler-mode transaction" in hints["none"][0]
    assert hints[pooled.pooler_mode] == []
    assert shops._provision(db.Target(conninfo=tenant_url))[1] == []


@needs_pgbouncer
def test_limits_hold_through_a_pooler_and_the_next_client_has_none_of_them(pooled):
    pool = db.Pool(pooled, size=1, limits=db.Limits(statement=0.5))
    pool.run(lambda c: c.execute("select 1"))
    with pytest.raises(pg.QueryCanceled):
        pool.run(lambda c: c.execute("select pg_sleep(5)"))

    def in_a_transaction(connection):
        with connection.transaction():
            return connection.execute("show statement_timeout").fetchone()

    assert pool.run(in_a_transaction) == ("500ms",)
    assert pool.run(lambda c: c.execute("show jit").fetchone()) == ("off",)
    pool.close()
    with psycopg.connect(pooled.conninfo, prepare_threshold=None) as stranger:
        assert stranger.execute("show statement_timeout").fetchone() == ("0",)


@needs_pgbouncer
@pytest.mark.parametrize("pooler_mode", ["transaction"])
def test_more_clients_than_server_connections_share_them(pooled, postgres):
    pools = [db.Pool(pooled, size=1) for _ in range(10)]
    for round_ in range(3):
        for n, pool in enumerate(pools):
            write(pool, envelope({"id": 100 * round_ + n}))
    with psycopg.connect(postgres.url()) as probe:
        row = probe.execute(
            "select count(*) from pg_stat_activity where datname = %s",
            [conninfo_to_dict(pooled.conninfo)["dbname"]],
        ).fetchone()
    assert row
    assert row[0] <= 2
    for pool in pools:
        pool.close()


@needs_pgbouncer
@pytest.mark.parametrize("pooler_mode", ["transaction"])
def test_a_pooler_that_is_full_says_so(pooled):
    with ExitStack() as held:
        for _ in range(20):
            held.enter_context(db.connect(pooled, db.Limits()))
        with pytest.raises(pg.TooManyConnections) as caught:
            db.connect(pooled, db.Limits())
    assert (db.code(caught.value), db.classify(caught.value)) == ("53300", "transient")
    assert db.is_connection_failure(caught.value)


@needs_pgbouncer
def test_a_pooler_whose_server_ended_the_connection_is_met_with_a_fresh_one(pooled, tenant_url):
    pool = db.Pool(pooled, size=1)
    pool.run(lambda c: c.execute("select 1"))
    with psycopg.connect(tenant_url, autocommit=True) as probe:
        probe.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
    assert write(pool, envelope({"id": 1})).ledger is LedgerOutcome.INSERTED
    pool.close()


# Without a pooler


def test_supabases_transaction_pooler_is_not_taken_for_a_database(world):
    url = "postgresql://u:p@aws-0-eu-central-1.pooler.supabase.com:6543/postgres"
    asked = ("connect_shop", "--shop", "x.myshopify.com", "--organization", "o")
    refused = run(world.environ, *asked, "--database-url", url)
    assert refused.returncode == 1
    assert "--pooler-mode transaction" in refused.stderr


@pytest.fixture
def statements(postgres: Server, tenant_url: str) -> Callable[[], str]:
    """What the server was told over connections to the tenant database that are opened from now."""
    with psycopg.connect(postgres.url(), autocommit=True) as probe:
        name = sql.Identifier(str(conninfo_to_dict(tenant_url)["dbname"]))
        probe.execute(sql.SQL("alter database {} set log_statement = 'all'").format(name))
    start = postgres.log_path.stat().st_size
    return lambda: postgres.log_path.read_bytes()[start:].decode().lower()


def test_what_a_transaction_pooler_forbids_is_not_said(tenant_url, statements):
    target = db.Target(conninfo=tenant_url, pooler_mode="transaction")
    pool = db.Pool(target, size=1)
    sent = [envelope({"id": n}) for n in range(8)]
    for event in [*sent, sent[0]]:
        write(pool, event)
    store.store(pool, ORGANIZATION, sent[0], parse(sent[0]), dry_run=True)
    with db.connect(target, migrate.LIMITS) as connection:
        migrate.apply_again(connection, migrate.Series.TENANT)
    prepared = pool.run(
        lambda c: c.execute("select count(*) from pg_prepared_statements").fetchone()
    )
    pool.close()
    assert prepared == (0,)
    said = statements()
    assert "insert into shopify_events" in said
    assert [words for words in FORBIDDEN if words in said] == []
    assert "execute _pg" not in said, "a named statement"
    settings = [line for line in said.splitlines() if line.lstrip().startswith("set ")]
    assert settings == []


def test_behind_a_transaction_pooler_an_event_is_one_round_trip(postgres, tenant_url):
    with Proxy(postgres.port) as proxy:
        conninfo = make_conninfo(tenant_url, port=proxy.port)
        costs = {}
        for mode in ("none", "transaction"):
            pool = db.Pool(db.Target(conninfo=conninfo, pooler_mode=mode), size=1)
            for n in range(8):  # without a pooler the statement gets prepared meanwhile
                write(pool, envelope({"id": n}))
            before = proxy.round_trips
            for n in range(10):
                write(pool, envelope({"id": n}))
            costs[mode] = proxy.round_trips - before
            pool.close()
    assert costs == {"none": 10, "transaction": 10}


def test_behind_a_transaction_pooler_each_statement_is_its_own_transaction(tenant_url):
    pool = db.Pool(db.Target(conninfo=tenant_url, pooler_mode="transaction"), size=1)

    def work(connection):
        first = connection.execute("select txid_current()").fetchone()
        second = connection.execute("select txid_current()").fetchone()
        return first != second, connection.execute("show statement_timeout").fetchone()

    assert pool.run(work) == (True, ("3s",))
    with pytest.raises(pg.UndefinedTable):
        pool.run(lambda c: c.execute("select * from nothing"))
    assert pool.run(lambda c: c.execute("select 1").fetchone()) == (1,)
    pool.close()
