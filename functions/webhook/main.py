"""HTTPS from Shopify: a signed delivery becomes a durable message."""

import contextlib
import json
import socket
import threading
from typing import Final

import functions_framework
from flask import Request, Response
from flask.typing import ResponseReturnValue
from werkzeug.exceptions import ClientDisconnected, RequestEntityTooLarge, RequestTimeout

from shared import bootstrap, log, publish  # noqa: F401 - Google's client is paid for at the start

# Shopify does not wait longer for its answer, and whoever sends drop by drop holds a thread.
BODY_SECONDS: Final = 5.0

parts = bootstrap.Once(bootstrap.webhook)


@functions_framework.http
@bootstrap.guarded
def webhook(request: Request) -> ResponseReturnValue:
    """`POST` a delivery; `GET` says that the function is up."""
    match request.method:
        case "GET" | "HEAD":
            return _unread({"status": "ok"}, 200)
        case "POST":
            return _delivered(request)
        case _:
            return _unread({"error": "Send POST."}, 405, Allow="GET, HEAD, POST")


def _delivered(request: Request) -> ResponseReturnValue:
    limit = parts().settings.webhook_max_body_bytes
    try:
        body = _body(request, limit)
    except RequestEntityTooLarge:
        return _unread({"error": f"The body is larger than {limit} bytes."}, 413)
    except (RequestTimeout, ClientDisconnected):
        log.warning("webhook.refused", reason="body")
        return _unread({"error": "The body did not come in time."}, 408)
    answer = parts().receiver.receive(_headers(request), body)
    return answer.body, answer.status


def _body(request: Request, limit: int) -> bytes:
    """The body; raises RequestEntityTooLarge, RequestTimeout and ClientDisconnected."""
    # One byte more than is taken: werkzeug cuts a chunked body at its limit without a word.
    request.max_content_length = limit + 1
    late = threading.Event()
    connection = request.environ.get("gunicorn.socket")
    timer = threading.Timer(BODY_SECONDS, _hang_up, (connection, late))
    timer.start()
    try:
        body = request.get_data()
    finally:
        timer.cancel()
    if late.is_set():  # gunicorn ends a body with a length as if it were whole
        raise RequestTimeout
    if len(body) > limit:
        raise RequestEntityTooLarge
    return body


def _hang_up(connection: socket.socket | None, late: threading.Event) -> None:
    """Ends the waiting for a body: gunicorn itself would wait for ever."""
    late.set()
    if connection:  # no other server has one
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RD)


def _unread(body: dict[str, str], status: int, **headers: str) -> Response:
    # Streamed, because functions-framework reads the rest of the request before it sends any
    # other answer.
    text = json.dumps(body) + "\n"
    named = {"Connection": "close", **headers}
    return Response(iter([text]), status, named, mimetype="application/json")


def _headers(request: Request) -> list[tuple[str, str]]:
    # WSGI hands the bytes over as Latin-1; what Shopify sends is UTF-8.
    return [
        (name, value.encode("latin-1", "replace").decode("utf-8", "replace"))
        for name, value in request.headers.items()
    ]
