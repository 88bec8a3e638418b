"""One attempt to send a notification: by whatever way its profile names, and never an exception."""

import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol

from shared import log
from shared.notifier import verdicts
from shared.notifier.deadline import Deadline, bounded
from shared.notifier.graph import Graph
from shared.notifier.model import REPLY_CHARACTERS, Message, Profile, Result, Verdict
from shared.notifier.references import Resolve, Secrets
from shared.notifier.settings import MalformedProfileError, timeout_seconds
from shared.notifier.smtp import Smtp
from shared.notifier.webhook import Webhook
from shared.text import clean


class Transport(Protocol):
    """A way for messages to leave, made of a profile that was found good."""

    def prepare(self, message: Message, secrets: Secrets) -> Callable[[Deadline], Verdict]:
        """All that needs no network, with the secrets at hand; what it returns sends."""
        ...


TRANSPORTS: Final[dict[str, Callable[[Profile], Transport]]] = {
    "smtp": Smtp,
    "graph": Graph,
    "webhook": Webhook,
}


def attempt(
    profile: Profile,
    message: Message,
    *,
    resolve: Resolve,
    renew: Resolve | None = None,
    deadline: Callable[[float], Deadline] = Deadline,
) -> Verdict:
    """Sends `message` to those of it who are pending. Never raises.

    All that waits for others, secrets included, is over after the profile's timeout, in seconds.
    `resolve` follows a reference to a secret; `renew` does so past any memory.
    """
    known: list[Secrets] = []
    try:
        transport = _transport(profile)
        secrets = Secrets(profile.secrets, resolve, renew)
        known.append(secrets)
        left = _loaded(secrets, timeout_seconds(profile))
        send = transport.prepare(message, secrets)
        verdict = _sent(send, deadline(left))
    except Exception as error:  # noqa: BLE001 - whoever asked has nobody to raise it to
        verdict = verdicts.of_error(error) or _internal(error, profile, message)
    return _told(verdict, known)


def check(profile: Profile) -> str | None:
    """Why the profile cannot be used, as far as that shows without network, files and secrets."""
    try:
        _transport(profile)
        Secrets(profile.secrets, str)
        timeout_seconds(profile)
    except Exception as error:  # noqa: BLE001 - a profile may hold anything
        found = verdicts.of_error(error)
        return found.text if found else f"The profile is malformed: {type(error).__name__}."
    return None


def _transport(profile: Profile) -> Transport:
    make = TRANSPORTS.get(profile.transport)
    if make is None:
        known = ", ".join(TRANSPORTS)
        raise UnknownTransportError(f"The profile's transport is unknown; known are {known}.")
    return make(profile)


class UnknownTransportError(MalformedProfileError):
    """No way of this name."""

    code = "transport_unknown"


def _loaded(secrets: Secrets, seconds: float) -> float:
    """Resolves the secrets; the seconds that this leaves."""
    started = time.monotonic()
    bounded(secrets.load, seconds)
    return seconds - (time.monotonic() - started)


def _sent(send: Callable[[Deadline], Verdict], deadline: Deadline) -> Verdict:
    with deadline:
        try:
            verdict = send(deadline)
        except Exception as error:
            if not deadline.fired:
                raise
            # Whatever it looks like, it is our own watchdog's doing.
            is_ambiguous = isinstance(error, verdicts.UnansweredError)
            return _timeout(deadline, ambiguous=is_ambiguous)
    if deadline.fired and verdict.result is not Result.SENT:
        return replace(
            _timeout(deadline, ambiguous=verdict.ambiguous), recipients=verdict.recipients
        )
    return verdict


def _timeout(deadline: Deadline, *, ambiguous: bool) -> Verdict:
    text = f"The server had not answered when time was up, {deadline.seconds:.0f} s."
    return verdicts.transient("timeout", text, ambiguous=ambiguous)


def _internal(error: Exception, profile: Profile, message: Message) -> Verdict:
    """An error of our own. Its words are not trusted: they may quote a secret."""
    log.error(
        "notifier.sender_failed",
        notification=message.notification_id,
        profile=profile.name,
        error_type=type(error).__name__,
        stack_trace="".join(traceback.format_tb(error.__traceback__)),
    )
    text = f"The attempt ended in an error of our own, {type(error).__name__}: see the log."
    return verdicts.transient("internal_error", text)


def _told(verdict: Verdict, known: list[Secrets]) -> Verdict:
    """As it may be shown: no secret, no control characters, not too long."""
    text = verdicts.shown(clean(verdict.text))
    for secrets in known:
        text = secrets.hidden(text)
    if len(text) > REPLY_CHARACTERS:
        text = text[: REPLY_CHARACTERS - 1] + "…"
    return replace(verdict, text=text)
