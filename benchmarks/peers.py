"""The same network, images, global batch and cores under samestep and its peers, in turns, from shell to exit.

Each script in scripts/peers is as its library's own pages write it. `lines` counts those that its diff from the
serial script adds and removes. `accuracy` is what the script prints, `truth` that of its model on every sample of
the validation set, whose length two processes do not divide. Every process has one thread.
"""

import argparse
import difflib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from report import BIN, Rows, keep, spread

PEERS = Path(__file__).parent / "scripts" / "peers"
PYTHON = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
COMMANDS = {
    "serial": [*PYTHON, "serial.py"],
    "ddp": [*PYTHON, "ddp.py"],
    "torchrun": [*TORCHRUN, "torchrun.py"],
    "accelerate": [*TORCHRUN, "accelerate_.py"],
    "fabric": [*PYTHON, "fabric.py"],
    "ignite": [*PYTHON, "ignite_.py"],
    "samestep": [str(BIN / "samestep"), "run", "-n", "2", "samestep_.py"],
}


def changed(serial: Path, script: Path) -> str:
    """Lines that a diff from the serial script adds and removes."""
    texts = [serial.read_text().splitlines(), script.read_text().splitlines()]
    diff = list(difflib.unified_diff(*texts, n=0, lineterm=""))[2:]
    added, removed = (sum(line.startswith(sign) for line in diff) for sign in "+-")
    return f"+{added} -{removed}"


def run(command: list[str], folder: str) -> dict[str, Any]:
    """One run from shell to exit."""
    notes = Path(folder, "notes.json")
    notes.unlink(missing_ok=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "NOTES": str(notes), "SAMESTEP_RUN_DIR": folder}
    env |= {"SAMESTEP_METER": "0", "CUDA_VISIBLE_DEVICES": ""}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    done = subprocess.run(command, cwd=PEERS, env=env, capture_output=True, text=True, timeout=180)
    seconds, after = time.time() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if not notes.exists():
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    facts = json.loads(notes.read_text())
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    start_s = facts.pop("first_step") - began
    return {**facts, "start_s": start_s, "seconds": seconds, "cpu_s": cpu_s, "code": done.returncode}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--systems", default=",".join(COMMANDS))
    asked = parser.parse_args()
    systems = asked.systems.split(",")
    runs: dict[str, list[dict[str, Any]]] = {system: [] for system in systems}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(asked.rounds):
            for system in [*systems[number % len(systems) :], *systems[: number % len(systems)]]:
                runs[system].append(run(COMMANDS[system], folder))
    rows: Rows = []
    for system, found in runs.items():
        pairs = zip(found, runs["torchrun"], strict=True)
        ratio = spread(mine["seconds"] / theirs["seconds"] for mine, theirs in pairs)
        middle = {name: round(median(one[name] for one in found), 4) for name in
                  ("start_s", "step_s", "seconds", "cpu_s", "bytes", "accuracy", "truth")}  # fmt: skip
        failed = sum(one["code"] != 0 for one in found)
        script = PEERS / COMMANDS[system][-1]
        rows.append(
            {
                "system": system,
                **middle,
                "failed_exits": failed,
                "lines": changed(PEERS / "serial.py", script),
                **ratio,
            }
        )
    keep(asked.rounds, rows)
    print(
        "system       first step  step ms   seconds  of torchrun  CPU s   MB  printed  truth  bad exits  lines"
    )
    for row in rows:
        print(
            f"{row['system']:12} {row['start_s']:8.2f} s {1e3 * row['step_s']:8.2f} {row['seconds']:9.2f} "
            f"{row['ratio']:12.2f} {row['cpu_s']:6.1f} {row['bytes'] / 1e6:4.0f} {row['accuracy']:8.2%} "
            f"{row['truth']:6.2%} {row['failed_exits']:6} of {asked.rounds} {row['lines']:>8}"
        )


if __name__ == "__main__":
    main()
