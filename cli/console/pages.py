"""The pages: what is the matter, failed events, one of them, notifications, privacy requests."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import psycopg
from flask import Flask, abort, g, render_template, request

from cli.console import asked, chart, needs
from shared import dossier, figures, redact, traffic
from shared.bootstrap import Core
from shared.errors import HookledgerError
from shared.remedies import remedy
from shared.triage import Status, Triage

T = TypeVar("T")

PAGE_ROWS: Final = 50
REQUESTS: Final = 200
REFRESH_SECONDS: Final = 30


def register(app: Flask, core: Core) -> None:
    """Adds the pages to `app`."""
    application, triage = core.application, Triage(core.application)

    @app.get("/")
    def overview() -> str:
        return render_template("overview.html", **_overview(core), **_refresh())

    @app.get("/failures")
    def failures() -> str:
        wanted = asked.read(request.args)
        before = asked.number(request.args["before"]) if "before" in request.args else None
        rows = triage.find(wanted.scope, wanted.statuses, limit=PAGE_ROWS + 1, before=before)
        return render_template(
            "failures.html",
            rows=rows[:PAGE_ROWS],
            after=rows[PAGE_ROWS - 1].id if len(rows) > PAGE_ROWS else None,
            is_first=before is None,
            asked=wanted,
            statuses=list(Status),
            **_refresh(),
        )

    @app.get("/kinds")
    def kinds() -> str:
        return render_template("kinds.html", groups=figures.groups(application), **_refresh())

    @app.get(f"/failures/<int(min=1, max={asked.MAX_ID}):row>")
    def failure(row: int) -> str:
        return shown(core, row)

    @app.get("/notifications")
    def notifications() -> str:
        found = traffic.notifications(application)
        return render_template("notifications.html", notifications=found, **_refresh())

    @app.get("/privacy")
    def privacy() -> str:
        found = core.privacy.requests(limit=REQUESTS)
        return render_template("privacy.html", requests=found, most=REQUESTS, **_refresh())


def shown(core: Core, row: int, *, payload: str | None = None) -> str:
    """The page of one failed event; `payload` is there when somebody asked for it."""
    found = dossier.find(core.application, row)
    if found is None:
        abort(404)
    event = found.event
    step = remedy(event.error_type, event.error_code, event.status)
    return render_template("failure.html", found=found, event=event, step=step, payload=payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """What stands where figures could not be read: the page has others, and is there for that."""

    error: str


def _overview(core: Core) -> dict[str, Any]:
    application = core.application
    found: dict[str, Any] = {
        "stats": _read(lambda: figures.stats(application)),
        "notices": _read(lambda: figures.notices(application)),
        "incidents": _read(core.incidents.open),
        "audited": _read(lambda: traffic.audited(application)),
        "routes": _read(lambda: traffic.routes(application)),
        "chart": _read(lambda: chart.drawn(traffic.hourly(application))),
        "troubled": _read(lambda: traffic.troubled(application)),
        "requests": _read(lambda: core.privacy.requests(limit=REQUESTS, only_open=True)),
    }
    there = {k: None if isinstance(v, Unread) else v for k, v in found.items()}
    wanted = needs.needs(
        there["stats"],
        there["notices"],
        there["incidents"] or (),
        sum(each.is_overdue for each in there["requests"] or ()),
    )
    unread = {value.error for value in found.values() if isinstance(value, Unread)}
    return there | {"needs": wanted, "unread": sorted(unread), "counted": traffic.COUNTED}


def _read(figure: Callable[[], T]) -> T | Unread:
    try:
        return figure()
    except (HookledgerError, psycopg.Error) as error:
        return Unread(error=f"{type(error).__name__}: {redact.message(error)}")


def _refresh() -> dict[str, int]:
    """Whether the page is to load itself again: only where its reader wants that."""
    return {"refresh": REFRESH_SECONDS} if "refresh" in request.args else {}


def context() -> dict[str, Any]:
    """What all pages have: the token of their forms, and what was just done, once."""
    session = g.get("session")
    if session is None:
        return {}
    said, session.said = session.said, ""
    return {"form_token": session.form_token, "said": said}
