"""notify: notifications and alerts, in an operator's hands."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Final

import typer
from psycopg import errors as pg

from cli import context, render
from cli.scope import Actor, operator
from shared import bootstrap, config, db, migrate
from shared.errors import ConfigurationError
from shared.notifier import channels, notices
from shared.notifier.notices import Notice, Notices
from shared.triage import Operator

_UNITS: Final = {"m": 60, "h": 3600, "d": 86400}


def span(text: str) -> float:
    """A length of time as people write it, 45m, 2h or 7d, in seconds."""
    if found := re.fullmatch(r"([1-9]\d{0,4})([mhd])", text.strip()):
        return int(found[1]) * _UNITS[found[2]]
    raise typer.BadParameter(f"{text} is no length of time. Say 45m, 2h or 7d.")


def one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    """A parser for one of a few words."""

    def parse(text: str) -> str:
        if text not in choices:
            raise typer.BadParameter(f"{text} is none of {', '.join(choices)}.")
        return text

    return parse


Key = Annotated[str, typer.Argument(metavar="ALERT", help="Its key: see `notify alerts`.")]
OfChannel = Annotated[str | None, typer.Option(help="Only in this channel.")]
Why = Annotated[str, typer.Option(help="Why; it is kept.")]
Severity = Annotated[
    str,
    typer.Option(
        parser=one_of(notices.SEVERITIES), metavar="SEVERITY", help="info, warning, error, critical"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

commands = typer.Typer(
    help="Notifications and alerts: list, show, send again, silence.", no_args_is_help=True
)


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.add_typer(commands, name="notify")


@contextmanager
def database() -> Iterator[db.BoundedConnection]:
    """The application database, with a notifier in it; raises ConfigurationError without one."""
    settings = config.load(context.environ(), require=("APP_DATABASE_URL",))
    with db.connect(bootstrap.application_target(settings), migrate.LIMITS) as connection:
        try:
            yield connection
        except (pg.UndefinedTable, pg.UndefinedColumn, pg.UndefinedFunction, pg.InvalidSchemaName):
            raise ConfigurationError(
                "The notifier is not there, or not up to date: run manage.py notifier install."
            ) from None


@commands.command("list")
def list_notices(
    status: Annotated[
        str | None,
        typer.Option(
            parser=one_of(notices.STATUSES), metavar="STATUS", help="As failed, sent, queued."
        ),
    ] = None,
    channel: Annotated[str | None, typer.Option(help="Only of this channel.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Rows at most.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List notifications, the newest first.

    Example: python manage.py notify list --status failed
    """
    with database() as connection:
        found = Notices(connection).find(status=status, channel=channel, limit=limit)
    if as_json:
        render.as_json(found)
        return
    table = render.table("id", "status", "when", "channel", "subject", wide=("channel", "subject"))
    for each in found:
        render.add(
            table, each.id, each.status, render.ago(each.created_at), each.channel, each.subject
        )
    if found:
        context.out.print(table)
    context.out.print(f"{len(found)} notification{'' if len(found) == 1 else 's'}")


@commands.command("show")
def show_notice(
    row: Annotated[int, typer.Argument(metavar="ID", min=1, help="The notification's id.")],
    as_json: AsJson = False,
) -> None:
    """Show a notification: its text, each attempt, and what the server replied.

    Example: python manage.py notify show 17
    """
    with database() as connection:
        known = Notices(connection)
        found = known.one(row)
        if found is None:
            raise ConfigurationError(f"There is no notification {row}.")
        attempts, deliveries = known.attempts(row), known.deliveries(row)
    if as_json:
        render.as_json(asdict(found) | {"attempts": attempts, "deliveries": deliveries})
        return
    context.out.print(render.grid(_facts(found)))
    for each in attempts:
        unsure = ", it may have arrived" if each.ambiguous else ""
        verdict = f"{each.verdict or 'under way'} {each.error_code or ''}".strip()
        context.out.print(
            f"\n[bold]Attempt {each.attempt}[/] {render.clock(each.started_at)}: {verdict}{unsure}"
        )
        if each.reply:
            context.out.print(render.printable(each.reply), markup=False)
    if deliveries:
        context.out.print("\n[bold]Recipients[/]")
        states = ((each.recipient, f"{each.state} {each.code}".strip()) for each in deliveries)
        context.out.print(render.grid(states))
    context.out.print("\n[bold]Text[/]")
    typer.echo(render.printable(found.body))


@commands.command("requeue")
def requeue_notices(
    *,
    ids: Annotated[list[int], typer.Argument(metavar="ID...", min=1, help="By their ids.")],
    reason: Why = "requeued by hand",
    actor: Actor = "",
    as_json: AsJson = False,
) -> None:
    """Send again what failed, expired or was invalid: as new notifications, with all retries.

    Example: python manage.py notify requeue 17 18
    """
    by = operator(actor, reason)
    with database() as connection:
        made = Notices(connection).requeue(ids, by)
    if as_json:
        render.as_json({str(old): new for old, new in made.items()})
        return
    for old, new in made.items():
        context.out.print(f"{old} is sent again as {new}")
    for left in sorted(set(ids) - set(made)):
        context.out.print(f"{left} is not there, or reached somebody, or is under way")


@commands.command("send")
def send_notice(
    *,
    channel: Annotated[str, typer.Argument(help="The channel's name.")],
    subject: Annotated[str, typer.Argument(help="One line.")],
    body: Annotated[str, typer.Argument(help="The text.")] = "",
    severity: Severity = "info",
    reason: Why = "sent by hand",
    actor: Actor = "",
    as_json: AsJson = False,
) -> None:
    """Queue a message of your own. The retry function or run_processor sends it.

    Example: python manage.py notify send ops "Back at 14:00" "The database moves."
    """
    by = operator(actor, reason)
    with database() as connection:
        if not channels.way(connection, channel).enabled:
            raise ConfigurationError(
                f"The channel {channel} is disabled: manage.py channels enable."
            )
        made = Notices(connection).send(channel, subject, body or subject, by, severity=severity)
    if as_json:
        render.as_json({"id": made})
    else:
        context.out.print(f"Queued as {made}")


@commands.command("alerts")
def list_alerts(
    every: Annotated[bool, typer.Option("--all", help="Those that are over too.")] = False,
    as_json: AsJson = False,
) -> None:
    """List alerts that fire: what is wrong, how much of it, and what was told.

    Example: python manage.py notify alerts
    """
    with database() as connection:
        found = Notices(connection).alerts(every=every)
    if as_json:
        render.as_json(found)
        return
    table = render.table(
        *("alert", "channel", "state", "severity", "count", "last", "told"),
        wide=("alert", "channel"),
        numbers=("count",),
    )
    for each in found:
        told = each.quiet or ("undelivered" if each.undelivered_at else "")
        render.add(
            table,
            *(each.dedupe_key, each.channel, each.state, each.severity, each.total),
            *(render.ago(each.last_seen), told or ("yes" if each.is_told else "not yet")),
        )
    if found:
        context.out.print(table)
    context.out.print(f"{len(found)} alert{'' if len(found) == 1 else 's'}")


@commands.command("silence")
def silence_alert(
    *,
    key: Key,
    seconds: Annotated[
        float, typer.Option("--for", parser=span, metavar="SPAN", help="So long: 45m, 2h, 7d.")
    ],
    reason: Why,
    channel: OfChannel = None,
    actor: Actor = "",
    as_json: AsJson = False,
) -> None:
    """Tell nothing of an alert for a time, not even its end. It is counted all the same.

    Example: python manage.py notify silence incident:acme --for 2h --reason "they know"
    """
    by = operator(actor, reason)
    _hush(key, "silenced", by, seconds=seconds, channel=channel, as_json=as_json)


@commands.command("acknowledge")
def acknowledge_alert(
    *,
    key: Key,
    reason: Why,
    seconds: Annotated[
        float | None,
        typer.Option("--for", parser=span, metavar="SPAN", help="So long; until it is over."),
    ] = None,
    channel: OfChannel = None,
    actor: Actor = "",
    as_json: AsJson = False,
) -> None:
    """Hear of an alert again only when it gets worse or is over.

    Example: python manage.py notify acknowledge incident:acme --reason "on it"
    """
    by = operator(actor, reason)
    _hush(key, "acknowledged", by, seconds=seconds, channel=channel, as_json=as_json)


@commands.command("unsilence")
def unsilence_alert(
    *,
    key: Key,
    reason: Why = "let it speak again",
    channel: OfChannel = None,
    actor: Actor = "",
    as_json: AsJson = False,
) -> None:
    """End a silence or an acknowledgement before its time.

    Example: python manage.py notify unsilence incident:acme
    """
    by = operator(actor, reason)
    with database() as connection:
        found = Notices(connection).unquiet(key, by, channel=channel)
    _tell(key, "no longer quiet", found, as_json=as_json)
    if not found and not as_json:
        context.out.print("It was not quiet.")


def _hush(
    key: str, how: str, by: Operator, *, seconds: float | None, channel: str | None, as_json: bool
) -> None:
    with database() as connection:
        found = Notices(connection).quiet(key, how, by, channel=channel, seconds=seconds)
    if not found:
        raise ConfigurationError(f"There is no alert {key}: see manage.py notify alerts.")
    lasts = "until it is over" if seconds is None else f"for {render.span(seconds)}"
    _tell(key, f"{how} {lasts}", found, as_json=as_json)


def _tell(key: str, what: str, found: list[str], *, as_json: bool) -> None:
    if as_json:
        render.as_json({"alert": key, "channels": found})
    elif found:
        context.out.print(
            render.printable(f"{key} is {what}: {', '.join(found)}"), markup=False, soft_wrap=True
        )


def _facts(found: Notice) -> list[tuple[str, object]]:
    left_out = found.partial and ", ".join(who for part in found.partial.values() for who in part)
    return [
        ("notification", found.id),
        ("status", found.status),
        ("channel", found.channel),
        ("severity", found.severity),
        ("kind", found.kind),
        ("alert", found.dedupe_key),
        ("subject", found.subject),
        ("attempts", found.attempts),
        ("queued", render.clock(found.created_at)),
        ("ended", render.clock(found.finished_at)),
        ("error", found.error_code),
        ("says", found.error),
        ("not reached", left_out),
    ]
