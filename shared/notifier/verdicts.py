"""What an error, or a server's answer, says about an attempt: the one place that decides it.

What is not listed is transient: a channel's retries bound what that costs, while a wrong
"permanent" loses the message.
"""

import http.client
import smtplib
import socket
import ssl
from typing import Final

from shared.errors import PermanentError, TransientError
from shared.notifier.model import Result, Verdict

_WRONG_MODE: Final = ("WRONG_VERSION_NUMBER", "UNSUPPORTED_PROTOCOL", "RECORD_LAYER_FAILURE")
_BAD_LOOKUPS: Final = (socket.EAI_SERVICE, socket.EAI_FAMILY)

_RETRIED_STATUSES: Final = (408, 409, 423, 425, 429)
_AMBIGUOUS_STATUSES: Final = (500, 502, 504)


class UnansweredError(Exception):
    """The message was handed over, and no answer came; the cause says how."""


def transient(code: str, text: str, *, ambiguous: bool = False) -> Verdict:
    """Worth another attempt."""
    return Verdict(result=Result.TRANSIENT, code=code, text=text, ambiguous=ambiguous)


def permanent(code: str, text: str) -> Verdict:
    """Somebody must act first."""
    return Verdict(result=Result.PERMANENT, code=code, text=text)


def of_error(error: Exception) -> Verdict | None:
    """The verdict on an error; None: it is one of our own."""
    is_ambiguous = isinstance(error, UnansweredError)
    cause = error.__cause__ if is_ambiguous else error
    if not isinstance(cause, Exception):
        return None
    if any(isinstance(link, TimeoutError) for link in _chain(cause)):
        return transient("timeout", "There was no answer in time.", ambiguous=is_ambiguous)
    code, text, result = _decided(cause)
    if not code:
        return None
    return Verdict(
        result=result,
        code=code,
        text=text,
        ambiguous=is_ambiguous and result is Result.TRANSIENT,
    )


# The order decides: SMTPException is an OSError, a certificate's error an SSLError, and that and a
# lookup's error are OSErrors.
def _decided(error: Exception) -> tuple[str, str, Result]:  # noqa: PLR0911, PLR0912
    match error:
        case TransientError():
            return error.code, str(error), Result.TRANSIENT
        case PermanentError():
            return error.code, str(error), Result.PERMANENT
        case smtplib.SMTPNotSupportedError():
            text = f"The server does not offer what the profile needs: {error}"
            return "smtp_unsupported", text, Result.PERMANENT
        case smtplib.SMTPServerDisconnected():
            return "smtp_disconnected", "The server closed the connection.", Result.TRANSIENT
        case smtplib.SMTPResponseException():
            return of_smtp(error.smtp_code, error.smtp_error)
        case smtplib.SMTPException():
            return "smtp_protocol", f"The server does not speak SMTP: {error}", Result.TRANSIENT
        case ssl.SSLCertVerificationError():
            text = (
                f"The server's certificate is not trusted: {error.verify_message}. Correct the "
                "profile's host or the certificate, or name the authority in ca_file."
            )
            return "tls_certificate", text, Result.PERMANENT
        case ssl.SSLError(reason=reason) if reason in _WRONG_MODE:
            text = f"The server does not speak TLS here ({reason}): correct port or tls."
            return "tls_mode", text, Result.PERMANENT
        case ssl.SSLError():
            return "tls_failed", f"TLS failed: {error.reason or error}", Result.TRANSIENT
        case socket.gaierror(errno=number) if number in _BAD_LOOKUPS:
            return "dns_failed", f"The name cannot be looked up: {error.strerror}", Result.PERMANENT
        case socket.gaierror():
            return "dns_failed", f"The name was not found: {error.strerror}", Result.TRANSIENT
        case http.client.HTTPException():
            text = f"The server's answer is not HTTP: {type(error).__name__}"
            return "http_protocol", text, Result.TRANSIENT
        case OSError():
            text = f"The server was not reached: {error.strerror or type(error).__name__}"
            return "network", text, Result.TRANSIENT
        case _:
            return "", "", Result.TRANSIENT


def of_smtp(status: int, reply: bytes | str) -> tuple[str, str, Result]:
    """Code, text and class of a reply that is not the one hoped for."""
    text = shown(reply)
    # A text was made by smtplib itself, under a code that no server gave.
    if not 200 <= status <= 599 or isinstance(reply, str):
        return "smtp_protocol", f"The server does not speak SMTP: {text}", Result.TRANSIENT
    result = Result.PERMANENT if status >= 500 else Result.TRANSIENT
    return f"smtp_{status}", f"{_remedy(status, text)}The server said: {status} {text}", result


def of_status(service: str, status: int) -> tuple[str, Result]:
    """Code and class of an HTTP answer. A redirect is permanent: it is never followed."""
    if 200 <= status <= 299:
        result = Result.SENT
    elif status in _RETRIED_STATUSES or 500 <= status <= 599:
        result = Result.TRANSIENT
    else:
        result = Result.PERMANENT
    return f"{service}_{status}", result


def is_ambiguous_status(status: int) -> bool:
    """Whether a service that answers so may have done what it was asked for."""
    return status in _AMBIGUOUS_STATUSES


def shown(reply: bytes | str) -> str:
    """A server's words in one line, without control characters."""
    text = reply.decode("utf-8", "replace") if isinstance(reply, bytes) else reply
    words = " ".join(text.split())
    return "".join(letter for letter in words if letter.isprintable())


def _remedy(status: int, reply: str) -> str:
    if "5.7.30" in reply or "5.7.139" in reply:
        return (
            "Microsoft 365 takes no passwords over SMTP here: use a profile with the transport "
            "graph. "
        )
    if status in (530, 534, 535, 538):
        return "The server refused the login: correct username and secret password. "
    return ""


def _chain(error: BaseException | None) -> list[BaseException]:
    links: list[BaseException] = []
    while error is not None and error not in links:
        links.append(error)
        error = error.__cause__ or error.__context__
    return links
