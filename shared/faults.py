"""What is written down of an error: its kind, and its story without the values that it quotes."""

import hashlib
import re

from shared import db, redact


def describe(error: BaseException, topic: str) -> dict[str, str]:
    """The failure ledger's columns for an error, scrubbed.

    `error_type` is its class, `error_class` whether trying again helps by itself, `error_code`
    stable, `fingerprint` the same for all failures of one kind on one topic.
    """
    code, message = db.code(error), redact.message(error)
    return {
        "error_type": type(error).__name__,
        "error_class": db.classify(error),
        "error_code": code,
        "error_message": message,
        "traceback": redact.traceback(error),
        "fingerprint": fingerprint(type(error).__name__, code, message, topic),
    }


def fingerprint(error_type: str, code: str, message: str, topic: str) -> str:
    """16 hex digits over the error without its names and numbers, and the topic."""
    shape = re.sub(r"\d+|\"[^\"]*\"|'[^']*'", "?", message)
    return hashlib.sha256("\n".join((error_type, code, shape, topic)).encode()).hexdigest()[:16]
