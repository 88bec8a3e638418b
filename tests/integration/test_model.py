"""Whatever happens, in whatever order: no event is lost, and the tenants' tables converge."""

import os
import secrets
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dev.postgres import Server
from shared import incidents, log
from shared.migrate import Series
from tests.model import LATE, SHOPS, TABLES, Delivery, Model, Site

T = TypeVar("T")

TASKS_MAX = 4
ORGANIZATIONS = st.sampled_from(["acme", "other"])
ANY = st.integers(0, 99)  # the n-th of what there is, counted round and round
STOPS = st.sampled_from([None, None, None, 1, 2, 3, 4, 5, 6, "claim", "start", "apply"])
PUBSUB = st.sampled_from(["up", "up", "up", "unclear", "down"])

DELIVERIES = st.builds(
    Delivery,
    shop=st.sampled_from(list(SHOPS)),
    topic=st.sampled_from(list(TABLES)),
    resource=st.integers(1, 2),
    clock=st.sampled_from([0, 1, 1, 2, None]),
    triggered=st.sampled_from([0, 1, None]),
    published=st.sampled_from([0, 1, None]),
    kind=st.sampled_from(["good"] * 6 + ["idless", "nul", "overflow", "text"]),
    native=st.booleans(),
    named=st.sampled_from([True, True, True, False]),
)
ODDITIES = st.builds(Delivery, kind=st.sampled_from(["stranger", "garbled"]), native=st.just(True))


def nth(things: list[T], n: int) -> T:
    return things[n % len(things)]


class Machine(RuleBasedStateMachine):
    """Draws what happens next; all that it does is the model's."""

    site: Site

    def __init__(self) -> None:
        super().__init__()
        self.model = Model(self.site)

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self.model.settle()
        finally:
            self.model.close()

    @invariant()
    def everything_holds(self) -> None:
        self.model.check()

    # Deliveries

    @rule(delivery=DELIVERIES, pubsub=PUBSUB)
    def send(self, delivery, pubsub):
        self.model.send(delivery, pubsub=pubsub)

    @initialize(sent=st.lists(DELIVERIES, min_size=1, max_size=4), is_outage=st.booleans())
    def some_deliveries(self, sent, is_outage):
        if is_outage:
            self.model.switch_tenant("acme", on=False)
        for delivery in sent:
            self.model.deliver(delivery)
        if is_outage:
            self.model.switch_tenant("acme", on=True)

    @rule(delivery=DELIVERIES | ODDITIES)
    def deliver(self, delivery):
        self.model.deliver(delivery)

    @precondition(lambda self: self.model.sent)
    @rule(n=ANY)
    def send_again(self, n):
        self.model.resend(nth(self.model.sent, n))

    @precondition(lambda self: self.model.sent)
    @rule(n=ANY, other=DELIVERIES)
    def send_another_body_under_the_same_id(self, n, other):
        first = nth(self.model.sent, n)
        event_id = first.headers.get("X-Shopify-Webhook-Id", "")
        if event_id:
            self.model.deliver(
                replace(other, shop=first.delivery.shop, named=True), event_id=event_id
            )

    @precondition(lambda self: self.model.bag and len(self.model.tasks) < TASKS_MAX)
    @rule(n=ANY, stop=st.sampled_from([None, None, 1, 2]), lose_ack=st.booleans())
    def pull(self, n, stop, lose_ack):
        self.model.pull(nth(self.model.bag, n), stop=stop, lose_ack=lose_ack)

    # Replays

    @precondition(lambda self: len(self.model.tasks) < TASKS_MAX)
    @rule(limit=st.sampled_from([None, None, 1, 2]), stop=STOPS)
    def run(self, limit, stop):
        self.model.run(limit=limit, stop=stop)

    @precondition(lambda self: len(self.model.tasks) < TASKS_MAX - 1)
    @rule(sent=DELIVERIES, stop=st.sampled_from(["claim", "start", "apply"]), other=STOPS)
    def a_run_outlives_its_leases(self, sent, stop, other):
        self.model.switch_tenant("acme", on=False)
        self.model.deliver(replace(sent, shop="acme.myshopify.com", kind="good"))
        self.model.switch_tenant("acme", on=True)
        self.model.run(stop=stop)
        self.model.pass_time(2.5)
        self.model.run(stop=other)

    @precondition(lambda self: len(self.model.tasks) < TASKS_MAX)
    @rule(n=ANY, stop=STOPS)
    def run_for_one_row(self, n, stop):
        rows = self.model.failed_events()
        if rows:
            self.model.run(row=nth(rows, n)["id"], stop=stop)

    @precondition(lambda self: len(self.model.tasks) < TASKS_MAX)
    @rule(pubsub=PUBSUB, stop=st.sampled_from([None, None, 1, 2]))
    def republish(self, pubsub, stop):
        self.model.republish(pubsub=pubsub, stop=stop)

    @precondition(lambda self: self.model.tasks)
    @rule(n=ANY, stop=STOPS)
    def go_on(self, n, stop):
        self.model.advance(nth(self.model.tasks, n), stop)

    @precondition(lambda self: self.model.tasks)
    @rule(n=ANY)
    def kill(self, n):
        self.model.kill(nth(self.model.tasks, n))

    @rule(role=st.sampled_from(["webhook", "subscriber", "retry"]))
    def start_a_new_process(self, role):
        self.model.forget(role)

    @rule(minutes=st.sampled_from([0.1, 1.1, 3, 20, 120]))
    def time_passes(self, minutes):
        self.model.pass_time(minutes)

    # Outages

    @rule(organization=ORGANIZATIONS)
    def a_tenant_goes_or_comes_back(self, organization):
        is_down = self.model.site.tenants[organization].is_down
        self.model.switch_tenant(organization, on=is_down)

    @rule(sent=st.lists(DELIVERIES, min_size=2, max_size=3))
    def an_outage_is_noticed(self, sent):
        self.model.switch_tenant("acme", on=False)
        for delivery in sent:
            self.model.deliver(replace(delivery, shop="acme.myshopify.com", kind="good"))
        self.model.run()

    @rule()
    def the_application_database_goes_or_comes_back(self):
        self.model.switch_app(on=self.model.site.app.is_down)

    @rule(database=st.sampled_from(["app", "acme", "other"]))
    def an_answer_is_lost(self, database):
        self.model.lose_answer(database)

    # Operators

    @precondition(lambda self: not self.model.site.app.is_down)
    @rule(organization=ORGANIZATIONS)
    def an_organization_is_paused_or_goes_on(self, organization):
        if organization in self.model.paused:
            self.model.unpause(organization)
        else:
            self.model.pause(organization)

    @precondition(lambda self: not self.model.site.app.is_down)
    @rule(n=ANY, is_written_off=st.sampled_from([False, False, True]))
    def a_row_is_requeued_or_written_off(self, n, is_written_off):
        rows = [row for row in self.model.failed_events() if row["status"] != "resolved"]
        if rows:
            act = self.model.resolve if is_written_off else self.model.requeue
            act(nth(rows, n)["id"])

    @precondition(lambda self: LATE not in self.model.connected and not self.model.site.app.is_down)
    @rule(requeue=st.booleans())
    def the_unknown_shop_is_connected(self, requeue):
        self.model.connect_late(requeue=requeue)


@pytest.fixture(scope="module")
def site(postgres: Server, templates: dict[Series, str]) -> Iterator[Site]:
    with Site(postgres, templates, "model") as site:
        yield site


@pytest.fixture
def model_site(site: Site, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(log, "_threshold", log._threshold)  # the model's processes set it
    # What is staggered comes due when the model says that time passes, never by itself.
    monkeypatch.setattr(incidents, "PARKED_PER_SECOND", 0.1)
    with Path(os.devnull).open("w") as nowhere:
        monkeypatch.setattr(log, "_stream", nowhere)
        yield site
        monkeypatch.undo()


@pytest.fixture
def model(model_site: Site) -> Iterator[Model]:
    model = Model(model_site)
    yield model
    model.close()


def explore(site: Site, number: int | None, **options: object) -> None:
    """Runs the machine; `number` is the seed of a run that is not to be the same every time."""

    class Here(Machine):
        pass

    Here.site = site
    if number is not None:
        print(f"MODEL_SEED={number}")  # noqa: T201 - to run it again
        seed(number)(Here)
    run_state_machine_as_test(
        Here,
        settings=settings(
            deadline=None,  # an example is many round trips to a database
            suppress_health_check=list(HealthCheck),  # the same: slow is what it is
            print_blob=True,
            **options,
        ),
    )


def test_the_invariants_hold_after_every_step(model_site):
    explore(model_site, None, max_examples=15, stateful_step_count=25, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_invariants_hold_after_every_step_of_many_more(model_site):
    number = int(os.environ.get("MODEL_SEED") or secrets.randbits(32))
    examples = int(os.environ.get("MODEL_EXAMPLES") or 60)
    explore(model_site, number, max_examples=examples, stateful_step_count=50, database=None)


# What it found. Each example is the shortest way to a fault.


def row_of(model: Model, event_id: str) -> dict[str, Any]:
    (row,) = [row for row in model.failed_events() if row["event_id"] == event_id]
    return row


def spend_all_but_one_retry(model: Model) -> None:
    model.site.app.rows("update subscriber_subscriberfailedevent set max_retries = 1")


def test_a_second_body_that_is_kept_and_delivered_again_is_stored_once(model):
    model.switch_tenant("acme", on=False)
    model.deliver(Delivery(), event_id="same")
    second = model.deliver(Delivery(), event_id="same")
    model.switch_tenant("acme", on=True)
    model.forget("subscriber")
    model.resend(second)
    model.pull(model.bag[-1])
    model.settle()


def test_a_pause_between_claim_and_replay_charges_nobody(model):
    model.switch_tenant("acme", on=False)
    model.deliver(Delivery())
    run = model.run(stop="claim")
    model.pause("acme")
    model.advance(run)
    model.check()


def test_a_pause_charges_no_row_whose_shop_was_unknown_when_it_was_kept(model):
    model.deliver(Delivery(shop=LATE))
    model.connect_late(requeue=False)
    model.pause("other")
    model.run()
    model.check()


def test_a_probe_without_a_directory_ends_no_incident(model):
    model.switch_tenant("acme", on=False)
    model.deliver(Delivery())
    model.run()
    model.resolve(row_of(model, "a0")["id"])
    model.deliver(Delivery(kind="text"))
    model.pass_time(1.5)
    model.check()
    run = model.run(stop="reschedule")
    model.switch_app(on=False)
    model.advance(run, "probe")
    model.switch_app(on=True)
    model.pass_time(0.1)
    model.advance(run)
    model.check()


def test_an_answer_lost_at_the_start_of_a_replay_does_not_end_the_run(model):
    model.switch_tenant("acme", on=False)
    model.deliver(Delivery())
    model.switch_tenant("acme", on=True)
    run = model.run(stop="claim")
    model.lose_answer("app")
    model.advance(run)
    model.settle()


def two_events_before_their_last_replay(model: Model) -> None:
    """Two failed events of a tenant that is down, each with one retry left."""
    model.switch_tenant("acme", on=False)
    for _ in range(2):
        model.deliver(Delivery())
    spend_all_but_one_retry(model)


def test_what_an_older_run_gives_up_during_an_outage_comes_back(model):
    two_events_before_their_last_replay(model)
    older = model.run(row=row_of(model, "a0")["id"], stop="claim")
    model.run()
    model.advance(older)
    model.settle()


def test_what_a_run_gives_up_before_it_dies_comes_back(model):
    two_events_before_their_last_replay(model)
    model.kill(model.run(stop="reschedule"))
    model.pass_time(5)
    model.run()
    model.settle()


def test_what_was_given_up_before_a_pause_took_over_comes_back(model):
    model.switch_tenant("acme", on=False)
    model.deliver(Delivery())
    spend_all_but_one_retry(model)
    model.run()
    model.pause("acme")
    model.switch_tenant("acme", on=True)
    model.unpause("acme")
    model.settle()


def test_what_is_given_up_after_another_run_has_ended_the_incident_comes_back(model):
    two_events_before_their_last_replay(model)
    late = model.run(row=row_of(model, "a0")["id"], stop="unavailable")
    model.switch_tenant("acme", on=True)
    model.pass_time(1.5)
    model.run()
    model.advance(late)
    model.settle()
