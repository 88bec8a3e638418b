"""What a cold start pays for: the import of each function, beside what none can do without.

The yardstick is functions-framework with one decorated function, and psycopg with its pool, which
is installed for this alone. The webhook pays for its publisher at the start besides. All are
imported in processes of their own, one after another, round after round: medians are compared, and
each ratio is of one round.
"""

import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from bench import machine

FUNCTIONS: Final = Path(__file__).parent.parent / "functions"
POOL: Final = "psycopg_pool==3.3.3"
RATIO_MAX: Final = 1.25
INSTALL_SECONDS: Final = 300

_HTTP: Final = """
import functions_framework
import psycopg
import psycopg_pool

@functions_framework.http
def bare(request):
    return ""
"""
_PUBLISHER: Final = "from google.pubsub_v1 import PublisherClient\n"
# Prints milliseconds; the interpreter's own start is not counted, for it is the same everywhere.
_TIMED: Final = """
import sys, time
sys.path[:0] = sys.argv[2:]
started = time.perf_counter()
exec(compile(sys.argv[1], "start", "exec"), {"__name__": "start"})
print((time.perf_counter() - started) * 1000)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What is imported, and where from."""

    name: str
    code: str
    folders: tuple[str, ...] = ()
    beside: str = ""  # the name of its yardstick


def starts(
    rounds: Annotated[int, typer.Option(help="How often each is imported.")] = 15,
) -> None:
    """The import of each function beside bare functions-framework and psycopg_pool."""
    out = Console()
    with tempfile.TemporaryDirectory() as folder:
        _install(folder)
        measured = _measure(_all(folder), rounds)
    out.print(_table(measured))
    for name, value in machine.host().items():
        out.print(f"[dim]{name:12}[/] {value}")
    if any(ratio > RATIO_MAX for _, _, ratio in measured if ratio is not None):
        raise typer.Exit(1)


def _all(folder: str) -> list[Start]:
    bare = Start(name="bare", code=_HTTP, folders=(folder,))
    publishing = Start(name="bare and publisher", code=_HTTP + _PUBLISHER, folders=(folder,))
    return [
        bare,
        *(_function(name, bare.name) for name in ("subscriber", "retry")),
        publishing,
        _function("webhook", publishing.name),
    ]


def _function(name: str, beside: str) -> Start:
    root = str(FUNCTIONS.parent)
    return Start(
        name=name, code="import main", folders=(str(FUNCTIONS / name), root), beside=beside
    )


def _measure(everything: list[Start], rounds: int) -> list[tuple[str, float, float | None]]:
    """Name, median in milliseconds, and the median of the ratios to its yardstick."""
    times: dict[str, list[float]] = {start.name: [] for start in everything}
    for start in everything:  # compiles, and fills the system's caches
        _imported(start)
    for _ in range(rounds):
        for start in everything:
            times[start.name].append(_imported(start))
    return [
        (
            start.name,
            statistics.median(times[start.name]),
            statistics.median(
                mine / bare
                for mine, bare in zip(times[start.name], times[start.beside], strict=True)
            )
            if start.beside
            else None,
        )
        for start in everything
    ]


def _imported(start: Start) -> float:
    command = [sys.executable, "-c", _TIMED, start.code, *start.folders]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _install(folder: str) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "--no-deps", "--target", folder, POOL], check=True, timeout=INSTALL_SECONDS
    )


def _table(measured: list[tuple[str, float, float | None]]) -> Table:
    table = Table(title=f"Import, at most {RATIO_MAX} times its yardstick")
    for column in ("", "ms", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    for name, milliseconds, ratio in measured:
        table.add_row(name, f"{milliseconds:.0f}", "" if ratio is None else f"{ratio:.2f}")
    return table
