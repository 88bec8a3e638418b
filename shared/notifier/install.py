"""Puts the notifier into the application database, brings it up to date, takes it away again."""

from dataclasses import dataclass
from typing import Any, Final

import psycopg

from shared import migrate
from shared.errors import ConfigurationError

COMPONENT: Final = "notifier"
INTERFACE_VERSION: Final = 1  # of the tables and functions that a processor uses
PACKAGE_VERSION: Final = "0.1.0"

# Whoever installs, upgrades or uninstalls does it alone, and all of it or nothing.
_LOCK: Final = "select pg_advisory_xact_lock(1213154635, hashtext('notifier.install'))"

_HAS_RELAY: Final = "select to_regclass('pgrelay.registry') is not null"
_REGISTERED: Final = """
select interface_version, uninstalled_at is not null as is_uninstalled
from pgrelay.registry where component = %(component)s"""

# Somebody dropped the schema by hand: what the record of migrations says is not true any more.
_FORGET_DROPPED: Final = """
delete from notifier_schema_version
where not exists (select from pg_namespace where nspname = 'notifier')"""
_HAS_VERSIONS: Final = "select to_regclass('notifier_schema_version') is not null"

_REGISTER: Final = """
insert into pgrelay.registry as r (component, schema_name, interface_version, package_version)
values (%(component)s, 'notifier', %(interface)s, %(package)s)
on conflict (component) do update
set schema_name = excluded.schema_name, interface_version = excluded.interface_version,
    package_version = excluded.package_version, installed_at = now(), uninstalled_at = null
where (r.interface_version, r.package_version, r.uninstalled_at)
      is distinct from (excluded.interface_version, excluded.package_version, null::timestamptz)
returning true"""

_DROP: Final = "drop schema if exists notifier cascade"
_FORGET: Final = "delete from notifier_schema_version"
_UNREGISTER: Final = """
update pgrelay.registry set uninstalled_at = now()
where component = %(component)s and uninstalled_at is null
returning true"""
_RELOAD: Final = "select pgrelay.request_reload()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What was done. Nothing at all, where everything was as it should be."""

    applied: list[migrate.Migration]
    changed: bool


def install(connection: psycopg.Connection[Any]) -> Done:
    """Makes what is missing and registers it, also after an uninstall. Safe to repeat.

    Running processors take it up within about a second. Raises ConfigurationError when a newer
    release is installed, and what psycopg and migrate raise.
    """
    with connection.transaction():
        connection.execute(_LOCK)
        _refuse_older(connection)
        if _is(connection, _HAS_VERSIONS):
            connection.execute(_FORGET_DROPPED)
        return _brought_up(connection, reload=True)


def upgrade(connection: psycopg.Connection[Any]) -> Done:
    """As `install`, but leaves alone what was uninstalled on purpose or is of a newer release.

    Does not heal a schema that somebody dropped, and reloads only if anything changed.
    """
    with connection.transaction():
        connection.execute(_LOCK)
        installed = _registered(connection)
        if installed and (installed[1] or installed[0] > INTERFACE_VERSION):
            return Done(applied=[], changed=False)
        return _brought_up(connection, reload=False)


def uninstall(connection: psycopg.Connection[Any]) -> bool:
    """Drops the notifier with its channels and its history; whether it was there.

    The relay stays and knows of it: what is still queued is answered, and only `install` brings the
    notifier back.
    """
    with connection.transaction():
        connection.execute(_LOCK)
        if not _is(connection, _HAS_RELAY):
            return False
        connection.execute(_DROP)
        connection.execute(_FORGET)
        was_there = connection.execute(_UNREGISTER, {"component": COMPONENT}).fetchone()
        connection.execute(_RELOAD)
        return was_there is not None


def is_uninstalled(connection: psycopg.Connection[Any]) -> bool:
    """Whether somebody uninstalled it on purpose."""
    installed = _registered(connection)
    return installed is not None and installed[1]


def _brought_up(connection: psycopg.Connection[Any], *, reload: bool) -> Done:
    applied = migrate.apply(connection, migrate.Series.NOTIFIER)
    registration = {
        "component": COMPONENT,
        "interface": INTERFACE_VERSION,
        "package": PACKAGE_VERSION,
    }
    is_new = connection.execute(_REGISTER, registration).fetchone() is not None
    if applied or is_new or reload:
        connection.execute(_RELOAD)
    return Done(applied=applied, changed=bool(applied) or is_new)


def _refuse_older(connection: psycopg.Connection[Any]) -> None:
    installed = _registered(connection)
    if installed and installed[0] > INTERFACE_VERSION and not installed[1]:
        raise ConfigurationError(
            f"The notifier in this database has interface version {installed[0]}, and this release "
            f"supports {INTERFACE_VERSION}: use the newer release, or uninstall the notifier first."
        )


def _registered(connection: psycopg.Connection[Any]) -> tuple[int, bool] | None:
    """Interface version, and whether it was uninstalled."""
    if not _is(connection, _HAS_RELAY):
        return None
    return connection.execute(_REGISTERED, {"component": COMPONENT}).fetchone()


def _is(connection: psycopg.Connection[Any], question: Any) -> bool:
    row = connection.execute(question).fetchone()
    return bool(row and row[0])
