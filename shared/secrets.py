"""Secrets: references to them in settings, and tenants' passwords encrypted at rest."""

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shared import log
from shared.errors import (
    ConfigurationError,
    SecretUnavailableError,
    StorageConfigurationError,
)

if TYPE_CHECKING:
    from cryptography.fernet import MultiFernet
    from google.cloud.secretmanager import SecretManagerServiceClient

SECRET_PREFIX: Final = "_secret:"  # noqa: S105 - the mark of a reference, not a secret
ENV_PREFIX: Final = "_env:"
KEPT_SECONDS: Final = 300
# A secret that nobody here knows is waited for; one that is known has a delivery waiting behind it.
TIMEOUT_SECONDS: Final = 3.0
REFRESH_SECONDS: Final = 1.0
# Nobody asks again so soon after Secret Manager did not answer.
SILENCE_SECONDS: Final = 10

_SECRET_NAME = re.compile(r"projects/[^/]+/secrets/[^/]+/versions/[^/]+")


def resolve(
    value: str,
    environ: Mapping[str, str],
    client: "SecretManagerServiceClient | None" = None,
) -> str:
    """`value`, or what it refers to: `_env:NAME` or `_secret:projects/P/secrets/S/versions/V`.

    A secret is kept for KEPT_SECONDS in this process, and longer while Secret Manager is out of
    reach; with a `client` of the caller's own nothing is kept. Raises ConfigurationError where the
    reference leads nowhere, SecretUnavailableError where it cannot be followed for now.
    """
    if value.startswith(ENV_PREFIX):
        name = value.removeprefix(ENV_PREFIX)
        if not environ.get(name):
            raise ConfigurationError(f"refers to the variable {name}, which is not set")
        return environ[name]
    if value.startswith(SECRET_PREFIX):
        vault = _vault if client is None else Vault(client)
        return vault.read(value.removeprefix(SECRET_PREFIX))
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    text: str
    fresh_until: float


class Vault:
    """What this process knows of Secret Manager."""

    def __init__(
        self,
        client: "SecretManagerServiceClient | None" = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without a `client` one is made on first use: the server forks after import."""
        self._client = client
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept] = {}
        self._silent_until = clock()

    def read(self, name: str) -> str:
        """The secret version's text; what was known, while Secret Manager does not answer.

        Raises ConfigurationError when it refuses, SecretUnavailableError when nothing is known.
        """
        if not _SECRET_NAME.fullmatch(name):
            raise ConfigurationError("must look like _secret:projects/P/secrets/S/versions/V")
        with self._lock:
            kept, now = self._kept.get(name), self._clock()
            is_silent = now < self._silent_until
            if kept and (is_silent or now < kept.fresh_until):
                return kept.text
            if kept:  # one caller asks, the others go on with what is known
                self._kept[name] = _Kept(text=kept.text, fresh_until=now + SILENCE_SECONDS)
        if is_silent:
            raise SecretUnavailableError(
                f"refers to {name}, and Secret Manager did not answer a moment ago"
            )
        return self._refreshed(name, kept)

    def _refreshed(self, name: str, kept: _Kept | None) -> str:
        try:
            text = self._asked(name, REFRESH_SECONDS if kept else TIMEOUT_SECONDS)
        except SecretUnavailableError as error:
            self._silent_until = self._clock() + SILENCE_SECONDS
            if kept is None:
                raise
            log.warning("secret.stale", error, secret=name)
            return kept.text
        except ConfigurationError:
            self._kept.pop(name, None)
            raise
        self._kept[name] = _Kept(text=text, fresh_until=self._clock() + KEPT_SECONDS)
        return text

    def _asked(self, name: str, seconds: float) -> str:
        # Imported late: half a second that only deployments without mounted secrets pay.
        from google.api_core import exceptions as api  # noqa: PLC0415
        from google.api_core.retry import Retry  # noqa: PLC0415
        from google.auth.exceptions import (  # noqa: PLC0415
            DefaultCredentialsError,
            GoogleAuthError,
        )

        retry = Retry(initial=0.05, maximum=0.5, timeout=seconds)
        try:
            answer = self._opened().access_secret_version(name=name, timeout=seconds, retry=retry)
            return answer.payload.data.decode().strip()
        except (
            *(api.NotFound, api.Forbidden, api.Unauthorized, api.BadRequest),
            *(DefaultCredentialsError, UnicodeDecodeError),
        ) as error:
            raise ConfigurationError(
                f"refers to {name}, which Secret Manager did not give: {type(error).__name__}"
            ) from error
        except (api.GoogleAPIError, GoogleAuthError) as error:
            raise SecretUnavailableError(
                f"refers to {name}, and Secret Manager did not answer: {type(error).__name__}"
            ) from error

    def _opened(self) -> "SecretManagerServiceClient":
        from google.cloud.secretmanager import SecretManagerServiceClient  # noqa: PLC0415

        with self._lock:
            if self._client is None:
                self._client = SecretManagerServiceClient()
            return self._client


_vault = Vault()


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
