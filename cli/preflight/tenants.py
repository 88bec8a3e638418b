"""Every tenant database: routed to, reachable, migrated, ours to write, in time; its lag."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg.rows import class_row

from cli.preflight import application
from cli.preflight.finding import Finding, Severity, error, fine, guarded, warning
from shared import bootstrap, db, faults, migrate, redact
from shared.remedies import remedy
from shared.topics import SNAPSHOT_TABLES

PARALLEL: Final = 8

# The newest events by their key: there is no index on the time of writing, and none is needed.
_LAG: Final = """
with newest as (
  select extract(epoch from inserted_at - received_at)::float8 as seconds
  from shopify_events order by id desc limit 1000
)
select count(*) as events, percentile_cont(0.5) within group (order by seconds) as p50_seconds,
       percentile_cont(0.99) within group (order by seconds) as p99_seconds
from newest"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """From receipt to row, over the newest 1,000 events of a tenant."""

    events: int
    p50_seconds: float | None
    p99_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """What was found at one organization's database."""

    organization: str
    findings: tuple[Finding, ...]
    lag: Lag | None = None


def look(
    core: bootstrap.Core, organizations: Sequence[str], done: Callable[[], None]
) -> Iterator[Tenant]:
    """Every organization's findings, as they come; `done` is called after each."""
    with ThreadPoolExecutor(max_workers=PARALLEL, thread_name_prefix="preflight") as workers:
        started = [workers.submit(_tenant, core, name) for name in organizations]
        for finished in as_completed(started):
            yield finished.result()
            done()


def _tenant(core: bootstrap.Core, organization: str) -> Tenant:
    name = f"tenant:{organization}"
    try:
        with db.connect(core.directory.target(organization), migrate.LIMITS) as connection:
            found = tuple(guarded(name, lambda: _findings(connection, name)))
            is_provisioned = not any(each.severity is Severity.ERROR for each in found)
            lag = _lag(connection) if is_provisioned else None
    except Exception as fault:  # noqa: BLE001 - one tenant's fault must not keep the others waiting
        known = faults.describe(fault, topic="")
        step = remedy(known["error_type"], known["error_code"], "pending")
        cause = f"{type(fault).__name__}: {redact.message(fault)}"
        return Tenant(organization=organization, findings=(error(name, cause, step),))
    return Tenant(organization=organization, findings=found, lag=lag)


def _findings(connection: psycopg.Connection[Any], name: str) -> Iterator[Finding]:
    """What is not in order; one word when everything is."""
    found = [*_schema(connection, name), *_apart(connection, name)]
    wrong = [each for each in found if each.severity is not Severity.OK]
    yield from wrong
    if not wrong:
        yield fine(name, "Reached, up to date, writable.")


def _schema(connection: psycopg.Connection[Any], name: str) -> Iterator[Finding]:
    pending = migrate.pending(connection, migrate.Series.TENANT)
    drift = migrate.drift(connection, migrate.Series.TENANT)
    organization = name.removeprefix("tenant:")
    provision = f"Run manage.py provision_schema --organization {organization}."
    if pending:
        yield error(f"{name}:schema", f"Pending: {', '.join(m.name for m in pending)}.", provision)
    elif drift.differences:
        yield error(f"{name}:schema", f"{'; '.join(drift.differences)}.", provision)
    if drift.unsecured:
        yield warning(
            f"{name}:rls",
            f"Row level security is off: {', '.join(drift.unsecured)}.",
            f"Unless the merchant wants it so: {provision.rstrip('.')} --enable-rls.",
        )


def _apart(connection: psycopg.Connection[Any], name: str) -> Iterator[Finding]:
    tables = ("shopify_events", *sorted(SNAPSHOT_TABLES))
    yield from application.grants(connection, tables, name)
    yield from application.clock(connection, name)


def _lag(connection: psycopg.Connection[Any]) -> Lag | None:
    with connection.cursor(row_factory=class_row(Lag)) as cursor:
        return cursor.execute(_LAG).fetchone()
