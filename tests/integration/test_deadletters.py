"""dead_letters: what Pub/Sub gave up on is listed, and sent again without ever being lost."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.pubsub_v1.types import (
    DeadLetterPolicy,
    PubsubMessage,
    RetryPolicy,
    Subscription,
    Topic,
)

from dev.pubsub_grpc import PubSubServer
from shared.deadletters import DeadLetters
from tests.functions.rig import environment, eventually

ROOT = Path(__file__).parents[2]
TOPIC = "projects/demo/topics/events"
DEAD_TOPIC = "projects/demo/topics/dead"
SUBSCRIPTION = "projects/demo/subscriptions/events"
DEAD = "projects/demo/subscriptions/dead"
HANG_GUARD_SECONDS = 60


@pytest.fixture
def server() -> Iterator[PubSubServer]:
    """With a subscription to the topic that takes whatever is redriven."""
    with PubSubServer() as server:
        for topic in (TOPIC, DEAD_TOPIC):
            server.broker.create_topic(Topic(name=topic))
        server.broker.create_subscription(Subscription(name=DEAD, topic=DEAD_TOPIC))
        server.broker.create_subscription(
            Subscription(
                name=SUBSCRIPTION,
                topic=TOPIC,
                retry_policy=RetryPolicy(minimum_backoff={"nanos": 1}, maximum_backoff={}),
                dead_letter_policy=DeadLetterPolicy(
                    dead_letter_topic=DEAD_TOPIC, max_delivery_attempts=5
                ),
            )
        )
        yield server


def bury(server: PubSubServer, *names: str) -> None:
    """Publishes messages and refuses them until they are dead letters."""
    for name in names:
        attributes = {"X-Shopify-Webhook-Id": name, "X-Shopify-Topic": "orders/create", "a": "b"}
        message = PubsubMessage(data=f"{name}\x00".encode(), attributes=attributes)
        server.broker.publish(TOPIC, [message])
    before = server.broker.depth(DEAD)
    while server.broker.depth(DEAD) < before + len(names):
        for lease in server.broker.pull(SUBSCRIPTION, 100, wait=1):
            server.broker.modify_ack_deadline(SUBSCRIPTION, [lease.ack_id], 0)


def arrived(server: PubSubServer) -> list[PubsubMessage]:
    return [lease.message for lease in server.broker.pull(SUBSCRIPTION, 100, wait=0)]


def letters(server: PubSubServer) -> DeadLetters:
    return DeadLetters(DEAD, TOPIC, emulator_host=server.host)


def command(server: PubSubServer, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "manage.py"), "dead_letters", *words],
        env=settings(server),
        capture_output=True,
        text=True,
        check=False,
        **more,
    )


def settings(server: PubSubServer) -> dict[str, str]:
    return environment(
        {
            "APP_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none",
            "PUBSUB_EMULATOR_HOST": server.host,
            "PUBSUB_TOPIC": TOPIC,
            "PUBSUB_DEAD_LETTER_SUBSCRIPTION": DEAD,
            "COLUMNS": "80",
        }
    )


def test_what_is_looked_at_stays_and_is_there_for_the_next_who_looks(server: PubSubServer) -> None:
    bury(server, *(f"event-{n}" for n in range(12)))
    for limit in (12, 100, 3):
        found = letters(server).look(limit)
        assert len({each.event_id for each in found}) == min(limit, 12)
    assert {each.attempts for each in found} == {5}
    assert all(each.published_at and each.size == len(each.event_id) + 1 for each in found)


def test_a_redriven_message_has_the_bytes_and_attributes_of_the_first(
    server: PubSubServer,
) -> None:
    bury(server, "event")
    assert [each.event_id for each in letters(server).redrive(10)] == ["event"]
    (message,) = arrived(server)
    assert message.data == b"event\x00"
    assert dict(message.attributes) == {
        "X-Shopify-Webhook-Id": "event",
        "X-Shopify-Topic": "orders/create",
        "a": "b",
    }
    assert server.broker.depth(DEAD) == 0


def test_no_more_are_sent_than_asked_for(server: PubSubServer) -> None:
    bury(server, *(f"event-{n}" for n in range(12)))
    assert len(list(letters(server).redrive(11))) == 11
    assert server.broker.depth(DEAD) == 1


def test_who_stops_half_way_holds_nothing_back(server: PubSubServer) -> None:
    bury(server, *(f"event-{n}" for n in range(5)))
    sending = letters(server).redrive(5)
    next(sending)
    sending.close()
    assert server.broker.out(DEAD) == 0
    assert server.broker.depth(DEAD) == 4


def test_what_pubsub_does_not_confirm_stays(server: PubSubServer) -> None:
    bury(server, "event")
    server.broker.delete_topic(TOPIC)
    done = command(server, "redrive", "--yes", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout) == {"redriven": 0, "topic": TOPIC}
    assert "does not exist" in done.stderr
    assert server.broker.depth(DEAD) == 1


def test_who_is_killed_before_the_confirmation_has_lost_nothing(server: PubSubServer) -> None:
    bury(server, "event")
    server.broker.hang_publishes(HANG_GUARD_SECONDS)
    words = [sys.executable, str(ROOT / "manage.py"), "dead_letters", "redrive", "--yes"]
    with subprocess.Popen(words, env=settings(server), stderr=subprocess.DEVNULL) as process:
        eventually(lambda: server.broker.out(DEAD), HANG_GUARD_SECONDS)
        process.send_signal(signal.SIGKILL)
    assert server.broker.depth(DEAD) == 1


def test_who_is_killed_after_the_confirmation_has_sent_it_and_will_again(
    server: PubSubServer,
) -> None:
    bury(server, "event")
    worker = "from tests.integration.test_deadletters import work; work()"
    done = subprocess.run(
        [sys.executable, "-c", worker], cwd=ROOT, env=settings(server), check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert server.broker.depth(DEAD) == 1
    server.broker.end_leases(DEAD)
    assert len(list(letters(server).redrive(10))) == 1
    assert [message.data for message in arrived(server)] == [b"event\x00"] * 2


def work() -> None:
    """A redrive that kills itself before it acknowledges."""
    from shared import pubsub  # noqa: PLC0415 - the worker's own

    def killed(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    pubsub._Subscriber.acknowledge = killed  # type: ignore[method-assign]
    host = os.environ["PUBSUB_EMULATOR_HOST"]
    list(DeadLetters(DEAD, TOPIC, emulator_host=host).redrive(10))


def test_the_list_fits_a_terminal_and_shows_no_payload(server: PubSubServer) -> None:
    bury(server, "event-1", "event-2")
    listed = command(server, "list")
    assert listed.returncode == 0
    assert "orders/create" in listed.stdout
    assert max(map(len, listed.stdout.splitlines())) <= 80
    (first, _) = json.loads(command(server, "list", "--json").stdout)
    assert set(first) == {
        *("message_id", "topic", "shop_domain", "event_id", "published_at", "attempts", "size")
    }


def test_a_dry_run_and_a_no_change_nothing(server: PubSubServer) -> None:
    bury(server, "event")
    assert command(server, "redrive", "--dry-run").returncode == 0
    assert command(server, "redrive", input="n\n").returncode == 1
    assert server.broker.depth(DEAD) == 1
    assert arrived(server) == []
    sent = command(server, "redrive", input="y\n")
    assert sent.stdout.strip() == "1 sent again."
    assert command(server, "list").stdout == "There are no dead letters.\n"
