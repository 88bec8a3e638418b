"""A notification as JSON to a webhook, signed: a chat's incoming webhook, a pager, a service."""

import hashlib
import hmac
import json
import time
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from shared.notifier import http, mail, settings, verdicts
from shared.notifier.deadline import Deadline
from shared.notifier.model import Message, Profile, Result, Verdict
from shared.notifier.references import Secrets

URL: Final = "url"
SIGNING_KEY: Final = "signing_key"


class Webhook:
    """The transport `webhook`."""

    def __init__(self, profile: Profile, clock: Callable[[], float] = time.time) -> None:
        """Raises MalformedProfileError."""
        given = settings.Settings(profile)
        self.url = given.text("url", "")
        self.ca_file = given.text("ca_file", "")
        given.finish(secrets=(URL, SIGNING_KEY))
        if bool(self.url) == (URL in profile.secrets):
            raise settings.MalformedProfileError(
                "The profile needs a url, either as a secret (whoever knows a chat's can post "
                "there) or as a setting."
            )
        if self.url:
            settings.check_url(self.url, "The profile's url")
        self._clock = clock

    def prepare(self, message: Message, secrets: Secrets) -> Callable[[Deadline], Verdict]:
        """What sends `message`; raises MalformedMessageError and MalformedProfileError."""
        url = self.url or secrets.get(URL) or ""
        settings.check_url(url, "The secret url of the profile")
        parts = urlsplit(url)
        if not self.url and len(parts.path) > 1:
            secrets.hide(parts.path, parts.query)
        context = settings.tls_context(self.ca_file)
        body = _body(message)
        headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": "Hookledger"}
        headers["Idempotency-Key"] = mail.stable_id(message)
        key = secrets.get(SIGNING_KEY)

        def send(deadline: Deadline) -> Verdict:
            if key is not None:
                headers.update(signature(key, str(int(self._clock())), body))
            reply = http.post(url, body=body, headers=headers, context=context, deadline=deadline)
            return _verdict(reply)

        return send


def signature(key: str, timestamp: str, body: bytes) -> dict[str, str]:
    """The headers by which a receiver knows us, and refuses what is old: HMAC-SHA256, in hex.

    Over the timestamp (seconds since 1970), a dot, and the body.
    """
    signed = hmac.new(key.encode(), timestamp.encode() + b"." + body, hashlib.sha256)
    return {
        "X-Hookledger-Timestamp": timestamp,
        "X-Hookledger-Signature": f"v1={signed.hexdigest()}",
    }


def _body(message: Message) -> bytes:
    subject, body = mail.check_text(message)
    fields = {
        "text": f"{subject}\n\n{body}",  # all that a chat looks at
        "subject": subject,
        "body": body,
        "severity": message.severity,
        "kind": message.kind,
        "channel": message.channel,
        "dedupe_key": message.dedupe_key,
        "notification_id": message.notification_id,
        "created_at": message.created_at.isoformat(),
    }
    return json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace")


def _verdict(reply: http.Reply) -> Verdict:
    code, result = verdicts.of_status("webhook", reply.status)
    words = verdicts.shown(reply.body)
    if result is Result.SENT:
        return Verdict(result=result, code=code, text=f"{reply.status} {words}")
    hint = "Redirects are not followed: correct the url. " if 300 <= reply.status <= 399 else ""
    return Verdict(
        result=result,
        code=code,
        text=f"{hint}The webhook said: {reply.status} {words}",
        retry_after=reply.retry_after,
        ambiguous=verdicts.is_ambiguous_status(reply.status),
    )
