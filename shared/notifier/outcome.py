"""What becomes of a notification after an attempt: pure, from the verdict and who had it before."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from shared.notifier.model import Acceptance, Decision, Result, Status, Verdict

BACKOFF_SECONDS: Final = (3, 5, 10)  # after the first, the second, and every further attempt
RETRY_AFTER_SECONDS_MAX: Final = 300

States = Mapping[str, Acceptance]  # by recipient


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What is recorded of an attempt."""

    status: Status
    decisions: Mapping[str, Decision] = field(default_factory=dict)  # by this attempt
    delay_seconds: float = 0  # until the next attempt, where there is one
    partial: dict[str, dict[str, str]] | None = None  # who did not get it, of a sent one


def conclude(verdict: Verdict, *, attempt: int, max_retries: int, states: States) -> Outcome:
    """The outcome of `attempt`, which went to those who were pending in `states`.

    Whoever accepted a message never gets it again. One that somebody accepted ends as sent, even if
    others refused it or could not be reached in the end; one that nobody accepted as failed.
    """
    decisions = _decisions(verdict, states)
    after = dict(states) | {who: decision.acceptance for who, decision in decisions.items()}
    is_accepted = Acceptance.ACCEPTED in after.values()
    is_open = Acceptance.PENDING in after.values() or not (after or verdict.result is Result.SENT)
    if is_open and verdict.result is not Result.PERMANENT and attempt <= max_retries:
        return Outcome(
            status=Status.RETRY, decisions=decisions, delay_seconds=delay(verdict, attempt)
        )
    if is_accepted or (verdict.result is Result.SENT and not after):
        return Outcome(status=Status.SENT, decisions=decisions, partial=_left_out(after, decisions))
    return Outcome(status=Status.FAILED, decisions=decisions)


def delay(verdict: Verdict, attempt: int) -> float:
    """Seconds from the verdict on `attempt` until the next one is due."""
    backoff = BACKOFF_SECONDS[min(attempt, len(BACKOFF_SECONDS)) - 1]
    return max(backoff, min(verdict.retry_after or 0, RETRY_AFTER_SECONDS_MAX))


def _decisions(verdict: Verdict, states: States) -> dict[str, Decision]:
    """What the attempt decided for those who were pending: a sent message went to all unnamed."""
    pending = [who for who, state in states.items() if state is Acceptance.PENDING]
    decided = {who: verdict.recipients[who] for who in pending if who in verdict.recipients}
    if verdict.result is Result.SENT:
        accepted = Decision(acceptance=Acceptance.ACCEPTED, code=verdict.code)
        return dict.fromkeys(pending, accepted) | decided
    return decided


def _left_out(after: States, decisions: Mapping[str, Decision]) -> dict[str, dict[str, str]] | None:
    """By state, who did not accept it, with the code where this attempt had one."""
    left: dict[str, dict[str, str]] = {}
    for who, state in after.items():
        if state is not Acceptance.ACCEPTED:
            code = decisions[who].code if who in decisions else ""
            left.setdefault(state.value, {})[who] = code
    return left or None
