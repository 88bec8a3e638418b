"""The local stack as a newcomer runs it: one command up, one signal down, nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from rich.console import Console

from dev import deliveries, demo, samples

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc (Linux)")

ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 60


def command(*words: str) -> list[str]:
    return [sys.executable, str(ROOT / "manage.py"), *words]


def bare_environ(**settings: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **settings}


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + WAIT_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.05)
    return found


def is_running(pid: int) -> bool:
    """Whether the process lives; one that only waits to be buried does not."""
    stat = _stat(pid)
    return stat is not None and stat[0] != "Z"


@contextmanager
def stack(folder: Path, *options: str, **settings: str) -> Iterator[tuple[dict[str, Any], Any]]:
    """A running `manage.py dev`: what stack.json says, and its process."""
    options = ("--data-dir", str(folder), *options)
    process = subprocess.Popen(
        command("dev", *options),
        env=bare_environ(**settings),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    path = folder / "stack.json"
    try:
        wait_for(lambda: path.exists() or process.poll() is not None)
        assert process.poll() is None, "the stack did not start"
        yield json.loads(path.read_text()), process
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)


def send(described: dict[str, Any], topic: str) -> deliveries.Answer:
    body = samples.load(topic, described["shop_domain"])
    headers = deliveries.attributes(topic, described["shop_domain"])
    signed = deliveries.signed(headers, body, described["client_secret"])
    return deliveries.post(described["webhook_url"], body, signed)


def rows(url: str, query: Any) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(query).fetchall()


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with stack(tmp_path_factory.mktemp("my stack"), "--retry-every", "0.2") as (described, _):
        yield described


def test_the_description_names_all_that_a_program_needs(running):
    assert set(running) == {
        "webhook_url",
        "subscriber_url",
        "retry_url",
        "app_database_url",
        "tenant_database_url",
        "pubsub_emulator_host",
        "pubsub_topic",
        "client_secret",
        "shop_domain",
        "organization_id",
        "env",
        "smtp",
        "pids",
    }
    assert all(is_running(pid) for pid in running["pids"].values())
    assert set(running["pids"]) == {
        *("dev", "webhook", "subscriber", "retry"),
        *("application_database", "tenant_database"),
    }


def test_a_signed_sample_reaches_the_tenant(running):
    assert send(running, "collections/create").status == 200
    query = "select 1 from shopify_events where topic = 'collections/create'"
    wait_for(lambda: rows(running["tenant_database_url"], query))


def test_the_scheduler_heals_what_is_due(running):
    body = b"not json"
    headers = deliveries.attributes("orders/create", running["shop_domain"], event_id="broken")
    signed = deliveries.signed(headers, body, running["client_secret"])
    assert deliveries.post(running["webhook_url"], body, signed).status == 200
    query = "select retry_count from subscriber_subscriberfailedevent where event_id = 'broken'"
    wait_for(lambda: rows(running["app_database_url"], query) == [(1,)])


def test_env_is_all_that_another_process_needs(running):
    answered = subprocess.run(
        command("retry_failed_events"),
        capture_output=True,
        text=True,
        env=bare_environ(**running["env"]),
        check=False,
    )
    assert answered.stdout.splitlines()[-1].startswith("Retried=")


def test_send_finds_the_stack_and_sigterm_leaves_nothing_behind(tmp_path):
    folder = tmp_path / "data dir"
    with stack(folder, "--retry-every", "0") as (described, process):
        sent = subprocess.run(
            command("send", "orders/create", "--data-dir", str(folder)),
            capture_output=True,
            text=True,
            env=bare_environ(),
            check=False,
        )
        assert sent.stdout.startswith('200 {"')
        wait_for(
            lambda: rows(described["tenant_database_url"], "select 1 from shopify_orders") == [(1,)]
        )
        workers = _descendants(process.pid)
        assert set(described["pids"].values()) <= {process.pid, *workers}
        process.terminate()
        assert process.wait(WAIT_SECONDS) == 0
        assert not [pid for pid in workers if is_running(pid)]
        assert not (folder / "stack.json").exists()
    with stack(folder, "--retry-every", "0") as (again, _):
        kept = rows(again["tenant_database_url"], "select count(*) from shopify_orders")
        assert kept == [(1,)], "the data outlives the stack"
        assert again["client_secret"] == described["client_secret"]


def test_a_killed_stack_takes_its_children_along(tmp_path):
    with stack(tmp_path / "s", "--retry-every", "0") as (_, process):
        workers = _descendants(process.pid)
        process.send_signal(signal.SIGKILL)
        wait_for(lambda: not [pid for pid in workers if is_running(pid)])


def test_settings_of_the_environment_reach_the_functions(tmp_path):
    settings = {"WEBHOOK_MAX_BODY_BYTES": "10"}
    with stack(tmp_path / "s", "--retry-every", "0", **settings) as (described, _):
        assert send(described, "orders/create").status == 413


def test_databases_and_pubsub_of_ones_own_are_used_instead(tmp_path, running):
    settings = {
        "APP_DATABASE_URL": running["app_database_url"],
        "PUBSUB_EMULATOR_HOST": running["pubsub_emulator_host"],
        "CREDENTIAL_KEYS": running["env"]["CREDENTIAL_KEYS"],
    }
    with stack(tmp_path / "s", "--retry-every", "0", **settings) as (described, _):
        for name in ("app_database_url", "pubsub_emulator_host"):
            assert described[name] == running[name]
        assert "application_database" not in described["pids"]


def test_the_demonstration_holds_what_it_claims():
    console = Console(record=True, width=80, quiet=True)
    assert demo.run(console)


def test_the_demonstration_fails_when_a_claim_does_not_hold(monkeypatch):
    sign = deliveries.signed
    monkeypatch.setattr(deliveries, "signed", lambda h, b, _secret: sign(h, b, "wrong"))
    assert not demo.run(Console(quiet=True))


def _descendants(pid: int) -> list[int]:
    """All processes below `pid`, its children's children too."""
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]
    parents = {child: int(stat[1]) for child in pids if (stat := _stat(child))}
    below, wave = [], [pid]
    while wave:
        wave = [child for child, parent in parents.items() if parent in wave]
        below += wave
    return below


def _stat(pid: int) -> list[str] | None:
    """State, parent and the rest of what the kernel says of a process; None: there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
