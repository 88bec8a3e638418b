"""The outbox: messages that Pub/Sub did not confirm wait in their audit row and are sent again.

At least once and with the same bytes and attributes: a message whose confirmation was lost is there
twice, and the second one is a duplicate like any other.
"""

import base64
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from psycopg.rows import class_row, scalar_row
from psycopg.types.json import Jsonb

from shared import db, log
from shared import envelope as envelopes
from shared.errors import ConfigurationError, PublishError, UnpublishableBodyError
from shared.failures import Failures
from shared.message import Message

PUBLISH_SECONDS: Final = 10

_PUT: Final = """
update shopify_shopifyevent
set needs_publish = true, outbox_envelope = %(envelope)s, outbox_body = %(body)s
where id = %(id)s
returning id"""

_NEXT: Final = """
select id, outbox_envelope as envelope, outbox_body as body from shopify_shopifyevent
where needs_publish
order by received_at, id
limit 1"""

_TAKE_OUT: Final = """
update shopify_shopifyevent
set needs_publish = false, outbox_envelope = null, outbox_body = null
where id = %(id)s and needs_publish
returning id"""


class Sends(Protocol):
    """What the outbox needs of a publisher."""

    def publish(self, data: bytes, attributes: dict[str, str], *, timeout: float) -> str:
        """The message's id; raises PublishError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    id: int
    envelope: dict[str, Any]
    body: bytes


def put(application: db.Pool, row: int, data: bytes, attributes: dict[str, str]) -> None:
    """Leaves a message with its audit row. Raises what psycopg raises."""
    parameters = {"id": row, "body": data, "envelope": Jsonb({"attributes": attributes})}
    application.fetch(scalar_row, _PUT, parameters)


class Outbox:
    """Empties the outbox of one application database."""

    def __init__(
        self,
        application: db.Pool,
        failures: Failures,
        publisher: Callable[[], Sends],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`publisher` is called only when something waits: most runs need no Google client."""
        self._application = application
        self._failures = failures
        self._publisher = publisher
        self._clock = clock

    def republish(self, *, budget_seconds: float) -> int:
        """Sends what waits, the oldest first, until nothing does, one fails, or time is up.

        Returns how many have left. Raises one of db.UNREACHABLE when the table is out of reach.
        """
        deadline = self._clock() + budget_seconds
        left = 0
        while self._clock() < deadline:
            waiting = self._application.fetch(class_row(_Waiting), _NEXT)
            if not waiting:
                break
            try:
                self._send(waiting[0])
            except (PublishError, ConfigurationError) as error:
                log.error("outbox.stuck", error, republished=left)
                return left
            self._application.fetch(scalar_row, _TAKE_OUT, {"id": waiting[0].id})
            left += 1
        if left:
            log.info("outbox.republished", republished=left)
        return left

    def _send(self, waiting: _Waiting) -> None:
        attributes = waiting.envelope["attributes"]
        try:
            self._publisher().publish(waiting.body, attributes, timeout=PUBLISH_SECONDS)
        except UnpublishableBodyError as error:
            # It must not hold up the others: the failure ledger takes what Pub/Sub never will.
            data = base64.b64encode(waiting.body).decode("ascii")
            message = Message(data=data, attributes=attributes)
            self._failures.record(envelopes.from_message(message, datetime.now(UTC)), error)
