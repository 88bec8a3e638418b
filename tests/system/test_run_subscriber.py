"""run_subscriber as a process of its own: events land, SIGTERM and SIGKILL lose nothing."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from google.pubsub_v1.types import PubsubMessage, Subscription, Topic

from dev.pubsub_grpc import PubSubServer
from tests.functions.rig import environment, eventually
from tests.world import SHOP, World

ROOT = Path(__file__).parents[2]
TOPIC = "projects/demo/topics/events"
SUBSCRIPTION = "projects/demo/subscriptions/events-pull"
HANG_GUARD_SECONDS = 60


@pytest.fixture
def server() -> Iterator[PubSubServer]:
    with PubSubServer() as server:
        server.broker.create_topic(Topic(name=TOPIC))
        server.broker.create_subscription(Subscription(name=SUBSCRIPTION, topic=TOPIC))
        yield server


@contextmanager
def running(world: World, server: PubSubServer) -> Iterator[subprocess.Popen[str]]:
    """The process, which is gone afterwards."""
    settings = world.environ | {
        "PUBSUB_EMULATOR_HOST": server.host,
        "PUBSUB_SUBSCRIPTION": SUBSCRIPTION,
        "TENANT_STATEMENT_TIMEOUT_SECONDS": "30",
    }
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "manage.py"), "run_subscriber", "--threads", "2", "--json"],
        env=environment(settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def publish(server: PubSubServer, count: int) -> None:
    for n in range(count):
        attributes = {
            "X-Shopify-Topic": "orders/create",
            "X-Shopify-Shop-Domain": SHOP,
            "X-Shopify-Webhook-Id": f"event-{n}",
        }
        server.broker.publish(TOPIC, [PubsubMessage(data=b'{"id": 1}', attributes=attributes)])


def stored(world: World) -> int:
    return world.tenant("select count(*)::int as n from shopify_events")[0]["n"]


@contextmanager
def held_up(world: World) -> Iterator[Callable[[], bool]]:
    """The tenant's event ledger is locked; yields whether anybody waits for it."""
    waiting = "select 1 from pg_locks where not granted and locktype = 'relation'"
    with psycopg.connect(world.tenant_url) as connection:
        connection.execute("lock table shopify_events in access exclusive mode")
        yield lambda: bool(world.tenant(waiting))


def test_events_land_and_sigterm_ends_it_with_the_count(world: World, server: PubSubServer) -> None:
    publish(server, 30)
    with running(world, server) as process:
        eventually(lambda: server.broker.depth(SUBSCRIPTION) == 0, HANG_GUARD_SECONDS)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=HANG_GUARD_SECONDS)
    assert process.returncode == 0
    assert json.loads(out) == {"acknowledged": 30, "refused": 0}
    assert [json.loads(line)["message"] for line in err.splitlines() if line.startswith("{")][
        ::31
    ] == ["subscriber.started", "subscriber.stopped"]
    assert stored(world) == 30


def test_sigterm_lets_started_messages_finish_and_loses_none(
    world: World, server: PubSubServer
) -> None:
    publish(server, 30)
    with running(world, server) as process:
        with held_up(world) as somebody_waits:
            eventually(somebody_waits, HANG_GUARD_SECONDS)
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=HANG_GUARD_SECONDS)
        assert process.returncode == 0
    assert stored(world) + len(world.failed_events()) >= 1
    assert stored(world) + len(world.failed_events()) == 30 - server.broker.depth(SUBSCRIPTION)
    server.broker.end_leases(SUBSCRIPTION)
    _everything_lands(world, server)


def test_what_a_killed_process_had_is_delivered_again(world: World, server: PubSubServer) -> None:
    publish(server, 30)
    with running(world, server) as process, held_up(world) as somebody_waits:
        eventually(somebody_waits, HANG_GUARD_SECONDS)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(HANG_GUARD_SECONDS)
    assert server.broker.depth(SUBSCRIPTION) == 30
    server.broker.end_leases(SUBSCRIPTION)
    _everything_lands(world, server)


def test_without_its_subscription_the_command_says_so(world: World) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), "run_subscriber"],
        env=environment(world.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "PUBSUB_SUBSCRIPTION is missing" in done.stderr


def _everything_lands(world: World, server: PubSubServer) -> None:
    with running(world, server):
        eventually(lambda: server.broker.depth(SUBSCRIPTION) == 0, HANG_GUARD_SECONDS)
    events: set[Any] = {
        row["event_id"] for row in world.tenant("select event_id from shopify_events")
    }
    events |= {row["event_id"] for row in world.failed_events()}
    assert events == {f"event-{n}" for n in range(30)}
