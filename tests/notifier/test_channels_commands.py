"""channels and notify on the command line: one step each, the server's own words, all on record."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.main import app
from shared.errors import HookledgerError
from tests.notifier.alerts import Alerts
from tests.notifier.relay import BUSY, REFUSED, Relay, Sender
from tests.notifier.servers import Smtp

COMMANDS = (
    *(f"channels {name}" for name in ("list", "add", "test", "enable", "disable", "remove")),
    *(f"notify {name}" for name in ("list", "show", "requeue", "send", "alerts")),
    *(f"notify {name}" for name in ("silence", "acknowledge", "unsilence")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a command came to."""

    returncode: int
    stdout: str
    stderr: str


def run(environ: dict[str, str], *words: str) -> Done:
    """A command, in this process: each test has several."""
    result = CliRunner().invoke(app, words, env={"TERM": "dumb", "COLUMNS": "80", **environ})
    error = result.exception
    if error and not isinstance(error, (SystemExit, HookledgerError)):
        raise error
    return Done(
        returncode=result.exit_code,
        stdout=result.stdout,
        stderr=result.stderr + (str(error) if isinstance(error, HookledgerError) else ""),
    )


def told(relay: Relay, *words: str, **environ: str) -> Any:
    """What a command that works says as JSON."""
    shown = run({"APP_DATABASE_URL": relay.url, **environ}, *words, "--json")
    assert shown.returncode == 0, shown.stderr
    return json.loads(shown.stdout)


def shown(relay: Relay, *words: str) -> str:
    """What a command that works says to people: it fits a terminal, and does nothing to it."""
    done = run({"APP_DATABASE_URL": relay.url}, *words)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "\x1b" not in done.stdout
    return done.stdout


def refused(relay: Relay, *words: str) -> str:
    done = run({"APP_DATABASE_URL": relay.url}, *words)
    assert done.returncode in (1, 2)
    return done.stderr


def actions(relay: Relay) -> list[tuple[str, str, str]]:
    return [
        (row["action"], row["actor"], row["reason"])
        for row in relay.rows("select * from subscriber_operatoraction order by id")
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_commands_help_shows_an_example_and_fits_a_terminal(command: str) -> None:
    done = run({}, *command.split(), "--help")
    assert done.returncode == 0
    assert f"Example: python manage.py {command}" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_channel_by_smtp_is_made_in_one_step(relay: Relay) -> None:
    told(
        relay,
        *("channels", "add", "ops", "--smtp", "smtp.example.com:587", "--user", "ops@example.com"),
        *("--password-ref", "_env:NOTIFIER_SMTP_PASSWORD", "--to", "ada@example.com"),
        *("--heartbeat", "1d", "--actor", "ada", "--reason", "set up"),
    )
    (profile,) = relay.rows("select * from notifier.profiles")
    assert (profile["transport"], profile["settings"]) == (
        "smtp",
        {
            "host": "smtp.example.com",
            "port": 587,
            "username": "ops@example.com",
            "sender": "ops@example.com",
        },
    )
    (secret,) = relay.rows("select key, ref from notifier.profile_secrets")
    assert secret == {"key": "password", "ref": "_env:NOTIFIER_SMTP_PASSWORD"}
    (channel,) = told(relay, "channels", "list")
    assert (channel["enabled"], channel["recipients"]) == (True, ["ada@example.com"])
    assert channel["heartbeat_seconds"] == 86400
    assert actions(relay) == [("channel add", "ada", "set up")]
    assert shown(relay, "channels", "list").splitlines()[1].split()[:3] == [
        "ops",
        "smtp",
        "enabled",
    ]


def test_a_channel_by_graph_and_one_by_webhook(relay: Relay) -> None:
    told(
        relay,
        *("channels", "add", "mail", "--graph", "contoso.example.com", "--client-id", "app"),
        *("--client-secret-ref", "_secret:projects/p/secrets/s/versions/latest"),
        *("--from", "ops@example.com", "--to", "ada@example.com", "--min-severity", "critical"),
    )
    told(
        relay,
        *("channels", "add", "chat", "--webhook-ref", "_env:NOTIFIER_CHAT_URL"),
        *("--signing-key-ref", "_env:NOTIFIER_CHAT_KEY", "--min-severity", "info"),
    )
    told(relay, "channels", "add", "hook", "--webhook", "https://hooks.example.com/a")
    found = {row["name"]: row for row in told(relay, "channels", "list")}
    assert {name: row["transport"] for name, row in found.items()} == {
        "chat": "webhook",
        "hook": "webhook",
        "mail": "graph",
    }
    assert found["mail"]["min_severity"] == "critical"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "Say one of --smtp"),
        (("--smtp", "a.example.com", "--webhook", "https://a.example.com"), "Say one of --smtp"),
        (("--smtp", "a.example.com", "--from", "a@example.com"), "--to"),
        (("--smtp", "a.example.com", "--to", "a@example.com"), "--from"),
        (
            ("--smtp", "a.example.com", "--from", "a@example.com", "--to", "nobody"),
            "is none",
        ),
        (*(("--smtp", "a", "--user", "u@example.com", "--to", "a@example.com"), "password"),),
        (
            ("--webhook-ref", "hunter2"),
            "_env:NOTIFIER_NAME",
        ),
        (("--webhook", "http://a.example.com"), "https"),
        (("--webhook", "https://a.example.com", "--min-severity", "loud"), "loud"),
    ],
)
def test_a_channel_that_could_never_send_is_refused(
    relay: Relay, words: tuple[str, ...], says: str
) -> None:
    message = refused(relay, "channels", "add", "ops", *words)
    assert says in message
    assert "hunter2" not in message
    assert told(relay, "channels", "list") == []


def test_a_name_is_given_once_and_free_again_after_a_removal(relay: Relay) -> None:
    add = ("channels", "add", "ops", "--webhook", "https://hooks.example.com/a")
    told(relay, *add)
    assert "already" in refused(relay, *add)
    assert "Delete the channel ops?" in refused(relay, "channels", "remove", "ops")
    told(relay, "channels", "remove", "ops", "--yes")
    told(relay, *add)
    assert "no channel nobody" in refused(relay, "channels", "remove", "nobody", "--yes")


def test_a_channel_is_disabled_and_enabled(relay: Relay) -> None:
    relay.channel()
    told(relay, "channels", "disable", "ops", "--reason", "quiet", "--actor", "ada")
    assert "disabled" in shown(relay, "channels", "list")
    assert "is disabled" in refused(relay, "notify", "send", "ops", "Hello")
    told(relay, "channels", "enable", "ops", "--actor", "ada")
    told(relay, "channels", "enable", "ops", "--actor", "ada")
    assert [action for action, _, _ in actions(relay)] == ["channel disable", "channel enable"]
    assert "no channel nobody" in refused(relay, "channels", "enable", "nobody")


def test_a_test_shows_the_servers_own_reply(relay: Relay) -> None:
    with Smtp() as server:
        settings = {"host": "127.0.0.1", "port": server.port, "tls": "none"}
        relay.channel(settings=settings | {"sender": "hook@example.com"})
        done = run({"APP_DATABASE_URL": relay.url}, "channels", "test", "ops")
        assert (done.returncode, "250" in done.stdout) == (0, True)
        assert [mail.recipients for mail in server.mails] == [("ops@example.com",)]
    done = run({"APP_DATABASE_URL": relay.url}, "channels", "test", "ops")
    assert (done.returncode, "network" in done.stdout) == (1, True)
    assert relay.rows("select * from notifier.notifications") == []


def test_a_queued_test_is_left_to_whoever_carries_out_the_queue(relay: Relay) -> None:
    relay.channel()
    done = run(
        {"APP_DATABASE_URL": relay.url}, *["channels", "test", "ops", "--queued", "--wait", "0"]
    )
    assert (done.returncode, done.stdout) == (1, "Notification 1 is queued.\n")
    assert relay.notification(1)["kind"] == "test"


def test_notifications_are_listed_by_status_and_channel(relay: Relay) -> None:
    relay.channel()
    relay.notify(subject="Good \x1b[2J [bold]" + "x" * 100)
    relay.run(Sender())
    relay.notify(subject="Bad")
    relay.run(Sender(REFUSED))
    assert [row["id"] for row in told(relay, "notify", "list")] == [2, 1]
    assert [row["id"] for row in told(relay, *["notify", "list", "--status", "failed"])] == [2]
    assert told(relay, *["notify", "list", "--channel", "other"]) == []
    assert shown(relay, "notify", "list").splitlines()[-1] == "2 notifications"
    assert "is none of" in refused(relay, *["notify", "list", "--status", "broken"])


def test_one_notification_with_its_attempts_and_the_replies(relay: Relay) -> None:
    relay.channel()
    id = relay.notify()
    relay.run(Sender(BUSY))
    text = shown(relay, "notify", "show", str(id))
    for words in ("Attempt 1", "retry smtp_451", "451 try later", "ops@example.com", "A body"):
        assert words in text
    assert told(relay, "notify", "show", str(id))["attempts"][0]["class_"] == "transient"
    assert "no notification 9" in refused(relay, "notify", "show", "9")


def test_what_reached_nobody_is_sent_again_as_a_new_one_and_nothing_else(relay: Relay) -> None:
    relay.channel()
    failed, sent = relay.notify(), relay.notify()
    relay.run(Sender(REFUSED, lambda message: Sender()(None, message)))  # type: ignore[arg-type]
    assert [relay.status(failed), relay.status(sent)] == ["failed", "sent"]
    made = told(relay, "notify", "requeue", str(failed), str(sent), "99", "--actor", "ada")
    assert made == {str(failed): 3}
    assert relay.run(Sender())["sent"] == 1
    assert [relay.status(failed), relay.status(3)] == ["failed", "sent"]
    assert actions(relay) == [("notify requeue", "ada", "requeued by hand")]


def test_a_message_of_ones_own_is_queued(relay: Relay) -> None:
    relay.channel()
    made = told(relay, *("notify", "send", "ops", "Hello", "All of you", "--severity", "warning"))
    found = relay.notification(made["id"])
    assert (found["subject"], found["body"], found["severity"]) == (
        "Hello",
        "All of you",
        "warning",
    )
    assert "no channel nobody" in refused(relay, "notify", "send", "nobody", "Hello")


def test_an_alert_is_silenced_acknowledged_and_lets_itself_be_heard_again(relay: Relay) -> None:
    alerts = Alerts(relay)
    alerts.open_incident()
    alerts.tick()
    assert "incident:acme" in shown(relay, "notify", "alerts")
    silence = ("notify", "silence", "incident:acme", "--reason", "known", "--actor", "ada")
    told(relay, *silence, "--for", "2h")
    (alert,) = told(relay, "notify", "alerts")
    assert (alert["quiet"], alert["quiet_by"], alert["quiet_reason"]) == (
        "silenced",
        "ada",
        "known",
    )
    assert "no length of time" in refused(relay, *silence, "--for", "soon")
    told(relay, *["notify", "acknowledge", "incident:acme", "--reason", "mine", "--actor", "ada"])
    (alert,) = told(relay, "notify", "alerts")
    assert (alert["quiet"], alert["quiet_until"]) == ("acknowledged", None)
    assert "acknowledged" in shown(relay, "notify", "alerts")
    told(relay, *["notify", "unsilence", "incident:acme", "--actor", "ada"])
    assert told(relay, "notify", "alerts")[0]["quiet"] is None
    assert [action for action, _, _ in actions(relay)] == [
        "notify silence",
        "notify acknowledge",
        "notify unsilence",
    ]
    assert "no alert nothing" in refused(
        relay, *["notify", "silence", "nothing", "--for", "2h", "--reason", "x"]
    )


def test_without_a_notifier_the_commands_say_how_to_get_one(relay: Relay) -> None:
    relay.rows("drop schema notifier cascade")
    for words in (("channels", "list"), ("notify", "list"), ("notify", "alerts")):
        assert "manage.py notifier install" in refused(relay, *words)
