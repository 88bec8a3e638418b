"""Other job queues on PostgreSQL, at the same work: claim and complete jobs that do nothing.

Each is installed into a folder of its own, at a pinned version, and runs as a process of its own.
One that cannot be installed here is left out, and the table says so.
"""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SCRIPTS: Final = Path(__file__).parent
INSTALL_SECONDS: Final = 300
RUN_SECONDS: Final = 300


class PeerError(Exception):
    """The peer cannot be had, or does not run, here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A job queue, and the script that races it."""

    name: str
    script: str
    packages: tuple[str, ...]

    def install(self, folder: Path) -> None:
        """Puts its packages under `folder`; raises PeerError."""
        if self.script.endswith(".mjs"):
            self._install_with_npm(folder)
        else:
            _run([sys.executable, "-m", "venv", str(folder)], INSTALL_SECONDS)
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
            _run([*pip, "--disable-pip-version-check", *self.packages], INSTALL_SECONDS)

    def rate(self, folder: Path, url: str, jobs: int, batch: int) -> float:
        """Jobs in a second, from the first one handled to the last; raises PeerError.

        `batch` is for those that take jobs in batches; the others take ten at a time.
        """
        if self.script.endswith(".mjs"):
            command = ["node", str(folder / self.script)]
        else:
            command = [str(folder / "bin" / "python"), str(SCRIPTS / self.script)]
        answer = json.loads(
            _run([*command, url, str(jobs), str(batch)], RUN_SECONDS).splitlines()[-1]
        )
        if answer["jobs"] < jobs:
            raise PeerError(f"it handled {answer['jobs']} of {jobs} jobs")
        return answer["jobs"] / answer["seconds"]

    def _install_with_npm(self, folder: Path) -> None:
        if not shutil.which("node") or not shutil.which("npm"):
            raise PeerError("it needs node and npm")
        folder.mkdir(parents=True, exist_ok=True)
        npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder)]
        _run([*npm, *self.packages], INSTALL_SECONDS)
        shutil.copy(SCRIPTS / self.script, folder)  # node looks for packages from there up


PEERS: Final = (
    Peer(name="pgqueuer 1.6", script="pgqueuer_peer.py", packages=("pgqueuer[asyncpg]==1.6.0",)),
    Peer(name="pg-boss 10.4", script="pgboss_peer.mjs", packages=("pg-boss@10.4.2",)),
    Peer(name="awa-pg 0.6", script="awa_peer.py", packages=("awa-pg==0.6.9",)),
    Peer(
        name="graphile-worker 0.17",
        script="graphile_peer.mjs",
        packages=("graphile-worker@0.17.3",),
    ),
    Peer(
        name="procrastinate 3.10",
        script="procrastinate_peer.py",
        packages=("procrastinate==3.10.0", "psycopg[binary]"),
    ),
)


def _run(command: list[str], seconds: float) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise PeerError(f"it took longer than {seconds:.0f} s") from None
    if done.returncode:
        tail = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise PeerError(" ".join(tail) or f"exit code {done.returncode}")
    return done.stdout
