"""privacy: the requests of the compliance topics, in an operator's hands."""

import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cli import context, render
from shared.errors import ConfigurationError
from shared.privacy import Request

Id = Annotated[int, typer.Argument(metavar="REQUEST", min=1, help="The request's id.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

commands = typer.Typer(
    help="Compliance requests: list, show, export, and carry them out.", no_args_is_help=True
)


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.add_typer(commands, name="privacy")


@commands.command("list")
def list_requests(
    open_: Annotated[bool, typer.Option("--open", help="Only those that are not done.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Rows at most.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List compliance requests: those that are open first, by when they are due.

    Example: python manage.py privacy list --open
    """
    found = context.core().privacy.requests(limit=limit, only_open=open_)
    if as_json:
        render.as_json(found)
        return
    if found:
        table = render.table(
            "request", "kind", "shop", "state", "due", wide=("shop",), numbers=("request",)
        )
        for each in found:
            render.add(
                table, each.id, each.kind, each.shop_domain, _state(each), render.clock(each.due_at)
            )
        context.out.print(table)
    overdue = sum(each.is_overdue for each in found)
    warning = f", [red]{overdue} overdue[/]" if overdue else ""
    context.out.print(f"{len(found)} request{'' if len(found) == 1 else 's'}{warning}")


@commands.command("show")
def show_request(request: Id, as_json: AsJson = False) -> None:
    """Show one request, and what became of it in which database.

    Example: python manage.py privacy show 3
    """
    privacy = context.core().privacy
    found, receipts = _find(request), privacy.receipts(request)
    if as_json:
        render.as_json(asdict(found) | {"receipts": receipts})
        return
    context.out.print(
        render.grid(
            [
                ("request", found.id),
                ("kind", found.kind),
                ("shop", found.shop_domain),
                ("organization", found.organization_id),
                ("state", _state(found)),
                ("customer", found.customer_id or found.email),
                ("orders", ", ".join(found.orders)),
                ("requested", render.clock(found.requested_at)),
                ("due", render.clock(found.due_at)),
                ("last tried", render.clock(found.attempted_at)),
                ("exported", render.clock(found.exported_at)),
                ("done", render.clock(found.done_at)),
            ]
        )
    )
    for receipt in receipts:
        name = f"{receipt.database} database {receipt.organization_id}".strip()
        context.out.print(f"\n[bold]{name}[/]: {receipt.state}")
        if receipt.reason:
            context.out.print(render.printable(receipt.reason), markup=False, soft_wrap=True)
        context.out.print(render.grid(sorted(receipt.counts.items())))


@commands.command("export")
def export_request(
    request: Id,
    output: Annotated[Path | None, typer.Option(help="Where to; export-REQUEST.json.")] = None,
    force: Annotated[bool, typer.Option(help="Replace a file that is there.")] = False,
) -> None:
    """Write all that is held of a request's customer into one JSON file, for its owner only.

    A data request is done with it.

    Example: python manage.py privacy export 3 --output ada.json
    """
    core, found = context.core(), _find(request)
    path = output or Path(f"export-{request}.json")
    if path.exists() and not force:
        raise ConfigurationError(f"{path} is there already. Say --force to replace it.")
    # Whole or not at all, and nobody else's to read.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file, context.err.status("Searching"):
            counts = core.export().write(found, file.write)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)
    core.privacy.exported(request)
    context.out.print(render.grid(counts.items()))
    context.out.print(f"Written to {path}", markup=False)


@commands.command("run")
def run_requests(
    request: Annotated[
        int | None, typer.Argument(metavar="[REQUEST]", min=1, help="Only this one.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Begin nothing after that long.")] = 3600,
    as_json: AsJson = False,
) -> None:
    """Carry out the erasures that are open, now; exits 1 if any is left.

    Safe beside the retry function, which does the same a little at a time.

    Example: python manage.py privacy run
    """
    core = context.core()
    if request is not None:
        _find(request)
    with context.err.status("Erasing"):
        report = core.erasure().run(budget_seconds=seconds, only=request)
    if as_json:
        render.as_json(report)
    else:
        context.out.print(render.grid(sorted(report.removed.items())))
        context.out.print(f"{report.done} done, {report.waiting} left")
    if report.waiting:
        raise typer.Exit(1)


def _find(request: int) -> Request:
    found = context.core().privacy.find(request)
    if found is None:
        raise ConfigurationError(f"There is no request {request}.")
    return found


def _state(request: Request) -> str:
    if request.done_at:
        return "done"
    return "overdue" if request.is_overdue else "open"
