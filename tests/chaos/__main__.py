"""`python -m tests.chaos`: runs from printed seeds, each for minutes; exits 1 if books differ."""

import random
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tests.chaos.run import line, run


def chaos(
    seed: Annotated[int | None, typer.Option(help="Of the first run; a new one each time.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs, each with the next seed.")] = 1,
    seconds: Annotated[float, typer.Option(min=1, help="Of load and faults in a run.")] = 120,
    tenants: Annotated[int, typer.Option(min=1)] = 20,
) -> None:
    """Load the whole local stack, break everything around it, and balance the books."""
    err = Console(stderr=True, highlight=False)
    first = random.randrange(1_000_000) if seed is None else seed
    failed = []
    for number in range(first, first + rounds):
        err.print(f"[bold]seed {number}[/]")
        with tempfile.TemporaryDirectory(prefix="hookledger-chaos-") as folder:
            result = run(Path(folder), seed=number, seconds=seconds, tenants=tenants, say=err.print)
        typer.echo(line(result))
        for each in result.differences[:20]:
            err.print(f"[red]✗[/] {each}", soft_wrap=True)
        if result.differences:
            failed.append(number)
    if failed:
        err.print(f"[red]The books do not balance:[/] seeds {failed}")
        raise typer.Exit(1)
    err.print(f"[green]✓[/] the books of {rounds} runs balance")


if __name__ == "__main__":
    typer.run(chaos)
