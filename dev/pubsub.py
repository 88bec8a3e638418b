"""A Pub/Sub stand-in within the process: topics, subscriptions, push, backoff, dead letters.

`dev.pubsub_grpc` serves it to the official client. Departs from Pub/Sub: nothing survives a
restart, pushes carry no OIDC token, and acknowledgement deadlines and backoffs may be as short as
a test wants.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Self

from google.api_core import exceptions as google
from google.pubsub_v1.types import PubsubMessage, StreamingPullRequest, Subscription, Topic
from google.rpc.error_details_pb2 import ErrorInfo

from dev.pubsub_push import Pusher
from dev.pubsub_queue import Lease, Queue
from dev.pubsub_stream import Stream

DEFAULT_ACK_DEADLINE_SECONDS: Final = 10
MAX_BYTES: Final = 10_000_000  # of a message, and of a request
MAX_MESSAGES: Final = 1000  # in a request
DELETED_TOPIC: Final = "_deleted-topic_"


class Broker:
    """All topics and subscriptions, by full name. What it refuses is a `google.api_core` error."""

    def __init__(self) -> None:
        self._lock: Final = threading.RLock()
        self._topics: Final[dict[str, Topic]] = {}
        self._queues: Final[dict[str, Queue]] = {}
        self._pushers: Final[dict[str, Pusher]] = {}
        # Ids go on rising over restarts, as whoever remembers some would expect.
        self._ids: Final = itertools.count(time.time_ns() // 1000)
        self._refusing = False
        self._hang_seconds = 0.0
        self._closed: Final = threading.Event()

    def create_topic(self, topic: Topic) -> Topic:
        with self._lock:
            _require_new(topic.name, self._topics, kind="topics")
            self._topics[topic.name] = topic
        return topic

    def get_topic(self, name: str) -> Topic:
        return _require(name, self._topics)

    def list_topics(self, project: str) -> list[Topic]:
        with self._lock:
            return [topic for name, topic in self._topics.items() if name.startswith(f"{project}/")]

    def delete_topic(self, name: str) -> None:
        """Its subscriptions stay, with what they hold."""
        with self._lock:
            _require(name, self._topics)
            del self._topics[name]
            for queue in self._queues.values():
                if queue.config.topic == name:
                    queue.config.topic = DELETED_TOPIC

    def publish(self, topic: str, messages: Iterable[PubsubMessage]) -> list[str]:
        """Hand the messages to every subscription of the topic; returns their new ids."""
        messages = list(messages)
        _check_messages(messages)
        self._closed.wait(self._hang_seconds)
        if self._refusing or self._closed.is_set():
            raise google.ServiceUnavailable("publishing is refused")
        with self._lock:
            _require(topic, self._topics)
            return [self._distribute(topic, message) for message in messages]

    def create_subscription(self, subscription: Subscription) -> Subscription:
        """With a push endpoint its pushing starts at once."""
        _check_subscription(subscription)
        subscription.ack_deadline_seconds = (
            subscription.ack_deadline_seconds or DEFAULT_ACK_DEADLINE_SECONDS
        )
        name = subscription.name
        with self._lock:
            _require_new(name, self._queues, kind="subscriptions")
            _require(subscription.topic, self._topics)

            def bury(message: PubsubMessage, attempts: int) -> bool:
                return self._bury(subscription, message, attempts)

            self._queues[name] = Queue(subscription, lock=self._lock, bury=bury)
            if subscription.push_config.push_endpoint:
                self._pushers[name] = Pusher(self._queues[name])
        return subscription

    def get_subscription(self, name: str) -> Subscription:
        return _require(name, self._queues).config

    def list_subscriptions(self, project: str) -> list[Subscription]:
        with self._lock:
            return [q.config for name, q in self._queues.items() if name.startswith(f"{project}/")]

    def delete_subscription(self, name: str) -> None:
        with self._lock:
            queue = _require(name, self._queues)
            del self._queues[name]
            pusher = self._pushers.pop(name, None)
        queue.close()
        if pusher:
            pusher.close()

    def pull(self, subscription: str, limit: int, *, wait: float) -> list[Lease]:
        """Up to `limit` messages; waits up to `wait` seconds for the first."""
        queue = _require(subscription, self._queues)
        return queue.take(limit, lease=queue.config.ack_deadline_seconds, wait=wait)

    def stream(self, request: StreamingPullRequest, is_wanted: Callable[[], bool]) -> Stream:
        """What a streaming pull that began with `request` gets, while it `is_wanted`."""
        queue = _require(request.subscription, self._queues)
        if queue.config.push_config.push_endpoint:
            raise google.FailedPrecondition("This subscription pushes; it cannot be pulled.")
        return Stream(queue, request, is_wanted)

    def acknowledge(self, subscription: str, ack_ids: Iterable[str]) -> None:
        """An unknown or expired id is an error only where delivery is exactly once."""
        queue = _require(subscription, self._queues)
        _confirm(queue, {ack_id: queue.ack(ack_id) for ack_id in ack_ids})

    def modify_ack_deadline(self, subscription: str, ack_ids: Iterable[str], seconds: int) -> None:
        """0 seconds: give back."""
        queue = _require(subscription, self._queues)
        change = queue.nack if not seconds else partial(queue.extend, seconds=seconds)
        _confirm(queue, {ack_id: change(ack_id) for ack_id in ack_ids})

    def depth(self, subscription: str) -> int:
        """The messages that are not acknowledged."""
        return len(_require(subscription, self._queues))

    def out(self, subscription: str) -> int:
        """The messages that are with somebody."""
        return _require(subscription, self._queues).out

    def end_leases(self, subscription: str) -> None:
        """As if the acknowledgement deadlines of all messages that are out had passed."""
        _require(subscription, self._queues).end_leases()

    def refuse_publishes(self, on: bool) -> None:
        """Answer every publish with UNAVAILABLE, until told otherwise."""
        self._refusing = on

    def hang_publishes(self, seconds: float) -> None:
        """Do every publish that long after it was asked for; 0: at once again."""
        self._hang_seconds = seconds

    def pause_pushes(self, on: bool) -> None:
        """Start no push on any subscription, until told otherwise."""
        with self._lock:
            for name in self._pushers:
                self._queues[name].pause(on)

    def close(self) -> None:
        """Stop everything, hanging publishes and pushes under way too; no thread is left."""
        self._closed.set()
        with self._lock:
            names = list(self._queues)
        for name in names:
            with contextlib.suppress(google.NotFound):
                self.delete_subscription(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _distribute(self, topic: str, message: PubsubMessage) -> str:
        now = datetime.now(UTC)
        stamped = PubsubMessage(
            data=message.data,
            attributes=message.attributes,
            ordering_key=message.ordering_key,
            message_id=str(next(self._ids)),
            publish_time=now.replace(microsecond=now.microsecond // 1000 * 1000),
        )
        for queue in self._queues.values():
            if queue.config.topic == topic:
                queue.put(stamped)
        return stamped.message_id

    def _bury(self, subscription: Subscription, message: PubsubMessage, attempts: int) -> bool:
        """Publish to the dead-letter topic. False without one: the message stays with us."""
        topic = subscription.dead_letter_policy.dead_letter_topic
        if topic not in self._topics:
            return False
        published = PubsubMessage.pb(message).publish_time
        _, project, _, name = subscription.name.split("/")
        source = {
            "CloudPubSubDeadLetterSourceDeliveryCount": str(attempts),
            "CloudPubSubDeadLetterSourceSubscription": name,
            "CloudPubSubDeadLetterSourceSubscriptionProject": project,
            "CloudPubSubDeadLetterSourceTopicPublishTime": published.ToJsonString(),
        }
        dead = PubsubMessage(
            data=message.data,
            attributes=dict(message.attributes) | source,
            ordering_key=message.ordering_key,
        )
        self._distribute(topic, dead)
        return True


def _require(name: str, things: dict[str, Any]) -> Any:
    if name not in things:
        raise google.NotFound(f"Resource not found ({name}).")
    return things[name]


def _require_new(name: str, things: dict[str, Any], *, kind: str) -> None:
    parts = name.split("/")
    if len(parts) != 4 or not all(parts) or (parts[0], parts[2]) != ("projects", kind):
        raise google.InvalidArgument(f"not a name of the form projects/P/{kind}/NAME: {name!r}")
    if name in things:
        raise google.AlreadyExists(f"Resource already exists ({name}).")


def _confirm(queue: Queue, done: dict[str, bool]) -> None:
    """Where delivery is exactly once, whoever acts on a lease that has ended is told so."""
    lost = {ack_id: "PERMANENT_FAILURE_INVALID_ACK_ID" for ack_id in done if not done[ack_id]}
    if lost and queue.config.enable_exactly_once_delivery:
        reason = "EXACTLY_ONCE_ACKID_FAILURE"
        info = ErrorInfo(reason=reason, domain="pubsub.googleapis.com", metadata=lost)
        raise google.FailedPrecondition("Some leases have ended.", details=[info])


def _check_messages(messages: list[PubsubMessage]) -> None:
    _refuse_if(not 1 <= len(messages) <= MAX_MESSAGES, f"not 1 to {MAX_MESSAGES} messages")
    size = sum(PubsubMessage.pb(message).ByteSize() for message in messages)
    _refuse_if(size > MAX_BYTES, f"over {MAX_BYTES} bytes")
    for message in messages:
        attributes = dict(message.attributes)
        _refuse_if(not message.data and not attributes, "neither data nor attributes")
        _refuse_if(len(attributes) > 100, "over 100 attributes")
        for key, value in attributes.items():
            _refuse_if(not key or len(key.encode()) > 256, "an attribute's key: not 1 to 256 bytes")
            _refuse_if(len(value.encode()) > 1024, "an attribute's value: over 1024 bytes")
        _refuse_if(len(message.ordering_key.encode()) > 1024, "an ordering key: over 1024 bytes")


def _check_subscription(subscription: Subscription) -> None:
    push = subscription.push_config
    endpoint = push.push_endpoint
    attempts = subscription.dead_letter_policy.max_delivery_attempts
    _refuse_if(
        endpoint and not endpoint.startswith("http://"), "the stand-in pushes to http:// only"
    )
    _refuse_if(attempts and not 5 <= attempts <= 100, "max_delivery_attempts: not 5 to 100")
    if subscription.filter or "no_wrapper" in push:
        raise google.MethodNotImplemented("the stand-in has neither filters nor unwrapped pushes")


def _refuse_if(wrong: object, why: str) -> None:
    if wrong:
        raise google.InvalidArgument(why)
