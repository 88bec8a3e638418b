"""What commands work with: the environment's settings, or those of the running local stack."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from shared import bootstrap

LOCAL_STACK: Final = Path(".hookledger")

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def environ() -> Mapping[str, str]:
    """The environment; where it names no application database, the running local stack's."""
    if "APP_DATABASE_URL" in os.environ:
        return os.environ
    stack = stack_in(LOCAL_STACK)
    if stack is None:
        return os.environ
    err.print(f"[dim]APP_DATABASE_URL is not set: using the local stack in {LOCAL_STACK}/[/]")
    return {**os.environ, **stack["env"]}


def core() -> bootstrap.Core:
    """The parts around the pipeline, for the commands that need them."""
    return bootstrap.core(environ())


def stack_in(folder: Path) -> dict[str, Any] | None:
    """The stack.json of the stack that is running in `folder`, or None."""
    try:
        stack = json.loads((folder / "stack.json").read_text())
        os.kill(stack["pids"]["dev"], 0)
    except (OSError, ValueError, KeyError):
        return None
    return stack
