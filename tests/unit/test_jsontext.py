"""JSON text: strict, exact, and never more changed than jsonb forces us to."""

import json
import traceback
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.jsontext import Number, jsonb_text, read, storable

PIECES = [
    r"\u0000",
    r"\ud83d",
    r"\uDE00",
    r"\u0041",
    r"\\",
    r"\"",
    r"\/",
    r"\n",
    "u0000",
    "😀",
    "a",
]
STRINGS = st.lists(
    st.sampled_from(PIECES) | st.characters(codec="utf-8").map(lambda c: json.dumps(c)[1:-1])
).map(lambda pieces: '"' + "".join(pieces) + '"')
OBJECTS = st.tuples(STRINGS, STRINGS).map(lambda pair: f"{{{pair[0]}: [{pair[1]}, 1.50, null]}}")
JSON_TEXTS = STRINGS | OBJECTS | st.lists(OBJECTS).map(lambda texts: f"[{', '.join(texts)}]")


def _repaired(value: Any) -> Any:
    match value:
        case dict():
            return {_repaired(k): _repaired(v) for k, v in value.items()}
        case list():
            return [_repaired(item) for item in value]
        case str():
            return "".join("\ufffd" if c == "\0" or "\ud800" <= c <= "\udfff" else c for c in value)
        case _:
            return value


@given(JSON_TEXTS)
def test_the_repaired_text_is_the_same_value_with_nul_and_lone_surrogates_replaced(
    text: str,
) -> None:
    assert json.loads(storable(text)) == _repaired(json.loads(text))


@given(JSON_TEXTS)
def test_a_text_that_jsonb_can_hold_stays_to_the_letter(text: str) -> None:
    value = json.loads(text)
    assert (storable(text) == text) == (_repaired(value) == value)


@given(st.integers())
def test_integers_of_any_size_are_exact(number: int) -> None:
    assert read(b"[%d]" % number)[1] == [number]


@pytest.mark.parametrize(
    ("escaped", "stored"),
    [
        (r"\u0000", r"\ufffd"),
        (r"a\u0000b\u0000", r"a\ufffdb\ufffd"),
        (r"\u0000\u0000", r"\ufffd\ufffd"),
        (r"\ud83d", r"\ufffd"),
        (r"\uDE00", r"\ufffd"),
        (r"\uD83D\u0041", r"\ufffd\u0041"),
        (r"\ud83d\ud83d\ude00", r"\ufffd\ud83d\ude00"),
        (r"\ude00\ud83d", r"\ufffd\ufffd"),
        (r"\ud83d\\ude00", r"\ufffd\\ude00"),
        (r"\\\u0000", r"\\\ufffd"),
        (r"\n\u0000", r"\n\ufffd"),
        (r"\uDBFF", r"\ufffd"),
    ],
)
def test_what_jsonb_cannot_hold_is_replaced(escaped: str, stored: str) -> None:
    assert storable(f'{{"{escaped}": "{escaped}"}}') == f'{{"{stored}": "{stored}"}}'


@pytest.mark.parametrize(
    "escaped",
    [
        r"\\u0000",
        r"\\\\u0000",
        r"\\ud83d",
        r"\ud83d\ude00",
        r"\uDBFF\uDFFF",
        r"\u2028",
        r"\/",
        "u0000",
    ],
)
def test_what_only_looks_like_it_stays(escaped: str) -> None:
    text = f'"{escaped}"'
    assert storable(text) == text


@pytest.mark.parametrize("text", ["1.10", "1e2", "-0.0", "0.1e-7", "123456789012345678901.5"])
def test_a_fraction_keeps_its_digits(text: str) -> None:
    assert read(f"[{text}]".encode())[1] == [Number(text)]


def test_an_integer_beyond_pythons_limit_keeps_its_digits() -> None:
    text = "9" * 5000
    assert read(f"[{text}]".encode()) == (f"[{text}]", [Number(text)])


def test_a_byte_order_mark_is_no_part_of_the_text() -> None:
    assert read(b'\xef\xbb\xbf{"a": 1}') == ('{"a": 1}', {"a": 1})


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        (b"", "empty"),
        (b"\xef\xbb\xbf", "not JSON"),
        (b"secret", "not JSON"),
        (b'{"secret": 1,}', "not JSON"),
        (b'{"a": "secret\n"}', "not JSON"),
        (b'{"a": "secret\\x"}', "not JSON"),
        (b'{"secret": NaN}', "NaN"),
        (b'{"secret": -Infinity}', "infinity"),
        (b'{"secret": 1} {}', "not JSON"),
        (b'{"secret": "\xff"}', "not UTF-8"),
        (b'"secret\xed\xa0\xbd"', "not UTF-8"),
        ('{"secret": 1}'.encode("utf-16"), "not UTF-8"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_body_that_is_not_strict_json_is_a_value_error_that_quotes_nothing(
    body: bytes, cause: str
) -> None:
    with pytest.raises(ValueError, match=cause) as caught:
        read(body)
    assert type(caught.value) is ValueError
    assert caught.value.__cause__ is None
    told = traceback.format_exception_only(caught.value)
    assert "secret" not in "".join(told)
    shown = caught.value.__context__
    assert shown is None or caught.value.__suppress_context__


@pytest.mark.parametrize("body", [b"null", b'"x"', b"[1]", b"{}", b"1.50"])
def test_for_an_audit_row_any_json_value_is_text(body: bytes) -> None:
    assert jsonb_text(body) == body.decode()


@pytest.mark.parametrize("body", [b"", b"x", b"[NaN]", b'"\xff"'])
def test_for_an_audit_row_anything_else_is_none(body: bytes) -> None:
    assert jsonb_text(body) is None
