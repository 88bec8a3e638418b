"""The retry run: claims due failed events, replays them, and gives each its verdict."""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, Final
from uuid import UUID, uuid4

import psycopg

from shared import audit, db, log, redact
from shared import envelope as envelopes
from shared.errors import DirectoryUnavailableError, EventCollisionError, TenantPaused
from shared.incidents import Incidents
from shared.leases import Claim, FailedEvent, Leases, Verdict
from shared.model import Envelope
from shared.pipeline import Pipeline

TURN_SECONDS: Final = 5


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

    def add(self, counts: Counter[str]) -> None:
        """Adds what one batch did, counted by verdicts and "deferred"."""
        self.resolved += counts[Verdict.RESOLVED]
        self.failed += counts[Verdict.RESCHEDULED] + counts[Verdict.FAILED]
        self.retried = self.resolved + self.failed
        self.deferred += counts["deferred"] + counts[Verdict.HELD]
        self.lost += counts[Verdict.LOST]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the replays of one batch have in common."""

    token: UUID
    started_at: datetime  # of the run, by the database's clock
    deadline: float  # by our own; no replay starts after it


class Replayer:
    """Replays failed events in batches: tenants side by side, each one's rows one after another."""

    def __init__(
        self,
        application: db.Pool,
        leases: Leases,
        incidents: Incidents,
        pipeline: Pipeline,
        *,
        batch_limit: int,
        parallelism: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._application = application
        self._leases = leases
        self._incidents = incidents
        self._pipeline = pipeline
        self._batch_limit = batch_limit
        self._parallelism = parallelism
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
        started_at = self._leases.run_started()
        self._reap()
        self._probe_tenants_without_canary(started_at)
        self._drain(request, report, started_at, deadline)
        incidents_open = self._leases.run_finished()
        log.info("replay.finished", **report.as_json(), incidents_open=incidents_open)
        return report

    def _drain(
        self, request: Request, report: Report, started_at: datetime, deadline: float
    ) -> None:
        """Tenants side by side. One that takes its time holds up no other's next rows."""
        at_work: dict[Future[Counter[str]], list[Claim]] = {}
        with ThreadPoolExecutor(self._parallelism, thread_name_prefix="replay") as threads:
            while True:
                if len(at_work) < self._parallelism and self._clock() < deadline:
                    run = Run(token=uuid4(), started_at=started_at, deadline=deadline)
                    for claims in self._claimed(run, request, report, list(at_work.values())):
                        at_work[threads.submit(self._replay_tenant, run, claims)] = claims
                if not at_work:
                    return
                for finished in wait(at_work, return_when=FIRST_COMPLETED).done:
                    del at_work[finished]
                    report.add(finished.result())

    def _claimed(
        self, run: Run, request: Request, report: Report, at_work: list[list[Claim]]
    ) -> Collection[list[Claim]]:
        """The next batch, by tenants, without those that are at work."""
        size = self._batch_limit
        if request.limit is not None:
            under_way = sum(len(claims) for claims in at_work)
            size = min(size, request.limit - report.retried - report.lost - under_way)
        if size <= 0:
            return []
        busy = [claims[0].tenant for claims in at_work]
        tenants = defaultdict[str, list[Claim]](list)
        for claim in self._leases.claim(run.token, size, request.event_id, busy=busy):
            tenants[claim.tenant].append(claim)
        return tenants.values()

    def _reap(self) -> None:
        for row in self._leases.reap():
            log.warning(
                "lease.expired", failed_event=row.id, status=row.status, charged=row.charged
            )

    def _probe_tenants_without_canary(self, started_at: datetime) -> None:
        """Asks tenants whose failed events have all been given up whether they are back."""
        for tenant in self._incidents.without_canary():
            self._probe(tenant, started_at)

    def _replay_tenant(self, run: Run, claims: list[Claim]) -> Counter[str]:
        """One tenant's rows, one after another, until its database is found to be unavailable.

        Nor for longer than its turn: tenants whose rows all run into a timeout would hold all the
        threads, and everybody else up.
        """
        counts = Counter[str]()
        ends = run.deadline
        for place, claim in enumerate(claims):
            now = self._clock()
            if now >= ends:
                return counts + self._deferred(run, claims[place:])
            if place == 0:
                ends = min(ends, now + TURN_SECONDS)
            with log.bound(failed_event=claim.id):
                verdict, error = self._replay(run, claim)
            counts[verdict] += 1
            if isinstance(error, TenantPaused) or (error and db.is_connection_failure(error)):
                return counts + self._deferred(run, claims[place + 1 :])
            if claim.is_canary and verdict is not Verdict.LOST:
                self._hear(claim.tenant, run.started_at, error)
        return counts

    def _deferred(self, run: Run, claims: list[Claim]) -> Counter[str]:
        return Counter(deferred=self._leases.release(run.token, [claim.id for claim in claims]))

    def _hear(self, tenant: str, started_at: datetime, error: Exception | None) -> None:
        """What a canary's replay says of its tenant: any answer of the database is a good one."""
        if error is None or isinstance(error, psycopg.Error | EventCollisionError):
            self._incidents.answered(tenant)
        else:
            # It failed before it came to the database, and says nothing about it.
            self._probe(tenant, started_at)

    def _probe(self, tenant: str, started_at: datetime) -> None:
        try:
            self._pipeline.probe(tenant)
        except DirectoryUnavailableError as error:
            log.warning("incident.probe_failed", error, organization_id=tenant)
            return
        except Exception as error:  # noqa: BLE001 - any other failure is none of the connection
            if db.is_connection_failure(error):
                self._incidents.unavailable(tenant, started_at, redact.message(error))
                return
            log.warning("incident.probe_failed", error, organization_id=tenant)
        self._incidents.answered(tenant)

    def _replay(self, run: Run, claim: Claim) -> tuple[Verdict, Exception | None]:
        """The verdict on one row, and the error that led to it."""
        row = claim.id
        failed_event = self._leases.start(run.token, row)
        if failed_event is None:
            log.warning("lease.lost", before="replay")
            return Verdict.LOST, None
        if failed_event.payload is None:
            return self._leases.resolve(run.token, row, run.started_at), None
        try:
            envelope = failed_event.as_envelope()
        except Exception as error:  # noqa: BLE001 - one unreadable row must not end the run
            return self._failed(run, row, error, topic=""), error
        with log.bound(attempt=failed_event.retry_count + 1, **envelopes.ids(envelope)):
            try:
                self._apply(envelope)
            except TenantPaused as error:
                return self._leases.hold(run.token, row, error.organization_id), error
            except Exception as error:  # noqa: BLE001 - every failure has its verdict
                if db.is_connection_failure(error):
                    # Before the verdict: whoever dies between the two has parked the tenant, and
                    # the end of the incident brings back what was given up in it.
                    cause = redact.message(error)
                    self._incidents.unavailable(claim.tenant, run.started_at, cause)
                return self._failed(run, row, error, envelope.topic), error
            verdict = self._leases.resolve(run.token, row, run.started_at)
            log.info("replay.succeeded", verdict=verdict)
            audit.settle(self._application, envelope)
            return verdict, None

    def _failed(self, run: Run, row: int, error: Exception, topic: str) -> Verdict:
        verdict = self._leases.reschedule(run.token, row, run.started_at, error, topic)
        log.warning("replay.failed", error, verdict=verdict)
        return verdict

    def _apply(self, envelope: Envelope) -> None:
        try:
            # Under the delivered id first: there it may be by now, or the other body is gone.
            self._pipeline.apply(envelopes.uncollided(envelope))
        except EventCollisionError:
            self._pipeline.apply(envelopes.collided(envelope))

    def _rehearse(self, request: Request) -> Report:
        """The writes of due rows, each rolled back: what a run would do, and nothing else."""
        report = Report(dry_run=True)
        for failed_event in self._leases.due(request.limit or self._batch_limit, request.event_id):
            report.rows.append(self._rehearsed(failed_event))
            report.retried += 1
        report.resolved = sum("error_type" not in row for row in report.rows)
        report.failed = report.retried - report.resolved
        return report

    def _rehearsed(self, failed_event: FailedEvent) -> dict[str, Any]:
        try:
            outcome = self._pipeline.apply(failed_event.as_envelope(), dry_run=True)
        except Exception as error:  # noqa: BLE001 - what would fail is part of the answer
            return {
                "id": failed_event.id,
                "error_type": type(error).__name__,
                "error_message": redact.message(error),
            }
        return {"id": failed_event.id, "ledger": outcome.ledger, "snapshot": outcome.snapshot}
