"""Old notifications go, and nothing that is open goes with them."""

from shared.notifier.retention import STEP_ROWS, Retention
from tests.notifier.relay import Relay

AGE = """
update notifier.notifications set finished_at = now() - make_interval(days => %(days)s)
where id = %(id)s"""
DONE = """
update pgrelay.queue set done_at = now() - make_interval(days => %(days)s), outcome = 'failed'
where notification_id = %(id)s"""


def finished(relay: Relay, days: int) -> int:
    """A notification that failed so many days ago."""
    (row,) = relay.rows("select notifier.notify('ops', 'subject', 'body') as id")
    relay.rows("select notifier.set_status(%(id)s, 1, 'failed') as is_set", id=row["id"])
    relay.rows(AGE + " returning id", id=row["id"], days=days)
    relay.rows(DONE + " returning id", id=row["id"], days=days)
    return row["id"]


def left(relay: Relay) -> tuple[list[int], list[int]]:
    notifications = relay.rows("select id from notifier.notifications order by id")
    queue = relay.rows("select notification_id as id from pgrelay.queue order by id")
    return [row["id"] for row in notifications], [row["id"] for row in queue]


def test_what_ended_long_ago_goes_and_what_is_young_or_open_stays(relay: Relay):
    old, young = finished(relay, 91), finished(relay, 89)
    relay.rows(
        "insert into notifier.attempts (notification_id, attempt, processor)"
        " values (%(id)s, 1, 'p') returning attempt",
        id=old,
    )
    (row,) = relay.rows("select notifier.notify('ops', 'still', 'open') as id")
    relay.rows(
        "update notifier.notifications set created_at = now() - interval '1 year'"
        " where id = %(id)s returning id",
        id=row["id"],
    )
    assert Retention(days=90)(relay.connection) == 2
    assert left(relay) == ([young, row["id"]], [young, row["id"]])
    assert relay.rows("select count(*) as count from notifier.attempts") == [{"count": 0}]
    assert Retention(days=90)(relay.connection) == 0


def test_a_step_is_bounded(relay: Relay):
    relay.rows(
        "insert into notifier.notifications (channel, severity, kind, subject, body, status,"
        " finished_at) select 'ops', 'info', 'message', 's', 'b', 'sent',"
        " now() - interval '1 year' from generate_series(1, %(rows)s) returning id",
        rows=STEP_ROWS + 1,
    )
    assert Retention(days=90)(relay.connection) == STEP_ROWS
    assert Retention(days=90)(relay.connection) == 1
