"""From a notification to its end: statuses, attempts, when they come due, who gets it."""

import threading
import time
from dataclasses import replace
from datetime import timedelta

import psycopg
import pytest
from psycopg.types.json import Jsonb

from shared.notifier import transports
from shared.notifier.model import Acceptance, Decision, Message, Profile, Result, Status, Verdict
from tests.notifier.relay import BUSY, REFUSED, SENT, Relay, Sender
from tests.notifier.servers import Smtp


def decided(result: Result, **states: str) -> Verdict:
    """A verdict on recipients, named without their domain."""
    return Verdict(
        result=result,
        code=f"smtp_{result}",
        text="as decided",
        recipients={
            f"{who}@example.com": Decision(acceptance=Acceptance(state), code=f"smtp_{state}")
            for who, state in states.items()
        },
    )


def counted(**counts: int) -> dict[str, int]:
    return {status.value: counts.get(status, 0) for status in Status}


def test_what_is_due_is_sent_at_once(relay: Relay) -> None:
    relay.channel()
    id, sender = relay.notify(), Sender()
    assert relay.run(sender) == counted(sent=1)
    (message,) = sender.messages
    assert (message.notification_id, message.recipients) == (id, ("ops@example.com",))
    found = relay.notification(id)
    assert (found["status"], found["attempts"], found["error_code"]) == ("sent", 1, None)
    (attempt,) = relay.attempts(id)
    assert (attempt["verdict"], attempt["class"], attempt["reply"]) == ("sent", "sent", SENT.text)
    assert relay.outcomes(id) == ["sent"]


@pytest.mark.parametrize("max_retries", [0, 1, 2, 3, 5])
def test_transient_failures_are_retried_as_often_as_the_channel_allows(
    relay: Relay, max_retries: int
) -> None:
    relay.channel(max_retries=max_retries)
    id = relay.notify()
    expected = ["retry"] * max_retries + ["failed"]
    assert relay.exhaust(id, Sender(BUSY)) == expected
    assert relay.outcomes(id) == expected
    assert [attempt["verdict"] for attempt in relay.attempts(id)] == expected
    assert relay.notification(id)["error_code"] == "smtp_451"


def test_retries_come_due_3_5_and_then_always_10_seconds_after_the_verdict(relay: Relay) -> None:
    relay.channel(max_retries=5)
    id, sender, gaps = relay.notify(), Sender(BUSY), []
    for _ in range(5):
        relay.run(sender, budget_seconds=0.5)
        last, following = relay.queue(id)[-2:]
        gaps.append((following["due_at"] - last["done_at"]).total_seconds())
        relay.make_due(id)
    assert gaps == [3, 5, 10, 10, 10]


def test_a_retry_is_never_early_and_a_run_waits_only_for_what_its_budget_holds(
    relay: Relay,
) -> None:
    relay.channel()
    id, sender = relay.notify(), Sender(BUSY, SENT)
    assert relay.run(sender, budget_seconds=1) == counted(retry=1)
    assert relay.run(sender, budget_seconds=1) == counted()
    assert relay.run(sender, budget_seconds=30) == counted(sent=1)
    first, second = relay.attempts(id)
    assert second["started_at"] >= first["finished_at"] + timedelta(seconds=3)


def test_with_nothing_due_a_run_is_over_at_once(relay: Relay) -> None:
    relay.channel()
    relay.notify()
    relay.run(Sender(replace(BUSY, retry_after=200)))
    started = time.monotonic()
    assert relay.run(Sender(), budget_seconds=60) == counted()
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(("asked", "seconds"), [(1, 3), (42.5, 42.5), (4000, 300)])
def test_a_server_may_ask_for_more_time_up_to_five_minutes(
    relay: Relay, asked: float, seconds: float
) -> None:
    relay.channel()
    id = relay.notify()
    relay.run(Sender(replace(BUSY, retry_after=asked)))
    last, following = relay.queue(id)
    assert (following["due_at"] - last["done_at"]).total_seconds() == seconds


def test_a_permanent_failure_burns_no_retries(relay: Relay) -> None:
    relay.channel()
    id = relay.notify()
    assert relay.run(Sender(REFUSED)) == counted(failed=1)
    assert (relay.status(id), relay.outcomes(id)) == ("failed", ["failed"])


def test_a_second_try_that_succeeds_is_retry_and_then_sent(relay: Relay) -> None:
    relay.channel()
    id = relay.notify()
    assert relay.exhaust(id, Sender(BUSY, SENT)) == ["retry", "sent"]


def test_a_sender_that_breaks_is_a_transient_failure(relay: Relay) -> None:
    def broken(message: Message) -> Verdict:
        raise KeyError

    relay.channel(max_retries=1)
    id = relay.notify()
    assert relay.exhaust(id, Sender(broken)) == ["retry", "failed"]
    assert relay.notification(id)["error_code"] == "internal_error"


def test_time_that_is_over_expires_a_notification_before_any_attempt(relay: Relay) -> None:
    relay.channel()
    id, sender = relay.notify(expire_after="1 microsecond"), Sender()
    assert relay.run(sender) == counted(expired=1)
    assert (relay.status(id), relay.notification(id)["attempts"]) == ("expired", 0)
    assert (sender.messages, relay.attempts(id)) == ([], [])


def test_time_that_is_over_between_attempts_expires_it_too(relay: Relay) -> None:
    relay.channel(expire_after="1 hour")
    id = relay.notify()
    relay.run(Sender(BUSY))
    assert relay.queue(id)[1]["expire_at"] == relay.queue(id)[0]["expire_at"]
    relay.rows("update pgrelay.queue set expire_at = now() where done_at is null")
    relay.make_due(id)
    assert relay.run(Sender()) == counted(expired=1)
    assert relay.outcomes(id) == ["retry", "expired"]
    assert relay.notification(id)["attempts"] == 1


def test_a_channel_that_is_not_there_is_invalid(relay: Relay) -> None:
    id = relay.notify("nobody")
    assert relay.run(Sender()) == counted(invalid=1)
    assert (relay.status(id), relay.notification(id)["error_code"]) == (
        "invalid",
        "channel_unusable",
    )


def test_a_channel_disabled_between_attempts_is_invalid_even_if_time_is_over_too(
    relay: Relay,
) -> None:
    relay.channel()
    id = relay.notify()
    relay.run(Sender(BUSY))
    relay.rows("update notifier.channels set enabled = false")
    relay.rows("update pgrelay.queue set expire_at = now() where done_at is null")
    relay.make_due(id)
    assert relay.run(Sender()) == counted(invalid=1)
    assert relay.outcomes(id) == ["retry", "invalid"]


def test_an_unknown_notification_fails_on_its_event(relay: Relay) -> None:
    relay.rows("insert into pgrelay.queue (notification_id, attempt) values (404, 1)")
    assert relay.run(Sender()) == counted(failed=1)
    (event,) = relay.queue(404)
    assert (event["outcome"], event["error_code"]) == ("failed", "notification_unknown")


@pytest.mark.parametrize("attempt", [1, 3])
def test_an_event_that_is_not_the_next_attempt_is_stale(relay: Relay, attempt: int) -> None:
    relay.channel()
    id, sender = relay.notify(), Sender(BUSY)
    relay.run(sender)
    relay.rows("delete from pgrelay.queue")
    relay.rows(
        "insert into pgrelay.queue (notification_id, attempt) values (%(id)s, %(attempt)s)",
        id=id,
        attempt=attempt,
    )
    assert relay.run(sender) == counted()
    assert (relay.outcomes(id), relay.status(id)) == (["stale"], "retry")
    assert len(sender.messages) == 1


def test_what_is_over_is_not_sent_again(relay: Relay) -> None:
    relay.channel()
    id, sender = relay.notify(), Sender()
    relay.run(sender)
    relay.rows("insert into pgrelay.queue (notification_id, attempt) values (%(id)s, 2)", id=id)
    relay.run(sender)
    assert (len(sender.messages), relay.outcomes(id)) == (1, ["sent", "stale"])


def test_a_notification_is_there_with_its_callers_transaction_or_not_at_all(relay: Relay) -> None:
    relay.channel()
    sender = Sender()
    with psycopg.connect(relay.url) as caller:
        caller.execute("select notifier.notify('ops', 'a', 'b')")
        assert relay.run(sender) == counted()
        caller.rollback()
        assert relay.run(sender) == counted()
        caller.execute("select notifier.notify('ops', 'a', 'b')")
        caller.commit()
    assert relay.run(sender) == counted(sent=1)


def test_the_same_idempotency_key_is_one_notification(relay: Relay) -> None:
    relay.channel()
    assert relay.notify(key="k") == relay.notify(key="k")
    assert relay.run(Sender()) == counted(sent=1)


def test_who_accepted_gets_no_second_copy(relay: Relay) -> None:
    relay.channel(recipients=("a@example.com", "b@example.com", "c@example.com"))
    id = relay.notify()
    sender = Sender(decided(Result.TRANSIENT, a="accepted", b="refused", c="pending"), SENT)
    assert relay.exhaust(id, sender) == ["retry", "sent"]
    first, second = sender.messages
    assert first.pending == ("a@example.com", "b@example.com", "c@example.com")
    assert (second.recipients, second.pending) == (first.recipients, ("c@example.com",))
    assert relay.notification(id)["partial"] == {"refused": {"b@example.com": ""}}


def test_a_channel_that_is_edited_between_attempts_does_not_change_who_gets_it(
    relay: Relay,
) -> None:
    relay.channel(recipients=("a@example.com", "b@example.com"))
    id = relay.notify()
    sender = Sender(decided(Result.TRANSIENT, a="accepted", b="pending"), SENT)
    relay.run(sender)
    relay.rows("update notifier.channels set recipients = '{a@example.com,new@example.com}'")
    relay.make_due(id)
    relay.run(sender)
    assert sender.messages[1].pending == ("b@example.com",)


def test_with_retries_spent_it_is_sent_if_anybody_accepted_and_says_who_did_not(
    relay: Relay,
) -> None:
    relay.channel(recipients=("a@example.com", "b@example.com"), max_retries=1)
    id = relay.notify()
    sender = Sender(decided(Result.TRANSIENT, a="accepted", b="pending"), BUSY)
    assert relay.exhaust(id, sender) == ["retry", "sent"]
    found = relay.notification(id)
    assert found["partial"] == {"pending": {"b@example.com": ""}}
    assert found["error_code"] == "smtp_451"


def test_when_all_have_refused_it_failed_and_is_not_retried(relay: Relay) -> None:
    relay.channel(recipients=("a@example.com", "b@example.com"))
    id = relay.notify()
    sender = Sender(decided(Result.TRANSIENT, a="refused", b="refused"))
    assert relay.exhaust(id, sender) == ["failed"]


def test_a_profile_comes_as_it_is_with_references_and_no_secrets(relay: Relay) -> None:
    relay.channel(settings={"host": "smtp.example.com"}, timeout_seconds=7)
    relay.rows(
        "insert into notifier.profile_secrets values ('ops', 'password', '_env:NOTIFIER_SMTP')"
    )
    sender = Sender()
    relay.notify()
    relay.run(sender)
    (profile,) = sender.profiles
    assert profile.settings == {"host": "smtp.example.com"}
    assert profile.secrets == {"password": "_env:NOTIFIER_SMTP"}
    assert profile.timeout_seconds == 7
    assert type(profile.timeout_seconds) is int


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 2000 + "]" * 2000], ids=["digits", "depth"])
def test_settings_that_python_cannot_read_stop_no_processor(relay: Relay, value: str) -> None:
    relay.channel()
    relay.rows(
        "update notifier.profiles set settings = jsonb_build_object('host', %(v)s::text::jsonb)",
        v=value,
    )
    sender = Sender(REFUSED)
    assert relay.exhaust(relay.notify(), sender) == ["failed"]
    assert sender.profiles[0].settings is None


def test_a_recipient_that_is_null_is_nobody(relay: Relay) -> None:
    relay.channel()
    relay.rows("update notifier.channels set recipients = array['a@example.com', null]")
    sender = Sender()
    assert relay.exhaust(relay.notify(), sender) == ["sent"]
    assert sender.messages[0].recipients == ("a@example.com",)


def test_one_profile_has_one_message_under_way_and_others_do_not_wait_for_it(
    relay: Relay,
) -> None:
    relay.channel("slow")
    relay.channel("slow too", profile="slow")
    relay.channel("quick")
    for name in ("slow", "slow", "slow too", "quick"):
        relay.notify(name)
    gate, under_way, most = threading.Event(), set[int](), [0]

    def slow(message: Message) -> Verdict:
        if message.channel == "quick":
            gate.set()
            return SENT
        under_way.add(message.notification_id)
        most[0] = max(most[0], len(under_way))
        assert gate.wait(60)
        under_way.remove(message.notification_id)
        return SENT

    assert relay.run(Sender(slow), budget_seconds=60) == counted(sent=4)
    assert most == [1]


def test_over_a_real_server_only_who_was_put_off_is_asked_again(relay: Relay) -> None:
    replies: dict[str, str] = {"RCPT:b@example.com": "451 later"}
    with Smtp(replies) as server:
        settings = {"host": "127.0.0.1", "port": server.port, "tls": "none"}
        relay.channel(
            recipients=("a@example.com", "b@example.com"),
            settings=settings | {"sender": "hookledger@example.com"},
        )
        id = relay.notify()
        relay.run(mails)
        assert (relay.status(id), relay.notification(id)["error_code"]) == ("retry", "smtp_451")
    with Smtp() as server:
        relay.rows(
            "update notifier.profiles set settings = jsonb_set(settings, '{port}', %(port)s)",
            port=Jsonb(server.port),
        )
        relay.make_due(id)
        assert relay.run(mails)["sent"] == 1
        (mail,) = server.mails
    assert mail.recipients == ("b@example.com",)
    assert relay.notification(id)["partial"] is None


def mails(profile: Profile, message: Message) -> Verdict:
    return transports.attempt(profile, message, resolve=str)
