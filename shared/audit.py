"""The audit row: what our webhook was given, before anything else is done with it."""

from typing import Final

from psycopg.rows import scalar_row

from shared import db, log
from shared import envelope as envelopes
from shared.errors import HookledgerError
from shared.jsontext import jsonb_text
from shared.model import Envelope

# A second body under a known id changes no row, and says so by returning none.
_INSERT: Final = """
insert into shopify_shopifyevent as a
  (organization_id, topic, shop_domain, payload, event_id, payload_sha256, triggered_at,
   received_at)
values
  ((select organization_id from shopify_shopifyconnection
    where myshopify_domain = %(shop_domain)s order by status <> 'active', id limit 1),
   %(topic)s, %(shop_domain)s, %(payload)s::jsonb, %(event_id)s, %(sha256)s, %(triggered_at)s,
   %(received_at)s)
on conflict (shop_domain, event_id) do update set event_id = a.event_id
  where a.payload_sha256 = excluded.payload_sha256
returning id"""


def record(application: db.Pool, envelope: Envelope) -> int:
    """Writes the audit row and returns its id; a second delivery of the same event changes nothing.

    A second body under the same id gets a row of its own. Raises what psycopg raises.
    """
    payload = jsonb_text(envelope.payload)
    for candidate in (envelope, envelopes.collided(envelope)):
        parameters = {
            "topic": candidate.topic,
            "shop_domain": candidate.shop_domain,
            "payload": payload,
            "event_id": candidate.event_id,
            "sha256": candidate.payload_sha256,
            "triggered_at": candidate.triggered_at,
            "received_at": candidate.received_at,
        }
        if rows := application.fetch(scalar_row, _INSERT, parameters):
            return rows[0]
    raise HookledgerError("The audit table has two bodies under this id already.")


def settle(application: db.Pool, envelope: Envelope) -> None:
    """Writes the audit row that the webhook owes, if it does. A failure changes nothing else."""
    if envelope.audited:
        return
    try:
        record(application, envelope)
    except Exception as error:  # noqa: BLE001 - the event itself is safe
        log.warning("audit.not_written", error)
