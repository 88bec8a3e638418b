"""What replays would do now: each failed event's writes, rolled back, whatever its state.

The retry run's dry run takes what is due. Here it is asked of what was given up, too: whether the
cause is gone is to be known before a thousand rows are requeued.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared import dossier, redact
from shared import envelope as envelopes
from shared.bootstrap import Core


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """What a replay of one row would do, or why it would fail."""

    id: int
    ledger: str = ""
    snapshot: str = ""
    error_type: str = ""
    error_message: str = ""


def rehearse(core: Core, ids: Sequence[int]) -> list[Rehearsed]:
    """One row after another; those that are gone are left out. Raises what the ledger raises."""
    return [done for row in ids if (done := _one(core, row))]


def _one(core: Core, row: int) -> Rehearsed | None:
    found = dossier.find(core.application, row)
    if found is None:
        return None
    payload = dossier.payload(core.application, row)
    if payload is None:
        text = "There is nothing to replay: its payload was taken away."
        return Rehearsed(id=row, error_type="PayloadGone", error_message=text)
    try:
        envelope = envelopes.from_json(found.event.envelope, payload)
        outcome = core.pipeline.apply(envelope, dry_run=True)
    except Exception as error:  # noqa: BLE001 - what would fail is the answer
        text = redact.message(error)
        return Rehearsed(id=row, error_type=type(error).__name__, error_message=text)
    return Rehearsed(id=row, ledger=outcome.ledger, snapshot=outcome.snapshot or "")
