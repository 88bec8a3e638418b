"""retry_failed_events: the retry run by hand."""

import json
from typing import Annotated

import typer
from rich.table import Table

from cli import context
from shared.replay import Report, Request


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command("retry_failed_events")(retry_failed_events)


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


def _rehearsal(report: Report) -> Table:
    table = Table("failed event", "event ledger", "snapshot", "would fail with")
    for row in report.rows:
        table.add_row(
            str(row["id"]),
            row.get("ledger", ""),
            row.get("snapshot", ""),
            row.get("error_type", ""),
        )
    return table
