"""The unacknowledged messages of one subscription: who is due when, who is out on a lease."""

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from google.pubsub_v1.types import PubsubMessage, RetryPolicy, Subscription

DEFAULT_MAX_ATTEMPTS: Final = 5
# Without a retry policy Pub/Sub redelivers at once; so do we, short of spinning.
_AT_ONCE: Final = (0.1, 1.0)


@dataclass(slots=True, eq=False)
class _Item:
    message: PubsubMessage
    attempts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A message handed out; to be acknowledged or given back by its `ack_id`."""

    ack_id: str
    message: PubsubMessage
    attempt: int | None  # 1 at the first; counted only where there is a dead-letter policy


def backoff_seconds(policy: RetryPolicy | None, attempts: int) -> float:
    """The wait after `attempts` (1 or more) failed deliveries.

    The minimum, doubled each time up to the maximum; a policy's defaults are 10 and 600 s.
    """
    shortest, longest = _AT_ONCE
    if policy is not None:
        given = [("minimum_backoff", 10.0), ("maximum_backoff", 600.0)]
        shortest, longest = (_seconds(policy, name, default) for name, default in given)
    return min(shortest * 2.0 ** min(attempts - 1, 60), longest)


class Queue:
    """The messages of one subscription, until they are acknowledged or buried.

    `bury(message, attempts)` takes over a message whose attempts are spent, and says whether it
    did. Messages of one ordering key keep their order: only the first of a key's line is ever due
    or leased, so the line waits while its head backs off.
    """

    def __init__(
        self,
        config: Subscription,
        *,
        lock: threading.RLock,
        bury: Callable[[PubsubMessage, int], bool],
    ) -> None:
        self.config: Final = config
        self.closed = False
        self._bury: Final = bury
        self._changed: Final = threading.Condition(lock)  # shared: burying locks another queue
        self._paused = False
        self._unacked = 0
        self._serials: Final = itertools.count()
        self._due: Final[list[tuple[float, int, _Item]]] = []  # a heap
        self._leased: Final[dict[str, tuple[float, _Item]]] = {}  # until when
        self._lines: Final[dict[str, deque[_Item]]] = {}

    def __len__(self) -> int:
        with self._changed:
            return self._unacked

    @property
    def out(self) -> int:
        """How many are leased."""
        with self._changed:
            return len(self._leased)

    def put(self, message: PubsubMessage) -> None:
        """Take in a message that was published."""
        item = _Item(message)
        with self._changed:
            self._unacked += 1
            if key := self._key(item):
                line = self._lines.setdefault(key, deque())
                line.append(item)
                if len(line) > 1:
                    return
            self._schedule(item, 0)

    def take(
        self,
        limit: int,
        *,
        lease: float,
        wait: float,
        has_room: Callable[[], bool] = lambda: True,
    ) -> list[Lease]:
        """Up to `limit` due messages, leased for `lease` seconds.

        Waits up to `wait` seconds for the first, and for room with whoever takes it; none when
        that passed, or the queue is closed.
        """
        give_up = time.monotonic() + wait
        with self._changed:
            while not self.closed:
                now = time.monotonic()
                self._expire(now)
                is_due = not self._paused and self._due and self._due[0][0] <= now
                if is_due and has_room():
                    return list(self._lease_due(limit, now, lease))
                if now >= give_up:
                    break
                self._changed.wait(min(give_up, self._next_change(now)) - now)
        return []

    def ack(self, ack_id: str) -> bool:
        """The message is done. False, and nothing done: the id is unknown, or its lease ended."""
        with self._changed:
            if leased := self._leased.pop(ack_id, None):
                self._finish(leased[1])
                self._changed.notify_all()
            return leased is not None

    def nack(self, ack_id: str) -> bool:
        """The message comes again after its backoff, or is buried. False as with `ack`."""
        with self._changed:
            if leased := self._leased.pop(ack_id, None):
                self._retry(leased[1])
                self._changed.notify_all()
            return leased is not None

    def extend(self, ack_id: str, seconds: float) -> bool:
        """The lease ends `seconds` from now. False as with `ack`."""
        with self._changed:
            if leased := self._leased.get(ack_id):
                self._leased[ack_id] = (time.monotonic() + seconds, leased[1])
                self._changed.notify_all()
            return leased is not None

    def leased(self, ack_ids: Iterable[str]) -> dict[str, PubsubMessage]:
        """Those of the messages that are still out."""
        with self._changed:
            return {a: self._leased[a][1].message for a in ack_ids if a in self._leased}

    def end_leases(self) -> None:
        """As if the deadlines of all messages that are out had passed."""
        with self._changed:
            self._expire(float("inf"))
            self._changed.notify_all()

    def wake(self) -> None:
        """Whoever waits in `take` looks again."""
        with self._changed:
            self._changed.notify_all()

    def pause(self, on: bool) -> None:
        """Hand out nothing, until told otherwise; what is out stays out."""
        with self._changed:
            self._paused = on
            self._changed.notify_all()

    def close(self) -> None:
        """Wake everybody who waits in `take`, for good."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    @property
    def _buries(self) -> bool:
        return "dead_letter_policy" in self.config

    def _key(self, item: _Item) -> str:
        return item.message.ordering_key if self.config.enable_message_ordering else ""

    def _schedule(self, item: _Item, delay: float) -> None:
        heapq.heappush(self._due, (time.monotonic() + delay, next(self._serials), item))
        self._changed.notify_all()  # not everybody has room

    def _lease_due(self, limit: int, now: float, lease: float) -> Iterator[Lease]:
        while limit and self._due and self._due[0][0] <= now:
            _, serial, item = heapq.heappop(self._due)
            limit -= 1
            item.attempts += 1
            ack_id = f"{item.message.message_id}-{serial}"
            self._leased[ack_id] = (now + lease, item)
            counted = item.attempts if self._buries else None
            yield Lease(ack_id=ack_id, message=item.message, attempt=counted)

    def _expire(self, now: float) -> None:
        for ack_id in [a for a, (until, _) in self._leased.items() if until <= now]:
            self._retry(self._leased.pop(ack_id)[1])

    def _next_change(self, now: float) -> float:
        """When something may happen without anybody calling; at most a minute from now."""
        times = [until for until, _ in self._leased.values()]
        if self._due and not self._paused and self._due[0][0] > now:
            times.append(self._due[0][0])
        return min([now + 60, *times])

    def _retry(self, item: _Item) -> None:
        if self._is_spent(item) and self._bury(item.message, item.attempts):
            return self._finish(item)
        policy = self.config.retry_policy if "retry_policy" in self.config else None
        return self._schedule(item, backoff_seconds(policy, item.attempts))

    def _is_spent(self, item: _Item) -> bool:
        if not self._buries:
            return False
        most = self.config.dead_letter_policy.max_delivery_attempts or DEFAULT_MAX_ATTEMPTS
        return item.attempts >= most

    def _finish(self, item: _Item) -> None:
        self._unacked -= 1
        if key := self._key(item):
            line = self._lines[key]
            line.popleft()
            if line:
                self._schedule(line[0], 0)
            else:
                del self._lines[key]


def _seconds(policy: RetryPolicy, name: str, default: float) -> float:
    if name not in policy:
        return default
    value: timedelta = getattr(policy, name)
    return value.total_seconds()
