"""What is written down of an error names the fault and no value."""

import json

import psycopg
import pytest

from shared import redact
from shared.errors import StorageConfigurationError
from shared.text import cap, clean


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('column "payload_raw" does not exist', 'column "payload_raw" does not exist'),
        ('host "db.example.com" is down', 'host "db.example.com" is down'),
        ("postgresql://shop:hunter2@db/x", "postgresql://shop:…@db/x"),
        ("password=hunter2 host=db", "password=… host=db"),
        ("Authorization: Bearer", "Authorization: …"),
        ("mail to jane@example.com bounced", "mail to … bounced"),
        ("could not parse 'Jane Doe, 1 Main St'", "could not parse '…'"),
        ("call 15550100200", "call …"),
        ("unterminated 'Jane Doe", "unterminated '…'"),
    ],
)
def test_names_stay_and_values_go(text, shown):
    assert redact.scrub(text) == shown


def test_where_a_database_quotes_rows_every_quoted_word_goes():
    error = psycopg.errors.InvalidTextRepresentation('invalid input for type uuid: "Jane"')
    assert redact.message(error) == 'invalid input for type uuid: "…"'


def test_our_own_errors_are_shown_as_they_were_written():
    text = 'Database 1 has no credential "x".'
    assert redact.message(StorageConfigurationError(text)) == text


def test_an_error_without_words_still_has_a_message():
    assert redact.message(ValueError()) == "ValueError"


def test_the_traceback_shows_the_chain_and_its_frames_but_no_values():
    def parse():
        try:
            json.loads('{"email": jane@example.com}')
        except ValueError as error:
            raise KeyError("jane@example.com") from error

    with pytest.raises(KeyError) as caught:
        parse()
    shown = redact.traceback(caught.value)
    parts = ("JSONDecodeError", "was the direct cause of", "KeyError")
    assert [*parts] == sorted(parts, key=shown.index)
    assert "in parse" in shown
    assert shown.count("jane@example.com") == 2, "only in the source lines of this test"


def test_a_chain_that_bites_its_tail_ends():
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert redact.traceback(one).count("ValueError") == 2


def test_clean_text_is_what_postgresql_can_store():
    assert clean("a\x00b\ud800c\U0001f600") == "ab\ufffdc\U0001f600"


def test_a_cap_counts_bytes_and_cuts_at_a_character():
    assert cap("é" * 10, 20) == "é" * 10
    assert cap("é" * 11, 20) == "é" * 8 + "…"
    assert cap("é" * 11, 20, keep_end=True) == "…" + "é" * 8


def test_messages_and_tracebacks_have_a_limit():
    error = RuntimeError("x" * 1_000_000)  # one word: a pattern that retries it never ends
    assert len(redact.message(error).encode()) <= redact.MESSAGE_BYTES
    assert len(redact.traceback(error).encode()) <= redact.TRACEBACK_BYTES
