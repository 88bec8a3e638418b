"""What the tests of the transports send: profiles, messages, certificates."""

import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import trustme

from shared.notifier import deadline, transports
from shared.notifier.model import Message, Profile, Verdict

MESSAGE: Final = Message(
    notification_id=42,
    subject="Three events failed",
    body="Look into the ledger.\n.\nThat is all.\n",
    recipients=("ada@example.com", "bob@example.com"),
    pending=("ada@example.com", "bob@example.com"),
    created_at=datetime(2026, 11, 30, 12, tzinfo=UTC),
    channel="ops",
    severity="error",
    kind="firing",
    dedupe_key="failed-events",
)
PASSWORD: Final = "swordfish/+ 17"
REF: Final = "_env:NOTIFIER_PASSWORD"
HANG_GUARD_SECONDS: Final = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """A certificate authority, and contexts of servers that it vouches for."""

    ca: trustme.CA
    ca_file: str

    def context(self, *names: str, **named: Any) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.ca.issue_cert(*(names or ("localhost", "127.0.0.1")), **named).configure_cert(context)
        return context


def authority(folder: Path) -> Authority:
    ca = trustme.CA()
    ca_file = folder / "ca.pem"
    ca.cert_pem.write_to_path(str(ca_file))
    return Authority(ca=ca, ca_file=str(ca_file))


def smtp(port: int, *, timeout_seconds: Any = 30, **settings: Any) -> Profile:
    """A profile for an SMTP server on loopback; with a username it has a password too."""
    values = {"host": "127.0.0.1", "port": port, "tls": "none", "sender": "hook@example.com"}
    return Profile(
        name="mail",
        transport="smtp",
        settings=values | settings,
        secrets={"password": REF} if "username" in settings else {},
        timeout_seconds=timeout_seconds,
    )


def graph(origin: str, ca_file: str, **settings: Any) -> Profile:
    values = {
        "tenant": "contoso.example",
        "client_id": "11111111-2222-3333-4444-555555555555",
        "sender": "hook@example.com",
        "authority": origin,
        "host": origin,
        "ca_file": ca_file,
    }
    return Profile(
        name="graph",
        transport="graph",
        settings=values | settings,
        secrets={"client_secret": REF},
    )


def webhook(url: str, ca_file: str = "", *, secrets: Mapping[str, str] | None = None) -> Profile:
    settings = {"url": url} | ({"ca_file": ca_file} if ca_file else {})
    return Profile(
        name="chat",
        transport="webhook",
        settings={name: value for name, value in settings.items() if value},
        secrets=secrets or {},
    )


def attempt(
    profile: Profile,
    message: Message = MESSAGE,
    *,
    seconds: float | None = None,
    lookup: deadline.Lookup = socket.getaddrinfo,
    **named: Any,
) -> Verdict:
    """One attempt, with `seconds` for it rather than the profile's whole ones."""
    named["deadline"] = lambda given: deadline.Deadline(seconds or given, lookup=lookup)
    given = {"resolve": lambda _: PASSWORD} | named
    return transports.attempt(profile, message, **given)


def to(*names: str, **named: Any) -> Message:
    """The message, to these at example.com."""
    addresses = tuple(f"{name}@example.com" for name in names)
    return replace(MESSAGE, **{"recipients": addresses, "pending": addresses} | named)


quick = partial(attempt, seconds=0.4)
