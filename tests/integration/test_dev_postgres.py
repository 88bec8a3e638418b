"""The local PostgreSQL: it starts anywhere, keeps what it has, and is never left behind."""

import contextlib
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from dev import postgres_binaries
from dev.postgres import PostgresError, Server, find_binaries

ROOT = Path(__file__).parents[2]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has another user to become")

# Starts a server in argv[1], says where it is, and waits to be killed.
OWNER = """
import signal, sys
from pathlib import Path
from dev.postgres import Server
server = Server(Path(sys.argv[1]), durable=False).start()
print(server.url(), server.pid, server._watcher.pid, flush=True)
signal.pause()
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """An empty directory that everybody can reach (pytest's own is private)."""
    directory = Path(tempfile.mkdtemp(prefix="hookledger test ", dir=postgres_binaries.temp_dir()))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@contextlib.contextmanager
def running(data_dir: Path, *, durable: bool = False) -> Iterator[Server]:
    server = Server(data_dir, durable=durable)
    try:
        yield server.start()
    finally:
        server.remove()


def ask(url: str, query: str) -> object:
    with psycopg.connect(url) as connection:
        row = connection.execute(query).fetchone()  # type: ignore[arg-type]
        return row and row[0]


def accepts(url: str) -> bool:
    try:
        psycopg.connect(url, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


def eventually(condition: Callable[[], bool], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@contextlib.contextmanager
def owned_elsewhere(data_dir: Path) -> Iterator[tuple[subprocess.Popen[str], str, int, int]]:
    """A process that owns a server: the process, the URL, the server's pid, the watcher's."""
    command = [sys.executable, "-c", OWNER, str(data_dir)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        try:
            url, pid, watcher = owner.stdout.readline().split()
            yield owner, url, int(pid), int(watcher)
        finally:
            owner.kill()


def test_it_keeps_data_and_port_over_stop_and_start(place: Path) -> None:
    with running(place / "data") as server:
        url, port = server.create_database("tenant"), server.port
        with psycopg.connect(url) as connection:
            connection.execute("create table kept as select 42 as answer")
        server.stop()
        assert server.pid is None
        assert not accepts(url)
        server.start()
        assert (server.port, server.url("tenant")) == (port, url)
        assert ask(url, "select answer from kept") == 42


def test_it_keeps_committed_data_over_a_crash(place: Path) -> None:
    with running(place / "data", durable=True) as server:
        with psycopg.connect(server.url()) as connection:
            connection.execute("create table kept as select 42 as answer")
        server.stop("immediate")
        server.start()
        assert ask(server.url(), "select answer from kept") == 42


def test_a_server_that_died_by_itself_starts_again(place: Path) -> None:
    with running(place / "data") as server:
        assert server.pid
        os.kill(server.pid, signal.SIGKILL)
        assert eventually(lambda: server.pid is None)
        assert ask(server.start().url(), "select 1") == 1


def test_a_database_is_created_once_and_from_a_template(place: Path) -> None:
    with running(place / "data") as server:
        with psycopg.connect(server.create_database("model")) as connection:
            connection.execute("create table kept as select 42 as answer")
        assert server.create_database("model") == server.url("model")
        copy = server.create_database('an "odd" name/?', template="model")
        assert ask(copy, "select answer from kept") == 42


@pytest.mark.parametrize("durable", [True, False])
def test_settings(place: Path, durable: bool) -> None:
    server = Server(place / "data", durable=durable, settings={"max_connections": "17"})
    try:
        url = server.start().url()
        assert ask(url, "show fsync") == ("on" if durable else "off")
        assert ask(url, "show max_connections") == "17"
        assert ask(url, "show server_encoding") == "UTF8"
        assert ask(url, "select datcollate from pg_database where datname = 'postgres'") == "C"
    finally:
        server.remove()


def test_a_wrong_password_is_refused(place: Path) -> None:
    with running(place / "data") as server:
        password = (server.data_dir / "password").read_text()
        assert stat.S_IMODE((server.data_dir / "password").stat().st_mode) == 0o600
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(server.url().replace(password, "wrong"))


def test_a_path_with_a_space(place: Path) -> None:
    with running(place / "My Projects" / "data dir") as server:
        assert ask(server.url(), "select 1") == 1


def test_a_path_longer_than_a_socket_name(place: Path) -> None:
    with running(place / ("x" * 90) / ("y" * 90)) as server:
        assert ask(server.url(), "select 1") == 1


def test_it_outlives_the_thread_that_started_it(place: Path) -> None:
    server = Server(place / "data", durable=False)
    try:
        starter = threading.Thread(target=server.start)
        starter.start()
        starter.join()
        assert ask(server.url(), "select 1") == 1
    finally:
        server.remove()


def test_two_servers_never_share_a_directory(place: Path) -> None:
    with running(place / "data") as server:
        with pytest.raises(PostgresError, match="in use"):
            Server(server.data_dir).start()
        assert ask(server.url(), "select 1") == 1


def test_a_server_that_cannot_start_says_why(place: Path) -> None:
    server = Server(place / "data", durable=False, settings={"max_connections": "none"})
    try:
        with pytest.raises(PostgresError, match='parameter "max_connections"'):
            server.start()
        assert server.pid is None
    finally:
        server.remove()


def test_a_clean_exit_of_the_owner_stops_it(place: Path) -> None:
    no_watcher = "import os; os.kill(server._watcher.pid, signal.SIGKILL)"
    script = OWNER.replace("signal.pause()", no_watcher)
    command = [sys.executable, "-c", script, str(place / "data")]
    owner = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert not accepts(owner.stdout.split()[0])


def test_the_watcher_stops_it_when_the_owner_is_killed(place: Path) -> None:
    with owned_elsewhere(place / "data") as (owner, url, _, _):
        assert accepts(url)
        owner.kill()
        assert eventually(lambda: not accepts(url))
        assert eventually(lambda: not (place / "data" / "cluster" / "postmaster.pid").exists())


def test_the_next_start_stops_what_was_left_behind(place: Path) -> None:
    with owned_elsewhere(place / "data") as (owner, url, pid, watcher):
        os.kill(watcher, signal.SIGKILL)
        owner.kill()
        owner.wait()
        assert accepts(url)
        with running(place / "data") as server:
            assert server.pid != pid
            assert ask(server.url(), "select 1") == 1
            assert not accepts(url)


def test_a_stale_process_id_of_somebody_else_is_left_alone(place: Path) -> None:
    with running(place / "data") as server:
        server.stop()
        pid_file = server.data_dir / "cluster" / "postmaster.pid"
        nothing = subprocess.DEVNULL
        with postgres_binaries.spawn(
            ["/bin/sleep", "60"], stdin=nothing, stdout=nothing
        ) as bystander:
            pid_file.write_text(f"{bystander.pid}\n{server.data_dir}\n")
            server.start()
            assert bystander.poll() is None
            bystander.kill()


@as_root
def test_root_serves_as_nobody_and_in_place_where_nobody_gets_in(place: Path) -> None:
    with running(place / "data") as server:
        cluster = server.data_dir / "cluster"
        assert not cluster.is_symlink()
        assert cluster.stat().st_uid == pwd.getpwnam("nobody").pw_uid


@as_root
def test_root_below_a_private_home(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = place / "home"
    home.mkdir(mode=0o700)
    wheel = find_binaries().parent
    for tree in (wheel, wheel.parent.with_name(f"{wheel.parent.name}.libs")):
        shutil.copytree(tree, home / tree.relative_to(wheel.parents[1]), symlinks=True)
    private = home / wheel.relative_to(wheel.parents[1]) / "bin"
    monkeypatch.setenv("PG_BIN", str(private))
    temp = place / "temp"
    temp.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temp))
    with running(home / "data") as server:
        assert ask(server.url(), "select 1") == 1
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        copies = list(temp.glob(f"hookledger-{wheel.parent.name}-*"))
        first = [copy.stat().st_ino for copy in copies]
        server.stop()
        server.start()
        assert [copy.stat().st_ino for copy in temp.glob(copies[0].name + "*")] == first
    assert len(list(temp.iterdir())) == 1  # `remove` left only the programs


@as_root
def test_a_cluster_elsewhere_goes_when_its_data_directory_is_gone(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, temp = place / "home", place / "temp"
    home.mkdir(mode=0o700)
    temp.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temp))
    for name in ("deleted", "kept"):
        Server(home / name, durable=False).start().stop()
    shutil.rmtree(home / "deleted")
    with running(home / "new"):
        left = {path.name for path in temp.glob("hookledger-cluster-*")}
        assert left == {(home / name / "cluster").resolve().name for name in ("kept", "new")}


@as_root
def test_an_ordinary_user(place: Path) -> None:
    """`nobody` runs the launcher itself, with the system's Python: ours may be out of reach."""
    nobody = pwd.getpwnam("nobody")
    site = next(path for path in sys.path if path.endswith("site-packages"))
    environment = {"PYTHONPATH": f"{ROOT}:{site}", "PYTHONDONTWRITEBYTECODE": "1"}

    def run(script: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["/usr/bin/env", "python3", "-c", script, str(place / "data")],
            user=nobody.pw_uid,
            group=nobody.pw_gid,
            extra_groups=[],
            env=environment | {"PATH": "/usr/local/bin:/usr/bin:/bin"},
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )

    if run("import dev.postgres").returncode:
        pytest.skip("no Python that `nobody` can run with this environment")
    os.chown(place, nobody.pw_uid, nobody.pw_gid)
    ended = run(OWNER.replace("signal.pause()", "server.remove()"))
    assert ended.returncode == 0, ended.stderr
    assert not list(place.iterdir())


def test_pg_bin_rules_and_must_be_right(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PG_BIN", str(place))
    with pytest.raises(PostgresError, match="PG_BIN"):
        find_binaries()


def test_a_wheel_comes_before_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PG_BIN", raising=False)
    assert "site-packages" in find_binaries().parts


def test_without_any_postgres_the_error_names_the_remedy(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PG_BIN", raising=False)
    monkeypatch.setattr(postgres_binaries, "_WHEELS", ())
    monkeypatch.setattr(postgres_binaries, "_SYSTEM", place)
    monkeypatch.setenv("PATH", str(place))
    with pytest.raises(PostgresError, match=r"requirements-dev\.txt"):
        find_binaries()
