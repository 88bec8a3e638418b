"""Launches a real PostgreSQL for the local stack and for tests.

Linux and macOS. TCP on 127.0.0.1 only, with a password. Nothing outlives its owner: a clean exit
stops the server, a watcher does when the owner was killed, and the next start does when the watcher
was killed too.
"""

import atexit
import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Final, Literal, Self
from urllib.parse import quote

import psycopg
from psycopg import sql

from dev.postgres_binaries import (
    PostgresError,
    find_binaries,
    is_reachable,
    reachable_binaries,
    server_identity,
    spawn,
    temp_dir,
)
from dev.processes import Watcher, free_port

__all__ = ["SUPERUSER", "PostgresError", "Server", "find_binaries"]

SUPERUSER: Final = "hookledger"
START_SECONDS: Final = 60  # a crashed cluster replays its log first
STOP_SECONDS: Final = 20

StopMode = Literal["fast", "immediate"]

_SIGNALS: Final = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_ALWAYS: Final = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",  # a socket's path has a limit of 107 characters
    "timezone": "UTC",
    "log_timezone": "UTC",
}
_FORGETFUL: Final = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


class Server:
    """One PostgreSQL over one data directory; `start` and `stop` it as often as you like.

    `port` 0 takes a free one at the first start and keeps it. `durable=False` gives up crash
    safety for speed. `settings` are PostgreSQL's own, by name. What goes wrong is a
    `PostgresError`. As root the server runs as `nobody`; where `nobody` cannot reach `data_dir`,
    its `cluster` is a link into the temporary directory.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int = 0,
        durable: bool = True,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.data_dir: Final = data_dir.absolute()
        self.log_path: Final = self.data_dir / "postgres.log"
        self.port = port
        self._cluster: Final = self.data_dir / "cluster"
        self._settings: Final = _ALWAYS | ({} if durable else _FORGETFUL) | dict(settings or {})
        self._owner_pid = 0
        self._claim: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: Watcher | None = None

    @property
    def pid(self) -> int | None:
        """The server's process id; None while it does not run."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def url(self, dbname: str = "postgres") -> str:
        """The connection string of a database, with the superuser's password."""
        password = _read_password(self.data_dir)
        return f"postgresql://{SUPERUSER}:{password}@127.0.0.1:{self.port}/{quote(dbname, safe='')}"

    def start(self) -> Self:
        """Start, and return once connections are accepted; no effect on a running server.

        What an owner that was killed has left running on the same directory is stopped first.
        """
        if self.pid:
            return self
        self.stop()  # tidies up after a crash
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self._claim = _claim(self.data_dir)
        try:
            binaries = reachable_binaries()
            with _take_log(self.log_path, self._cluster) as log:
                _prepare(binaries, self.data_dir)
                self._launch(binaries, log)
        except BaseException:
            self.stop("immediate")
            raise
        return self

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop and wait; no effect on a stopped server. `immediate` is a crash: no checkpoint."""
        atexit.unregister(self._stop_at_exit)
        if self._process:
            _end(self._process, _SIGNALS[mode])
            self._process = None
        if self._watcher:
            self._watcher.close()
            self._watcher = None
        if self._claim:
            fcntl.flock(self._claim, fcntl.LOCK_UN)
            self._claim.close()
            self._claim = None

    def remove(self) -> None:
        """Stop, and delete `data_dir` and the cluster, wherever it lies."""
        self.stop("immediate")
        shutil.rmtree(self._cluster.resolve(), ignore_errors=True)
        shutil.rmtree(self.data_dir, ignore_errors=True)

    def create_database(self, name: str, *, template: str = "template1") -> str:
        """Create the database unless it exists; returns its URL."""
        names = (sql.Identifier(name), sql.Identifier(template))
        with (
            psycopg.connect(self.url(), autocommit=True) as connection,
            contextlib.suppress(psycopg.errors.DuplicateDatabase),
        ):
            connection.execute(sql.SQL("create database {} template {}").format(*names))
        return self.url(name)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _launch(self, binaries: Path, log: IO[bytes]) -> None:
        self.port = self.port or free_port()
        settings = self._settings | {"port": str(self.port)}
        options = [f"--{name}={value}" for name, value in settings.items()]
        command = [binaries / "postgres", "-D", self._cluster.resolve(), *options]
        log_start = log.tell()
        self._owner_pid = os.getpid()
        atexit.register(self._stop_at_exit)
        self._process = spawn(command, stdin=subprocess.DEVNULL, stdout=log)
        self._watcher = Watcher(self._process.pid, "INT")
        self._await_ready(log_start)

    def _await_ready(self, log_start: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                return psycopg.connect(self.url(), connect_timeout=2).close()
            except psycopg.OperationalError as error:
                if self.pid and time.monotonic() < deadline:
                    time.sleep(0.02)
                    continue
                tail = self.log_path.read_bytes()[log_start:][-2000:].decode(errors="replace")
                raise PostgresError(
                    f"PostgreSQL did not start: {error}\nEnd of {self.log_path}:\n{tail}"
                ) from None

    def _stop_at_exit(self) -> None:
        if os.getpid() == self._owner_pid:  # a forked child runs our exit handlers too
            self.stop()


# The data directory: `password`, `postgres.log`, `lock`, and PostgreSQL's own `cluster`


def _read_password(data_dir: Path) -> str:
    try:
        return (data_dir / "password").read_text()
    except FileNotFoundError:
        raise PostgresError(f"{data_dir} has no password: start the server once") from None


def _claim(data_dir: Path) -> IO[bytes]:
    """Hold the directory for as long as we live. Raises if another living owner has it."""
    lock = (data_dir / "lock").open("ab")
    if _try_lock(lock):
        return lock
    lock.close()
    raise PostgresError(f"{data_dir} is in use by another server: stop it, or take another place")


@contextlib.contextmanager
def _take_log(path: Path, cluster: Path) -> Iterator[IO[bytes]]:
    """The log to write to, once no process of an earlier server holds it.

    Every process of a server inherits the lock on its log. So the lock tells whether one is left,
    where the process id in postmaster.pid alone may by now be anybody's.
    """
    pid_file = cluster / "postmaster.pid"
    deadline = time.monotonic() + STOP_SECONDS
    with path.open("ab") as log:
        while not _try_lock(log):
            if time.monotonic() > deadline:
                raise PostgresError(f"an earlier server does not end: kill what {pid_file} names")
            with contextlib.suppress(OSError, ValueError, IndexError):
                os.kill(int(pid_file.read_text().split()[0]), signal.SIGQUIT)
            time.sleep(0.05)
        pid_file.unlink(missing_ok=True)
        yield log


def _try_lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _prepare(binaries: Path, data_dir: Path) -> None:
    """See to it that there is a password and a cluster, whole or not at all."""
    cluster, password = data_dir / "cluster", data_dir / "password"
    if cluster.exists():
        return
    cluster.unlink(missing_ok=True)  # a link whose target was cleared away
    password.unlink(missing_ok=True)
    password.touch(mode=0o600)
    password.write_text(secrets.token_urlsafe(24))
    in_place = is_reachable(data_dir)
    home = data_dir if in_place else temp_dir()
    draft = Path(tempfile.mkdtemp(prefix="hookledger-cluster-", dir=home))
    try:
        _initdb(binaries, draft, password.read_bytes())
        if in_place:
            draft.rename(cluster)
        else:
            _sweep(home)
            cluster.symlink_to(draft)
            (draft / "data_dir").symlink_to(data_dir)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _sweep(home: Path) -> None:
    """Delete the clusters in the temporary directory whose data directory was deleted."""
    for cluster in home.glob("hookledger-cluster-*"):
        data_dir = cluster / "data_dir"
        if data_dir.is_symlink() and not (data_dir / "cluster").exists():
            shutil.rmtree(cluster, ignore_errors=True)


def _initdb(binaries: Path, cluster: Path, password: bytes) -> None:
    run_as = server_identity()
    owner = (run_as.user or -1, run_as.group or -1)  # -1: as it is
    os.chown(cluster, *owner)
    options = ["--locale=C", "--encoding=UTF8", "--no-sync", "--auth=scram-sha-256"]
    command = [binaries / "initdb", "-D", cluster, "-U", SUPERUSER, "--pwfile=/dev/stdin", *options]
    with tempfile.TemporaryFile() as secret:  # a pipe of root's could not be opened by `nobody`
        os.fchown(secret.fileno(), *owner)
        secret.write(password)
        secret.seek(0)
        process = spawn(command, stdin=secret, stdout=subprocess.PIPE)
        output, _ = process.communicate()
    if process.returncode != 0:
        raise PostgresError(f"initdb failed:\n{output.decode(errors='replace')[-2000:]}")


def _end(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    for signum in (how, signal.SIGQUIT, signal.SIGKILL):
        process.send_signal(signum)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
            return
