"""All tenants' passwords encrypted anew, with the newest key, beside running functions.

A credential that changes meanwhile is left to whoever changed it and looked at again. Functions
read the old and the new form as long as `CREDENTIAL_KEYS` holds both keys.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from psycopg.rows import class_row, scalar_row

from shared import db
from shared.errors import ConfigurationError, StorageConfigurationError
from shared.secrets import Keyring

STEP_ROWS: Final = 100
ATTEMPTS: Final = 3

_COUNT: Final = "select count(*) from databases_databasecredential where id > %(after)s"

_STEP: Final = """
select id, password_encrypted as token from databases_databasecredential
where id > %(after)s and password_encrypted is not null
order by id limit %(rows)s"""

_REPLACE: Final = """
update databases_databasecredential c set password_encrypted = r.token
from unnest(%(ids)s::bigint[], %(old)s::text[], %(new)s::text[]) r (id, old, token)
where c.id = r.id and c.password_encrypted = r.old
returning c.id"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What was done to a bounded number of credentials; the counts are of this step."""

    renewed: int
    kept: int  # they had the newest key already
    unreadable: tuple[int, ...]  # ids: no key of ours fits


@dataclass(frozen=True, slots=True, kw_only=True)
class _Credential:
    id: int
    token: str


def count(application: db.Pool) -> int:
    """How many credentials there are."""
    return application.fetch(scalar_row, _COUNT, {"after": 0})[0]


def rotate(application: db.Pool, keys: Sequence[str]) -> Iterator[Step]:
    """Re-encrypts, a step at a time and one transaction each. Safe to repeat, and beside itself.

    Raises ConfigurationError without keys.
    """
    if not keys:
        raise ConfigurationError("CREDENTIAL_KEYS is missing. See docs/configuration.md.")
    rings = Keyring(keys[:1]), Keyring(keys)
    after = 0
    while found := application.fetch(
        class_row(_Credential), _STEP, {"after": after, "rows": STEP_ROWS}
    ):
        yield application.run(lambda connection, after=after: _step(connection, rings, after))
        after = found[-1].id


def _step(connection: psycopg.Connection[Any], rings: tuple[Keyring, Keyring], after: int) -> Step:
    renewed, kept, unreadable = 0, set[int](), set[int]()
    for _ in range(ATTEMPTS):
        with connection.cursor(row_factory=class_row(_Credential)) as cursor:
            found = cursor.execute(_STEP, {"after": after, "rows": STEP_ROWS}).fetchall()
        replaced: dict[int, tuple[str, str]] = {}
        for each in found:
            match _renewed(each.token, *rings):
                case None:
                    unreadable.add(each.id)
                case token if token == each.token:
                    kept.add(each.id)
                case token:
                    replaced[each.id] = each.token, token
        if not replaced:
            break
        old, new = zip(*replaced.values(), strict=True)
        changed = connection.execute(
            _REPLACE, {"ids": list(replaced), "old": list(old), "new": list(new)}
        ).fetchall()
        renewed += len(changed)
        if len(changed) == len(replaced):
            break
    return Step(renewed=renewed, kept=len(kept), unreadable=tuple(sorted(unreadable)))


def _renewed(token: str, newest: Keyring, all_keys: Keyring) -> str | None:
    """The token for the newest key: itself, if it has that already; None where no key fits."""
    try:
        newest.decrypt(token)
    except StorageConfigurationError:
        pass
    else:
        return token
    try:
        return newest.encrypt(all_keys.decrypt(token))
    except StorageConfigurationError:
        return None
