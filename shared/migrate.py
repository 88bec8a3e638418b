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
    """The folders of migrations: one for each kind of database, and the notifier's."""

    APP = "app"
    TENANT = "tenant"
    NOTIFIER = "notifier"


_VERSION_TABLES: Final = {
    Series.APP: "subscriber_schema_version",
    Series.TENANT: "shopify_schema_version",
    Series.NOTIFIER: "notifier_schema_version",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How a database differs from what the files make."""

    differences: list[str]
    unsecured: list[str]  # tables without row level security


def drift(connection: psycopg.Connection[Any], series: Series) -> Drift:
    """Compares the database with the sum of the files; neither waits for a lock nor leaves a trace.

    The sum is made beside it, as temporary tables in a transaction that is rolled back.
    """
    with connection.transaction(force_rollback=True):
        connection.execute(_PATIENCE)
        (path,) = connection.execute(_PATH).fetchone() or ("pg_temp",)
        connection.execute(_SET_PATH, {"path": "pg_temp"})
        for migration in files(series):
            connection.execute(cast(LiteralString, migration.text))
        connection.execute(_SET_PATH, {"path": path})
        rows = connection.execute(_DRIFT).fetchall()
        unsecured = connection.execute(_UNSECURED).fetchall()
    return Drift(differences=[row[0] for row in rows], unsecured=[row[0] for row in unsecured])


def secure(connection: psycopg.Connection[Any], tables: list[str]) -> None:
    """Switches row level security on. The tables' owner, which we are, is exempt from it."""
    with connection.transaction():
        for table in tables:
            connection.execute(_compose(_PROTECT, table))


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

_PATH: Final = "select current_setting('search_path') || ', pg_temp'"
_SET_PATH: Final = "select set_config('search_path', %(path)s, true)"

# Columns are compared by name, indexes by what they are on; a unique one in any order.
_MADE: Final = """
with made as (
  select c.oid as wanted, c.relname::text as name, to_regclass(quote_ident(c.relname)) as present
  from pg_class c where c.relnamespace = pg_my_temp_schema() and c.relkind = 'r'
)"""
_DRIFT: Final = (
    _MADE
    + """, present as (
  select * from made where present is not null and present <> wanted
), indexed as (
  select i.indrelid, i.indisunique,
         (select string_agg(a.attname, ', ' order by case when i.indisunique
                   then a.attname end, array_position(i.indkey::int2[], a.attnum))
          from pg_attribute a
          where a.attrelid = i.indrelid and a.attnum = any (i.indkey::int2[])) as columns
  from pg_index i
  where i.indisvalid and i.indimmediate and i.indpred is null and i.indexprs is null
    and i.indrelid in (select wanted from made union select present from made)
    and not i.indisprimary
)
select 'table ' || name || ' is missing' from made where present is null or present = wanted
union all
select format('column %s of table %s is missing', a.attname, p.name)
from present p join pg_attribute a on a.attrelid = p.wanted and a.attnum > 0
where not exists (select from pg_attribute b
                  where b.attrelid = p.present and b.attname = a.attname and not b.attisdropped)
union all
select format('%sindex on %s (%s) is missing', case when i.indisunique then 'unique ' else '' end,
              p.name, i.columns)
from present p join indexed i on i.indrelid = p.wanted
where not exists (select from indexed j
                  where j.indrelid = p.present and j.columns = i.columns
                    and j.indisunique = i.indisunique)
union all
select format('column %s of table %s is none of ours, not null and without a default: '
              'no event can be stored', a.attname, p.name)
from present p join pg_attribute a on a.attrelid = p.present
where a.attnum > 0 and not a.attisdropped and a.attnotnull and not a.atthasdef
  and a.attidentity = '' and a.attgenerated = ''
  and not exists (select from pg_attribute b
                  where b.attrelid = p.wanted and b.attname = a.attname)
order by 1"""
)
_UNSECURED: Final = (
    _MADE
    + """
select m.name from made m join pg_class c on c.oid = m.present and m.present <> m.wanted
where not c.relrowsecurity order by 1"""
)


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
