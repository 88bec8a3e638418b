"""What every child process of the local stack needs: a port, and an end when its owner ends."""

import contextlib
import random
import socket
import subprocess
from typing import Final

# Its standard input is a pipe whose other end the kernel closes when the owner dies, however it
# dies. Not PR_SET_PDEATHSIG: that fires when the starting thread ends, and macOS has none.
_SCRIPT: Final = 'read -r _; kill -s "$1" -- "$2"'


class Watcher:
    """Sends `signal_name` to `pid` (negative: to a process group) when this process dies."""

    def __init__(self, pid: int, signal_name: str) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "watcher", signal_name, str(pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The watcher's own process id."""
        return self._process.pid

    def close(self) -> None:
        """The watched process has ended; there is nothing left to watch."""
        self._process.kill()
        self._process.communicate()


def free_port() -> int:
    """A free port of 127.0.0.1, from below those that the system gives to outgoing connections.

    One of theirs could be taken while a server is stopped for a while.
    """
    while True:
        port = random.randrange(15000, 32000)  # noqa: S311 - no secret
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
