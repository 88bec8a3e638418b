"""The application database: reachable, migrated, ours to write, in time; and what waits in it."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

import psycopg

from cli import render
from cli.preflight.finding import Finding, error, fine, guarded, warning
from shared import bootstrap, db, figures, migrate
from shared.figures import Stats

OLDEST_SERVER: Final = 15
CONNECTIONS_SHARE: Final = 0.8
SKEW_SECONDS: Final = 5
RUN_SECONDS: Final = 300
WAIT_SECONDS: Final = 900

_TABLES: Final = (
    "shopify_shopifyconnection",
    "databases_database",
    "databases_databasecredential",
    "shopify_shopifyevent",
    "subscriber_subscriberfailedevent",
    "subscriber_replayattempt",
    "subscriber_retrystate",
    "subscriber_operatoraction",
    "subscriber_tenantincident",
    "privacy_request",
    "privacy_receipt",
)
# A table that is missing is the schema's finding, not this one's.
_DENIED: Final = """
select t.name || ' (' || string_agg(p.name, ', ' order by p.name) || ')'
from unnest(%(tables)s::text[]) t(name)
cross join unnest(array['select', 'insert', 'update', 'delete']) p(name)
where to_regclass(t.name) is not null and not has_table_privilege(t.name, p.name)
group by t.name order by t.name"""
_CONNECTIONS: Final = """
select count(*)::int, current_setting('max_connections')::int
from pg_stat_activity where backend_type = 'client backend'"""


def look(core: bootstrap.Core) -> Iterator[Finding]:
    """All findings about it; without a connection there is only one."""
    target = bootstrap.application_target(core.settings)
    try:
        connection = db.connect(target, migrate.LIMITS)
    except db.UNREACHABLE as fault:
        yield error(
            "application:connection",
            f"The application database is out of reach: {type(fault).__name__}.",
            "Correct APP_DATABASE_URL or the way there; the proxy, if the address is private.",
        )
        return
    with connection:
        yield from guarded("application:server", lambda: _server(connection))
        yield from guarded("application:schema", lambda: _schema(connection))
        yield from guarded("application:grants", lambda: grants(connection, _TABLES, "application"))
        yield from guarded("application:clock", lambda: clock(connection, "application"))


def waiting(stats: Stats) -> Iterator[Finding]:
    """What in it wants somebody's attention."""
    yield _last_run(stats)
    if stats.failed:
        yield warning(
            "events:failed",
            f"{render.events(stats.failed)} given up.",
            "See what for: manage.py failures stats. Then requeue or resolve them.",
        )
    if stats.incidents_open:
        yield warning(
            "events:incidents",
            f"{stats.incidents_open} tenants are unavailable; their events wait.",
            "See manage.py failures stats; restore access, the rest happens by itself.",
        )
    if (stats.oldest_due_seconds or 0) > WAIT_SECONDS:
        yield warning(
            "events:due",
            f"A failed event has been due for {render.span(stats.oldest_due_seconds or 0)}.",
            "Is the retry function run every minute, and within its budget? See its log.",
        )
    if (stats.oldest_outbox_seconds or 0) > WAIT_SECONDS:
        yield warning(
            "events:outbox",
            f"{stats.outbox} messages wait for Pub/Sub, the first one for "
            f"{render.span(stats.oldest_outbox_seconds or 0)}.",
            "See the retry function's log for outbox.stuck: its role, PUBSUB_TOPIC.",
        )


def numbers(core: bootstrap.Core) -> tuple[Stats, figures.Notices | None]:
    """The figures that go with the findings."""
    return figures.stats(core.application), figures.notices(core.application)


def grants(
    connection: psycopg.Connection[Any], tables: tuple[str, ...], where: str
) -> Iterator[Finding]:
    """Whether our role may read and write our tables."""
    denied = [row[0] for row in connection.execute(_DENIED, {"tables": list(tables)})]
    if denied:
        yield error(
            f"{where}:grants",
            f"The role may not use {', '.join(denied)}.",
            "Grant it what is named, or connect as the tables' owner.",
        )
    else:
        yield fine(f"{where}:grants", "The role may read and write every table.")


def clock(connection: psycopg.Connection[Any], where: str) -> Iterator[Finding]:
    """How far its clock is from ours: waits and leases go by the databases' clocks."""
    before = time.time()
    row = connection.execute("select extract(epoch from clock_timestamp())::float8").fetchone()
    assert row is not None
    skew = row[0] - (before + time.time()) / 2
    if abs(skew) > SKEW_SECONDS:
        yield warning(
            f"{where}:clock",
            f"Its clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} ours.",
            "Let both be set by NTP: events without a clock of their own are ordered by receipt.",
        )
    else:
        yield fine(f"{where}:clock", f"Its clock is within {SKEW_SECONDS} s of ours.")


def _server(connection: psycopg.Connection[Any]) -> Iterator[Finding]:
    version = connection.info.server_version // 10000
    if version < OLDEST_SERVER:
        yield error(
            "application:server",
            f"PostgreSQL {version} is too old.",
            f"Use PostgreSQL {OLDEST_SERVER} or newer.",
        )
    used, most = connection.execute(_CONNECTIONS).fetchone() or (0, 1)
    if used > CONNECTIONS_SHARE * most:
        yield warning(
            "application:connections",
            f"{used} of {most} connections are in use.",
            "Raise max_connections, or lower the functions' max_instances: docs/capacity.md.",
        )
    else:
        yield fine("application:server", f"PostgreSQL {version}, {used} of {most} connections.")


def _schema(connection: psycopg.Connection[Any]) -> Iterator[Finding]:
    if pending := migrate.pending(connection, migrate.Series.APP):
        yield error(
            "application:schema",
            f"Pending: {', '.join(m.name for m in pending)}.",
            "Run manage.py migrate.",
        )
    else:
        newest = migrate.files(migrate.Series.APP)[-1]
        yield fine("application:schema", f"Up to date: {newest.name}.")


def _last_run(stats: Stats) -> Finding:
    remedy = "See manage.py scheduler status, and the retry function's log."
    if stats.last_run_at is None:
        return warning("events:last_run", "The retry function has never come to its end.", remedy)
    passed = (datetime.now(UTC) - stats.last_run_at).total_seconds()
    if passed > RUN_SECONDS:
        return error(
            "events:last_run", f"The last retry run ended {render.span(passed)} ago.", remedy
        )
    return fine("events:last_run", f"The last retry run ended {render.span(passed)} ago.")
