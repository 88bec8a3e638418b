"""The end of a shop's connection: the app was uninstalled, or an operator disconnects the shop."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import psycopg
from psycopg.rows import scalar_row

from shared import db

# Whoever connected the shop after the app was uninstalled has it installed again: a late delivery
# of the old event does not undo that.
_UNINSTALL: Final = """
update shopify_shopifyconnection set status = 'uninstalled', updated_at = now()
where myshopify_domain = %(shop_domain)s and organization_id = %(organization_id)s
  and status = 'active' and updated_at < %(at)s
returning id"""

# Nobody connects a shop meanwhile: what is asked about the organization's other shops must hold
# until the end.
_LOCK: Final = "lock table shopify_shopifyconnection in share row exclusive mode"

_DISCONNECT: Final = """
update shopify_shopifyconnection set status = 'disconnected', updated_at = now()
where myshopify_domain = %(shop_domain)s and status <> 'disconnected'
returning organization_id"""

# The database is needed while any other shop of the organization may still send events.
_DROP_CREDENTIALS: Final = """
delete from databases_databasecredential c using databases_database d
where d.id = c.database_id and d.organization_id = any(%(organizations)s)
  and not exists (select from shopify_shopifyconnection o
                  where o.organization_id = d.organization_id and o.status <> 'disconnected')
returning c.id"""

_NOTE: Final = """
insert into subscriber_operatoraction (actor, action, reason, scope, count)
values (%(actor)s, 'disconnect', %(reason)s,
        jsonb_build_object('shop', %(shop_domain)s::text,
                           'organizations', %(organizations)s::text[],
                           'credentials', %(credentials)s::int),
        cardinality(%(organizations)s::text[]))"""

_CONNECTED: Final = """
select distinct organization_id from shopify_shopifyconnection
where myshopify_domain = %(shop_domain)s and status <> 'disconnected' order by organization_id"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disconnected:
    """What disconnecting a shop ended."""

    organizations: list[str]  # whose connection it was; none: it had no connection
    credentials: int  # how many were deleted


def uninstalled(application: db.Pool, shop_domain: str, organization_id: str, at: datetime) -> bool:
    """Marks the connection: the app was uninstalled `at`. Its events are stored as ever.

    Nothing is done when the shop was connected since, or is not active; says whether it was.
    """
    parameters = {"shop_domain": shop_domain, "organization_id": organization_id, "at": at}
    return bool(application.fetch(scalar_row, _UNINSTALL, parameters))


def connected(application: db.Pool, shop_domain: str) -> list[str]:
    """The organizations that the shop's connection is with: one, or none, unless it is amiss."""
    return application.fetch(scalar_row, _CONNECTED, {"shop_domain": shop_domain})


def disconnect_shop(
    connection: psycopg.Connection[Any], *, shop_domain: str, actor: str, reason: str
) -> Disconnected:
    """Ends the shop's connection, and deletes the credential if no other shop needs it.

    One transaction with its record as an operator's action; safe to repeat. The merchant's own
    database is not touched.
    """
    wanted: dict[str, Any] = {"shop_domain": shop_domain, "actor": actor, "reason": reason}
    with connection.transaction():
        connection.execute(_LOCK)
        ended = connection.execute(_DISCONNECT, wanted).fetchall()
        wanted["organizations"] = sorted({row[0] for row in ended})
        wanted["credentials"] = len(connection.execute(_DROP_CREDENTIALS, wanted).fetchall())
        if ended:
            connection.execute(_NOTE, wanted)
    return Disconnected(organizations=wanted["organizations"], credentials=wanted["credentials"])
