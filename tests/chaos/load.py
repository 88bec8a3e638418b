"""The senders: each event until it is accepted, as Shopify would, and copies of it."""

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from http.client import HTTPException
from typing import Final

from google.api_core.exceptions import GoogleAPICallError
from google.pubsub_v1.types import PubsubMessage

from dev import deliveries
from dev.stack import PUBSUB_TOPIC, Stack
from tests.chaos.events import Event

SENDERS: Final = 8
AGAIN_SECONDS: Final = 0.3


class Load:
    """Sends until told to stop; then until everything that was begun has been accepted."""

    def __init__(self, stack: Stack, events: Iterator[Event], seed: int) -> None:
        self._stack = stack
        self._events = events
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.sent: list[Event] = []
        self.refused = 0  # answers other than 200, and none at all
        self._threads = [
            threading.Thread(target=self._send, args=(random.Random(seed + n),), daemon=True)
            for n in range(SENDERS)
        ]

    def start(self) -> None:
        """Begins."""
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """No new events; returns once every event has been accepted."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _send(self, dice: random.Random) -> None:
        while not self._stop.is_set():
            with self._lock:
                event = next(self._events)
                self.sent.append(event)
            self._until_accepted(event)
            for _ in range(event.copies - 1):
                self._until_accepted(event)
            time.sleep(dice.random() * 0.02)

    def _until_accepted(self, event: Event) -> None:
        while not self._is_accepted(event):
            with self._lock:
                self.refused += 1
            time.sleep(AGAIN_SECONDS)

    def _is_accepted(self, event: Event) -> bool:
        headers = deliveries.attributes(event.topic, event.shop, event_id=event.event_id)
        headers["X-Shopify-Triggered-At"] = event.triggered_at.isoformat()
        if event.is_native:
            assert self._stack.pubsub is not None
            message = PubsubMessage(data=event.body, attributes=headers)
            with contextlib.suppress(GoogleAPICallError):
                return bool(self._stack.pubsub.broker.publish(PUBSUB_TOPIC, [message]))
            return False
        described = self._stack.describe()
        signed = deliveries.signed(headers, event.body, described["client_secret"])
        with contextlib.suppress(OSError, ValueError, HTTPException):
            return deliveries.post(described["webhook_url"], event.body, signed).status == 200
        return False
