"""What Google's services say no to, in a line of cause and remedy."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from shared.errors import HookledgerError

_LOGIN: Final = "Log in as somebody who may: gcloud auth application-default login"


class GoogleRefusedError(HookledgerError):
    """A service of Google's did not do what it was asked for."""

    code = "google_refused"


@contextmanager
def asked(what: str) -> Iterator[None]:
    """Errors of Google's clients become GoogleRefusedError; `what` is its name for people."""
    from google.api_core import exceptions as google  # noqa: PLC0415 - with the clients
    from google.auth.exceptions import GoogleAuthError  # noqa: PLC0415

    try:
        yield
    except google.NotFound as error:
        raise GoogleRefusedError(f"{what} does not exist, or not in this project.") from error
    except (google.Forbidden, google.Unauthorized, GoogleAuthError) as error:
        raise GoogleRefusedError(
            f"{what} is not for you to use ({type(error).__name__}). {_LOGIN}"
        ) from error
    except google.RetryError as error:
        raise GoogleRefusedError(f"{what}: no answer in time. Try again.") from error
    except google.GoogleAPICallError as error:
        raise GoogleRefusedError(f"{what}: {type(error).__name__}, {error.message}") from error
