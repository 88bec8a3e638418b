"""One streaming pull: messages as they come due, as many at a time as its client has asked for."""

from collections.abc import Callable, Iterator
from typing import Final

from google.api_core import exceptions as google
from google.pubsub_v1.types import PubsubMessage, StreamingPullRequest, StreamingPullResponse

from dev.pubsub_queue import Lease, Queue

WAIT_SECONDS: Final = 1.0


class Stream:
    """Opened by its first request, which has the limits; 0 is no limit."""

    def __init__(
        self, queue: Queue, first: StreamingPullRequest, is_wanted: Callable[[], bool]
    ) -> None:
        self._queue: Final = queue
        self._first: Final = first
        self._is_wanted: Final = is_wanted
        self._held: set[str] = set()

    @property
    def properties(self) -> StreamingPullResponse.SubscriptionProperties:
        """What the client needs to know of the subscription."""
        return StreamingPullResponse.SubscriptionProperties(
            exactly_once_delivery_enabled=self._queue.config.enable_exactly_once_delivery,
            message_ordering_enabled=self._queue.config.enable_message_ordering,
        )

    def leases(self) -> Iterator[Lease]:
        """Until nobody wants them any more; raises NotFound when the subscription is deleted."""
        while self._is_wanted():
            if self._queue.closed:
                raise google.NotFound(f"Resource not found ({self._queue.config.name}).")
            for lease in self._queue.take(
                1,
                lease=self._first.stream_ack_deadline_seconds,
                wait=WAIT_SECONDS,
                has_room=self._has_room,
            ):
                self._held.add(lease.ack_id)
                yield lease

    def wake(self) -> None:
        """The client has gone."""
        self._queue.wake()

    def _has_room(self) -> bool:
        if not self._is_wanted():
            return False
        held = self._queue.leased(self._held)
        self._held = set(held)
        most = self._first.max_outstanding_messages or float("inf")
        most_bytes = self._first.max_outstanding_bytes or float("inf")
        return len(held) < most and sum(map(_size, held.values())) < most_bytes


def _size(message: PubsubMessage) -> int:
    return PubsubMessage.pb(message).ByteSize()
