"""A webhook delivery: verified, noted, published, and only then accepted."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from shared import audit, db, log, outbox, signature
from shared import envelope as envelopes
from shared.errors import ShopMismatchError, UnpublishableBodyError
from shared.failures import Failures
from shared.model import Envelope
from shared.parse import check_shop
from shared.publish import Publisher

# Shopify waits 5 s for an answer; what is left after these is for the way back.
ANSWER_SECONDS: Final = 4.0
# The audit row must leave Pub/Sub its share of that time.
AUDIT_LIMITS: Final = db.Limits(connect=2, statement=0.8, lock=0.5, wait=0.3, grace=0.2)
# A body that only the failure ledger can take is a large one.
FAILURE_LIMITS: Final = db.Limits(connect=2, statement=1.5, lock=0.5, wait=0.3, grace=0.2)
PUBLISH_SECONDS_MIN: Final = 0.5
# What the outbox gets of it, when the publish has taken all of its share.
OUTBOX_SECONDS: Final = AUDIT_LIMITS.wait + AUDIT_LIMITS.patience


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An HTTP status and a JSON body."""

    status: int
    body: dict[str, Any]


class Receiver:
    """Takes deliveries for one Pub/Sub topic."""

    def __init__(
        self,
        application: db.Pool,
        failures: Failures,
        publisher: Publisher,
        client_secrets: Callable[[], Sequence[str]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._application = application
        self._failures = failures
        self._publisher = publisher
        self._client_secrets = client_secrets
        self._clock = clock

    def receive(self, headers: Sequence[tuple[str, str]], body: bytes) -> Answer:
        """200 once the event is durable, 401 and 400 for what is not Shopify's, 503 otherwise.

        `headers` in any case, as they came; `body` raw. Nothing is looked up before the signature
        holds, and every path ends within ANSWER_SECONDS.
        """
        deadline = self._clock() + ANSWER_SECONDS
        if not signature.verify(
            body, _header(headers, "x-shopify-hmac-sha256"), self._client_secrets()
        ):
            log.warning("webhook.refused", reason="signature")
            return Answer(status=401, body={"error": "The signature does not fit the body."})
        envelope = envelopes.from_webhook(headers, body, datetime.now(UTC))
        if fault := _fault(envelope):
            log.warning("webhook.refused", reason=fault, **envelopes.ids(envelope))
            return Answer(status=400, body={"error": fault})
        with log.bound(**envelopes.ids(envelope)):
            if count := envelopes.not_whole(headers, envelope):
                log.warning("webhook.headers_cut", headers=count)
            return self._accept(envelope, deadline)

    def _accept(self, envelope: Envelope, deadline: float) -> Answer:
        data = envelopes.message_data(envelope)
        try:
            if data and len(data) <= envelopes.MESSAGE_DATA_BYTES:
                kept_in = self._publish(envelope, data, deadline)
            else:
                kept_in = self._keep(envelope)
        except Exception as error:  # noqa: BLE001 - whatever it was, Shopify must send again
            log.error("webhook.unavailable", error)
            return Answer(status=503, body={"error": "The event could not be kept. Send it again."})
        log.info("webhook.accepted", kept_in=kept_in)
        return Answer(status=200, body={"status": "accepted", "event_id": envelope.event_id})

    def _publish(self, envelope: Envelope, data: bytes, deadline: float) -> str:
        row = self._audited(envelope)
        audited = replace(envelope, audited=row is not None)
        attributes = envelopes.message_attributes(audited)
        if row is not None:
            deadline -= OUTBOX_SECONDS
        try:
            self._publisher.prepare()
            timeout = max(deadline - self._clock(), PUBLISH_SECONDS_MIN)
            self._publisher.publish(data, attributes, timeout=timeout)
        except UnpublishableBodyError as error:
            self._failures.record(audited, error)
            return "failure ledger"
        except Exception as error:
            if row is None:
                raise
            log.warning("webhook.publish_deferred", error)
            outbox.put(self._application, row, data, attributes)
            return "outbox"
        return "pubsub"

    def _keep(self, envelope: Envelope) -> str:
        # Whoever replays it writes the audit row: there is time for one of the two here.
        self._failures.record(replace(envelope, audited=False), _unpublishable(envelope))
        return "failure ledger"

    def _audited(self, envelope: Envelope) -> int | None:
        """The audit row's id; None when it could not be written in time."""
        try:
            return audit.record(self._application, envelope)
        except Exception as error:  # noqa: BLE001 - the subscriber writes it instead
            log.warning("webhook.audit_deferred", error)
            return None


def _fault(envelope: Envelope) -> str:
    """What is wrong with a delivery's headers, or an empty text."""
    if not envelopes.is_shop_domain(envelope.shop_domain):
        return "X-Shopify-Shop-Domain is missing or no *.myshopify.com name."
    if not envelopes.is_topic(envelope.topic):
        return "X-Shopify-Topic is missing or malformed."
    try:
        check_shop(envelope)
    except ShopMismatchError:
        return "The body names another shop than X-Shopify-Shop-Domain."
    return ""


def _unpublishable(envelope: Envelope) -> Exception:
    if not envelope.payload:
        return ValueError("The payload is empty.")
    return UnpublishableBodyError(
        f"Pub/Sub does not carry a body of {len(envelope.payload)} bytes. A replay stores it."
    )


def _header(headers: Sequence[tuple[str, str]], name: str) -> str | None:
    return next((value for key, value in headers if key.lower() == name), None)
