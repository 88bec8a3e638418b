"""Who may come in, and what is refused before anything is done."""

from urllib.parse import urlsplit

import pytest

from tests.console.conftest import Client
from tests.world import World

PAGES = ("/", "/failures", "/failures/1", "/kinds", "/notifications", "/privacy")


@pytest.mark.parametrize("path", PAGES)
def test_without_the_link_no_page_opens(stranger: Client, path):
    answer = stranger.get(path)
    assert answer.status == 403
    assert "terminal" in answer.said


def test_the_link_works_once_and_the_next_one_is_announced(client: Client):
    first, second = client.links
    other = Client(port=client.port, links=[first])
    assert other.get(urlsplit(first).path).status == 403
    assert other.get(urlsplit(second).path).status == 303
    assert client.get("/").status == 200


def test_a_guessed_link_or_cookie_opens_nothing(stranger: Client):
    assert stranger.get("/enter/" + "x" * 43).status == 403
    assert stranger.get("/", Cookie=f"hookledger-{stranger.port}=x").status == 403
    assert len(stranger.links) == 1


def test_the_cookie_is_for_this_page_only(stranger: Client):
    cookie = stranger.get(urlsplit(stranger.links[0]).path).headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert f"hookledger-{stranger.port}=" in cookie


@pytest.mark.parametrize("host", ["evil.example.com", "127.0.0.1", "localhost:1", "[::1]:80"])
def test_a_foreign_host_is_refused(client: Client, host):
    assert client.get("/", Host=host).status == 421
    assert client.get("/style.css", Host=host).status == 421
    assert client.get(urlsplit(client.links[-1]).path, Host=host).status == 421


def test_the_name_of_this_machine_is_none(client: Client):
    assert client.get("/", Host=f"localhost:{client.port}").status == 200


@pytest.mark.parametrize("path", ["/do/requeue", "/do/resolve", "/rehearse", "/failures/1"])
def test_a_form_that_is_not_ours_is_refused(world: World, client: Client, path):
    form = {"id": "1", "reason": "x"}
    assert client.ask("POST", path, form).status == 403
    assert client.ask("POST", path, form | {"form_token": "x" * 43}).status == 403
    foreign = form | {"form_token": client.token}
    assert client.ask("POST", path, foreign, Origin="http://evil.example.com").status == 403
    assert client.ask("POST", path, foreign, Origin="null").status == 403
    assert world.failed_event()["status"] == "pending"
    assert world.app("select * from subscriber_operatoraction") == []


def test_a_token_is_good_for_its_own_session_only(world: World, client: Client):
    other = Client(port=client.port, links=client.links)
    other.enter()
    other.token = client.token
    assert other.post("/do/resolve", id="1", reason="x").status == 403
    assert world.failed_event()["status"] == "pending"


@pytest.mark.parametrize("path", [*PAGES, "/style.css", "/none", "/do/requeue"])
def test_every_answer_forbids_what_a_browser_need_not_do(client: Client, path):
    headers = client.get(path).headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "script-src" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert "Werkzeug" not in headers["Server"]


@pytest.mark.parametrize("path", PAGES)
def test_nothing_is_done_by_following_a_link(world: World, client: Client, path):
    for action in ("requeue", "resolve"):
        assert client.get(f"/do/{action}?id=1&reason=x").status == 405
    assert "<script" not in client.get(path).text
    assert world.failed_event()["status"] == "pending"


def test_a_form_of_megabytes_is_refused(client: Client):
    assert client.post("/do/resolve", id="1", reason="x" * 2**20).status == 413
