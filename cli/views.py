"""Failed events on a terminal: a list, one of them with its history, all of them in numbers."""

import base64
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from cli import render
from shared.dossier import Dossier, Shown
from shared.figures import Group, Notices, Stats
from shared.incidents import Incident
from shared.remedies import remedy
from shared.text import cap
from shared.triage import Listed

MESSAGE_BYTES: Final = 160  # of the message in a list of kinds


def listed(rows: list[Listed]) -> Table:
    """Failed events, a line each."""
    table = render.table(
        "id",
        "status",
        "when",
        "tries",
        "topic",
        "shop",
        "error",
        wide=("topic", "shop", "error"),
        numbers=("id",),
    )
    for row in rows:
        render.add(
            table,
            row.id,
            "leased" if row.is_leased else row.status,
            _when(row),
            f"{row.retry_count}/{row.max_retries}",
            row.topic,
            row.shop_domain.removesuffix(".myshopify.com"),
            row.error_type,
        )
    return table


def _when(row: Listed) -> str:
    """A pending row's time to be due; of others, how long ago that was which ended them."""
    if row.due_at is None:
        return render.ago(row.resolved_at or row.last_attempted_at or row.created_at)
    due = render.ago(row.due_at)
    return due if due.startswith("in ") else f"due {due.removesuffix(' ago')}"


def dossier(found: Dossier) -> Iterator[RenderableType]:
    """One failed event with all that is known of it, but its payload."""
    event = found.event
    yield render.grid(_identity(event))
    yield _heading("Error")
    yield render.grid(_error(event))
    yield _heading("Envelope")
    yield Text(render.printable(json.dumps(event.envelope, indent=2, ensure_ascii=False)))
    if found.attempts:
        yield _heading("Replays")
        yield _attempts(found)
    if found.actions:
        yield _heading("By hand")
        yield _actions(found)
    if found.incident:
        since = render.ago(found.incident.started_at)
        yield _heading("Open incident")
        yield render.grid([(found.incident.kind, f"{since}: {found.incident.cause}")])
    yield _heading("Next step")
    yield Text(_next_step(event))


def dossier_json(found: Dossier, payload: bytes | None) -> dict[str, Any]:
    """The same for programs; a payload that is no UTF-8 comes in base64."""
    shown = asdict(found)
    answer = shown.pop("event") | shown | {"next_step": _next_step(found.event)}
    if payload is None:
        return answer
    try:
        return answer | {"payload": payload.decode()}
    except UnicodeDecodeError:
        return answer | {"payload_base64": base64.b64encode(payload).decode("ascii")}


def numbers(
    stats: Stats, notices: Notices | None, incidents: Sequence[Incident], groups: Sequence[Group]
) -> Iterator[RenderableType]:
    """The failure ledger in numbers, open incidents, and the kinds of failures."""
    yield _counts(stats, notices)
    if incidents:
        yield _heading("Open incidents")
        yield _incidents(incidents)
    if groups:
        yield _heading("Unresolved, by kind")
        yield _kinds(groups)


def _identity(event: Shown) -> list[tuple[str, object]]:
    return [
        ("id", event.id),
        ("status", _state(event)),
        ("event", event.event_id),
        ("topic", event.topic or "unknown"),
        ("shop", event.shop_domain or "unknown"),
        ("organization", event.organization_id or "unknown"),
        ("source", event.source),
        ("recorded", render.clock(event.created_at)),
        ("deliveries", event.occurrences),
        ("last tried", render.clock(event.last_attempted_at)),
        ("payload", _payload(event)),
        ("sha256", event.payload_sha256.hex()),
    ]


def _state(event: Shown) -> str:
    tries = f"{event.retry_count} of {event.max_retries} retries failed"
    if event.status == "resolved":
        return f"resolved ({event.resolution}) {render.clock(event.resolved_at)}"
    if event.leased_until:
        return f"{event.status}, being replayed until {render.clock(event.leased_until)}, {tries}"
    if event.due_at:
        return f"{event.status}, due {render.clock(event.due_at)}, {tries}"
    return f"{event.status}, {tries}"


def _payload(event: Shown) -> str:
    if event.payload_bytes is None:
        return f"taken away {render.clock(event.redacted_at)}"
    return f"{event.payload_bytes} bytes"


def _error(event: Shown) -> list[tuple[str, object]]:
    return [
        ("type", f"{event.error_type}, {event.error_class}"),
        ("code", event.error_code),
        ("fingerprint", event.fingerprint),
        ("message", event.error_message),
        ("traceback", event.traceback.strip()),
    ]


def _next_step(event: Shown) -> str:
    return remedy(event.error_type, event.error_code, event.status)


def _attempts(found: Dossier) -> Table:
    table = render.table("try", "started", "took", "outcome", "error", wide=("error",))
    for each in found.attempts:
        took = (each.finished_at - each.started_at).total_seconds() if each.finished_at else None
        fault = f"{each.error_type}: {each.error_message}" if each.error_type else ""
        render.add(
            table,
            each.attempt,
            render.clock(each.started_at),
            "" if took is None else f"{took:.1f} s",
            each.outcome or "running",
            fault,
        )
    return table


def _actions(found: Dossier) -> Table:
    table = render.table("when", "who", "what", "rows", "why", wide=("who", "why"))
    for each in found.actions:
        when = render.clock(each.acted_at)
        render.add(table, when, each.actor, each.action, each.count, each.reason)
    return table


def _incidents(incidents: Sequence[Incident]) -> Table:
    table = render.table(
        "tenant", "kind", "since", "probes", "cause", wide=("tenant", "cause"), numbers=("probes",)
    )
    for each in incidents:
        since = render.ago(each.started_at)
        render.add(table, each.tenant, each.kind, since, each.probe_count, each.cause)
    return table


def _counts(stats: Stats, notices: Notices | None) -> Table:
    rate = stats.recovery_rate_24h
    last_run = render.ago(stats.last_run_at) or "never"
    return render.grid(
        [
            ("due", f"{stats.due}{_oldest(stats.oldest_due_seconds)}"),
            ("pending", f"{stats.pending}, of them {stats.leased} leased, {stats.parked} parked"),
            ("failed", stats.failed),
            ("resolved in 24 h", stats.resolved_24h),
            ("recorded in 24 h", stats.recorded_24h),
            ("recovery rate", "" if rate is None else f"{rate:.0%} of those recorded in 24 h"),
            ("incidents", f"{stats.incidents_open} open, {stats.paused} paused by hand"),
            ("outbox", f"{stats.outbox}{_oldest(stats.oldest_outbox_seconds)}"),
            ("notifier", notices and f"{notices.due} due, {notices.failed_24h} failed in 24 h"),
            ("last retry run", last_run),
        ]
    )


def _oldest(seconds: float | None) -> str:
    return "" if seconds is None else f", one of them for {render.span(seconds)}"


def _kinds(groups: Sequence[Group]) -> Table:
    """Two lines or three a kind: what fails and how it says so, then where to look."""
    made = Table.grid(padding=(0, 2))
    made.add_column(justify="right", no_wrap=True)
    made.add_column(overflow="fold")
    for group in groups:
        message = cap(group.error_message, MESSAGE_BYTES).replace("\n", " ")
        what = render.printable(f"{group.error_type} on {group.topic or 'unknown'}: {message}")
        where = (
            f"{group.failed} given up, first {render.ago(group.since)}, "
            f"example {group.example_id}, fingerprint {group.fingerprint}"
        )
        made.add_row(str(group.count), Text(what))
        made.add_row("", Text(where, style="dim"))
    return made


def _heading(text: str) -> Text:
    return Text(f"\n{text}", style="bold")
