"""What Google answered to a check, or why it would not."""

from collections.abc import Callable, Iterator
from typing import Final

from cli.preflight.finding import Finding, error, warning

_LOGIN: Final = "Log in as somebody who may: gcloud auth application-default login"


def answered(check: str, ask: Callable[[], Iterator[Finding]], to_set: str) -> Iterator[Finding]:
    """What `ask` finds; a refusal is a finding, and `to_set` the remedy for what is not there."""
    from google.api_core import exceptions as google  # noqa: PLC0415 - for this command only
    from google.auth.exceptions import GoogleAuthError  # noqa: PLC0415

    try:
        yield from ask()
    except google.NotFound:
        yield error(check, "It does not exist.", to_set)
    except (google.Forbidden, google.Unauthorized, GoogleAuthError) as fault:
        yield warning(check, f"You may not look at it: {type(fault).__name__}.", _LOGIN)
    except google.GoogleAPICallError as fault:
        yield warning(check, f"No answer: {type(fault).__name__}.", "Try again later.")
