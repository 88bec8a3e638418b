"""events: found by what is known of an event, shown with the state of what it is about."""

import json

import pytest

from tests.integration.test_commands import run
from tests.integration.test_failures_commands import fits
from tests.world import ORGANIZATION, World, envelope


def stored(world: World, *topics: str) -> None:
    for number, topic in enumerate(topics, 1):
        assert world.core.pipeline.apply(
            envelope({"id": number}, topic, event_id=f"event-{number}")
        )


def shown(world: World, *words: str) -> list[dict]:
    done = run(world.environ, "events", "list", "--organization", ORGANIZATION, "--json", *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("command", ["events list", "events show"])
def test_every_commands_help_shows_an_example_and_fits_a_terminal(command: str):
    told = run({}, *command.split(), "--help")
    assert f"Example: python manage.py {command}" in told.stdout
    assert fits(told.stdout)


def test_the_newest_events_come_first_and_each_option_narrows_the_list(world: World):
    stored(world, "orders/create", "products/update", "orders/paid")
    ids = [row["event_id"] for row in shown(world)]
    assert ids == ["event-3", "event-2", "event-1"]
    for words, expected in {
        ("--topic", "orders/paid"): ["event-3"],
        ("--resource", "orders"): ["event-3", "event-1"],
        ("--resource-id", "2"): ["event-2"],
        ("--shop", "other.myshopify.com"): [],
        ("--since", "2026-11-30T12:00:01Z"): [],
        ("--until", "2026-11-30T12:00:01Z"): ids,
        ("--limit", "1"): ["event-3"],
    }.items():
        assert [row["event_id"] for row in shown(world, *words)] == expected, words


def test_a_list_fits_a_terminal(world: World):
    stored(world, "inventory_levels/disconnect", "orders/create")
    done = run(world.environ, "events", "list", "--organization", ORGANIZATION)
    assert fits(done.stdout)
    assert "event-2" in done.stdout


def test_an_event_is_shown_with_the_state_of_what_it_is_about(world: World):
    for event_id, clock in (("old", "2026-11-30T11:00:00Z"), ("new", "2026-11-30T12:00:00Z")):
        body = {"id": 7, "updated_at": clock}
        world.core.pipeline.apply(envelope(body, "orders/updated", event_id=event_id))
    old = run(world.environ, "events", "show", "old", "--organization", ORGANIZATION)
    assert "of new" in old.stdout
    assert fits(old.stdout)
    new = run(world.environ, "events", "show", "new", "--organization", ORGANIZATION, "--json")
    assert json.loads(new.stdout)["snapshot"]["event_id"] == "new"


def test_a_payload_is_shown_on_demand_and_a_terminal_acts_upon_nothing_in_it(world: World):
    body = json.dumps({"id": 7, "note": "\x1b]0;x\x07[bold]"}).encode()
    world.core.pipeline.apply(envelope(body, event_id="e"))
    words = ("events", "show", "e", "--organization", ORGANIZATION)
    assert "[bold]" not in run(world.environ, *words).stdout
    told = run(world.environ, *words, "--payload").stdout
    assert "[bold]" in told
    assert "\x1b" not in told


def test_an_event_that_waits_in_the_failure_ledger_is_pointed_at(world: World):
    row = world.fail(envelope(event_id="waiting"))
    done = run(world.environ, "events", "show", "waiting", "--organization", ORGANIZATION)
    assert done.returncode == 1
    assert f"failures show {row}" in " ".join(done.stderr.split())
    none = run(world.environ, "events", "show", "nowhere", "--organization", ORGANIZATION)
    assert "nor has the failure ledger" in " ".join(none.stderr.split())
