"""preflight: is everything in order, what is not, and what to do about it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Final

import typer
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from cli import context, render
from cli.preflight import application, notifier, pubsub, routes, scheduler, settings, tenants
from cli.preflight.finding import Finding, Severity, guarded, warning
from shared import bootstrap
from shared.errors import ConfigurationError
from shared.figures import Notices, Stats

LIMIT: Final = 200

_MARKS: Final = {
    Severity.OK: ("✓", "green"),
    Severity.WARNING: ("!", "yellow"),
    Severity.ERROR: ("✗", "bold red"),
}


@dataclass(slots=True, kw_only=True)
class Report:
    """All findings, and the figures that go with them."""

    findings: list[Finding] = field(default_factory=list)
    figures: Stats | None = None
    notifier: Notices | None = None
    lag: dict[str, tenants.Lag] = field(default_factory=dict)  # by organization

    @property
    def is_well(self) -> bool:
        """Whether nothing is an error."""
        return all(each.severity is not Severity.ERROR for each in self.findings)


def register(app: typer.Typer) -> None:
    """Adds the command of this module."""
    app.command("preflight")(preflight)


def preflight(
    organization: Annotated[
        str, typer.Option(help="Of the tenants, look at this organization's only.")
    ] = "",
    limit: Annotated[int, typer.Option(min=0, help="Tenants looked at, at most.")] = LIMIT,
    strict: Annotated[bool, typer.Option(help="Exit 1 for warnings as well.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Check settings, schemas, tenants, Pub/Sub, scheduler; say what is wrong and what to do.

    Changes nothing. Exits 1 if anything is an error.

    Example: python manage.py preflight --json
    """
    report = Report()
    environ = context.environ()
    report.findings += settings.look(environ)
    if report.is_well:
        _with_settings(bootstrap.core(environ), report, organization, limit)
    _show(report, as_json=as_json)
    warned = any(each.severity is Severity.WARNING for each in report.findings)
    if not report.is_well or (strict and warned):
        raise typer.Exit(1)


def _with_settings(core: bootstrap.Core, report: Report, organization: str, limit: int) -> None:
    report.findings += guarded("application", lambda: application.look(core))
    if report.is_well:
        report.findings += guarded("events", lambda: _numbers(core, report))
        report.findings += notifier.look(core)
        report.findings += guarded("routes", lambda: routes.look(core))
        report.findings += guarded("tenants", lambda: _tenants(core, report, organization, limit))
    report.findings += guarded("pubsub", lambda: pubsub.look(core.settings))
    report.findings += scheduler.look(core.settings)
    report.findings += scheduler.look(core.settings)


def _numbers(core: bootstrap.Core, report: Report) -> Iterator[Finding]:
    report.figures, report.notifier = application.numbers(core)
    yield from application.waiting(report.figures)


def _tenants(
    core: bootstrap.Core, report: Report, organization: str, limit: int
) -> Iterator[Finding]:
    known = core.directory.organizations()
    if organization and organization not in known:
        raise ConfigurationError(f"{organization} has no tenant database on record.")
    names = [organization] if organization else known[:limit]
    with Progress(console=context.err, transient=True) as progress:
        task = progress.add_task("Tenants", total=len(names))
        found = list(tenants.look(core, names, lambda: progress.advance(task)))
    for tenant in sorted(found, key=lambda each: each.organization):
        yield from tenant.findings
        if tenant.lag:
            report.lag[tenant.organization] = tenant.lag
    if not organization and len(known) > limit:
        yield warning(
            "tenants",
            f"{len(known) - limit} of {len(known)} tenants were not looked at.",
            f"Look at all of them: --limit {len(known)}.",
        )


def _show(report: Report, *, as_json: bool) -> None:
    if as_json:
        render.as_json(_plain(report))
        return
    context.out.print(_table(report.findings))
    errors, warnings, fine = (
        sum(each.severity is severity for each in report.findings)
        for severity in (Severity.ERROR, Severity.WARNING, Severity.OK)
    )
    context.out.print(f"\nErrors: {errors}, warnings: {warnings}, in order: {fine}.")


def _plain(report: Report) -> Mapping[str, Any]:
    return {
        "ok": report.is_well,
        "findings": [asdict(each) for each in report.findings],
        "figures": report.figures and asdict(report.figures),
        "notifier": report.notifier and asdict(report.notifier),
        "lag": {name: asdict(lag) for name, lag in report.lag.items()},
    }


def _table(findings: Iterable[Finding]) -> Table:
    """A line each; the remedy stands below, where there is one. What matters most comes last."""
    made = Table.grid(padding=(0, 2, 0, 0))
    made.add_column(no_wrap=True)
    made.add_column(no_wrap=True, max_width=26, overflow="ellipsis")
    made.add_column(overflow="fold")
    for each in _sorted(list(findings)):
        mark, style = _MARKS[each.severity]
        made.add_row(Text(mark, style=style), each.check, render.printable(each.cause))
        if each.remedy:
            made.add_row("", "", Text(f"→ {render.printable(each.remedy)}", style="dim"))
    return made


def _sorted(findings: Sequence[Finding]) -> list[Finding]:
    order = list(Severity)
    return sorted(findings, key=lambda each: order.index(each.severity))
