"""connect_shop: from a shop's name and a database's address to events that arrive."""

import ipaddress
from typing import Annotated, Any

import typer
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cli import context
from shared import bootstrap, db, directory, migrate
from shared.config import PoolerMode
from shared.envelope import is_shop_domain
from shared.errors import ConfigurationError


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command("connect_shop")(connect_shop)


def connect_shop(
    shop: Annotated[str, typer.Option(help="The shop's *.myshopify.com name.")],
    organization: Annotated[str, typer.Option(help="The organization that owns it.")],
    database_url: Annotated[
        str,
        typer.Option(
            envvar="TENANT_DATABASE_URL",
            help="postgresql://USER:PASSWORD@HOST:PORT/NAME; better given by environment.",
        ),
    ],
    pooler_mode: Annotated[PoolerMode, typer.Option(help="The pooler in front of it.")] = "none",
) -> None:
    """Connect a shop to its tenant database: check and provision it, keep its credential encrypted.

    Events of the shop that failed for want of a connection are replayed by the next retry run.

    Example: python manage.py connect_shop --shop acme.myshopify.com --organization acme
    --database-url postgresql://hookledger:…@db.example.com:5432/acme
    """
    shop = shop.strip().lower()
    if not is_shop_domain(shop):
        raise ConfigurationError(f"{shop} is no *.myshopify.com name.")
    core = context.core()
    target = db.Target(conninfo=_with_sslmode(database_url), pooler_mode=pooler_mode)
    with context.err.status("Connecting to the tenant database"):
        applied = _provision(target)
    context.out.print(f"[green]✓[/] tenant database reached, {len(applied)} migrations applied")
    _put_on_record(core, shop, organization, target)
    context.out.print(f"[green]✓[/] {shop} belongs to {organization}; its password is encrypted")
    requeued = core.failures.requeue_shop(shop, organization)
    context.out.print(f"[green]✓[/] {requeued} failed events of the shop are due again")


def _provision(target: db.Target) -> list[migrate.Migration]:
    with db.connect(target, migrate.LIMITS) as connection:
        return migrate.apply(connection, migrate.Series.TENANT)


def _put_on_record(core: bootstrap.Core, shop: str, organization: str, target: db.Target) -> None:
    core.application.run(
        lambda connection: directory.connect_shop(
            connection,
            core.keyring,
            shop_domain=shop,
            organization_id=organization,
            target=target,
        )
    )


def _with_sslmode(database_url: str) -> str:
    """The address with TLS required, unless it says otherwise or never leaves this machine."""
    parts = conninfo_to_dict(database_url)
    parts.setdefault("sslmode", "prefer" if _is_loopback(parts) else "require")
    return make_conninfo("", **parts)


def _is_loopback(parts: dict[str, Any]) -> bool:
    host = str(parts.get("host") or "localhost")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.startswith("/")
