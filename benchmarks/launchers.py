"""The same plain DDP script on the same two cores under srun, torchrun, mpirun and samestep run, in turns.

`same` gives every process one thread and binds none (`samestep run` binds each to its core). `default` sets nothing.
srun is that of a real Slurm which this benchmark starts; its nodes cannot bind, so it never binds here.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from report import BIN, RESULTS, Rows, keep, spread

sys.path.append(str(Path(__file__).parents[1] / "tests" / "cluster"))
from fournodes import Cluster

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "courses.md"
SCRIPT = str(HERE / "scripts" / "launched.py")
CORES = {0, 1}
COMMANDS = {
    "srun": ["srun", "--ntasks=2", "--nodes=1"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    "mpirun": ["mpirun", "--oversubscribe", "-n", "2"],
    "samestep run": [str(BIN / "samestep"), "run", "-n", "2"],
}
SAME = {"srun": ["--cpu-bind=none"], "mpirun": ["--bind-to", "none"]}
MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def run(launcher: str, cluster: Cluster, folder: str, is_same: bool) -> dict[str, Any]:
    """One run from shell to exit."""
    words = [*COMMANDS[launcher], *(SAME.get(launcher, []) if is_same else [])]
    words += [sys.executable] if launcher in ("srun", "mpirun") else []
    port = str(20_000 + int(time.time() * 10) % 10_000)
    words = [*words, SCRIPT, port]
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | MPI
    env |= {"SAMESTEP_RUN_DIR": folder, "CUDA_VISIBLE_DEVICES": ""} | (
        {"OMP_NUM_THREADS": "1"} if is_same else {}
    )
    began = time.time()
    command = cluster.command(*words, cwd=folder) if launcher == "srun" else words
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=120)
    seconds = time.time() - began
    found = re.search(r"\{.*\}", done.stdout)
    if done.returncode or not found:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    facts = json.loads(found[0])
    return {**facts, "start_s": facts.pop("first_step") - began, "seconds": seconds}


def table(rows: Rows) -> list[str]:
    """The table of docs/courses.md."""
    lines = [
        "| | launcher | threads | cores it may use | step, ms | of torchrun | first step, s | end to end, s |"
    ]
    lines.append("|---" * 8 + "|")
    for row in rows:
        times = (
            f"{1e3 * row['step_s']:.2f} | {row['ratio']:.2f} | {row['start_s']:.2f} | {row['seconds']:.2f}"
        )
        lines.append(
            f"| {row['kind']} | {row['launcher']} | {row['threads']:g} | {row['cores']:g} | {times} |"
        )
    return [
        *lines,
        "",
        f"Medians of {max(row['runs'] for row in rows)} round(s).",
    ]


def write(rows: Rows) -> None:
    """The table between the page's marks."""
    mark = re.compile(r"(<!-- launchers -->\n).*?(<!-- end -->)", re.DOTALL)
    PAGE.write_text(
        mark.sub(lambda found: found[1] + "\n".join([*table(rows), ""]) + found[2], PAGE.read_text())
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=6, help="begin no round later")
    parser.add_argument("--page", action="store_true", help="write the table again from the last results")
    asked = parser.parse_args()
    if asked.page:
        write(json.loads((RESULTS / "launchers.json").read_text())["rows"])
        return
    os.sched_setaffinity(0, CORES & os.sched_getaffinity(0))
    ways = [(kind, launcher) for kind in ("same", "default") for launcher in COMMANDS]
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {way: [] for way in ways}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Cluster(isolated=False) as cluster:
        for number in range(asked.rounds):
            shift = number % len(ways)
            for kind, launcher in [*ways[shift:], *ways[:shift]]:
                runs[kind, launcher].append(run(launcher, cluster, folder, kind == "same"))
            print(f"round {number + 1} of {asked.rounds}: {time.monotonic() - began:.0f} s", flush=True)
            if time.monotonic() - began > 60 * asked.minutes:
                break
    rows: Rows = []
    for (kind, launcher), found in runs.items():
        middle = {name: round(median(run[name] for run in found), 4)
                  for name in ("step_s", "start_s", "seconds", "threads", "cores")}  # fmt: skip
        base = runs[kind, "torchrun"]
        ratio = spread(mine["step_s"] / theirs["step_s"] for mine, theirs in zip(found, base, strict=True))
        rows.append({"kind": kind, "launcher": launcher, **middle, "runs": len(found), **ratio})
    keep(len(found), rows)
    write(rows)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
