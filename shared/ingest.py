"""A Pub/Sub message: stored in its tenant's database, or kept in the failure ledger, or refused.

It is acknowledged only when its event is committed in one of the two.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final

from shared import audit, db, log
from shared import envelope as envelopes
from shared.errors import EventCollisionError
from shared.failures import Failures
from shared.message import Message
from shared.model import Envelope
from shared.pipeline import Pipeline

# A large body costs six times its size on its way: one at a time stays within an instance's
# memory. Who has waited so long for a turn is refused, and delivered again.
TURN_SECONDS: Final = 1.0
_large = threading.Lock()  # of the process, like its memory


class Ingester:
    """Takes messages to the pipeline."""

    def __init__(self, application: db.Pool, failures: Failures, pipeline: Pipeline) -> None:
        self._application = application
        self._failures = failures
        self._pipeline = pipeline

    def ingest(self, message: Message) -> bool:
        """Whether to acknowledge the message. Whatever it holds, this does not raise."""
        if not envelopes.may_be_large(message):
            return self._ingest(message)
        with _turn() as is_ours:
            if is_ours:
                return self._ingest(message)
        log.warning("message.deferred")
        return False

    def _ingest(self, message: Message) -> bool:
        envelope = envelopes.from_message(message, datetime.now(UTC))
        with log.bound(message_id=envelope.message_id, **envelopes.ids(envelope)):
            acknowledged = self._stored_or_kept(envelope)
            if acknowledged:
                audit.settle(self._application, envelope)
            return acknowledged

    def _stored_or_kept(self, envelope: Envelope) -> bool:
        started = time.monotonic()
        try:
            outcome = self._pipeline.apply(envelope)
        except EventCollisionError as error:
            return self._kept(envelopes.collided(envelope), error)
        except Exception as error:  # noqa: BLE001 - any failure at all belongs into the ledger
            return self._kept(envelope, error)
        log.info(
            "event.stored",
            organization_id=self._pipeline.organization(envelope.shop_domain),
            ledger=outcome.ledger,
            snapshot=outcome.snapshot,
            milliseconds=log.milliseconds(started),
            lag_milliseconds=_lag_milliseconds(envelope),
        )
        return True

    def _kept(self, envelope: Envelope, error: Exception) -> bool:
        organization_id = self._pipeline.organization(envelope.shop_domain)
        try:
            self._failures.record(envelope, error, organization_id)
        except Exception as fault:  # noqa: BLE001 - then Pub/Sub must keep it
            log.error("failure.not_recorded", fault, because_of=type(error).__name__)
            return False
        return True


def _lag_milliseconds(envelope: Envelope) -> float:
    """From our receipt of the event until now, when it is stored; two machines' clocks."""
    lag = datetime.now(UTC) - envelope.received_at
    return round(max(lag.total_seconds(), 0) * 1000, 1)


@contextmanager
def _turn() -> Iterator[bool]:
    """Whether it is this thread's turn to handle a large message."""
    is_ours = _large.acquire(timeout=TURN_SECONDS)
    try:
        yield is_ours
    finally:
        if is_ours:
            _large.release()
