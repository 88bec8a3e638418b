"""One deadline for all that an attempt does outside: names looked up, connections, every byte.

A timeout of a socket bounds one operation; a server that sends a byte now and then outlasts it. So
a watchdog shuts the socket down when time is up, whoever sits in it and in whatever layer.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Self, TypeVar

from shared.errors import TransientError

T = TypeVar("T")

Lookup = Callable[..., list[Any]]  # as socket.getaddrinfo


class AttemptTimeout(TransientError):
    """Time is up. Nothing that was under way is finished behind our back."""

    code = "timeout"

    def __init__(self) -> None:
        super().__init__("There was no answer in time.")


class Deadline:
    """Runs from entry to exit. An attempt that is left has no connection any more."""

    def __init__(self, seconds: float, *, lookup: Lookup = socket.getaddrinfo) -> None:
        self.seconds = seconds
        self.fired = False
        self._ends = time.monotonic() + seconds
        self._lookup = lookup
        self._lock = threading.Lock()
        self._is_over = False
        self._watched: socket.socket | None = None
        self._timer = threading.Timer(max(seconds, 0), self._fire)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._is_over = True
            self._release()

    def remaining(self) -> float:
        """Seconds that are left, more than none; raises AttemptTimeout."""
        left = self._ends - time.monotonic()
        if self.fired or left <= 0:
            raise AttemptTimeout
        return left

    def check(self) -> None:
        """Raises AttemptTimeout if the connection was cut: what was read last may be half of it."""
        if self.fired:
            raise AttemptTimeout

    def attach(self, sock: socket.socket) -> None:
        """Watches `sock` instead of the last one, through a descriptor of our own.

        Whatever wraps the socket later, and whoever closes it, does not take it from our hands.
        """
        with self._lock:
            if self.fired or self._is_over:
                sock.close()
                raise AttemptTimeout
            self._release()
            self._watched = sock.dup()

    def call(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises, in the time that is left; for what has no timeout."""
        return bounded(work, self.remaining())

    def connect(self, host: str, port: int) -> socket.socket:
        """A connection to the first address that takes one, each given its share of what is left.

        Raises AttemptTimeout, or the last address's OSError.
        """
        lookup = partial(self._lookup, host, port, type=socket.SOCK_STREAM)
        addresses = self.call(lookup)
        failure: Exception = OSError("the name has no address")
        for tried, (family, kind, protocol, _, address) in enumerate(addresses):
            sock = socket.socket(family, kind, protocol)
            self.attach(sock)
            try:
                sock.settimeout(self.remaining() / (len(addresses) - tried))
                sock.connect(address)
                sock.settimeout(self.remaining())
            except (OSError, AttemptTimeout) as error:
                sock.close()
                self.remaining()
                failure = error
            else:
                return sock
        raise failure

    def _fire(self) -> None:
        with self._lock:
            if not self._is_over:
                self.fired = True
                self._release()

    def _release(self) -> None:
        if self._watched is not None:
            with contextlib.suppress(OSError):  # the other side was faster
                self._watched.shutdown(socket.SHUT_RDWR)
            self._watched.close()
        self._watched = None


def bounded(work: Callable[[], T], seconds: float) -> T:
    """What `work` returns or raises within `seconds`; raises AttemptTimeout. It may linger on."""
    returned: list[T] = []
    raised: list[Exception] = []

    def run() -> None:
        try:
            returned.append(work())
        except Exception as error:  # noqa: BLE001 - raised again where it is waited for
            raised.append(error)

    thread = threading.Thread(target=run, name="notifier-bounded", daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not returned:
        raise AttemptTimeout
    return returned[0]
