"""The wait for the network at the start of a new instance: bounded, on Cloud Run only."""

import json
import socket
from contextlib import closing

import pytest

from dev.processes import free_port
from shared import warmup


def environ(port: int, **more: str) -> dict[str, str]:
    return {"APP_DATABASE_URL": f"postgresql://app:secret@127.0.0.1:{port}/app"} | more


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


class LatePort:
    """A port where somebody listens after so many sleeps."""

    def __init__(self, after: int) -> None:
        self.port = free_port()
        self.sleeps = 0
        self._after = after
        self._listener: socket.socket | None = None

    def sleep(self, _: float) -> None:
        self.sleeps += 1
        if self.sleeps == self._after:
            self._listener = socket.create_server(("127.0.0.1", self.port))

    def close(self) -> None:
        if self._listener:
            self._listener.close()


def test_a_port_that_opens_late_is_waited_for_and_that_is_on_record(capsys) -> None:
    with closing(LatePort(after=5)) as late:
        warmup.await_network(environ(late.port, K_SERVICE="s"), sleep=late.sleep)
    assert late.sleeps == 5
    ((event),) = lines(capsys)
    assert (event["message"], event["severity"]) == ("network.late", "WARNING")
    assert event["reached"] is True


def test_the_wait_has_an_end(capsys) -> None:
    late = LatePort(after=10**9)
    warmup.await_network(environ(late.port, K_SERVICE="s"), wait_seconds=0.2, sleep=late.sleep)
    assert late.sleeps > 1
    assert [event["reached"] for event in lines(capsys)] == [False]


def test_a_port_that_is_open_is_not_waited_for(capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = environ(listener.getsockname()[1], K_SERVICE="s")
        warmup.await_network(settings, sleep=pytest.fail)
    assert lines(capsys) == []


@pytest.mark.parametrize(
    "settings",
    [
        environ(1),
        {"K_SERVICE": "s"},
        {"K_SERVICE": "s", "APP_DATABASE_URL": "postgresql:///app?host=/var/run/postgresql"},
        {"K_SERVICE": "s", "APP_DATABASE_URL": "_secret:projects/p/secrets/s/versions/1"},
        {"K_SERVICE": "s", "APP_DATABASE_URL": "postgresql://[no"},
        {"K_SERVICE": "s", "APP_DATABASE_URL": "postgresql://h/app?port=none"},
    ],
)
def test_there_is_no_wait_elsewhere_or_without_an_address(settings, capsys) -> None:
    warmup.await_network(settings, sleep=pytest.fail)
    assert lines(capsys) == []


def test_one_of_several_hosts_is_enough(capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        url = f"postgresql://127.0.0.1:{free_port()},127.0.0.1:{port}/app"
        settings = {"APP_DATABASE_URL": url, "K_SERVICE": "s"}
        warmup.await_network(settings, sleep=pytest.fail)
    assert lines(capsys) == []
