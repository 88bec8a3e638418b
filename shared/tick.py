"""What one tick of the scheduler does: replays, outbox and notifier side by side, and maintenance.

Each part has its own budget and its own faults: only a failure ledger out of reach fails the tick.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from shared import log
from shared.outbox import Outbox
from shared.replay import Replayer, Request
from shared.retention import Retention

if TYPE_CHECKING:
    from shared.erasure import Erasure

T = TypeVar("T")


def tick(
    request: Request,
    *,
    replayer: Replayer,
    outbox: Outbox,
    retention: Retention,
    erasure: "Erasure | None" = None,
    notify: Callable[[], dict[str, int]] | None = None,
    count: Callable[[], dict[str, Any]] | None = None,
    budget_seconds: float,
    maintenance_seconds: float,
) -> dict[str, Any]:
    """The retry function's answer. A dry run, and a row asked for by its id, are replays only.

    `notify` has a thread, a connection and a budget of its own: whatever becomes of it, the others
    do their work meanwhile, and only the answer waits for it. `count` says what is left after it.

    Raises one of db.UNREACHABLE when the failure ledger is out of reach.
    """

    def replay() -> dict[str, Any]:
        return replayer.run(request, budget_seconds=budget_seconds).as_json()

    if request.dry_run or request.event_id is not None:
        return replay()
    with ThreadPoolExecutor(thread_name_prefix="tick") as threads:
        republished = threads.submit(
            _guarded, lambda: outbox.republish(budget_seconds=budget_seconds), 0
        )
        notified = threads.submit(_guarded, notify or dict[str, int], dict[str, int]())
        replayed = threads.submit(replay)
        answer = replayed.result() | {"republished": republished.result()}
        if erasure is not None:
            _guarded(lambda: erasure.run(budget_seconds=maintenance_seconds / 2).done, 0)
            maintenance_seconds /= 2
        retention.run(budget_seconds=maintenance_seconds)
        answer |= {"notified": notified.result()}
    left = _guarded(count or dict[str, Any], dict[str, Any]())
    log.info("tick.finished", **left)
    return answer | {"left": left}


def _guarded(part: Callable[[], T], otherwise: T) -> T:
    """What a part did, or `otherwise` with its fault in the log."""
    try:
        return part()
    except Exception as error:  # noqa: BLE001 - one part's fault is not the others'
        log.error("tick.part_failed", error)
        return otherwise
