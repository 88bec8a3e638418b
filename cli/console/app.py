"""The application: pages, actions and what guards them, put together."""

from typing import Any, Final

import psycopg
from flask import Flask, Response, render_template
from werkzeug.exceptions import HTTPException

from cli import render
from cli.console import actions, door, pages
from cli.console.asked import UnclearError
from cli.console.door import Door
from shared import log, redact
from shared.bootstrap import Core
from shared.errors import HookledgerError

FORM_BYTES: Final = 64 * 1024
_EXPLAINED: Final = {
    403: "Open the link that the terminal shows: each works once, and the next one is there.",
    404: "There is no such page, or no such failed event.",
    421: "This page is at http://127.0.0.1 and its port, and under no other name.",
}


def make(core: Core, entrance: Door, *, port: int, actor: str) -> Flask:
    """The WSGI application, for a server that listens at 127.0.0.1:`port`."""
    app = Flask(__name__, static_folder=None)
    app.config.update(MAX_CONTENT_LENGTH=FORM_BYTES, PROPAGATE_EXCEPTIONS=False)
    app.jinja_options = {
        "finalize": _shown,
        "trim_blocks": True,
        "lstrip_blocks": True,
    }
    app.add_template_filter(render.ago, "ago")
    app.add_template_filter(render.clock, "clock")
    app.add_template_filter(render.span, "span")
    app.add_template_filter(render.events, "events")
    app.add_template_filter("{:,}".format, "count")
    app.jinja_env.globals["actor"] = actor
    app.context_processor(pages.context)
    door.guard(app, entrance, port)
    pages.register(app, core)
    actions.register(app, core, actor)
    _add_files(app)
    app.register_error_handler(Exception, _failed)
    return app


def _shown(value: Any) -> Any:
    """Text from outside without what a browser or an eye acts upon; escaping comes after."""
    if value is None:
        return ""
    return render.printable(value) if type(value) is str else value


def _add_files(app: Flask) -> None:
    @app.get("/style.css")
    def style() -> Response:
        with app.open_resource("style.css") as file:
            return Response(file.read(), mimetype="text/css")

    @app.get("/favicon.ico")
    def icon() -> tuple[str, int]:
        return "", 204


def _failed(error: Exception) -> tuple[str, int]:
    """A page with cause and remedy; never a traceback."""
    match error:
        case HTTPException():
            status = error.code or 500
            text = _EXPLAINED.get(status, error.description or error.name)
        case UnclearError():
            status, text = 400, str(error)
        case HookledgerError() | psycopg.Error():
            status, text = 503, f"{type(error).__name__}: {redact.message(error)}"
        case _:
            log.error("console.failed", error)
            status, text = 500, "An error in the console; the terminal has it."
    return render_template("error.html", status=status, text=text), status
