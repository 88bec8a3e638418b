"""A sleep that others can end: workers that are done, a signal, a notice from the database."""

import contextlib
import selectors
import socket
from typing import Any, Self

import psycopg


class Bell:
    """One thread sleeps on it; any other rings."""

    def __init__(self) -> None:
        self._hear, self._ring = socket.socketpair()
        self._hear.setblocking(False)
        self._ring.setblocking(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._hear.close()
        self._ring.close()

    def ring(self) -> None:
        """Ends the sleep, or the next one; safe in a signal's handler."""
        with contextlib.suppress(OSError):  # full of rings, or closed
            self._ring.send(b"!")

    def sleep(self, seconds: float, connection: psycopg.Connection[Any] | None) -> None:
        """Until it rings, `connection` has something to read, or `seconds` are over."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._hear, selectors.EVENT_READ)
            if connection is not None and not connection.closed:
                selector.register(connection.fileno(), selectors.EVENT_READ)
            selector.select(seconds)
        with contextlib.suppress(BlockingIOError):
            self._hear.recv(4096)
