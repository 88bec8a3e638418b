"""Failures and recoveries per hour, as the geometry of a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from shared.traffic import Hour

HALF: Final = 100.0  # units from the middle line to either edge
STEP: Final = 10.0  # units from one hour to the next
GAP: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One hour: failures stand on the middle line, recoveries hang from it."""

    hour: Hour
    x: float
    up: float
    down: float

    @property
    def top(self) -> float:
        """Where the upper bar begins."""
        return HALF - self.up


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Bars in a box of `width` and twice HALF; both halves have one scale."""

    bars: list[Bar]
    width: float
    most: int  # in one hour; 0 where nothing happened
    failed: int
    resolved: int


def drawn(hours: Sequence[Hour]) -> Chart:
    """The chart of these hours."""
    most = max((max(hour.failed, hour.resolved) for hour in hours), default=0)
    bars = [
        Bar(hour=hour, x=i * STEP, up=_length(hour.failed, most), down=_length(hour.resolved, most))
        for i, hour in enumerate(hours)
    ]
    return Chart(
        bars=bars,
        width=len(bars) * STEP - GAP,
        most=most,
        failed=sum(hour.failed for hour in hours),
        resolved=sum(hour.resolved for hour in hours),
    )


def _length(count: int, most: int) -> float:
    """Never so short that one among thousands is not seen."""
    return max(2.0, round(HALF * count / most, 1)) if count else 0.0
