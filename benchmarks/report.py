"""What the benchmarks share: workers whose rank 0 tells rows, ratios with their middle half, results in a file."""

import json
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

Rows = list[dict[str, Any]]
RESULTS = Path(__file__).parent / "results"
BIN = Path(sys.executable).parent
_LIMIT_S = 3000


def spread(ratios: Iterable[float]) -> dict[str, float]:
    """The median, the middle half around it, and between what it lies in 95 of 100 such runs."""
    ordered = sorted(ratios)
    quarter = len(ordered) // 4
    below = max(0, math.floor(len(ordered) / 2 - 0.98 * math.sqrt(len(ordered))))
    found = {
        "ratio": statistics.median(ordered), "low": ordered[quarter], "high": ordered[-1 - quarter],
        "from": ordered[below], "to": ordered[-1 - below],
    }  # fmt: skip
    return {name: round(value, 4) for name, value in found.items()}


def on_ranks(size: int, *words: object, around: Sequence[str] = (), **env: str) -> Rows:
    """The rows that this benchmark's rank 0 tells as a worker among so many; a world of one is plain Python."""
    launcher = [str(BIN / "samestep"), "run", "-n", str(size)] if size > 1 else [sys.executable]
    command = [*around, *launcher, sys.argv[0], "--worker", str(size), *map(str, words)]
    # one thread for each process in all that is compared: it is about the systems, not the cores
    threads = {"OMP_NUM_THREADS": "1", **env}
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **threads}, timeout=_LIMIT_S
    )
    if done.returncode:
        sys.exit(f"the workers of size {size} failed:\n{done.stderr}")
    rows: Rows = json.loads(done.stdout.splitlines()[-1])
    return rows


def tell(rows: Rows) -> None:
    """In a worker: what `on_ranks` returns."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(rows))


def keep(rounds: int, rows: Rows) -> None:
    """Write the rows to the benchmark's file in results/, with what they were measured on."""
    machine = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({"machine": machine, "rounds": rounds, "rows": rows}, indent=1)
    (RESULTS / Path(sys.argv[0]).with_suffix(".json").name).write_text(text + "\n")
