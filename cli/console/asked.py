"""Which failed events a page is about: the filters in its address or form."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import typer

from cli import render
from shared.triage import UNRESOLVED, Scope, Status

TEXTS: Final = ("organization", "shop", "topic", "error_type", "code", "fingerprint")
TIMES: Final = ("since", "until")
MAX_ID: Final = 2**63 - 1


class UnclearError(ValueError):
    """What was said means nothing; the text is for whoever said it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The filters as they were said, which go on to the next page, and what they mean."""

    said: dict[str, str]
    scope: Scope
    statuses: tuple[Status, ...]

    @property
    def is_narrow(self) -> bool:
        """Whether more is said than a state or an end: else it is the whole failure ledger."""
        return bool(self.scope.said().keys() - {"until"})

    def until_now(self) -> "Asked":
        """The same without what is recorded from now on, so that a count holds."""
        if self.scope.ids or self.scope.until:
            return self
        now = datetime.now(UTC).isoformat()
        return read(self.said | {"until": now})


def read(arguments: Mapping[str, str]) -> Asked:
    """What the arguments of an address or form say. Raises UnclearError."""
    names = (*TEXTS, *TIMES, "status", "id")
    said = {name: text for name in names if (text := _clean(arguments.get(name, "")))}
    texts = {name: said[name] for name in TEXTS if name in said}
    times = {name: _moment(said[name]) for name in TIMES if name in said}
    meant: dict[str, Any] = texts | times
    if "shop" in meant:
        meant["shop"] = meant["shop"].lower()
    ids = (number(said["id"]),) if "id" in said else None
    statuses = (_status(said["status"]),) if "status" in said else UNRESOLVED
    return Asked(said=said, scope=Scope(ids=ids, **meant), statuses=statuses)


def number(text: str) -> int:
    """The id of a row. Raises UnclearError."""
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:20]) <= MAX_ID:
        raise UnclearError(f"{text} is no id.")
    return int(text)


def _clean(text: str) -> str:
    return text.replace("\0", "").strip()


def _moment(text: str) -> datetime:
    try:
        return render.moment(text)
    except (typer.BadParameter, OverflowError):
        raise UnclearError(f"{text} is no time. Say 45m, 2h or 7d, or 2026-11-30T12:00.") from None


def _status(text: str) -> Status:
    try:
        return Status(text)
    except ValueError:
        raise UnclearError(f"{text} is no state.") from None
