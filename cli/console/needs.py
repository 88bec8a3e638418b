"""What needs a person now, in the order of urgency: the first line of the first page."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from cli import render
from shared.figures import Notices, Stats
from shared.incidents import Incident

LATE_SECONDS: Final = 600  # the scheduler comes every minute


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """One thing that does not mend itself, and where it is shown."""

    text: str
    link: str


def needs(
    stats: Stats | None,
    notices: Notices | None,
    incidents: Sequence[Incident],
    overdue: int,
) -> list[Need]:
    """What needs somebody; nothing is said of what could not be read."""
    return [
        *_down(incidents),
        *(_waits(stats) if stats else ()),
        *(_failures(stats) if stats else ()),
        *_rest(notices, overdue),
    ]


def _down(incidents: Sequence[Incident]) -> Iterator[Need]:
    down = [each for each in incidents if each.kind == "unavailable"]
    if len(down) == 1:
        lasts = render.span(_age(down[0].started_at))
        text = f"The database of {down[0].tenant} has been unavailable for {lasts}"
        yield Need(text=text, link="#incidents")
    elif down:
        yield Need(text=f"The databases of {len(down)} tenants are unavailable", link="#incidents")


def _waits(stats: Stats) -> Iterator[Need]:
    if stats.last_run_at is None:
        yield Need(text="No retry run has ever ended: is the scheduler on?", link="#pipeline")
    elif _age(stats.last_run_at) > LATE_SECONDS:
        text = f"The last retry run ended {render.ago(stats.last_run_at)}: is the scheduler on?"
        yield Need(text=text, link="#pipeline")
    if (stats.oldest_outbox_seconds or 0) > LATE_SECONDS:
        text = f"{stats.outbox} messages wait in the outbox: Pub/Sub does not take them"
        yield Need(text=text, link="#pipeline")


def _failures(stats: Stats) -> Iterator[Need]:
    if stats.failed:
        was = "was" if stats.failed == 1 else "were"
        yield Need(
            text=f"{render.events(stats.failed)} {was} given up", link="/failures?status=failed"
        )


def _rest(notices: Notices | None, overdue: int) -> Iterator[Need]:
    if overdue:
        be = "request is" if overdue == 1 else "requests are"
        yield Need(text=f"{overdue} privacy {be} overdue", link="/privacy")
    if notices and notices.failed_24h:
        plural = "" if notices.failed_24h == 1 else "s"
        text = f"{notices.failed_24h} notification{plural} reached nobody in 24 h"
        yield Need(text=text, link="/notifications")


def _age(moment: datetime) -> float:
    return (datetime.now(UTC) - moment).total_seconds()
