"""What a check found, and how it is put down when the check itself fails."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from shared import redact


class Severity(StrEnum):
    """How much it matters."""

    OK = "ok"
    WARNING = "warning"  # events flow; something will not go as expected
    ERROR = "error"  # events do not flow, or are not replayed


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One answer. `check` names what was looked at: `application:schema`, `tenant:acme`."""

    check: str
    severity: Severity
    cause: str
    remedy: str = ""


def fine(check: str, cause: str) -> Finding:
    """As it should be."""
    return Finding(check=check, severity=Severity.OK, cause=cause)


def warning(check: str, cause: str, remedy: str) -> Finding:
    """Worth a look by day."""
    return Finding(check=check, severity=Severity.WARNING, cause=cause, remedy=remedy)


def error(check: str, cause: str, remedy: str) -> Finding:
    """Worth a look now."""
    return Finding(check=check, severity=Severity.ERROR, cause=cause, remedy=remedy)


def guarded(check: str, look: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """What `look` finds; a fault of the look itself is a finding too, and stops no other."""
    try:
        yield from look()
    except Exception as fault:  # noqa: BLE001 - whatever it is, the other checks go on
        cause = f"{type(fault).__name__}: {redact.message(fault)}"
        yield error(check, cause, "Correct what the message names, then run preflight again.")
