"""Cloud Scheduler's tick: the outbox is sent, what is due replayed, what is old taken away."""

import os

import functions_framework
from flask import Request
from flask.typing import ResponseReturnValue

from shared import bootstrap, db, log, replay, tick, warmup

warmup.await_network(os.environ)
parts = bootstrap.Once(bootstrap.core)


@functions_framework.http
@bootstrap.guarded
def retry(request: Request) -> ResponseReturnValue:
    """`POST` nothing, or `{"limit": 10, "event_id": 42, "dry_run": true}`."""
    if request.method != "POST":
        return {"error": "Send POST."}, 405, {"Allow": "POST"}
    core = parts()
    try:
        asked = replay.read_request(request.get_data())
    except ValueError as error:
        return {"error": str(error)}, 400
    try:
        if core.settings.auto_migrate:
            bootstrap.migrate_application(core.settings)
        return tick.tick(
            asked,
            replayer=core.replayer(),
            outbox=core.outbox(),
            retention=core.retention(),
            erasure=core.erasure(),
            notify=core.notify,
            count=core.count,
            budget_seconds=core.settings.retry_time_budget_seconds,
            maintenance_seconds=core.settings.maintenance_time_budget_seconds,
        )
    except db.UNREACHABLE as error:
        log.error("replay.unavailable", error)
        return {"error": "The application database is out of reach."}, 503
