"""events: a tenant's event ledger, in an operator's hands."""

from dataclasses import asdict
from typing import Annotated, Any, Final

import psycopg
import typer
from psycopg.rows import scalar_row
from rich.table import Table
from rich.text import Text

from cli import context, render
from shared import bootstrap, db, ledger
from shared.errors import ConfigurationError

LIMITS: Final = db.Limits(statement=20)

Organization = Annotated[str, typer.Option(help="Whose event ledger.")]
Shop = Annotated[str, typer.Option(help="Only this shop's.")]
Moment = Annotated[
    Any, typer.Option(parser=render.moment, metavar="TIME", help="45m, 2h, 7d ago; 2026-11-30 …")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_FAILED: Final = """
select id from subscriber_subscriberfailedevent
where event_id = %(event_id)s or starts_with(event_id, %(event_id)s || '#') order by id"""

events = typer.Typer(
    help="The event ledger of a tenant: list events, show one.", no_args_is_help=True
)


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.add_typer(events, name="events")


@events.command("list")
def list_events(  # noqa: PLR0917 - an option each
    organization: Organization,
    shop: Shop = "",
    topic: Annotated[str, typer.Option(help="Only of this topic, as orders/create.")] = "",
    resource: Annotated[str, typer.Option(help="Only of this resource, as orders.")] = "",
    resource_id: Annotated[str, typer.Option(help="Only of the one with this id.")] = "",
    since: Moment = None,
    until: Moment = None,
    limit: Annotated[int, typer.Option(min=1, help="Rows at most.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List a tenant's events, the newest first.

    Example: python manage.py events list --organization acme --resource orders --since 2h
    """
    scope = ledger.Scope(
        organization=organization,
        shop=shop.strip().lower() or None,
        topic=topic or None,
        resource=resource or None,
        resource_id=resource_id or None,
        since=since,
        until=until,
    )
    with _tenant(context.core(), organization) as connection:
        rows = ledger.find(connection, scope, limit=limit)
    if as_json:
        render.as_json(rows)
    elif rows:
        context.out.print(_listed(rows))
    else:
        context.out.print("None.")


@events.command("show")
def show_event(
    event_id: Annotated[str, typer.Argument(metavar="EVENT_ID", help="X-Shopify-Webhook-Id.")],
    organization: Organization,
    shop: Shop = "",
    payload: Annotated[bool, typer.Option("--payload", help="Its payload too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show one event, and the snapshot of what it is about.

    Example: python manage.py events show b7d17d46-5bab-4cf4-97aa-849e55dc6c40 --organization acme
    """
    core = context.core()
    with _tenant(core, organization) as connection:
        found = ledger.show(connection, organization, event_id, shop.strip().lower() or None)
        if not found:
            raise ConfigurationError(_missing(core, organization, event_id))
        if len(found) > 1:
            names = ", ".join(each.shop_domain for each in found)
            raise ConfigurationError(f"Several shops have that event: say --shop. {names}")
        event = found[0]
        state = ledger.snapshot(connection, event)
        body = ledger.payload(connection, event.id) if payload else None
    if as_json:
        shown = asdict(event) | {"snapshot": state and asdict(state)}
        text = None if body is None else body.decode(errors="replace")
        render.as_json(shown | ({"payload": text} if payload else {}))
        return
    _print(event, state)
    if payload:
        context.out.print("\n[bold]Payload[/]")
        typer.echo("It was taken away." if body is None else render.pretty(body))


def _tenant(core: bootstrap.Core, organization: str) -> psycopg.Connection[Any]:
    return db.connect(core.directory.target(organization), LIMITS)


def _missing(core: bootstrap.Core, organization: str, event_id: str) -> str:
    """Where it may be instead."""
    failed = core.application.fetch(scalar_row, _FAILED, {"event_id": event_id})
    if not failed:
        return f"{organization}'s event ledger has no event {event_id}, nor has the failure ledger."
    rows = " and ".join(f"`manage.py failures show {row}`" for row in failed)
    return f"{organization}'s event ledger has no event {event_id}, but the failure ledger: {rows}."


def _listed(rows: list[ledger.Listed]) -> Table:
    table = render.table(
        "received", "topic", "resource id", "event id", "shop", wide=("event id", "shop")
    )
    for row in rows:
        render.add(
            table,
            render.clock(row.received_at),
            row.topic,
            row.resource_id or "",
            row.event_id,
            row.shop_domain.removesuffix(".myshopify.com"),
        )
    return table


def _print(event: ledger.Shown, state: ledger.Snapshot | None) -> None:
    about = f"{event.resource_type} {event.resource_id or 'without an id'}"
    pairs = [
        ("event", event.event_id),
        ("merchant's action", event.source_event_id),
        ("topic", event.topic),
        ("about", about),
        ("shop", event.shop_domain),
        ("organization", event.organization_id),
        ("API version", event.api_version),
        ("triggered", render.clock(event.triggered_at)),
        ("its own clock", render.clock(event.source_updated_at)),
        ("received", render.clock(event.received_at)),
        ("stored", render.clock(event.inserted_at)),
        ("sha256", event.payload_sha256 and event.payload_sha256.hex()),
        ("trace", event.trace_id),
        ("payload", "taken away" if event.is_emptied else "kept"),
    ]
    context.out.print(render.grid(pairs))
    if state is None:
        context.out.print(Text("\nNo snapshot.", style="bold"))
        return
    context.out.print(Text("\nSnapshot", style="bold"))
    is_this = "of this event" if state.event_id == event.event_id else f"of {state.event_id}"
    context.out.print(
        render.grid(
            [
                ("state", f"{'deleted' if state.is_deleted else state.event_type}, {is_this}"),
                ("topic", state.topic),
                ("its own clock", render.clock(state.source_updated_at)),
                ("first seen", render.clock(state.first_seen_at)),
                ("last seen", render.clock(state.last_seen_at)),
            ]
        )
    )
