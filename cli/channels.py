"""channels: where notifications go, and how they leave."""

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer

from cli import context, render
from cli.notify import Why, database, one_of, span
from cli.scope import Actor, operator
from shared.errors import ConfigurationError
from shared.notifier import channels, notices, references, transports
from shared.notifier.channels import New, Way
from shared.notifier.model import Message, Result, Verdict
from shared.notifier.notices import Notices

SUBJECT: Final = "A test of Hookledger's notifier"
BODY: Final = "Whoever reads this is told when Hookledger needs somebody.\n"

_TLS: Final = ("starttls", "tls", "none")
_TLS_PORT: Final = 465
_RESULTS: Final = {
    Result.SENT: "sent",
    Result.TRANSIENT: "failed, may pass",
    Result.PERMANENT: "failed",
}

Name = Annotated[str, typer.Argument(metavar="CHANNEL", help="The channel's name.")]
Ref = "_env:NOTIFIER_NAME or _secret:projects/P/secrets/S/versions/V"
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

commands = typer.Typer(
    help="Channels of the notifier: list, add, test, enable, disable, remove.",
    no_args_is_help=True,
)


def register(app: typer.Typer) -> None:
    """Adds the commands of this module."""
    app.add_typer(commands, name="channels")


@commands.command("list")
def list_channels(as_json: AsJson = False) -> None:
    """List channels: how they send, to whom, and how that went lately.

    Example: python manage.py channels list
    """
    with database() as connection:
        found = channels.find(connection)
    if as_json:
        render.as_json(found)
        return
    table = render.table(
        *("channel", "by", "state", "from", "to", "sent", "failed"), wide=("channel", "to")
    )
    for each in found:
        render.add(
            table,
            *(each.name, each.transport, "enabled" if each.enabled else "disabled"),
            *(each.min_severity or "", ", ".join(each.recipients)),
            *(render.ago(each.last_sent_at), render.ago(each.last_failed_at)),
        )
    if found:
        context.out.print(table)
    context.out.print(f"{len(found)} channel{'' if len(found) == 1 else 's'}")


@commands.command("add")
def add_channel(
    *,
    name: Name,
    smtp: Annotated[str, typer.Option(metavar="HOST[:PORT]", help="By this mail server.")] = "",
    user: Annotated[str, typer.Option(help="To log in there.")] = "",
    password_ref: Annotated[str, typer.Option(metavar="REF", help=Ref)] = "",
    tls: Annotated[
        str, typer.Option(parser=one_of(("", *_TLS)), metavar="TLS", help=", ".join(_TLS))
    ] = "",
    graph: Annotated[str, typer.Option(metavar="TENANT", help="By Microsoft 365.")] = "",
    client_id: Annotated[str, typer.Option(help="The application's, in that tenant.")] = "",
    client_secret_ref: Annotated[str, typer.Option(metavar="REF", help="Its secret.")] = "",
    webhook: Annotated[str, typer.Option(metavar="URL", help="As JSON to this address.")] = "",
    webhook_ref: Annotated[
        str, typer.Option(metavar="REF", help="The same; the address is a secret, as a chat's.")
    ] = "",
    signing_key_ref: Annotated[
        str, typer.Option(metavar="REF", help="Signs what goes to a webhook.")
    ] = "",
    to: Annotated[list[str] | None, typer.Option(help="A recipient; may be said twice.")] = None,
    sender: Annotated[str, typer.Option("--from", help="Mails come from; the user.")] = "",
    min_severity: Annotated[
        str | None,
        typer.Option(
            parser=one_of(notices.SEVERITIES), metavar="SEVERITY", help="Alerts from this one on."
        ),
    ] = None,
    max_per_hour: Annotated[int, typer.Option(min=1, help="Alerts.")] = 20,
    max_retries: Annotated[int, typer.Option(min=0, max=20, help="Of one message.")] = 3,
    heartbeat: Annotated[
        float | None,
        typer.Option(parser=span, metavar="SPAN", help="Say so if it had nothing to say: 1d."),
    ] = None,
    timeout: Annotated[int, typer.Option(min=1, max=120, help="Seconds for an attempt.")] = 30,
    reason: Why = "added by hand",
    actor: Actor = "",
    as_json: AsJson = False,
) -> None:
    """Make a channel: by SMTP, by Microsoft 365, or by a webhook. Secrets are given by reference.

    Example: python manage.py channels add ops --smtp smtp.example.com:587
    --user ops@example.com --password-ref _env:NOTIFIER_SMTP_PASSWORD --to ada@example.com
    """
    by = operator(actor, reason)
    if sum(map(bool, (smtp, graph, webhook or webhook_ref))) != 1:
        raise ConfigurationError("Say one of --smtp, --graph and --webhook (or --webhook-ref).")
    if smtp:
        transport, settings = "smtp", _smtp(smtp, user, tls, sender)
        secrets = {"password": password_ref}
    elif graph:
        transport = "graph"
        settings = {"tenant": graph, "client_id": client_id, "sender": sender}
        secrets = {"client_secret": client_secret_ref}
    else:
        transport, settings = "webhook", {"url": webhook}
        secrets = {"url": webhook_ref, "signing_key": signing_key_ref}
    new = New(
        name=name,
        transport=transport,
        settings={key: value for key, value in settings.items() if value},
        secrets={key: ref for key, ref in secrets.items() if ref},
        recipients=tuple(to or ()),
        min_severity=min_severity,
        max_per_hour=max_per_hour,
        max_retries=max_retries,
        heartbeat_seconds=heartbeat,
        timeout_seconds=timeout,
    )
    if transport != "webhook" and not new.recipients:
        raise ConfigurationError("Say who gets its mails: --to ada@example.com.")
    with database() as connection:
        channels.add(connection, new, by)
    _done(name, "added", as_json=as_json, more=f" Try it: python manage.py channels test {name}")


@commands.command("test")
def try_channel(
    *,
    name: Name,
    queued: Annotated[
        bool, typer.Option("--queued", help="By whoever carries out the queue, not from here.")
    ] = False,
    wait: Annotated[int, typer.Option(min=0, help="Seconds, with --queued.")] = 90,
    actor: Actor = "",
    as_json: AsJson = False,
) -> None:
    """Send one test message, and show the server's own reply. Exits 1 if nobody took it.

    From here it needs the secrets that the channel refers to; with --queued the retry function or
    run_processor sends it, with theirs.

    Example: python manage.py channels test ops
    """
    with database() as connection:
        way = channels.way(connection, name)
        if not queued:
            _show(_sent(name, way), as_json=as_json)
            return
        if not way.enabled:
            raise ConfigurationError(f"The channel {name} is disabled: manage.py channels enable.")
        known = Notices(connection)
        made = known.send(name, SUBJECT, BODY, operator(actor, "a test"), kind="test")
        until = time.monotonic() + wait
        while (found := known.one(made)) and not found.finished_at and time.monotonic() < until:
            time.sleep(min(1, wait))
        attempts = known.attempts(made)
    assert found is not None
    if as_json:
        render.as_json({"id": made, "status": found.status, "attempts": attempts})
    else:
        for each in attempts:
            context.out.print(
                render.printable(f"attempt {each.attempt}: {each.verdict} {each.reply or ''}"),
                markup=False,
            )
        context.out.print(f"Notification {made} is {found.status}.")
    if found.status != "sent":
        raise typer.Exit(1)


@commands.command("enable")
def enable_channel(
    *, name: Name, reason: Why = "enabled by hand", actor: Actor = "", as_json: AsJson = False
) -> None:
    """Let a channel carry notifications again.

    Example: python manage.py channels enable ops
    """
    with database() as connection:
        channels.enable(connection, name, operator(actor, reason))
    _done(name, "enabled", as_json=as_json)


@commands.command("disable")
def disable_channel(
    *, name: Name, reason: Why = "disabled by hand", actor: Actor = "", as_json: AsJson = False
) -> None:
    """Let a channel carry nothing. What is queued for it ends as invalid.

    Example: python manage.py channels disable ops --reason "the list is closed"
    """
    with database() as connection:
        channels.enable(connection, name, operator(actor, reason), enabled=False)
    _done(name, "disabled", as_json=as_json)


@commands.command("remove")
def remove_channel(
    *,
    name: Name,
    reason: Why = "removed by hand",
    actor: Actor = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete a channel, its profile and what it knew of alerts; notifications stay on record.

    Example: python manage.py channels remove ops
    """
    by = operator(actor, reason)
    with database() as connection:
        channels.way(connection, name)
        if not yes:
            typer.confirm(f"Delete the channel {name}?", abort=True, err=True)
        channels.remove(connection, name, by)
    _done(name, "removed", as_json=as_json)


def _smtp(server: str, user: str, tls: str, sender: str) -> dict[str, Any]:
    """The settings of a profile; port 465 speaks TLS at once."""
    host, port = server.strip("[]"), ""
    if server.count(":") == 1 or "]:" in server:
        host, _, port = server.rpartition(":")
    if port and not port.isdecimal():
        raise ConfigurationError("--smtp is HOST or HOST:PORT.")
    if not sender and "@" not in user:
        raise ConfigurationError("Say --from: the address that its mails come from.")
    return {
        "host": host.strip("[]"),
        "port": int(port or 0),
        "tls": tls or ("tls" if port == str(_TLS_PORT) else ""),
        "username": user,
        "sender": sender or user,
    }


def _sent(name: str, way: Way) -> Verdict:
    """One attempt, from here."""
    environ: Mapping[str, str] = context.environ()
    message = Message(
        notification_id=0,
        subject=SUBJECT,
        body=BODY,
        recipients=way.recipients,
        pending=way.recipients,
        created_at=datetime.now(UTC),
        channel=name,
        kind="test",
    )
    with context.err.status("Sending"):
        return transports.attempt(
            way.profile, message, resolve=references.resolver(environ, is_fresh=True)
        )


def _show(verdict: Verdict, *, as_json: bool) -> None:
    if as_json:
        render.as_json(verdict)
    else:
        left_out = {
            who: f"{made.acceptance} {made.code}" for who, made in verdict.recipients.items()
        }
        context.out.print(
            render.grid(
                [
                    ("result", _RESULTS[verdict.result]),
                    ("code", verdict.code),
                    ("reply", verdict.text),
                    *left_out.items(),
                ]
            )
        )
    if verdict.result is not Result.SENT:
        raise typer.Exit(1)


def _done(name: str, what: str, *, as_json: bool, more: str = "") -> None:
    if as_json:
        render.as_json({"channel": name, "state": what})
    else:
        context.out.print(f"{render.printable(name)} is {what}.{more}", markup=False)
