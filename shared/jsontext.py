"""JSON as text: read strictly and exactly, and made such that PostgreSQL's jsonb can hold it."""

import json
import re
from decimal import Decimal
from typing import Any, Final, NoReturn

BOM: Final = "\ufeff"

_HIGH: Final = r"u[dD][89abAB][0-9a-fA-F]{2}"
_LOW: Final = r"u[dD][c-fC-F][0-9a-fA-F]{2}"
# An escape of NUL or of half a character, at the end of an odd run of backslashes: after an even
# one its `u` is a mere letter. A whole pair is matched too, lest its halves be.
_SUSPECT: Final = re.compile(
    rf"(?P<run>\\(?<!\\\\)(?:\\\\)*+)(?:(?P<pair>{_HIGH}\\{_LOW})|u0000|{_HIGH}|{_LOW})"
)


# As many digits as PostgreSQL's numbers have, before the point.
_DIGITS_MAX: Final = 131_072
_FORM: Final = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE]([+-]?[0-9]{1,6}))?")


class Number(str):
    """A number that is not a (reasonable) integer, as its own text: it never was a float."""

    __slots__ = ()


def read(body: bytes) -> tuple[str, Any]:
    """The text of a body as jsonb can hold it, and its value with every number exact.

    Integers are `int`, all other numbers `Number`. The text is the body's own, without byte order
    mark; an escape of NUL or of a lone surrogate, in a key or a string, has become U+FFFD's.

    Raises ValueError, never with anything from the body in it, when that is not strict JSON.
    """
    text = storable(_decoded(body))
    try:
        value = _value(text)
    except json.JSONDecodeError as error:
        # Not chained: the error holds the whole body.
        raise ValueError(f"The body is not JSON: it goes wrong at character {error.pos}.") from None
    except RecursionError:
        raise ValueError("The body is JSON nested too deeply to be read.") from None
    return text, value


def storable(text: str) -> str:
    """JSON text with what jsonb refuses replaced; everything else stays to the letter."""
    return _SUSPECT.sub(_replaced, text) if "\\u" in text else text


def jsonb_text(body: bytes) -> str | None:
    """The text of any strict JSON value as jsonb can hold it, or None for any other body."""
    try:
        return read(body)[0]
    except ValueError:
        return None


def plain(number: Number) -> int | Number:
    """A number as jsonb gives it back, without exponent: 1e2 is 100, and -0.0 is 0.0."""
    form = _FORM.fullmatch(number)
    if form is None or abs(int(form[1] or 0)) > _DIGITS_MAX:
        return number
    exact = Decimal(number)
    text = format(exact if exact else abs(exact), "f")
    return Number(text) if "." in text else _integer(text)


def _decoded(body: bytes) -> str:
    if not body:
        raise ValueError("The body is empty.")
    try:
        return body.decode().removeprefix(BOM)
    except UnicodeDecodeError as error:
        raise ValueError(f"The body is not UTF-8: it goes wrong at byte {error.start}.") from None


def _replaced(found: re.Match[str]) -> str:
    return found.group() if found["pair"] else found["run"] + "ufffd"


def _value(text: str) -> Any:
    try:
        return _QUICK.decode(text)
    except json.JSONDecodeError:
        raise
    except ValueError:  # an integer longer than Python converts, or what is no number
        pass
    return _PATIENT.decode(text)


def _integer(text: str) -> int | Number:
    try:
        return int(text)
    except ValueError:  # longer than Python converts; PostgreSQL does
        return Number(text)


def _no_constant(_name: str) -> NoReturn:
    raise ValueError("The body is not JSON: it holds NaN or an infinity.")


# Made once, and the usual one without a call for each integer: this is where parsing spends itself.
_QUICK: Final = json.JSONDecoder(parse_float=Number, parse_constant=_no_constant)
_PATIENT: Final = json.JSONDecoder(
    parse_float=Number, parse_int=_integer, parse_constant=_no_constant
)
