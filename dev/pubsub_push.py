"""Pushes the messages of one subscription to its HTTP endpoint, as Pub/Sub does."""

import base64
import contextlib
import http.client
import json
import select
import socket
import threading
from typing import Any, Final
from urllib.parse import urlsplit

from google.pubsub_v1.types import PubsubMessage

from dev.pubsub_queue import Lease, Queue

WORKERS: Final = 8
ACKS: Final = frozenset({102, 200, 201, 202, 204})


def push_body(
    message: PubsubMessage, *, subscription: str, attempt: int | None = None
) -> dict[str, Any]:
    """The JSON object of a wrapped push; `attempt` as in `Lease`."""
    published = PubsubMessage.pb(message).publish_time.ToJsonString()
    wrapped: dict[str, Any] = {
        "messageId": message.message_id,
        "message_id": message.message_id,
        "publishTime": published,
        "publish_time": published,
    }
    if message.attributes:
        wrapped["attributes"] = dict(message.attributes)
    if message.data:
        wrapped["data"] = base64.b64encode(message.data).decode()
    if message.ordering_key:
        wrapped["orderingKey"] = message.ordering_key
    body: dict[str, Any] = {"message": wrapped, "subscription": subscription}
    return body if attempt is None else body | {"deliveryAttempt": attempt}


class Pusher:
    """Workers that push what is due in `queue` until they are closed."""

    def __init__(self, queue: Queue) -> None:
        self._queue: Final = queue
        self._workers: Final = [_Worker(queue) for _ in range(WORKERS)]
        for worker in self._workers:
            worker.start()

    def close(self) -> None:
        """Stop, also in the middle of a push; no thread is left."""
        self._queue.close()
        for worker in self._workers:
            while worker.is_alive():  # it may have been about to connect
                worker.interrupt()
                worker.join(0.05)


class _Worker(threading.Thread):
    """One connection, kept, and one push at a time on it."""

    def __init__(self, queue: Queue) -> None:
        super().__init__(daemon=True, name=f"push {queue.config.name}")
        endpoint = urlsplit(queue.config.push_config.push_endpoint)
        self._path: Final = (endpoint.path or "/") + (
            f"?{endpoint.query}" if endpoint.query else ""
        )
        self._queue: Final = queue
        self._connection: Final = http.client.HTTPConnection(
            endpoint.hostname or "", endpoint.port, timeout=queue.config.ack_deadline_seconds
        )

    def run(self) -> None:
        with contextlib.closing(self._connection):
            while not self._queue.closed:
                # No end to the lease: the push has a time limit and then gives the message back.
                for lease in self._queue.take(1, lease=float("inf"), wait=60):
                    settle = self._queue.ack if self._push(lease) else self._queue.nack
                    settle(lease.ack_id)

    def interrupt(self) -> None:
        """End a push that is under way."""
        if connected := self._connection.sock:
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    def _push(self, lease: Lease) -> bool:
        """Whether the endpoint took it. A refused connection or a timeout is a no."""
        name = self._queue.config.name
        body = push_body(lease.message, subscription=name, attempt=lease.attempt)
        headers = {"Content-Type": "application/json"}
        try:
            self._drop_if_stale()
            self._connection.request("POST", self._path, json.dumps(body), headers)
            response = self._connection.getresponse()
            response.read()
        except (OSError, http.client.HTTPException):
            self._connection.close()
            return False
        return response.status in ACKS

    def _drop_if_stale(self) -> None:
        """Servers close idle connections; a push that finds that out would count as an attempt."""
        if not self._connection.sock:
            return
        idle = select.poll()
        idle.register(self._connection.sock, select.POLLIN)
        if idle.poll(0):
            self._connection.close()
