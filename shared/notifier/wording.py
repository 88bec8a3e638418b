"""The words of an alert: pure, from a group to subject and body. Names and numbers, no payload."""

import shlex
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from shared.remedies import remedy

WIDTH: Final = 78
SUBJECT_CHARACTERS: Final = 150
NAME_CHARACTERS: Final = 60
CAUSE_CHARACTERS: Final = 300
SILENCED_HOURS: Final = 4  # as the command in a message suggests

_ALIVE: Final = "No alert has gone to this channel lately. The notifier works."
_LABEL: Final = 14


class Kind(StrEnum):
    """What an alert is about."""

    FAILED = "failed"
    INCIDENT = "incident"
    OVERDUE = "overdue"
    REQUEST = "request"
    OUTBOX = "outbox"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What one channel is told about one cause, as far as the words depend on it."""

    channel: str
    dedupe_key: str
    kind: str
    about: dict[str, Any]
    severity: str
    state: str
    first_seen: datetime
    last_seen: datetime
    total: int
    since_notified: int
    sample: list[int]
    cause: str | None = None  # of an incident, scrubbed


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A message, ready to be queued."""

    subject: str
    body: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Story:
    """What one kind of alert has to say."""

    title: str
    means: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    step: str = ""
    commands: list[list[str]] = field(default_factory=list)
    page: str = "docs/alerts.md"


def alert(group: Group, *, project: str, held_back: int = 0, per_hour: int = 0) -> Text:
    """The message of a group that fires or is resolved.

    `held_back`: alerts that are due too, of a channel that has had all it takes in an hour.
    """
    story = _story(group)
    is_over = group.state == "resolved"
    lead = "RESOLVED" if is_over else group.severity.upper()
    means = "It is over: nothing of it is left." if is_over else story.means
    parts = [_wrapped(means), _facts(group, story)]
    if not is_over:
        parts += [_field("Next step", story.step), _commands([*story.commands, _silence(group)])]
    if held_back:
        parts.append(
            _wrapped(
                f"{_count(held_back, 'more alert')} suppressed for now: this channel takes "
                f"{per_hour} an hour. See manage.py notify alerts."
            )
        )
    parts.append(_links(story.page, project))
    return Text(subject=_subject(project, lead, story.title), body="\n\n".join(parts) + "\n")


def undelivered(groups: Sequence[Group], *, project: str) -> Text:
    """To the fallback channel: what could not be told elsewhere."""
    channels = ", ".join(sorted({_short(group.channel) for group in groups}))
    what = _count(len(groups), "alert")
    lines = [_wrapped(f"- {group.severity}: {_story(group).title}") for group in groups[:20]]
    if len(groups) > len(lines):
        lines.append(f"- and {len(groups) - len(lines)} more")
    parts = [
        _wrapped(f"{what} could not be delivered to: {channels}. They are tried again."),
        "\n".join(lines),
        _commands([["notify", "list", "--status", "failed"], ["notify", "alerts"]]),
        _links("docs/notifier.md#alerts", project),
    ]
    subject = _subject(project, "ERROR", f"{what} undelivered: {channels}")
    return Text(subject=subject, body="\n\n".join(parts) + "\n")


def heartbeat(*, project: str) -> Text:
    """What a channel says when it has had nothing to say."""
    return Text(subject=_subject(project, "INFO", "the notifier is alive"), body=_ALIVE + "\n")


def _story(group: Group) -> _Story:
    match Kind(group.kind):
        case Kind.FAILED:
            return _failed(group)
        case Kind.INCIDENT:
            return _incident(group)
        case Kind.OVERDUE:
            return _Story(
                title=f"{_count(group.total, 'compliance request')} overdue",
                means="A customer's data should have been shown or erased by now. The law sets "
                "that time.",
                step="See what is in the way: mostly a tenant database out of reach.",
                commands=[*_requests(group), ["privacy", "run"]],
                page="docs/alerts.md#a-compliance-request-is-overdue",
            )
        case Kind.REQUEST:
            return _Story(
                title=f"{_count(group.total, 'data request')} to answer",
                means="A customer asks what is held of them. Nobody answers that by itself.",
                step="Export what is held and hand it to the merchant, in time.",
                commands=[["privacy", "list", "--open"], *_requests(group, "export")],
                page="docs/privacy.md#by-hand",
            )
        case Kind.OUTBOX:
            return _Story(
                title="the outbox does not empty",
                means="Pub/Sub took messages neither when they came nor since. They are safe in "
                "the application database, and tried each minute.",
                step="Look for outbox.stuck in the retry function's log: it has the cause. Then "
                "the function's role, and PUBSUB_TOPIC.",
                commands=[["failures", "stats"]],
                page="docs/alerts.md#the-outbox-does-not-empty",
            )


def _failed(group: Group) -> _Story:
    error_type, code = (str(group.about.get(name, "")) for name in ("error_type", "error_code"))
    scope = ["--error-type", error_type, "--code", code] if group.about else []
    cause = f"{error_type} ({code})" if group.about else "several others"
    step = remedy(error_type, code, "failed") if group.about else "See which kinds there are."
    requeue = [["failures", "requeue", *scope]] if group.about else []
    return _Story(
        title=f"{_count(group.total, 'failed event')} given up: {cause}",
        means="Their replays are used up, and nothing happens to them until somebody decides. "
        "They are safe in the failure ledger.",
        facts=[("Cause", cause)],
        step=step,
        commands=[
            *(["failures", "show", str(row)] for row in group.sample[:1]),
            ["failures", "list", "--status", "failed", *scope] if scope else ["failures", "stats"],
            *requeue,
        ],
        page="docs/alerts.md#failed-events-were-given-up",
    )


def _incident(group: Group) -> _Story:
    tenant = str(group.about.get("tenant", ""))
    return _Story(
        title=f"tenant database unavailable: {_short(tenant)}"
        if tenant
        else f"{group.total} more tenant databases unavailable",
        means="Events wait in the failure ledger, uncharged but for one probe after 1, 2, 4, 8 "
        "and then every 15 minutes. They replay by themselves when it answers.",
        facts=[("Organization", tenant), ("Cause", (group.cause or "")[:CAUSE_CHARACTERS])],
        step="Tell the database's owner. A new password or address: connect_shop again.",
        commands=[
            ["failures", "stats"],
            *([["failures", "list", "--organization", tenant]] if tenant else []),
        ],
        page="docs/alerts.md#a-tenants-database-is-unavailable",
    )


def _requests(group: Group, command: str = "show") -> list[list[str]]:
    return [["privacy", command, str(row)] for row in group.sample[:1]]


def _facts(group: Group, story: _Story) -> str:
    numbers = str(group.total)
    if 0 < group.since_notified < group.total:
        numbers += f", of them {group.since_notified} new"
    pairs = [
        *story.facts,
        ("First", _clock(group.first_seen)),
        ("Last", _clock(group.last_seen)),
    ]
    if group.kind in (Kind.FAILED, Kind.OVERDUE, Kind.REQUEST):
        pairs += [("Count", numbers), ("Examples", ", ".join(map(str, group.sample)))]
    return "\n".join(_field(name, value) for name, value in pairs if value)


def _silence(group: Group) -> list[str]:
    return ["notify", "silence", group.dedupe_key, "--for", f"{SILENCED_HOURS}h", "--reason", "WHY"]


def _links(page: str, project: str) -> str:
    lines = [f"See {page}"]
    if project:
        lines.append(f"https://console.cloud.google.com/logs/query?project={project}")
    return "\n".join(lines)


def _subject(project: str, lead: str, title: str) -> str:
    return _line(f"[{project or 'Hookledger'}] {lead}: {title}")[:SUBJECT_CHARACTERS]


def _field(name: str, value: str) -> str:
    return textwrap.fill(
        _line(value),
        WIDTH,
        initial_indent=name.ljust(_LABEL),
        subsequent_indent=" " * _LABEL,
        break_on_hyphens=False,
    )


def _commands(commands: Iterable[Sequence[str]]) -> str:
    """One below the other; a long one goes on in the next line, as a shell reads it."""
    return "\n".join(_command(words) for words in commands)


def _command(words: Sequence[str]) -> str:
    lines, line = [], "  python manage.py"
    for part in _parts(words):
        if len(line) + len(part) + 3 > WIDTH:
            lines.append(line + " \\")
            line = "     "
        line += " " + part
    return "\n".join([*lines, line])


def _parts(words: Sequence[str]) -> list[str]:
    """The words as a shell takes them, an option together with its value."""
    parts: list[str] = []
    for word in map(shlex.quote, map(_line, words)):
        if parts and parts[-1].startswith("--") and " " not in parts[-1]:
            parts[-1] += " " + word
        else:
            parts.append(word)
    return parts


def _wrapped(text: str) -> str:
    return textwrap.fill(_line(text), WIDTH, break_on_hyphens=False)


def _line(text: str) -> str:
    """One line that nobody's software acts upon."""
    return "".join(c if c.isprintable() else " " for c in text)


def _short(name: str) -> str:
    return name if len(name) <= NAME_CHARACTERS else name[: NAME_CHARACTERS - 1] + "…"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _clock(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"
