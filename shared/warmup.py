"""At the start of a new instance its network may come late: the functions that can wait, do."""

import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from shared import log

WAIT_SECONDS: Final = 30.0
ATTEMPT_SECONDS: Final = 2.0
PAUSE_SECONDS: Final = 0.25


def await_network(
    environ: Mapping[str, str],
    *,
    wait_seconds: float = WAIT_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """On Cloud Run, waits until the application database's port can be reached; raises nothing.

    At import: the server listens only afterwards, so that no message comes that could only be
    refused. No connection is left open, since the server forks.
    """
    addresses = _addresses(environ.get("APP_DATABASE_URL", ""))
    if "K_SERVICE" not in environ or not addresses:
        return
    started = time.monotonic()
    if _is_reached(addresses):
        return
    reached = False
    while not reached and time.monotonic() - started < wait_seconds:
        sleep(PAUSE_SECONDS)
        reached = _is_reached(addresses)
    log.warning("network.late", milliseconds=log.milliseconds(started), reached=reached)


def _addresses(conninfo: str) -> list[tuple[str, int]]:
    """Hosts and ports; none of a socket's path, a reference to a secret, or a malformed address."""
    try:
        named = conninfo_to_dict(conninfo)
    except psycopg.ProgrammingError:
        return []
    hosts = [host for host in str(named.get("host") or "").split(",") if host]
    ports = str(named.get("port") or "").split(",")
    if len(ports) != len(hosts):
        ports = ports[:1] * len(hosts)
    return [
        (host, int(port or 5432))
        for host, port in zip(hosts, ports, strict=True)
        if not host.startswith("/") and (port or "5432").isdecimal()
    ]


def _is_reached(addresses: list[tuple[str, int]]) -> bool:
    for address in addresses:
        with suppress(OSError):
            socket.create_connection(address, timeout=ATTEMPT_SECONDS).close()
            return True
    return False
