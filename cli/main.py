"""All commands, and what they have in common: settings, errors in one line, logs beside results."""

import sys
from typing import Annotated

import psycopg
import typer
from rich.console import Console

from cli import (
    channels,
    credentials,
    deadletters,
    disconnect,
    events,
    failures,
    local,
    notifier,
    notify,
    pauses,
    privacy,
    scheduler,
    schema,
    shops,
    snapshots,
    subscriber,
)
from cli.console import command as console
from cli.preflight import command as preflight
from shared import log, redact
from shared.errors import HookledgerError

app = typer.Typer(
    help="Shopify events, as sent, in every merchant's own PostgreSQL, with nothing lost.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (
    *(local, schema, shops, disconnect, failures, events, pauses, snapshots),
    *(channels, notify),
    *(privacy, credentials, notifier, subscriber, deadletters, scheduler, preflight, console),
):
    module.register(app)

_debug = False


@app.callback()
def common(
    debug: Annotated[bool, typer.Option(help="Show the traceback of an error.")] = False,
) -> None:
    """Options of every command."""
    global _debug  # noqa: PLW0603 - one command per process
    _debug = debug


def main() -> None:
    """Runs the command; an error becomes one line and exit code 1."""
    log.use(sys.stderr)
    try:
        app()
    except (HookledgerError, psycopg.Error, OSError, ValueError) as error:
        if _debug:
            raise
        Console(stderr=True, highlight=False).print(
            f"[bold red]Error:[/] {type(error).__name__}: {redact.message(error)}", soft_wrap=True
        )
        sys.exit(1)
