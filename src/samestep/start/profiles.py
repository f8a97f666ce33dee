"""Profiles: named TOML files that say what a job requests from a cluster; a site adds its own."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from samestep.errors import UsageError

_SHIPPED = Path(__file__).with_name("profiles")


def _key(means: str, default: Any = None) -> Any:
    return field(default=default, metadata={"means": means})


@dataclass(frozen=True)
class Profile:
    """What a node has, and what a job requests by default."""

    about: str = _key("What it is for.", "")
    source: str = _key("Where its site says so.", "")
    gpus: int = _key("GPUs a node has.", 0)
    cores: int = _key("Cores a node has.", 0)
    nodes: int = _key("Nodes.", 1)
    gpus_per_node: int = _key("GPUs on each node.", 0)
    tasks_per_node: int | None = _key("Processes on each node  [one a GPU]")
    cpus_per_task: int | None = _key("Cores for each process  [its share of the node's]")
    time: str | None = _key("Time limit, as 30, 02:00:00 or 1-12:00:00.")
    account: str | None = _key("Account to be charged.")
    partition: str | None = _key("Partition.")
    qos: str | None = _key("Quality of service.")
    constraint: str | None = _key("Features a node must have.")
    mem: str | None = _key("Memory of each node, as 64G.")
    reservation: str | None = _key("Reservation to run in.")
    mail_user: str | None = _key("Address that Slurm's mails go to.")
    mail_type: str | None = _key("When it mails, as END,FAIL.")
    exclusive: bool = _key("Share the nodes with no other job.", False)
    gpu_option: str = _key("How GPUs are asked for: gres, or gpus-per-node.", "gres")
    hint: str | None = _key("Hint for binding, as nomultithread.")
    cpu_bind: str | None = _key("What srun binds processes to, as cores.")
    signal: str | None = _key("Signal before the time limit  [USR1@120]")
    requeue: bool = _key("Go on after exit code 75, preemption or a lost node.", True)
    launcher: str = _key("srun, samestep or torchrun.", "srun")
    wait: int | None = _key("Seconds that --array-ranks and --launcher samestep wait for all nodes  [1800]")
    label: bool = _key("Begin each line of the output with its rank.", False)
    python: str | None = _key("Python to run  [this one; with modules, set-up or a container: python]")
    container: str | None = _key("Container image to run in.")
    container_command: tuple[str, ...] = _key("What runs a container.", ("apptainer", "exec", "--nv"))
    architecture: str | None = _key("Module that chooses the hardware, loaded before the others.")
    modules: tuple[str, ...] = _key("Environment modules to load, after a purge.", ())
    setup: tuple[str, ...] = _key("Shell lines to run first, as written.", ())
    env: Mapping[str, str] = _key("Environment variables.", None)
    options: tuple[str, ...] = _key("Further sbatch options, as --exclusive.", ())
    address_suffix: str | None = _key("What a node's name needs to be reached on the fast network.")


MEANS: Mapping[str, str] = {key.name: key.metadata["means"] for key in fields(Profile)}
_TYPES = {key.name: str(key.type) for key in fields(Profile)}
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("a text", lambda value: isinstance(value, str)),
    "int": ("a whole number from 0", lambda value: type(value) is int and value >= 0),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "tuple": ("a list of texts", lambda value: isinstance(value, list) and _texts(value)),
    "Mapping": ("a table of texts", lambda value: isinstance(value, dict) and _texts(value.values())),
}


def profile_paths(env: Mapping[str, str]) -> dict[str, Path]:
    """The file of every profile by name; a site's or user's file hides a shipped file of the same name."""
    return {name: paths[0] for name, paths in _layers(env).items()}


def load_profile(name: str, env: Mapping[str, str]) -> Profile:
    """The profile of that name, merged over its `base`; a base of the same name is the file that it hides."""
    return Profile(**_merged(name, _layers(env), ()))


def _layers(env: Mapping[str, str]) -> dict[str, list[Path]]:
    """All files of each name, in order of priority; the shipped file is last."""
    configuration = env.get("XDG_CONFIG_HOME") or Path(env.get("HOME") or os.path.expanduser("~"), ".config")
    folders = [Path(configuration, "samestep", "profiles"), _SHIPPED]
    if own := env.get("SAMESTEP_PROFILES"):
        folders.insert(0, Path(own))
    layers: dict[str, list[Path]] = {}
    for path in (path for folder in folders for path in folder.glob("*.toml")):
        layers.setdefault(path.stem, []).append(path)
    return dict(sorted(layers.items()))


def _merged(name: str, layers: Mapping[str, list[Path]], above: tuple[str, ...]) -> dict[str, Any]:
    if name not in layers:
        raise UsageError(f"profile {name!r} is in no profile directory; write {_one_of(name, list(layers))}")
    if name in above:
        raise UsageError(
            f"profile {name!r} is its own base ({' > '.join((*above, name))}); leave one base out"
        )
    path, *hidden = layers[name]
    values = _read(path)
    base = values.pop("base", None)
    if base == name and hidden:
        return _merged(base, {**layers, name: hidden}, above) | values
    return (_merged(base, layers, (*above, name)) if base else {}) | values


def _read(path: Path) -> dict[str, Any]:
    try:
        written = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as TOML ({error}); correct it or remove it") from None
    values: dict[str, Any] = {}
    for key, value in written.items():
        name = key.replace("-", "_")
        if name not in (*_TYPES, "base"):
            known = [field_name.replace("_", "-") for field_name in (*_TYPES, "base")]
            raise UsageError(f"{path} has the key {key!r}, which no profile has; write {_one_of(key, known)}")
        kind, fits = _KINDS[_TYPES.get(name, "str").partition(" ")[0].partition("[")[0]]
        if not fits(value):
            raise UsageError(f"{path} has {key} = {value!r}, which is not {kind}; write one")
        values[name] = tuple(value) if isinstance(value, list) else value
    return values


def _texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _one_of(wrong: str, known: list[str]) -> str:
    close = get_close_matches(wrong, known, n=3)
    return " or ".join(close) if close else f"one of {', '.join(known)}"
