"""Mail by Microsoft Graph, as an application: a token by client credentials, then one message."""

import base64
import hashlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final
from urllib.parse import quote, urlencode

from shared.notifier import http, mail, settings, verdicts
from shared.notifier.deadline import Deadline
from shared.notifier.model import Message, Profile, Result, Verdict
from shared.notifier.references import Secrets
from shared.notifier.smtp import sender

AUTHORITY: Final = "https://login.microsoftonline.com"
HOST: Final = "https://graph.microsoft.com"
CLIENT_SECRET: Final = "client_secret"  # noqa: S105 - the key of one
REQUEST_BYTES: Final = 3_500_000  # Graph refuses above 4 MB, and not in a way to rely on
EARLY_SECONDS: Final = 300  # before its end a token is not used any more

_SAYS_LATER: Final = ("temporarily_unavailable", "server_error")
# Numbers that Microsoft names retryable, unavailable or throttled, in answers that are 4xx.
_LATER_NUMBERS: Final = frozenset({90006, 90012, 90024, 90033, 90055, 90090, 90091})
_UNKNOWN_SECRET: Final = "invalid_client"  # noqa: S105 - the answer to one

_HINTS: Final = {
    401: "Graph does not accept its own authority's token: check authority and host. ",
    403: "Grant the application Mail.Send, and let it send as this mailbox. ",
    404: "Check that the profile's sender is a mailbox of this tenant. ",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Token:
    text: str
    good_until: float


class Tokens:
    """The tokens of this process; never written anywhere."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, ...], _Token] = {}

    def get(self, key: tuple[str, ...]) -> str | None:
        """The token, while it is good for some minutes yet."""
        with self._lock:
            token = self._kept.get(key)
        return token.text if token and self._clock() < token.good_until else None

    def keep(self, key: tuple[str, ...], text: str, seconds: float) -> None:
        """For the time that it is good."""
        token = _Token(text=text, good_until=self._clock() + seconds - EARLY_SECONDS)
        with self._lock:
            self._kept[key] = token

    def drop(self, key: tuple[str, ...]) -> None:
        """Forgets one that was refused."""
        with self._lock:
            self._kept.pop(key, None)


_tokens = Tokens()


class _NoTokenError(Exception):
    """The authority's answer is the verdict."""

    def __init__(self, verdict: Verdict, *, is_secret_refused: bool = False) -> None:
        super().__init__(verdict.code)
        self.verdict = verdict
        self.is_secret_refused = is_secret_refused


class Graph:
    """The transport `graph`."""

    def __init__(self, profile: Profile, tokens: Tokens = _tokens) -> None:
        """Raises MalformedProfileError."""
        given = settings.Settings(profile)
        self.tenant = given.text("tenant")
        self.client_id = given.text("client_id")
        self.sender = sender(given)
        self.sender_name = given.text("sender_name", "")
        self.authority = given.origin("authority", AUTHORITY)
        self.host = given.origin("host", HOST)
        self.ca_file = given.text("ca_file", "")
        given.finish(secrets=(), required=(CLIENT_SECRET,))
        self._tokens = tokens

    def prepare(self, message: Message, secrets: Secrets) -> Callable[[Deadline], Verdict]:
        """What sends `message`; raises MalformedMessageError and MalformedProfileError."""
        context = settings.tls_context(self.ca_file)
        # It goes to whoever the headers name.
        left = replace(message, recipients=message.pending)
        letter = mail.build(left, sender=self.sender, sender_name=self.sender_name)
        body = base64.b64encode(letter.wire)
        if len(body) > REQUEST_BYTES:
            raise mail.MalformedMessageError("The mail is larger than Graph takes.")
        return lambda deadline: self._send(
            body, secrets, partial(http.post, context=context, deadline=deadline), deadline
        )

    def _send(self, body: bytes, secrets: Secrets, post: Any, deadline: Deadline) -> Verdict:
        try:
            reply = self._posted(body, self._token(secrets, post, deadline), post)
            if reply.status == 401:
                self._tokens.drop(self._key(secrets))
                reply = self._posted(body, self._token(secrets, post, deadline), post)
        except _NoTokenError as error:
            return error.verdict
        return _verdict(reply)

    def _posted(self, body: bytes, token: str, post: Any) -> http.Reply:
        return post(
            f"{self.host}/v1.0/users/{quote(self.sender, safe='@')}/sendMail",
            body=body,
            headers={"Authorization": f"Bearer {token}", "Content-Type": "text/plain"},
        )

    def _token(self, secrets: Secrets, post: Any, deadline: Deadline) -> str:
        """A token; one that this process has, if it is good. Raises _NoTokenError.

        A secret that is refused may have been replaced since it was read: it is read once more.
        """
        try:
            return self._known_or_asked(secrets, post)
        except _NoTokenError as error:
            is_new = error.is_secret_refused and deadline.call(
                partial(secrets.renewed, CLIENT_SECRET)
            )
            if not is_new:
                raise
        return self._known_or_asked(secrets, post)

    def _known_or_asked(self, secrets: Secrets, post: Any) -> str:
        key = self._key(secrets)
        token = self._tokens.get(key)
        if token is None:
            token, seconds = self._asked(secrets, post)
            self._tokens.keep(key, token, seconds)
        secrets.hide(token)
        return token

    def _asked(self, secrets: Secrets, post: Any) -> tuple[str, float]:
        form = {
            "grant_type": "client_credentials",
            "client_id": self.client_id,
            "client_secret": secrets.get(CLIENT_SECRET),
            "scope": f"{self.host}/.default",
        }
        try:
            reply = post(
                f"{self.authority}/{quote(self.tenant, safe='')}/oauth2/v2.0/token",
                body=urlencode(form).encode(),
                headers={"Content-Type": "application/x-www-form-urlencoded"},
            )
        except verdicts.UnansweredError as error:
            raise error.__cause__ or error from None  # nothing was sent to anybody
        return _token_of(reply)

    def _key(self, secrets: Secrets) -> tuple[str, ...]:
        secret = hashlib.sha256((secrets.get(CLIENT_SECRET) or "").encode()).hexdigest()
        return self.authority, self.tenant, self.client_id, secret, self.host


def _token_of(reply: http.Reply) -> tuple[str, float]:
    """Token and seconds; raises _NoTokenError. Status first, then the error's name."""
    said = _object(reply.body)
    if reply.status == 200:
        token, seconds = said.get("access_token"), said.get("expires_in")
        if isinstance(token, str) and token.isascii() and token.isprintable() and token:
            return token, _number(seconds)
        text = "The authority answered 200 without a token: check the profile's authority."
        raise _NoTokenError(verdicts.transient("token_protocol", text))
    name, numbers = str(said.get("error") or ""), _numbers(said.get("error_codes"))
    code, result = verdicts.of_status("token", reply.status)
    if result is Result.SENT:  # of the 2xx only 200 has one
        result = Result.TRANSIENT
    if name in _SAYS_LATER or (numbers and numbers <= _LATER_NUMBERS):
        result = Result.TRANSIENT
    is_refused = result is Result.PERMANENT and name == _UNKNOWN_SECRET
    text = f"The authority answered {reply.status} {name}: {said.get('error_description', '')}"
    if is_refused:
        code, text = "token_secret", f"The client secret was rejected: renew it. {text}"
    verdict = Verdict(
        result=result, code=code, text=verdicts.shown(text), retry_after=reply.retry_after
    )
    raise _NoTokenError(verdict, is_secret_refused=is_refused)


def _verdict(reply: http.Reply) -> Verdict:
    code, result = verdicts.of_status("graph", reply.status)
    if result is Result.SENT:
        text = f"{reply.status}: Graph put it into the sender's mailbox, to be delivered."
        return Verdict(result=result, code=code, text=text)
    error = _object(reply.body).get("error")
    known = error if isinstance(error, dict) else {}
    words = f"{known.get('code', '')} {known.get('message', '')}"
    return Verdict(
        result=result,
        code=code,
        text=verdicts.shown(f"{_HINTS.get(reply.status, '')}Graph said: {reply.status} {words}"),
        retry_after=reply.retry_after,
        ambiguous=verdicts.is_ambiguous_status(reply.status),
    )


def _object(body: bytes) -> dict[str, Any]:
    """What a body says, if it is a JSON object: it may be HTML, or nothing."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _number(value: Any) -> float:
    try:
        return min(float(value), 24 * 3600.0)
    except (TypeError, ValueError):
        return 0.0


def _numbers(value: Any) -> set[int]:
    found = value if isinstance(value, list) else []
    return {number for number in found if settings.is_whole(number)}
