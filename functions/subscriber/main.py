"""Pub/Sub push: a message becomes rows in its tenant's database. 204 acknowledges, 503 refuses."""

import os

import functions_framework
from flask import Request
from flask.typing import ResponseReturnValue

from shared import bootstrap, log, message, warmup

warmup.await_network(os.environ)
parts = bootstrap.Once(bootstrap.core)


@functions_framework.http
@bootstrap.guarded
def subscribe(request: Request) -> ResponseReturnValue:
    """`POST` a Pub/Sub push body or an Eventarc CloudEvent, binary or structured."""
    ingester = parts().ingester()
    try:
        received = message.read(request.get_data())
    except message.NotAMessageError as error:
        log.warning("message.none", reason=str(error))
        return "", 400
    return "", 204 if ingester.ingest(received) else 503
