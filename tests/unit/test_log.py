"""Log events: one JSON line each, ids bound once, and nothing in them that must not be read."""

import io
import json
import logging

import pytest

from shared import log


@pytest.fixture
def written(monkeypatch):
    """The log events so far."""
    stream = io.StringIO()
    monkeypatch.setattr(log, "_stream", stream)
    log.setup(level="INFO", project="proj")
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    log.setup()
    logging.root.handlers.clear()


def test_an_event_is_one_json_line_in_cloud_loggings_form(written):
    log.info("event.stored", ledger="inserted", nothing=None)
    (event,) = written()
    assert event.pop("time").endswith("+00:00")
    assert event == {"severity": "INFO", "message": "event.stored", "ledger": "inserted"}


def test_bound_fields_are_on_every_line_of_the_block_and_on_none_after_it(written):
    with log.bound(event_id="e", trace_id="t" * 32):
        with log.bound(attempt=1):
            log.info("a")
        log.info("b")
    log.info("c")
    a, b, c = written()
    assert (a["event_id"], a["attempt"]) == ("e", 1)
    assert a["logging.googleapis.com/trace"] == f"projects/proj/traces/{'t' * 32}"
    assert "attempt" not in b
    assert "event_id" not in c


def test_what_concerns_a_shop_is_found_by_its_labels(written):
    log.info("event.stored", organization_id="acme", shop_domain="a.myshopify.com", ledger="x")
    (event,) = written()
    assert event["logging.googleapis.com/labels"] == {
        "organization_id": "acme",
        "shop_domain": "a.myshopify.com",
    }


def test_an_error_says_where_it_was_written_and_is_an_error_event(written):
    log.setup(service="retry", revision="retry-00001")
    log.error("outbox.stuck")
    (event,) = written()
    place = event["logging.googleapis.com/sourceLocation"]
    assert place["file"].endswith("test_log.py")
    assert place["function"] == "test_an_error_says_where_it_was_written_and_is_an_error_event"
    assert event["context"]["reportLocation"]["lineNumber"] == int(place["line"])
    assert event["@type"].endswith("ReportedErrorEvent")
    assert event["serviceContext"] == {"service": "retry", "version": "retry-00001"}


def test_a_stack_has_the_form_that_error_reporting_reads(written):
    try:
        try:
            raise KeyError("a")
        except KeyError as cause:
            raise RuntimeError("b") from cause
    except RuntimeError as fault:
        log.error("function.failed", fault)
    (event,) = written()
    first, second = event["stack_trace"].split(
        "\nThe above exception was the direct cause of the following exception:\n\n"
    )
    for stack, name in ((first, "KeyError"), (second, "RuntimeError")):
        head, *frames, last = stack.rstrip().splitlines()
        assert head == "Traceback (most recent call last):"
        assert frames[0].startswith('  File "')
        assert last.startswith(f"{name}: ")


def test_levels_below_the_threshold_are_left_out(written):
    log.debug("detail")
    log.setup(level="DEBUG")
    log.debug("detail")
    assert [event["severity"] for event in written()] == ["DEBUG"]


def test_an_error_is_described_without_its_values(written):
    try:
        raise RuntimeError("no such user 'Jane Doe' <jane@example.com>")
    except RuntimeError as fault:
        log.warning("a", fault)
        log.error("b", fault)
    warned, failed = written()
    assert warned["error_type"] == "RuntimeError"
    assert "stack_trace" not in warned
    assert "in test_an_error" in failed["stack_trace"]
    for event in (warned, failed):
        assert "Jane Doe" not in event["error_message"]
        assert "jane@" not in event["error_message"]


def test_what_libraries_log_becomes_a_log_event_scrubbed(written):
    try:
        raise ValueError("secret 'Jane Doe'")
    except ValueError:
        logging.getLogger("library").exception("connecting to postgresql://u:hunter2@h failed")
    (event,) = written()
    assert (event["severity"], event["message"], event["logger"]) == (
        "ERROR",
        "library.logged",
        "library",
    )
    assert "hunter2" not in json.dumps(event)
    assert "Jane" not in json.dumps(event)


def test_text_that_cannot_be_encoded_does_not_break_the_log(written):
    log.info("a", topic="\ud800")
    assert len(written()) == 1


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_a_line_is_for_people(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(log, "_stream", terminal)
    log.info("event.stored", ledger="inserted")
    assert "event.stored" in terminal.getvalue()
    assert "\x1b[" in terminal.getvalue()
    assert not terminal.getvalue().startswith("{")
