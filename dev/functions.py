"""One of our functions under functions-framework, as a process of its own."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

from dev.processes import Watcher, free_port
from shared.errors import HookledgerError

ROOT: Final = Path(__file__).parent.parent / "functions"
TARGETS: Final = {"webhook": "webhook", "subscriber": "subscribe", "retry": "retry"}
START_SECONDS: Final = 60
STOP_SECONDS: Final = 20


class FunctionError(HookledgerError):
    """The function's server did not start."""


class Function:
    """`webhook`, `subscriber` or `retry`, listening on 127.0.0.1."""

    def __init__(
        self, name: str, environ: Mapping[str, str], *, log_path: Path, port: int = 0
    ) -> None:
        self.name: Final = name
        self.port: Final = port or free_port()
        self.log_path: Final = log_path
        self._environ: Final = dict(environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: Watcher | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """The server's process id; None while it does not run."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> Self:
        """Starts the server and returns when it listens; raises FunctionError when it does not."""
        command = [sys.executable, "-m", "functions_framework", "--target", TARGETS[self.name]]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT / self.name,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._watcher = Watcher(-self._process.pid, "TERM")
        try:
            self._await_listening(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Stops the server with its workers and waits for their end."""
        if self._process is None:
            return
        _signal_group(self._process, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        _signal_group(self._process, signal.SIGKILL)
        self._process.wait()
        self._process = None
        if self._watcher:
            self._watcher.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _await_listening(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            time.sleep(0.02)
        tail = self.log_path.read_bytes()[-2000:].decode(errors="replace")
        raise FunctionError(f"{self.name} did not start. End of {self.log_path}:\n{tail}")


def _signal_group(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, how)
