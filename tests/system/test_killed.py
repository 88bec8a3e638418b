"""A retry process that is killed or paused at any step of a batch: nothing lost, nothing twice.

The process is a real one, ended by SIGKILL: by itself where a step begins or ends, by the test
while a statement is on its way.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import psycopg
import pytest

from shared import bootstrap
from shared.leases import Leases, Verdict
from shared.replay import Request
from tests.world import NOW, World, envelope

ROOT: Final = Path(__file__).parent.parent.parent
ROWS: Final = 5
TARGET: Final = 2  # the place of the row at which the worker meets its fate
PATIENCE: Final = 30


@pytest.fixture
def environ(environ: dict[str, str]) -> dict[str, str]:
    return environ | {"LEASE_SECONDS": "1", "TENANT_STATEMENT_TIMEOUT_SECONDS": "5"}


@pytest.fixture
def rows(world: World) -> list[int]:
    """One tenant's failed events, which a worker replays in this order."""
    return [world.fail(envelope({"id": n})) for n in range(ROWS)]


# The worker, in a process of its own


def work() -> None:
    """A retry run that stops at STOP_AT, at the row ROW, by the signal SIGNAL."""
    point, row, how = os.environ["STOP_AT"], int(os.environ["ROW"]), os.environ["SIGNAL"]

    def stop() -> None:
        os.kill(os.getpid(), signal.Signals[how])
        time.sleep(0.2)  # a signal to a process with threads may come a moment later

    _POINTS[point](row, stop)
    report = bootstrap.core(os.environ).replayer().run(Request(), budget_seconds=60)
    print(f"resolved={report.resolved} failed={report.failed} lost={report.lost}")  # noqa: T201


def _before(name: str) -> Callable[[int, Callable[[], None]], None]:
    def arm(row: int, stop: Callable[[], None]) -> None:
        real = getattr(Leases, name)

        def stopped(self: Leases, token: Any, at: Any, *rest: Any) -> Any:
            if at == row or isinstance(at, list):
                stop()
            return real(self, token, at, *rest)

        setattr(Leases, name, stopped)

    return arm


def _after(name: str) -> Callable[[int, Callable[[], None]], None]:
    def arm(row: int, stop: Callable[[], None]) -> None:
        real = getattr(Leases, name)

        def stopped(self: Leases, token: Any, at: Any, *rest: Any, **named: Any) -> Any:
            done = real(self, token, at, *rest, **named)
            if at == row or name == "claim":
                stop()
            return done

        setattr(Leases, name, stopped)

    return arm


def _failing_and_before_its_verdict(row: int, stop: Callable[[], None]) -> None:
    from shared.pipeline import Pipeline  # noqa: PLC0415 - the worker's own

    def broken(_self: Pipeline, _envelope: Any, **_options: Any) -> Any:
        raise RuntimeError("broken")

    Pipeline.apply = broken  # type: ignore[method-assign]
    _before("reschedule")(row, stop)


def _asking_before_the_verdict(row: int, _stop: Callable[[], None]) -> None:
    def ask() -> None:
        print("verdict?", flush=True)  # noqa: T201
        sys.stdin.readline()

    _before("resolve")(row, ask)


_POINTS: Final[dict[str, Callable[[int, Callable[[], None]], None]]] = {
    "claim": _after("claim"),
    "before the start": _before("start"),
    "after the start": _after("start"),
    "before the verdict": _before("resolve"),
    "after the verdict": _after("resolve"),
    "failing": _failing_and_before_its_verdict,
    "asks": _asking_before_the_verdict,
    "never": lambda _row, _stop: None,
}


@contextlib.contextmanager
def worker(
    world: World, point: str, row: int, how: str = "SIGKILL", command: list[str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """The process; it is gone when the context is."""
    started = subprocess.Popen(
        command or [sys.executable, "-c", "from tests.system.test_killed import work; work()"],
        cwd=ROOT,
        env=world.environ
        | {"PATH": os.environ["PATH"], "STOP_AT": point, "ROW": str(row), "SIGNAL": how},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)


def leases_are_over(world: World) -> bool:
    held = "select 1 from subscriber_subscriberfailedevent where leased_until > clock_timestamp()"
    return not world.app(held)  # pyright: ignore[reportArgumentType]


def all_come_right(world: World, rows: list[int], *, resolved: int, charged: list[int]) -> None:
    """After the lease the next run takes everything over, and charges what had been started."""
    before = world.failed_events()
    assert [row["status"] for row in before].count("resolved") == resolved
    held = [row["id"] for row in before if row["lease_token"]]
    assert held == [row["id"] for row in before if row["status"] == "pending"], "all are leased"

    assert world.retry().retried == 0, "nobody takes a row over while its lease lasts"
    until(lambda: leases_are_over(world))
    assert world.retry().resolved == ROWS - resolved - len(charged)
    for row in world.failed_events():
        if row["id"] in charged:
            assert (row["status"], row["error_type"]) == ("pending", "WorkerLost")
            world.make_due(row["id"])
    assert world.retry().resolved == len(charged)

    kept = world.failed_events()
    assert [(row["id"], row["status"]) for row in kept] == [(row, "resolved") for row in rows]
    assert [row["id"] for row in kept if row["retry_count"]] == charged
    assert {row["retry_count"] for row in kept} <= {0, 1}
    outcomes = [
        (attempt["failed_event_id"], attempt["outcome"])
        for attempt in world.attempts()
        if attempt["outcome"] != "resolved"
    ]
    assert outcomes == [(row, "lost") for row in charged]
    ends = [a["failed_event_id"] for a in world.attempts() if a["outcome"] == "resolved"]
    assert sorted(ends) == rows, "resolved once each"
    stored = world.tenant("select event_id from shopify_events")
    assert sorted(e["event_id"] for e in stored) == sorted(row["event_id"] for row in kept)
    snapshots = world.tenant("select payload from shopify_orders order by shopify_id")
    assert [row["payload"]["id"] for row in snapshots] == list(range(ROWS))


# Killed


@pytest.mark.parametrize(
    ("point", "resolved", "is_charged"),
    [
        ("claim", 0, False),
        ("before the start", TARGET, False),
        ("after the start", TARGET, True),
        ("before the verdict", TARGET, True),
        ("after the verdict", TARGET + 1, False),
    ],
)
def test_a_killed_worker_loses_nothing_and_only_started_rows_are_charged(
    world, rows, point, resolved, is_charged
):
    with worker(world, point, rows[TARGET]) as process:
        assert process.wait(PATIENCE) == -signal.SIGKILL
    charged = [rows[TARGET]] if is_charged else []
    all_come_right(world, rows, resolved=resolved, charged=charged)


def sleep_in_the_write(world: World, row: int, seconds: float) -> None:
    """The tenant's own trigger dawdles over this event."""
    event_id = next(kept["event_id"] for kept in world.failed_events() if kept["id"] == row)
    world.tenant(
        "create function dawdle() returns trigger language plpgsql as $$ begin"  # pyright: ignore[reportArgumentType]
        f" if new.event_id = '{event_id}' then perform pg_sleep({seconds}); end if;"
        " return new; end $$"
    )
    world.tenant(
        "create trigger dawdle before insert on shopify_events"
        " for each row execute function dawdle()"
    )


def test_a_command_killed_during_the_tenants_write_whose_statement_commits_after_all(world, rows):
    """The server does not notice, and commits 1.5 s later, when the row has been taken over."""
    sleep_in_the_write(world, rows[TARGET], 1.5)
    command = [sys.executable, "manage.py", "retry_failed_events"]
    with worker(world, "never", 0, command=command) as process:
        until(lambda: asleep(world))
        process.kill()
        process.wait()
    assert asleep(world)
    all_come_right(world, rows, resolved=TARGET, charged=[rows[TARGET]])


def asleep(world: World) -> list[dict[str, Any]]:
    return world.tenant(
        "select pid from pg_stat_activity"
        " where datname = current_database() and wait_event = 'PgSleep'"
    )


def test_killed_during_the_tenants_write_whose_statement_is_rolled_back(world, rows):
    sleep_in_the_write(world, rows[TARGET], 60)
    with worker(world, "never", 0) as process:
        until(lambda: asleep(world))
        process.kill()
        process.wait()
    world.tenant("select pg_terminate_backend(%(pid)s)", pid=asleep(world)[0]["pid"])
    world.tenant("drop trigger dawdle on shopify_events")
    all_come_right(world, rows, resolved=TARGET, charged=[rows[TARGET]])


@contextlib.contextmanager
def killed_in_the_verdict(world: World, row: int) -> Iterator[int]:
    """The verdict's statement waits for a lock that is held in here; its process is dead."""
    with worker(world, "asks", row) as process, psycopg.connect(world.app_url) as other:
        assert process.stdout
        assert process.stdin
        assert "verdict?\n" in process.stdout, "the rest are log lines"
        other.execute(
            "select 1 from subscriber_subscriberfailedevent where id = %s for update", [row]
        )
        process.stdin.write("\n")
        process.stdin.flush()
        until(lambda: waiting(world))
        process.kill()
        process.wait()
        yield waiting(world)[0]["pid"]
        other.rollback()


def waiting(world: World) -> list[dict[str, Any]]:
    return world.app(
        "select pid from pg_stat_activity where datname = current_database()"
        " and application_name = 'hookledger' and wait_event_type = 'Lock'"
    )


def test_killed_during_the_verdict_which_is_rolled_back(world, rows):
    with killed_in_the_verdict(world, rows[TARGET]) as backend:
        world.app("select pg_terminate_backend(%(pid)s)", pid=backend)
        until(lambda: not waiting(world))
    all_come_right(world, rows, resolved=TARGET, charged=[rows[TARGET]])


def test_killed_during_the_verdict_which_stands(world, rows):
    with killed_in_the_verdict(world, rows[TARGET]):
        pass
    until(lambda: not waiting(world) and world.failed_events()[TARGET]["status"] == "resolved")
    all_come_right(world, rows, resolved=TARGET + 1, charged=[])


def test_killed_with_the_canary_out_the_tenant_is_probed_again_after_the_lease(world, rows):
    world.break_tenant()
    world.retry()
    world.heal_tenant()
    world.make_probe_due()
    canary = rows[1]
    with worker(world, "after the start", canary) as process:
        assert process.wait(PATIENCE) == -signal.SIGKILL
    assert world.retry().retried == 0, "its tenant waits for the canary"
    until(lambda: leases_are_over(world))
    until(lambda: world.retry().resolved == 1)
    assert world.incidents()[0]["ended_at"] is not None
    kept = world.failed_events()
    assert [row["retry_count"] for row in kept] == [1, 1, 0, 0, 0]
    assert kept[1]["error_type"] == "WorkerLost"
    for row in rows:
        world.make_due(row)
    world.retry()
    assert {row["status"] for row in world.failed_events()} == {"resolved"}
    assert len(world.tenant("select 1 from shopify_events")) == ROWS


# Paused, as an instance without processor time is


@contextlib.contextmanager
def paused(world: World, point: str, row: int) -> Iterator[subprocess.Popen[str]]:
    """A worker that stands still, its leases over."""
    with worker(world, point, row, "SIGSTOP") as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        until(lambda: leases_are_over(world))
        yield process


def wake(process: subprocess.Popen[str]) -> str:
    """Lets it go on to its end; what it has to say of its run."""
    process.send_signal(signal.SIGCONT)
    out, _ = process.communicate(timeout=PATIENCE)
    return out.splitlines()[-1]


@pytest.mark.parametrize("point", ["before the start", "before the verdict"])
def test_a_worker_that_wakes_after_the_takeover_changes_nothing(world, rows, point):
    with paused(world, point, rows[TARGET]) as process:
        for _ in range(2):
            world.retry()
            for row in rows:
                world.make_due(row)
        assert {row["status"] for row in world.failed_events()} == {"resolved"}
        before = world.failed_events(), world.attempts()
        lost = ROWS - TARGET
        assert wake(process) == f"resolved={TARGET} failed=0 lost={lost}"
    assert (world.failed_events(), world.attempts()) == before
    assert len(world.tenant("select 1 from shopify_events")) == ROWS


@pytest.mark.parametrize("point", ["before the verdict", "failing"])
def test_a_late_verdict_does_not_touch_the_next_holders_lease(world, rows, point):
    row = rows[TARGET]
    if point == "failing":
        row = rows[0]
    with paused(world, point, row) as process:
        world.core.leases.reap()
        for each in rows:
            world.make_due(each)
        token = uuid4()
        claimed = [claim.id for claim in world.core.leases.claim(token, ROWS)]
        assert row in claimed
        assert world.core.leases.start(token, row) is not None
        world.app(
            "update subscriber_subscriberfailedevent set leased_until = now() + interval '1 hour'"
            " where lease_token is not null"
        )
        before = world.failed_events(), world.attempts()
        assert f"lost={len(claimed)}" in wake(process)
        assert (world.failed_events(), world.attempts()) == before
        assert world.core.leases.resolve(token, row, NOW) is Verdict.RESOLVED
