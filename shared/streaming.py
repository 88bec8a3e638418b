"""Streaming pull: messages without HTTP, for hosts outside Cloud Functions.

A stream that broke is opened again, after a pause that grows until one has proved itself.
"""

import base64
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.cloud.pubsub_v1.subscriber.exceptions import AcknowledgeError
from google.cloud.pubsub_v1.subscriber.futures import StreamingPullFuture
from google.cloud.pubsub_v1.subscriber.message import Message as Received
from google.cloud.pubsub_v1.subscriber.scheduler import ThreadScheduler
from google.cloud.pubsub_v1.types import FlowControl

from shared import log, pubsub
from shared.errors import TransientError
from shared.message import Message

RESTART_SECONDS: Final = (5, 10, 20, 40, 60)
# A message is stored or kept and acknowledged well within these, all waits included.
STOP_SECONDS: Final = 60.0
ACK_SECONDS: Final = 20.0
# Messages that wait here for a thread; they are given back at a stop.
WAITING_FOR_EACH_THREAD: Final = 4

# What they say of a stream that ends, the stream itself says too, and in our words.
_LOQUACIOUS: Final = (
    "google.api_core.bidi",
    "google.cloud.pubsub_v1.subscriber._protocol",
    "grpc._channel",
)
_STOP: Final = object()


class StreamLost(TransientError):
    """Pub/Sub cannot be reached any more."""

    code = "stream_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """How many messages were acknowledged and refused."""

    acknowledged: int
    refused: int


class Subscriber:
    """Hands the messages of one subscription to `ingest`, several at a time.

    `sleep(seconds)` is for tests; by itself a pause ends early when it is told to stop.
    """

    def __init__(
        self,
        ingest: Callable[[Message], bool],
        subscription: str,
        *,
        emulator_host: str = "",
        threads: int = 8,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self._ingest: Final = ingest
        self._subscription: Final = subscription
        self._emulator_host: Final = emulator_host
        self._threads: Final = threads
        self._clock: Final = clock
        self._sleep: Final = sleep or self._pause
        # News for `run`. A SimpleQueue, since a signal's handler may put into it at any time.
        self._news: Final[queue.SimpleQueue[object]] = queue.SimpleQueue()
        self._is_stopping = False
        self._counting: Final = threading.Lock()
        self._acknowledged = 0
        self._refused = 0

    def run(self) -> Taken:
        """Takes messages until it is told to stop; no error of Pub/Sub's ends it."""
        for name in _LOQUACIOUS:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        failures = 0
        while not self._is_stopping:
            before, since = self._taken, self._clock()
            error = self._stream()
            if self._is_stopping:
                break
            has_stood = self._clock() - since >= RESTART_SECONDS[-1]
            failures = 0 if self._taken != before or has_stood else failures
            seconds = RESTART_SECONDS[min(failures, len(RESTART_SECONDS) - 1)]
            failures += 1
            log.warning("subscriber.interrupted", error, seconds=seconds)
            self._sleep(seconds)
        return self._taken

    def stop(self) -> None:
        """Messages that have started are finished, the others given back. Safe in a handler."""
        self._is_stopping = True
        self._news.put(_STOP)

    @property
    def _taken(self) -> Taken:
        with self._counting:
            return Taken(acknowledged=self._acknowledged, refused=self._refused)

    def _stream(self) -> BaseException | None:
        """One stream, to its end; what ended it."""
        try:
            with pubsub.subscriber(self._emulator_host) as client:
                stream = client.subscribe(
                    self._subscription,
                    self._take,
                    flow_control=FlowControl(max_messages=self._threads * WAITING_FOR_EACH_THREAD),
                    scheduler=ThreadScheduler(ThreadPoolExecutor(self._threads)),
                    await_callbacks_on_shutdown=True,
                )
                stream.add_done_callback(self._news.put)
                transport: Any = client.transport
                transport.grpc_channel.subscribe(
                    lambda state: self._watch(stream, state), try_to_connect=True
                )
                self._await_news_of(stream)
                return _ended(stream)
        except Exception as error:  # noqa: BLE001 - whatever it was, the next stream may do better
            return error

    def _watch(self, stream: StreamingPullFuture, state: grpc.ChannelConnectivity) -> None:
        # The client goes on trying by itself for ever, and nobody would know.
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            self._news.put(stream)

    def _await_news_of(self, stream: object, seconds: float | None = None) -> None:
        """Until the stream has ended or lost its connection, or we are to stop, or time is up."""
        with suppress(queue.Empty):
            while self._news.get(timeout=seconds) not in (stream, _STOP):
                pass  # of a stream before this one

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._is_stopping and (left := end - time.monotonic()) > 0:
            self._await_news_of(_STOP, left)

    def _take(self, received: Received) -> None:
        if self._is_stopping:
            return received.nack()
        taken = self._ingest(_message(received))
        if taken:
            self._acknowledge(received)
        else:
            received.nack()
        with self._counting:
            self._acknowledged += taken
            self._refused += not taken
        return None

    def _acknowledge(self, received: Received) -> None:
        """Where delivery is exactly once, Pub/Sub's word is awaited; else there is none."""
        try:
            received.ack_with_response().result(ACK_SECONDS)
        except (AcknowledgeError, TimeoutError) as error:
            log.warning("subscriber.not_acknowledged", error, message_id=received.message_id)


def _ended(stream: StreamingPullFuture) -> BaseException | None:
    """What the stream ended of, once its started messages are finished."""
    has_ended = stream.done()
    stream.cancel()
    error = stream.exception(STOP_SECONDS)
    return error if has_ended else StreamLost("No connection to Pub/Sub; it is opened again.")


def _message(received: Received) -> Message:
    attributes: Any = received.attributes
    return Message(
        data=base64.b64encode(received.data).decode("ascii"),
        attributes=dict(attributes),
        message_id=received.message_id,
        publish_time=received.publish_time.isoformat(),
        delivery_attempt=received.delivery_attempt,
    )
