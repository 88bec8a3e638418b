"""connect_shop: from a shop's name and a database's address to events that arrive."""

from typing import Annotated, Any, Final

import psycopg
import typer
from psycopg.conninfo import conninfo_to_dict

from cli import context, scope
from shared import bootstrap, db, directory, migrate
from shared.config import PoolerMode
from shared.envelope import is_shop_domain
from shared.errors import ConfigurationError

_POOLER: Final = (
    "A pooler stands in front of this database. If it is in transaction mode (Supabase: port "
    "6543), connect the shop again with --pooler-mode transaction."
)
_IPV6_ONLY: Final = (
    "The host has IPv6 addresses only. It was reached from here, but functions on Google Cloud "
    "have IPv4 only: use the address of an IPv4 pooler (Supabase: port 5432 of the pooler's host, "
    "or port 6543 with --pooler-mode transaction)."
)


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

    What is in the failure ledger of the shop, given up or not, is due again, a few at a time.

    Example: python manage.py connect_shop --shop acme.myshopify.com --organization acme
    --database-url postgresql://hookledger:…@db.example.com:5432/acme
    """
    shop = shop.strip().lower()
    if not is_shop_domain(shop):
        raise ConfigurationError(f"{shop} is no *.myshopify.com name.")
    core = context.core()
    target = db.Target(conninfo=db.with_tls(database_url), pooler_mode=pooler_mode)
    _refuse_known_pooler(target)
    with context.err.status("Connecting to the tenant database"):
        applied, hints = _provision(target)
    context.out.print(f"[green]✓[/] tenant database reached, {len(applied)} migrations applied")
    for hint in hints:
        context.out.print(f"[yellow]![/] {hint}", soft_wrap=True)
    _put_on_record(core, shop, organization, target)
    context.out.print(f"[green]✓[/] {shop} belongs to {organization}; its password is encrypted")
    requeued = core.failures.requeue_shop(shop, organization, actor=scope.you())
    context.out.print(f"[green]✓[/] {requeued} failed events of the shop are due again")


def _provision(target: db.Target) -> tuple[list[migrate.Migration], list[str]]:
    """The migrations applied, and what the operator should know of the way there."""
    with db.connect(target, migrate.LIMITS) as connection:
        hints = [_POOLER] if _has_pooler(connection) and target.pooler_mode == "none" else []
        applied = migrate.apply(connection, migrate.Series.TENANT)
    if db.is_ipv6_only(target.conninfo):
        hints.append(_IPV6_ONLY)
    return applied, hints


def _refuse_known_pooler(target: db.Target) -> None:
    """Supabase's transaction pooler, taken for a database, would mix up its clients' settings."""
    parts = conninfo_to_dict(target.conninfo)
    is_supabase = str(parts.get("host")).endswith((".supabase.com", ".supabase.co"))
    if is_supabase and str(parts.get("port")) == "6543" and target.pooler_mode == "none":
        raise ConfigurationError(
            "Port 6543 is Supabase's pooler in transaction mode: say --pooler-mode transaction."
        )


def _has_pooler(connection: psycopg.Connection[Any]) -> bool:
    """Whether something in between made up the process id that we were given."""
    row = connection.execute("select pg_backend_pid()").fetchone()
    return row != (connection.info.backend_pid,)


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
