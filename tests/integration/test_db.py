"""Pools: bounded in number and in time, quick to say what is wrong, quick to recover."""

import os
import signal
import time

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from dev.postgres import Server
from shared import db


@pytest.fixture
def own_server(tmp_path):
    with Server(tmp_path / "server", durable=False) as server:
        yield server


def test_a_tenant_that_hangs_costs_one_timeout_and_then_fails_at_once(own_server):
    limits = db.Limits(statement=0.3, grace=0.2)
    pool = db.Pool(db.Target(conninfo=own_server.url()), size=1, limits=limits)
    pool.run(lambda c: c.execute("select 1"))
    with psycopg.connect(own_server.url()) as probe:
        (backend,) = probe.execute(
            "select pid from pg_stat_activity where application_name = 'hookledger'"
        ).fetchone() or (0,)
    os.kill(backend, signal.SIGSTOP)
    try:
        costs = []
        for _ in range(2):
            started = time.monotonic()
            with pytest.raises(db.UNREACHABLE):
                pool.run(lambda c: c.execute("select 1"))
            costs.append(time.monotonic() - started)
    finally:
        os.kill(backend, signal.SIGCONT)
    assert costs[1] < costs[0] / 5
    assert costs[0] < 10 * limits.patience


def test_a_refused_connect_fails_fast_with_the_same_error(own_server):
    pool = db.Pool(db.Target(conninfo=make_conninfo(own_server.url(), port=1)), size=1)
    messages = set()
    for _ in range(3):
        with pytest.raises(psycopg.OperationalError) as caught:
            pool.run(lambda c: c.execute("select 1"))
        messages.add(str(caught.value))
    assert len(messages) == 1
    assert "refused" in messages.pop()


def test_a_process_keeps_no_more_pools_than_it_may(world):
    tenants = db.Tenants(pools_max=2, pool_size=1, limits=db.Limits())
    pools = [
        tenants.pool(db.Target(conninfo=make_conninfo(world.tenant_url, application_name=name)))
        for name in ("a", "b", "c")
    ]
    for pool in pools:
        pool.run(lambda c: c.execute("select 1"))
    again = tenants.pool(pools[0].target)
    assert again is not pools[0], "the least recently used one made room"
    assert tenants.pool(pools[2].target) is pools[2]
    tenants.close()
    for pool in pools:
        pool.close()
