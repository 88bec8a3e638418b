"""The retry run: claims due failed events, replays them, and gives each its verdict."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

from shared import envelope as envelopes
from shared import log
from shared.errors import EventCollisionError
from shared.failures import FailedEvent, Failures, Verdict
from shared.model import Envelope
from shared.pipeline import Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What one run is asked to do."""

    limit: int | None = None  # rows replayed at most
    event_id: int | None = None  # a row's primary key: this row and no other
    dry_run: bool = False


@dataclass(slots=True, kw_only=True)
class Report:
    """What one run did. retried = resolved + failed."""

    retried: int = 0
    resolved: int = 0
    failed: int = 0  # failed replays, terminal or not
    deferred: int = 0  # claimed, not started, given back
    lost: int = 0  # another had taken the row over
    dry_run: bool = False
    rows: list[dict[str, Any]] = field(default_factory=list)  # of a dry run

    def as_json(self) -> dict[str, Any]:
        """The retry function's answer; the rows are there in a dry run only."""
        answer = asdict(self)
        return answer if self.dry_run else {k: v for k, v in answer.items() if k != "rows"}


def read_request(body: bytes) -> Request:
    """The request in the retry function's JSON body, which may be empty. Raises ValueError."""
    try:
        asked = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        raise ValueError("The body is not JSON.") from None
    if not isinstance(asked, dict) or not asked.keys() <= {"limit", "event_id", "dry_run"}:
        raise ValueError("The body is an object of limit, event_id and dry_run, each optional.")
    for name in ("limit", "event_id"):
        value = asked.get(name)
        if value is not None and (type(value) is not int or not 1 <= value < 2**63):
            raise ValueError(f"{name} is a whole number of at least 1.")
    if type(asked.get("dry_run", False)) is not bool:
        raise ValueError("dry_run is true or false.")
    return Request(**asked)


class Replayer:
    """Replays failed events in batches."""

    def __init__(
        self,
        failures: Failures,
        pipeline: Pipeline,
        *,
        batch_limit: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._failures = failures
        self._pipeline = pipeline
        self._batch_limit = batch_limit
        self._clock = clock

    def run(self, request: Request, *, budget_seconds: float) -> Report:
        """Replays due rows, batch after batch, until none is due or limit or budget is reached.

        A started replay is finished, what was claimed beyond is given back. Raises one of
        db.UNREACHABLE when the failure ledger is out of reach; open leases then run out.
        """
        if request.dry_run:
            return self._rehearse(request)
        report = Report()
        deadline = self._clock() + budget_seconds
        started_at = self._failures.now()
        self._reap()
        while self._clock() < deadline and (size := self._batch_size(request, report)):
            token = uuid4()
            rows = self._failures.claim(token, size, request.event_id)
            if not rows:
                break
            self._replay_batch(token, rows, started_at, deadline, report)
        log.info("replay.finished", **report.as_json())
        return report

    def _batch_size(self, request: Request, report: Report) -> int:
        if request.limit is None:
            return self._batch_limit
        return min(self._batch_limit, request.limit - report.retried - report.lost)

    def _reap(self) -> None:
        for row in self._failures.reap():
            log.warning(
                "lease.expired", failed_event=row.id, status=row.status, charged=row.charged
            )

    def _replay_batch(
        self, token: UUID, rows: list[int], started_at: datetime, deadline: float, report: Report
    ) -> None:
        for place, row in enumerate(rows):
            if self._clock() >= deadline:
                report.deferred += self._failures.release(token, rows[place:])
                return
            with log.bound(failed_event=row):
                verdict = self._replay(token, row, started_at)
            match verdict:
                case Verdict.RESOLVED:
                    report.resolved += 1
                case Verdict.RESCHEDULED | Verdict.FAILED:
                    report.failed += 1
                case Verdict.LOST:
                    report.lost += 1
            report.retried = report.resolved + report.failed

    def _replay(self, token: UUID, row: int, started_at: datetime) -> Verdict:
        failed_event = self._failures.start(token, row)
        if failed_event is None:
            log.warning("lease.lost", before="replay")
            return Verdict.LOST
        envelope = failed_event.as_envelope()
        with log.bound(
            event_id=envelope.event_id,
            shop_domain=envelope.shop_domain,
            topic=envelope.topic,
            trace_id=envelope.trace_id,
            attempt=failed_event.retry_count + 1,
        ):
            try:
                self._apply(envelope)
            except Exception as error:  # noqa: BLE001 - every failure has its verdict
                verdict = self._failures.reschedule(token, row, started_at, error, envelope.topic)
                log.warning("replay.failed", error, verdict=verdict)
            else:
                verdict = self._failures.resolve(token, row, started_at)
                log.info("replay.succeeded", verdict=verdict)
        return verdict

    def _apply(self, envelope: Envelope) -> None:
        try:
            self._pipeline.apply(envelope)
        except EventCollisionError:
            # This row was kept before anybody knew of the other body.
            self._pipeline.apply(envelopes.collided(envelope))

    def _rehearse(self, request: Request) -> Report:
        """The writes of due rows, each rolled back: what a run would do, and nothing else."""
        report = Report(dry_run=True)
        for failed_event in self._failures.due(
            request.limit or self._batch_limit, request.event_id
        ):
            report.rows.append(self._rehearsed(failed_event))
            report.retried += 1
        report.resolved = sum("error_type" not in row for row in report.rows)
        report.failed = report.retried - report.resolved
        return report

    def _rehearsed(self, failed_event: FailedEvent) -> dict[str, Any]:
        try:
            outcome = self._pipeline.apply(failed_event.as_envelope(), dry_run=True)
        except Exception as error:  # noqa: BLE001 - what would fail is part of the answer
            return {"id": failed_event.id, "error_type": type(error).__name__}
        return {"id": failed_event.id, "ledger": outcome.ledger, "snapshot": outcome.snapshot}
