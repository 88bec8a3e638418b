"""preflight on the notifier: each fault by its name, and never more than a warning."""

import json

import pytest

from tests.integration.test_commands import run
from tests.notifier.relay import Relay

BROKEN = {
    "update pgrelay.registry set interface_version = 7": "notifier:version",
    "delete from pgrelay.registry": "notifier:absent",
    "drop schema notifier cascade": "notifier:schema",
    "drop table notifier.attempts": "notifier:schema",
    "delete from notifier_schema_version": "notifier:schema",
    "drop function notifier.notify": "notifier:functions",
    "drop schema pgrelay cascade": "notifier:absent",
    "update notifier.profiles set timeout_seconds = 500": "notifier:timeout",
}


def found(environ: dict[str, str]) -> dict[str, str]:
    """What preflight finds of the notifier, with its severity."""
    report = json.loads(run(environ, "preflight", "--json").stdout)
    return {
        each["check"]: each["severity"]
        for each in report["findings"]
        if each["check"].startswith("notifier")
    }


@pytest.mark.parametrize("statement", BROKEN)
def test_what_is_wrong_with_the_notifier_is_a_warning_by_its_name(
    environ: dict[str, str], relay: Relay, statement: str
) -> None:
    relay.channel()
    relay.connection.execute(statement)  # type: ignore[arg-type]
    assert found(environ)[BROKEN[statement]] == "warning"


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_notifier_that_works_or_is_not_wanted_is_in_order(
    environ: dict[str, str], relay: Relay, is_wanted: bool
) -> None:
    relay.channel()
    if not is_wanted:
        relay.rows("update pgrelay.registry set uninstalled_at = now()")
    assert set(found(environ).values()) == {"ok"}


def test_a_notifier_without_a_channel_for_alerts_is_a_warning(
    environ: dict[str, str], relay: Relay
) -> None:
    assert found(environ) == {"notifier": "ok", "notifier:alerts": "warning"}
