"""HTTPS from Shopify: a signed delivery becomes a durable message."""

import functions_framework
from flask import Request, Response
from flask.typing import ResponseReturnValue
from werkzeug.exceptions import RequestEntityTooLarge

from shared import bootstrap, publish  # noqa: F401 - Google's client is paid for at the start

parts = bootstrap.Once(bootstrap.webhook)


@functions_framework.http
@bootstrap.guarded
def webhook(request: Request) -> ResponseReturnValue:
    """`POST` a delivery; `GET` says that the function is up."""
    match request.method:
        case "GET" | "HEAD":
            return {"status": "ok"}
        case "POST":
            return _delivered(request)
        case _:
            return {"error": "Send POST."}, 405, {"Allow": "GET, HEAD, POST"}


def _delivered(request: Request) -> ResponseReturnValue:
    limit = parts().settings.webhook_max_body_bytes
    try:
        body = _body(request, limit)
    except RequestEntityTooLarge:
        # Streamed, because functions-framework reads the rest of the request before it sends any
        # other answer.
        error = f'{{"error": "The body is larger than {limit} bytes."}}\n'
        return Response(iter([error]), 413, {"Connection": "close"}, mimetype="application/json")
    answer = parts().receiver.receive(_headers(request), body)
    return answer.body, answer.status


def _body(request: Request, limit: int) -> bytes:
    # One byte more than is taken: werkzeug cuts a chunked body at its limit without a word.
    request.max_content_length = limit + 1
    body = request.get_data()
    if len(body) > limit:
        raise RequestEntityTooLarge
    return body


def _headers(request: Request) -> list[tuple[str, str]]:
    # WSGI hands the bytes over as Latin-1; what Shopify sends is UTF-8.
    return [
        (name, value.encode("latin-1", "replace").decode("utf-8", "replace"))
        for name, value in request.headers.items()
    ]
