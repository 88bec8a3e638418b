"""What our Pub/Sub stand-in and Google's emulator both do, as the official client sees it."""

import itertools
import json
import threading
from base64 import b64decode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from google.cloud.pubsub_v1 import SubscriberClient
from google.pubsub_v1 import PublisherClient
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport
from google.pubsub_v1.types import DeadLetterPolicy, PubsubMessage, PushConfig

from dev.pubsub_grpc import PubSubServer
from tests import google_pubsub

_numbers = itertools.count(1)
HANG_GUARD_SECONDS = 60


@pytest.fixture(scope="module", params=["ours", "google"])
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "ours":
        with PubSubServer() as server:
            yield server.host
    elif missing := google_pubsub.missing():
        pytest.skip(missing)
    else:
        with google_pubsub.running(tmp_path_factory.mktemp("google")) as host:
            yield host


@pytest.fixture
def publisher(host: str) -> Iterator[PublisherClient]:
    with PublisherClient(
        transport=PublisherGrpcTransport(channel=grpc.insecure_channel(host))
    ) as client:
        yield client


@pytest.fixture
def subscriber(host: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[SubscriberClient]:
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", host)
    with SubscriberClient() as client:
        yield client


@pytest.fixture
def topic(publisher: PublisherClient) -> str:
    return publisher.create_topic(name=f"projects/demo/topics/topic{next(_numbers)}").name


def subscribe(subscriber: SubscriberClient, topic: str, **more: Any) -> str:
    name = f"projects/demo/subscriptions/subscription{next(_numbers)}"
    request = {"name": name, "topic": topic, "ack_deadline_seconds": 10} | more
    return subscriber.create_subscription(request=request).name


def publish(publisher: PublisherClient, topic: str, *messages: PubsubMessage) -> list[str]:
    return list(publisher.publish(topic=topic, messages=list(messages)).message_ids)


def pulled(subscriber: SubscriberClient, subscription: str) -> Any:
    """The next message, however long it takes."""
    while True:
        answer = subscriber.pull(subscription=subscription, max_messages=1)
        if answer.received_messages:
            return answer.received_messages[0]


def test_what_is_published_is_pulled_as_it_was(publisher, subscriber, topic) -> None:
    subscription = subscribe(subscriber, topic)
    (sent,) = publish(publisher, topic, PubsubMessage(data=b"\x00\xff", attributes={"a": "b"}))
    received = pulled(subscriber, subscription)
    assert received.message.message_id == sent
    assert received.message.data == b"\x00\xff"
    assert dict(received.message.attributes) == {"a": "b"}
    assert received.message.publish_time


def test_what_is_acknowledged_is_gone_and_what_is_given_back_comes_again(
    publisher, subscriber, topic
) -> None:
    subscription = subscribe(subscriber, topic)
    publish(publisher, topic, PubsubMessage(data=b"first"))
    first = pulled(subscriber, subscription)
    subscriber.modify_ack_deadline(
        subscription=subscription, ack_ids=[first.ack_id], ack_deadline_seconds=0
    )
    again = pulled(subscriber, subscription)
    assert again.message.message_id == first.message.message_id
    subscriber.acknowledge(subscription=subscription, ack_ids=[again.ack_id])
    publish(publisher, topic, PubsubMessage(data=b"second"))
    assert pulled(subscriber, subscription).message.data == b"second"


def test_a_push_is_wrapped_and_a_success_acknowledges_it(publisher, subscriber, topic) -> None:
    bodies: SimpleQueue[dict[str, Any]] = SimpleQueue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            bodies.put(json.loads(body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = PushConfig(push_endpoint=f"http://127.0.0.1:{server.server_port}/")
        subscription = subscribe(subscriber, topic, push_config=endpoint)
        sent = publish(publisher, topic, *(PubsubMessage(data=b"%d" % n) for n in range(3)))
        came = [bodies.get(timeout=HANG_GUARD_SECONDS) for _ in sent]
        subscriber.delete_subscription(subscription=subscription)
        server.shutdown()
    assert {body["message"]["messageId"] for body in came} == set(sent)
    assert {b64decode(body["message"]["data"]) for body in came} == {b"0", b"1", b"2"}
    assert {body["subscription"] for body in came} == {subscription}


def test_a_streaming_pull_gets_all_messages_and_a_refused_one_again(
    publisher, subscriber, topic
) -> None:
    subscription = subscribe(subscriber, topic)
    came: SimpleQueue[bytes] = SimpleQueue()
    refused = threading.Event()

    def take(message: Any) -> None:
        came.put(message.data)
        if message.data == b"7" and not refused.is_set():
            refused.set()
            message.nack()
        else:
            message.ack()

    publish(publisher, topic, *(PubsubMessage(data=b"%d" % n) for n in range(20)))
    pull = subscriber.subscribe(subscription, take, await_callbacks_on_shutdown=True)
    data = sorted(came.get(timeout=HANG_GUARD_SECONDS) for _ in range(21))
    pull.cancel()
    pull.result(HANG_GUARD_SECONDS)
    assert data == sorted([*(b"%d" % n for n in range(20)), b"7"])


def test_a_message_that_is_always_refused_becomes_a_dead_letter(
    publisher, subscriber, topic
) -> None:
    graveyard = publisher.create_topic(name=f"{topic}-dead").name
    dead = subscribe(subscriber, graveyard)
    policy = DeadLetterPolicy(dead_letter_topic=graveyard, max_delivery_attempts=5)
    subscription = subscribe(subscriber, topic, dead_letter_policy=policy)
    pull = subscriber.subscribe(subscription, lambda message: message.nack())
    publish(publisher, topic, PubsubMessage(data=b"lost", attributes={"a": "b"}))
    received = pulled(subscriber, dead)
    pull.cancel()
    pull.result(HANG_GUARD_SECONDS)
    assert received.message.data == b"lost"
    attributes = dict(received.message.attributes)
    assert attributes["a"] == "b"
    assert attributes["CloudPubSubDeadLetterSourceSubscription"] == subscription.split("/")[-1]
