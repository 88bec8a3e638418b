"""dev, demo, send: the whole system on this machine."""

import os
import signal
import threading
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from cli import context
from dev import deliveries, demo, samples
from dev.stack import Stack
from shared.errors import ConfigurationError

DataDir = Annotated[Path, typer.Option(help="Where the stack keeps its data.")]


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command("demo")(show_demo)
    app.command("dev")(run_stack)
    app.command("send")(send_sample)


def show_demo() -> None:
    """Show the whole way of an event, failure and healing included, and check every claim.

    Example: python manage.py demo
    """
    if not demo.run(context.out):
        raise typer.Exit(1)


def run_stack(
    data_dir: DataDir = context.LOCAL_STACK,
    retry_every: Annotated[
        float, typer.Option(min=0, help="Seconds between two retry runs; 0 is never.")
    ] = 60,
    port_base: Annotated[
        int, typer.Option(min=0, help="First of six ports; 0 takes free ones.")
    ] = 0,
) -> None:
    """Run the whole system on this machine until Ctrl-C. Its addresses are in DIR/stack.json.

    Settings in the environment (LEASE_SECONDS=5 …) reach the functions.

    Example: python manage.py dev --retry-every 10
    """
    stopped = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: stopped.set())
    with context.err.status("Starting") as status:
        stack = Stack(
            data_dir,
            environ=os.environ,
            retry_every=retry_every,
            port_base=port_base,
            say=lambda what: status.update(f"Starting the {what}"),
        ).start()
    try:
        context.out.print(_addresses(stack.describe()))
        context.out.print(
            f"Logs: {data_dir}/logs/   Send a sample: python manage.py send orders/create"
        )
        context.out.print("Ctrl-C stops everything.")
        stopped.wait()
    finally:
        with context.err.status("Stopping"):
            stack.stop()


def send_sample(
    topic: Annotated[str, typer.Argument(help="A topic that has a sample, as orders/create.")],
    data_dir: DataDir = context.LOCAL_STACK,
    event_id: Annotated[str, typer.Option(help="Send under this webhook id.")] = "",
) -> None:
    """Send one signed sample to the running local stack.

    Example: python manage.py send orders/create
    """
    stack = context.stack_in(data_dir)
    if stack is None:
        raise ConfigurationError(f"No local stack is running in {data_dir}. Start it: make dev")
    try:
        body = samples.load(topic)
    except LookupError as error:
        raise ConfigurationError(str(error.args[0])) from None
    headers = deliveries.attributes(topic, stack["shop_domain"], event_id=event_id or None)
    signed = deliveries.signed(headers, body, stack["client_secret"])
    answer = deliveries.post(stack["webhook_url"], body, signed)
    context.out.print(f"{answer.status} {answer.body.decode().strip()}")
    if answer.status != 200:
        raise typer.Exit(1)
    context.out.print(f"[dim]See it in the tables of {stack['tenant_database_url']}[/]")


def _addresses(stack: dict[str, Any]) -> Table:
    table = Table("what", "where", show_edge=False)
    for name in ("webhook", "subscriber", "retry"):
        table.add_row(f"{name} function", stack[f"{name}_url"])
    table.add_row("application database", stack["app_database_url"])
    table.add_row("tenant database", stack["tenant_database_url"])
    table.add_row("Pub/Sub stand-in", stack["pubsub_emulator_host"])
    table.add_row("shop", stack["shop_domain"])
    return table
