"""When a failed event is replayed next: 2, 4, 8, 16, 32, then 60 minutes after the verdict.

And when a tenant database that is unavailable is probed.
"""

from typing import Final

CAP_MINUTES: Final = 60
PROBE_MINUTES: Final = [
    1,
    2,
    4,
    8,
    15,
]  # after each probe that failed; the last for all that follow


def delay_minutes(failed_replays: int) -> int:
    """Minutes until the next replay, after `failed_replays` (1 or more) have failed."""
    return min(2 ** min(failed_replays, 6), CAP_MINUTES)


# The whole schedule, for SQL: index by failed replays, the last entry is for all that follow.
SCHEDULE_MINUTES: Final = [delay_minutes(n) for n in range(1, 7)]
