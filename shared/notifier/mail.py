"""A notification as a mail: checked, then built byte for byte, before any clock runs."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from email import policy
from email.headerregistry import Address
from email.message import EmailMessage
from email.utils import format_datetime
from typing import Final

from shared.errors import PermanentError
from shared.notifier.model import Message
from shared.notifier.settings import host_name
from shared.text import clean

BODY_BYTES: Final = 1_000_000
SUBJECT_CHARACTERS: Final = 1000
LOCAL_BYTES: Final = 64
ADDRESS_BYTES: Final = 254

_ATOM: Final = r"(?:[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]|[^\W_])+"
_LOCAL_PART = re.compile(rf"{_ATOM}(?:\.{_ATOM})*")
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_LEADING_DOT = re.compile(rb"^\.", re.MULTILINE)


class MalformedMessageError(PermanentError):
    """The notification cannot be sent as it is. The text says what is wrong, without values."""

    code = "message_malformed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A mail, ready to leave."""

    wire: bytes  # with CRLF, no line above 998 bytes
    sender: str
    recipients: Mapping[str, str]  # as given, to as it is sent: those it goes to
    needs_utf8: bool  # an address is not ASCII: the server must have SMTPUTF8

    @property
    def stuffed(self) -> bytes:
        """As it follows DATA: leading dots doubled, the final dot at its end."""
        return _LEADING_DOT.sub(b"..", self.wire) + b".\r\n"


def build(message: Message, *, sender: str, sender_name: str = "") -> Letter:
    """The mail to those of `message` who are pending; headers are the same in every attempt.

    `sender` is an address from `address`. Raises MalformedMessageError.
    """
    subject, body = check_text(message)
    everybody = {who: address(who) for who in message.recipients}
    if not everybody or not message.pending:
        raise MalformedMessageError("The notification has no recipient: add some to the channel.")
    pending = {who: address(who) for who in message.pending}
    needs_utf8 = not all(value.isascii() for value in (sender, *everybody.values()))
    mail = EmailMessage(policy=policy.SMTPUTF8 if needs_utf8 else policy.SMTP)
    mail["From"] = _header_address(sender, sender_name)
    mail["To"] = [_header_address(value) for value in everybody.values()]
    mail["Subject"] = subject
    domain = sender.rpartition("@")[2]
    mail["Message-ID"] = f"<{stable_id(message)}@{domain}>"
    mail["Date"] = format_datetime(message.created_at)
    mail["Auto-Submitted"] = "auto-generated"
    if message.dedupe_key:
        thread = hashlib.sha256(message.dedupe_key.encode("utf-8", "replace")).hexdigest()[:32]
        mail["References"] = mail["In-Reply-To"] = f"<{thread}@{domain}>"
    # Not left to the library, which would send 8 bits to servers that did not offer to take them.
    mail.set_content(body, cte=None if body.isascii() else "base64")
    return Letter(wire=mail.as_bytes(), sender=sender, recipients=pending, needs_utf8=needs_utf8)


def check_text(message: Message) -> tuple[str, str]:
    """Subject and body as they can be sent; raises MalformedMessageError."""
    if not isinstance(message.subject, str) or not isinstance(message.body, str):
        raise MalformedMessageError("The notification's subject and body must be texts.")
    if _UNSAFE.search(message.subject) or len(message.subject) > SUBJECT_CHARACTERS:
        raise MalformedMessageError(
            "The notification's subject must be one line without control characters, at most "
            f"{SUBJECT_CHARACTERS} characters."
        )
    body = clean(message.body)
    if len(body.encode()) > BODY_BYTES:
        raise MalformedMessageError(f"The notification's body is above {BODY_BYTES} bytes.")
    return message.subject, body


def stable_id(message: Message) -> str:
    """The same in every attempt; also tells two databases apart, whose numbers are the same."""
    microseconds = int(message.created_at.timestamp() * 1_000_000)
    return f"{message.notification_id}.{microseconds}"


def address(value: str) -> str:
    """An address as it is sent, the domain as DNS takes it; raises MalformedMessageError."""
    local, at, domain = value.rpartition("@") if isinstance(value, str) else ("", "", "")
    try:
        host = host_name(domain) if at else ""
    except ValueError:
        host = ""
    is_name = host and ":" not in host and not host.replace(".", "").isdigit()
    if not is_name or not _LOCAL_PART.fullmatch(local) or _is_long(local, host):
        raise MalformedMessageError(
            "An address of the channel is none: one is like ops@example.com."
        )
    return f"{local}@{host}"


def _is_long(local: str, host: str) -> bool:
    size = len(local.encode())
    return size > LOCAL_BYTES or size + 1 + len(host) > ADDRESS_BYTES


def _header_address(value: str, name: str = "") -> Address:
    local, _, domain = value.rpartition("@")
    return Address(display_name=name, username=local, domain=domain)
