"""The processor: carries out what the relay's queue asks for, with its own faults on record.

One thread owns the connection; workers do nothing but send. A profile has one message under way at
a time, so that a server that hangs costs one worker, and no longer than the attempt's own timeout.
"""

import contextlib
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import psycopg

from shared import db, log, redact
from shared.errors import DatabaseTimeoutError, TransientError
from shared.notifier import registry
from shared.notifier.bell import Bell
from shared.notifier.model import Message, Profile, Result, Status, Verdict
from shared.notifier.outcome import Outcome, conclude
from shared.notifier.queue import GONE, STALE, Answer, Claim, Job, Queue

WORKERS: Final = 4
POLL_SECONDS: Final = 1.0  # the longest sleep; a notice from the database ends it sooner
PAUSE_SECONDS: Final = 0.05  # what is due is in another's hands at the moment
CHORES_SECONDS: Final = 60
RECONNECT_SECONDS: Final = (1, 2, 5, 10)
LIMITS: Final = db.Limits(statement=5, lock=2)

_LISTEN: Final = ("listen pgrelay_queue", "listen pgrelay_reload")

Attempt = Callable[[Profile, Message], Verdict]
Chore = Callable[[psycopg.Connection[Any]], object]

_LOST: Final = Verdict(
    result=Result.TRANSIENT,
    code="attempt_lost",
    text="The processor that had started this attempt never gave its verdict; the message may have "
    "been sent.",
    ambiguous=True,
)


class RegistryUnreadError(TransientError):
    """Whether the notifier can be used could not be found out; its events are left as they are."""

    code = "registry_unread"


@dataclass(slots=True, kw_only=True)
class _Run:
    """What one run has under way."""

    threads: ThreadPoolExecutor
    bell: Bell
    ends: float | None  # no attempt starts after it, by our clock; None: when told to stop
    at_work: dict[Future[Verdict], Job] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    faults: int = 0  # of the database, without a good turn between them
    chores_at: float | None = None  # the last time

    @property
    def busy(self) -> list[str]:
        """The lanes of the profiles that have a message under way."""
        return sorted({lane for job in self.at_work.values() for lane in job.lanes})


class Processor:
    """Several may work on one queue. An instance is for one run at a time."""

    def __init__(
        self,
        target: db.Target,
        *,
        attempt: Attempt,
        chores: tuple[Chore, ...] = (),
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`chores` come before the queue: once in a run, and every minute in one that goes on."""
        self._target = target
        self._attempt = attempt
        self._chores = chores
        self._name = name or f"{socket.gethostname()}:{os.getpid()}"
        self._clock = clock
        self._stopping = threading.Event()
        self._bell: Bell | None = None
        self._connection: db.BoundedConnection | None = None
        self._snapshot: registry.Snapshot | None = None

    def run_once(self, *, budget_seconds: float) -> dict[str, int]:
        """Carries out what is due, and what comes due before the budget is spent; then returns.

        An attempt that has started is finished. Returns how many attempts ended in which status;
        raises what psycopg raises.
        """
        return self._run(self._clock() + budget_seconds)

    def run(self) -> dict[str, int]:
        """The same until `stop`, whatever becomes of the database meanwhile."""
        return self._run(None)

    def stop(self) -> None:
        """No attempt starts any more; those under way are finished. Safe in a signal's handler."""
        self._stopping.set()
        if self._bell:
            self._bell.ring()

    def _run(self, ends: float | None) -> dict[str, int]:
        with Bell() as bell, ThreadPoolExecutor(WORKERS, thread_name_prefix="notifier") as threads:
            self._bell = bell
            run = _Run(threads=threads, bell=bell, ends=ends)
            try:
                while (seconds := self._turned(run)) is not None:
                    # A notice that nobody reads would end every sleep at once.
                    bell.sleep(seconds, self._connection if self._has_hands(run) else None)
            finally:
                self._disconnect()
        return {status.value: run.counts[status] for status in Status}

    def _turned(self, run: _Run) -> float | None:
        """One turn; how long to sleep until the next, or None: the run is over."""
        if self._is_over(run) and not run.at_work:
            return None
        try:
            connection = self._connected()
            self._settle(run, connection)
            seconds = self._advance(run, connection)
        except (psycopg.Error, DatabaseTimeoutError, RegistryUnreadError) as error:
            self._disconnect()
            return self._after_fault(run, error)
        run.faults = 0
        return seconds

    def _after_fault(self, run: _Run, error: Exception) -> float:
        """Verdicts that are still to come are worth some patience; a run that goes on has it all.

        A run with a budget starts nothing after a fault, and raises it when it has no more to lose.
        """
        run.faults += 1
        if run.ends is not None:
            run.ends = min(run.ends, self._clock())
            if not run.at_work or run.faults >= len(RECONNECT_SECONDS):
                raise error
        elif self._stopping.is_set() and run.faults > len(RECONNECT_SECONDS):
            raise error
        log.error("notifier.unavailable", error)
        return RECONNECT_SECONDS[min(run.faults, len(RECONNECT_SECONDS)) - 1]

    def _advance(self, run: _Run, connection: db.BoundedConnection) -> float | None:
        """Starts what is due, as far as there are hands. Otherwise as `_turned`."""
        queue = Queue(connection, processor=self._name)
        wait: float | None = POLL_SECONDS
        while self._has_hands(run):
            if self._snapshot is None:  # not even a relay: nothing can be queued
                return POLL_SECONDS if run.ends is None else None
            self._do_chores(run, connection)
            turn = queue.turn(run.busy)
            if turn.generation != self._snapshot.generation:
                self._read(connection)
                log.info("notifier.reloaded", generation=turn.generation)
            if turn.claim is None:
                wait = turn.next_seconds
                break
            self._take(run, queue, turn.claim)
        return self._patience(run, wait)

    def _patience(self, run: _Run, wait: float | None) -> float | None:
        """How long to sleep, when the next event is due in `wait` seconds; None: the run is over.

        What is due already and could not be claimed waits for a profile that is at work, and its
        verdict wakes us; or it is in another's hands.
        """
        if run.at_work:
            return POLL_SECONDS if wait is None or wait <= 0 else min(wait, POLL_SECONDS)
        if self._is_over(run):
            return None
        if run.ends is not None and (wait is None or self._clock() + wait > run.ends):
            return None
        return POLL_SECONDS if wait is None else min(max(wait, PAUSE_SECONDS), POLL_SECONDS)

    def _has_hands(self, run: _Run) -> bool:
        """Whether another attempt may start."""
        return len(run.at_work) < WORKERS and not self._is_over(run)

    def _is_over(self, run: _Run) -> bool:
        return self._stopping.is_set() or (run.ends is not None and self._clock() >= run.ends)

    def _take(self, run: _Run, queue: Queue, claim: Claim) -> None:
        """One event: an attempt that starts, or an answer."""
        try:
            match self._started(queue, claim):
                case Job(is_lost=True) as job:
                    self._conclude(run, queue, job, _LOST)
                case Job() as job:
                    self._send(run, job)
                case Answer() as answer:
                    _tell(run, claim, answer)
        except psycopg.Error as error:
            _leave(queue, claim, error)

    def _started(self, queue: Queue, claim: Claim) -> Job | Answer:
        """The event is withheld, and the registry read once more, before it is given up."""
        if self._snapshot and self._snapshot.fault is None:
            with contextlib.suppress(*registry.CHANGED):
                return queue.start(claim)
        fault = self._confirmed(queue, claim)
        if fault is None:
            return queue.start(claim)
        is_held = queue.answer(claim, Status.FAILED, fault.code, fault.text)
        return Answer(outcome=Status.FAILED, code=fault.code, text=fault.text) if is_held else GONE

    def _confirmed(self, queue: Queue, claim: Claim) -> registry.Unservable | None:
        """What is in the way by fresh data. If there are none, the event is left untouched."""
        try:
            snapshot = self._read(queue.connection)
        except (psycopg.Error, DatabaseTimeoutError) as error:
            with contextlib.suppress(psycopg.Error, DatabaseTimeoutError):
                queue.release(claim)
            raise RegistryUnreadError(
                f"The notifier's registry could not be read: {redact.message(error)}"
            ) from error
        return snapshot.fault if snapshot else None

    def _send(self, run: _Run, job: Job) -> None:
        future = run.threads.submit(partial(_verdict, self._attempt, job))
        run.at_work[future] = job
        future.add_done_callback(lambda _: run.bell.ring())

    def _settle(self, run: _Run, connection: db.BoundedConnection) -> None:
        """Records the verdicts that have come. One that cannot be recorded now is kept."""
        queue = Queue(connection, processor=self._name)
        for future in [future for future in run.at_work if future.done()]:
            job = run.at_work[future]
            try:
                self._conclude(run, queue, job, future.result())
            except psycopg.Error as error:
                _leave(queue, job.claim, error)
            del run.at_work[future]

    def _conclude(self, run: _Run, queue: Queue, job: Job, verdict: Verdict) -> None:
        outcome = conclude(
            verdict, attempt=job.claim.attempt, max_retries=job.max_retries, states=job.states
        )
        ended = Answer(
            outcome=outcome.status,
            code=verdict.code,
            text=verdict.text,
            channel=job.message.channel,
        )
        try:
            is_recorded = queue.conclude(job, verdict, outcome)
        except registry.CHANGED:
            # What was sent is sent, with or without a notification that could say so.
            fault = self._confirmed(queue, job.claim)
            if fault is None:
                raise
            final = Status.SENT if outcome.status is Status.SENT else Status.FAILED
            is_recorded = queue.answer(job.claim, final, fault.code, fault.text) or None
            ended = replace(ended, outcome=final, code=fault.code, text=fault.text)
        if is_recorded is None:
            ended = GONE
        _tell(run, job.claim, ended if is_recorded is not False else STALE, outcome)

    def _do_chores(self, run: _Run, connection: db.BoundedConnection) -> None:
        now = self._clock()
        is_due = run.chores_at is None or now - run.chores_at >= CHORES_SECONDS
        if not is_due or not self._snapshot or self._snapshot.fault:
            return
        run.chores_at = now
        for chore in (self._catch_up, *self._chores):
            try:
                chore(connection)
            except Exception as error:
                if db.is_connection_failure(error):
                    raise
                log.error("notifier.chore_failed", error)

    def _catch_up(self, connection: psycopg.Connection[Any]) -> None:
        Queue(connection, processor=self._name).catch_up()

    def _connected(self) -> db.BoundedConnection:
        if self._connection is None or self._connection.closed:
            self._connection = db.connect(self._target, LIMITS)
            if self._target.pooler_mode != "transaction":
                # A handler, or psycopg would keep every notice for somebody to ask for.
                self._connection.add_notify_handler(lambda _: None)
                for channel in _LISTEN:
                    self._connection.execute(channel)
            self._read(self._connection)
        elif self._snapshot is None:
            self._read(self._connection)
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _read(self, connection: psycopg.Connection[Any]) -> registry.Snapshot | None:
        self._snapshot = registry.read(connection)
        return self._snapshot


def _verdict(attempt: Attempt, job: Job) -> Verdict:
    """A sender's own fault is a verdict too: it counts, and the retries bound it."""
    try:
        return attempt(job.profile, job.message)
    except Exception as error:  # noqa: BLE001 - a worker has nobody to raise it to
        log.error("notifier.sender_failed", error, notification=job.claim.notification_id)
        return Verdict(
            result=Result.TRANSIENT,
            code="internal_error",
            text=f"The attempt ended in an error of our own: {type(error).__name__}.",
            ambiguous=True,
        )


def _leave(queue: Queue, claim: Claim, error: psycopg.Error) -> None:
    """What nobody foresaw is left under its lease, and its turn comes again when that ends."""
    if queue.connection.closed or db.is_connection_failure(error):
        raise error
    log.error("notifier.event_left", error, notification=claim.notification_id)


def _tell(run: _Run, claim: Claim, ended: Answer, outcome: Outcome | None = None) -> None:
    run.counts[ended.outcome] += 1
    fields = {
        "notification": claim.notification_id,
        "channel": ended.channel or None,
        "attempt": claim.attempt,
        "status": str(ended.outcome),
        "code": ended.code,
    }
    match ended.outcome:
        case Status.SENT if outcome and outcome.partial:
            left_out = sum(map(len, outcome.partial.values()))
            log.warning("notification.partly_sent", **fields, left_out=left_out)
        case Status.SENT:
            log.info("notification.sent", **fields)
        case Status.RETRY:
            log.warning("notification.retried", **fields, text=redact.scrub(ended.text))
        case Status.FAILED | Status.EXPIRED | Status.INVALID:
            log.error("notification.failed", **fields, text=redact.scrub(ended.text))
        case _:
            log.warning("notification.passed_over", **fields)
