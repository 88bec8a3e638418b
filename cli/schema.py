"""migrate, provision_schema: the schemas of the application and of the tenants' databases."""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, Final

import psycopg
import typer
from rich.progress import Progress
from rich.table import Table

from cli import context
from shared import bootstrap, config, db, migrate, redact
from shared.errors import ConfigurationError, HookledgerError

PARALLEL: Final = 8


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command("migrate")(migrate_application)
    app.command("provision_schema")(provision_schema)


def migrate_application() -> None:
    """Bring the application database's schema up to date, and the notifier's in it.

    Example: python manage.py migrate
    """
    settings = config.load(context.environ(), require=("APP_DATABASE_URL",))
    applied = bootstrap.migrate_application(settings)
    for migration in applied:
        context.out.print(f"applied {migration.name}")
    applied += _migrated_notifier(settings)
    if not applied:
        context.out.print("The application schema is up to date.")


def _migrated_notifier(settings: config.Settings) -> list[migrate.Migration]:
    """A broken notifier stops nothing: not whatever comes after this command, either."""
    try:
        applied = bootstrap.migrate_notifier(settings)
    except (HookledgerError, psycopg.Error) as error:
        context.err.print(
            f"[yellow]![/] The notifier is not up to date: {type(error).__name__}: "
            f"{redact.message(error)}",
            soft_wrap=True,
        )
        return []
    for migration in applied:
        context.out.print(f"applied {migration.name}")
    return applied


def provision_schema(  # noqa: PLR0917 - its options, each given by name
    organization: Annotated[str, typer.Option(help="This organization's database.")] = "",
    all_: Annotated[bool, typer.Option("--all", help="Every organization's database.")] = False,
    check: Annotated[
        bool, typer.Option(help="Only say what differs; exit 1 if anything does.")
    ] = False,
    enable_rls: Annotated[
        bool, typer.Option(help="Switch row level security on where it is off.")
    ] = False,
    keep_going: Annotated[
        bool, typer.Option(help="Go on to the others when the first one fails.")
    ] = False,
    parallel: Annotated[
        int, typer.Option(min=1, help="Databases that are worked on at the same time.")
    ] = PARALLEL,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Bring tenant databases' schemas up to date. Safe to repeat.

    One database goes first, alone: if it fails, the others are not touched.

    Example: python manage.py provision_schema --organization acme
    """
    if bool(organization) == all_:
        raise ConfigurationError("Say --organization NAME or --all.")
    if check and enable_rls:
        raise ConfigurationError("--check changes nothing: leave --enable-rls away.")
    directory = context.core().directory
    organizations = directory.organizations() if all_ else [organization]
    do = partial(_provisioned, directory.target, check=check, enable_rls=enable_rls)
    canary = not (check or keep_going)
    results: dict[str, Result] = {}
    with Progress(console=context.err, transient=True) as progress:
        task = progress.add_task("Checking" if check else "Provisioning", total=len(organizations))
        for result in _all_done(organizations, do, canary=canary, parallel=parallel):
            results[result.organization] = result
            progress.advance(task)
    _show([results[name] for name in organizations if name in results], as_json=as_json)
    _conclude(organizations, results, as_json=as_json)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What was done, or found, in one organization's database."""

    organization: str
    applied: list[str] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)
    secured: list[str] = field(default_factory=list)
    unsecured: list[str] = field(default_factory=list)
    error: str = ""
    was_reached: bool = True

    @property
    def is_well(self) -> bool:
        """Whether events can be stored there. Row level security is the merchant's decision."""
        return not (self.error or self.pending or self.differences)

    def lines(self) -> Iterator[str]:
        """The result for people."""
        if self.error:
            yield self.error
        for word in ("applied", "pending", "repaired"):
            if names := getattr(self, word):
                yield f"{word} {', '.join(names)}"
        yield from self.differences
        if self.secured:
            yield f"row level security switched on: {_few(self.secured)}"
        if self.unsecured:
            yield f"row level security is off: {_few(self.unsecured)}"


def _all_done(
    organizations: Sequence[str],
    do: Callable[[str], Result],
    *,
    canary: bool,
    parallel: int,
) -> Iterator[Result]:
    """The results as they come. The canary is the first that can be reached at all."""
    left = list(organizations)
    while canary and left:
        result = do(left.pop(0))
        yield result
        if not result.is_well and result.was_reached:
            return
        canary = not result.was_reached
    with ThreadPoolExecutor(max_workers=parallel) as workers:
        for done in as_completed([workers.submit(do, name) for name in left]):
            yield done.result()


def _provisioned(
    find: Callable[[str], db.Target], organization: str, *, check: bool, enable_rls: bool
) -> Result:
    try:
        with db.connect(find(organization), migrate.LIMITS) as connection:
            if check:
                return _checked(connection, organization)
            return _brought_up(connection, organization, enable_rls)
    except Exception as error:  # noqa: BLE001 - one tenant's fault must not keep the others waiting
        return Result(
            organization=organization,
            error=f"{type(error).__name__}: {redact.message(error)}",
            was_reached=not db.is_connection_failure(error),
        )


def _checked(connection: db.BoundedConnection, organization: str) -> Result:
    pending = migrate.pending(connection, migrate.Series.TENANT)
    found = migrate.drift(connection, migrate.Series.TENANT)
    return Result(
        organization=organization,
        pending=[migration.name for migration in pending],
        differences=found.differences + _misfits(connection, organization),
        unsecured=found.unsecured,
    )


def _brought_up(connection: db.BoundedConnection, organization: str, enable_rls: bool) -> Result:
    """Applies what is pending; what is missing all the same is made by all files once more."""
    applied = migrate.apply(connection, migrate.Series.TENANT)
    before = after = migrate.drift(connection, migrate.Series.TENANT)
    if before.differences:
        migrate.apply_again(connection, migrate.Series.TENANT)
        after = migrate.drift(connection, migrate.Series.TENANT)
    if enable_rls:
        migrate.secure(connection, after.unsecured)
    return Result(
        organization=organization,
        applied=[migration.name for migration in applied],
        repaired=[found for found in before.differences if found not in after.differences],
        differences=after.differences + _misfits(connection, organization),
        secured=after.unsecured if enable_rls else [],
        unsecured=[] if enable_rls else after.unsecured,
    )


_NUMERIC: Final = """
select attrelid::regclass::text from pg_attribute
where attrelid = to_regclass('shopify_events') and attname = 'organization_id'
  and atttypid in ('int4'::regtype, 'int8'::regtype)"""


def _misfits(connection: db.BoundedConnection, organization: str) -> list[str]:
    """An adopted table may number organizations; ours may have names."""
    if organization.isdecimal() or not connection.execute(_NUMERIC).fetchone():
        return []
    return [
        f"organization_id is a number in these tables, and {organization} is none: no event can "
        "be stored"
    ]


def _show(results: list[Result], *, as_json: bool) -> None:
    if as_json:
        rows = [asdict(result) | {"ok": result.is_well} for result in results]
        context.out.print_json(json.dumps(rows))
        return
    table = Table("organization", "", "result")
    for result in results:
        mark = "[green]✓[/]" if result.is_well else "[red]✗[/]"
        table.add_row(result.organization, mark, "\n".join(result.lines()) or "up to date")
    context.out.print(table)


def _conclude(organizations: Sequence[str], results: dict[str, Result], *, as_json: bool) -> None:
    """Lists what failed or was left out, and exits 1 if anything was."""
    failed = [name for name in organizations if name in results and not results[name].is_well]
    skipped = [name for name in organizations if name not in results]
    if not failed and not skipped:
        return
    out = context.err if as_json else context.out
    if failed:
        out.print(f"[red]{len(failed)} not well:[/] {', '.join(failed)}", soft_wrap=True)
    if skipped:
        out.print(
            f"{len(skipped)} not touched, because the first one failed. Correct it, or go on with "
            "--keep-going.",
            soft_wrap=True,
        )
    raise typer.Exit(1)


def _few(names: list[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{len(names)} tables"
