"""What the shops send: series of states of a few resources, out of order and more than once."""

import json
import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

BEGIN: Final = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
RESOURCES: Final = {"orders": 12, "products": 6, "customers": 6}  # how many of each a shop has
TABLES: Final = {name: f"shopify_{name}" for name in RESOURCES}
HELD_BACK: Final = 30  # events that may overtake one


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a shop, as it is sent, however often."""

    shop: str
    topic: str
    event_id: str
    resource_id: int
    triggered_at: datetime
    body: bytes
    is_native: bool  # comes by Shopify's own Pub/Sub delivery, not through the webhook
    is_broken: bool  # no JSON: it must end in the failure ledger
    copies: int

    @property
    def resource(self) -> str:
        """The first part of the topic."""
        return self.topic.partition("/")[0]

    @property
    def is_deletion(self) -> bool:
        """Whether the resource is gone with it."""
        return self.topic.endswith("/delete")

    def version(self) -> tuple[datetime, bool, datetime, bytes]:
        """By what the states of one resource are ordered: written here once more, on purpose."""
        clock = json.loads(self.body).get("updated_at")
        updated = datetime.fromisoformat(clock) if clock else self.triggered_at
        return (updated, self.is_deletion, self.triggered_at, self.event_id.encode())


def stream(dice: random.Random, shops: list[str]) -> Iterator[Event]:
    """Events without end. Some are held back, so that later ones overtake them."""
    waiting: list[Event] = []
    clock = BEGIN
    while True:
        clock += timedelta(seconds=dice.choice((0, 0, 1, 7)))
        waiting.append(_event(dice, dice.choice(shops), clock))
        if len(waiting) > HELD_BACK:
            yield waiting.pop(dice.randrange(len(waiting)))


def _event(dice: random.Random, shop: str, clock: datetime) -> Event:
    resource = dice.choice(list(RESOURCES))
    number = dice.randrange(RESOURCES[resource]) + 1
    operation = dice.choices(("create", "update", "delete"), (4, 6, 1))[0]
    if resource == "orders" and operation == "update":
        operation = "updated"
    is_broken = dice.random() < 0.01
    return Event(
        shop=shop,
        topic=f"{resource}/{operation}",
        event_id=str(uuid.UUID(int=dice.getrandbits(128), version=4)),
        resource_id=number,
        triggered_at=clock,
        body=b'{"id": ' if is_broken else _body(dice, operation, number, clock),
        is_native=dice.random() < 0.2,
        is_broken=is_broken,
        copies=dice.choices((1, 2, 3), (8, 2, 1))[0],
    )


def _body(dice: random.Random, operation: str, number: int, clock: datetime) -> bytes:
    body: dict[str, Any] = {"id": number}
    if operation != "delete":
        body["updated_at"] = clock.isoformat()
        body["note"] = "".join(dice.choices("abcdefgh ", k=dice.choice((10, 400, 4000))))
    return json.dumps(body).encode()
