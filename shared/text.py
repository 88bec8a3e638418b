"""Text that any PostgreSQL column can hold."""

import re
from typing import Final

# The longest text in a unique key: two of them fit an index entry (2,704 bytes) in any script.
KEY_CHARACTERS: Final = 255

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def clean(text: str) -> str:
    """`text` without NUL, and with lone surrogates replaced by U+FFFD."""
    return _UNSTORABLE.sub(lambda m: "" if m.group() == "\x00" else "\ufffd", text)


def cap(text: str, limit: int, *, keep_end: bool = False) -> str:
    """`text` cut to `limit` bytes of UTF-8, at its end or, with `keep_end`, at its beginning."""
    raw = text.encode()
    if len(raw) <= limit:
        return text
    mark = "…"
    room = limit - len(mark.encode())
    if keep_end:
        return mark + raw[-room:].decode("utf-8", "ignore")
    return raw[:room].decode("utf-8", "ignore") + mark
