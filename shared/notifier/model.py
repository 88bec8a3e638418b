"""What the notifier's parts hand each other: a profile, a message, the verdict on an attempt."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

TIMEOUT_SECONDS: Final = 30  # of an attempt, unless its profile says otherwise
TIMEOUT_SECONDS_MAX: Final = 120
REPLY_CHARACTERS: Final = 500


class Status(StrEnum):
    """What becomes of a notification after an attempt, or without one."""

    SENT = "sent"
    RETRY = "retry"
    FAILED = "failed"
    EXPIRED = "expired"
    INVALID = "invalid"


class Result(StrEnum):
    """How one attempt ended."""

    SENT = "sent"
    TRANSIENT = "transient"
    PERMANENT = "permanent"


class Acceptance(StrEnum):
    """What the server said of one recipient; pending is whoever it did not decide on."""

    ACCEPTED = "accepted"
    REFUSED = "refused"
    PENDING = "pending"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How messages leave: a row of notifier.profiles, nothing of it checked yet."""

    name: str
    transport: str
    settings: Any
    secrets: Mapping[str, str] = field(default_factory=dict)  # key to reference, never a value
    timeout_seconds: Any = TIMEOUT_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One notification as it is to be sent, nothing of it checked yet."""

    notification_id: int
    subject: str
    body: str
    recipients: tuple[str, ...]  # all of them, for the headers
    pending: tuple[str, ...]  # those who have not accepted or refused it yet
    created_at: datetime
    channel: str = ""
    severity: str = "info"
    kind: str = "message"  # message, firing, resolved, test
    dedupe_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the server decided for one recipient."""

    acceptance: Acceptance
    code: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How one attempt ended, and why. `text` holds no secret."""

    result: Result
    code: str  # stable: `timeout`, `smtp_550`, `graph_429`, `env_unset`
    text: str  # cause and remedy, or the server's own reply; at most REPLY_CHARACTERS
    retry_after: float | None = None  # seconds, as the server asked
    ambiguous: bool = False  # the server may have taken it
    recipients: Mapping[str, Decision] = field(default_factory=dict)
