"""Log events: one JSON line each in Cloud Logging's form, or a readable line on a terminal.

A log event has a name (`failure.recorded`) and ids as fields; sentences belong to the reader.
"""

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import FrameType
from typing import Any, Final, TextIO

from shared import redact

_LEVELS: Final = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40}
_COLOURS: Final = {"DEBUG": "2", "INFO": "36", "WARNING": "33", "ERROR": "31"}

# Fields that Cloud Logging finds lines by, whatever else they hold.
_LABELS: Final = ("organization_id", "shop_domain", "topic")
# Makes an error event of a line that has no stack; the place of the call is what it is grouped by.
_REPORTED: Final = (
    "type.googleapis.com/google.devtools.clouderrorreporting.v1beta1.ReportedErrorEvent"
)

_bound: ContextVar[dict[str, Any]] = ContextVar("bound", default={})  # noqa: B039 - never mutated
_threshold = _LEVELS["INFO"]
_project = ""
_service: dict[str, str] = {}
_stream: TextIO | None = None  # None: standard output, wherever that is at the time


def setup(*, level: str = "INFO", project: str = "", service: str = "", revision: str = "") -> None:
    """Sets the level, the project that traces belong to, and whose errors these are.

    Takes over the libraries' logging.
    """
    global _threshold, _project, _service  # noqa: PLW0603 - one log per process
    _threshold, _project = _LEVELS[level], project
    _service = {"service": service, "version": revision} if service else {}
    logging.basicConfig(handlers=[_LibraryHandler()], level=logging.WARNING, force=True)


def use(stream: TextIO) -> None:
    """Sends log events to `stream`: a command's standard output belongs to its result."""
    global _stream  # noqa: PLW0603 - one log per process
    _stream = stream


@contextmanager
def bound(**fields: Any) -> Iterator[None]:
    """Adds `fields` to every log event of the block; None leaves a field out."""
    token = _bound.set({**_bound.get(), **fields})
    try:
        yield
    finally:
        _bound.reset(token)


def debug(event: str, /, **fields: Any) -> None:
    """Detail for development."""
    _write("DEBUG", event, fields)


def info(event: str, /, **fields: Any) -> None:
    """What happened, as it should."""
    _write("INFO", event, fields)


def warning(event: str, error: BaseException | None = None, /, **fields: Any) -> None:
    """What went wrong and is taken care of."""
    _write("WARNING", event, {**_described(error), **fields})


def error(event: str, error: BaseException | None = None, /, **fields: Any) -> None:
    """What a person should look at; the error's redacted stack goes with it."""
    trace = {"stack_trace": redact.traceback(error)} if error else {}
    _write("ERROR", event, {**_described(error), **trace, **fields}, sys._getframe(1))


def milliseconds(since: float) -> float:
    """Milliseconds from `since`, a reading of time.monotonic(), until now."""
    return round((time.monotonic() - since) * 1000, 1)


def _described(error: BaseException | None) -> dict[str, str]:
    if error is None:
        return {}
    return {"error_type": type(error).__name__, "error_message": redact.message(error)}


def _write(level: str, event: str, fields: dict[str, Any], place: FrameType | None = None) -> None:
    if _LEVELS[level] < _threshold:
        return
    known = {k: v for k, v in {**_bound.get(), **fields}.items() if v is not None}
    stream = _stream or sys.stdout
    line = _coloured(level, event, known) if stream.isatty() else _json(level, event, known, place)
    _put(stream, line)


def _json(level: str, event: str, fields: dict[str, Any], place: FrameType | None) -> str:
    record: dict[str, Any] = {
        "severity": level,
        "message": event,
        "time": datetime.now(UTC).isoformat(),
        **fields,
    }
    if _project and fields.get("trace_id"):
        record["logging.googleapis.com/trace"] = f"projects/{_project}/traces/{fields['trace_id']}"
    if labels := {name: str(fields[name]) for name in _LABELS if name in fields}:
        record["logging.googleapis.com/labels"] = labels
    if place:
        record |= _reported(place)
    return json.dumps(record, default=str, ensure_ascii=False)


def _reported(place: FrameType) -> dict[str, Any]:
    """What makes a line an error event, and says where in the code it was written."""
    code, line = place.f_code, place.f_lineno
    return {
        "@type": _REPORTED,
        "logging.googleapis.com/sourceLocation": {
            "file": code.co_filename,
            "line": str(line),
            "function": code.co_qualname,
        },
        "context": {
            "reportLocation": {
                "filePath": code.co_filename,
                "lineNumber": line,
                "functionName": code.co_name,
            }
        },
        **({"serviceContext": _service} if _service else {}),
    }


def _coloured(level: str, event: str, fields: dict[str, Any]) -> str:
    stack = fields.pop("stack_trace", "")
    shown = " ".join(f"\x1b[2m{key}=\x1b[0m{value}" for key, value in fields.items())
    clock = datetime.now().strftime("%H:%M:%S")  # noqa: DTZ005 - the reader's own clock
    line = f"\x1b[2m{clock}\x1b[0m \x1b[{_COLOURS[level]}m{level:7}\x1b[0m {event} {shown}"
    return f"{line}\n{stack}" if stack else line


def _put(stream: TextIO, line: str) -> None:
    # One write for the line and its end: threads must not mix theirs.
    stream.write(line.encode("utf-8", "replace").decode() + "\n")
    stream.flush()


class _LibraryHandler(logging.Handler):
    """What libraries log, as log events of ours, scrubbed."""

    def emit(self, record: logging.LogRecord) -> None:
        level = record.levelname if record.levelname in _LEVELS else "ERROR"
        fields: dict[str, Any] = {"logger": record.name, "text": redact.scrub(record.getMessage())}
        if record.exc_info and record.exc_info[1]:
            fields |= _described(record.exc_info[1])
        _write(level, "library.logged", fields)
