"""Whether the notifier can be used: what a processor last knew of it, and why not."""

from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg import errors as pg
from psycopg.rows import class_row

from shared.notifier.install import COMPONENT, INTERFACE_VERSION

SUPPORTED: Final = (INTERFACE_VERSION, INTERFACE_VERSION)  # the oldest and the newest

# What says that the notifier has changed under somebody who thought it servable.
CHANGED: Final = (
    pg.UndefinedTable,
    pg.UndefinedFunction,
    pg.UndefinedColumn,
    pg.InvalidSchemaName,
    pg.InsufficientPrivilege,
)

_TABLES: Final = (
    "profiles",
    "profile_secrets",
    "channels",
    "notifications",
    "attempts",
    "deliveries",
)
_FUNCTIONS: Final = (
    "notify(text, text, text, text, text, text, text, interval)",
    "set_status(bigint, integer, text, text, text, jsonb)",
)

# By the catalog: asking for a name in a schema that one may not use would be an error.
_READ: Final = """
with space as (
  select oid, has_schema_privilege(oid, 'usage') as is_granted
  from pg_namespace where nspname = 'notifier'
), tables as (
  select count(*) as found, coalesce(bool_and(
           has_table_privilege(c.oid, 'select') and has_table_privilege(c.oid, 'insert')
           and has_table_privilege(c.oid, 'update')), true) as is_granted
  from pg_class c join space s on s.oid = c.relnamespace
  where c.relkind = 'r' and c.relname = any(%(tables)s)
), functions as (
  select count(*) as found, coalesce(bool_and(has_function_privilege(p.oid, 'execute')), true)
         as is_granted
  from pg_proc p join space s on s.oid = p.pronamespace
  where p.proname || '(' || oidvectortypes(p.proargtypes) || ')' = any(%(functions)s)
)
select g.generation, r.interface_version, r.package_version,
       r.uninstalled_at is not null as is_uninstalled,
       t.found = cardinality(%(tables)s) as has_schema,
       f.found = cardinality(%(functions)s) as has_functions,
       t.is_granted and f.is_granted and coalesce((select s.is_granted from space s), true)
         as is_granted
from pgrelay.reload_state g cross join tables t cross join functions f
left join pgrelay.registry r on r.component = %(component)s"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unservable:
    """Why nothing can be sent. `code` is stable."""

    code: str
    cause: str
    remedy: str

    @property
    def text(self) -> str:
        """Cause and remedy."""
        return f"{self.cause} {self.remedy}"


ABSENT: Final = Unservable(
    code="notifier_absent",
    cause="The notifier is not installed.",
    remedy="Run manage.py notifier install.",
)
_NO_SCHEMA: Final = Unservable(
    code="notifier_schema",
    cause="Tables of the schema notifier are missing.",
    remedy="If all of it is gone, run manage.py notifier install; otherwise restore them.",
)
_NO_FUNCTIONS: Final = Unservable(
    code="notifier_functions",
    cause="notifier.notify or notifier.set_status is missing.",
    remedy="Restore it, or uninstall the notifier and install it again.",
)
_NO_GRANTS: Final = Unservable(
    code="notifier_grants",
    cause="This role may not use the schema notifier.",
    remedy="Grant it usage on the schema; select, insert and update on its tables; execute on its "
    "functions.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The notifier as one reading of the registry and the catalog found it."""

    generation: int
    interface_version: int | None
    package_version: str | None
    is_uninstalled: bool
    has_schema: bool
    has_functions: bool
    is_granted: bool

    @property
    def fault(self) -> Unservable | None:
        """What is in the way; None where everything is as it should be."""
        oldest, newest = SUPPORTED
        if self.interface_version is None or self.is_uninstalled:
            return ABSENT
        if not oldest <= self.interface_version <= newest:
            return Unservable(
                code="notifier_version",
                cause=f"The notifier has interface version {self.interface_version} (release "
                f"{self.package_version}), and this release supports {oldest} to {newest}.",
                remedy="Bring the older of the two up to date.",
            )
        if not self.has_schema:
            return _NO_SCHEMA
        if not self.has_functions:
            return _NO_FUNCTIONS
        return None if self.is_granted else _NO_GRANTS


def read(connection: psycopg.Connection[Any]) -> Snapshot | None:
    """The snapshot, now; None where there is not even a relay. Raises what psycopg raises."""
    parameters = {
        "component": COMPONENT,
        "tables": list(_TABLES),
        "functions": list(_FUNCTIONS),
    }
    try:
        with connection.cursor(row_factory=class_row(Snapshot)) as cursor:
            return cursor.execute(_READ, parameters).fetchone()
    except (pg.UndefinedTable, pg.InvalidSchemaName):
        return None
