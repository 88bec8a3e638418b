"""What Terraform sets is what the code reads; and Terraform takes the configuration as it is."""

import inspect
import re
from pathlib import Path

import pytest

from shared import bootstrap, config, topics
from tests.terraform import program

FOLDER = program.ROOT / "terraform"
FILES = sorted(FOLDER.glob("*.tf"))
# Of functions-framework, not of ours.
SERVER_SETTINGS = {"THREADS"}


def text(name: str) -> str:
    return (FOLDER / name).read_text()


def variables() -> list[tuple[str, str]]:
    """Name and text of every variable."""
    return re.findall(
        r'^variable "(\w+)" \{(.*?)^\}', text("variables.tf"), re.MULTILINE | re.DOTALL
    )


@pytest.mark.skipif(bool(program.missing()), reason=program.missing())
def test_terraform_takes_the_configuration() -> None:
    with program.copied() as terraform:
        assert "Success!" in terraform.done("validate", "-no-color")
        assert terraform.done("fmt", "-check", "-recursive") == ""


def test_every_setting_that_terraform_sets_is_one_that_the_code_reads() -> None:
    named = set(re.findall(r"\b([A-Z][A-Z0-9_]+) += ", text("functions.tf")))
    named |= set(re.findall(r"^    ([A-Z][A-Z0-9_]+) += ", text("secrets.tf"), re.MULTILINE))
    assert {"PUBSUB_TOPIC", "APP_DATABASE_URL", "THREADS"} <= named
    assert named - {name for name, _, _ in config.described()} == SERVER_SETTINGS


def test_every_secret_setting_is_a_secret() -> None:
    secret = {
        item.name.upper()
        for item in config.Settings.__dataclass_fields__.values()
        if item.metadata["secret"]
    }
    named = set(re.findall(r"^    ([A-Z][A-Z0-9_]+) = \{", text("secrets.tf"), re.MULTILINE))
    # Shops usually have databases of their own; who wants one for all gives a reference.
    assert secret - named == {"SHOPIFY_STORAGE_DATABASE_URL"}
    assert named <= secret


def test_an_instance_opens_as_many_connections_as_are_counted_with() -> None:
    found = re.search(r"connections_per_instance = \{(.*?)\}", text("functions.tf"))
    assert found
    counted = {k: int(v) for k, v in re.findall(r"(\w+) = (\d+)", found[1])}
    size = bootstrap.APPLICATION_POOL_SIZE
    pools = {
        "webhook": inspect.getsource(bootstrap.webhook).count("application_pool("),
        "subscriber": inspect.getsource(bootstrap.core).count("application_pool("),
    }
    pools["retry"] = pools["subscriber"]
    migrating = {"retry": 1}
    assert counted == {name: pools[name] * size + migrating.get(name, 0) for name in pools}


def test_the_default_topics_are_known_and_hold_every_resource() -> None:
    block = text("variables.tf").split('variable "shopify_topics"')[1].split("]")[0]
    listed = re.findall(r'"([a-z_]+/[a-z_]+)"', block)
    assert [name for name in listed if name not in topics.TOPICS] == []
    tables = {topic.table for topic in topics.TOPICS.values() if topic.table}
    assert {topics.TOPICS[name].table for name in listed} >= tables


def test_an_alert_reads_only_log_events_that_there_are() -> None:
    described = (program.ROOT / "docs/log-events.md").read_text()
    named = re.findall(r'event=\\"([a-z]+\.[a-z_]+)\\"', text("monitoring.tf"))
    assert len(set(named)) >= 8
    assert [name for name in named if f"| `{name}` |" not in described] == []


def test_every_variable_is_typed_and_described() -> None:
    assert len(variables()) > 30
    bare = [name for name, body in variables() if "\n  description " not in body]
    untyped = [name for name, body in variables() if "\n  type " not in body]
    assert (bare, untyped) == ([], [])


def test_every_validation_says_what_to_do() -> None:
    messages = re.findall(r'error_message = "(.*)"$', text("variables.tf"), re.MULTILINE)
    assert len(messages) > 40
    assert [message for message in messages if len(message) < 40 or message[-1] not in ".:"] == []


def test_every_precondition_has_a_test_that_breaks_it() -> None:
    tests = (FOLDER / "tests/preconditions.tftest.hcl").read_text()
    for name, body in variables():
        broken = len(re.findall(rf"\bvar\.{name}\b", tests))
        assert broken >= body.count("validation {"), f"{name} has more validations than tests"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_skipped_check_is_explained(path: Path) -> None:
    for skip in re.findall(r"checkov:skip=(.*)", path.read_text()):
        assert re.fullmatch(r"CKV2?_GCP_\d+: .{15,}\.", skip), skip
