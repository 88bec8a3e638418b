"""What is done from the pages: asked first, with its count, and recorded with its reason."""

from typing import Final

from flask import Flask, g, redirect, render_template, request
from werkzeug.wrappers import Response as Answer

from cli import render
from cli.console import asked, pages, rehearsal
from cli.console.asked import Asked, UnclearError
from shared import dossier
from shared.bootstrap import Core
from shared.triage import UNRESOLVED, Operator, Status, Triage

ACTIONS: Final = ("requeue", "resolve")
PER_SECOND: Final = 10.0
REHEARSED: Final = 20
PAYLOAD_CHARS: Final = 200_000


def register(app: Flask, core: Core, actor: str) -> None:
    """Adds the actions to `app`; they are on record as done by `actor`."""
    triage = Triage(core.application)

    @app.get("/confirm/<any(requeue, resolve):action>")
    def confirm(action: str) -> str:
        return _question(triage, action, asked.read(request.args).until_now())

    @app.post("/do/<any(requeue, resolve):action>")
    def act(action: str) -> Answer | str:
        wanted, reason = asked.read(request.form), request.form.get("reason", "").strip()
        if not wanted.is_narrow and "all" not in request.form:
            raise UnclearError("Narrow it down, or say that all is meant.")
        if not reason:
            return _question(triage, action, wanted, missing="Say why: it is kept.")
        by, statuses = Operator(actor=actor, reason=reason), movable(action, wanted)
        if action == "requeue":
            moved = triage.requeue(wanted.scope, by, statuses=statuses, per_second=PER_SECOND)
        else:
            moved = triage.resolve(wanted.scope, by, statuses=statuses)
        g.session.said = f"{render.events(moved)} {action}d"
        return redirect(_back(wanted), 303)

    @app.post("/rehearse")
    def rehearse() -> str:
        wanted = asked.read(request.form)
        rows = triage.find(wanted.scope, movable("resolve", wanted), limit=REHEARSED)
        done = rehearsal.rehearse(core, [row.id for row in rows])
        return render_template("rehearsal.html", done=done, asked=wanted, most=REHEARSED)

    @app.post(f"/failures/<int(min=1, max={asked.MAX_ID}):row>")
    def payload(row: int) -> str:
        triage.seen(row, Operator(actor=actor, reason="looked at in the console"))
        body = dossier.payload(core.application, row)
        text = "It was taken away." if body is None else render.pretty(body)
        if len(text) > PAYLOAD_CHARS:
            text = f"{text[:PAYLOAD_CHARS]}\n… all of it: manage.py failures show {row} --payload"
        return pages.shown(core, row, payload=text)


def movable(action: str, wanted: Asked) -> tuple[Status, ...]:
    """The states that the action is about, as the command has it: a requeue means what was given
    up, unless a state or a single row is said. Raises UnclearError for what is resolved."""
    if Status.RESOLVED in wanted.statuses:
        raise UnclearError("What is resolved stays resolved.")
    if action == "requeue" and not wanted.scope.ids and wanted.statuses == UNRESOLVED:
        return (Status.FAILED,)
    return wanted.statuses


def _question(triage: Triage, action: str, wanted: Asked, *, missing: str = "") -> str:
    statuses, tally = movable(action, wanted), triage.tally(wanted.scope)
    count = sum(part.count for part in tally if part.status in statuses and not part.is_leased)
    others = [part for part in tally if part.is_leased or part.status not in statuses]
    return render_template(
        "confirm.html",
        action=action,
        asked=wanted,
        statuses=statuses,
        count=count,
        others=others,
        seconds=count / PER_SECOND,
        missing=missing,
    )


def _back(wanted: Asked) -> str:
    return f"/failures/{wanted.scope.ids[0]}" if wanted.scope.ids else "/failures"
