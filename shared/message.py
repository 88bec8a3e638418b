"""A Pub/Sub message, out of any of the three shapes in which it reaches an HTTP function.

Pub/Sub's own push body and Eventarc's binary CloudEvent hold `message` at the top; a structured
CloudEvent holds it under `data`. We read them ourselves because functions-framework refuses a push
without `data` before our code runs, and drops `deliveryAttempt`.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class NotAMessageError(ValueError):
    """The request is no Pub/Sub message at all; nobody is served by delivering it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message as Pub/Sub delivers it; `data` is still base64."""

    data: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    message_id: str | None = None
    publish_time: str | None = None
    delivery_attempt: int | None = None


def read(body: bytes) -> Message:
    """The message in a push request's body; raises NotAMessageError where there is none."""
    outer = _object(body)
    if isinstance(outer.get("data_base64"), str):
        outer = _unwrapped(outer["data_base64"])
    elif isinstance(outer.get("data"), dict):
        outer = outer["data"]
    message = outer.get("message")
    if not isinstance(message, dict):
        raise NotAMessageError("The body holds no `message` object.")
    attempt = outer.get("deliveryAttempt")
    return Message(
        data=_text(message.get("data")),
        attributes=_attributes(message.get("attributes")),
        message_id=_first(message, "messageId", "message_id"),
        publish_time=_first(message, "publishTime", "publish_time"),
        delivery_attempt=attempt if isinstance(attempt, int) else None,
    )


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body.decode("utf-8", "replace"), strict=False)
    except (ValueError, RecursionError):
        raise NotAMessageError("The body is not JSON.") from None
    if not isinstance(value, dict):
        raise NotAMessageError("The body is not a JSON object.")
    return value


def _unwrapped(data: str) -> dict[str, Any]:
    try:
        return _object(base64.b64decode(data))
    except ValueError:
        raise NotAMessageError("The event's data_base64 is not base64 of a JSON object.") from None


def _attributes(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        return {}
    return {name: _text(item) for name, item in value.items() if item is not None}


def _text(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def _first(message: Mapping[str, Any], *names: str) -> str | None:
    return next((str(message[name]) for name in names if message.get(name)), None)
