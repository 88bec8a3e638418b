"""What to do about a failed event: one line for each kind of error."""

from typing import Final

from shared import db

# By the error's class name: our own errors, and two of Python's that mean something here.
_BY_TYPE: Final = {
    "AmbiguousShopError": "Leave one of the connections that the message names active; requeue.",
    "ConfigurationError": "Correct the setting or the secret that the message names; requeue.",
    "DatabaseBusyError": "Let the load pass; it replays by itself. Often: raise TENANT_POOL_SIZE.",
    "DirectoryUnavailableError": "Restore the application database; it replays by itself.",
    "EventCollisionError": "Kept under an id of its own; it replays by itself.",
    "MissingAttributeError": "Correct the publisher. This row cannot be replayed: resolve it.",
    "PublishError": "Look at Pub/Sub and the function's role; it replays by itself.",
    "SecretUnavailableError": "Restore the way to Secret Manager; it replays by itself.",
    "ShopMismatchError": "The body names another shop: find out who sent it, then resolve it.",
    "StorageConfigurationError": (
        "Put database and credential on record and provision it: `manage.py connect_shop`."
    ),
    "TenantPaused": "Nothing while the pause lasts; it ends with `manage.py unpause`.",
    "UndecodableMessageError": "Correct the publisher. This row cannot be replayed: resolve it.",
    "UnknownShopError": "Connect the shop: `manage.py connect_shop` requeues its failed events.",
    "UnpublishableBodyError": "Pub/Sub cannot carry it; it replays by itself.",
    "ValueError": "Correct the data at its source, or the parser, then requeue; or resolve it.",
    "WorkerLost": "Again for the same event: see what it does to the retry function.",
}
_RESTORE: Final = "Restore access to the tenant database; it replays by itself."
_CONTENTION: Final = "Let the load on the tenant database pass; it replays by itself."

# By SQLSTATE or by our own word for it, before its class.
_BY_CODE: Final = {
    "40001": _CONTENTION,
    "40P01": _CONTENTION,
    "42501": "Grant the role of the credential what it lacks, then requeue.",
    "53100": "Make room on the tenant database's disk; it replays by itself.",
    "55P03": _CONTENTION,
    "57014": _CONTENTION,
    "ipv6_only": "Give the address of an IPv4 pooler to `manage.py connect_shop`.",
    "tls_failed": "Correct the tenant database's TLS, or the credential's sslmode; then requeue.",
    "25006": "The tenant database is read-only: make it writable; it replays by itself.",
}

# By the first two characters of a SQLSTATE.
_BY_CLASS: Final = {
    "22": "Correct the column's type, or the data at its source; then requeue.",
    "23": "Remove the constraint or trigger that refuses the row; then requeue.",
    "42": "Correct the tenant's table, or run `manage.py provision_schema`; then requeue.",
    "53": "Give the tenant database more resources; it replays by itself.",
    "54": "A limit of the tenant database refuses the row: change its table, then requeue.",
    "P0": "Correct the tenant's own trigger or function, then requeue.",
}
_OUR_FAULT: Final = "An error in the code: deploy a fix, then requeue."

# What was given up does nothing by itself any more.
_BY_ITSELF: Final = "it replays by itself"
_BY_HAND: Final = "then requeue it"


def remedy(error_type: str, error_code: str, status: str) -> str:
    """The next step, in one line, for a failed event in that state."""
    if status == "resolved":
        return "Nothing: it is resolved."
    step = _step(error_type, error_code)
    return step.replace(_BY_ITSELF, _BY_HAND) if status == "failed" else step


def _step(error_type: str, error_code: str) -> str:
    if error_code in _BY_CODE:
        return _BY_CODE[error_code]
    if error_code[:2] in db.CONNECTION_CLASSES or error_code in db.CONNECTION_CODES:
        return _RESTORE
    return _BY_TYPE.get(error_type) or _BY_CLASS.get(error_code[:2]) or _OUR_FAULT
