"""Sixteen writers over the same few resources: nothing lost, nothing failed, nobody deadlocked."""

import itertools
import threading
import time
from collections import Counter, defaultdict
from datetime import timedelta
from typing import Any

import pytest

from shared import bootstrap
from shared.ingest import Ingester
from shared.model import Envelope, LedgerOutcome, Outcome
from shared.pipeline import Pipeline
from tests.world import NOW, World, message

pytestmark = pytest.mark.slow

WRITERS = 16
SECONDS = 20
RESOURCES = (("orders", 1), ("orders", 2), ("orders", 3), ("products", 1), ("products", 2))
DELIVERIES = 2  # of each event, mostly by two writers at about the same time


class Event:
    """The n-th event, the same whoever delivers it: ties of clocks are many."""

    def __init__(self, n: int) -> None:
        self.id = f"{n * 7919 % 1_000_003:07}"  # not in the order of sending
        self.resource, self.resource_id = RESOURCES[n % len(RESOURCES)]
        self.operation = ("create", "delete", "update", "update")[n // len(RESOURCES) % 4]
        if self.resource == "orders" and self.operation == "update":
            self.operation = "updated"
        self.is_deletion = self.operation == "delete"
        self.clock = NOW + timedelta(seconds=n // 50 - n % 3)
        self.triggered_at = NOW + timedelta(seconds=n // 100)

    @property
    def version(self) -> tuple[Any, ...]:
        clock = self.triggered_at if self.is_deletion else self.clock
        return clock, self.is_deletion, self.triggered_at, self.id

    def message(self):
        clock = "" if self.is_deletion else f', "updated_at": "{self.clock.isoformat()}"'
        return message(
            f'{{"id": {self.resource_id}, "n": "{self.id}"{clock}}}'.encode(),
            topic=f"{self.resource}/{self.operation}",
            webhook_id=self.id,
            triggered_at=self.triggered_at.isoformat(),
        )


class Recording(Pipeline):
    """A pipeline that remembers what it did."""

    def __init__(self, core: bootstrap.Core) -> None:
        self._within = core.pipeline
        self.outcomes: list[tuple[str, Outcome]] = []

    def apply(self, envelope: Envelope, *, dry_run: bool = False) -> Outcome:
        outcome = self._within.apply(envelope, dry_run=dry_run)
        self.outcomes.append((envelope.event_id, outcome))
        return outcome

    def organization(self, shop_domain: str) -> str | None:
        return self._within.organization(shop_domain)


def test_sixteen_writers_lose_nothing_and_end_in_the_reference(world: World):
    numbers = itertools.count()
    end = time.monotonic() + SECONDS
    refused: list[str] = []
    cores = [bootstrap.core(world.environ) for _ in range(WRITERS)]
    recordings = [Recording(core) for core in cores]

    def write(core: bootstrap.Core, recording: Recording) -> None:
        ingester = Ingester(core.application, core.failures, recording)
        while time.monotonic() < end:
            event = Event(next(numbers) // DELIVERIES)
            if not ingester.ingest(event.message()):
                refused.append(event.id)

    writers = [
        threading.Thread(target=write, args=pair) for pair in zip(cores, recordings, strict=True)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    for core in cores:
        core.application.close()
        core.tenants.close()

    outcomes = [one for recording in recordings for one in recording.outcomes]
    sent = [Event(n) for n in range((next(numbers) + 1) // DELIVERIES)]
    delivered = {event_id for event_id, _ in outcomes}
    assert refused == []
    assert world.failed_events() == []
    assert len(outcomes) > 10 * WRITERS
    assert delivered <= {event.id for event in sent}

    made = Counter(e for e, outcome in outcomes if outcome.ledger is LedgerOutcome.INSERTED)
    assert set(made) == delivered
    assert set(made.values()) == {1}, "each event was inserted by one delivery, no more, no less"
    rows = world.tenant("select event_id from shopify_events")
    assert Counter(row["event_id"] for row in rows) == made

    by_resource: dict[tuple[str, int], list[Event]] = defaultdict(list)
    for event in sent:
        if event.id in delivered:
            by_resource[event.resource, event.resource_id].append(event)
    assert len(by_resource) == len(RESOURCES)
    for (resource, resource_id), events in by_resource.items():
        newest = max(events, key=lambda event: event.version)
        (row,) = world.tenant(
            f"select event_id, topic, is_deleted, payload from shopify_{resource}"  # type: ignore[arg-type]
            " where shopify_id = %(id)s",
            id=str(resource_id),
        )
        assert row["event_id"] == newest.id
        assert row["topic"] == f"{resource}/{newest.operation}"
        assert row["is_deleted"] is newest.is_deletion
        assert row["payload"]["n"] == newest.id

    (health,) = world.tenant(
        "select deadlocks from pg_stat_database where datname = current_database()"
    )
    assert health == {"deadlocks": 0}
