"""Which organization a shop belongs to, and where that organization's tenant database is.

What was found is remembered for a minute, so that the happy path asks the application database for
nothing; while that database is unreachable, what was remembered is used however old it is.
"""

import atexit
import tempfile
import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import class_row

from shared import db, log
from shared.errors import (
    AmbiguousShopError,
    DirectoryUnavailableError,
    HookledgerError,
    StorageConfigurationError,
    TenantPaused,
    UnknownShopError,
)
from shared.secrets import Keyring

T = TypeVar("T")

FOUND_SECONDS: Final = 60
MISSED_SECONDS: Final = 5

_CONNECTIONS: Final = """
select id, organization_id, status,
       exists (select from subscriber_tenantincident i
               where i.tenant = c.organization_id and i.ended_at is null
                 and i.kind = 'paused') as is_paused
from shopify_shopifyconnection c
where myshopify_domain = %(shop_domain)s order by id"""

# The first database of type shopify, else the first that is named so.
_DATABASE: Final = """
select d.id, d.database_name, c.host, c.port, c.username, c.password_encrypted, c.password_ref,
       c.sslmode, c.sslrootcert, c.pooler_mode
from databases_database d left join databases_databasecredential c on c.database_id = d.id
where d.organization_id = %(organization_id)s and d.deleted_at is null
  and (lower(d.type) = 'shopify' or lower(d.database_name) = 'shopify')
order by lower(d.type) <> 'shopify', d.id
limit 1"""


_ORGANIZATIONS: Final = """
select distinct organization_id from databases_database
where deleted_at is null and (lower(type) = 'shopify' or lower(database_name) = 'shopify')
order by organization_id"""

# Two operators may connect the same shop at the same time.
_LOCK: Final = "select pg_advisory_xact_lock(hashtext('connect ' || %(shop_domain)s))"

_OTHERS: Final = """
select organization_id from shopify_shopifyconnection
where myshopify_domain = %(shop_domain)s and status = 'active'
  and organization_id <> %(organization_id)s"""

_ACTIVATE: Final = """
update shopify_shopifyconnection set status = 'active', updated_at = now()
where myshopify_domain = %(shop_domain)s and organization_id = %(organization_id)s
returning id"""

_INSERT_CONNECTION: Final = """
insert into shopify_shopifyconnection (organization_id, myshopify_domain)
values (%(organization_id)s, %(shop_domain)s)"""

_RENAME_DATABASE: Final = """
update databases_database set database_name = %(database_name)s
where id = (select id from databases_database
            where organization_id = %(organization_id)s and deleted_at is null
              and lower(type) = 'shopify'
            order by id limit 1)
returning id"""

_INSERT_DATABASE: Final = """
insert into databases_database (organization_id, type, database_name)
values (%(organization_id)s, 'shopify', %(database_name)s)
returning id"""

_CREDENTIAL: Final = """
insert into databases_databasecredential
  (database_id, host, port, username, password_encrypted, sslmode, sslrootcert, pooler_mode)
values (%(database_id)s, %(host)s, %(port)s, %(username)s, %(password_encrypted)s, %(sslmode)s,
        %(sslrootcert)s, %(pooler_mode)s)
on conflict (database_id) do update set
  host = excluded.host, port = excluded.port, username = excluded.username,
  password_encrypted = excluded.password_encrypted, password_ref = null,
  sslmode = excluded.sslmode, sslrootcert = excluded.sslrootcert,
  pooler_mode = excluded.pooler_mode"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where a shop's events go."""

    organization_id: str
    target: db.Target


@dataclass(frozen=True, slots=True, kw_only=True)
class _Connection:
    id: int
    organization_id: str
    status: str
    is_paused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Database:
    id: int
    database_name: str
    host: str | None
    port: int | None
    username: str | None
    password_encrypted: str | None
    password_ref: str | None
    sslmode: str | None
    sslrootcert: str | None
    pooler_mode: db.PoolerMode | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Remembered:
    answer: Route | HookledgerError
    fresh_until: float


class Directory:
    """Finds routes in the application database."""

    def __init__(
        self,
        application: db.Pool,
        keyring: Keyring,
        *,
        resolve_secret: Callable[[str], str],
        override_url: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._application = application
        self._keyring = keyring
        self._resolve_secret = resolve_secret
        self._override_url = override_url
        self._clock = clock
        self._known: dict[str, _Remembered] = {}

    def route(self, shop_domain: str) -> Route:
        """The shop's route.

        Raises UnknownShopError, AmbiguousShopError, StorageConfigurationError, TenantPaused, and,
        while the application database is out of reach and nothing is remembered,
        DirectoryUnavailableError.
        """
        remembered = self._known.get(shop_domain)
        if remembered is None or self._clock() >= remembered.fresh_until:
            remembered = self._remember(shop_domain, remembered)
        if isinstance(remembered.answer, Route):
            return remembered.answer
        # A fresh one: threads must not share, and pile tracebacks on, one exception.
        raise copy(remembered.answer)

    def doubt(self, shop_domain: str) -> None:
        """The shop's database refused the credential: it is looked up again soon."""
        remembered = self._known.get(shop_domain)
        if remembered is not None:
            soon = remembered.fresh_until - FOUND_SECONDS + MISSED_SECONDS
            self._known[shop_domain] = replace(remembered, fresh_until=soon)

    def organization(self, shop_domain: str) -> str | None:
        """The shop's organization, as far as it is remembered."""
        remembered = self._known.get(shop_domain)
        if remembered and isinstance(remembered.answer, Route):
            return remembered.answer.organization_id
        return None

    def organizations(self) -> list[str]:
        """Every organization that has a tenant database, in the order of their names."""
        return self._ask(
            lambda connection: [row[0] for row in connection.execute(_ORGANIZATIONS).fetchall()]
        )

    def target(self, organization_id: str) -> db.Target:
        """The organization's tenant database; raises StorageConfigurationError."""
        return self._ask(lambda connection: self._target(connection, organization_id))

    def _remember(self, shop_domain: str, old: _Remembered | None) -> _Remembered:
        try:
            answer = self._found(shop_domain)
        except DirectoryUnavailableError as error:
            if old is None:
                raise
            log.warning("directory.stale", error, shop_domain=shop_domain)
            return old
        lasts = FOUND_SECONDS if isinstance(answer, Route) else MISSED_SECONDS
        remembered = _Remembered(answer=answer, fresh_until=self._clock() + lasts)
        self._known[shop_domain] = remembered
        return remembered

    def _found(self, shop_domain: str) -> Route | HookledgerError:
        try:
            return self._ask(lambda connection: self._look_up(connection, shop_domain))
        except DirectoryUnavailableError:
            raise
        except HookledgerError as error:
            return error

    def _ask(self, work: Callable[[psycopg.Connection[Any]], T]) -> T:
        return asked(
            lambda: self._application.run(work),
            "The application database could not be asked where the events go.",
        )

    def _look_up(self, connection: psycopg.Connection[Any], shop_domain: str) -> Route:
        with connection.cursor(row_factory=class_row(_Connection)) as cursor:
            matches = cursor.execute(_CONNECTIONS, {"shop_domain": shop_domain}).fetchall()
        match = _only(matches, shop_domain)
        if match.is_paused:
            raise TenantPaused(
                f"Organization {match.organization_id} is paused. Its events wait here until "
                "`manage.py unpause`.",
                match.organization_id,
            )
        organization_id = match.organization_id
        return Route(
            organization_id=organization_id, target=self._target(connection, organization_id)
        )

    def _target(self, connection: psycopg.Connection[Any], organization_id: str) -> db.Target:
        if self._override_url:
            return db.Target(conninfo=db.with_tls(self._override_url))
        with connection.cursor(row_factory=class_row(_Database)) as cursor:
            database = cursor.execute(_DATABASE, {"organization_id": organization_id}).fetchone()
        if database is None:
            raise StorageConfigurationError(
                "The organization has no database of type or name shopify. Create it with "
                "`manage.py connect_shop`; this event is then stored by itself."
            )
        if database.host is None:
            raise StorageConfigurationError(
                f"Database {database.id} has no credential. Create it with "
                "`manage.py connect_shop`; this event is then stored by itself."
            )
        return db.Target(
            conninfo=db.with_tls(
                make_conninfo(
                    host=database.host,
                    port=database.port,
                    user=database.username,
                    password=self._password(database),
                    dbname=database.database_name,
                    sslmode=database.sslmode or None,
                    sslrootcert=_authority(database.sslrootcert),
                )
            ),
            pooler_mode=database.pooler_mode or "none",
        )

    def _password(self, database: _Database) -> str:
        if database.password_encrypted is not None:
            return self._keyring.decrypt(database.password_encrypted)
        return self._resolve_secret(database.password_ref or "")


def asked(work: Callable[[], T], otherwise: str) -> T:
    """What the application database answers to `work`; its absence is no fault of the tenant's.

    Raises DirectoryUnavailableError with the words of `otherwise` when it is out of reach.
    """
    try:
        return work()
    except db.UNREACHABLE as error:
        raise DirectoryUnavailableError(otherwise) from error


def connect_shop(
    connection: psycopg.Connection[Any],
    keyring: Keyring,
    *,
    shop_domain: str,
    organization_id: str,
    target: db.Target,
) -> None:
    """Puts connection, database and encrypted credential on record, or renews them.

    The file that the address names as `sslrootcert` is kept with it. Raises AmbiguousShopError when
    the shop is connected to another organization.
    """
    parts = conninfo_to_dict(target.conninfo)
    names = {"shop_domain": shop_domain, "organization_id": organization_id}
    database = names | {"database_name": parts.get("dbname", "postgres")}
    with connection.transaction():
        connection.execute(_LOCK, names)
        if other := connection.execute(_OTHERS, names).fetchone():
            raise AmbiguousShopError(
                f"{shop_domain} is connected to organization {other[0]}. Disconnect it there first."
            )
        if not connection.execute(_ACTIVATE, names).fetchone():
            connection.execute(_INSERT_CONNECTION, names)
        row = (
            connection.execute(_RENAME_DATABASE, database).fetchone()
            or connection.execute(_INSERT_DATABASE, database).fetchone()
        )
        credential = {
            "database_id": row and row[0],
            "host": parts.get("host", "localhost"),
            "port": parts.get("port", 5432),
            "username": parts.get("user", "postgres"),
            "password_encrypted": keyring.encrypt(str(parts.get("password", ""))),
            "sslmode": parts["sslmode"],
            "sslrootcert": _certificates(str(parts.get("sslrootcert") or "system")),
            "pooler_mode": target.pooler_mode,
        }
        connection.execute(_CREDENTIAL, credential)


def _certificates(sslrootcert: str) -> str | None:
    """What the file holds; None for the system's own authorities."""
    return None if sslrootcert == "system" else Path(sslrootcert).read_text()


@cache
def _authority(certificates: str | None) -> str | None:
    """A file of this process with the certificates in it: libpq reads them from nowhere else."""
    if not certificates:
        return None
    with tempfile.NamedTemporaryFile("w", suffix=".pem", delete=False) as file:
        file.write(certificates)
    atexit.register(Path(file.name).unlink, missing_ok=True)
    return file.name


def _only(matches: list[_Connection], shop_domain: str) -> _Connection:
    """The connection meant: one active beats any that are not. A disconnected one is none."""
    for status in ("active", "uninstalled"):
        found = [match for match in matches if match.status == status]
        if len(found) == 1:
            return found[0]
        if found:
            raise AmbiguousShopError(
                f"{shop_domain} has {len(found)} {status} connections "
                f"(ids {', '.join(str(match.id) for match in found)}). Leave one of them active."
            )
    if matches:
        raise UnknownShopError(
            f"{shop_domain} was disconnected. Connect it again with `manage.py connect_shop`."
        )
    raise UnknownShopError(
        f"{shop_domain} has no connection. Create it with `manage.py connect_shop`; "
        "this event is then stored by itself."
    )
