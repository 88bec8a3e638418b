"""Mail by Microsoft Graph: tokens, answers and faults, each with its verdict."""

import base64
import email
from collections.abc import Iterator
from dataclasses import replace
from email import policy
from typing import Any
from urllib.parse import parse_qs

import pytest

from shared.notifier import graph
from shared.notifier.model import Result
from tests.notifier import post
from tests.notifier.servers import (
    Fault,
    Http,
    answer,
    close,
    drip,
    hang,
    raw,
    silent_after,
)

SENT, TRANSIENT, PERMANENT = Result.SENT, Result.TRANSIENT, Result.PERMANENT

TOKEN, SEND = "/token", "/sendMail"
GOOD_TOKEN = answer(200, {"access_token": "token-one", "expires_in": 3599})
OTHER_TOKEN = answer(200, {"access_token": "token-two", "expires_in": 3599})
TAKEN = answer(202)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> post.Authority:
    return post.authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(autouse=True)
def no_token_is_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    graph._tokens._kept.clear()
    yield
    graph._tokens._kept.clear()


class Microsoft(Http):
    """Entra and Graph in one."""

    def __init__(self, authority: post.Authority, **answers: list[bytes | Fault]) -> None:
        given = {TOKEN: answers.get("token", [GOOD_TOKEN]), SEND: answers.get("send", [TAKEN])}
        super().__init__(given, tls=authority.context())
        self._ca_file = authority.ca_file

    @property
    def profile(self) -> post.Profile:
        return post.graph(self.origin, self._ca_file)

    @property
    def calls(self) -> tuple[int, int]:
        """How often a token was asked for, and how often something was to be sent."""
        return len(self.asked(TOKEN)), len(self.asked(SEND))


def said(status: int, error: str, *numbers: int, **headers: str) -> bytes:
    """The authority's refusal."""
    body = {"error": error, "error_description": "AADSTS: planted", "error_codes": list(numbers)}
    return answer(status, body, **headers)


def test_a_mail_is_taken(authority: post.Authority) -> None:
    with Microsoft(authority) as server:
        verdict = post.attempt(server.profile)
    assert (verdict.result, verdict.code) == (SENT, "graph_202")
    token, send = server.requests
    assert token.path == "/contoso.example/oauth2/v2.0/token"
    assert parse_qs(token.body.decode()) == {
        "grant_type": ["client_credentials"],
        "client_id": ["11111111-2222-3333-4444-555555555555"],
        "client_secret": [post.PASSWORD],
        "scope": [f"{server.origin}/.default"],
    }
    assert send.path == "/v1.0/users/hook@example.com/sendMail"
    assert send.headers["authorization"] == "Bearer token-one"
    assert send.headers["content-type"] == "text/plain"
    mail = email.message_from_bytes(base64.b64decode(send.body), policy=policy.default)
    assert mail["subject"] == post.MESSAGE.subject
    assert mail["message-id"].startswith("<42.")


def test_only_those_who_are_pending_are_named(authority: post.Authority) -> None:
    with Microsoft(authority) as server:
        post.attempt(server.profile, post.to("ada", "bob", pending=("bob@example.com",)))
    wire = base64.b64decode(server.asked(SEND)[0].body)
    assert email.message_from_bytes(wire)["to"] == "bob@example.com"


@pytest.mark.parametrize(
    ("reply", "result", "code"),
    [
        (answer(200), SENT, "graph_200"),
        (answer(202, Retry_After="60"), SENT, "graph_202"),
        *((answer(status), PERMANENT, f"graph_{status}") for status in (301, 302, 307, 308)),
        *(
            (answer(status, {"error": {"code": "Planted"}}), PERMANENT, f"graph_{status}")
            for status in (400, 402, 403, 404, 405, 406, 410, 411, 412, 413, 414, 415, 418, 422)
        ),
        *(
            (answer(status), TRANSIENT, f"graph_{status}")
            for status in (408, 409, 423, 425, 429, 500, 501, 502, 503, 504, 507, 509)
        ),
        (answer(503, "<html><body>Later</body></html>"), TRANSIENT, "graph_503"),
        (answer(400, '["no", "object"]'), PERMANENT, "graph_400"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", PERMANENT, "graph_101"),
        (b"no http at all\r\n\r\n", TRANSIENT, "http_protocol"),
        (b"", TRANSIENT, "http_protocol"),
    ],
)
def test_each_answer_of_graph_has_its_verdict(
    authority: post.Authority, reply: bytes, result: Result, code: str
) -> None:
    with Microsoft(authority, send=[reply]) as server:
        verdict = post.attempt(server.profile)
    if not reply:  # RemoteDisconnected is an error of HTTP and of the network
        code = verdict.code
    assert (verdict.result, verdict.code) == (result, code)
    assert server.calls == (1, 1)
    unclear = ("graph_500", "graph_502", "graph_504", "http_protocol", "network")
    assert verdict.ambiguous == (verdict.code in unclear)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("120", 120),
        ("0", 0),
        ("1.5", 1.5),
        ("-5", None),
        ("nan", None),
        ("inf", None),
        ("soon", None),
        ("Mon, 30 Nov 2020 12:00:00 GMT", 0),
    ],
)
def test_how_long_to_wait_is_read_in_every_form(
    authority: post.Authority, header: str, seconds: float | None
) -> None:
    with Microsoft(authority, send=[answer(429, Retry_After=header)]) as server:
        assert post.attempt(server.profile).retry_after == seconds


@pytest.mark.parametrize(
    ("reply", "result", "code"),
    [
        *((answer(status), TRANSIENT, f"token_{status}") for status in (408, 429, 500, 502, 503)),
        (said(400, "temporarily_unavailable"), TRANSIENT, "token_400"),
        (said(400, "server_error"), TRANSIENT, "token_400"),
        (said(401, "invalid_client", 7000215), PERMANENT, "token_secret"),
        (said(401, "invalid_client", 7000222), PERMANENT, "token_secret"),
        (said(400, "unauthorized_client", 700016), PERMANENT, "token_400"),
        (said(400, "invalid_request", 90002), PERMANENT, "token_400"),
        (said(400, "invalid_scope", 70011), PERMANENT, "token_400"),
        (said(400, "invalid_resource", 500011), PERMANENT, "token_400"),
        (said(400, "unsupported_grant_type"), PERMANENT, "token_400"),
        (said(400, "invalid_grant", 53003), PERMANENT, "token_400"),
        *(
            (said(400, "invalid_request", number), TRANSIENT, "token_400")
            for number in (90006, 90012, 90024, 90033, 90055, 90090, 90091)
        ),
        (said(400, "invalid_request", 90033, 90002), PERMANENT, "token_400"),
        (answer(200, {}), TRANSIENT, "token_protocol"),
        (answer(200, "<html>"), TRANSIENT, "token_protocol"),
        (answer(200, {"access_token": "a\r\nHost: b"}), TRANSIENT, "token_protocol"),
        (answer(204), TRANSIENT, "token_204"),
        (answer(302, Location="https://localhost/elsewhere"), PERMANENT, "token_302"),
        (answer(403), PERMANENT, "token_403"),
        (answer(404, "[" * 100_000), PERMANENT, "token_404"),
    ],
)
def test_each_answer_of_the_authority_has_its_verdict(
    authority: post.Authority, reply: bytes, result: Result, code: str
) -> None:
    with Microsoft(authority, token=[reply]) as server:
        verdict = post.attempt(server.profile)
    assert (verdict.result, verdict.code, verdict.ambiguous) == (result, code, False)
    assert server.calls == (1, 0)


def test_a_token_is_used_for_the_next_mail_too(authority: post.Authority) -> None:
    with Microsoft(authority) as server:
        assert [post.attempt(server.profile).result for _ in range(2)] == [SENT, SENT]
    assert server.calls == (1, 2)


@pytest.mark.parametrize("seconds", [0, 300, "299", None, "soon"])
def test_a_token_that_ends_soon_is_not_kept(authority: post.Authority, seconds: Any) -> None:
    token = answer(200, {"access_token": "short", "expires_in": seconds})
    with Microsoft(authority, token=[token]) as server:
        assert [post.attempt(server.profile).result for _ in range(2)] == [SENT, SENT]
    assert server.calls == (2, 2)


def test_a_token_is_not_used_for_another_secret(authority: post.Authority) -> None:
    with Microsoft(authority) as server:
        for secret in ("one", "two"):
            post.attempt(server.profile, resolve=lambda _, secret=secret: secret)
    assert server.calls == (2, 2)


def test_a_token_that_is_refused_is_replaced_once_within_the_attempt(
    authority: post.Authority,
) -> None:
    with Microsoft(
        authority, token=[GOOD_TOKEN, OTHER_TOKEN], send=[TAKEN, answer(401), TAKEN]
    ) as server:
        assert [post.attempt(server.profile).code for _ in range(2)] == ["graph_202"] * 2
    assert server.calls == (2, 3)
    used = [request.headers["authorization"] for request in server.asked(SEND)]
    assert used == ["Bearer token-one", "Bearer token-one", "Bearer token-two"]


def test_a_second_refusal_is_a_permanent_failure(authority: post.Authority) -> None:
    with Microsoft(authority, send=[answer(401)]) as server:
        verdict = post.attempt(server.profile)
    assert (verdict.result, verdict.code) == (PERMANENT, "graph_401")
    assert server.calls == (2, 2)


@pytest.mark.parametrize(
    ("reply", "result", "code"),
    [
        (answer(503, Retry_After="7"), TRANSIENT, "token_503"),
        (said(401, "invalid_client"), PERMANENT, "token_secret"),
    ],
)
def test_a_refresh_that_fails_decides(
    authority: post.Authority, reply: bytes, result: Result, code: str
) -> None:
    with Microsoft(authority, token=[GOOD_TOKEN, reply], send=[answer(401)]) as server:
        verdict = post.attempt(server.profile)
    assert (verdict.result, verdict.code) == (result, code)
    assert server.calls == (2, 1)


def test_a_secret_that_was_rotated_is_read_once_more(authority: post.Authority) -> None:
    refused = said(401, "invalid_client", 7000215)
    with Microsoft(authority, token=[refused, GOOD_TOKEN]) as server:
        verdict = post.attempt(server.profile, resolve=lambda _: "old", renew=lambda _: "new")
    assert verdict.result is SENT
    secrets = [parse_qs(r.body.decode())["client_secret"] for r in server.asked(TOKEN)]
    assert secrets == [["old"], ["new"]]


def test_a_new_secret_that_is_refused_too_is_not_tried_again(authority: post.Authority) -> None:
    with Microsoft(authority, token=[said(401, "invalid_client")]) as server:
        verdict = post.attempt(server.profile, resolve=lambda _: "old", renew=lambda _: "new")
    assert (verdict.result, verdict.code) == (PERMANENT, "token_secret")
    assert server.calls == (2, 0)


@pytest.mark.parametrize(
    ("answers", "ambiguous"),
    [
        ({"token": [hang]}, False),
        ({"token": [drip(b"HTTP/1.1 200 Word")]}, False),
        ({"token": [drip(b"x", after=b"HTTP/1.1 200 Word\r\nX-Header: ")]}, False),
        ({"send": [hang]}, True),
        ({"send": [drip(b"HTTP/1.1 202 Accepted")]}, True),
        ({"send": [drip(b"x", after=b"HTTP/1.1 400 Word\r\nX-Header: ")]}, False),
        ({"send": [answer(401)], "token": [GOOD_TOKEN, hang]}, False),
    ],
)
def test_a_service_that_hangs_or_drips_costs_no_more_than_the_timeout(
    authority: post.Authority, answers: dict[str, Any], ambiguous: bool
) -> None:
    with Microsoft(authority, **answers) as server:
        verdict = post.attempt(server.profile, seconds=2)
        assert (verdict.result, verdict.code) == (TRANSIENT, "timeout")
        assert verdict.ambiguous == ambiguous


@pytest.mark.parametrize(
    "reply",
    [
        raw(b"HTTP/1.1 202 Accepted\r\nX-Trunca"),
        silent_after(b"HTTP/1.1 202 Accepted\r\nX-Header: "),
        drip(b"x", after=b"HTTP/1.1 202 Accepted\r\nContent-Length: 9000\r\n\r\n"),
    ],
    ids=["truncated", "silent", "body"],
)
def test_a_status_that_arrived_in_time_decides_whatever_follows(
    authority: post.Authority, reply: Fault
) -> None:
    with Microsoft(authority, send=[reply]) as server:
        assert post.attempt(server.profile, seconds=2).code == "graph_202"


def test_a_connection_that_ends_without_an_answer_may_mean_anything(
    authority: post.Authority,
) -> None:
    with Microsoft(authority, send=[close]) as server:
        verdict = post.attempt(server.profile)
    assert (verdict.result, verdict.ambiguous) == (TRANSIENT, True)


def test_a_redirect_is_not_followed(authority: post.Authority) -> None:
    with Http({"/": [TAKEN]}, tls=authority.context()) as elsewhere:
        moved = answer(307, Location=f"{elsewhere.origin}/")
        with Microsoft(authority, send=[moved]) as server:
            verdict = post.attempt(server.profile)
    assert (verdict.result, verdict.code) == (PERMANENT, "graph_307")
    assert elsewhere.connections == 0


def test_no_answer_is_read_without_end(authority: post.Authority) -> None:
    large = answer(403, b"x" * 5_000_000)
    with Microsoft(authority, send=[large]) as server:
        verdict = post.attempt(server.profile)
    assert (verdict.result, verdict.code) == (PERMANENT, "graph_403")


def test_a_certificate_that_does_not_hold_is_a_permanent_failure(
    authority: post.Authority,
) -> None:
    with Http({TOKEN: [GOOD_TOKEN]}, tls=authority.context("elsewhere.example")) as server:
        verdict = post.attempt(post.graph(server.origin, authority.ca_file))
    assert (verdict.result, verdict.code) == (PERMANENT, "tls_certificate")
    assert not server.requests


@pytest.mark.parametrize("letter", ["x", "ß", "💥"])
def test_the_largest_body_fits_into_what_graph_takes(
    authority: post.Authority, letter: str
) -> None:
    body = letter * (1_000_000 // len(letter.encode()))
    with Microsoft(authority) as server:
        assert post.attempt(server.profile, replace(post.MESSAGE, body=body)).result is SENT


def test_neither_secret_nor_token_is_told(authority: post.Authority) -> None:
    echo = {"error": {"code": "Echo", "message": f"{post.PASSWORD} token-one swordfish%2F%2B+17"}}
    with Microsoft(authority, send=[answer(400, echo)]) as server:
        text = post.attempt(server.profile).text
    assert "Echo" in text
    assert "swordfish" not in text
    assert "token-one" not in text
