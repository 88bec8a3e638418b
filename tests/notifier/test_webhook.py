"""Notifications to webhooks: what they carry, how they are signed, what the answers mean."""

import hashlib
import hmac
import json
from dataclasses import replace

import pytest

from shared.notifier import transports
from shared.notifier.model import Result
from tests.notifier import post
from tests.notifier.servers import Fault, Http, answer, drip, hang

SENT, TRANSIENT, PERMANENT = Result.SENT, Result.TRANSIENT, Result.PERMANENT

URL_REF, KEY_REF = "_env:NOTIFIER_CHAT_URL", "_env:NOTIFIER_CHAT_KEY"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> post.Authority:
    return post.authority(tmp_path_factory.mktemp("ca"))


def test_a_chat_finds_a_text_and_a_program_the_fields(authority: post.Authority) -> None:
    with Http({"/hook?room=1": [answer(200, "ok")]}, tls=authority.context()) as server:
        profile = post.webhook(f"{server.origin}/hook?room=1", authority.ca_file)
        verdict = post.attempt(profile, replace(post.MESSAGE, recipients=(), pending=()))
    assert (verdict.result, verdict.code, verdict.text) == (SENT, "webhook_200", "200 ok")
    (request,) = server.requests
    assert request.headers["content-type"] == "application/json; charset=utf-8"
    assert json.loads(request.body) == {
        "text": f"{post.MESSAGE.subject}\n\n{post.MESSAGE.body}",
        "subject": post.MESSAGE.subject,
        "body": post.MESSAGE.body,
        "severity": "error",
        "kind": "firing",
        "channel": "ops",
        "dedupe_key": "failed-events",
        "notification_id": 42,
        "created_at": "2026-11-30T12:00:00+00:00",
    }


def test_a_receiver_can_tell_our_requests_by_their_signature(authority: post.Authority) -> None:
    with Http({"/": [answer(204)]}, tls=authority.context()) as server:
        profile = post.webhook(
            f"{server.origin}/", authority.ca_file, secrets={"signing_key": KEY_REF}
        )
        assert post.attempt(profile, resolve=lambda _: "key").result is SENT
    (request,) = server.requests
    timestamp = request.headers["x-hookledger-timestamp"]
    expected = hmac.new(b"key", timestamp.encode() + b"." + request.body, hashlib.sha256)
    assert request.headers["x-hookledger-signature"] == f"v1={expected.hexdigest()}"
    assert timestamp.isdigit()


def test_the_attempts_of_one_notification_have_one_key(authority: post.Authority) -> None:
    with Http({"/": [answer(503), answer(200)]}, tls=authority.context()) as server:
        profile = post.webhook(f"{server.origin}/", authority.ca_file)
        for id in (42, 42, 43):
            post.attempt(profile, replace(post.MESSAGE, notification_id=id))
    first, second, other = [request.headers["idempotency-key"] for request in server.requests]
    assert first == second != other


@pytest.mark.parametrize(
    ("status", "result"),
    [
        *((status, SENT) for status in (200, 201, 202, 204)),
        *((status, PERMANENT) for status in (301, 302, 307, 400, 401, 403, 404, 410)),
        *((status, TRANSIENT) for status in (408, 425, 429, 500, 502, 503, 504)),
    ],
)
def test_each_answer_has_its_verdict(
    authority: post.Authority, status: int, result: Result
) -> None:
    with Http({"/": [answer(status, "no", Retry_After="9")]}, tls=authority.context()) as server:
        verdict = post.attempt(post.webhook(f"{server.origin}/", authority.ca_file))
    assert (verdict.result, verdict.code) == (result, f"webhook_{status}")
    assert verdict.retry_after == (None if result is SENT else 9)
    assert len(server.requests) == 1


@pytest.mark.parametrize("fault", [hang, drip(b"HTTP/1.1 200 OK")], ids=["hang", "drip"])
def test_a_receiver_that_hangs_or_drips_costs_no_more_than_the_timeout(fault: Fault) -> None:
    with Http({"/": [fault]}) as server:
        profile = post.webhook(f"http://localhost:{server.port}/")
        verdict = post.attempt(profile, seconds=2)
        assert (verdict.result, verdict.code, verdict.ambiguous) == (TRANSIENT, "timeout", True)


def test_a_url_that_is_a_secret_is_not_told(authority: post.Authority) -> None:
    echo = "no such hook: /services/T0/B1/planted-part?key=planted-key"
    with Http({"planted-key": [answer(404, echo)]}, tls=authority.context()) as server:
        profile = post.webhook("", authority.ca_file, secrets={"url": URL_REF})
        url = f"{server.origin}/services/T0/B1/planted-part?key=planted-key"
        verdict = post.attempt(profile, resolve=lambda _: url)
    assert (verdict.result, verdict.code) == (PERMANENT, "webhook_404")
    assert "planted" not in verdict.text


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/",
        "ftp://example.com/",
        "https://user:planted@example.com/",
        "https:///path",
        "https://example.com:planted/",
        "https://example.com:70000/",
        "https://example.com/a b",
        "https://example.com/\r\nplanted",
        "https://exa mple.com/",
        "//example.com/",
        "planted",
        "",
    ],
)
def test_a_url_that_is_none_is_a_malformed_profile(url: str) -> None:
    verdict = post.attempt(
        post.webhook("", secrets={"url": URL_REF}), resolve=lambda _: url or "planted"
    )
    assert (verdict.result, verdict.code) == (PERMANENT, "profile_malformed")
    assert "planted" not in verdict.text
    assert url not in verdict.text or not url
    given = transports.check(post.webhook(url))
    assert given
    assert "planted" not in given
