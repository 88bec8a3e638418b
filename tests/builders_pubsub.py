"""The three shapes in which a Pub/Sub message reaches us: wrapped, and two of CloudEvents."""

import json
from typing import Any

from google.pubsub_v1.types import PubsubMessage

from dev.pubsub_push import push_body

EVENT_TYPE = "google.cloud.pubsub.topic.v1.messagePublished"


def wrapped_push(message: PubsubMessage, *, subscription: str) -> tuple[dict[str, str], bytes]:
    """Headers and body of Pub/Sub's own push."""
    body = push_body(message, subscription=subscription)
    return {"content-type": "application/json"}, json.dumps(body).encode()


def binary_event(
    message: PubsubMessage, *, subscription: str, topic: str
) -> tuple[dict[str, str], bytes]:
    """Headers and body as Eventarc sends them: the CloudEvent's context is in the headers."""
    headers, body = wrapped_push(message, subscription=subscription)
    context = {f"ce-{name}": value for name, value in _context(message, topic).items()}
    return headers | context, body


def structured_event(
    message: PubsubMessage, *, subscription: str, topic: str
) -> tuple[dict[str, str], bytes]:
    """Headers and body with all of the CloudEvent in the body."""
    event: dict[str, Any] = {
        **_context(message, topic),
        "datacontenttype": "application/json",
        "data": push_body(message, subscription=subscription),
    }
    return {"content-type": "application/cloudevents+json"}, json.dumps(event).encode()


def _context(message: PubsubMessage, topic: str) -> dict[str, str]:
    return {
        "id": message.message_id,
        "source": f"//pubsub.googleapis.com/{topic}",
        "specversion": "1.0",
        "type": EVENT_TYPE,
        "time": PubsubMessage.pb(message).publish_time.ToJsonString(),
    }
