"""Servers on loopback for the notifier's transports: good ones, bad ones, and very slow ones."""

import json
import re
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Self

Fault = Callable[["Peer"], None]
Reply = str | Fault

DRIP_SECONDS: Final = 0.04


class Peer:
    """The other end of one connection."""

    def __init__(self, sock: socket.socket, over: threading.Event) -> None:
        self.sock = sock
        self.over = over
        self.reader = sock.makefile("rb")

    def say(self, reply: Reply) -> None:
        if callable(reply):
            reply(self)
        else:
            self.sock.sendall(reply.encode() + b"\r\n")

    def secure(self, context: ssl.SSLContext) -> None:
        self.reader.close()
        self.sock = context.wrap_socket(self.sock, server_side=True)
        self.reader = self.sock.makefile("rb")

    def close(self) -> None:
        with suppress(OSError):
            self.reader.close()
        self.sock.close()


def hang(peer: Peer) -> None:
    """Says nothing until the client has gone, or the test is over."""
    peer.sock.settimeout(0.05)
    while not peer.over.is_set():
        try:
            if not peer.sock.recv(4096):
                break
        except TimeoutError:
            continue
    raise ConnectionAbortedError


def ignore(peer: Peer) -> None:
    """Does not even read."""
    peer.over.wait()
    raise ConnectionAbortedError


def close(peer: Peer) -> None:
    raise ConnectionAbortedError


def reset(peer: Peer) -> None:
    peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raise ConnectionAbortedError


def raw(data: bytes) -> Fault:
    """These bytes and nothing more."""

    def fault(peer: Peer) -> None:
        peer.sock.sendall(data)
        raise ConnectionAbortedError

    return fault


def silent_after(data: bytes) -> Fault:
    """These bytes, and then nothing more."""

    def fault(peer: Peer) -> None:
        peer.sock.sendall(data)
        hang(peer)

    return fault


def drip(data: bytes, after: bytes = b"") -> Fault:
    """`after` at once, then `data` byte by byte, and the last one for ever."""

    def fault(peer: Peer) -> None:
        peer.sock.sendall(after)
        for byte in data:
            peer.sock.sendall(bytes([byte]))
            peer.over.wait(DRIP_SECONDS)
        while not peer.over.wait(DRIP_SECONDS):
            peer.sock.sendall(data[-1:])
        raise ConnectionAbortedError

    return fault


class Server:
    """Listens on a free port of loopback, one thread for each connection."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self._context = context
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self.connections = 0

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.settle()

    def settle(self) -> None:
        """Every connection has come to its end."""
        for thread in self._threads:
            if not (thread is self._threads[0] and not self._over.is_set()):
                thread.join(10)
                assert not thread.is_alive()

    def talk(self, peer: Peer) -> None:
        """One conversation."""
        raise NotImplementedError

    def _start(self, work: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._start(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        with ExitStack() as stack:
            stack.callback(sock.close)
            with suppress(OSError, ValueError):
                if self._context:
                    sock = self._context.wrap_socket(sock, server_side=True)
                    stack.callback(sock.close)
                peer = Peer(sock, self._over)
                stack.callback(peer.close)
                self.talk(peer)


class Fixed(Server):
    """Does one thing to everybody, from the first byte on."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self._fault = fault

    def talk(self, peer: Peer) -> None:
        self._fault(peer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mail:
    """What an SMTP server was given, up to the final dot."""

    sender: str
    recipients: tuple[str, ...]
    data: bytes  # dots as they were meant


@dataclass(slots=True)
class _Envelope:
    sender: str = ""
    recipients: list[str] = field(default_factory=list)


class Smtp(Server):
    """Answers as told, by command: `RCPT:address` for one recipient, `END` at the final dot."""

    def __init__(
        self,
        replies: Mapping[str, Reply | list[Reply]] | None = None,
        *,
        extensions: tuple[str, ...] = (),
        tls: ssl.SSLContext | None = None,
        is_implicit: bool = False,
    ) -> None:
        super().__init__(tls if is_implicit else None)
        self._tls = tls
        self._replies = dict(replies or {})
        self._extensions = extensions
        self.mails: list[Mail] = []
        self.lines: list[str] = []

    @property
    def commands(self) -> list[str]:
        return [line.split(" ")[0].upper() for line in self.lines]

    def talk(self, peer: Peer) -> None:
        peer.say(self._reply("GREETING", "220 ready"))
        envelope = _Envelope()
        while line := peer.reader.readline():
            text = line.decode().strip()
            self.lines.append(text)
            command = text.split(" ")[0].upper()
            if not self._answer(peer, command, text, envelope):
                return

    def _reply(self, command: str, otherwise: Reply) -> Reply:
        """Of several, one after the other, and the last one again and again."""
        told = self._replies.get(command, otherwise)
        if isinstance(told, list):
            return told[0] if len(told) == 1 else told.pop(0)
        return told

    def _answer(self, peer: Peer, command: str, text: str, envelope: _Envelope) -> bool:
        match command:
            case "EHLO":
                lines = ["250-fine", *(f"250-{name}" for name in self._extensions), "250 HELP"]
                peer.say(self._reply("EHLO", "\r\n".join(lines)))
            case "STARTTLS":
                reply = self._reply("STARTTLS", "220 go on")
                peer.say(reply)
                if self._tls and reply == "220 go on":
                    peer.secure(self._tls)
            case "AUTH":
                self._log_in(peer, text)
            case "MAIL":
                envelope.sender, envelope.recipients = _address(text), []
                peer.say(self._reply("MAIL", "250 ok"))
            case "RCPT":
                self._offer(peer, _address(text), envelope)
            case "DATA":
                self._take(peer, envelope)
            case "QUIT":
                peer.say(self._reply("QUIT", "221 bye"))
                return False
            case _:
                peer.say(self._reply(command, "502 unknown"))
        return True

    def _log_in(self, peer: Peer, text: str) -> None:
        if text.upper() == "AUTH LOGIN":
            for _ in range(2):
                peer.say("334 go on")
                self.lines.append(peer.reader.readline().decode().strip())
        peer.say(self._reply("AUTH", "235 welcome"))

    def _offer(self, peer: Peer, address: str, envelope: _Envelope) -> None:
        reply = self._reply(f"RCPT:{address}", self._reply("RCPT", "250 ok"))
        if isinstance(reply, str) and reply.startswith("25"):
            envelope.recipients.append(address)
        peer.say(reply)

    def _take(self, peer: Peer, envelope: _Envelope) -> None:
        reply = self._reply("DATA", "354 go on")
        peer.say(reply)
        if not (isinstance(reply, str) and reply.startswith("354")):
            return
        lines = []
        while (line := peer.reader.readline()) != b".\r\n":
            if not line:
                raise ConnectionAbortedError
            lines.append(line.removeprefix(b".") if line.startswith(b".") else line)
        taken = Mail(
            sender=envelope.sender,
            recipients=tuple(envelope.recipients),
            data=b"".join(lines),
        )
        self.mails.append(taken)
        peer.say(self._reply("END", "250 taken"))


def _address(text: str) -> str:
    found = re.search(r"<(.*)>", text)
    return found[1] if found else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What an HTTP server was asked."""

    path: str
    headers: dict[str, str]  # names in lower case
    body: bytes


def answer(status: int, body: bytes | str | dict[str, Any] = b"", **headers: str) -> bytes:
    """An HTTP answer, whole; an underscore in a header's name is a hyphen."""
    if isinstance(body, dict):
        body = json.dumps(body)
    data = body.encode() if isinstance(body, str) else body
    named = {"Content-Length": str(len(data)), **headers}
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in named.items()]
    head = "\r\n".join([f"HTTP/1.1 {status} Word", *lines])
    return head.encode() + b"\r\n\r\n" + data


class Http(Server):
    """Gives the answers of each path in turn, the last one again and again.

    A path is known by how it ends.
    """

    def __init__(
        self, answers: Mapping[str, list[bytes | Fault]], *, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(tls)
        self._answers = {ending: list(given) for ending, given in answers.items()}
        self._lock = threading.Lock()
        self.requests: list[Request] = []

    @property
    def origin(self) -> str:
        return f"https://localhost:{self.port}"

    def asked(self, ending: str) -> list[Request]:
        return [request for request in self.requests if request.path.endswith(ending)]

    def talk(self, peer: Peer) -> None:
        _, path, _ = peer.reader.readline().decode().split(" ")
        headers = {}
        while line := peer.reader.readline().strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        body = peer.reader.read(int(headers["content-length"]))
        with self._lock:
            self.requests.append(Request(path=path, headers=headers, body=body))
            given = next(a for ending, a in self._answers.items() if path.endswith(ending))
            reply = given[0] if len(given) == 1 else given.pop(0)
        if callable(reply):
            reply(peer)
        else:
            peer.sock.sendall(reply)
