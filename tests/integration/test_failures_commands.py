"""The failure ledger and pauses on the command line: scopes are said, tables fit, all is shown."""

import json

import pytest

from shared.errors import StorageConfigurationError
from tests.integration.test_commands import run
from tests.world import ORGANIZATION, World, envelope

HOSTILE = b'{"id": 1.10, "name": "\x1b]0;x\x07[bold]"}'
COMMANDS = ("list", "show", "requeue", "resolve", "stats")


def failed(world: World, *bodies: bytes) -> list[int]:
    """Failed events that were given up."""
    rows = [world.fail(envelope(body)) for body in bodies or (b"{}",)]
    world.app(
        "update subscriber_subscriberfailedevent set status = 'failed', retry_count = 5"
        " where id = any(%(rows)s)",
        rows=rows,
    )
    return rows


def states(world: World) -> list[str]:
    return [row["status"] for row in world.failed_events()]


def actions(world: World) -> list[dict]:
    return world.app("select * from subscriber_operatoraction order by id")


def fits(text: str) -> bool:
    return max(len(line) for line in text.splitlines()) <= 80


@pytest.mark.parametrize(
    "command", [*(f"failures {name}" for name in COMMANDS), "pause", "unpause"]
)
def test_every_commands_help_shows_an_example_and_fits_a_terminal(command):
    shown = run({}, *command.split(), "--help")
    assert shown.returncode == 0
    assert f"Example: python manage.py {command}" in shown.stdout
    assert fits(shown.stdout)


def test_a_list_fits_a_terminal_and_says_how_many_there_are(world: World):
    failed(world)
    world.fail(
        envelope(topic="inventory_levels/disconnect", shop_domain="x" * 200 + ".myshopify.com"),
        StorageConfigurationError("[/] \x1b[2J"),
    )
    world.fail(envelope(topic="\x1b[31m[red]"))
    shown = run(world.environ, "failures", "list")
    assert shown.returncode == 0
    assert fits(shown.stdout)
    assert "\x1b" not in shown.stdout
    header, *rows, total = shown.stdout.splitlines()
    assert header.split() == ["id", "status", "when", "tries", "topic", "shop", "error"]
    assert [row.split()[:2] for row in rows] == [
        ["3", "pending"],
        ["2", "pending"],
        ["1", "failed"],
    ]
    assert total == "3 shown of 3: 2 pending, 1 failed"


def test_a_list_is_filtered_and_comes_as_json(world: World):
    failed(world)
    other = world.fail(envelope(topic="orders/paid"))
    asked = ("--topic", "orders/paid", "--since", "1h", "--status", "pending", "--json")
    (row,) = json.loads(run(world.environ, "failures", "list", *asked).stdout)
    assert (row["id"], row["error_type"], row["is_leased"]) == (other, "RuntimeError", False)
    wrong = run(world.environ, "failures", "list", "--since", "yesterday")
    assert (wrong.returncode, "is no time" in wrong.stderr) == (2, True)


def test_one_failed_event_with_payload_history_and_next_step(world: World):
    row = world.fail(envelope(HOSTILE))
    world.retry()
    shown = run(world.environ, "failures", "show", str(row), "--payload")
    assert shown.returncode == 0
    assert fits(shown.stdout)
    assert "\x1b" not in shown.stdout
    assert r'{"id": 1.10, "name": "\x1b]0;x\x07[bold]"}' in shown.stdout
    for words in ("Correct the data at its source", "rescheduled", '"event_id"', "1 of 5 retries"):
        assert words in shown.stdout
    missing = run(world.environ, "failures", "show", "99")
    assert (missing.returncode, "no failed event 99" in missing.stderr) == (1, True)


def test_a_payload_is_pretty_and_exact_and_bytes_survive_in_json(world: World):
    row = world.fail(envelope(b'{"id":9117305562284810243,"price":"1","rate":1.10,"lines":[]}'))
    shown = run(world.environ, "failures", "show", str(row), "--payload").stdout
    assert '{\n  "id": 9117305562284810243,\n  "price": "1",\n  "rate": 1.10,\n' in shown
    raw = world.fail(envelope(b"\xff\xfe"))
    answer = json.loads(
        run(world.environ, "failures", "show", str(raw), "--payload", "--json").stdout
    )
    assert answer["payload_base64"] == "//4="
    assert answer["next_step"].startswith("An error in the code")
    assert "payload" not in json.loads(
        run(world.environ, "failures", "show", str(raw), "--json").stdout
    )


@pytest.mark.parametrize(
    "scope",
    [(), ("--status", "failed"), ("--all", "--topic", "orders/create"), ("--all", "1")],
    ids=["nothing", "a state only", "all and a filter", "all and an id"],
)
@pytest.mark.parametrize("command", ["requeue", "resolve"])
def test_a_change_needs_an_explicit_scope(world: World, command, scope):
    failed(world)
    refused = run(world.environ, "failures", command, "--reason", "x", "--yes", *scope)
    assert refused.returncode == 1
    assert "Say which failed events" in refused.stderr
    assert states(world) == ["failed"]


@pytest.mark.parametrize("command", ["requeue", "resolve"])
def test_a_dry_run_says_how_many_and_which_and_changes_nothing(world: World, command):
    rows = failed(world, *[b"{}"] * 23)
    asked = ("failures", command, "--all", "--reason", "x", "--dry-run")
    shown = run(world.environ, *asked)
    assert shown.returncode == 0
    assert fits(shown.stdout)
    assert "… and 3 more\n23 failed events would be re" in shown.stdout
    assert json.loads(run(world.environ, *asked, "--json").stdout) == {"count": 23, "ids": rows}
    assert (set(states(world)), actions(world)) == ({"failed"}, [])


def test_without_a_yes_nothing_happens(world: World):
    failed(world)
    asked = run(world.environ, "failures", "requeue", "--all")
    assert asked.returncode == 1
    assert "Requeue 1 failed event, due at once? [y/N]" in asked.stderr
    assert states(world) == ["failed"]


def test_requeueing_by_hand(world: World):
    rows = failed(world, b"{}", b"{}", b"{}")
    done = run(world.environ, "failures", "requeue", str(rows[0]), str(rows[1]), "--yes")
    assert done.stdout == "2 failed events requeued, due at once\n"
    assert states(world) == ["pending", "pending", "failed"]
    (action,) = actions(world)
    assert (action["count"], action["reason"]) == (2, "requeued by hand")
    assert "@" in action["actor"]
    slow = ("--all", "--yes", "--per-second", "0.1", "--actor", "jane", "--json")
    assert json.loads(run(world.environ, "failures", "requeue", *slow).stdout) == {"count": 1}
    assert actions(world)[-1]["actor"] == "jane"


def test_pending_ones_are_requeued_only_if_asked(world: World):
    row = world.fail(envelope(b"[]"))
    world.retry()
    left = run(world.environ, "failures", "requeue", str(row), "--yes")
    assert left.stdout == "None would be requeued, due at once. What is there: 1 pending.\n"
    run(world.environ, "failures", "requeue", str(row), "--yes", "--status", "pending")
    assert world.failed_event()["retry_count"] == 0


def test_resolving_by_hand_needs_a_reason(world: World):
    (row,) = failed(world)
    assert run(world.environ, "failures", "resolve", str(row), "--yes").returncode == 2
    blank = run(world.environ, "failures", "resolve", str(row), "--yes", "--reason", " ")
    assert (blank.returncode, "--reason" in blank.stderr) == (1, True)
    assert states(world) == ["failed"]
    done = run(world.environ, "failures", "resolve", str(row), "--yes", "--reason", "a test")
    assert done.stdout == "1 failed event resolved\n"
    assert states(world) == ["resolved"]
    again = run(world.environ, "failures", "requeue", str(row), "--yes", "--status", "resolved")
    assert (again.returncode, "stays resolved" in again.stderr) == (1, True)
    assert "a test" in run(world.environ, "failures", "show", str(row)).stdout


def test_numbers_kinds_and_open_incidents(world: World):
    failed(world)
    world.core.incidents.pause(ORGANIZATION, actor="jane", reason="moving [/] house")
    shown = run(world.environ, "failures", "stats")
    assert shown.returncode == 0
    assert fits(shown.stdout)
    for words in ("RuntimeError on orders/create: broken", "moving [/] house", "fingerprint"):
        assert words in shown.stdout
    numbers = json.loads(run(world.environ, "failures", "stats", "--json").stdout)
    assert (numbers["failed"], numbers["groups"][0]["count"]) == (1, 1)
    assert numbers["incidents"][0]["kind"] == "paused"


def test_pausing_and_unpausing(world: World):
    paused = run(world.environ, "pause", "--organization", ORGANIZATION, "--reason", "moving")
    assert paused.stdout == "acme is paused. Running processes notice within 60 s.\n"
    (incident,) = world.incidents()
    assert (incident["kind"], incident["cause"]) == ("paused", "moving")
    twice = run(world.environ, "pause", "--organization", ORGANIZATION, "--reason", "x", "--json")
    assert json.loads(twice.stdout)["changed"] is False
    over = run(world.environ, "unpause", "--organization", ORGANIZATION)
    assert over.stdout == "acme is unpaused. Running processes notice within 60 s.\n"
    assert world.incidents()[0]["ended_at"] is not None
    again = run(world.environ, "unpause", "--organization", ORGANIZATION)
    assert again.stdout == "acme was not paused.\n"
    assert [action["action"] for action in actions(world)] == ["pause", "unpause"]
    typo = run(world.environ, "pause", "--organization", "acne", "--reason", "x")
    assert (typo.returncode, "no organization acne" in typo.stderr) == (1, True)


def test_a_rehearsal_says_why_a_row_would_fail(world: World):
    world.fail(envelope(b"[]"))
    shown = run(world.environ, "retry_failed_events", "--dry-run")
    assert "ValueError: The body is" in shown.stdout
    assert fits(shown.stdout)
