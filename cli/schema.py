"""migrate, provision_schema: the schemas of the application and of the tenants' databases."""

from typing import Annotated

import typer
from rich.progress import Progress
from rich.table import Table

from cli import context
from shared import bootstrap, config, db, migrate, redact
from shared.errors import ConfigurationError


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command("migrate")(migrate_application)
    app.command("provision_schema")(provision_schema)


def migrate_application() -> None:
    """Bring the application database's schema up to date.

    Example: python manage.py migrate
    """
    settings = config.load(context.environ(), require=("APP_DATABASE_URL",))
    applied = bootstrap.migrate_application(settings)
    for migration in applied:
        context.out.print(f"applied {migration.name}")
    if not applied:
        context.out.print("The application schema is up to date.")


def provision_schema(
    organization: Annotated[str, typer.Option(help="This organization's database.")] = "",
    all_: Annotated[bool, typer.Option("--all", help="Every organization's database.")] = False,
    check: Annotated[
        bool, typer.Option(help="Only say what is pending; exit 1 if any is.")
    ] = False,
) -> None:
    """Bring tenant databases' schemas up to date. Safe to repeat.

    Example: python manage.py provision_schema --organization acme
    """
    if bool(organization) == all_:
        raise ConfigurationError("Say --organization NAME or --all.")
    directory = context.core().directory
    organizations = directory.organizations() if all_ else [organization]
    table = Table("organization", "result")
    faults = 0
    with Progress(console=context.err, transient=True) as progress:
        for name in progress.track(organizations, description="Provisioning"):
            result, well = _provisioned(directory.target(name), check=check)
            faults += not well
            table.add_row(name, result)
    context.out.print(table)
    if faults:
        raise typer.Exit(1)


def _provisioned(target: db.Target, *, check: bool) -> tuple[str, bool]:
    """What was done, or would be, to one database; and whether that is well."""
    try:
        with db.connect(target, migrate.LIMITS) as connection:
            if check:
                pending = migrate.pending(connection, migrate.Series.TENANT)
                return _names("pending", pending), not pending
            return _names("applied", migrate.apply(connection, migrate.Series.TENANT)), True
    except Exception as error:  # noqa: BLE001 - one tenant's fault must not keep the others waiting
        return f"{type(error).__name__}: {redact.message(error)}", False


def _names(word: str, migrations: list[migrate.Migration]) -> str:
    names = ", ".join(migration.name for migration in migrations)
    return f"{word} {names}" if names else "up to date"
