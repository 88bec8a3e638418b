"""A processor that is killed at any step: nothing lost, and one message twice at the most.

The processor is a process of its own, and ends itself by SIGKILL.
"""

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from email import message_from_bytes
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest

from shared import db
from shared.notifier import transports
from shared.notifier.model import Message, Profile, Verdict
from shared.notifier.processor import Processor
from shared.notifier.queue import Queue
from tests.functions.rig import environment, eventually
from tests.notifier.relay import SENT, Relay, Sender
from tests.notifier.servers import Smtp

ROOT: Final = Path(__file__).parents[2]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def deliver(message: Message) -> None:
    """The server takes the message: whatever becomes of the processor, it has it."""
    with Path(os.environ["MAILBOX"]).open("a") as mailbox:
        mailbox.write(f"{message.notification_id}\n")


def after_the_claim(_: Processor) -> None:
    Queue.start = lambda *_: die()  # type: ignore[method-assign]


def before_the_verdict(_: Processor) -> None:
    Queue.conclude = lambda *_: die()  # type: ignore[method-assign]


def nowhere(_: Processor) -> None:
    pass


def sends(_: Profile, message: Message) -> Verdict:
    deliver(message)
    return SENT


def dies_before_it_sends(_: Profile, message: Message) -> Verdict:
    die()
    return SENT


def dies_after_it_sent(_: Profile, message: Message) -> Verdict:
    deliver(message)
    die()
    return SENT


def mails(profile: Profile, message: Message) -> Verdict:
    return transports.attempt(profile, message, resolve=str)


POINTS: dict[str, tuple[Callable[[Processor], None], Callable[[Profile, Message], Verdict]]] = {
    "after the claim": (after_the_claim, sends),
    "after the attempt's row": (nowhere, dies_before_it_sends),
    "after the server's 250": (nowhere, dies_after_it_sent),
    "before the verdict": (before_the_verdict, sends),
    "mailed, before the verdict": (before_the_verdict, mails),
}


def work() -> None:
    """What the process does: one run that comes to its end at POINT."""
    arm, sender = POINTS[os.environ["POINT"]]
    processor = Processor(db.Target(conninfo=os.environ["APP_DATABASE_URL"]), attempt=sender)
    arm(processor)
    processor.run_once(budget_seconds=5)


def killed(relay: Relay, mailbox: Path, point: str) -> None:
    settings = {"APP_DATABASE_URL": relay.url, "MAILBOX": str(mailbox), "POINT": point}
    code = "from tests.notifier import test_killed; test_killed.work()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment(settings | {"PYTHONPATH": str(ROOT)}),
        check=False,
        timeout=120,
        capture_output=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


@pytest.mark.parametrize(
    ("point", "copies"),
    [
        ("after the claim", 1),
        ("after the attempt's row", 1),
        ("after the server's 250", 2),
        ("before the verdict", 2),
    ],
)
def test_what_a_killed_processor_leaves_is_sent_and_once_too_often_at_most(
    relay: Relay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, copies: int
) -> None:
    attempts = 1 if point == "after the claim" else 2
    mailbox = tmp_path / "mailbox"
    mailbox.touch()
    monkeypatch.setenv("MAILBOX", str(mailbox))
    relay.channel()
    id = relay.notify()
    killed(relay, mailbox, point)

    assert relay.run(sends) == dict.fromkeys(relay.run(sends), 0), "its lease has not ended"
    relay.expire_lease(id)
    counts = Counter(relay.run(sends))
    relay.make_due(id)
    counts.update(relay.run(sends))

    assert relay.status(id) == "sent"
    assert counts["sent"] == 1
    assert counts["retry"] == attempts - 1
    assert mailbox.read_text().split() == [str(id)] * copies
    assert [attempt["attempt"] for attempt in relay.attempts(id)] == list(range(1, attempts + 1))
    if attempts == 2:
        lost = relay.attempts(id)[0]
        assert (lost["error_code"], lost["ambiguous"]) == ("attempt_lost", True)


def test_the_second_copy_has_the_first_ones_message_id(relay: Relay, tmp_path: Path) -> None:
    with Smtp() as server:
        settings = {"host": "127.0.0.1", "port": server.port, "tls": "none"}
        relay.channel(settings=settings | {"sender": "hookledger@example.com"})
        id = relay.notify()
        killed(relay, tmp_path / "none", "mailed, before the verdict")
        relay.expire_lease(id)
        relay.run(mails)
        relay.make_due(id)
        assert relay.run(mails)["sent"] == 1
        first, second = (message_from_bytes(mail.data) for mail in server.mails)
    assert relay.status(id) == "sent"
    assert first["Message-ID"]
    assert first["Message-ID"] == second["Message-ID"]


def test_an_attempt_that_kills_its_processor_each_time_runs_out_of_retries(
    relay: Relay, tmp_path: Path
) -> None:
    relay.channel(max_retries=1)
    id = relay.notify()
    for _ in range(2):
        relay.make_due(id)
        killed(relay, tmp_path / "none", "after the attempt's row")
        relay.expire_lease(id)
        relay.run(Sender())
    assert (relay.status(id), relay.outcomes(id)) == ("failed", ["retry", "failed"])


def test_a_lost_attempt_comes_due_again_by_the_usual_schedule(relay: Relay, tmp_path: Path) -> None:
    relay.channel()
    id = relay.notify()
    killed(relay, tmp_path / "none", "after the attempt's row")
    relay.expire_lease(id)
    relay.run(Sender(), budget_seconds=1)
    lost, following = relay.queue(id)
    assert (following["due_at"] - lost["done_at"]).total_seconds() == 3


def test_a_verdict_after_the_lease_changes_nothing(relay: Relay) -> None:
    relay.channel()
    id = relay.notify()

    def late(message: Message) -> Verdict:
        relay.expire_lease(id)
        relay.run(Sender())  # another takes it over, and finds an attempt that was lost
        return SENT

    assert relay.run(Sender(late), budget_seconds=1)["sent"] == 0
    assert (relay.status(id), relay.outcomes(id)) == ("retry", ["retry", None])


def test_two_processors_make_no_attempt_twice(relay: Relay) -> None:
    relay.channel()
    ids = [relay.notify() for _ in range(20)]
    sender, together = Sender(), threading.Barrier(2, timeout=60)

    def meets(profile: Profile, message: Message) -> Verdict:
        together.wait()  # one of each: a profile has one message under way
        return sender(profile, message)

    def work(name: str) -> None:
        relay.processor(meets, name=name).run_once(budget_seconds=60)

    workers = [threading.Thread(target=work, args=(name,)) for name in ("left", "right")]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(message.notification_id for message in sender.messages) == ids
    assert {relay.status(id) for id in ids} == {"sent"}
    shares = relay.rows("select claimed_by, count(*) from pgrelay.queue group by 1 order by 1")
    assert shares == [{"claimed_by": "left", "count": 10}, {"claimed_by": "right", "count": 10}]


def test_a_processor_that_is_told_to_stop_finishes_what_it_started_and_starts_nothing(
    relay: Relay,
) -> None:
    relay.channel()
    first, second = relay.notify(), relay.notify()
    gate, started = threading.Event(), threading.Event()

    def slow(message: Message) -> Verdict:
        started.set()
        assert gate.wait(60)
        return SENT

    processor = relay.processor(Sender(slow))
    worker = threading.Thread(target=processor.run)
    worker.start()
    assert started.wait(60)
    processor.stop()
    gate.set()
    worker.join(60)
    assert (relay.status(first), relay.status(second)) == ("sent", "queued")


def test_the_command_ends_cleanly_on_sigterm(relay: Relay) -> None:
    settings = environment({"APP_DATABASE_URL": relay.url})
    process = subprocess.Popen(
        [sys.executable, "manage.py", "run_processor"],
        cwd=ROOT,
        env=settings,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        try:
            eventually(lambda: listening(relay.url), seconds=60)
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, output) == (0, b"")


def listening(url: str) -> Any:
    with psycopg.connect(url) as connection:
        return connection.execute(
            "select pid from pg_stat_activity where application_name = 'hookledger'"
            " and datname = current_database() and state = 'idle'"
        ).fetchone()
