"""The failure ledger: what could not be stored yet, whole, and why."""

from typing import Any, Final

from psycopg.rows import scalar_row
from psycopg.types.json import Jsonb

from shared import db, log, topics
from shared import envelope as envelopes
from shared.errors import HookledgerError
from shared.faults import describe
from shared.model import Envelope

REQUEUED_PER_SECOND: Final = 10

_FIRST_ORGANIZATION: Final = """
select organization_id from shopify_shopifyconnection
where myshopify_domain = %(shop_domain)s order by id limit 1"""

# A further delivery refreshes the error, never the schedule or a lease. What was given up keeps the
# error that led to it: by that the end of an incident knows what to bring back. What a replay had
# resolved is open again, with whatever retention took from it; what an operator resolved stays so.
_RECORD: Final = """
insert into subscriber_subscriberfailedevent as f
  (event_id, payload_sha256, source, topic, event_type, shop_domain, organization_id, envelope,
   payload, error_type, error_class, error_code, error_message, traceback, fingerprint, max_retries)
values
  (%(event_id)s, %(sha256)s, %(source)s, %(topic)s, %(event_type)s, %(shop_domain)s,
   %(organization_id)s, %(envelope)s, %(payload)s, %(error_type)s, %(error_class)s, %(error_code)s,
   %(error_message)s, %(traceback)s, %(fingerprint)s, %(max_retries)s)
on conflict (shop_domain, event_id) do update set
  occurrences = f.occurrences + 1,
  organization_id = coalesce(excluded.organization_id, f.organization_id),
  (error_type, error_class, error_code, error_message, traceback, fingerprint) = (
    select case when known then f.error_type else excluded.error_type end,
           case when known then f.error_class else excluded.error_class end,
           case when known then f.error_code else excluded.error_code end,
           case when known then f.error_message else excluded.error_message end,
           case when known then f.traceback else excluded.traceback end,
           case when known then f.fingerprint else excluded.fingerprint end
    from (select f.status = 'failed' as known) x),
  status = case when f.resolution = 'replayed' then 'pending' else f.status end,
  retry_count = case when f.resolution = 'replayed' then 0 else f.retry_count end,
  envelope = case when f.resolution = 'replayed' then excluded.envelope else f.envelope end,
  payload = case when f.resolution = 'replayed' then excluded.payload else f.payload end,
  resolved_at = case when f.resolution = 'replayed' then null else f.resolved_at end,
  redacted_at = case when f.resolution = 'replayed' then null else f.redacted_at end,
  alerted_at = case when f.resolution = 'replayed' then null else f.alerted_at end,
  resolution = case when f.resolution = 'replayed' then null else f.resolution end,
  updated_at = now()
where f.payload_sha256 = excluded.payload_sha256
returning id"""

# An operator's move: what waited or was given up is tried afresh, not all in the same minute.
_REQUEUE_SHOP: Final = """
with moved as (
  update subscriber_subscriberfailedevent f
  set status = 'pending', retry_count = 0, alerted_at = null, updated_at = now(),
      organization_id = %(organization_id)s,
      next_retry_at = now() + make_interval(secs => q.place::float8 / %(per_second)s)
  from (select id, row_number() over (order by id) - 1 as place
        from subscriber_subscriberfailedevent
        where shop_domain = %(shop_domain)s and status in ('pending', 'failed')
          and lease_token is null and payload is not null) q
  where f.id = q.id and f.status in ('pending', 'failed') and f.lease_token is null
  returning f.id
), noted as (
  insert into subscriber_operatoraction (actor, action, reason, scope, count)
  select %(actor)s, 'requeue', 'shop connected',
         jsonb_build_object('shop', %(shop_domain)s::text), count(*)
  from moved having count(*) > 0
)
select id from moved"""


class Failures:
    """The failure ledger in one application database."""

    def __init__(self, application: db.Pool, *, max_retries: int) -> None:
        self._application = application
        self._max_retries = max_retries

    def record(
        self, envelope: Envelope, error: BaseException, organization_id: str | None = None
    ) -> int:
        """Keeps the event and why it failed; returns the row's id. No content can make it fail.

        A second body under a known id gets a row of its own. Raises what psycopg raises when the
        ledger cannot be written: then the message must not be acknowledged.
        """
        organization_id = organization_id or self._first_organization(envelope.shop_domain)
        described = describe(error, envelope.topic)
        for candidate in (envelope, envelopes.collided(envelope)):
            columns = described | self._columns(candidate, organization_id)
            rows = self._application.fetch(scalar_row, _RECORD, columns)
            if rows:
                log.warning("failure.recorded", error, failed_event=rows[0])
                return rows[0]
        raise HookledgerError("The failure ledger has two bodies under this id already.")

    def requeue_shop(self, shop_domain: str, organization_id: str, *, actor: str) -> int:
        """Makes all unresolved rows of a shop due afresh, staggered; returns how many."""
        parameters = {
            "shop_domain": shop_domain,
            "organization_id": organization_id,
            "actor": actor,
            "per_second": REQUEUED_PER_SECOND,
        }
        return len(self._application.fetch(scalar_row, _REQUEUE_SHOP, parameters))

    def _columns(self, envelope: Envelope, organization_id: str | None) -> dict[str, Any]:
        return {
            "event_id": envelope.event_id,
            "sha256": envelope.payload_sha256,
            "source": envelope.source.value,
            "topic": envelope.topic,
            "event_type": topics.lookup(envelope.topic).operation,
            "shop_domain": envelope.shop_domain,
            "organization_id": organization_id,
            "envelope": Jsonb(envelopes.to_json(envelope)),
            "payload": envelope.payload,
            "max_retries": self._max_retries,
        }

    def _first_organization(self, shop_domain: str) -> str | None:
        try:
            owners = self._application.fetch(
                scalar_row, _FIRST_ORGANIZATION, {"shop_domain": shop_domain}
            )
        except Exception as error:  # noqa: BLE001 - a row without its owner beats no row
            log.warning("failure.owner_unknown", error)
            return None
        return owners[0] if owners else None
