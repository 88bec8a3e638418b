"""The job that calls the retry function: on, and called well the last time."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from cli import render
from cli.preflight import google
from cli.preflight.finding import Finding, error, fine, guarded, warning
from shared.config import Settings

if TYPE_CHECKING:
    from cli.scheduler import Described

CHECK: Final = "scheduler"
LONGEST: Final = timedelta(minutes=5)

_SET_IT: Final = "Set it as terraform/scheduler.tf does: terraform apply."


def look(settings: Settings) -> Iterator[Finding]:
    """Nothing of the local stack, which ticks by itself."""
    if settings.scheduler_job:
        yield from guarded(CHECK, lambda: google.answered(CHECK, lambda: _job(settings), _SET_IT))
    elif not settings.pubsub_emulator_host:
        yield warning(CHECK, "SCHEDULER_JOB is not set: not looked at.", "Set SCHEDULER_JOB.")


def _job(settings: Settings) -> Iterator[Finding]:
    from cli import scheduler  # noqa: PLC0415 - half a second, with Google's client

    with scheduler.connected() as client:
        job = client.get_job(name=settings.scheduler_job, timeout=scheduler.TIMEOUT_SECONDS)
    found = scheduler.described(job)
    wrong = [fault for fault in (_state(found.state), _last(found)) if fault]
    yield from wrong
    if not wrong:
        yield fine(CHECK, f"The job is on; its last attempt was {render.ago(found.last_at)}.")


def _state(state: str) -> Finding | None:
    match state:
        case "ENABLED":
            return None
        case "PAUSED":
            return warning(
                CHECK,
                "Somebody paused the job: nothing is replayed.",
                "When they are done: manage.py scheduler resume.",
            )
        case _:
            return error(CHECK, f"The job is {state}: nothing is replayed.", _SET_IT)


def _last(found: "Described") -> Finding | None:
    log = "See the retry function's log; 401 or 403: terraform apply."
    if found.last_at is None:
        return warning(CHECK, "The job has never run.", "Wait a minute, or: scheduler run.")
    if found.last_result != "OK":
        return error(CHECK, f"The last attempt ended with {found.last_result}.", log)
    if found.state == "ENABLED" and datetime.now(UTC) - found.last_at > LONGEST:
        return error(CHECK, f"The last attempt was {render.ago(found.last_at)}.", log)
    return None
