"""What strangers send costs neither database nor Pub/Sub, and never more than its share of time."""

import base64
import contextlib
import gzip
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from dev import deliveries
from dev.functions import Function
from tests.functions.rig import (
    ANSWER_SECONDS,
    PUBSUB_TOPIC,
    Inbox,
    Log,
    Silence,
    Starter,
    eventually,
    new_shop,
    timed,
)
from tests.world import SHOP, World

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc (Linux)")

MIB = 1024 * 1024
BOMB_MIB = 300  # one at a time; four would be 700
SECRET = "shpss_abuse"
THREADS = 4
HANG_SECONDS = 60  # far away: only for what would never end


@pytest.fixture(scope="module")
def settings(world: World, inbox: Inbox) -> dict[str, str]:
    return {
        "APP_DATABASE_URL": world.app_url,
        "SHOPIFY_CLIENT_SECRETS": SECRET,
        "PUBSUB_TOPIC": PUBSUB_TOPIC,
        "PUBSUB_EMULATOR_HOST": inbox.host,
        "THREADS": str(THREADS),
    }


@pytest.fixture(scope="module")
def webhook(start_shared: Starter, settings: dict[str, str]) -> Function:
    return start_shared("webhook", **settings)


def genuine(webhook: Function, body: bytes = b'{"id": 1}') -> deliveries.Answer:
    """A delivery as it should be, in a shop of its own."""
    attributes = deliveries.attributes("orders/create", new_shop())
    return deliveries.post(webhook.url, body, deliveries.signed(attributes, body, SECRET))


def memory(function: Function) -> int:
    """Resident memory of the server and its workers, in MiB."""
    pids = [function.pid, *_children(function.pid)]
    return sum(_resident(pid) for pid in pids if pid) // 1024


def _children(pid: int | None) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _resident(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) if found else 0


class Peak:
    """The most memory that a function had while the block ran."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._over = threading.Event()
        self.before = self.mib = memory(function)

    def __enter__(self) -> "Peak":
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self.mib = max(self.mib, memory(self._function))


# Signatures


def test_wrong_signatures_by_the_hundred_cost_no_call_to_database_or_pubsub(
    start: Starter, settings: dict[str, str]
) -> None:
    with Silence() as database, Silence() as pubsub:
        silent = start(
            "webhook",
            **settings | {"APP_DATABASE_URL": database.url, "PUBSUB_EMULATOR_HOST": pubsub.host},
        )

        def forged(n: int) -> int:
            body = json.dumps({"id": n}).encode()
            attributes = deliveries.attributes("orders/create", new_shop())
            headers = deliveries.signed(attributes, body, f"guess {n}")
            return deliveries.post(silent.url, body, headers).status

        with ThreadPoolExecutor(16) as threads:
            assert set(threads.map(forged, range(300))) == {401}
        assert (database.callers(), pubsub.callers()) == (0, 0)


# Headers


@pytest.mark.parametrize(
    "flood",
    [
        pytest.param([f"X-Flood-{n}: {'x' * 1000}" for n in range(20_000)], id="20,000 of 1 KB"),
        pytest.param([f"X-Flood: {'x' * 20_000_000}"], id="one of 20 MB"),
        pytest.param([f"X-Shopify-{n}: 1" for n in range(50_000)], id="50,000 of Shopify's"),
    ],
)
def test_a_flood_of_headers_is_refused_within_memory_while_others_are_answered(
    webhook: Function, flood: list[str]
) -> None:
    assert genuine(webhook).status == 200
    head = ("POST / HTTP/1.1\r\nHost: localhost\r\n" + "\r\n".join(flood) + "\r\n\r\n").encode()
    with Peak(webhook) as peak, ThreadPoolExecutor(THREADS) as threads:
        flooded = [threads.submit(_first_word, webhook, head) for _ in range(2 * THREADS)]
        answer, seconds = timed(lambda: genuine(webhook))
        assert answer.status == 200
        assert seconds < ANSWER_SECONDS
        assert {each.result() for each in flooded} <= {b"", b"HTTP/1.1 400 ", b"HTTP/1.1 431 "}
    assert peak.mib < peak.before + 50


def _first_word(function: Function, data: bytes) -> bytes:
    """How the answer begins; nothing when the connection was cut."""
    with socket.create_connection(("127.0.0.1", function.port), timeout=HANG_SECONDS) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(data)
        try:
            return connection.recv(13)
        except ConnectionResetError:
            return b""


# Bodies that do not come


@contextlib.contextmanager
def dripping(function: Function, count: int, head: bytes, drop: bytes) -> Iterator[list[bytes]]:
    """So many senders that never get to the end of their body; what they were answered.

    `drop` is sent again and again. Without one nothing comes after the head.
    """
    answers: list[bytes] = []
    over = threading.Event()

    def drip() -> None:
        with socket.create_connection(("127.0.0.1", function.port)) as connection:
            connection.sendall(head)
            connection.settimeout(0.1)
            while not over.is_set():
                with contextlib.suppress(TimeoutError):
                    answers.append(connection.recv(100))
                    break
                connection.sendall(drop)

    with ExitStack() as stack:
        threads = [threading.Thread(target=drip) for _ in range(count)]
        stack.callback(lambda: [thread.join() for thread in threads])
        stack.callback(over.set)
        for thread in threads:
            thread.start()
        yield answers


def _head(method: str, framing: str) -> bytes:
    return f"{method} / HTTP/1.1\r\nHost: localhost\r\n{framing}\r\n\r\n".encode()


LENGTH = "Content-Length: 1000000"
CHUNKED = "Transfer-Encoding: chunked"


@pytest.mark.parametrize(
    ("head", "drop"),
    [
        pytest.param(_head("POST", LENGTH), b"x", id="drop by drop"),
        pytest.param(_head("POST", LENGTH), b"", id="nothing"),
        pytest.param(_head("POST", CHUNKED), b"1\r\nx\r\n", id="chunk by chunk"),
        pytest.param(_head("POST", CHUNKED), b"", id="no chunk"),
        pytest.param(_head("GET", LENGTH), b"x", id="to what takes none"),
        pytest.param(_head("PUT", CHUNKED), b"1\r\nx\r\n", id="to what is not allowed"),
    ],
)
def test_senders_that_hold_every_thread_are_hung_up_on_and_others_answered(
    webhook: Function, head: bytes, drop: bytes
) -> None:
    with dripping(webhook, THREADS, head, drop) as answers:
        eventually(lambda: len(answers) == THREADS or _is_waiting(webhook))
        assert genuine(webhook).status == 200
        eventually(lambda: len(answers) == THREADS, HANG_SECONDS)
    status = b"408" if head.startswith(b"POST") else b"200" if head.startswith(b"GET") else b"405"
    assert {answer[:12] for answer in answers} == {b"HTTP/1.1 " + status}


def _is_waiting(function: Function) -> bool:
    """Whether it lets a short request wait: all its threads are held."""
    with socket.create_connection(("127.0.0.1", function.port)) as connection:
        connection.sendall(b"HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        connection.settimeout(0.5)
        try:
            return not connection.recv(1)
        except TimeoutError:
            return True


@pytest.mark.parametrize("begun", [LENGTH + "\r\n\r\nx", CHUNKED + "\r\n\r\n5\r\nx"])
def test_a_sender_that_leaves_in_the_middle_is_refused_quietly(
    webhook: Function, begun: str
) -> None:
    log = Log(webhook)
    with socket.create_connection(("127.0.0.1", webhook.port)) as connection:
        connection.sendall(f"POST / HTTP/1.1\r\nHost: localhost\r\n{begun}".encode())
    eventually(lambda: log.events("webhook.refused"))
    assert "ERROR" not in log.text()


# Bombs


@pytest.fixture(scope="module")
def subscriber(start_shared: Starter, world: World) -> Function:
    return start_shared("subscriber", **world.environ, THREADS=str(THREADS))


def pushed(subscriber: Function, data: bytes, **attributes: str) -> int:
    """The answer's status to a message of the world's shop."""
    named = deliveries.attributes("orders/create", SHOP) | attributes
    message = {"data": base64.b64encode(data).decode(), "attributes": named, "messageId": "1"}
    return deliveries.post(subscriber.url, json.dumps({"message": message}).encode()).status


def bomb(size: int) -> bytes:
    """A few kilobytes that become an order of `size` bytes."""
    note = b"x" * (size - len(b'{"id": 1, "note": ""}'))
    return gzip.compress(b'{"id": 1, "note": "%b"}' % note, compresslevel=1)


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda: bomb(32 * MIB), id="as large as it may be"),
        pytest.param(lambda: bomb(256 * MIB), id="far larger"),
        pytest.param(lambda: gzip.compress(bomb(256 * MIB)), id="a bomb in a bomb"),
    ],
)
def test_decompression_bombs_stay_within_memory_while_others_are_answered(
    subscriber: Function, made: Callable[[], bytes]
) -> None:
    body = made()
    assert pushed(subscriber, b'{"id": 2}') == 204
    with Peak(subscriber) as peak, ThreadPoolExecutor(2 * THREADS) as threads:
        bombs = [
            threads.submit(pushed, subscriber, body, **{"content-encoding": "gzip"})
            for _ in range(2 * THREADS)
        ]
        assert pushed(subscriber, b'{"id": 2}') == 204
        assert {each.result() for each in bombs} <= {204, 503}
    assert peak.mib < peak.before + BOMB_MIB
    assert pushed(subscriber, body, **{"content-encoding": "gzip"}) == 204
