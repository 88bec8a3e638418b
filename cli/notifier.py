"""notifier, run_processor: the notifier in the application database, and its processor."""

import signal
from typing import Annotated

import typer

from cli import context, render
from shared import bootstrap, config, db, log, migrate
from shared.errors import ConfigurationError
from shared.notifier import install

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    group = typer.Typer(help="Install, upgrade or uninstall the notifier.", no_args_is_help=True)
    group.command("install")(install_notifier)
    group.command("upgrade")(upgrade_notifier)
    group.command("uninstall")(uninstall_notifier)
    app.add_typer(group, name="notifier")
    app.command("run_processor")(run_processor)


def install_notifier(*, as_json: AsJson = False) -> None:
    """Put the notifier into the application database, also after an uninstall. Safe to repeat.

    Running processors take it up within about a second.

    Example: python manage.py notifier install
    """
    with _database() as connection:
        _show(install.install(connection), as_json=as_json)


def upgrade_notifier(*, as_json: AsJson = False) -> None:
    """Apply the notifier's pending migrations.

    Example: python manage.py notifier upgrade
    """
    with _database() as connection:
        if install.is_uninstalled(connection):
            raise ConfigurationError(
                "The notifier was uninstalled: manage.py notifier install brings it back."
            )
        _show(install.upgrade(connection), as_json=as_json)


def uninstall_notifier(
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Take the notifier out of the application database, with its channels and its history.

    What is queued then fails by name. Only `notifier install` brings it back: `migrate` does not.

    Example: python manage.py notifier uninstall
    """
    with _database() as connection:
        if not yes:
            question = "Delete all channels and the history of notifications?"
            typer.confirm(question, abort=True, err=True)
        was_there = install.uninstall(connection)
    if as_json:
        render.as_json({"uninstalled": was_there})
    else:
        context.out.print("Uninstalled." if was_there else "It was not installed.")


def run_processor(*, as_json: AsJson = False) -> None:
    """Carry out notifications until SIGTERM or Ctrl-C, beside the retry function or without it.

    Attempts that have started are finished. Several may run at once.

    Example: python manage.py run_processor
    """
    core = context.core()
    processor = core.processor()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: processor.stop())
    log.info("notifier.started")
    counts = processor.run()
    if as_json:
        render.as_json(counts)


def _database() -> db.BoundedConnection:
    settings = config.load(context.environ(), require=("APP_DATABASE_URL",))
    return db.connect(bootstrap.application_target(settings), migrate.LIMITS)


def _show(done: install.Done, *, as_json: bool) -> None:
    if as_json:
        applied = [migration.name for migration in done.applied]
        render.as_json({"applied": applied, "changed": done.changed})
        return
    for migration in done.applied:
        context.out.print(f"applied {migration.name}")
    if not done.changed:
        context.out.print("The notifier is up to date.")
    elif not done.applied:
        context.out.print("The notifier is registered.")
