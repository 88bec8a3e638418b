"""pause, unpause: an organization's events wait in the failure ledger."""

from typing import Annotated

import typer

from cli import context, render
from cli.scope import Actor, operator
from shared import bootstrap
from shared.directory import FOUND_SECONDS
from shared.errors import ConfigurationError
from shared.triage import Triage

Organization = Annotated[str, typer.Option(help="Whose events are meant.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.command("pause")(pause)
    app.command("unpause")(unpause)


def pause(
    *,
    organization: Organization,
    reason: Annotated[str, typer.Option(help="Why; it is kept.")],
    actor: Actor = "",
    as_json: AsJson = False,
) -> None:
    """Hold an organization's events in the failure ledger, without charge, until unpause.

    Nothing is replayed, and new events wait with the others.

    Example: python manage.py pause --organization acme --reason "moving the database"
    """
    by, core = operator(actor, reason), context.core()
    _check(core, organization)
    done = core.incidents.pause(organization, actor=by.actor, reason=by.reason)
    _tell(organization, "paused", done, as_json=as_json)


def unpause(
    *,
    organization: Organization,
    reason: Annotated[str, typer.Option(help="Why; it is kept.")] = "the pause is over",
    actor: Actor = "",
    as_json: AsJson = False,
) -> None:
    """Let a paused organization's events go again, a few at a time.

    Example: python manage.py unpause --organization acme
    """
    by, core = operator(actor, reason), context.core()
    _check(core, organization)
    done = core.incidents.unpause(organization, actor=by.actor, reason=by.reason)
    _tell(organization, "unpaused", done, as_json=as_json)


def _check(core: bootstrap.Core, organization: str) -> None:
    if not Triage(core.application).knows(organization):
        raise ConfigurationError(
            f"There is no organization {render.printable(organization)}: it has neither a shop "
            "nor a database on record."
        )


def _tell(organization: str, what: str, done: bool, *, as_json: bool) -> None:
    if as_json:
        render.as_json({"organization": organization, "state": what, "changed": done})
    elif done:
        context.out.print(
            f"{organization} is {what}. Running processes notice within {FOUND_SECONDS} s.",
            markup=False,
        )
    else:
        before = "paused already" if what == "paused" else "not paused"
        context.out.print(f"{organization} was {before}.", markup=False)
