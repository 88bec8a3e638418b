"""What tests of whole functions need: servers that end with the test, odd peers, raw requests."""

import http.client
import itertools
import json
import os
import random
import re
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import psycopg
from google.pubsub_v1.types import PubsubMessage, Subscription, Topic

from dev import deliveries
from dev.functions import Function
from dev.postgres import Server
from dev.pubsub_grpc import PubSubServer

T = TypeVar("T")

PUBSUB_TOPIC: Final = "projects/demo/topics/shopify-events"
SUBSCRIPTION: Final = "projects/demo/subscriptions/inbox"
# The one absolute time that the design fixes: Shopify waits for five seconds.
ANSWER_SECONDS: Final = 4.5
NOBODY: Final = "127.0.0.1:1"  # nobody listens there
# Nothing else of the environment: a developer's own settings must not reach a function under test.
_INHERITED: Final = ("PATH", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "HOME", "LANG", "TMPDIR")
_JSON_LINE: Final = re.compile(r"^\{.*\}$", re.MULTILINE)

_shops = itertools.count(1)


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """A process environment of `settings` and next to nothing else."""
    return {name: os.environ[name] for name in _INHERITED if name in os.environ} | dict(settings)


class Starter:
    """Starts functions, and stops them all when it is closed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count(1)
        self._running = ExitStack()

    def __call__(self, name: str, **settings: str) -> Function:
        log_path = self._folder / f"{name}-{next(self._numbers)}.log"
        function = Function(name, environment(settings), log_path=log_path)
        return self._running.enter_context(function)

    def close(self) -> None:
        self._running.close()


class Inbox:
    """A Pub/Sub topic and all that was published to it, by event id."""

    def __init__(self, server: PubSubServer) -> None:
        self.broker = server.broker
        self.host = server.host
        self._messages: dict[str, list[PubsubMessage]] = {}
        self.broker.create_topic(Topic(name=PUBSUB_TOPIC))
        self.broker.create_subscription(Subscription(name=SUBSCRIPTION, topic=PUBSUB_TOPIC))

    def messages(self, event_id: str) -> list[PubsubMessage]:
        """Those published until now: a webhook publishes before it answers."""
        while leases := self.broker.pull(SUBSCRIPTION, 100, wait=0):
            self.broker.acknowledge(SUBSCRIPTION, [lease.ack_id for lease in leases])
            for lease in leases:
                key = lease.message.attributes.get("X-Shopify-Webhook-Id", "")
                self._messages.setdefault(key, []).append(lease.message)
        return self._messages.get(event_id, [])

    def message(self, event_id: str) -> PubsubMessage:
        """The event's only message."""
        (message,) = self.messages(event_id)
        return message


class Silence:
    """A TCP server that lets everybody in and never says a word."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listener.setblocking(False)
        self.port: Final = self._listener.getsockname()[1]
        self.host: Final = f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """A connection string that leads here."""
        return f"postgresql://app:secret@{self.host}/app"

    def callers(self) -> int:
        """How many have called since this was last asked."""
        count = 0
        while True:
            try:
                self._listener.accept()[0].close()
            except BlockingIOError:
                return count
            count += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()


@contextmanager
def frozen(server: Server) -> Iterator[None]:
    """The server with all its connections stands still; the kernel still accepts for it."""
    assert server.pid
    with psycopg.connect(server.url(), autocommit=True) as connection:
        backends = connection.execute("select pid from pg_stat_activity").fetchall()
        ours = connection.info.backend_pid
    stopped = [server.pid, *(pid for (pid,) in backends if pid != ours)]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


def new_shop() -> str:
    """A shop that no other test knows."""
    return f"shop-{next(_shops)}-{uuid.uuid4().hex[:8]}.myshopify.com"


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """What `call` returns, and the seconds that it took."""
    started = time.monotonic()
    return call(), time.monotonic() - started


def eventually(ask: Callable[[], T], seconds: float = 15) -> T:
    """The first true answer."""
    deadline = time.monotonic() + seconds
    while not (answer := ask()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.1)
    return answer


class Log:
    """What a function has written since this was made."""

    def __init__(self, function: Function) -> None:
        self._path = function.log_path
        self._start = self._path.stat().st_size

    def text(self) -> str:
        """All of it, whatever wrote it."""
        return self._path.read_bytes()[self._start :].decode()

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log events of one name."""
        lines = (json.loads(line) for line in _JSON_LINE.findall(self.text()))
        return [line for line in lines if line["message"] == name]


def incompressible(size: int, seed: int = 1) -> bytes:
    """Bytes that no compression makes smaller, the same every time."""
    return random.Random(seed).randbytes(size)


def in_chunks(
    function: Function, chunks: Iterable[bytes], headers: Mapping[str, str]
) -> deliveries.Answer:
    """POSTs a body of unsaid length, over a raw socket."""
    head = "POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    parts = (b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks if chunk)
    return raw(function, [head.encode() + b"\r\n", *parts, b"0\r\n\r\n"])


def raw(function: Function, parts: Iterable[bytes]) -> deliveries.Answer:
    """Sends bytes as they are, reads the answer. A server may answer before it has read all."""
    with socket.create_connection(("127.0.0.1", function.port), timeout=20) as connection:
        try:
            for part in parts:
                connection.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the answer may be there all the same
        response = http.client.HTTPResponse(connection)
        try:
            response.begin()
            return deliveries.Answer(status=response.status, body=response.read())
        finally:
            response.close()


def allowed(function: Function, method: str) -> tuple[int, str | None]:
    """The status of a request with `method`, and the answer's Allow header."""
    connection = http.client.HTTPConnection("127.0.0.1", function.port, timeout=20)
    try:
        connection.request(method, "/")
        response = connection.getresponse()
        response.read()
        return response.status, response.getheader("Allow")
    finally:
        connection.close()
