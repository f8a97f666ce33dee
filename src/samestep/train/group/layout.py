"""The layout of a run: where each rank is and what it uses; rank 0 prints it if $SAMESTEP_LAYOUT is set."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from samestep.text import printable

_TOLD = ("NCCL_", "GLOO_", "OMP_NUM_THREADS", "UCX_", "FI_")


class Place(NamedTuple):
    node: int
    host: str
    device: str
    cores: int
    backend: str
    interface: str
    address: str
    uuid: str = ""  # of a CUDA device


def layout(places: Sequence[Place], env: Mapping[str, str]) -> str:
    """A line for each rank and for each variable that sets network, topology or threads; or all of it as JSON."""
    rows = [{"rank": rank, **place._asdict()} for rank, place in enumerate(places)]
    settings = {name: printable(value) for name, value in sorted(env.items()) if name.startswith(_TOLD)}
    if env["SAMESTEP_LAYOUT"] == "json":
        return json.dumps({"schema_version": 1, "ranks": rows, "settings": settings})
    heads = [name for name in rows[0] if any(row[name] != "" for row in rows)]
    table = [heads, *([printable(str(row[name])) for name in heads] for row in rows)]
    wide = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(map(str.ljust, row, wide)).rstrip() for row in table]
    return "\n".join([*lines, *(f"{name}={value}" for name, value in settings.items())])


def say_layout(places: Sequence[Place]) -> None:
    if os.environ.get("SAMESTEP_LAYOUT", "0") != "0":
        print(layout(places, os.environ), flush=True)
