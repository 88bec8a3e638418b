"""disconnect_shop: a shop's connection is ended; the merchant's data stays where it is."""

from typing import Annotated

import typer

from cli import context, render
from cli.scope import Actor, operator
from shared import lifecycle
from shared.directory import FOUND_SECONDS
from shared.envelope import is_shop_domain
from shared.errors import ConfigurationError


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command("disconnect_shop")(disconnect_shop)


def disconnect_shop(
    *,
    shop: Annotated[str, typer.Option(help="The shop's *.myshopify.com name.")],
    reason: Annotated[str, typer.Option(help="Why; it is kept.")] = "disconnected by hand",
    actor: Actor = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """End a shop's connection, and delete its credential if no other shop needs it.

    The merchant's database is not touched. Events that still come wait as failed events.

    Example: python manage.py disconnect_shop --shop acme.myshopify.com --reason "moved away"
    """
    shop = shop.strip().lower()
    if not is_shop_domain(shop):
        raise ConfigurationError(f"{render.printable(shop)} is no *.myshopify.com name.")
    by, core = operator(actor, reason), context.core()
    if not lifecycle.connected(core.application, shop):
        raise ConfigurationError(f"{shop} has no connection.")
    waiting = [
        each.id
        for each in core.privacy.requests(limit=1000, only_open=True)
        if each.shop_domain == shop
    ]
    if waiting:
        context.err.print(
            f"[yellow]![/] Privacy requests {', '.join(map(str, waiting))} of this shop are open. "
            "Without a credential nothing can be removed from the merchant's database: run "
            "`manage.py privacy run` first.",
            soft_wrap=True,
        )
    if not yes:
        typer.confirm(f"Disconnect {shop}?", abort=True, err=True)
    ended = core.application.run(
        lambda connection: lifecycle.disconnect_shop(
            connection, shop_domain=shop, actor=by.actor, reason=by.reason
        )
    )
    if as_json:
        render.as_json(ended)
        return
    kept = "its credential deleted" if ended.credentials else "its credential kept for other shops"
    context.out.print(
        f"{shop} is disconnected from {', '.join(ended.organizations)}, {kept}. "
        f"Running processes notice within {FOUND_SECONDS} s.",
        markup=False,
        soft_wrap=True,
    )
