"""A profile's secrets: references to them, their values for one attempt, and texts without them."""

import base64
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final
from urllib.parse import quote, quote_plus

from shared import secrets
from shared.errors import ConfigurationError

Resolve = Callable[[str], str]

HIDDEN: Final = "…"

# The prefix keeps whoever may edit a profile from having other variables sent to their own server.
_VARIABLE = re.compile(r"_env:NOTIFIER_[A-Z0-9_]+")
_VERSION = re.compile(r"_secret:projects/[^/\s]+/secrets/[^/\s]+/versions/(latest|[0-9]+)")


class ForbiddenReferenceError(ConfigurationError):
    """Not a reference that a profile may have."""

    code = "reference_forbidden"


class UnsetVariableError(ConfigurationError):
    """The variable is not set where the processor runs, or empty."""

    code = "env_unset"


class RefusedSecretError(ConfigurationError):
    """Secret Manager does not give this version, now or later."""

    code = "secret_refused"


def check(reference: str) -> None:
    """Raises ForbiddenReferenceError, whose text does not show what may be a password."""
    if not (_VARIABLE.fullmatch(reference) or _VERSION.fullmatch(reference)):
        raise ForbiddenReferenceError(
            "A secret is given as _env:NOTIFIER_NAME or as "
            "_secret:projects/P/secrets/S/versions/V, V being latest or a number."
        )


def resolver(environ: Mapping[str, str], *, is_fresh: bool = False) -> Resolve:
    """Follows references: raises ConfigurationError's children above, or SecretUnavailableError.

    A secret is remembered for some minutes, by this process, unless `is_fresh`.
    """

    def resolve(reference: str) -> str:
        check(reference)
        if reference.startswith(secrets.ENV_PREFIX):
            return _variable(reference.removeprefix(secrets.ENV_PREFIX), environ)
        try:
            if is_fresh:
                value = secrets.Vault().read(reference.removeprefix(secrets.SECRET_PREFIX))
            else:
                value = secrets.resolve(reference, environ)
        except ConfigurationError as error:
            raise RefusedSecretError(f"A secret of the profile {error}.") from error
        if not value:
            raise RefusedSecretError(f"A secret of the profile refers to {reference}: it is empty.")
        return value

    return resolve


def _variable(name: str, environ: Mapping[str, str]) -> str:
    if not environ.get(name):
        raise UnsetVariableError(
            f"The variable {name} is not set where the processor runs: set it, or correct the "
            "profile's reference."
        )
    return environ[name]


class Secrets:
    """What one attempt knows of its profile's secrets."""

    def __init__(
        self, references: Mapping[str, str], resolve: Resolve, renew: Resolve | None = None
    ) -> None:
        """`renew` asks past any memory. Raises ForbiddenReferenceError."""
        for reference in references.values():
            check(reference)
        self._references = references
        self._resolve = resolve
        self._renew = renew or resolve
        self._values: dict[str, str] = {}
        self._hidden: set[str] = set()

    def load(self) -> None:
        """Resolves them all; raises what the resolver does."""
        for key, reference in self._references.items():
            self._values[key] = self._resolve(reference)
            self.hide(self._values[key])

    def get(self, key: str) -> str | None:
        """The value, if the profile has one of this name."""
        return self._values.get(key)

    def renewed(self, key: str) -> bool:
        """Resolves one once more: whether it has changed."""
        value = self._renew(self._references[key])
        is_new = value != self._values[key]
        self._values[key] = value
        self.hide(value)
        return is_new

    def hide(self, *values: str) -> None:
        """Has these kept out of texts too, in the forms in which a server may repeat them."""
        self._hidden.update(form for value in values if value for form in _forms(value))

    def hidden(self, text: str) -> str:
        """`text` without any of them."""
        for value in sorted(self._hidden, key=len, reverse=True):
            text = text.replace(value, HIDDEN)
        return text


def _forms(value: str) -> Iterable[str]:
    encoded = base64.b64encode(value.encode("utf-8", "replace")).decode()
    words = " ".join(value.split())
    return (
        value,
        words,
        quote(value),
        quote(value, safe=""),
        quote_plus(value),
        encoded,
        _escaped(value),
    )


def _escaped(value: str) -> str:
    return json.dumps(value)[1:-1]
