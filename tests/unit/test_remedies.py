"""Every failure of the error-handling matrix has its next step, in one line."""

import pytest

from shared import errors
from shared.remedies import remedy


@pytest.mark.parametrize(
    ("error_type", "code", "words"),
    [
        ("UndecodableMessageError", "message_undecodable", "publisher"),
        ("ValueError", "invalid_value", "Correct the data"),
        ("StorageConfigurationError", "storage_configuration", "connect_shop"),
        ("InvalidPassword", "28P01", "Restore access"),
        ("OperationalError", "connection_failed", "Restore access"),
        ("DatabaseTimeoutError", "database_timeout", "Restore access"),
        ("Ipv6OnlyError", "ipv6_only", "pooler"),
        ("UndefinedColumn", "42703", "provision_schema"),
        ("InsufficientPrivilege", "42501", "Grant"),
        ("DeadlockDetected", "40P01", "load"),
        ("LockNotAvailable", "55P03", "load"),
        ("DiskFull", "53100", "disk"),
        ("NotNullViolation", "23502", "constraint"),
        ("KeyError", "unexpected", "deploy a fix"),
        ("DirectoryUnavailableError", "directory_unavailable", "application database"),
    ],
)
def test_the_matrix(error_type, code, words):
    assert words in remedy(error_type, code, "pending")


def families() -> list[type[errors.HookledgerError]]:
    """The concrete errors of our own."""
    bases = (errors.TransientError, errors.PermanentError)
    named = [each for each in vars(errors).values() if isinstance(each, type)]
    return [each for each in named if issubclass(each, bases) and each not in bases]


@pytest.mark.parametrize("kind", families())
def test_no_error_of_our_own_is_taken_for_an_error_in_the_code(kind):
    assert "An error in the code" not in remedy(kind.__name__, kind.code, "pending")


def test_what_was_given_up_does_nothing_by_itself():
    assert remedy("InvalidPassword", "28P01", "pending").endswith("it replays by itself.")
    assert remedy("InvalidPassword", "28P01", "failed").endswith("then requeue it.")


def test_what_is_resolved_needs_nothing():
    assert remedy("KeyError", "unexpected", "resolved") == "Nothing: it is resolved."
