"""What is done from the pages is asked first, changes what was counted, and is recorded."""

from datetime import UTC, datetime, timedelta

import pytest

from tests.console.conftest import ACTOR, Client
from tests.console.test_pages import PLANTED, give_up
from tests.world import SHOP, World, envelope


def states(world: World) -> list[str]:
    return [row["status"] for row in world.failed_events()]


def actions(world: World) -> list[dict]:
    return world.app("select * from subscriber_operatoraction order by id")


def test_one_row_is_requeued_and_recorded(world: World, client: Client):
    give_up(world, 1)
    asked = client.get("/confirm/requeue?id=1")
    assert "Requeue 1 failed event?" in asked.said
    answer = client.post("/do/requeue", id="1", reason="the column is back")
    assert (answer.status, answer.headers["Location"]) == (303, "/failures/1")
    assert states(world) == ["pending"]
    (action,) = actions(world)
    assert (action["actor"], action["action"], action["count"]) == (ACTOR, "requeue", 1)
    assert action["reason"] == "the column is back"
    assert action["scope"]["rows"] == [1]


def test_what_was_done_is_said_once(client: Client):
    client.post("/do/resolve", id="1", reason="a test")
    assert "1 failed event resolved" in client.get("/failures/1").said
    assert "1 failed event resolved" not in client.get("/failures/1").said


def test_one_row_is_resolved_and_stays_so(world: World, client: Client):
    client.post("/do/resolve", id="1", reason="a test")
    assert states(world) == ["resolved"]
    assert actions(world)[0]["action"] == "resolve"
    assert "There is none" in client.get("/confirm/resolve?id=1").said
    assert "There is none" in client.get("/confirm/requeue?id=1").said


@pytest.mark.parametrize("reason", ["", "  "])
def test_without_a_reason_it_is_asked_again(world: World, client: Client, reason):
    answer = client.post("/do/resolve", id="1", reason=reason)
    assert answer.status == 200
    assert "Say why" in answer.said
    assert states(world) == ["pending"]


def test_a_group_is_what_the_filters_find_and_no_more(world: World, client: Client):
    for topic in ("orders/paid", "orders/paid", "orders/edited"):
        give_up(world, world.fail(envelope(topic=topic)))
    asked = client.get("/confirm/requeue?topic=orders/paid")
    assert "Requeue 2 failed events?" in asked.said
    client.post("/do/requeue", topic="orders/paid", reason="x")
    assert states(world) == ["pending", "pending", "pending", "failed"]
    assert actions(world)[0]["scope"]["topic"] == "orders/paid"


def test_what_is_recorded_after_the_question_is_not_touched(world: World, client: Client):
    asked = client.get(f"/confirm/resolve?shop={SHOP}").text
    until = asked.split('name="until" value="')[1].split('"')[0]
    assert datetime.fromisoformat(until) <= datetime.now(UTC)
    world.fail()
    world.app(
        "update subscriber_subscriberfailedevent set created_at = %(then)s where id = 2",
        then=datetime.fromisoformat(until) + timedelta(seconds=1),
    )
    client.post("/do/resolve", shop=SHOP, until=until, reason="x")
    assert states(world) == ["resolved", "pending"]


def test_pending_rows_are_requeued_only_when_that_is_said(world: World, client: Client):
    assert "There is none" in client.get(f"/confirm/requeue?shop={SHOP}").said
    assert "1 pending" in client.get(f"/confirm/requeue?shop={SHOP}").said
    assert "Requeue 1" in client.get(f"/confirm/requeue?shop={SHOP}&status=pending").said


def test_the_whole_ledger_has_to_be_meant(world: World, client: Client):
    assert client.post("/do/resolve", reason="x").status == 400
    assert client.post("/do/resolve", reason="x", status="pending").status == 400
    assert states(world) == ["pending"]
    assert 'name="all" required' in client.get("/confirm/resolve").text
    client.post("/do/resolve", reason="x", all="on")
    assert states(world) == ["resolved"]


def test_what_is_resolved_cannot_be_meant(client: Client):
    assert client.get("/confirm/requeue?status=resolved").status == 400
    assert client.post("/do/resolve", id="1", reason="x", status="resolved").status == 400


def test_a_row_that_a_run_holds_is_left_alone(world: World, client: Client):
    world.app(
        "update subscriber_subscriberfailedevent set lease_token = gen_random_uuid(),"
        " leased_until = now() + interval '1 minute'"
    )
    assert "1 being replayed" in client.get("/confirm/resolve?id=1").said
    client.post("/do/resolve", id="1", reason="x")
    assert states(world) == ["pending"]
    assert actions(world) == []


def test_a_reason_is_text_wherever_it_is_shown(world: World, client: Client):
    client.post("/do/requeue", id="1", reason=PLANTED.replace("\x1b", ""))
    shown = client.get("/failures/1").text
    assert "&lt;script&gt;" in shown
    assert "<script" not in shown


def test_a_try_says_what_would_happen_and_changes_nothing(world: World, client: Client):
    give_up(world, 1)
    before = world.failed_events()
    answer = client.post("/rehearse", id="1")
    assert "It would be stored" in answer.said
    assert "inserted" in answer.said
    assert world.failed_events() == before
    assert world.tenant("select * from shopify_events") == []


def test_a_try_says_what_would_fail_again(world: World, client: Client):
    world.fail(envelope(b"no JSON"))
    answer = client.post("/rehearse", shop=SHOP)
    assert "1 of 2 would fail" in answer.said
    assert "ValueError" in answer.said
    assert actions(world) == []


def test_without_its_payload_a_row_cannot_be_tried(world: World, client: Client):
    world.app("update subscriber_subscriberfailedevent set payload = null, redacted_at = now()")
    assert "its payload was taken away" in client.post("/rehearse", id="1").said
