"""Google's own Pub/Sub emulator, where gcloud has it."""

import http.client
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from dev.processes import Watcher, free_port

START_SECONDS = 60


@cache
def missing() -> str:
    """Why it cannot be run here; empty if it can."""
    for program in ("gcloud", "java"):
        if not shutil.which(program):
            return f"Google's Pub/Sub emulator needs {program}"
    return "" if _jar() else "gcloud has no component pubsub-emulator"


@contextmanager
def running(folder: Path) -> Iterator[str]:
    """An emulator; what PUBSUB_EMULATOR_HOST is to be."""
    port = free_port()
    command = ["java", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-jar", _jar()]
    command += ["--host=127.0.0.1", f"--port={port}"]
    with (folder / "pubsub-emulator.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    watcher = Watcher(process.pid, "TERM")
    try:
        _await_answer(port, process)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()
        watcher.close()


@cache
def _jar() -> str:
    words = ["gcloud", "info", "--format=value(installation.sdk_root)"]
    root = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    jars = Path(root or "/").glob("platform/pubsub-emulator/lib/cloud-pubsub-emulator-*.jar")
    return str(next(jars, ""))


def _await_answer(port: int, process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with closing(connection), suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/")
            connection.getresponse().read()
            return
        time.sleep(0.05)
    raise RuntimeError("Google's Pub/Sub emulator did not start")
