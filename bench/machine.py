"""What a figure was measured on: without it the figure means nothing."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg


def host() -> dict[str, str]:
    """Processor, memory, system, load, and the version of Python."""
    return {
        "processor": f"{_processor()}, {os.cpu_count()} virtual cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": platform.platform(terse=True),
        "load": f"{os.getloadavg()[0]:.1f} when it began",
        "python": platform.python_version(),
    }


def describe(connection: psycopg.Connection[Any]) -> dict[str, str]:
    """The host, and the versions that matter."""
    return {
        **host(),
        "psycopg": f"{psycopg.__version__} ({psycopg.pq.__impl__})",
        "postgresql": ".".join(str(part) for part in divmod(connection.info.server_version, 10000)),
        **{name: _setting(connection, name) for name in ("fsync", "synchronous_commit")},
    }


@contextmanager
def core_for_servers() -> Iterator[None]:
    """What is started within gets the last core; whoever measures has the first one to itself.

    Where the system cannot pin, or has one core, nothing is pinned.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    if len(cores) < 2:
        yield
        return
    os.sched_setaffinity(0, cores[-1:])
    yield
    os.sched_setaffinity(0, cores[:1])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _setting(connection: psycopg.Connection[Any], name: str) -> str:
    row = connection.execute("select current_setting(%s)", [name]).fetchone()
    return str(row and row[0])
