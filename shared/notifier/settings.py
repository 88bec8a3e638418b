"""A profile's settings: a JSON object that anybody may have written, read as what it must be."""

import ipaddress
import ssl
from collections.abc import Collection, Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from shared.errors import PermanentError
from shared.notifier.model import TIMEOUT_SECONDS_MAX, Profile

NAME_CHARACTERS: Final = 253


class MalformedProfileError(PermanentError):
    """The profile cannot be used as it is. The text names the setting, and no value."""

    code = "profile_malformed"


class Settings:
    """Reads one setting after the other; `finish` says what nobody asked for.

    Every method raises MalformedProfileError.
    """

    def __init__(self, profile: Profile) -> None:
        if not isinstance(profile.settings, Mapping):
            raise MalformedProfileError("The profile's settings must be a JSON object.")
        self._values: Mapping[str, Any] = profile.settings
        self._secrets = profile.secrets
        self._asked: set[str] = set()

    def text(self, name: str, default: str | None = None) -> str:
        """A text of printable characters, not empty unless that is the default."""
        value = self._value(name, default)
        if value == default and value is not None:
            return value
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            raise MalformedProfileError(f"The profile's {name} must be a text.")
        return value.strip()

    def choice(self, name: str, choices: Collection[str], default: str) -> str:
        """One of a few words."""
        value = self._value(name, default)
        if not isinstance(value, str) or (value not in choices and value != default):
            known = ", ".join(choices)
            raise MalformedProfileError(f"The profile's {name} must be one of {known}.")
        return value

    def port(self, name: str, default: int) -> int:
        """A port's number."""
        value = self._value(name, default)
        if not is_whole(value) or not 1 <= value <= 65535:
            raise MalformedProfileError(f"The profile's {name} must be a number from 1 to 65535.")
        return value

    def host(self, name: str, default: str | None = None) -> str:
        """A host's name as DNS takes it, or its address."""
        try:
            return host_name(self.text(name, default))
        except ValueError:
            raise MalformedProfileError(
                f"The profile's {name} must be a host's name or address, without a port."
            ) from None

    def origin(self, name: str, default: str) -> str:
        """An https address without a path, without a slash at its end."""
        value = self.text(name, default).rstrip("/")
        check_url(value, f"The profile's {name}")
        if urlsplit(value).path or urlsplit(value).query:
            raise MalformedProfileError(f"The profile's {name} must be an address without a path.")
        return value

    def finish(self, *, secrets: Collection[str], required: Collection[str] = ()) -> None:
        """Refuses settings and secrets that mean nothing here, and misses those that are needed."""
        for kind, found, known in (
            ("setting", set(self._values), self._asked),
            ("secret", set(self._secrets), {*secrets, *required}),
        ):
            if unknown := sorted(found - known):
                names = ", ".join(sorted(known)) or "none"
                raise MalformedProfileError(
                    f"The profile has an unknown {kind} {unknown[0][:40]!r}; known are {names}."
                )
        if missing := sorted(set(required) - set(self._secrets)):
            raise MalformedProfileError(f"The profile has no secret {missing[0]}.")

    def _value(self, name: str, default: Any) -> Any:
        self._asked.add(name)
        value = self._values.get(name)
        if value is None and default is None:
            raise MalformedProfileError(f"The profile has no {name}.")
        return default if value is None else value


def timeout_seconds(profile: Profile) -> int:
    """How long an attempt may take, in seconds; raises MalformedProfileError."""
    value = profile.timeout_seconds
    if not is_whole(value) or value <= 0:
        raise MalformedProfileError(
            "The profile's timeout_seconds must be a whole number above 0 "
            f"(at most {TIMEOUT_SECONDS_MAX} are used)."
        )
    return min(value, TIMEOUT_SECONDS_MAX)


def tls_context(ca_file: str) -> ssl.SSLContext:
    """Verifies certificates: by the system's authorities, or by those of `ca_file` alone."""
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:  # ssl.SSLError is one
        raise MalformedProfileError(
            f"The profile's ca_file cannot be read as certificates: {type(error).__name__}."
        ) from error


def check_url(value: str, what: str) -> None:
    """Raises MalformedProfileError unless `value` is an https address; http is for loopback."""
    try:
        url = urlsplit(value)
        host, _ = host_name(url.hostname or ""), url.port
    except ValueError:
        host, url = "", urlsplit("")
    is_safe = url.scheme == "https" or (url.scheme == "http" and is_loopback(host))
    is_plain = value.isascii() and value.isprintable() and " " not in value
    if not (host and is_safe and is_plain) or url.username is not None:
        raise MalformedProfileError(f"{what} must be an https address, without a user in it.")


def host_name(value: str) -> str:
    """As DNS takes it; raises ValueError."""
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        name = value.encode("idna").decode("ascii").lower()
    labels = name.removesuffix(".").split(".")
    are_words = all(label.replace("-", "").replace("_", "").isalnum() for label in labels)
    if not are_words or len(name) > NAME_CHARACTERS:
        raise ValueError("no host's name")
    return name


def is_loopback(host: str) -> bool:
    """Whether what is sent there stays on this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_whole(value: Any) -> bool:
    """Whether it is a whole number: True is none."""
    return isinstance(value, int) and not isinstance(value, bool)
