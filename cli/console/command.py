"""console: the operator's page, until Ctrl-C."""

import webbrowser
from collections.abc import Callable
from typing import Annotated, Final

import typer
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server

from cli import context
from cli.console import app as pages
from cli.console.door import Door
from cli.scope import Actor, you
from shared.bootstrap import Core
from shared.errors import ConfigurationError

ADDRESS: Final = "127.0.0.1"


class Quiet(WSGIRequestHandler):
    """Logs no requests: the link would be in their lines."""

    def version_string(self) -> str:
        """Nothing that tells of versions."""
        return "hookledger"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Nothing."""


def register(app: typer.Typer) -> None:
    """Adds the command of this module."""
    app.command("console")(show_console)


def show_console(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8400,
    browser: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    actor: Actor = "",
) -> None:
    """Open the operator's page on this machine, until Ctrl-C.

    The link works once; the next one is shown when it was used.

    Example: python manage.py console --open
    """
    first: list[str] = []

    def announce(link: str) -> None:
        first.append(link)
        context.out.print(f"Open {link}", soft_wrap=True, markup=False)

    server = serve(context.core(), port, actor=actor.strip() or you(), announce=announce)
    context.out.print("Ctrl-C ends it.")
    if browser:
        webbrowser.open(first[0])
    try:
        server.serve_forever()
    finally:
        server.server_close()


def serve(core: Core, port: int, *, actor: str, announce: Callable[[str], None]) -> BaseWSGIServer:
    """A server that is ready to serve; each link to it is announced. Port 0 is a free one.

    Raises ConfigurationError when the port is taken.
    """
    try:
        server = make_server(ADDRESS, port, _closed, threaded=True, request_handler=Quiet)
    except SystemExit:  # so werkzeug says it
        raise ConfigurationError(f"Port {port} is taken. Say --port.") from None
    root = f"http://{ADDRESS}:{server.server_port}"
    door = Door(lambda path: announce(root + path))
    server.app = pages.make(core, door, port=server.server_port, actor=actor)
    door.invite()
    return server


def _closed(*_: object) -> list[bytes]:
    """Stands in until the port is known, which the pages must know."""
    return []
