"""Shops whose events would find no database, or two."""

from collections.abc import Iterator
from typing import Final

from psycopg.rows import scalar_row

from cli.preflight.finding import Finding, error, fine
from shared import bootstrap

SHOWN: Final = 5

_AMBIGUOUS: Final = """
select myshopify_domain from shopify_shopifyconnection
where status = 'active' group by myshopify_domain having count(*) > 1 order by 1"""
_WITHOUT_DATABASE: Final = """
select distinct c.organization_id from shopify_shopifyconnection c
where c.status <> 'disconnected'
  and not exists (select from databases_database d
                  where d.organization_id = c.organization_id and d.deleted_at is null)
order by 1"""


def look(core: bootstrap.Core) -> Iterator[Finding]:
    """By what is on record; whether a database answers is the tenants' check."""
    ambiguous = core.application.fetch(scalar_row, _AMBIGUOUS)
    if ambiguous:
        yield error(
            "routes:ambiguous",
            f"More than one active connection: {few(ambiguous)}.",
            "Disconnect all but one: manage.py disconnect_shop.",
        )
    homeless = []
    if not core.settings.shopify_storage_database_url:
        homeless = core.application.fetch(scalar_row, _WITHOUT_DATABASE)
    if homeless:
        yield error(
            "routes:database",
            f"Organizations without a database: {few(homeless)}.",
            "Put it on record: manage.py connect_shop requeues what waits for it.",
        )
    if not (ambiguous or homeless):
        yield fine("routes", "Every connected shop leads to one database.")


def few(names: list[str]) -> str:
    """The first of them, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
