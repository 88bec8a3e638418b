"""rotate_credentials: tenants' passwords encrypted with the newest key."""

from typing import Annotated

import typer
from rich.progress import Progress

from cli import context, render
from shared import rotation


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command("rotate_credentials")(rotate_credentials)


def rotate_credentials(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Encrypt all credentials anew, with the first of CREDENTIAL_KEYS. Safe to repeat.

    Put the new key first and keep the old one behind it, in every function, before you run this.

    Example: python manage.py rotate_credentials
    """
    core = context.core()
    renewed, kept, unreadable = 0, 0, list[int]()
    with Progress(console=context.err, transient=True) as progress:
        task = progress.add_task("Encrypting", total=rotation.count(core.application))
        for step in rotation.rotate(core.application, core.settings.credential_keys):
            renewed += step.renewed
            kept += step.kept
            unreadable += step.unreadable
            progress.advance(task, step.renewed + step.kept + len(step.unreadable))
    if as_json:
        render.as_json({"renewed": renewed, "kept": kept, "unreadable": unreadable})
    else:
        context.out.print(f"{renewed} encrypted with the newest key, {kept} were already.")
    if unreadable:
        context.err.print(
            f"[red]{len(unreadable)} cannot be decrypted with any of CREDENTIAL_KEYS:[/] "
            f"credentials {', '.join(map(str, unreadable))}. Add the key that is missing, or "
            "connect the shop again.",
            soft_wrap=True,
        )
        raise typer.Exit(1)
