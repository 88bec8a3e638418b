"""One attempt as a whole: what is looked at, in which order, and what is told of it."""

import io
import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from shared import log, secrets
from shared.errors import SecretUnavailableError
from shared.notifier import deadline, references, transports
from shared.notifier.model import REPLY_CHARACTERS, Message, Profile, Result
from tests.notifier import post
from tests.notifier.servers import Smtp
from tests.secret_manager import SecretManager

TRANSIENT, PERMANENT = Result.TRANSIENT, Result.PERMANENT

VERSION = "projects/p/secrets/mail/versions/latest"


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    stream = io.StringIO()
    monkeypatch.setattr(log, "_stream", stream)
    return stream


@pytest.fixture
def vault(monkeypatch: pytest.MonkeyPatch) -> Iterator[SecretManager]:
    """A Secret Manager that this process asks."""
    with SecretManager() as server:
        monkeypatch.setattr(secrets.Vault, "_opened", lambda _: server.client)
        monkeypatch.setattr(secrets, "_vault", secrets.Vault())
        yield server


@pytest.mark.parametrize("settings", [None, "host", ["host"], 7, {}])
def test_settings_that_are_no_object_or_empty_are_a_malformed_profile(settings: Any) -> None:
    assert_malformed(Profile(name="mail", transport="smtp", settings=settings))


@pytest.mark.parametrize(
    "wrong",
    [
        {"host": ""},
        {"host": 7},
        {"host": None},
        {"host": "a..b"},
        {"host": "x" * 64 + ".example"},
        {"host": "mail.example.com:25"},
        {"host": "mail example"},
        {"host": "mail\r\n.example"},
        {"port": 0},
        {"port": 70000},
        {"port": -1},
        {"port": "25"},
        {"port": 25.5},
        {"port": True},
        {"tls": "ssl"},
        {"sender": "nobody"},
        {"sender": None},
        {"sender": "a@b@example.com"},
        {"sender": "a\r\nRCPT TO:<b@example.com>@example.com"},
        {"sender_name": "a\nBcc: b@example.com"},
        {"ca_file": 3},
        {"auth": "cram-md5"},
        {"username": "ada"},
        {"prot": 25},
    ],
)
def test_a_setting_that_is_missing_wrong_or_unknown_is_a_malformed_profile(
    wrong: dict[str, Any],
) -> None:
    settings = {"host": "mail.example.com", "sender": "hook@example.com"} | wrong
    assert_malformed(Profile(name="mail", transport="smtp", settings=settings))


def assert_malformed(profile: Profile) -> None:
    """A permanent failure, which a check finds first."""
    verdict = post.attempt(profile)
    assert (verdict.result, verdict.code) == (PERMANENT, "profile_malformed")
    assert transports.check(profile) == verdict.text


@pytest.mark.parametrize("seconds", [0, -1, 1.5, "30", None, True, float("nan")])
def test_a_timeout_that_is_no_whole_number_above_0_is_a_malformed_profile(seconds: Any) -> None:
    profile = post.smtp(25, timeout_seconds=seconds)
    assert post.attempt(profile).code == "profile_malformed"
    assert transports.check(profile)


@pytest.mark.parametrize(("given", "used"), [(1, 1), (30, 30), (120, 120), (121, 120), (500, 120)])
def test_a_timeout_is_120_seconds_at_most(given: int, used: int) -> None:
    asked = []

    def made(seconds: float) -> deadline.Deadline:
        asked.append(seconds)
        return deadline.Deadline(seconds)

    with Smtp() as server:
        profile = post.smtp(server.port, timeout_seconds=given)
        transports.attempt(profile, post.MESSAGE, resolve=str, deadline=made)
    assert used - 1 < asked[0] <= used


def test_a_timeout_is_30_seconds_unless_the_profile_says_otherwise() -> None:
    assert Profile(name="", transport="smtp", settings={}).timeout_seconds == 30


def test_an_unknown_transport_is_a_permanent_failure() -> None:
    profile = Profile(name="x", transport="pigeon", settings={})
    assert post.attempt(profile).code == "transport_unknown"
    assert post.attempt(profile).result is PERMANENT
    assert transports.check(profile)


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        ({"host": "mail.example.com", "tls": "none"}, True),
        ({"host": "127.0.0.1", "tls": "none"}, False),
        ({"host": "mail.example.com", "tls": "starttls"}, False),
    ],
)
def test_a_password_leaves_this_machine_encrypted_or_not_at_all(
    settings: dict[str, str], is_refused: bool
) -> None:
    given = settings | {"sender": "hook@example.com", "username": "ada"}
    profile = Profile(name="mail", transport="smtp", settings=given, secrets={"password": post.REF})
    assert bool(transports.check(profile)) == is_refused


@pytest.mark.parametrize(
    "reference",
    [
        "hunter2",
        "",
        "_env:DATABASE_URL",
        "_env:NOTIFIER_",
        "_env:NOTIFIER_a",
        "_env:NOTIFIER_A\n",
        "_env:XNOTIFIER_A",
        "_secret:projects/p/secrets/s",
        "_secret:projects/p/secrets/s/versions/newest",
        "_secret:projects/p/q/secrets/s/versions/1",
        f"_secret:{VERSION} ",
        "planted-password",
    ],
)
def test_only_references_of_the_notifiers_own_are_followed(reference: str) -> None:
    profile = replace(post.smtp(25, username="ada"), secrets={"password": reference})
    verdict = post.attempt(profile)
    assert (verdict.result, verdict.code) == (PERMANENT, "reference_forbidden")
    assert "planted" not in verdict.text
    assert transports.check(profile) == verdict.text
    with pytest.raises(references.ForbiddenReferenceError):
        references.resolver({"NOTIFIER_A": "x", "DATABASE_URL": "x"})(reference)


@pytest.mark.parametrize("environ", [{}, {"NOTIFIER_PASSWORD": ""}])
def test_a_variable_that_is_unset_or_empty_is_named(environ: dict[str, str]) -> None:
    verdict = post.attempt(post.smtp(25, username="ada"), resolve=references.resolver(environ))
    assert (verdict.result, verdict.code) == (PERMANENT, "env_unset")
    assert "NOTIFIER_PASSWORD" in verdict.text


def of_secret() -> Profile:
    return replace(post.smtp(25, username="ada"), secrets={"password": f"_secret:{VERSION}"})


@pytest.mark.parametrize(
    ("status", "result", "code"),
    [
        (grpc.StatusCode.NOT_FOUND, PERMANENT, "secret_refused"),
        (grpc.StatusCode.PERMISSION_DENIED, PERMANENT, "secret_refused"),
        (grpc.StatusCode.INVALID_ARGUMENT, PERMANENT, "secret_refused"),
        (grpc.StatusCode.FAILED_PRECONDITION, PERMANENT, "secret_refused"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, TRANSIENT, "secret_unavailable"),
        (grpc.StatusCode.INTERNAL, TRANSIENT, "secret_unavailable"),
        (grpc.StatusCode.UNAVAILABLE, TRANSIENT, "secret_unavailable"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, TRANSIENT, "secret_unavailable"),
    ],
)
def test_each_answer_of_secret_manager_has_its_verdict(
    vault: SecretManager, status: grpc.StatusCode, result: Result, code: str
) -> None:
    vault.refuses = status
    verdict = post.attempt(of_secret(), resolve=references.resolver({}))
    assert (verdict.result, verdict.code) == (result, code)
    assert "planted" not in verdict.text


def test_an_empty_secret_is_a_permanent_failure(vault: SecretManager) -> None:
    vault.secrets[VERSION] = b" \n"
    verdict = post.attempt(of_secret(), resolve=references.resolver({}))
    assert (verdict.result, verdict.code) == (PERMANENT, "secret_refused")


def test_a_secret_is_remembered_and_read_past_the_memory_when_asked(vault: SecretManager) -> None:
    vault.secrets[VERSION] = b"old"
    remembered, fresh = references.resolver({}), references.resolver({}, is_fresh=True)
    assert remembered(f"_secret:{VERSION}") == "old"
    vault.secrets[VERSION] = b"new"
    assert (remembered(f"_secret:{VERSION}"), fresh(f"_secret:{VERSION}")) == ("old", "new")


def test_a_secret_that_is_not_given_in_time_costs_no_more_than_the_timeout(
    vault: SecretManager,
) -> None:
    vault.is_silent = True
    profile = replace(of_secret(), timeout_seconds=1)
    verdict = post.attempt(profile, resolve=references.resolver({}))
    vault.speak()
    assert verdict.result is TRANSIENT
    assert verdict.code in ("timeout", "secret_unavailable")


def refuse(_: str) -> str:
    raise SecretUnavailableError("planted")


@pytest.mark.parametrize(
    ("profile", "resolve", "message", "code"),
    [
        (post.smtp(0, username="ada"), refuse, post.to(), "profile_malformed"),
        (post.smtp(25, username="ada"), refuse, post.to(), "secret_unavailable"),
        (post.smtp(25, username="ada"), str, post.to(), "message_malformed"),
    ],
)
def test_profile_comes_before_secrets_and_secrets_before_the_message(
    profile: Profile, resolve: Callable[[str], str], message: Message, code: str
) -> None:
    assert post.attempt(profile, message, resolve=resolve).code == code


@pytest.mark.parametrize(
    "message",
    [
        post.to(),
        post.to("ada", pending=()),
        post.to("ada", "no body"),
        post.to("ada", "bob@example.com\r\nDATA\r\n"),
        post.to("ada", recipients=("",), pending=("",)),
        post.to("ada", recipients=(7,), pending=(7,)),
        *(
            post.to("ada", subject=subject)
            for subject in ("a\nBcc: b", "a\rb", "a\0b", "a\ud800b", "a\u2028b", "x" * 2000, None)
        ),
        *(post.to("ada", body=body) for body in (None, b"bytes", "x" * 1_000_001, "ß" * 500_001)),
    ],
    ids=lambda m: repr((m.recipients, m.subject, m.body))[:60],
)
def test_a_malformed_message_is_a_permanent_failure_and_nobody_is_asked(message: Message) -> None:
    with Smtp() as server:
        verdict = post.attempt(post.smtp(server.port), message)
    assert (verdict.result, verdict.code) == (PERMANENT, "message_malformed")
    assert server.connections == 0


def test_an_error_of_our_own_is_worth_a_retry_and_is_logged_without_its_words(
    logged: io.StringIO,
) -> None:
    def lookup(*_: object, **__: object) -> list[object]:
        raise KeyError(post.PASSWORD)

    verdict = post.attempt(post.smtp(25), lookup=lookup)
    assert (verdict.result, verdict.code) == (TRANSIENT, "internal_error")
    line = json.loads(logged.getvalue())
    assert (line["message"], line["error_type"]) == ("notifier.sender_failed", "KeyError")
    assert "lookup" in line["stack_trace"]
    assert "swordfish" not in logged.getvalue() + verdict.text


@pytest.mark.parametrize("reply", ["plain", "url", "base64", "escaped", "command"])
def test_a_server_that_repeats_the_secret_is_not_quoted(reply: str, logged: io.StringIO) -> None:
    password = 'sword"fish/ 17'
    forms = {
        "plain": password,
        "url": "sword%22fish/%2017",
        "base64": "c3dvcmQiZmlzaC8gMTc=",
        "escaped": 'sword\\"fish/ 17',
        "command": "AGFkYQBzd29yZCJmaXNoLyAxNw==",
    }
    told = {"AUTH": f"535 not {forms[reply]} please"}
    with Smtp(told, extensions=("AUTH PLAIN",)) as server:
        profile = post.smtp(server.port, username="ada")
        verdict = post.attempt(profile, resolve=lambda _: password)
    assert "535 not … please" in verdict.text
    assert forms[reply] not in verdict.text + logged.getvalue()


def test_a_long_reply_is_cut_and_loses_its_control_characters() -> None:
    with Smtp({"MAIL": "550-\x1b[31mred " + "y" * 400 + "\r\n550 " + "z" * 400}) as server:
        text = post.attempt(post.smtp(server.port)).text
    assert "\x1b" not in text
    assert len(text) == REPLY_CHARACTERS


def test_a_certificate_file_that_cannot_be_read_is_a_malformed_profile(tmp_path: Any) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    for ca_file in (str(broken), str(tmp_path / "missing.pem")):
        profile = post.smtp(25, ca_file=ca_file)
        assert post.attempt(profile).code == "profile_malformed"
        assert transports.check(profile) is None  # it may be there where the processor runs


def test_a_check_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(socket, "socket", asked)
    monkeypatch.setattr(secrets, "resolve", asked)
    assert transports.check(post.smtp(25, username="ada")) is None
    assert transports.check(post.graph("https://localhost:1", "ca.pem")) is None
    assert transports.check(post.webhook("https://example.com/hook")) is None
