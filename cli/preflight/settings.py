"""The settings of this environment, and what each function would lack in it."""

from collections.abc import Iterator, Mapping
from typing import Final

from cli.preflight.finding import Finding, error, fine, guarded, warning
from shared import config
from shared.errors import ConfigurationError, SecretUnavailableError

# What stops without a setting. Who runs this command may not be given all that a function is.
_NEEDED: Final = {
    "SHOPIFY_CLIENT_SECRETS": "the webhook cannot verify anything",
    "PUBSUB_TOPIC": "neither webhook nor outbox can publish",
    "CREDENTIAL_KEYS": "no tenant's password can be read",
    "PRIVACY_HASH_KEY": "who was erased is not recognised",
}


def look(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Malformed settings are errors; missing ones a warning, for they may be set elsewhere."""
    try:
        settings = config.load(environ, require=("APP_DATABASE_URL",))
    except (ConfigurationError, SecretUnavailableError) as fault:
        faults = str(fault).removeprefix("Settings: ").removesuffix(" See docs/configuration.md.")
        for each in faults.rstrip(".").split("; "):
            yield error("settings", f"{each}.", "Correct it: docs/configuration.md.")
        return
    missing = [name for name in _NEEDED if not getattr(settings, name.lower())]
    for name in missing:
        yield warning(
            "settings",
            f"{name} is not set here. Where it is not, {_NEEDED[name]}.",
            "Run preflight with the deployment's settings, or see that the functions have it.",
        )
    yield from guarded("settings:keys", lambda: _keys(settings))
    if not missing:
        yield fine("settings", "All are there and well formed.")


def _keys(settings: config.Settings) -> Iterator[Finding]:
    from shared.secrets import Keyring  # noqa: PLC0415 - cryptography, where there is a key

    if settings.credential_keys:
        Keyring(settings.credential_keys).encrypt("preflight")
        yield fine("settings:keys", "CREDENTIAL_KEYS are Fernet keys.")
