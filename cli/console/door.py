"""Who may come in: whoever has the link from the terminal, once; and what every request must be.

The server hears on 127.0.0.1, where every user of the machine and every page in the browser can
knock. A link that works once keeps out the users, the Host header keeps out names that were made to
lead here, and a token in each form keeps out other sites.
"""

import hmac
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from flask import Flask, Response, abort, g, redirect, request
from werkzeug.wrappers import Response as Answer

OPEN_PATHS: Final = ("/style.css", "/favicon.ico")
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(slots=True, kw_only=True)
class Session:
    """One browser that came in; lives as long as the process."""

    form_token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    said: str = ""  # what the next page says first, of what was just done


class Door:
    """The link that is out, and the sessions that came of earlier ones."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        self._lock = threading.Lock()
        self._token = ""
        self._sessions: dict[str, Session] = {}

    def invite(self) -> None:
        """Makes a link that works once, and announces its path; the one before ends."""
        self._token = secrets.token_urlsafe(32)
        self._announce(f"/enter/{self._token}")

    def enter(self, token: str) -> str | None:
        """The key of a new session, if that is the link that is out; the next one is announced."""
        with self._lock:
            if not _same(token, self._token):
                return None
            self.invite()
            key = secrets.token_urlsafe(32)
            self._sessions[key] = Session()
            return key

    def session(self, key: str) -> Session | None:
        """The session with that key."""
        return self._sessions.get(key)


def guard(app: Flask, door: Door, port: int) -> None:
    """Looks at every request to `app` before it does anything, and at every answer."""
    hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
    cookie = f"hookledger-{port}"  # a cookie is for all ports of a host

    @app.before_request
    def look() -> None:
        if request.host not in hosts:
            abort(421)
        if request.path in OPEN_PATHS or request.endpoint == "enter":
            return
        g.session = door.session(request.cookies.get(cookie, "")) or abort(403)
        if request.method == "POST":
            _check_form(g.session)

    @app.get("/enter/<token>")
    def enter(token: str) -> Answer:
        key = door.enter(token) or abort(403)
        answer = redirect("/", 303)
        answer.set_cookie(cookie, key, httponly=True, samesite="Strict")
        return answer

    @app.after_request
    def close(answer: Response) -> Response:
        for name, value in HEADERS.items():
            answer.headers[name] = value
        return answer


def _check_form(session: Session) -> None:
    """That the form is from a page of ours."""
    origin = request.headers.get("Origin")
    if origin is not None and origin != f"http://{request.host}":
        abort(403)
    if not _same(request.form.get("form_token", ""), session.form_token):
        abort(403)


def _same(said: str, secret: str) -> bool:
    return bool(secret) and hmac.compare_digest(said.encode("utf-8", "replace"), secret.encode())
