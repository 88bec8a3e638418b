"""Mail over SMTP: each answer and each fault has its verdict, and nobody gets a mail twice."""

import base64
import email
import errno
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email import policy
from pathlib import Path

import pytest
import trustme
from aiosmtpd.controller import Controller
from aiosmtpd.handlers import Sink

from shared.notifier import smtp
from shared.notifier.model import Acceptance, Result
from tests.notifier import post
from tests.notifier.servers import (
    Fault,
    Fixed,
    Peer,
    Reply,
    Smtp,
    close,
    drip,
    hang,
    ignore,
    reset,
    silent_after,
)

SENT, TRANSIENT, PERMANENT = Result.SENT, Result.TRANSIENT, Result.PERMANENT
ACCEPTED, REFUSED, PENDING = Acceptance.ACCEPTED, Acceptance.REFUSED, Acceptance.PENDING

BASIC_AUTH_IS_OFF = "550 5.7.30 Basic authentication is not supported for Client Submission"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> post.Authority:
    return post.authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    """No attempt leaves a thread behind."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive(), thread


@pytest.mark.parametrize(
    ("command", "reply", "result", "code"),
    [
        ("GREETING", "421 busy", TRANSIENT, "smtp_421"),
        ("GREETING", "554 go away", PERMANENT, "smtp_554"),
        ("GREETING", "HTTP/1.1 400 Bad Request", TRANSIENT, "smtp_protocol"),
        ("GREETING", "999 what", TRANSIENT, "smtp_protocol"),
        ("GREETING", "220 " + "x" * 9000, TRANSIENT, "smtp_protocol"),
        ("GREETING", close, TRANSIENT, "smtp_disconnected"),
        ("EHLO", "421 busy", TRANSIENT, "smtp_421"),
        ("EHLO", "502 what", PERMANENT, "smtp_502"),
        ("MAIL", "451 later", TRANSIENT, "smtp_451"),
        ("MAIL", "421 busy", TRANSIENT, "smtp_421"),
        ("MAIL", "550 no", PERMANENT, "smtp_550"),
        ("MAIL", "552 full", PERMANENT, "smtp_552"),
        ("MAIL", "354 what", TRANSIENT, "smtp_354"),
        ("MAIL", BASIC_AUTH_IS_OFF, PERMANENT, "smtp_550"),
        ("MAIL", close, TRANSIENT, "smtp_disconnected"),
        ("RCPT", "450 later", TRANSIENT, "smtp_450"),
        ("RCPT", "421 busy", TRANSIENT, "smtp_421"),
        ("RCPT", "550 no", PERMANENT, "smtp_550"),
        ("RCPT", "252 perhaps", TRANSIENT, "smtp_252"),
        ("RCPT", close, TRANSIENT, "smtp_disconnected"),
        ("DATA", "451 later", TRANSIENT, "smtp_451"),
        ("DATA", "554 no", PERMANENT, "smtp_554"),
        ("DATA", "250 what", TRANSIENT, "smtp_protocol"),
        ("DATA", close, TRANSIENT, "smtp_disconnected"),
        ("END", "451 later", TRANSIENT, "smtp_451"),
        ("END", "452 full", TRANSIENT, "smtp_452"),
        ("END", "550 spam", PERMANENT, "smtp_550"),
        ("END", "554 5.4.0 no", PERMANENT, "smtp_554"),
        ("END", "354 what", TRANSIENT, "smtp_354"),
        ("END", "700 what", TRANSIENT, "smtp_protocol"),
        ("END", close, TRANSIENT, "smtp_disconnected"),
    ],
)
def test_each_reply_has_its_verdict(command: str, reply: Reply, result: Result, code: str) -> None:
    with Smtp({command: reply}) as server:
        verdict = post.attempt(post.smtp(server.port))
    assert (verdict.result, verdict.code) == (result, code)
    assert verdict.text
    assert verdict.ambiguous == (command == "END" and reply is close)


@pytest.mark.parametrize(
    ("reply", "code", "result"),
    [
        ("454 later", "smtp_454", TRANSIENT),
        ("421 busy", "smtp_421", TRANSIENT),
        ("535 no", "smtp_535", PERMANENT),
        ("534 weak", "smtp_534", PERMANENT),
        ("535 5.7.139 basic authentication is disabled", "smtp_535", PERMANENT),
        ("200 what", "smtp_200", TRANSIENT),
    ],
)
@pytest.mark.parametrize("mechanism", ["plain", "login"])
def test_a_login_is_tried_once_by_one_mechanism(
    reply: str, code: str, result: Result, mechanism: str
) -> None:
    with Smtp({"AUTH": reply}, extensions=("AUTH CRAM-MD5 PLAIN LOGIN",)) as server:
        profile = post.smtp(server.port, username="ada", auth=mechanism)
        verdict = post.attempt(profile)
    assert (verdict.result, verdict.code) == (result, code)
    assert server.commands.count("AUTH") == 1


@pytest.mark.parametrize(("offered", "command"), [("PLAIN LOGIN", "PLAIN"), ("LOGIN", "LOGIN")])
def test_a_login_says_name_and_password_of_any_script(offered: str, command: str) -> None:
    with Smtp(extensions=(f"AUTH {offered}",)) as server:
        profile = post.smtp(server.port, username="ädä")
        assert post.attempt(profile, resolve=lambda _: "geheim-ß").result is SENT
    at = server.commands.index("AUTH")
    assert server.lines[at].startswith(f"AUTH {command}")
    encoded = server.lines[at].split(" ")[2:] or server.lines[at + 1 : at + 3]
    said = "\0".join(base64.b64decode(part).decode() for part in encoded)
    assert said.removeprefix("\0") == "ädä\0geheim-ß"


@pytest.mark.parametrize(
    ("extensions", "settings", "recipients"),
    [
        ((), {"tls": "starttls"}, ("ada",)),
        ((), {"username": "ada"}, ("ada",)),
        (("AUTH CRAM-MD5",), {"username": "ada"}, ("ada",)),
        (("AUTH LOGIN",), {"username": "ada", "auth": "plain"}, ("ada",)),
        ((), {}, ("ädä",)),
    ],
    ids=["starttls", "login", "mechanism", "chosen mechanism", "smtputf8"],
)
def test_what_the_server_does_not_offer_is_a_permanent_failure(
    extensions: tuple[str, ...], settings: dict[str, str], recipients: tuple[str, ...]
) -> None:
    with Smtp(extensions=extensions) as server:
        verdict = post.attempt(post.smtp(server.port, **settings), post.to(*recipients))
    assert (verdict.result, verdict.code) == (PERMANENT, "smtp_unsupported")
    assert not server.mails
    assert "AUTH" not in server.commands


@pytest.mark.parametrize(("reply", "result"), [("454 later", TRANSIENT), ("501 no", PERMANENT)])
def test_starttls_that_is_refused_sends_nothing_in_the_clear(reply: str, result: Result) -> None:
    with Smtp({"STARTTLS": reply}, extensions=("STARTTLS",)) as server:
        verdict = post.attempt(post.smtp(server.port, tls="starttls"))
    assert (verdict.result, verdict.code) == (result, f"smtp_{reply[:3]}")
    assert "MAIL" not in server.commands


@pytest.mark.parametrize("reply", [BASIC_AUTH_IS_OFF, "535 5.7.139 basic authentication is off"])
def test_microsofts_refusal_of_passwords_names_the_transport_that_works(reply: str) -> None:
    with Smtp({"AUTH": reply}, extensions=("AUTH LOGIN",)) as server:
        verdict = post.attempt(post.smtp(server.port, username="ada"))
    assert verdict.result is PERMANENT
    assert "transport graph" in verdict.text


@pytest.mark.parametrize("mode", ["starttls", "tls"])
def test_a_mail_leaves_over_tls(authority: post.Authority, mode: str) -> None:
    tls = authority.context()
    with Smtp(extensions=("STARTTLS",), tls=tls, is_implicit=mode == "tls") as server:
        settings = {"tls": mode, "host": "localhost", "ca_file": authority.ca_file}
        assert post.attempt(post.smtp(server.port, **settings)).code == "smtp_250"
    assert len(server.mails) == 1


@pytest.mark.parametrize("mode", ["starttls", "tls"])
@pytest.mark.parametrize("fault", ["untrusted", "wrong name", "expired"])
def test_a_certificate_that_does_not_hold_is_a_permanent_failure(
    authority: post.Authority, tmp_path: Path, mode: str, fault: str
) -> None:
    long_ago = {"not_after": datetime.now(UTC) - timedelta(days=2)}
    tls = authority.context(
        "elsewhere.example" if fault == "wrong name" else "localhost",
        **(long_ago if fault == "expired" else {}),
    )
    ca_file = authority.ca_file
    if fault == "untrusted":
        ca_file = str(tmp_path / "other.pem")
        trustme.CA().cert_pem.write_to_path(ca_file)
    with Smtp(extensions=("STARTTLS",), tls=tls, is_implicit=mode == "tls") as server:
        settings = {"tls": mode, "host": "localhost", "ca_file": ca_file}
        verdict = post.attempt(post.smtp(server.port, **settings))
    assert (verdict.result, verdict.code) == (PERMANENT, "tls_certificate")
    assert not server.mails


def test_tls_to_a_plain_port_is_a_permanent_failure() -> None:
    with Smtp() as server:
        verdict = post.attempt(post.smtp(server.port, tls="tls"))
    assert (verdict.result, verdict.code) == (PERMANENT, "tls_mode")


@pytest.mark.parametrize("mode", ["none", "starttls", "tls"])
@pytest.mark.parametrize("fault", [close, reset])
def test_a_connection_that_is_broken_off_is_worth_a_retry(mode: str, fault: Fault) -> None:
    with Fixed(fault) as server:
        verdict = post.attempt(post.smtp(server.port, tls=mode))
    assert verdict.result is TRANSIENT


def test_a_closed_port_is_worth_a_retry() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    verdict = post.attempt(post.smtp(port))
    assert (verdict.result, verdict.code) == (TRANSIENT, "network")


@pytest.mark.parametrize(
    ("number", "result"),
    [
        (socket.EAI_AGAIN, TRANSIENT),
        (socket.EAI_FAIL, TRANSIENT),
        (socket.EAI_SYSTEM, TRANSIENT),
        (socket.EAI_MEMORY, TRANSIENT),
        (socket.EAI_NONAME, TRANSIENT),
        (socket.EAI_NODATA, TRANSIENT),
        (socket.EAI_SERVICE, PERMANENT),
        (socket.EAI_FAMILY, PERMANENT),
    ],
)
def test_each_failure_to_look_a_name_up_has_its_verdict(number: int, result: Result) -> None:
    def lookup(*_: object, **__: object) -> list[object]:
        raise socket.gaierror(number, "planted")

    verdict = post.attempt(post.smtp(25), lookup=lookup)
    assert (verdict.result, verdict.code) == (result, "dns_failed")


@pytest.mark.parametrize(
    "number",
    [
        *(errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNREFUSED, errno.ECONNRESET),
        *(errno.ECONNABORTED, errno.EPIPE, errno.EMFILE, errno.ENOBUFS, errno.EADDRNOTAVAIL),
    ],
)
def test_each_failure_of_the_network_is_worth_a_retry(number: int) -> None:
    def lookup(*_: object, **__: object) -> list[object]:
        raise OSError(number, "planted")

    verdict = post.attempt(post.smtp(25), lookup=lookup)
    assert (verdict.result, verdict.code) == (TRANSIENT, "network")


def test_an_address_that_is_dead_leaves_time_for_the_next() -> None:
    with Smtp() as server, socket.create_server(("127.0.0.1", 0), backlog=0) as dead:
        kinds = (socket.AF_INET, socket.SOCK_STREAM, 0, "")
        filler = [socket.socket() for _ in range(3)]
        for sock in filler:  # until nobody is let in any more
            sock.setblocking(False)
            sock.connect_ex(dead.getsockname())
        addresses = [(*kinds, dead.getsockname()), (*kinds, ("127.0.0.1", server.port))]
        verdict = post.attempt(post.smtp(25), seconds=4, lookup=lambda *_, **__: addresses)
        for sock in filler:
            sock.close()
    assert verdict.result is SENT


@pytest.mark.parametrize(
    "replies",
    [
        {"GREETING": hang},
        {"GREETING": drip(b"220 ready")},
        {"EHLO": hang},
        {"MAIL": drip(b"250 ok")},
        {"RCPT": hang},
        {"DATA": drip(b"354 go on")},
        {"DATA": ignore},
    ],
    ids=["silent", "drip", "ehlo", "mail", "rcpt", "data", "deaf"],
)
def test_a_server_that_hangs_or_drips_costs_no_more_than_the_timeout(
    replies: dict[str, Reply],
) -> None:
    with Smtp(replies) as server:
        started = time.monotonic()
        verdict = post.attempt(post.smtp(server.port), seconds=0.4)
        assert time.monotonic() - started < post.HANG_GUARD_SECONDS
        assert (verdict.result, verdict.code, verdict.ambiguous) == (TRANSIENT, "timeout", False)
    assert not server.mails


def test_a_server_that_never_reads_costs_no_more_than_the_timeout() -> None:
    message = replace(post.MESSAGE, body="x" * 900_000)

    def stop_reading(peer: Peer) -> None:
        peer.say("354 go on")
        ignore(peer)

    with Smtp({"DATA": stop_reading}) as server:
        verdict = post.attempt(post.smtp(server.port), message, seconds=0.4)
        assert (verdict.result, verdict.code) == (TRANSIENT, "timeout")


@pytest.mark.parametrize("mode", ["none", "starttls", "tls"])
@pytest.mark.parametrize("answer", [b"250 taken", b"250-", b"2"])
def test_half_an_answer_to_the_final_dot_is_none_and_may_mean_anything(
    authority: post.Authority, mode: str, answer: bytes
) -> None:
    replies = {"END": drip(answer)}
    tls = authority.context()
    with Smtp(replies, extensions=("STARTTLS",), tls=tls, is_implicit=mode == "tls") as server:
        settings = {"tls": mode, "host": "localhost", "ca_file": authority.ca_file}
        verdict = post.attempt(post.smtp(server.port, **settings), seconds=2)
    assert (verdict.result, verdict.code, verdict.ambiguous) == (TRANSIENT, "timeout", True)
    assert len(server.mails) == 1


@pytest.mark.parametrize("mode", ["starttls", "tls"])
def test_a_handshake_that_hangs_costs_no_more_than_the_timeout(mode: str) -> None:
    replies = {"STARTTLS": silent_after(b"220 go on\r\n")}
    kind = Fixed(hang) if mode == "tls" else Smtp(replies, extensions=("STARTTLS",))
    with kind as server:
        verdict = post.attempt(post.smtp(server.port, tls=mode), seconds=0.4)
        assert (verdict.result, verdict.code) == (TRANSIENT, "timeout")


def test_a_name_that_is_never_found_costs_no_more_than_the_timeout() -> None:
    over = threading.Event()

    def lookup(*_: object, **__: object) -> list[object]:
        over.wait(post.HANG_GUARD_SECONDS)
        return []

    started = time.monotonic()
    verdict = post.attempt(post.smtp(25), seconds=0.2, lookup=lookup)
    assert time.monotonic() - started < post.HANG_GUARD_SECONDS
    over.set()
    assert (verdict.result, verdict.code) == (TRANSIENT, "timeout")


def test_a_name_that_is_found_too_late_connects_to_nobody() -> None:
    over, found = threading.Event(), threading.Event()
    with Smtp() as server:

        def lookup(*_: object, **__: object) -> list[object]:
            over.wait(post.HANG_GUARD_SECONDS)
            found.set()
            return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", server.port))]

        assert post.attempt(post.smtp(25), seconds=0.2, lookup=lookup).code == "timeout"
        over.set()
        assert found.wait(post.HANG_GUARD_SECONDS)
        assert server.connections == 0


@pytest.mark.parametrize(
    "farewell",
    ["221 bye", "500 what", "421 busy", "HTTP/1.1", close, reset, hang, drip(b"2")],
    ids=["221", "500", "421", "noise", "close", "reset", "hang", "drip"],
)
def test_what_is_sent_is_sent_whatever_the_farewell(
    farewell: Reply, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smtp, "FAREWELL_SECONDS", 0.2)
    with Smtp({"QUIT": farewell}) as server:
        started = time.monotonic()
        verdict = post.attempt(post.smtp(server.port))
        assert time.monotonic() - started < post.HANG_GUARD_SECONDS
    assert (verdict.result, verdict.code) == (SENT, "smtp_250")
    assert len(server.mails) == 1


@pytest.mark.parametrize(
    ("replies", "result", "code", "states"),
    [
        ({}, SENT, "smtp_250", (ACCEPTED, ACCEPTED)),
        ({"bob": "550 no"}, SENT, "smtp_250", (ACCEPTED, REFUSED)),
        ({"bob": "450 later"}, TRANSIENT, "smtp_450", (ACCEPTED, PENDING)),
        ({"bob": "252 perhaps"}, TRANSIENT, "smtp_252", (ACCEPTED, PENDING)),
        ({"ada": "550 no", "bob": "450 later"}, TRANSIENT, "smtp_450", (REFUSED, PENDING)),
        ({"ada": "550 no", "bob": "551 no"}, PERMANENT, "smtp_550", (REFUSED, REFUSED)),
        ({"ada": "450 a", "bob": "451 b"}, TRANSIENT, "smtp_451", (PENDING, PENDING)),
        ({"bob": "421 busy"}, TRANSIENT, "smtp_421", (PENDING, PENDING)),
        ({"ada": "550 no", "bob": "421 busy"}, TRANSIENT, "smtp_421", (REFUSED, PENDING)),
        ({"END": "451 later"}, TRANSIENT, "smtp_451", (PENDING, PENDING)),
        ({"END": "554 no"}, PERMANENT, "smtp_554", (REFUSED, REFUSED)),
        ({"bob": "550 no", "END": "451 later"}, TRANSIENT, "smtp_451", (PENDING, REFUSED)),
        ({"bob": "450 no", "END": "554 no"}, PERMANENT, "smtp_554", (REFUSED, PENDING)),
    ],
)
def test_each_recipient_has_an_answer(
    replies: dict[str, str], result: Result, code: str, states: tuple[Acceptance, Acceptance]
) -> None:
    told = {(f"RCPT:{k}@example.com" if k.islower() else k): v for k, v in replies.items()}
    with Smtp(told) as server:
        verdict = post.attempt(post.smtp(server.port))
    assert (verdict.result, verdict.code) == (result, code)
    found = {who: decision.acceptance for who, decision in verdict.recipients.items()}
    assert found == dict(zip(("ada@example.com", "bob@example.com"), states, strict=True))


def test_only_those_who_are_pending_are_offered_and_the_headers_stay() -> None:
    with Smtp() as server:
        post.attempt(post.smtp(server.port))
        post.attempt(post.smtp(server.port), post.to("ada", "bob", pending=("bob@example.com",)))
    first, second = server.mails
    assert (first.recipients, second.recipients) == (
        ("ada@example.com", "bob@example.com"),
        ("bob@example.com",),
    )
    assert first.data == second.data


def test_a_mail_arrives_with_the_headers_that_programs_look_at() -> None:
    with Smtp() as server:
        post.attempt(post.smtp(server.port, sender_name="Hookledger, Bücher"))
    mail = email.message_from_bytes(server.mails[0].data, policy=policy.default)
    assert mail["subject"] == post.MESSAGE.subject
    assert mail["from"].addresses[0].display_name == "Hookledger, Bücher"
    assert [a.addr_spec for a in mail["to"].addresses] == list(post.MESSAGE.recipients)
    assert mail["message-id"].startswith("<42.")
    assert mail["message-id"].endswith("@example.com>")
    assert mail["references"] == mail["in-reply-to"]
    assert mail["auto-submitted"] == "auto-generated"
    assert mail["date"].datetime == post.MESSAGE.created_at
    assert mail.get_content().replace("\r\n", "\n") == post.MESSAGE.body


def test_messages_of_one_matter_make_one_thread_under_names_of_their_own() -> None:
    with Smtp() as server:
        for id in (1, 2):
            post.attempt(post.smtp(server.port), replace(post.MESSAGE, notification_id=id))
    first, second = (email.message_from_bytes(m.data, policy=policy.default) for m in server.mails)
    assert first["references"] == second["references"]
    assert first["message-id"] != second["message-id"]


def test_an_independent_server_takes_the_mail(authority: post.Authority) -> None:
    taken = []

    class Handler(Sink):
        async def handle_DATA(self, server: object, session: object, envelope: object) -> str:
            taken.append(envelope)
            return "250 taken"

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    controller = Controller(
        Handler(),
        hostname="localhost",
        port=port,
        tls_context=authority.context(),
        require_starttls=True,
    )
    controller.start()
    try:
        settings = {"tls": "starttls", "host": "localhost", "ca_file": authority.ca_file}
        verdict = post.attempt(post.smtp(port, **settings))
    finally:
        controller.stop()
    assert verdict.result is SENT
    assert taken[0].rcpt_tos == list(post.MESSAGE.recipients)
