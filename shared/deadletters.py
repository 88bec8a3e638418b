"""Dead letters: what Pub/Sub gave up on, looked at, and sent to its topic once more."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from google.api_core.exceptions import DeadlineExceeded, GoogleAPICallError, RetryError
from google.pubsub_v1.types import PubsubMessage, ReceivedMessage

from shared import envelope as envelopes
from shared import pubsub

# Added by Pub/Sub when it gave the message up; the message was published without them.
ADDED: Final = "CloudPubSubDeadLetterSource"
BATCH: Final = 10
TIMEOUT_SECONDS: Final = 30.0
# Nothing for that long: there are no more.
PULL_SECONDS: Final = 5.0
LOOK_SECONDS: Final = 60  # for which the messages that are looked at are held


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """One message that was given up, without its payload."""

    message_id: str
    topic: str
    shop_domain: str
    event_id: str
    published_at: datetime | None  # at first
    attempts: int | None
    size: int  # bytes
    received: ReceivedMessage = field(repr=False)


class DeadLetters:
    """Those of `subscription`, whose messages were once published to `pubsub_topic`."""

    def __init__(self, subscription: str, pubsub_topic: str, *, emulator_host: str = "") -> None:
        self._subscription: Final = subscription
        self._pubsub_topic: Final = pubsub_topic
        self._emulator_host: Final = emulator_host
        self._subscriber: Final = pubsub.subscriber(emulator_host)

    def look(self, limit: int) -> list[DeadLetter]:
        """Up to `limit` of them, which stay where they are. Raises what Google's client does."""
        held: list[ReceivedMessage] = []
        with self._given_back(held):
            while batch := self._pull(min(BATCH, limit - len(held))):
                held += batch
                self._hold(batch, LOOK_SECONDS)
            return [_described(each) for each in held]

    def redrive(self, limit: int) -> Iterator[DeadLetter]:
        """Publishes up to `limit` of them again, as they were, and yields each that is done.

        One is acknowledged when Pub/Sub has confirmed it: whoever is interrupted in between sends
        it twice, and never loses it. Raises what Google's client does.
        """
        done = 0
        with pubsub.publisher(self._emulator_host) as publisher:
            while batch := self._pull(min(BATCH, limit - done)):
                with self._given_back(batch):
                    while batch:
                        received = batch[0]
                        publisher.publish(
                            topic=self._pubsub_topic,
                            messages=[_original(received.message)],
                            timeout=TIMEOUT_SECONDS,
                        )
                        self._subscriber.acknowledge(
                            subscription=self._subscription, ack_ids=[received.ack_id]
                        )
                        batch.pop(0)
                        done += 1
                        yield _described(received)

    def close(self) -> None:
        """Ends the connection."""
        self._subscriber.close()

    def _pull(self, limit: int) -> list[ReceivedMessage]:
        if limit <= 0:
            return []
        try:
            answer = self._subscriber.pull(
                subscription=self._subscription, max_messages=limit, timeout=PULL_SECONDS
            )
        except (DeadlineExceeded, RetryError):
            return []
        return list(answer.received_messages)

    def _hold(self, messages: list[ReceivedMessage], seconds: int) -> None:
        self._subscriber.modify_ack_deadline(
            subscription=self._subscription,
            ack_ids=[each.ack_id for each in messages],
            ack_deadline_seconds=seconds,
        )

    @contextmanager
    def _given_back(self, messages: list[ReceivedMessage]) -> Iterator[None]:
        """Those that are still in the list in the end are there for others at once."""
        try:
            yield
        finally:
            if messages:
                with suppress(GoogleAPICallError, RetryError):  # then their deadline gives them
                    self._hold(messages, 0)


def _original(message: PubsubMessage) -> PubsubMessage:
    """The message as it was published at first."""
    return PubsubMessage(
        data=message.data,
        attributes={k: v for k, v in message.attributes.items() if not k.startswith(ADDED)},
        ordering_key=message.ordering_key,
    )


def _described(received: ReceivedMessage) -> DeadLetter:
    message = received.message
    attributes = {name.lower(): value for name, value in message.attributes.items()}
    attempts = attributes.get(f"{ADDED}DeliveryCount".lower(), "")
    return DeadLetter(
        message_id=message.message_id,
        topic=attributes.get("x-shopify-topic", ""),
        shop_domain=attributes.get("x-shopify-shop-domain", ""),
        event_id=attributes.get("x-shopify-webhook-id", ""),
        published_at=envelopes.timestamp(attributes.get(f"{ADDED}TopicPublishTime".lower())),
        attempts=int(attempts) if attempts.isdecimal() else None,
        size=len(message.data),
        received=received,
    )
