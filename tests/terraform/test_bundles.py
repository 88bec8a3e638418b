"""Each bundle that Terraform builds is a whole function: started as the platform does, it works."""

import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet
from google.protobuf.timestamp_pb2 import Timestamp
from google.pubsub_v1.types import PubsubMessage

from dev import deliveries
from dev.processes import free_port
from dev.pubsub_grpc import PubSubServer
from shared import bootstrap
from tests.builders_pubsub import wrapped_push
from tests.functions.rig import SUBSCRIPTION, Inbox
from tests.terraform import program
from tests.world import SHOP, World

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(program.missing()), reason=program.missing()),
]

CLIENT_SECRET = "shpss_invented"
START_SECONDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """What Terraform plans for one function: the folder of its bundle, its target and settings."""

    folder: Path
    target: str
    settings: dict[str, str]


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Deployed]:
    """Each function's bundle, unpacked into an empty folder."""
    folder = tmp_path_factory.mktemp("bundles")
    with program.copied() as terraform:
        terraform.done(
            *("plan", "-no-color", "-out=it.tfplan"),
            project_id="acme-prod",
            region="europe-west1",
            shopify_client_secrets=CLIENT_SECRET,
            database_mode="external",
            database_url="postgresql://hookledger:invented@db.example.com:5432/hookledger",
        )
        plan = json.loads(terraform.done("show", "-json", "it.tfplan"))
        for name in ("webhook", "subscriber", "retry"):
            zipfile.ZipFile(terraform.folder / f"build/{name}.zip").extractall(folder / name)
    planned = [
        item
        for item in plan["planned_values"]["root_module"]["resources"]
        if item["type"] == "google_cloudfunctions2_function"
    ]
    return {item["index"]: _deployed(item, folder / item["index"]) for item in planned}


def _deployed(item: Mapping[str, Any], folder: Path) -> Deployed:
    values = item["values"]
    return Deployed(
        folder=folder,
        target=values["build_config"][0]["entry_point"],
        settings=values["service_config"][0]["environment_variables"],
    )


@pytest.fixture(scope="module")
def environment(deployed: dict[str, Deployed], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that holds requirements.txt and nothing else."""
    made = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", made], check=True)
    wanted = deployed["webhook"].folder / "requirements.txt"
    install = [made / "bin/python", "-m", "pip", "install", "--quiet", "-r", wanted]
    subprocess.run(install, check=True)
    return made / "bin"


@contextmanager
def served(function: Deployed, programs: Path, **settings: str) -> Iterator[str]:
    """The function's address. Nothing of this process's environment or path reaches it."""
    port = free_port()
    process = subprocess.Popen(
        [programs / "functions-framework", f"--target={function.target}"],
        cwd=function.folder,
        env={"PATH": f"{programs}:{os.defpath}", "PORT": str(port)} | function.settings | settings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with ExitStack() as stack:
        stack.callback(process.communicate)
        stack.callback(process.terminate)
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(ConnectionRefusedError):
                deliveries.request("HEAD", url)
                break
            time.sleep(0.1)
        assert process.poll() is None, process.stdout and process.stdout.read().decode()
        yield url


def test_a_bundle_holds_its_function_and_nothing_else(deployed: dict[str, Deployed]) -> None:
    for name, function in deployed.items():
        entries = {entry.name for entry in function.folder.iterdir()}
        assert entries == {"main.py", "requirements.txt", "shared"}, name
        source = program.ROOT / "functions" / name / "main.py"
        assert (function.folder / "main.py").read_bytes() == source.read_bytes()
        assert not list(function.folder.rglob("*.pyc"))


def test_three_bundles_and_an_empty_database_are_a_system(
    deployed: dict[str, Deployed], environment: Path, empty_url: str, tenant_url: str
) -> None:
    settings = {"APP_DATABASE_URL": empty_url, "CREDENTIAL_KEYS": Fernet.generate_key().decode()}

    # The scheduler's first tick makes the schema.
    with served(deployed["retry"], environment, **settings) as url:
        answer = deliveries.post(url)
        assert (answer.status, answer.json()["retried"]) == (200, 0)

    with PubSubServer() as server, ExitStack() as stack:
        inbox = Inbox(server)
        world = stack.enter_context(
            World(bootstrap.core(settings), environ=settings, tenant_url=tenant_url)
        )
        world.connect_shop()
        webhook = stack.enter_context(
            served(
                deployed["webhook"],
                environment,
                APP_DATABASE_URL=empty_url,
                SHOPIFY_CLIENT_SECRETS=CLIENT_SECRET,
                PUBSUB_EMULATOR_HOST=inbox.host,
                PUBSUB_TOPIC="projects/demo/topics/shopify-events",
            )
        )
        subscriber = stack.enter_context(served(deployed["subscriber"], environment, **settings))

        body = b'{"id": 820982911946154508, "total_price": "12.50"}'
        headers = deliveries.attributes("orders/create", SHOP)
        answer = deliveries.post(webhook, body, deliveries.signed(headers, body, CLIENT_SECRET))
        assert answer.status == 200
        assert deliveries.post(webhook, body, headers).status == 401

        assert deliveries.post(subscriber, _push(inbox, headers)).status == 204
        (row,) = world.tenant("select payload from shopify_events")
        assert row["payload"]["id"] == 820982911946154508


def _push(inbox: Inbox, headers: Mapping[str, str]) -> bytes:
    """What Pub/Sub would send of the one message that was published."""
    published = inbox.message(headers["X-Shopify-Webhook-Id"])
    message = PubsubMessage(
        data=published.data,
        attributes=dict(published.attributes),
        message_id="1",
        publish_time=Timestamp(seconds=int(time.time())),
    )
    return wrapped_push(message, subscription=SUBSCRIPTION)[1]
