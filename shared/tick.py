"""What one tick of the scheduler does: outbox and replays side by side, then erasure and retention.

Each part has its own budget and its own faults: only a failure ledger out of reach fails the tick.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from shared import log
from shared.outbox import Outbox
from shared.replay import Replayer, Request
from shared.retention import Retention

if TYPE_CHECKING:
    from shared.erasure import Erasure


def tick(
    request: Request,
    *,
    replayer: Replayer,
    outbox: Outbox,
    retention: Retention,
    erasure: "Erasure | None" = None,
    budget_seconds: float,
    maintenance_seconds: float,
) -> dict[str, Any]:
    """The retry function's answer. A dry run, and a row asked for by its id, are replays only.

    Raises one of db.UNREACHABLE when the failure ledger is out of reach.
    """

    def replay() -> dict[str, Any]:
        return replayer.run(request, budget_seconds=budget_seconds).as_json()

    if request.dry_run or request.event_id is not None:
        return replay()
    with ThreadPoolExecutor(thread_name_prefix="tick") as threads:
        republished = threads.submit(
            _guarded, lambda: outbox.republish(budget_seconds=budget_seconds)
        )
        replayed = threads.submit(replay)
        answer = replayed.result() | {"republished": republished.result()}
    if erasure is not None:
        _guarded(lambda: erasure.run(budget_seconds=maintenance_seconds / 2).done)
        maintenance_seconds /= 2
    retention.run(budget_seconds=maintenance_seconds)
    return answer


def _guarded(part: Callable[[], int]) -> int:
    """What a part did, or 0 with its fault in the log."""
    try:
        return part()
    except Exception as error:  # noqa: BLE001 - one part's fault is not the others'
        log.error("tick.part_failed", error)
        return 0
