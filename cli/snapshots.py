"""rebuild_snapshots: the snapshots made again from the event ledger."""

import json
from datetime import datetime
from typing import Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from cli import context
from shared import db, migrate
from shared.envelope import timestamp
from shared.errors import ConfigurationError
from shared.rebuild import Rebuild, Report, Scope


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command("rebuild_snapshots")(rebuild_snapshots)


def rebuild_snapshots(  # noqa: PLR0917 - an option each
    organization: Annotated[str, typer.Option(help="Whose snapshots.")],
    shop: Annotated[str, typer.Option(help="Only this shop's.")] = "",
    resource: Annotated[str, typer.Option(help="Only this resource's, such as orders.")] = "",
    since: Annotated[str, typer.Option(help="From events received then or later, ISO 8601.")] = "",
    until: Annotated[str, typer.Option(help="From events received before that.")] = "",
    after: Annotated[int, typer.Option(min=0, help="Go on behind this ledger row.")] = 0,
    dry_run: Annotated[bool, typer.Option(help="Say what would happen; change nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Make snapshots again from the event ledger. Safe to repeat, beside live events too.

    Bodies are parsed afresh; a snapshot changes only if the ledger holds a newer state, or the
    same state now parses otherwise.

    Example: python manage.py rebuild_snapshots --organization acme --resource orders --dry-run
    """
    scope = Scope(
        organization_id=organization,
        shop_domain=shop.strip().lower() or None,
        resource=resource or None,
        since=_moment(since),
        until=_moment(until),
        after=after,
    )
    scope.topics()  # a resource without snapshots is refused before anything is connected
    core = context.core()
    target = core.directory.target(organization)
    with db.connect(target, migrate.LIMITS) as connection:
        rebuild = Rebuild(connection, scope, hasher=core.privacy.hasher, dry_run=dry_run)
        _walk(rebuild)
    report = rebuild.report()
    if as_json:
        typer.echo(json.dumps(report.as_json() | {"dry_run": dry_run}))
    else:
        context.out.print(_table(report, dry_run=dry_run))


def _walk(rebuild: Rebuild) -> None:
    done = None
    try:
        with Progress(console=context.err, transient=True) as progress:
            task = progress.add_task("Rebuilding", total=None)
            for step in rebuild.batches():
                done = step.done
                progress.update(task, total=step.last - step.first, completed=done - step.first)
    except BaseException:
        if done is not None:
            context.err.print(f"Stopped. Up to ledger row {done} all is done: --after {done}")
        raise


def _moment(text: str) -> datetime | None:
    moment = timestamp(text)
    if text and moment is None:
        raise ConfigurationError(f"{text} is no time in ISO 8601, such as 2026-11-30T12:00Z.")
    return moment


def _table(report: Report, *, dry_run: bool) -> Table:
    table = Table("snapshots", "rows", title="What would be done" if dry_run else None)
    table.columns[1].justify = "right"
    for name in ("inserted", "overwritten", "kept"):
        table.add_row(name, f"{getattr(report, name):,}")
    table.add_section()
    table.add_row("events read", f"{report.events:,}")
    table.add_row("… skipped: payload removed", f"{report.without_payload:,}")
    table.add_row("… skipped: no resource named", f"{report.without_snapshot:,}")
    return table
