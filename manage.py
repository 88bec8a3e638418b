#!/usr/bin/env python3
"""`python manage.py COMMAND`: everything that an operator or a developer does by hand."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

VENV_PYTHON = Path(__file__).parent / ".venv" / "bin" / "python"

if find_spec("typer") is None:
    if VENV_PYTHON.exists() and Path(sys.executable) != VENV_PYTHON:
        os.execv(VENV_PYTHON, [str(VENV_PYTHON), *sys.argv])  # noqa: S606 - the same command again
    sys.exit("The commands' packages are not installed. Run `make install` first.")

from cli.main import main  # noqa: E402 - after the check for its packages

if __name__ == "__main__":
    main()
