"""Secrets: references to them in settings, and tenants' passwords encrypted at rest."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from shared.errors import ConfigurationError, StorageConfigurationError

if TYPE_CHECKING:
    from cryptography.fernet import MultiFernet
    from google.cloud.secretmanager import SecretManagerServiceClient

SECRET_PREFIX: Final = "_secret:"  # noqa: S105 - the mark of a reference, not a secret
ENV_PREFIX: Final = "_env:"
TIMEOUT_SECONDS: Final = 10

_SECRET_NAME = re.compile(r"projects/[^/]+/secrets/[^/]+/versions/[^/]+")


def resolve(
    value: str,
    environ: Mapping[str, str],
    client: "SecretManagerServiceClient | None" = None,
) -> str:
    """`value`, or what it refers to: `_env:NAME` or `_secret:projects/P/secrets/S/versions/V`.

    Raises ConfigurationError where the reference leads nowhere.
    """
    if value.startswith(ENV_PREFIX):
        name = value.removeprefix(ENV_PREFIX)
        if not environ.get(name):
            raise ConfigurationError(f"refers to the variable {name}, which is not set")
        return environ[name]
    if value.startswith(SECRET_PREFIX):
        return _accessed(value.removeprefix(SECRET_PREFIX), client)
    return value


class Keyring:
    """Encrypts with the first of several Fernet keys and decrypts with any of them."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = keys
        self._fernet: MultiFernet | None = None

    def encrypt(self, text: str) -> str:
        """`text` as a Fernet token."""
        return self._open().encrypt(text.encode()).decode("ascii")

    def decrypt(self, token: str) -> str:
        """What `encrypt` was given; raises StorageConfigurationError when no key fits."""
        from cryptography.fernet import InvalidToken  # noqa: PLC0415 - see _open

        try:
            return self._open().decrypt(token).decode()
        except InvalidToken:
            raise StorageConfigurationError(
                "The credential was encrypted with a key that CREDENTIAL_KEYS does not hold. "
                "Add the old key after the new one, or connect the shop again."
            ) from None

    def _open(self) -> "MultiFernet":
        # Imported late: many cold starts find their tenant through SHOPIFY_STORAGE_DATABASE_URL.
        from cryptography.fernet import Fernet, MultiFernet  # noqa: PLC0415

        if self._fernet is None:
            if not self._keys:
                raise ConfigurationError("CREDENTIAL_KEYS is missing. See docs/configuration.md.")
            try:
                self._fernet = MultiFernet([Fernet(key) for key in self._keys])
            except ValueError:
                raise ConfigurationError(
                    "CREDENTIAL_KEYS holds something that is no Fernet key "
                    "(32 bytes in url-safe base64)."
                ) from None
        return self._fernet


def _accessed(name: str, client: "SecretManagerServiceClient | None") -> str:
    if not _SECRET_NAME.fullmatch(name):
        raise ConfigurationError("must look like _secret:projects/P/secrets/S/versions/V")
    # Imported late: half a second that only deployments without mounted secrets pay.
    from google.api_core.exceptions import GoogleAPIError  # noqa: PLC0415
    from google.cloud.secretmanager import SecretManagerServiceClient  # noqa: PLC0415

    try:
        client = client or SecretManagerServiceClient()
        answer = client.access_secret_version(name=name, timeout=TIMEOUT_SECONDS, retry=None)
    except GoogleAPIError as error:
        raise ConfigurationError(
            f"refers to {name}, which Secret Manager did not give: {type(error).__name__}"
        ) from error
    return answer.payload.data.decode().strip()
