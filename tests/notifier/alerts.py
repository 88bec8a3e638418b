"""An operator's view for tests: failed events and incidents, digests, and what was mailed."""

from typing import Any, LiteralString

import psycopg

from shared import db
from shared.notifier.digest import Digest
from shared.notifier.processor import LIMITS
from tests.notifier.relay import Relay, Sender


class Alerts:
    """The failure ledger and the digest of one database with a notifier."""

    def __init__(self, relay: Relay, **channel: Any) -> None:
        """With the channel `ops`, whose alerts need not wait unless `channel` says so."""
        self.relay = relay
        self.digest = Digest(alert_channel="ops", fallback_channel="spare", project="acme-test")
        relay.channel()
        self.rules("ops", group_wait="0 s", **channel)

    def rules(self, name: str, **rules: Any) -> None:
        for column, value in rules.items():
            self.relay.rows(
                psycopg.sql.SQL("update notifier.channels set {} = %(v)s where name = %(n)s")  # type: ignore[arg-type]
                .format(psycopg.sql.Identifier(column))
                .as_string(),
                v=value,
                n=name,
            )

    def give_up(
        self,
        count: int = 1,
        *,
        code: LiteralString = "'42703'",
        tenant: str = "acme",
        error_type: str = "UndefinedColumn",
    ) -> None:
        """So many failed events that were given up; `code` is SQL over their number `n`."""
        self.relay.rows(
            "insert into subscriber_subscriberfailedevent (event_id, payload_sha256, source, topic,"
            " event_type, shop_domain, organization_id, envelope, payload, error_type, error_class,"
            " error_code, error_message, traceback, fingerprint, status, retry_count)"
            " select gen_random_uuid()::text, '', 'webhook', 'orders/create', 'create',"
            " 'acme.myshopify.com', %(tenant)s, '{}', '', %(error_type)s, 'permanent', "
            + code
            + ", 'secret@example.com', '', 'f', 'failed', 5 from generate_series(1, %(count)s) n",
            tenant=tenant,
            error_type=error_type,
            count=count,
        )

    def requeue(self) -> None:
        """As an operator does, all of them."""
        self.relay.rows(
            "update subscriber_subscriberfailedevent set status = 'pending', retry_count = 0,"
            " alerted_at = null, updated_at = now() where status = 'failed'"
        )

    def open_incident(self, tenant: str = "acme", kind: str = "unavailable") -> None:
        self.relay.rows(
            "insert into subscriber_tenantincident (tenant, kind, started_at, next_probe_at, cause)"
            " values (%(tenant)s, %(kind)s, now(), 'infinity', 'connection refused')",
            tenant=tenant,
            kind=kind,
        )

    def end_incident(self) -> None:
        self.relay.rows("update subscriber_tenantincident set ended_at = now()")

    def tick(self, *senders: Sender) -> int:
        """A digest, and then the queue, with a good server if none is given; messages queued."""
        with db.connect(db.Target(conninfo=self.relay.url), LIMITS) as connection:
            count = self.digest(connection)
        self.relay.run(senders[0] if senders else Sender())
        return count

    def later(self, span: str = "1 minute") -> None:
        """So much time passes for the groups and what was sent."""
        self.relay.rows(
            "update notifier.alert_groups set fired_at = fired_at - %(s)s::interval,"
            " clear_since = clear_since - %(s)s::interval,"
            " quiet_until = quiet_until - %(s)s::interval,"
            " last_notified_at = last_notified_at - %(s)s::interval",
            s=span,
        )
        self.relay.rows(
            "update notifier.notifications set created_at = created_at - %(s)s::interval", s=span
        )

    def clear(self) -> None:
        """Two ticks, the second a minute later."""
        self.tick()
        self.later()
        self.tick()

    def told(self, channel: str = "ops") -> list[tuple[str, str]]:
        """Kind and subject of every message, without the environment."""
        return [
            (row["kind"], row["subject"].removeprefix("[acme-test] "))
            for row in self.relay.rows(
                "select * from notifier.notifications where channel = %(c)s order by id", c=channel
            )
        ]

    def kinds(self, channel: str = "ops") -> list[str]:
        return [kind for kind, _ in self.told(channel)]

    def groups(self) -> list[dict[str, Any]]:
        return self.relay.rows("select * from notifier.alert_groups order by channel, dedupe_key")

    def unalerted(self) -> int:
        (row,) = self.relay.rows(
            "select count(*) as n from subscriber_subscriberfailedevent"
            " where status = 'failed' and alerted_at is null"
        )
        return row["n"]
