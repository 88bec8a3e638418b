"""All that is wrong with the settings is said at once, by name, and never with a secret's value."""

import pytest

from shared import config
from shared.errors import ConfigurationError


def test_settings_come_from_the_environment_and_have_defaults():
    settings = config.load({"LEASE_SECONDS": "7", "SHOPIFY_CLIENT_SECRETS": " a, b,"})
    assert settings.lease_seconds == 7
    assert settings.shopify_client_secrets == ("a", "b")
    assert settings.retry_batch_limit == 50


def test_every_fault_is_reported_at_once():
    environ = {"LEASE_SECONDS": "soon", "PUBSUB_TOPIC": "t", "AUTO_MIGRATE": "maybe"}
    with pytest.raises(ConfigurationError) as caught:
        config.load(environ, require=("APP_DATABASE_URL",))
    for name in ("LEASE_SECONDS", "PUBSUB_TOPIC", "AUTO_MIGRATE", "APP_DATABASE_URL is missing"):
        assert name in str(caught.value)


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "1e3", " ", "²"])
def test_counts_are_whole_numbers_of_at_least_one(value):
    if value.strip():
        with pytest.raises(ConfigurationError, match="LEASE_SECONDS"):
            config.load({"LEASE_SECONDS": value})
    else:
        assert config.load({"LEASE_SECONDS": value}).lease_seconds == 120


def test_a_value_may_refer_to_another_variable():
    environ = {"APP_DATABASE_URL": "_env:DATABASE", "DATABASE": "postgresql://x"}
    assert config.load(environ).app_database_url == "postgresql://x"
    with pytest.raises(ConfigurationError, match="APP_DATABASE_URL refers to the variable ELSE"):
        config.load({"APP_DATABASE_URL": "_env:ELSE"})


def test_secrets_are_not_shown():
    secret = {
        "APP_DATABASE_URL": "postgresql://u:hunter2@h/d",
        "SHOPIFY_STORAGE_DATABASE_URL": "postgresql://u:hunter2@h/d",
        "SHOPIFY_CLIENT_SECRETS": "hunter2",
        "CREDENTIAL_KEYS": "hunter2",
    }
    assert "hunter2" not in repr(config.load(secret))
