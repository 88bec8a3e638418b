"""`manage.py console` as it is started: a link on the terminal, and no request in its log."""

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
from urllib.parse import urlsplit

import pytest

from cli.console import command
from shared.errors import ConfigurationError
from tests.world import World


def test_the_command_prints_a_link_and_ends_on_ctrl_c(world: World):
    started = subprocess.Popen(
        [sys.executable, "manage.py", "console", "--port", "0"],
        env={**os.environ, **world.environ, "COLUMNS": "40"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs are deaf to Ctrl-C, and hand that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    assert started.stdout
    link = urlsplit(started.stdout.readline().removeprefix("Open ").strip())
    assert link.hostname == "127.0.0.1"
    assert started.stdout.readline() == "Ctrl-C ends it.\n"
    connection = http.client.HTTPConnection("127.0.0.1", link.port or 0, timeout=60)
    connection.request("GET", link.path)
    assert connection.getresponse().status == 303
    connection.close()
    assert re.fullmatch(
        r"Open http://127\.0\.0\.1:\d+/enter/[\w-]{43}\n", started.stdout.readline()
    )
    started.send_signal(signal.SIGINT)
    said, logged = started.communicate(timeout=60)
    assert started.returncode == 0
    assert "Traceback" not in said + logged
    assert link.path not in said + logged


def test_a_port_that_is_taken_is_said(world: World):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"Port {port} is taken"):
            command.serve(world.core, port, actor="jane", announce=print)


def test_it_hears_on_loopback_only(world: World):
    server = command.serve(world.core, 0, actor="jane", announce=lambda _: None)
    assert server.server_address[0] == "127.0.0.1"
    server.server_close()
