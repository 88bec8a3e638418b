"""What ends a processor's sleep: a notice where the database gives one, a look once a second."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shared import db
from shared.notifier import processor
from shared.notifier.bell import Bell
from shared.notifier.model import Message, Verdict
from shared.notifier.processor import Processor
from tests.functions.rig import NOBODY, eventually
from tests.notifier.relay import BUSY, SENT, Relay, Sender

FOR_EVER = 3600.0


@contextmanager
def standing(working: Processor) -> Iterator[None]:
    thread = threading.Thread(target=working.run)
    thread.start()
    try:
        yield
    finally:
        working.stop()
        thread.join(60)
        assert not thread.is_alive()


def asleep(relay: Relay) -> bool:
    """Whether a processor has looked at the queue and found nothing."""
    return bool(
        relay.rows(
            "select pid from pg_stat_activity where application_name = 'hookledger'"
            " and datname = current_database() and state = 'idle'"
            " and query like '%%from pgrelay.reload_state g left join claimed%%'"
        )
    )


def test_a_new_event_wakes_it_without_a_look(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "POLL_SECONDS", FOR_EVER)
    relay.channel()
    sender = Sender()
    with standing(relay.processor(sender)):
        eventually(lambda: asleep(relay))
        relay.notify()
        eventually(lambda: sender.messages)


def test_a_request_to_reload_wakes_it_without_a_look(
    relay: Relay, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processor, "POLL_SECONDS", FOR_EVER)
    with standing(relay.processor(Sender())):
        eventually(lambda: asleep(relay))
        relay.rows("select pgrelay.request_reload()")
        eventually(lambda: "notifier.reloaded" in capsys.readouterr().out)


def test_a_verdict_wakes_it_without_a_look(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "POLL_SECONDS", FOR_EVER)
    relay.channel()
    relay.notify(), relay.notify()
    assert relay.run(Sender(), budget_seconds=60)["sent"] == 2


def test_behind_a_transaction_pooler_it_looks_once_a_second_and_listens_to_nobody(
    relay: Relay,
) -> None:
    target = db.Target(conninfo=relay.url, pooler_mode="transaction")
    relay.channel(max_retries=1)
    sender = Sender(BUSY, SENT)
    with standing(Processor(target, attempt=sender)):
        eventually(lambda: asleep(relay))
        assert relay.rows(
            "select count(*) from pg_stat_activity where query like 'listen%%'"
            " and datname = current_database()"
        ) == [{"count": 0}]
        id = relay.notify()
        eventually(lambda: relay.status(id) == "sent", seconds=60)
    assert relay.outcomes(id) == ["retry", "sent"]


def test_behind_a_transaction_pooler_what_is_missing_is_told_by_name(relay: Relay) -> None:
    target = db.Target(conninfo=relay.url, pooler_mode="transaction")
    relay.channel()
    id = relay.notify()
    relay.rows("drop schema notifier cascade")
    assert Processor(target, attempt=Sender()).run_once(budget_seconds=5)["failed"] == 1
    assert relay.queue(id)[0]["error_code"] == "notifier_schema"


def test_chores_are_done_before_the_queue_and_their_faults_do_not_stop_it(relay: Relay) -> None:
    relay.channel()

    def tells(connection: object) -> None:
        relay.notify()

    def breaks(connection: object) -> None:
        raise RuntimeError

    working = relay.processor(Sender(), chores=(breaks, tells))
    assert working.run_once(budget_seconds=5)["sent"] == 1


def test_with_all_hands_busy_a_notice_does_not_keep_it_awake(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "WORKERS", 1)
    relay.channel()
    relay.notify()
    deaf = threading.Event()
    sleep = Bell.sleep

    def watched(bell: Bell, seconds: float, connection: Any) -> None:
        if connection is None:
            deaf.set()
        sleep(bell, seconds, connection)

    def waits(message: Message) -> Verdict:
        return SENT if deaf.wait(30) else BUSY

    monkeypatch.setattr(Bell, "sleep", watched)
    assert relay.run(Sender(waits), budget_seconds=60)["sent"] == 1


def test_told_to_stop_while_the_database_is_away_it_comes_to_a_clean_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    host, port = NOBODY.split(":")
    working = Processor(db.Target(conninfo=f"host={host} port={port}"), attempt=Sender())
    ended: list[dict[str, int]] = []
    thread = threading.Thread(target=lambda: ended.append(working.run()))
    thread.start()
    eventually(lambda: "notifier.unavailable" in capsys.readouterr().out)
    working.stop()
    thread.join(60)
    assert set(ended[0].values()) == {0}
