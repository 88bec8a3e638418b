"""An imaginary cloud: everything is made, left alone, changed by one function, and taken away."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.terraform import program
from tests.terraform.program import Terraform

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(program.missing()), reason=program.missing()),
]

SECRET = "shpss_0123456789abcdef-invented"
GIVEN = {
    "project_id": "acme-prod",
    "region": "europe-west1",
    "shopify_client_secrets": SECRET,
    "alert_emails": '["operator@example.com"]',
    "static_egress_ip": "true",
}
EXTERNAL = {"database_mode": "external", "database_url": "postgresql://a:hidden-word@db.example/d"}


@pytest.fixture
def terraform() -> Iterator[Terraform]:
    with program.copied() as terraform:
        yield terraform


def changes(terraform: Terraform, **variables: str) -> dict[str, list[str]]:
    """What a plan would do, by address; what is left alone is not listed."""
    terraform.done("plan", "-no-color", "-out=it.tfplan", **GIVEN | variables)
    plan = json.loads(terraform.done("show", "-json", "it.tfplan"))
    found = {item["address"]: item["change"]["actions"] for item in plan["resource_changes"]}
    return {
        name: actions for name, actions in found.items() if actions not in (["no-op"], ["read"])
    }


def managed(terraform: Terraform) -> Counter[str]:
    state = json.loads((terraform.folder / "terraform.tfstate").read_text())
    return Counter(
        {
            item["type"]: len(item["instances"])
            for item in state["resources"]
            if item["mode"] == "managed"
        }
    )


def stored(terraform: Terraform) -> str:
    """All that Terraform keeps: the state, and the plan with the configuration's values."""
    return (terraform.folder / "terraform.tfstate").read_text() + terraform.done(
        "show", "-json", "it.tfplan"
    )


def test_a_deployment_from_its_first_apply_to_its_end(terraform: Terraform) -> None:
    said = terraform.done("apply", "-auto-approve", "-no-color", **GIVEN)
    made = managed(terraform)
    assert made["google_cloudfunctions2_function"] == 3
    assert made["google_sql_database_instance"] == 1
    assert SECRET not in said

    # A second apply finds nothing to do.
    assert changes(terraform) == {}
    _nothing_secret_is_stored(terraform)

    # A change in one function concerns that function and its bundle.
    main = terraform.folder.parent / "functions/retry/main.py"
    main.write_text(main.read_text() + "\n# touched\n")
    assert changes(terraform) == {
        'google_cloudfunctions2_function.this["retry"]': ["update"],
        'google_storage_bucket_object.bundle["retry"]': ["create", "delete"],
    }

    # A change in shared/ concerns all three.
    package = terraform.folder.parent / "shared/__init__.py"
    package.write_text(package.read_text() + "\n# touched\n")
    assert Counter(name.split(".")[0] for name in changes(terraform)) == {
        "google_cloudfunctions2_function": 3,
        "google_storage_bucket_object": 3,
    }

    # A function that is made anew is given its caller again.
    terraform.done(
        "plan", "-no-color", "-out=it.tfplan", "-replace",
        'google_cloudfunctions2_function.this["subscriber"]', **GIVEN,
    )  # fmt: skip
    plan = json.loads(terraform.done("show", "-json", "it.tfplan"))
    replaced = [
        item["address"]
        for item in plan["resource_changes"]
        if "create" in item["change"]["actions"]
    ]
    assert "google_cloud_run_service_iam_member.push_calls_subscriber" in replaced
    assert "google_cloud_run_service_iam_member.tick_calls_retry" not in replaced

    terraform.done("apply", "-auto-approve", "-no-color", **GIVEN, deletion_protection="false")
    terraform.done("destroy", "-auto-approve", "-no-color", **GIVEN, deletion_protection="false")
    assert managed(terraform) == {}


def test_a_deployment_with_a_database_elsewhere(terraform: Terraform) -> None:
    terraform.done("apply", "-auto-approve", "-no-color", **GIVEN, **EXTERNAL)
    assert managed(terraform)["google_sql_database_instance"] == 0
    assert changes(terraform, **EXTERNAL) == {}
    assert "hidden-word" not in stored(terraform)
    # A rotation writes a new version of one secret.
    rotated = changes(terraform, **EXTERNAL, shopify_client_secrets_version="2")
    assert {name for name in rotated if "secret" in name} == {
        'google_secret_manager_secret_version.this["SHOPIFY_CLIENT_SECRETS"]'
    }


def _nothing_secret_is_stored(terraform: Terraform) -> None:
    kept = stored(terraform)
    assert SECRET not in kept
    assert not re.search(r"postgres(ql)?://[^\"\\$<%]+:[^\"\\$<%]+@", kept), "a connection string"
    state = json.loads((terraform.folder / "terraform.tfstate").read_text())
    written: list[Any] = [
        instance["attributes"].get(name)
        for item in state["resources"]
        for instance in item["instances"]
        for name in ("secret_data", "secret_data_wo", "password", "password_wo", "root_password")
    ]
    assert set(written) == {None}
