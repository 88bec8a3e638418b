"""What of an error may be written down: its shape, never the values that it quotes.

Error texts of databases and libraries quote what they choked on, and that may be a customer's
e-mail address or a password in a URL. Our own errors were written to be shown and pass as they are.
"""

import re
import traceback as tb
from typing import Final

from shared.errors import HookledgerError
from shared.text import cap, clean

MESSAGE_BYTES: Final = 8 * 1024
TRACEBACK_BYTES: Final = 64 * 1024
CHAIN_LENGTH: Final = 10

_JOINT: Final = "\nThe above exception was the direct cause of the following exception:\n\n"

_URL_PASSWORD = re.compile(r"(?<=://)([^\s:/@]*):[^\s@]*@")
_KEY_VALUE_SECRET = re.compile(
    r"(?i)\b(password|passwd|pwd|secret|token|authorization|api[_-]?key)(\s*[=:]\s*)\S+"
)
# Starts at a word's beginning only, so that a long word is read once and not from every letter on.
_EMAIL = re.compile(r"(?<![\w.+-])[\w.+-]++@[\w.-]++")
_QUOTED = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'|\"[^\"\n]*$|'[^'\n]*$", re.MULTILINE)
_IDENTIFIER = re.compile(r"[\"'][A-Za-z_][A-Za-z0-9_.]{0,62}[\"']")
_HOST = re.compile(r"[\"'](?=[^\"']*[.:])[A-Za-z0-9.:_-]{1,253}[\"']")
_LONG_NUMBER = re.compile(r"\d{7,}")
# Data exceptions and constraint violations quote rows; every quoted word in them is a value.
_VALUE_SQLSTATES = ("22", "23")
# What a merchant's own trigger says is a merchant's own text.
_RAISED_SQLSTATES = "P0"


def message(error: BaseException) -> str:
    """The error's message, scrubbed and at most 8 KiB. Never empty."""
    if isinstance(error, HookledgerError):
        return cap(clean(str(error)), MESSAGE_BYTES)
    sqlstate = getattr(error, "sqlstate", None)
    if sqlstate and sqlstate.startswith(_RAISED_SQLSTATES):
        return f"A trigger or function in the database raised an exception (SQLSTATE {sqlstate})."
    primary = getattr(getattr(error, "diag", None), "message_primary", None)
    # DETAIL and CONTEXT of a database error hold rows, so only its first part is used.
    text = primary or str(error) or type(error).__name__
    strict = bool(sqlstate) and sqlstate[:2] in _VALUE_SQLSTATES
    return cap(scrub(text[: 2 * MESSAGE_BYTES], strict=strict), MESSAGE_BYTES)


def traceback(error: BaseException) -> str:
    """The error's chain of causes with its frames, values scrubbed, at most 64 KiB.

    In the words of Python's own, by which Error Reporting knows a stack and groups it.
    """
    parts = []
    for link, joint in _chain(error):
        frames = "".join(tb.format_tb(link.__traceback__))
        head = "Traceback (most recent call last):\n" if frames else ""
        parts.append(f"{joint}{head}{frames}{type(link).__qualname__}: {message(link)}\n")
    return cap("".join(parts), TRACEBACK_BYTES, keep_end=True)


def scrub(text: str, *, strict: bool = False) -> str:
    """`text` without quoted values, addresses, secrets and long numbers.

    Quoted identifiers and host names stay, so that "column "x" does not exist" still says which;
    with `strict` nothing quoted stays.
    """
    text = _URL_PASSWORD.sub(r"\1:…@", clean(text))
    text = _KEY_VALUE_SECRET.sub(r"\1\2…", text)
    text = _QUOTED.sub(lambda m: _quoted(m.group(), strict=strict), text)
    return _LONG_NUMBER.sub("…", _EMAIL.sub("…", text))


def _quoted(text: str, *, strict: bool) -> str:
    if not strict and (_IDENTIFIER.fullmatch(text) or _HOST.fullmatch(text)):
        return text
    return text[0] + "…" + text[0]


def _chain(error: BaseException) -> list[tuple[BaseException, str]]:
    """From the root cause to the error itself, each with the words that join it to the last."""
    links: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in links and len(links) < CHAIN_LENGTH:
        links.append(current)
        hidden = current.__suppress_context__
        current = current.__cause__ or (None if hidden else current.__context__)
    return [(link, _JOINT if n else "") for n, link in enumerate(reversed(links))]
