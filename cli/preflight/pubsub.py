"""Pub/Sub's topic and subscriptions, as Google has them."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from cli.preflight import google
from cli.preflight.finding import Finding, fine, guarded, warning
from shared.config import Settings

if TYPE_CHECKING:
    from google.pubsub_v1.types import Subscription

TIMEOUT_SECONDS: Final = 10
ATTEMPTS_MIN: Final = 20
BACKOFF_MIN: Final = timedelta(seconds=60)

Faults = Iterator[str]

_SET_IT: Final = "Set it as terraform/pubsub.tf does: terraform apply."
_TOPIC: Final = "pubsub:topic"


def look(settings: Settings) -> Iterator[Finding]:
    """What the settings name; the rest is not looked at, and that is said."""
    yield from guarded(_TOPIC, lambda: google.answered(_TOPIC, lambda: _topic(settings), _SET_IT))
    yield from _looked_at("PUBSUB_SUBSCRIPTION", "pubsub:subscription", settings, _delivering)
    yield from _looked_at(
        "PUBSUB_DEAD_LETTER_SUBSCRIPTION", "pubsub:dead_letters", settings, _waiting
    )


def _looked_at(
    name: str, check: str, settings: Settings, judge: "Callable[[Subscription, Settings], Faults]"
) -> Iterator[Finding]:
    path = getattr(settings, name.lower())
    if not path:
        yield warning(check, f"{name} is not set: not looked at.", f"Set {name}.")
        return

    def ask() -> Iterator[Finding]:
        from shared import pubsub  # noqa: PLC0415 - half a second

        with pubsub.subscriber(settings.pubsub_emulator_host) as client:
            found = client.get_subscription(subscription=path, timeout=TIMEOUT_SECONDS, retry=None)
        faults = list(judge(found, settings))
        for cause in faults:
            yield warning(check, cause, _SET_IT)
        if not faults:
            yield fine(check, "It is there, and set as it should be.")

    yield from guarded(check, lambda: google.answered(check, ask, _SET_IT))


def _topic(settings: Settings) -> Iterator[Finding]:
    from shared import pubsub  # noqa: PLC0415 - half a second

    if not settings.pubsub_topic:
        yield warning(_TOPIC, "PUBSUB_TOPIC is not set: not looked at.", "Set PUBSUB_TOPIC.")
        return
    with pubsub.publisher(settings.pubsub_emulator_host) as client:
        client.get_topic(topic=settings.pubsub_topic, timeout=TIMEOUT_SECONDS, retry=None)
    yield fine(_TOPIC, "It is there.")


def _delivering(found: "Subscription", settings: Settings) -> Faults:
    """The subscription that the subscriber's events come from."""
    yield from _lasting(found, settings.pubsub_retention_days, "PUBSUB_RETENTION_DAYS")
    if settings.pubsub_topic and found.topic != settings.pubsub_topic:
        yield f"It belongs to {found.topic}, and PUBSUB_TOPIC is {settings.pubsub_topic}."
    policy = found.dead_letter_policy
    if not policy.dead_letter_topic:
        yield "It has no dead-letter topic: a message that is always refused comes back for ever."
    elif policy.max_delivery_attempts < ATTEMPTS_MIN:
        yield (
            f"It gives a message up after {policy.max_delivery_attempts} attempts: minutes of an "
            "outage make dead letters."
        )
    if "retry_policy" not in found or _span(found.retry_policy.maximum_backoff) < BACKOFF_MIN:
        yield "It redelivers without a growing backoff: an outage becomes a storm."


def _waiting(found: "Subscription", settings: Settings) -> Faults:
    """The subscription that dead letters wait in."""
    yield from _lasting(found, settings.dead_letter_retention_days, "DEAD_LETTER_RETENTION_DAYS")
    if found.push_config.push_endpoint:
        yield "It pushes: dead letters wait for somebody to pull them."


def _lasting(found: "Subscription", days: int, name: str) -> Faults:
    """That messages are kept, and for no longer than the ledgers remember their events."""
    kept = _span(found.message_retention_duration)
    if found.detached:
        yield "It is detached from its topic: nothing arrives any more."
    if kept > timedelta(days=days):
        yield f"It keeps messages for {kept.days} days, and {name} says {days}."
    if timedelta(0) < kept < timedelta(days=1):
        yield f"It keeps messages for {kept} only."
    if expires := _span(found.expiration_policy.ttl):
        yield f"It expires after {expires.days} idle days, with its messages."


def _span(duration: Any) -> timedelta:
    """The client hands durations out as Python has them, whatever its types say."""
    return duration or timedelta(0)
