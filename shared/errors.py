"""What can go wrong, by name. Two families: trying again helps, or somebody must act first.

An error's class name is what operators read as `error_type`; `code` is stable for programs.
Messages name cause and remedy and never hold a secret or a value from a payload. A payload
that is not a JSON object is a plain `ValueError`, as it was in the earlier system.
"""

from typing import ClassVar


class HookledgerError(Exception):
    """An error of our own; its message was written to be shown."""

    code: ClassVar[str] = "unexpected"


class TransientError(HookledgerError):
    """Trying again later helps without anybody acting."""


class PermanentError(HookledgerError):
    """Trying again helps only after somebody has changed something."""


class ConfigurationError(PermanentError):
    """A setting of ours is missing or wrong."""

    code = "configuration"


class UndecodableMessageError(PermanentError):
    """The message's data is not what its encoding says."""

    code = "message_undecodable"


class MissingAttributeError(PermanentError):
    """The message does not say which shop or topic it is about."""

    code = "attribute_missing"


class ShopMismatchError(PermanentError):
    """The body names another shop than the header or attribute."""

    code = "shop_mismatch"


class UnknownShopError(PermanentError):
    """No connection for the shop."""

    code = "shop_unknown"


class AmbiguousShopError(PermanentError):
    """More than one connection could be meant."""

    code = "shop_ambiguous"


class StorageConfigurationError(PermanentError):
    """The organization has no usable tenant database on record."""

    code = "storage_configuration"


class TenantPaused(TransientError):
    """An operator holds this organization's events in the failure ledger."""

    code = "tenant_paused"

    def __init__(self, message: str, organization_id: str = "") -> None:
        super().__init__(message)
        self.organization_id = organization_id


class SecretUnavailableError(TransientError):
    """Secret Manager could not be asked for a secret that a setting or credential refers to."""

    code = "secret_unavailable"


class DirectoryUnavailableError(TransientError):
    """The application database could not be asked where the shop's events go."""

    code = "directory_unavailable"


class EventCollisionError(PermanentError):
    """One event id, two different bodies. Neither overwrites the other."""

    code = "event_collision"


class DatabaseBusyError(TransientError):
    """Every connection that this process may hold to one database is in use."""

    code = "database_busy"


class DatabaseTimeoutError(TransientError):
    """The server held a statement past its time; the connection was cut from our side."""

    code = "database_timeout"


class PublishError(TransientError):
    """Pub/Sub did not confirm the message."""

    code = "publish_failed"


class UnpublishableBodyError(TransientError):
    """Pub/Sub cannot carry this body; it travels through the failure ledger instead."""

    code = "body_unpublishable"


class WorkerLost(TransientError):
    """The worker that had started this replay never gave its verdict."""

    code = "worker_lost"
