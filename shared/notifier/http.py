"""One POST over HTTPS within a deadline: no redirect is followed, no reply is read without end."""

import contextlib
import http.client
import math
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import urlsplit

from shared.notifier.deadline import Deadline
from shared.notifier.verdicts import UnansweredError

REPLY_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer: its status, which arrived in time; headers and body as far as they came."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case
    body: bytes = b""

    @property
    def retry_after(self) -> float | None:
        """Seconds that the server asks to wait, if it does in a form that means something."""
        text = self.headers.get("retry-after", "").strip()
        try:
            seconds = float(text)
        except ValueError:
            seconds = _seconds_until(text)
        return seconds if math.isfinite(seconds) and seconds >= 0 else None


def post(
    url: str,
    *,
    body: bytes,
    headers: Mapping[str, str],
    context: ssl.SSLContext,
    deadline: Deadline,
) -> Reply:
    """The answer to `body`.

    Raises UnansweredError when the request had left, otherwise what sockets, ssl and Deadline do.
    """
    parts = urlsplit(url)
    host, is_tls = parts.hostname or "", parts.scheme == "https"
    sock = deadline.connect(host, parts.port or (443 if is_tls else 80))
    with contextlib.closing(sock):
        if is_tls:
            sock = context.wrap_socket(sock, server_hostname=host)
        with contextlib.closing(sock):
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            named = {"Host": parts.netloc, "Connection": "close", **headers}
            return _exchange(sock, deadline, target, body, named)


def _exchange(
    sock: Any, deadline: Deadline, target: str, body: bytes, headers: Mapping[str, str]
) -> Reply:
    connection = http.client.HTTPConnection("")
    connection.sock = sock
    connection.request("POST", target, body=body, headers=dict(headers))
    with contextlib.closing(_Response(sock, deadline)) as response:
        try:
            response.begin()
        except Exception as error:
            if response.decided is None:
                raise UnansweredError from error
            return Reply(status=response.decided)  # whatever else it was going to say
        return Reply(
            status=response.status,
            headers={name.lower(): value for name, value in response.getheaders()},
            body=_read(response),
        )


def _read(response: http.client.HTTPResponse) -> bytes:
    """The body, as far as it comes."""
    try:
        return response.read(REPLY_BYTES)
    except (OSError, http.client.HTTPException):
        return b""


class _Response(http.client.HTTPResponse):
    """Keeps the status if it arrived in time.

    The library takes a line or a header that was cut off by our own watchdog for a whole one.
    """

    def __init__(self, sock: Any, deadline: Deadline) -> None:
        super().__init__(sock, method="POST")
        self.decided: int | None = None
        self._deadline = deadline

    def _read_status(self) -> tuple[str, int, str]:
        answer = super()._read_status()  # type: ignore[misc] - there is no other place to ask
        self._deadline.check()
        self.decided = answer[1]
        return answer


def _seconds_until(text: str) -> float:
    """From now to an HTTP date; NaN where it is none."""
    try:
        date = parsedate_to_datetime(text)
    except (ValueError, TypeError):
        return math.nan
    return max((date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds(), 0)
