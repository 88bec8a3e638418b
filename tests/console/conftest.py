"""The console as a server on loopback, and a browser's part in talking to it."""

import http.client
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import unescape
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest

from cli.console import command
from tests.world import World

ACTOR = "jane@bench"


@dataclass(slots=True, kw_only=True)
class Answer:
    status: int
    headers: dict[str, str]
    text: str

    @property
    def said(self) -> str:
        """What a reader reads."""
        body = re.sub(r"<(title|svg|option).*?</\1>", " ", self.text, flags=re.S)
        return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())


@dataclass(slots=True, kw_only=True)
class Client:
    """Speaks HTTP to the console, with the cookie that it was given."""

    port: int
    links: list[str]
    cookie: str = ""
    token: str = field(default="", repr=False)

    def ask(self, method: str, path: str, form: Any = None, **headers: str) -> Answer:
        """One request as it is; header names with underscores for hyphens."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.cookie:
            sent.setdefault("Cookie", self.cookie)
        body = None
        if form is not None:
            body = urlencode(form)
            sent.setdefault("Content-Type", "application/x-www-form-urlencoded")
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            text = answer.read().decode()
            return Answer(status=answer.status, headers=dict(answer.headers), text=text)
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        """A page."""
        return self.ask("GET", path, **headers)

    def post(self, path: str, **form: str) -> Answer:
        """A form of a page of ours."""
        return self.ask("POST", path, {"form_token": self.token} | form)

    def enter(self) -> None:
        """Opens the link that is out."""
        answer = self.get(urlsplit(self.links[-1]).path)
        assert answer.status == 303
        self.cookie = answer.headers["Set-Cookie"].split(";")[0]
        found = re.search(r'name="form_token" value="([^"]+)"', self.get("/failures/1").text)
        self.token = found[1] if found else ""


@pytest.fixture
def stranger(world: World) -> Iterator[Client]:
    """Somebody who has not opened the link."""
    links: list[str] = []
    core = world.core  # the world may forget it
    server = command.serve(core, 0, actor=ACTOR, announce=links.append)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield Client(port=server.server_port, links=links)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        core.application.close()
        core.tenants.close()


@pytest.fixture
def client(world: World, stranger: Client) -> Client:
    """Somebody who has. The failure ledger has one pending row, id 1."""
    assert world.fail() == 1
    stranger.enter()
    return stranger
