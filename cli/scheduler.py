"""scheduler: the Cloud Scheduler job that calls the retry function every minute."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import grpc
import typer

from cli import context, google, render
from shared import config
from shared.errors import ConfigurationError

if TYPE_CHECKING:
    from google.cloud.scheduler_v1 import CloudSchedulerClient
    from google.cloud.scheduler_v1.types import Job

TIMEOUT_SECONDS: Final = 20.0

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_RESULTS: Final = {code.value[0]: code.name for code in grpc.StatusCode}
_LOCAL: Final = (
    "The local stack has no Cloud Scheduler: `manage.py dev --retry-every SECONDS` ticks by "
    "itself, and `manage.py retry_failed_events` replays now."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A job as Cloud Scheduler has it."""

    job: str
    state: str  # ENABLED, PAUSED, DISABLED, UPDATE_FAILED
    schedule: str
    next_at: datetime | None
    last_at: datetime | None
    last_result: str | None  # OK, or the name of a gRPC status; None: there was no attempt


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    group = typer.Typer(help="The job that calls the retry function.", no_args_is_help=True)
    group.command("status")(status)
    group.command("pause")(pause)
    group.command("resume")(resume)
    group.command("run")(run)
    app.add_typer(group, name="scheduler")


def status(*, as_json: AsJson = False) -> None:
    """Say whether the job is on, and how its last attempt ended. Exits 1 unless both are well.

    Example: python manage.py scheduler status
    """
    found = _asked(lambda client, name: client.get_job(name=name, timeout=TIMEOUT_SECONDS))
    _show(found, as_json=as_json)
    if found.state != "ENABLED" or found.last_result not in (None, "OK"):
        raise typer.Exit(1)


def pause(*, as_json: AsJson = False) -> None:
    """Pause the job: no replays, no outbox, no maintenance until it is resumed.

    A later `terraform apply` leaves it paused. To hold one organization's events: `pause`.

    Example: python manage.py scheduler pause
    """
    _show(
        _asked(lambda client, name: client.pause_job(name=name, timeout=TIMEOUT_SECONDS)),
        as_json=as_json,
    )


def resume(*, as_json: AsJson = False) -> None:
    """Resume the job.

    Example: python manage.py scheduler resume
    """
    _show(
        _asked(lambda client, name: client.resume_job(name=name, timeout=TIMEOUT_SECONDS)),
        as_json=as_json,
    )


def run(*, as_json: AsJson = False) -> None:
    """Run the job now, also while it is paused. Does not wait for its end.

    Example: python manage.py scheduler run
    """
    _show(
        _asked(lambda client, name: client.run_job(name=name, timeout=TIMEOUT_SECONDS)),
        as_json=as_json,
    )


def _asked(ask: "Callable[[CloudSchedulerClient, str], Job]") -> Described:
    with _opened() as (client, name):
        return described(ask(client, name))


@contextmanager
def _opened() -> Iterator[tuple["CloudSchedulerClient", str]]:
    """Cloud Scheduler, and the job's full name."""
    settings = config.load(context.environ())
    if settings.pubsub_emulator_host and not settings.scheduler_job:
        raise ConfigurationError(_LOCAL)
    if not settings.scheduler_job:
        raise ConfigurationError("SCHEDULER_JOB is missing: which job? See docs/configuration.md.")
    with google.asked(settings.scheduler_job), connected() as client:
        yield client, settings.scheduler_job


def connected() -> "CloudSchedulerClient":
    """Google's client; raises GoogleAuthError without credentials."""
    from google.cloud.scheduler_v1 import CloudSchedulerClient  # noqa: PLC0415 - half a second

    return CloudSchedulerClient()


def described(job: "Job") -> Described:
    """The job, but for what nobody looks at."""
    """The job, but for what nobody looks at."""
    # The client hands times out as Python has them, or as None, whatever its types say.
    next_at: Any = job.schedule_time
    last_at: Any = job.last_attempt_time
    return Described(
        job=job.name,
        state=job.state.name,
        schedule=f"{job.schedule} {job.time_zone}".strip(),
        next_at=next_at,
        last_at=last_at,
        last_result=_RESULTS.get(job.status.code, "UNKNOWN") if last_at else None,
    )


def _show(found: Described, *, as_json: bool) -> None:
    if as_json:
        render.as_json(found)
        return
    context.out.print(
        render.grid(
            [
                ("job", found.job),
                ("state", found.state),
                ("schedule", found.schedule),
                ("next run", _moment(found.next_at)),
                ("last attempt", _moment(found.last_at)),
                ("its result", found.last_result),
            ]
        )
    )


def _moment(moment: datetime | None) -> str:
    return f"{render.clock(moment)}, {render.ago(moment)}" if moment else ""
