"""The Pub/Sub stand-in, as the official client and a real HTTP endpoint see it."""

import base64
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import pytest
from cloudevents.http import from_http
from google.api_core import exceptions as google
from google.api_core.retry import Retry
from google.cloud import pubsub_v1
from google.cloud.pubsub_v1.subscriber.exceptions import AcknowledgeError
from google.pubsub_v1 import PublisherClient, SubscriberClient
from google.pubsub_v1.types import DeadLetterPolicy, PubsubMessage, PushConfig, RetryPolicy

from dev.pubsub_grpc import PubSubServer
from dev.pubsub_queue import backoff_seconds
from tests.builders_pubsub import EVENT_TYPE, binary_event, structured_event, wrapped_push

TOPIC = "projects/demo/topics/events"
DEAD_TOPIC = "projects/demo/topics/dead"
SUBSCRIPTION = "projects/demo/subscriptions/events-push"
DEAD_SUBSCRIPTION = "projects/demo/subscriptions/dead"
TINY = RetryPolicy(
    minimum_backoff=timedelta(milliseconds=50), maximum_backoff=timedelta(seconds=10)
)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[PubSubServer]:
    with PubSubServer() as server:
        monkeypatch.setenv("PUBSUB_EMULATOR_HOST", server.host)
        yield server


@pytest.fixture
def publisher(server: PubSubServer) -> Iterator[PublisherClient]:
    with PublisherClient() as client:
        client.create_topic(name=TOPIC)
        yield client


@pytest.fixture
def subscriber(server: PubSubServer) -> Iterator[SubscriberClient]:
    with SubscriberClient() as client:
        yield client


@dataclass
class Endpoint:
    """A real HTTP endpoint that answers as told and remembers what came."""

    answer: Callable[[dict[str, Any]], int] = lambda _: 204
    bodies: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    requests: list[BaseHTTPRequestHandler] = field(default_factory=list)
    closed: int = 0  # connections
    url: str = ""

    def data(self) -> list[bytes]:
        return [base64.b64decode(body["message"]["data"]) for body in self.bodies]


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            endpoint.times.append(time.monotonic())
            endpoint.bodies.append(body)
            endpoint.requests.append(self)
            self.send_response(endpoint.answer(body))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    class HTTPServer(ThreadingHTTPServer):
        def shutdown_request(self, request: Any) -> None:
            super().shutdown_request(request)
            endpoint.closed += 1

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        http.block_on_close = False
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        endpoint.url = f"http://127.0.0.1:{http.server_port}/push?token=t"
        yield endpoint
        http.shutdown()
        thread.join()


def subscribe(client: SubscriberClient, url: str = "", **more: Any) -> None:
    config: dict[str, Any] = {"name": SUBSCRIPTION, "topic": TOPIC}
    client.create_subscription(
        request=config | {"push_config": PushConfig(push_endpoint=url)} | more
    )


def message(data: bytes = b"{}", **more: Any) -> PubsubMessage:
    return PubsubMessage(data=data, **more)


def eventually(condition: Callable[[], object], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def is_drained(server: PubSubServer) -> Callable[[], bool]:
    return lambda: server.broker.depth(SUBSCRIPTION) == 0


# Topics and subscriptions


def test_topics(publisher: PublisherClient) -> None:
    assert publisher.get_topic(topic=TOPIC).name == TOPIC
    publisher.create_topic(name="projects/other/topics/events")
    assert [topic.name for topic in publisher.list_topics(project="projects/demo")] == [TOPIC]
    with pytest.raises(google.AlreadyExists):
        publisher.create_topic(name=TOPIC)
    publisher.delete_topic(topic=TOPIC)
    for gone in (publisher.get_topic, publisher.delete_topic):
        with pytest.raises(google.NotFound):
            gone(topic=TOPIC)
    with pytest.raises(google.NotFound):
        publisher.publish(topic=TOPIC, messages=[message()])


def test_subscriptions(publisher: PublisherClient, subscriber: SubscriberClient) -> None:
    with pytest.raises(google.NotFound):
        subscribe(subscriber, topic="projects/demo/topics/other")
    subscribe(subscriber)
    found = subscriber.get_subscription(subscription=SUBSCRIPTION)
    assert (found.name, found.topic, found.ack_deadline_seconds) == (SUBSCRIPTION, TOPIC, 10)
    listed = subscriber.list_subscriptions(project="projects/demo")
    assert [subscription.name for subscription in listed] == [SUBSCRIPTION]
    with pytest.raises(google.AlreadyExists):
        subscribe(subscriber)
    subscriber.delete_subscription(subscription=SUBSCRIPTION)
    for gone in (subscriber.get_subscription, subscriber.delete_subscription):
        with pytest.raises(google.NotFound):
            gone(subscription=SUBSCRIPTION)
    with pytest.raises(google.NotFound):
        subscriber.pull(subscription=SUBSCRIPTION, max_messages=1)


def test_a_subscription_outlives_its_topic(
    publisher: PublisherClient, subscriber: SubscriberClient
) -> None:
    subscribe(subscriber)
    publisher.publish(topic=TOPIC, messages=[message(b"kept")])
    publisher.delete_topic(topic=TOPIC)
    assert subscriber.get_subscription(subscription=SUBSCRIPTION).topic == "_deleted-topic_"
    pulled = subscriber.pull(subscription=SUBSCRIPTION, max_messages=1)
    assert pulled.received_messages[0].message.data == b"kept"


@pytest.mark.parametrize("name", ["events", "projects/demo/subscriptions/x", "projects//topics/x"])
def test_a_malformed_name_is_refused(publisher: PublisherClient, name: str) -> None:
    with pytest.raises(google.InvalidArgument):
        publisher.create_topic(name=name)


@pytest.mark.parametrize(
    "unsupported", [{"filter": "attributes.a"}, {"push_config": {"no_wrapper": {}}}]
)
def test_what_the_stand_in_lacks_it_refuses(
    publisher: PublisherClient, subscriber: SubscriberClient, unsupported: dict[str, Any]
) -> None:
    with pytest.raises(google.MethodNotImplemented):
        subscribe(subscriber, **unsupported)


@pytest.mark.parametrize(
    "wrong",
    [
        {"push_config": {"push_endpoint": "https://example.com"}},
        {"dead_letter_policy": {"max_delivery_attempts": 4}},
    ],
)
def test_a_wrong_subscription_is_refused(
    publisher: PublisherClient, subscriber: SubscriberClient, wrong: dict[str, Any]
) -> None:
    with pytest.raises(google.InvalidArgument):
        subscribe(subscriber, **wrong)


# Publish


@pytest.mark.parametrize(
    "wrong",
    [
        message(b""),
        message(b"x" * 10_000_000),
        message(attributes={"k" * 257: "v"}),
        message(attributes={"k": "v" * 1025}),
        message(attributes={"": "v"}),
        message(attributes={f"k{n}": "v" for n in range(101)}),
        message(ordering_key="k" * 1025),
    ],
    ids=["empty", "10 MB", "key", "value", "no key", "101 attributes", "ordering key"],
)
def test_a_wrong_message_is_refused(publisher: PublisherClient, wrong: PubsubMessage) -> None:
    with pytest.raises(google.InvalidArgument):
        publisher.publish(topic=TOPIC, messages=[message(), wrong])


def test_the_largest_of_everything_arrives(
    server: PubSubServer,
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    endpoint: Endpoint,
) -> None:
    subscribe(subscriber, endpoint.url)
    attributes = {f"{n:0256}": "v" * 1024 for n in range(100)}
    publisher.publish(topic=TOPIC, messages=[message(b"x" * 9_800_000, attributes=attributes)])
    assert eventually(is_drained(server))
    assert endpoint.data() == [b"x" * 9_800_000]
    assert endpoint.bodies[0]["message"]["attributes"] == attributes


def test_the_batching_client_publishes(
    server: PubSubServer,
    publisher: PublisherClient,
    endpoint: Endpoint,
    subscriber: SubscriberClient,
) -> None:
    subscribe(subscriber, endpoint.url)
    batching = pubsub_v1.PublisherClient()
    futures = [batching.publish(TOPIC, b"%d" % n, number=str(n)) for n in range(50)]
    ids = [future.result(timeout=20) for future in futures]
    batching.stop()
    batching.transport.close()
    assert len(set(ids)) == 50
    assert all(int(a) < int(b) for a, b in pairwise(ids))
    assert eventually(is_drained(server))
    assert sorted(endpoint.data()) == sorted(b"%d" % n for n in range(50))


def test_every_subscription_gets_the_message(
    publisher: PublisherClient, subscriber: SubscriberClient
) -> None:
    names = [SUBSCRIPTION, DEAD_SUBSCRIPTION]
    for name in names:
        subscribe(subscriber, name=name)
    publisher.publish(topic=TOPIC, messages=[message(b"both")])
    pulled = [subscriber.pull(subscription=name, max_messages=9) for name in names]
    assert [p.received_messages[0].message.data for p in pulled] == [b"both", b"both"]


def test_a_refused_publish_is_unavailable_and_leaves_nothing(
    server: PubSubServer, publisher: PublisherClient, subscriber: SubscriberClient
) -> None:
    subscribe(subscriber)
    server.broker.refuse_publishes(True)
    with pytest.raises(google.ServiceUnavailable):
        publisher.publish(topic=TOPIC, messages=[message()], retry=None)
    assert server.broker.depth(SUBSCRIPTION) == 0
    server.broker.refuse_publishes(False)
    publisher.publish(topic=TOPIC, messages=[message()], retry=None)
    assert server.broker.depth(SUBSCRIPTION) == 1


def test_the_client_itself_retries_a_refused_publish(
    server: PubSubServer, publisher: PublisherClient
) -> None:
    server.broker.refuse_publishes(True)
    threading.Timer(0.2, server.broker.refuse_publishes, (False,)).start()
    retry = Retry(initial=0.02, timeout=20)
    assert publisher.publish(topic=TOPIC, messages=[message()], retry=retry).message_ids


def test_a_hanging_publish_times_out_and_may_yet_happen(
    server: PubSubServer, publisher: PublisherClient, subscriber: SubscriberClient
) -> None:
    subscribe(subscriber)
    server.broker.hang_publishes(0.5)
    with pytest.raises(google.DeadlineExceeded):
        publisher.publish(topic=TOPIC, messages=[message()], retry=None, timeout=0.1)
    assert eventually(lambda: server.broker.depth(SUBSCRIPTION) == 1)


# Pull


def test_pull_and_acknowledge(
    server: PubSubServer, publisher: PublisherClient, subscriber: SubscriberClient
) -> None:
    subscribe(subscriber)
    before = datetime.now(UTC) - timedelta(milliseconds=1)
    sent = [message(b"1", attributes={"a": "b"}), message(b"2"), message(b"3")]
    ids = publisher.publish(topic=TOPIC, messages=sent).message_ids
    pulled = subscriber.pull(subscription=SUBSCRIPTION, max_messages=2).received_messages
    assert [received.message.message_id for received in pulled] == ids[:2]
    assert dict(pulled[0].message.attributes) == {"a": "b"}
    assert before <= pulled[0].message.publish_time <= datetime.now(UTC)
    assert pulled[0].delivery_attempt == 0
    subscriber.acknowledge(subscription=SUBSCRIPTION, ack_ids=[r.ack_id for r in pulled])
    assert server.broker.depth(SUBSCRIPTION) == 1


def test_a_pull_of_nothing_is_empty(
    publisher: PublisherClient, subscriber: SubscriberClient
) -> None:
    subscribe(subscriber)
    assert not subscriber.pull(subscription=SUBSCRIPTION, max_messages=1).received_messages


def test_a_waiting_pull_gets_what_is_published_meanwhile(
    publisher: PublisherClient, subscriber: SubscriberClient
) -> None:
    subscribe(subscriber)
    late = threading.Timer(0.1, publisher.publish, kwargs={"topic": TOPIC, "messages": [message()]})
    late.start()
    assert subscriber.pull(subscription=SUBSCRIPTION, max_messages=1).received_messages
    late.join()


def test_a_message_comes_back_when_its_deadline_passes_or_is_set_to_zero(
    server: PubSubServer, publisher: PublisherClient, subscriber: SubscriberClient
) -> None:
    subscribe(subscriber, ack_deadline_seconds=1)
    publisher.publish(topic=TOPIC, messages=[message()])
    ack_ids = []
    while len(ack_ids) < 3:
        for received in subscriber.pull(
            subscription=SUBSCRIPTION, max_messages=9
        ).received_messages:
            ack_ids.append(received.ack_id)
            if len(ack_ids) == 2:
                subscriber.modify_ack_deadline(
                    subscription=SUBSCRIPTION, ack_ids=[received.ack_id], ack_deadline_seconds=0
                )
    subscriber.acknowledge(subscription=SUBSCRIPTION, ack_ids=ack_ids[:2])
    assert server.broker.depth(SUBSCRIPTION) == 1, "an expired id acknowledges nothing"
    subscriber.acknowledge(subscription=SUBSCRIPTION, ack_ids=ack_ids[2:])
    assert server.broker.depth(SUBSCRIPTION) == 0


def test_an_extended_deadline_holds(
    publisher: PublisherClient, subscriber: SubscriberClient
) -> None:
    subscribe(subscriber, ack_deadline_seconds=1)
    publisher.publish(topic=TOPIC, messages=[message()])
    (received,) = subscriber.pull(subscription=SUBSCRIPTION, max_messages=1).received_messages
    subscriber.modify_ack_deadline(
        subscription=SUBSCRIPTION, ack_ids=[received.ack_id], ack_deadline_seconds=600
    )
    for _ in range(2):  # a pull waits for a second
        assert not subscriber.pull(subscription=SUBSCRIPTION, max_messages=1).received_messages


# Push


def test_a_stream_holds_no_more_than_it_asked_for(
    server: PubSubServer, publisher: PublisherClient, subscriber: SubscriberClient
) -> None:
    subscribe(subscriber)
    publisher.publish(topic=TOPIC, messages=[message(b"%d" % n) for n in range(10)])
    came: SimpleQueue[Any] = SimpleQueue()
    flow = pubsub_v1.types.FlowControl(max_messages=3)
    with pubsub_v1.SubscriberClient() as client:
        pull = client.subscribe(SUBSCRIPTION, came.put, flow_control=flow)
        held = [came.get(timeout=20) for _ in range(3)]
        others = {lease.message.data for lease in server.broker.pull(SUBSCRIPTION, 10, wait=0)}
        assert others | {each.data for each in held} == {b"%d" % n for n in range(10)}
        pull.cancel()
        pull.result(20)


def test_room_in_a_stream_is_filled_at_once(
    server: PubSubServer, publisher: PublisherClient, subscriber: SubscriberClient
) -> None:
    subscribe(subscriber)
    publisher.publish(topic=TOPIC, messages=[message(b"%d" % n) for n in range(10)])
    flow = pubsub_v1.types.FlowControl(max_messages=1)
    with pubsub_v1.SubscriberClient() as client:
        pull = client.subscribe(SUBSCRIPTION, lambda each: each.ack(), flow_control=flow)
        assert eventually(is_drained(server))
        pull.cancel()
        pull.result(20)


def test_what_a_lost_stream_held_comes_again_after_its_deadline(
    server: PubSubServer, publisher: PublisherClient, subscriber: SubscriberClient
) -> None:
    subscribe(subscriber)
    publisher.publish(topic=TOPIC, messages=[message(b"held")])
    came: SimpleQueue[Any] = SimpleQueue()
    with pubsub_v1.SubscriberClient() as client:
        pull = client.subscribe(SUBSCRIPTION, came.put)
        assert came.get(timeout=20).data == b"held"
        pull.cancel()
        pull.result(20)
    assert server.broker.pull(SUBSCRIPTION, 1, wait=0) == []
    server.broker.end_leases(SUBSCRIPTION)
    assert server.broker.pull(SUBSCRIPTION, 1, wait=20)[0].message.data == b"held"


@pytest.mark.parametrize("exactly_once", [False, True])
def test_where_delivery_is_exactly_once_an_acknowledgement_that_is_too_late_is_an_error(
    server: PubSubServer,
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    exactly_once: bool,
) -> None:
    subscribe(subscriber, enable_exactly_once_delivery=exactly_once)
    publisher.publish(topic=TOPIC, messages=[message(b"once")])
    came: SimpleQueue[Any] = SimpleQueue()
    with pubsub_v1.SubscriberClient() as client:
        pull = client.subscribe(SUBSCRIPTION, came.put)
        held = came.get(timeout=20)
        server.broker.end_leases(SUBSCRIPTION)
        refusal = pytest.raises(AcknowledgeError) if exactly_once else nullcontext()
        with refusal:
            held.ack_with_response().result(20)
        pull.cancel()
        pull.result(20)


def test_a_stream_ends_with_its_subscription_and_a_pushing_one_has_none(
    server: PubSubServer,
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    endpoint: Endpoint,
) -> None:
    subscribe(subscriber)
    with pubsub_v1.SubscriberClient() as client:
        pull = client.subscribe(SUBSCRIPTION, lambda each: each.ack())
        publisher.publish(topic=TOPIC, messages=[message()])
        assert eventually(is_drained(server))
        subscriber.delete_subscription(subscription=SUBSCRIPTION)
        with pytest.raises(google.NotFound):
            pull.result(20)
        subscribe(subscriber, endpoint.url)
        with pytest.raises(google.FailedPrecondition):
            client.subscribe(SUBSCRIPTION, lambda each: each.ack()).result(20)


def test_the_body_of_a_push(
    server: PubSubServer,
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    endpoint: Endpoint,
) -> None:
    subscribe(subscriber, endpoint.url)
    sent = message(b"\x00\xff", attributes={"X-Shopify-Topic": "orders/create"})
    (message_id,) = publisher.publish(topic=TOPIC, messages=[sent]).message_ids
    assert eventually(is_drained(server))
    (body,) = endpoint.bodies
    published = body["message"]["publishTime"]
    assert body == {
        "message": {
            "attributes": {"X-Shopify-Topic": "orders/create"},
            "data": "AP8=",
            "messageId": message_id,
            "message_id": message_id,
            "publishTime": published,
            "publish_time": published,
        },
        "subscription": SUBSCRIPTION,
    }
    assert published.endswith("Z")
    assert datetime.fromisoformat(published) <= datetime.now(UTC)
    (request,) = endpoint.requests
    assert request.path == "/push?token=t"
    assert request.headers["Content-Type"] == "application/json"


def test_what_is_empty_is_left_out_of_a_push(
    server: PubSubServer,
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    endpoint: Endpoint,
) -> None:
    subscribe(subscriber, endpoint.url)
    sent = [PubsubMessage(attributes={"a": "b"}), message(b"x", ordering_key="k")]
    publisher.publish(topic=TOPIC, messages=sent)
    assert eventually(is_drained(server))
    by_id = sorted(endpoint.bodies, key=lambda body: body["message"]["messageId"])
    times_and_ids = {"messageId", "message_id", "publishTime", "publish_time"}
    assert set(by_id[0]["message"]) == times_and_ids | {"attributes"}
    assert set(by_id[1]["message"]) == times_and_ids | {"data", "orderingKey"}


@pytest.mark.parametrize("status", [200, 201, 202, 204])
def test_a_success_is_an_ack(
    server: PubSubServer,
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    endpoint: Endpoint,
    status: int,
) -> None:
    endpoint.answer = lambda _: status
    subscribe(subscriber, endpoint.url)
    publisher.publish(topic=TOPIC, messages=[message()])
    assert eventually(is_drained(server))
    assert len(endpoint.bodies) == 1


@pytest.mark.parametrize("status", [203, 302, 400, 429, 503])
def test_anything_else_is_redelivered_until_it_succeeds(
    server: PubSubServer,
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    endpoint: Endpoint,
    status: int,
) -> None:
    endpoint.answer = lambda _: status if len(endpoint.bodies) < 3 else 204
    subscribe(subscriber, endpoint.url)
    publisher.publish(topic=TOPIC, messages=[message()])
    assert eventually(is_drained(server))
    assert len(endpoint.bodies) == 3
    assert endpoint.bodies[0] == endpoint.bodies[2], "no deliveryAttempt without dead letters"


def test_the_gaps_between_redeliveries_grow(
    publisher: PublisherClient, subscriber: SubscriberClient, endpoint: Endpoint
) -> None:
    endpoint.answer = lambda _: 503
    policy = RetryPolicy(
        minimum_backoff=timedelta(milliseconds=100), maximum_backoff=timedelta(seconds=10)
    )
    subscribe(subscriber, endpoint.url, retry_policy=policy)
    publisher.publish(topic=TOPIC, messages=[message()])
    assert eventually(lambda: len(endpoint.times) >= 4)
    first, second, third = (later - earlier for earlier, later in pairwise(endpoint.times[:4]))
    assert first < second < third


def test_the_backoff_of_a_policy_ends_at_its_maximum() -> None:
    default = [backoff_seconds(RetryPolicy(), attempts) for attempts in (1, 2, 6, 7, 9_999)]
    assert default == [10, 20, 320, 600, 600]
    assert backoff_seconds(TINY, 3) == pytest.approx(0.2)
    assert 0.1 <= backoff_seconds(None, 1) <= backoff_seconds(None, 9_999) <= 1


def test_a_slow_endpoint_is_cut_off_at_the_ack_deadline(
    server: PubSubServer,
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    endpoint: Endpoint,
) -> None:
    release = threading.Event()
    endpoint.answer = lambda _: 204 if len(endpoint.bodies) > 8 or release.wait(60) else 500
    subscribe(subscriber, endpoint.url, ack_deadline_seconds=1)
    publisher.publish(topic=TOPIC, messages=[message()] * 8)  # one for every worker
    assert eventually(is_drained(server))
    assert len(endpoint.bodies) == 16
    release.set()


def test_a_refused_connection_is_tried_again(
    server: PubSubServer,
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    endpoint: Endpoint,
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as closed:
        nobody = f"http://127.0.0.1:{closed.server_port}/"
    subscribe(subscriber, nobody, dead_letter_policy=_dead_letters(publisher, subscriber))
    publisher.publish(topic=TOPIC, messages=[message()])
    assert eventually(is_drained(server))
    assert server.broker.depth(DEAD_SUBSCRIPTION) == 1


def test_pushes_run_side_by_side_over_kept_connections(
    server: PubSubServer,
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    endpoint: Endpoint,
) -> None:
    together = threading.Barrier(8)

    def answer(body: dict[str, Any]) -> int:
        together.wait(20)
        return 204

    endpoint.answer = answer
    subscribe(subscriber, endpoint.url)
    publisher.publish(topic=TOPIC, messages=[message()] * 24)
    assert eventually(is_drained(server))
    assert len({request.client_address for request in endpoint.requests}) == 8


def test_a_connection_that_the_endpoint_closed_costs_no_attempt(
    server: PubSubServer,
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    endpoint: Endpoint,
) -> None:
    def answer(body: dict[str, Any]) -> int:
        endpoint.requests[-1].close_connection = True  # without saying so in a header
        return 204

    endpoint.answer = answer
    subscribe(subscriber, endpoint.url, dead_letter_policy=_dead_letters(publisher, subscriber))
    for count in range(1, 25):  # three for each worker
        publisher.publish(topic=TOPIC, messages=[message()])
        assert eventually(is_drained(server))
        assert eventually(lambda count=count: endpoint.closed == count)
    assert [body["deliveryAttempt"] for body in endpoint.bodies] == [1] * 24


def test_an_ordering_key_keeps_its_order_over_a_nack_and_holds_up_no_other(
    server: PubSubServer,
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    endpoint: Endpoint,
) -> None:
    def answer(body: dict[str, Any]) -> int:
        came = endpoint.data()
        waits = came.count(b"a0") < 3 or b"b4" not in came
        return 503 if waits and body["message"]["orderingKey"] == "a" else 204

    endpoint.answer = answer
    subscribe(subscriber, endpoint.url, enable_message_ordering=True, retry_policy=TINY)
    sent = [message(b"%c%d" % (key, n), ordering_key=chr(key)) for n in range(5) for key in b"ab"]
    publisher.publish(topic=TOPIC, messages=sent)
    assert eventually(is_drained(server))
    came = endpoint.data()
    assert [d for d in came if d in (b"a1", b"a2", b"a3", b"a4")] == [b"a1", b"a2", b"a3", b"a4"]
    assert b"a0" not in came[came.index(b"a1") :]
    assert [d for d in came if d.startswith(b"b")] == [b"b0", b"b1", b"b2", b"b3", b"b4"]


def test_a_message_is_buried_after_its_last_attempt(
    server: PubSubServer,
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    endpoint: Endpoint,
) -> None:
    endpoint.answer = lambda _: 503
    policy = _dead_letters(publisher, subscriber)
    subscribe(subscriber, endpoint.url, dead_letter_policy=policy, retry_policy=TINY)
    publisher.publish(topic=TOPIC, messages=[message(b"lost", attributes={"a": "b"})])
    assert eventually(is_drained(server))
    assert [body["deliveryAttempt"] for body in endpoint.bodies] == [1, 2, 3, 4, 5]
    (dead,) = subscriber.pull(subscription=DEAD_SUBSCRIPTION, max_messages=9).received_messages
    assert dead.message.data == b"lost"
    assert dict(dead.message.attributes) == {
        "a": "b",
        "CloudPubSubDeadLetterSourceDeliveryCount": "5",
        "CloudPubSubDeadLetterSourceSubscription": "events-push",
        "CloudPubSubDeadLetterSourceSubscriptionProject": "demo",
        "CloudPubSubDeadLetterSourceTopicPublishTime": endpoint.bodies[0]["message"]["publishTime"],
    }


def test_without_its_dead_letter_topic_a_message_stays(
    server: PubSubServer,
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    endpoint: Endpoint,
) -> None:
    endpoint.answer = lambda _: 503 if len(endpoint.bodies) < 7 else 204
    policy = DeadLetterPolicy(dead_letter_topic=DEAD_TOPIC, max_delivery_attempts=5)
    subscribe(subscriber, endpoint.url, dead_letter_policy=policy, retry_policy=TINY)
    publisher.publish(topic=TOPIC, messages=[message()])
    assert eventually(is_drained(server))
    assert len(endpoint.bodies) == 7


def test_paused_pushes_wait(
    server: PubSubServer,
    publisher: PublisherClient,
    subscriber: SubscriberClient,
    endpoint: Endpoint,
) -> None:
    subscribe(subscriber, endpoint.url)
    server.broker.pause_pushes(True)
    publisher.publish(topic=TOPIC, messages=[message()] * 3)
    time.sleep(0.1)  # time enough to push, were it not paused
    assert (server.broker.depth(SUBSCRIPTION), endpoint.bodies) == (3, [])
    server.broker.pause_pushes(False)
    assert eventually(is_drained(server))
    assert len(endpoint.bodies) == 3


# The end


def test_close_leaves_no_thread_and_waits_for_nobody(
    monkeypatch: pytest.MonkeyPatch, endpoint: Endpoint
) -> None:
    release = threading.Event()
    endpoint.answer = lambda _: 204 if release.wait(600) else 500
    before = set(threading.enumerate())
    server = PubSubServer()
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", server.host)
    with PublisherClient() as publisher, SubscriberClient() as subscriber:
        publisher.create_topic(name=TOPIC)
        subscribe(subscriber, endpoint.url, ack_deadline_seconds=600)
        publisher.publish(topic=TOPIC, messages=[message()])
        assert eventually(lambda: endpoint.bodies)
        server.broker.hang_publishes(600)
        with pytest.raises(google.DeadlineExceeded):
            publisher.publish(topic=TOPIC, messages=[message()], retry=None, timeout=0.1)
        closing = threading.Thread(target=server.close, daemon=True)
        closing.start()
        assert eventually(lambda: not closing.is_alive())
        with pytest.raises(google.ServiceUnavailable):
            publisher.get_topic(topic=TOPIC, retry=None)
    release.set()

    def left() -> list[str]:
        names = [thread.name for thread in set(threading.enumerate()) - before]
        return [name for name in names if "process_request" not in name]  # the endpoint's own

    assert eventually(lambda: not left()), left()


def test_a_taken_port_is_an_error(server: PubSubServer) -> None:
    with pytest.raises(RuntimeError):
        PubSubServer(port=int(server.host.split(":")[1]))


# The builders, as the CloudEvents library reads them


@pytest.mark.parametrize("build", [binary_event, structured_event])
def test_built_cloud_events_are_what_they_say(build: Callable[..., Any]) -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
    sent = message(b"x", message_id="7", publish_time=now, attributes={"a": "b"})
    event = from_http(*build(sent, subscription=SUBSCRIPTION, topic=TOPIC))
    assert event["type"] == EVENT_TYPE
    assert event["source"] == f"//pubsub.googleapis.com/{TOPIC}"
    assert (event["id"], event["time"]) == ("7", "2026-01-02T03:04:05.678Z")
    _, wrapped = wrapped_push(sent, subscription=SUBSCRIPTION)
    assert event.get_data() == json.loads(wrapped)


def _dead_letters(publisher: PublisherClient, subscriber: SubscriberClient) -> DeadLetterPolicy:
    publisher.create_topic(name=DEAD_TOPIC)
    subscribe(subscriber, name=DEAD_SUBSCRIPTION, topic=DEAD_TOPIC)
    return DeadLetterPolicy(dead_letter_topic=DEAD_TOPIC, max_delivery_attempts=5)
