"""Old notifications go, with their attempts and queue rows, a little at a time."""

from typing import Any, Final

import psycopg
from psycopg.rows import scalar_row

STEP_ROWS: Final = 500

# By their ids, which is about the order of their times: nothing is read but the oldest rows.
_FORGET: Final = """
with step as (
  select id from notifier.notifications order by id limit %(rows)s
), gone as (
  delete from notifier.notifications n using step s
  where n.id = s.id and n.finished_at < now() - make_interval(days => %(days)s)
  returning n.id
), answered as (
  select id from pgrelay.queue order by id limit %(rows)s
), done as (
  delete from pgrelay.queue q using answered a
  where q.id = a.id and q.done_at < now() - make_interval(days => %(days)s)
  returning q.id
)
select (select count(*) from gone) + (select count(*) from done)"""


class Retention:
    """A chore of the processor's: what is open never goes by age."""

    def __init__(self, *, days: int) -> None:
        self._days = days

    def __call__(self, connection: psycopg.Connection[Any]) -> int:
        """One step; how many rows went."""
        parameters = {"days": self._days, "rows": STEP_ROWS}
        with connection.cursor(row_factory=scalar_row) as cursor:
            return cursor.execute(_FORGET, parameters).fetchone() or 0
