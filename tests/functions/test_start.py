"""A function starts with one word, from its own folder, and costs nothing until it is asked."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from dev import deliveries
from dev.functions import ROOT, TARGETS
from dev.processes import free_port
from tests.functions.rig import Silence, environment

SCRIPT = Path(sys.executable).parent / "functions-framework"

# What a bare call says, without a setting: that it is up, or that settings are missing.
SAYS = {"webhook": ("GET", 200), "subscriber": ("POST", 500), "retry": ("GET", 405)}

# Prints, as JSON, what importing main.py has brought along and done.
PROBE = """
import json, sys, threading

acts = []
WATCHED = ("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "urllib.")
import functions_framework
sys.addaudithook(lambda name, args: acts.append(name) if name.startswith(WATCHED) else None)
before = set(sys.modules)
import main
print(json.dumps({
    "modules": sorted(set(sys.modules) - before),
    "acts": acts,
    "threads": threading.active_count(),
    "target": callable(getattr(main, sys.argv[1])),
}))
"""


@contextmanager
def served(name: str, *, source: Path | None = None) -> Iterator[str]:
    """The console script's server in the function's own folder; its address."""
    port = free_port()
    process = subprocess.Popen(
        [str(SCRIPT), f"--target={TARGETS[name]}"],
        cwd=source or ROOT / name,
        env=environment({"PORT": str(port)}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    url = f"http://127.0.0.1:{port}"
    with ExitStack() as stack:
        stack.callback(process.communicate)
        stack.callback(process.terminate)
        deadline = time.monotonic() + 30
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(ConnectionRefusedError):
                deliveries.request("HEAD", url)
                break
            time.sleep(0.05)
        assert process.poll() is None, process.stdout and process.stdout.read().decode()
        yield url


@pytest.mark.parametrize("name", TARGETS)
def test_the_console_script_starts_a_function_from_its_folder_with_a_target_alone(
    name: str,
) -> None:
    method, status = SAYS[name]
    with served(name) as url:
        assert deliveries.request(method, url).status == status


def _imported(name: str, **settings: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, TARGETS[name]],
        cwd=ROOT / name,
        env=environment(settings),
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert done.stderr == b""
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", TARGETS)
def test_importing_a_function_opens_nothing(name: str) -> None:
    with Silence() as database, Silence() as pubsub:
        found = _imported(
            name,
            APP_DATABASE_URL=database.url,
            SHOPIFY_STORAGE_DATABASE_URL=database.url,
            SHOPIFY_CLIENT_SECRETS="secret",
            PUBSUB_TOPIC="projects/demo/topics/t",
            PUBSUB_EMULATOR_HOST=pubsub.host,
            AUTO_MIGRATE="true",
        )
        assert (database.callers(), pubsub.callers()) == (0, 0)
    assert found["target"] is True
    assert found["threads"] == 1
    # urllib3, which Google's client brings, tries at import whether a socket can be bound to ::1.
    tried = ["socket.__new__", "socket.bind"] if name == "webhook" else []
    assert found["acts"] == tried


@pytest.mark.parametrize(("name", "calls"), [("webhook", 0), ("subscriber", 1), ("retry", 1)])
def test_on_cloud_run_all_but_the_webhook_wait_for_the_way_to_their_database(
    name: str, calls: int
) -> None:
    with Silence() as database:
        _imported(name, APP_DATABASE_URL=database.url, K_SERVICE="hookledger")
        assert database.callers() == calls


@pytest.mark.parametrize("name", TARGETS)
def test_importing_a_function_needs_no_setting(name: str) -> None:
    assert _imported(name)["target"] is True


@pytest.mark.parametrize("name", ["subscriber", "retry"])
def test_importing_a_function_brings_no_google_client(name: str) -> None:
    modules = _imported(name)["modules"]
    assert isinstance(modules, list)
    assert [name for name in modules if name.startswith(("google.", "grpc"))] == []


@pytest.mark.parametrize("name", TARGETS)
def test_importing_a_function_brings_no_part_of_the_notifier(name: str) -> None:
    modules = _imported(name)["modules"]
    assert isinstance(modules, list)
    assert [name for name in modules if name.startswith(("shared.notifier", "smtplib"))] == []


@pytest.mark.parametrize("name", TARGETS)
def test_importing_a_function_brings_nothing_that_is_not_deployed(name: str) -> None:
    modules = _imported(name)["modules"]
    assert isinstance(modules, list)
    tops = {module.split(".")[0] for module in modules}
    assert tops & {"dev", "cli", "typer", "rich", "pytest", "tests"} == set()
    assert "shared.bootstrap" in modules
