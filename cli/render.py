"""How things look on a terminal of 80 columns, whatever they contain."""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import typer
from rich.table import Table
from rich.text import Text

_UNITS: Final = (("d", 86400), ("h", 3600), ("min", 60))
_PART: Final = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\],:]|[^\s{}\[\],:"]+')


def as_json(value: Any) -> None:
    """Prints dataclasses, times and bytes as one line of JSON."""
    typer.echo(json.dumps(value, default=_plain))


def printable(text: str) -> str:
    """`text` with what a terminal might act upon as escapes; lines stay lines."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def cell(text: object) -> Text:
    """One line for a table: no markup, nothing that a terminal acts upon."""
    return Text(printable(str(text)).replace("\n", " "), no_wrap=True, overflow="ellipsis")


def span(seconds: float) -> str:
    """A length of time in its largest unit: 45 s, 3 min, 2 h, 5 d."""
    for unit, size in _UNITS:
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"


def events(count: int) -> str:
    """So many failed events, in words."""
    return f"{count} failed event{'' if count == 1 else 's'}"


def ago(moment: datetime | None) -> str:
    """How long ago that was, or until then."""
    if moment is None:
        return ""
    passed = (datetime.now(UTC) - moment).total_seconds()
    return f"{span(passed)} ago" if passed >= 0 else f"in {span(-passed)}"


def clock(moment: datetime | None) -> str:
    """A time to the second, in UTC."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z" if moment else ""


def moment(text: str) -> datetime:
    """A time as people write it: ISO 8601 (UTC unless it says otherwise), or 45m, 2h, 7d ago."""
    if found := re.fullmatch(r"(\d{1,6})([mhd])", text.strip()):
        units = {"m": "minutes", "h": "hours", "d": "days"}
        return datetime.now(UTC) - timedelta(**{units[found[2]]: int(found[1])})
    try:
        parsed = datetime.fromisoformat(text.strip())
    except ValueError:
        raise typer.BadParameter(
            f"{text} is no time. Say 45m, 2h or 7d ago, or 2026-11-30T12:00."
        ) from None
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)


def table(*columns: str, wide: tuple[str, ...], numbers: tuple[str, ...] = ()) -> Table:
    """A table of one line a row; where the terminal ends, the `wide` columns are cut."""
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for name in columns:
        made.add_column(
            name,
            no_wrap=name not in wide,
            overflow="ellipsis",
            justify="right" if name in numbers else "left",
        )
    return made


def add(table: Table, *cells: object) -> None:
    """A row of such a table."""
    table.add_row(*(cell(each) for each in cells))


def grid(pairs: Iterable[tuple[str, object]]) -> Table:
    """Names and values below each other; an empty value is left out, a long one goes on."""
    made = Table.grid(padding=(0, 2))
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in pairs:
        if value not in (None, ""):
            made.add_row(name, value if isinstance(value, Text) else Text(printable(str(value))))
    return made


def pretty(payload: bytes) -> str:
    """A body to look at: JSON indented with every number as it was sent, anything else as it is.

    Bytes that are no text, and characters that a terminal acts upon, are shown as escapes.
    """
    try:
        text = payload.decode()
        json.loads(text)
    except (ValueError, RecursionError):
        return printable(payload.decode("utf-8", "backslashreplace"))
    return printable(_indented(text))


def _indented(text: str) -> str:
    lines, depth, before = [""], 0, ""
    for part in _PART.findall(text):
        closes, opened = part in ("}", "]"), before in ("{", "[")
        depth -= closes
        if before == "," or opened is not closes:
            lines.append("  " * depth)
        lines[-1] += ": " if part == ":" else part
        depth += part in ("{", "[")
        before = part
    return "\n".join(lines)


def _plain(value: Any) -> Any:
    match value:
        case datetime():
            return value.isoformat()
        case bytes():
            return value.hex()
        case _ if is_dataclass(value) and not isinstance(value, type):
            return asdict(value)
        case _:
            return str(value)
