"""retry_failed_events, failures: the retry run, and the failure ledger, in an operator's hands."""

import json
from dataclasses import asdict
from typing import Annotated, Final

import typer
from rich.table import Table

from cli import context, render, views
from cli.scope import Actor, explicit, operator, scoped
from shared import dossier, figures
from shared.errors import ConfigurationError
from shared.replay import Report, Request
from shared.triage import UNRESOLVED, Scope, Status, Triage

SHOWN_ROWS: Final = 20
REQUEUED_PER_SECOND: Final = 10.0

Ids = Annotated[list[int] | None, typer.Argument(help="Failed events by their ids.", min=1)]
States = Annotated[
    list[Status] | None, typer.Option("--status", help="In this state; may be said twice.")
]
All = Annotated[bool, typer.Option("--all", help="Every one, whatever it is.")]
DryRun = Annotated[bool, typer.Option(help="Say how many and which; change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

ledger = typer.Typer(
    help="The failure ledger: list, show, requeue and resolve failed events.", no_args_is_help=True
)


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command("retry_failed_events")(retry_failed_events)
    app.add_typer(ledger, name="failures")


def retry_failed_events(
    limit: Annotated[int | None, typer.Option(min=1, help="Rows at most; one batch of 50.")] = None,
    event_id: Annotated[
        int | None, typer.Option(min=1, help="This row's primary key: it must be due.")
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Say what would happen; change nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Replay one batch of failed events that are due.

    Example: python manage.py retry_failed_events --limit 10
    """
    core = context.core()
    batch = core.settings.retry_batch_limit
    with context.err.status("Replaying failed events"):
        report = core.replayer().run(
            Request(limit=limit or batch, event_id=event_id, dry_run=dry_run),
            budget_seconds=core.settings.retry_time_budget_seconds,
        )
    if as_json:
        typer.echo(json.dumps(report.as_json()))
        return
    if dry_run:
        context.out.print(_rehearsal(report))
    typer.echo(f"Retried={report.retried} resolved={report.resolved} failed={report.failed}")


@ledger.command("list")
@scoped
def list_failures(
    *,
    scope: Scope,
    states: States = None,
    limit: Annotated[int, typer.Option(min=1, help="Rows at most.")] = 50,
    longest_due: Annotated[
        bool, typer.Option("--longest-due", help="The longest due first, not the newest.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List failed events: those that are not resolved, unless --status says otherwise.

    Example: python manage.py failures list --organization acme --since 2h
    """
    triage = _triage()
    statuses = tuple(states or UNRESOLVED)
    rows = triage.find(scope, statuses, limit=limit, longest_due=longest_due)
    if as_json:
        render.as_json(rows)
        return
    counted = {each.value: 0 for each in statuses}
    for part in triage.tally(scope):
        if part.status in counted:
            counted[part.status] += part.count
    if rows:
        context.out.print(views.listed(rows))
    total = ", ".join(f"{count} {name}" for name, count in counted.items())
    context.out.print(f"{len(rows)} shown of {sum(counted.values())}: {total}")


@ledger.command("show")
def show_failure(
    row: Annotated[int, typer.Argument(metavar="ID", min=1, help="The failed event's id.")],
    payload: Annotated[bool, typer.Option("--payload", help="Its payload too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show one failed event: error, envelope, history, and the next step.

    Example: python manage.py failures show 42 --payload
    """
    application = context.core().application
    found = dossier.find(application, row)
    if found is None:
        raise ConfigurationError(f"There is no failed event {row}.")
    body = dossier.payload(application, row) if payload else None
    if as_json:
        render.as_json(views.dossier_json(found, body))
        return
    for part in views.dossier(found):
        context.out.print(part)
    if payload:
        context.out.print("\n[bold]Payload[/]")
        typer.echo("It was taken away." if body is None else render.pretty(body))


@ledger.command("requeue")
@scoped
def requeue_failures(
    *,
    scope: Scope,
    ids: Ids = None,
    states: States = None,
    all_: All = False,
    per_second: Annotated[
        float, typer.Option(min=0.01, help="How many come due each second.")
    ] = REQUEUED_PER_SECOND,
    reason: Annotated[str, typer.Option(help="Why; it is kept.")] = "requeued by hand",
    actor: Actor = "",
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Make failed events due afresh: those that were given up, with all their retries.

    Example: python manage.py failures requeue --organization acme --error-type UndefinedColumn
    """
    scope = explicit(scope, ids, all_=all_)
    statuses = _movable(states, (Status.FAILED,))
    by, triage = operator(actor, reason), _triage()
    found = _matching(triage, scope, statuses)
    seconds = len(found) / per_second
    lasts = f"due over {render.span(seconds)}" if seconds >= 1 else "due at once"
    if dry_run or not found:
        _tell(triage, scope, found, f"requeued, {lasts}", as_json=as_json)
        return
    _confirm(f"Requeue {render.events(len(found))}, {lasts}?", yes=yes)
    moved = triage.requeue(scope, by, statuses=statuses, per_second=per_second)
    _done(moved, f"requeued, {lasts}", as_json=as_json)


@ledger.command("resolve")
@scoped
def resolve_failures(
    *,
    scope: Scope,
    reason: Annotated[str, typer.Option(help="Why; it is kept.")],
    ids: Ids = None,
    states: States = None,
    all_: All = False,
    actor: Actor = "",
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Close failed events that will never be stored. It cannot be undone.

    Further deliveries of the same events do not open them again.

    Example: python manage.py failures resolve 42 --reason "a test of the publisher"
    """
    scope = explicit(scope, ids, all_=all_)
    statuses = _movable(states, UNRESOLVED)
    by, triage = operator(actor, reason), _triage()
    found = _matching(triage, scope, statuses)
    if dry_run or not found:
        _tell(triage, scope, found, "resolved", as_json=as_json)
        return
    _confirm(f"Resolve {render.events(len(found))}, never to be replayed?", yes=yes)
    _done(triage.resolve(scope, by, statuses=statuses), "resolved", as_json=as_json)


@ledger.command("stats")
def show_stats(as_json: AsJson = False) -> None:
    """Show the failure ledger in numbers: what is due, what was given up, and for which errors.

    Example: python manage.py failures stats
    """
    core = context.core()
    stats, groups = figures.stats(core.application), figures.groups(core.application)
    notices, incidents = figures.notices(core.application), core.incidents.open()
    if as_json:
        found = {"notifier": notices, "incidents": incidents, "groups": groups}
        render.as_json(asdict(stats) | found)
        return
    for part in views.numbers(stats, notices, incidents, groups):
        context.out.print(part)


def _triage() -> Triage:
    return Triage(context.core().application)


def _movable(states: list[Status] | None, usual: tuple[Status, ...]) -> tuple[Status, ...]:
    if states and Status.RESOLVED in states:
        raise ConfigurationError("What is resolved stays resolved. Say --status pending or failed.")
    return tuple(states or usual)


def _matching(triage: Triage, scope: Scope, states: tuple[Status, ...]) -> list[int]:
    return [row for step in triage.movable(scope, states) for row in step]


def _confirm(question: str, *, yes: bool) -> None:
    if not yes:
        typer.confirm(question, abort=True, err=True)


def _done(count: int, what: str, *, as_json: bool) -> None:
    if as_json:
        render.as_json({"count": count})
    else:
        context.out.print(f"{render.events(count)} {what}")


def _tell(triage: Triage, scope: Scope, rows: list[int], what: str, *, as_json: bool) -> None:
    """How many and which would be changed; and what else the scope has, that would not be."""
    if as_json:
        render.as_json({"count": len(rows), "ids": rows})
        return
    if not rows:
        others = ", ".join(
            f"{part.count} {'leased' if part.is_leased else part.status}"
            for part in triage.tally(scope)
        )
        context.out.print(f"None would be {what}. What is there: {others or 'nothing'}.")
        return
    shown = Scope(ids=tuple(rows[-SHOWN_ROWS:]))
    context.out.print(views.listed(triage.find(shown, UNRESOLVED, limit=SHOWN_ROWS)))
    if len(rows) > SHOWN_ROWS:
        context.out.print(f"… and {len(rows) - SHOWN_ROWS} more")
    context.out.print(f"{render.events(len(rows))} would be {what}")


def _rehearsal(report: Report) -> Table:
    table = Table("failed event", "event ledger", "snapshot", "would fail with")
    for row in report.rows:
        fault = f"{row['error_type']}: {row['error_message']}" if "error_type" in row else ""
        table.add_row(
            str(row["id"]),
            row.get("ledger", ""),
            row.get("snapshot", ""),
            render.cell(fault),
        )
    return table
