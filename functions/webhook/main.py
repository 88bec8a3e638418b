"""HTTPS from Shopify: a signed delivery becomes a durable message."""

import functions_framework
from flask import Request, Response
from flask.typing import ResponseReturnValue
from werkzeug.exceptions import RequestEntityTooLarge

from shared import bootstrap

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
    request.max_content_length = limit
    try:
        body = request.get_data()
    except RequestEntityTooLarge:
        # Streamed, because functions-framework reads the rest of the request before it sends any
        # other answer.
        error = f'{{"error": "The body is larger than {limit} bytes."}}\n'
        return Response(iter([error]), 413, {"Connection": "close"}, mimetype="application/json")
    answer = parts().receiver.receive(list(request.headers.items()), body)
    return answer.body, answer.status
