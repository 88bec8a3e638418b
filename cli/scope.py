"""Which failed events, and who asks: options that several commands have in common."""

import getpass
import os
import socket
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any

import typer

from cli import render
from shared.errors import ConfigurationError
from shared.triage import Operator, Scope

Actor = Annotated[str, typer.Option(help="Who does this, if not you on this machine.")]


def _said(
    *,
    organization: Annotated[str | None, typer.Option(help="Of this organization.")] = None,
    shop: Annotated[str | None, typer.Option(help="Of this shop.")] = None,
    topic: Annotated[str | None, typer.Option(help="Of this topic, as orders/create.")] = None,
    error_type: Annotated[str | None, typer.Option(help="With this error, as ValueError.")] = None,
    code: Annotated[str | None, typer.Option(help="With this error code or SQLSTATE.")] = None,
    fingerprint: Annotated[
        str | None, typer.Option(help="Of one kind: see `failures stats`.")
    ] = None,
    since: Annotated[
        Any,
        typer.Option(
            parser=render.moment, metavar="TIME", help="Recorded since 45m, 2h, 7d, 2026-11-30 …"
        ),
    ] = None,
    until: Annotated[
        Any, typer.Option(parser=render.moment, metavar="TIME", help="Recorded before that.")
    ] = None,
) -> Scope:
    return Scope(
        organization=organization,
        shop=shop if shop is None else shop.strip().lower(),
        topic=topic,
        error_type=error_type,
        code=code,
        fingerprint=fingerprint,
        since=since,
        until=until,
    )


def scoped(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options that say which failed events; it gets them as its `scope`."""
    options = signature(_said).parameters
    own = [each for each in signature(command).parameters.values() if each.name != "scope"]

    @wraps(command)
    def call(**given: Any) -> None:
        said = {name: given.pop(name) for name in options}
        command(scope=_said(**said), **given)

    parameters = [each.replace(kind=Parameter.KEYWORD_ONLY) for each in (*own, *options.values())]
    call.__signature__ = Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    return call


def explicit(scope: Scope, ids: list[int] | None, *, all_: bool) -> Scope:
    """The scope of a change: something must be said, or --all. Raises ConfigurationError.

    A state is no scope: `--status failed` is everything that was given up.
    """
    named = Scope(**scope.said(), ids=tuple(ids) if ids else None)
    if bool(named.said()) == all_:
        raise ConfigurationError(
            "Say which failed events: ids, or options such as --shop and --fingerprint; "
            "or --all, and nothing else."
        )
    return named


def operator(actor: str, reason: str) -> Operator:
    """Who does it: `actor`, or else this user on this machine. Raises ConfigurationError."""
    if not reason.strip():
        raise ConfigurationError("Say --reason: it is kept with what you do.")
    return Operator(actor=actor.strip() or you(), reason=reason.strip())


def you() -> str:
    """This user on this machine."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user without a name, as in a container
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"
