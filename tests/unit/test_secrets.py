"""Secrets: the official client resolves references; passwords stay readable after a rotation."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from cryptography.fernet import Fernet

from shared import config, secrets
from shared.errors import ConfigurationError, SecretUnavailableError, StorageConfigurationError
from tests.secret_manager import SecretManager

NAME = "projects/p/secrets/shopify/versions/latest"
HOST_IS_AWAY = grpc.StatusCode.UNAVAILABLE


class Clock:
    """A clock that goes when it is told to."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def google():
    """Google's client talks to this; it knows one secret."""
    with SecretManager() as server:
        server.secrets[NAME] = b"s3cret\n"
        yield server


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def vault(google: SecretManager, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> secrets.Vault:
    """This process knows nothing yet, and asks `google`."""
    vault = secrets.Vault(google.client, clock=clock)
    monkeypatch.setattr(secrets, "_vault", vault)
    monkeypatch.setattr(secrets, "TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(secrets, "REFRESH_SECONDS", 0.5)
    return vault


def test_a_reference_is_replaced_by_the_secrets_value(google):
    assert secrets.resolve(f"_secret:{NAME}", {}, google.client) == "s3cret"


@pytest.mark.parametrize(
    ("reference", "cause"),
    [
        ("_secret:projects/p/secrets/other/versions/1", "NotFound"),
        ("_secret:shopify", "must look like"),
    ],
)
def test_a_reference_that_leads_nowhere_says_why(google, reference, cause):
    with pytest.raises(ConfigurationError, match=cause):
        secrets.resolve(reference, {}, google.client)


@pytest.mark.parametrize(
    "status",
    [
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAUTHENTICATED,
    ],
)
def test_a_refusal_is_permanent_and_ends_what_was_known(google, vault, clock, status):
    assert vault.read(NAME) == "s3cret"
    google.refuses = status
    clock.now += secrets.KEPT_SECONDS
    for _ in range(2):
        with pytest.raises(ConfigurationError) as caught:
            vault.read(NAME)
        assert "planted" not in str(caught.value)


def test_a_value_that_is_no_text_is_refused_without_being_shown(google):
    google.secrets[NAME] = b"hunter2\xff"
    with pytest.raises(ConfigurationError, match="UnicodeDecodeError") as caught:
        secrets.resolve(f"_secret:{NAME}", {}, google.client)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "status",
    [
        HOST_IS_AWAY,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ],
)
def test_a_secret_that_cannot_be_had_for_now_is_no_wrong_setting(google, vault, status):
    google.refuses = status
    with pytest.raises(SecretUnavailableError, match="SHOPIFY_CLIENT_SECRETS") as caught:
        config.load({"SHOPIFY_CLIENT_SECRETS": f"_secret:{NAME}"})
    assert "planted" not in str(caught.value)
    with pytest.raises(ConfigurationError, match=r"LEASE_SECONDS.*SHOPIFY_CLIENT_SECRETS"):
        config.load({"SHOPIFY_CLIENT_SECRETS": f"_secret:{NAME}", "LEASE_SECONDS": "soon"})


def test_a_secret_is_kept_for_five_minutes(google, vault, clock):
    assert [vault.read(NAME), vault.read(NAME)] == ["s3cret", "s3cret"]
    google.secrets[NAME] = b"rotated"
    clock.now += secrets.KEPT_SECONDS - 1
    assert (vault.read(NAME), len(google.asked)) == ("s3cret", 1)
    clock.now += 1
    assert vault.read(NAME) == "rotated"


def test_the_old_value_stays_while_secret_manager_is_away(google, vault, clock, capsys):
    vault.read(NAME)
    google.refuses = HOST_IS_AWAY
    google.secrets[NAME] = b"rotated"
    clock.now += 100 * secrets.KEPT_SECONDS
    assert vault.read(NAME) == "s3cret"
    assert '"secret.stale"' in capsys.readouterr().out
    google.refuses = None
    clock.now += secrets.SILENCE_SECONDS
    assert vault.read(NAME) == "rotated"


def test_a_secret_manager_that_says_nothing_costs_one_wait_and_no_further_ones(
    google, vault, clock
):
    other = "projects/p/secrets/database/versions/3"
    google.secrets[other] = b"url"
    assert (vault.read(NAME), vault.read(other)) == ("s3cret", "url")
    google.is_silent = True
    clock.now += secrets.KEPT_SECONDS
    assert vault.read(NAME) == "s3cret"
    asked = len(google.asked)
    assert (vault.read(NAME), vault.read(other)) == ("s3cret", "url")
    with pytest.raises(SecretUnavailableError, match="a moment ago"):
        vault.read("projects/p/secrets/unknown/versions/1")
    assert len(google.asked) == asked


def test_while_one_asks_again_the_others_go_on_with_what_is_known(
    google, vault, clock, monkeypatch
):
    monkeypatch.setattr(secrets, "REFRESH_SECONDS", 60)
    vault.read(NAME)
    google.secrets[NAME] = b"rotated"
    google.is_silent = True
    clock.now += secrets.KEPT_SECONDS
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(vault.read, NAME)
        while len(google.asked) < 2:
            assert not asking.done()
        assert vault.read(NAME) == "s3cret"
        assert not asking.done()
        google.speak()
        assert asking.result() == "rotated"


def test_other_values_are_what_they_are():
    assert secrets.resolve("plain", {}) == "plain"
    assert secrets.resolve("_env:X", {"X": "y"}) == "y"


def test_the_first_key_encrypts_and_every_key_decrypts():
    old, new = Fernet.generate_key().decode(), Fernet.generate_key().decode()
    token = secrets.Keyring([old]).encrypt("p\u00e4ss")
    rotated = secrets.Keyring([new, old])
    assert rotated.decrypt(token) == "päss"
    assert secrets.Keyring([new]).decrypt(rotated.encrypt("x")) == "x"
    with pytest.raises(StorageConfigurationError, match="CREDENTIAL_KEYS"):
        secrets.Keyring([new]).decrypt(token)
