"""One deadline for all: the connection ends with it, and so does everybody who sits in it."""

import socket
import threading
from collections.abc import Iterator

import pytest

from shared.notifier.deadline import AttemptTimeout, Deadline, bounded
from tests.notifier import post
from tests.notifier.servers import Fixed, hang


@pytest.fixture
def port() -> Iterator[int]:
    with Fixed(hang) as server:
        yield server.port


def test_a_read_ends_when_time_is_up(port: int) -> None:
    with Deadline(0.2) as deadline, deadline.connect("127.0.0.1", port) as sock:
        sock.settimeout(None)
        assert sock.recv(1) == b""
        assert deadline.fired
        with pytest.raises(AttemptTimeout):
            deadline.check()


def test_an_attempt_that_is_left_has_no_connection_any_more(port: int) -> None:
    with Deadline(post.HANG_GUARD_SECONDS) as deadline:
        sock = deadline.connect("127.0.0.1", port)
    sock.settimeout(None)
    assert sock.recv(1) == b""
    with pytest.raises(BrokenPipeError):
        sock.sendall(b"x")
    sock.close()
    assert not deadline.fired


@pytest.mark.parametrize("seconds", [0, -1])
def test_nothing_is_begun_when_no_time_is_left(port: int, seconds: float) -> None:
    with Deadline(seconds) as deadline:
        with pytest.raises(AttemptTimeout):
            deadline.connect("127.0.0.1", port)
        with pytest.raises(AttemptTimeout):
            deadline.call(lambda: 1)


def test_nothing_is_connected_after_the_deadline() -> None:
    with Deadline(post.HANG_GUARD_SECONDS) as deadline:
        pass
    sock = socket.socket()
    with pytest.raises(AttemptTimeout):
        deadline.attach(sock)
    assert sock.fileno() == -1


def test_a_deadline_leaves_no_thread_and_no_descriptor(port: int) -> None:
    before = threading.active_count()
    for _ in range(5):
        with Deadline(post.HANG_GUARD_SECONDS) as deadline:
            deadline.connect("127.0.0.1", port).close()
        deadline._timer.join(post.HANG_GUARD_SECONDS)
        assert deadline._watched is None
    assert threading.active_count() <= before + 5  # the server's own, which end by themselves


def test_what_has_no_timeout_is_waited_for_no_longer_than_told() -> None:
    over = threading.Event()
    with pytest.raises(AttemptTimeout):
        bounded(lambda: over.wait(post.HANG_GUARD_SECONDS), 0.05)
    over.set()


def test_what_is_bounded_returns_and_raises_as_it_would() -> None:
    assert bounded(lambda: None, post.HANG_GUARD_SECONDS) is None
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 / 0, post.HANG_GUARD_SECONDS)
