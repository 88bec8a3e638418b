"""The schedule of replays is the one that operators know."""

import pytest

from shared import backoff


@pytest.mark.parametrize(
    ("failed_replays", "minutes"),
    [(1, 2), (2, 4), (3, 8), (4, 16), (5, 32), (6, 60), (7, 60), (1000, 60)],
)
def test_the_delay_doubles_up_to_an_hour(failed_replays, minutes):
    assert backoff.delay_minutes(failed_replays) == minutes


def test_the_schedule_for_sql_is_the_same_one():
    assert backoff.SCHEDULE_MINUTES == [2, 4, 8, 16, 32, 60]
