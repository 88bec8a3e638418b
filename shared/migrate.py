"""Schemas as numbered files, each applied once and whole, whoever else is applying them."""

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Final, LiteralString, cast

import psycopg
from psycopg import sql

from shared import db
from shared.errors import PermanentError

FOLDER: Final = Path(__file__).parent / "migrations"

# Any two numbers do, as long as nobody else takes the pair as the key of an advisory lock.
_LOCK: Final = "select pg_advisory_xact_lock(1213154635, hashtext(%(table)s))"
# A migration may take longer than an event; where the session forgets, the transaction says it.
_PATIENCE: Final = "select set_config('statement_timeout', '300s', true)"
LIMITS: Final = db.Limits(statement=300, lock=10)


class Series(StrEnum):
    """The folders of migrations, one for each kind of database."""

    APP = "app"
    TENANT = "tenant"


_VERSION_TABLES: Final = {
    Series.APP: "subscriber_schema_version",
    Series.TENANT: "shopify_schema_version",
}


class MigrationError(PermanentError):
    """The schema and the files disagree."""

    code = "migration"


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """One file: `0001_events.sql` has version 1."""

    version: int
    name: str
    text: str
    checksum: str


@cache
def files(series: Series) -> tuple[Migration, ...]:
    """The series' files in order; raises MigrationError when the numbers have a gap."""
    found = tuple(_read(path) for path in sorted((FOLDER / series).glob("*.sql")))
    if [m.version for m in found] != list(range(1, len(found) + 1)):
        raise MigrationError(f"The migrations in {series} are not numbered 1, 2, 3, …")
    return found


def apply(connection: psycopg.Connection[Any], series: Series) -> list[Migration]:
    """Applies what is pending and returns it. Safe to repeat and to run beside itself."""
    return [m for m in files(series) if _apply_one(connection, series, m, again=False)]


def apply_again(connection: psycopg.Connection[Any], series: Series) -> None:
    """Runs every file once more, applied or not: heals a table that somebody dropped."""
    for migration in files(series):
        _apply_one(connection, series, migration, again=True)


def pending(connection: psycopg.Connection[Any], series: Series) -> list[Migration]:
    """What `apply` would do; raises MigrationError when an applied file has changed since."""
    table = _VERSION_TABLES[series]
    if not _exists(connection, table):
        return list(files(series))
    applied = _applied(connection, table)
    for migration in files(series):
        _check(migration, applied)
    return [m for m in files(series) if m.version not in applied]


def _apply_one(
    connection: psycopg.Connection[Any], series: Series, migration: Migration, *, again: bool
) -> bool:
    """One file in one transaction: the lock, the version row, then the file itself."""
    table = _VERSION_TABLES[series]
    with connection.transaction():
        connection.execute(_LOCK, {"table": table})
        connection.execute(_PATIENCE)
        if not _exists(connection, table):
            connection.execute(_compose(_CREATE, table))
            connection.execute(_compose(_PROTECT, table))
        applied = _applied(connection, table)
        _check(migration, applied)
        if migration.version in applied and not again:
            return False
        connection.execute(
            _compose(_INSERT, table),
            {"version": migration.version, "name": migration.name, "sum": migration.checksum},
        )
        # The file is ours, read from this package; nothing from outside ever reaches it.
        connection.execute(cast(LiteralString, migration.text))
    return True


_CREATE: Final = """
create table {table} (
  version integer primary key,
  name text not null,
  checksum text not null,
  applied_at timestamptz not null default now()
)"""
_PROTECT: Final = "alter table {table} enable row level security"
_INSERT: Final = """
insert into {table} (version, name, checksum) values (%(version)s, %(name)s, %(sum)s)
on conflict (version) do nothing"""
_APPLIED: Final = "select version, checksum from {table}"


def _exists(connection: psycopg.Connection[Any], table: str) -> bool:
    found = connection.execute("select to_regclass(%(table)s)", {"table": table}).fetchone()
    return bool(found and found[0])


def _applied(connection: psycopg.Connection[Any], table: str) -> dict[int, str]:
    return dict(connection.execute(_compose(_APPLIED, table)).fetchall())


def _check(migration: Migration, applied: dict[int, str]) -> None:
    if applied.get(migration.version, migration.checksum) != migration.checksum:
        raise MigrationError(
            f"{migration.name} is not the file that was applied to this database. Applied "
            "migrations never change: restore the file and put the change into a new one."
        )


def _compose(text: LiteralString, table: str) -> sql.Composed:
    return sql.SQL(text).format(table=sql.Identifier(table))


def _read(path: Path) -> Migration:
    raw = path.read_bytes()
    return Migration(
        version=int(path.name.split("_", 1)[0]),
        name=path.name,
        text=raw.decode(),
        checksum=hashlib.sha256(raw).hexdigest(),
    )
