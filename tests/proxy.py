"""A TCP proxy with faults: it falls silent, cuts, and counts how often a client waits."""

import contextlib
import socket
import struct
import threading
from typing import Self

_RESET = struct.pack("ii", 1, 0)  # linger for no time: close() sends a reset


class Proxy:
    """Stands at `127.0.0.1:port` in front of another port. Faults hit the connections there are."""

    def __init__(self, port: int) -> None:
        self._upstream = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._pairs: list[_Pair] = []
        self.accepts_in_silence = False
        self.refuses = False  # connections to come are cut at once

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.reset()

    @property
    def round_trips(self) -> int:
        """How often a client has said something after it had heard something."""
        return sum(pair.round_trips for pair in self._pairs)

    @property
    def accepted(self) -> int:
        """How many connections there have been."""
        return len(self._pairs)

    def swallow(self) -> None:
        """What is connected now stays so, and nothing passes any more: a forgotten NAT entry."""
        for pair in self._pairs:
            pair.is_silent = True

    def fall_silent(self) -> None:
        """As `swallow`, for the connections to come as well: a server that hangs."""
        self.accepts_in_silence = True
        self.swallow()

    def recover(self) -> None:
        """New connections are served again; the old ones stay lost."""
        self.accepts_in_silence = False

    def reset(self) -> None:
        """Resets every connection."""
        for pair in self._pairs:
            pair.reset()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._connect(client)

    def _connect(self, client: socket.socket) -> None:
        """To the other port; who finds nobody there is cut off."""
        try:
            if self.refuses:
                raise ConnectionRefusedError
            server = socket.create_connection(self._upstream)
        except OSError:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            client.close()
            return
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pair = _Pair(client, server)
        pair.is_silent = self.accepts_in_silence
        self._pairs.append(pair)
        pair.start()


class _Pair:
    """One connection and its two directions."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self._client, self._server = client, server
        self._heard = True
        self.is_silent = False
        self.round_trips = 0

    def start(self) -> None:
        threading.Thread(target=self._pump, args=(self._client, self._server), daemon=True).start()
        threading.Thread(target=self._pump, args=(self._server, self._client), daemon=True).start()

    def reset(self) -> None:
        for end in (self._client, self._server):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.shutdown(socket.SHUT_RD)
                end.close()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(65536):
                if self.is_silent:
                    continue
                if source is self._server:
                    self._heard = True
                elif self._heard:
                    self._heard = False
                    self.round_trips += 1
                sink.sendall(chunk)
        if not self.is_silent:
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                    end.close()
