"""Chooses the Python that runs a script: this one, or the active environment's if samestep is installed as a tool."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

# `uv tool install` and `pipx` keep an environment per tool here; it lacks the packages that the user's scripts import.
_TOOLS = ("uv/tools", "pipx/venvs", "pipx/shared")


def scripts_python(env: Mapping[str, str] = os.environ) -> str:
    active = _active(env)
    return str(active) if active and _is_tool(sys.prefix) else sys.executable


def remark_on_python(env: Mapping[str, str] = os.environ) -> str | None:
    """A remark on the choice; None if the user cannot expect another Python."""
    active = _active(env)
    if active and _is_tool(sys.prefix):
        return f"samestep is installed as a tool, so the script runs with {active} of the active environment"
    if active and env.get("VIRTUAL_ENV"):
        return (
            f"the script runs with {sys.executable}, and not with {active} of the active environment; install samestep "
            f"there and write {active} -m samestep run to use that one"
        )
    return None


def _active(env: Mapping[str, str]) -> Path | None:
    """The Python of the active environment, if it is not the environment of this process."""
    places = [env[name] for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if env.get(name)]
    if not places or any(Path(place).resolve() == Path(sys.prefix).resolve() for place in places):
        return None
    python = Path(places[0], "bin", "python")
    return python if os.access(python, os.X_OK) else None


def _is_tool(prefix: str) -> bool:
    return any(tools in Path(prefix).as_posix() for tools in _TOOLS)
