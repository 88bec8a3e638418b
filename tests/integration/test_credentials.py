"""Keys and secrets are rotated beside running functions, without a lost event."""

import json
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
from cryptography.fernet import Fernet
from google.pubsub_v1.types import Topic

from dev import deliveries
from dev.pubsub_grpc import PubSubServer
from shared import bootstrap, rotation, secrets
from shared.errors import ConfigurationError
from shared.secrets import Keyring
from tests.secret_manager import SecretManager
from tests.world import SHOP, World, envelope

ROOT = Path(__file__).parents[2]
NEW = Fernet.generate_key().decode()


def tokens(world: World) -> list[str]:
    rows = world.app("select password_encrypted as t from databases_databasecredential order by id")
    return [row["t"] for row in rows]


def rotated(world: World, *keys: str) -> tuple[int, int, int]:
    steps = list(rotation.rotate(world.core.application, keys))
    return (
        sum(step.renewed for step in steps),
        sum(step.kept for step in steps),
        sum(len(step.unreadable) for step in steps),
    )


@pytest.fixture
def old(environ: dict[str, str]) -> str:
    return environ["CREDENTIAL_KEYS"]


def restart(world: World, *keys: str) -> None:
    world.environ = world.environ | {"CREDENTIAL_KEYS": ",".join(keys)}
    world.forget()


def test_every_credential_gets_the_newest_key_and_keeps_its_password(world, old, monkeypatch):
    monkeypatch.setattr(rotation, "STEP_ROWS", 2)
    for n in range(4):
        world.connect_shop(f"shop{n}.myshopify.com", f"org{n}")
    passwords = [Keyring([old]).decrypt(token) for token in tokens(world)]
    assert rotated(world, NEW, old) == (5, 0, 0)
    assert [Keyring([NEW]).decrypt(token) for token in tokens(world)] == passwords
    assert rotated(world, NEW, old) == (0, 5, 0), "and a second time changes nothing"


def test_no_event_is_lost_on_the_way_from_one_key_to_the_other(world, old):
    """New key first in all functions, rotate, old key out: events are stored at each stage."""
    stages = [(old,), (NEW, old), (NEW, old), (NEW,)]
    for n, keys in enumerate(stages):
        restart(world, *keys)
        world.core.pipeline.apply(envelope({"id": n}))
        if n == 1:
            assert rotated(world, *keys)[0] == 1
    assert len(world.tenant("select 1 from shopify_events")) == len(stages)


def test_an_event_that_meets_a_function_without_the_new_key_waits_and_is_stored(world, old):
    rotated(world, NEW, old)
    restart(world, old)
    row = world.fail()
    world.retry()
    assert world.failed_event()["error_type"] == "StorageConfigurationError"
    restart(world, NEW, old)
    world.make_due(row)
    assert world.retry().resolved == 1


def test_events_are_stored_while_keys_are_rotated_again_and_again(world, old):
    restart(world, NEW, old)
    keys, done = [NEW, old], threading.Event()

    def turn() -> None:
        while not done.is_set():
            keys.reverse()
            rotated(world, *keys)

    thread = threading.Thread(target=turn)
    thread.start()
    try:
        for n in range(30):
            world.core.directory._known.clear()
            world.core.pipeline.apply(envelope({"id": n}))
    finally:
        done.set()
        thread.join()
    assert len(world.tenant("select 1 from shopify_events")) == 30


def test_a_password_that_changes_meanwhile_is_not_overwritten(world, old, monkeypatch):
    renewed = rotation._renewed
    ring = Keyring([old])

    def slow(token, *rings):
        if ring.decrypt(token) != "changed":
            world.app(
                "update databases_databasecredential set password_encrypted = %(t)s",
                t=ring.encrypt("changed"),
            )
        return renewed(token, *rings)

    monkeypatch.setattr(rotation, "_renewed", slow)
    assert rotated(world, NEW, old)[0] == 1
    assert [Keyring([NEW]).decrypt(token) for token in tokens(world)] == ["changed"]


def test_two_beside_each_other_renew_each_once(world, old):
    for n in range(20):
        world.connect_shop(f"shop{n}.myshopify.com", f"org{n}")
    results: Counter[int] = Counter()
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: rotated(world, NEW, old)[0]}))
        for n in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(results.values()) == 21
    assert rotated(world, NEW, old) == (0, 21, 0)


def test_one_that_no_key_fits_is_named_and_the_others_are_renewed(world, old):
    world.connect_shop("second.myshopify.com", "second")
    world.app(
        "update databases_databasecredential set password_encrypted = %(t)s where id ="
        " (select min(id) from databases_databasecredential)",
        t=Keyring([Fernet.generate_key().decode()]).encrypt("x"),
    )
    assert rotated(world, NEW, old) == (1, 0, 1)


def test_a_reference_to_a_secret_is_left_alone(world, old):
    world.app(
        "update databases_databasecredential set password_encrypted = null, password_ref = '_env:X'"
    )
    assert rotated(world, NEW, old) == (0, 0, 0)


def test_without_keys_it_says_so(world):
    with pytest.raises(ConfigurationError, match="CREDENTIAL_KEYS"):
        rotated(world)


def test_the_command_says_what_it_did(world, old):
    command = [sys.executable, str(ROOT / "manage.py"), "rotate_credentials", "--json"]
    environ = {"PATH": "/usr/bin:/bin", "COLUMNS": "80", "TERM": "dumb"} | world.environ
    done = subprocess.run(
        command, env=environ | {"CREDENTIAL_KEYS": f"{NEW},{old}"}, cwd=ROOT,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert json.loads(done.stdout) == {"renewed": 1, "kept": 0, "unreadable": []}
    assert [Keyring([NEW]).decrypt(token) for token in tokens(world)]
    lost = subprocess.run(
        command, env=environ | {"CREDENTIAL_KEYS": Fernet.generate_key().decode()}, cwd=ROOT,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (lost.returncode, "cannot be decrypted" in lost.stderr) == (1, True)


def test_a_running_webhook_takes_deliveries_signed_with_a_rotated_secret(world, monkeypatch):
    """The reference names `latest`: first both secrets, then only the new one."""
    name, topic, now = "projects/p/secrets/shopify/versions/latest", "projects/p/topics/t", [0.0]

    def status(secret: str) -> int:
        signed = deliveries.signed(deliveries.attributes("orders/create", SHOP), b"{}", secret)
        return running.receiver.receive(list(signed.items()), b"{}").status

    with SecretManager() as google, PubSubServer() as pubsub:
        pubsub.broker.create_topic(Topic(name=topic))
        monkeypatch.setenv("PUBSUB_EMULATOR_HOST", pubsub.host)
        vault = secrets.Vault(google.client, clock=lambda: now[0])
        monkeypatch.setattr(secrets, "_vault", vault)
        google.secrets[name] = b"old"
        running = bootstrap.webhook(
            world.environ | {"PUBSUB_TOPIC": topic, "SHOPIFY_CLIENT_SECRETS": f"_secret:{name}"}
        )
        assert (status("old"), status("new")) == (200, 401)
        google.secrets[name] = b"new,old"
        now[0] += secrets.KEPT_SECONDS
        assert (status("old"), status("new")) == (200, 200)
        google.secrets[name] = b"new"
        now[0] += secrets.KEPT_SECONDS
        assert (status("old"), status("new")) == (401, 200)
        assert len(google.asked) == 3
        running.receiver._application.close()
