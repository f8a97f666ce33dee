"""The same network, images, global batch and cores under samestep and its peers, in turns, from shell to exit.

Each script in scripts/peers is as its library's own pages write it. `lines` counts those that its diff from the
serial script adds and removes. `accuracy` is what the script prints, `truth` that of its model on every sample of
the validation set, whose length two processes do not divide. Every process has one thread. Two nodes are network
namespaces with a link of 100 Mbit/s between them, which need root. Writes the table and the plot of docs/peers.md.
"""

import argparse
import ctypes
import difflib
import json
import os
import re
import resource
import runpy
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from report import BIN, RESULTS, Rows, keep, spread

sys.path.append(str(Path(__file__).parents[1] / "tests" / "cluster"))
import network
from network import Network

HERE = Path(__file__).parent
PEERS = HERE / "scripts" / "peers"
PAGE = HERE.parent / "docs" / "peers.md"
NODES, LINK = ("left", "right"), "100mbit"
PYTHON = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
HERE_2 = ["--standalone", "--nproc-per-node=2"]
SAMESTEP = [str(BIN / "samestep"), "run"]
COMMANDS = {
    "serial": [*PYTHON, "serial.py"],
    "DDP": [*PYTHON, "ddp.py"],
    "torchrun": [*TORCHRUN, *HERE_2, "torchrun.py"],
    "Accelerate": [*TORCHRUN, *HERE_2, "accelerate_.py"],
    "Fabric": [*PYTHON, "fabric.py"],
    "Ignite": [*PYTHON, "ignite_.py"],
    "samestep": [*SAMESTEP, "-n", "2", "samestep_.py"],
    "samestep --fork": [*SAMESTEP, "-n", "2", "--fork", "samestep_.py"],
}
TWO_NODES = {
    "torchrun on 2 nodes": [*TORCHRUN, "--nproc-per-node=1", "--nnodes=2", "--master-addr={at}", "--master-port={port}",
                          "--node-rank={node}", str(PEERS / "torchrun.py")],
    "samestep on 2 nodes": [*SAMESTEP, "-n", "1", "--nodes=2", "--rendezvous=tcp://{at}:{port}", "--node-rank={node}",
                          str(PEERS / "samestep_.py")],
}  # fmt: skip
STARTED_BY = {
    "serial": "-", "DDP": "`mp.spawn`", "torchrun": "`torchrun`", "Accelerate": "`torchrun`",
    "Fabric": "its own launcher", "Ignite": "its own launcher", "samestep": "`samestep run`",
    "samestep --fork": "`samestep run --fork`",
    "torchrun on 2 nodes": "`torchrun` on each", "samestep on 2 nodes": "`samestep run` on each",
}  # fmt: skip
_FEW = 3
# An option of prctl: processes that a launcher leaves behind become our children, and their time is counted.
_SUBREAPER = 36


def changed(serial: Path, script: Path) -> str:
    """Lines that a diff from the serial script adds and removes."""
    texts = [serial.read_text().splitlines(), script.read_text().splitlines()]
    diff = list(difflib.unified_diff(*texts, n=0, lineterm=""))[2:]
    added, removed = (sum(line.startswith(sign) for line in diff) for sign in "+-")
    return f"+{added} -{removed}"


def commands(system: str, at: Network | None) -> list[list[str]]:
    """What starts one run: one command, or one for each node."""
    if system in COMMANDS:
        return [COMMANDS[system]]
    assert at is not None
    facts = {"at": at.address[NODES[0]], "port": 20_000 + int(time.time() * 10) % 10_000}
    return [
        [*at.enter(name), *(word.format(node=node, **facts) for word in TWO_NODES[system])]
        for node, name in enumerate(NODES)
    ]


class Weight:
    """The most memory that the processes started within it had at one time; pages they share are counted once."""

    def __init__(self) -> None:
        self.bytes = 0
        self._others = {process.pid for process in psutil.Process().children(recursive=True)}
        self._is_over = threading.Event()
        self._watch = threading.Thread(target=self._look)

    def __enter__(self) -> "Weight":
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._watch.join()

    def _look(self) -> None:
        while not self._is_over.wait(0.1):
            now = [
                process
                for process in psutil.Process().children(recursive=True)
                if process.pid not in self._others
            ]
            self.bytes = max(self.bytes, sum(map(self._of, now)))

    @staticmethod
    def _of(process: psutil.Process) -> int:
        with suppress(psutil.Error):
            return process.memory_full_info().pss
        return 0


def run(starts: Sequence[list[str]], folder: str) -> dict[str, Any]:
    """One run from shell to exit, with the CPU time of all that it started.

    Where rank 0 did not write its numbers, as when a rank aborts at its exit, only the seconds and the exit code.
    """
    notes = Path(folder, "notes.json")
    notes.unlink(missing_ok=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "NOTES": str(notes), "SAMESTEP_RUN_DIR": folder}
    env |= {"SAMESTEP_METER": "0", "CUDA_VISIBLE_DEVICES": ""} | (
        {"GLOO_SOCKET_IFNAME": "eth0"} if len(starts) > 1 else {}
    )
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
    with open(Path(folder, "said"), "w+") as said:
        started = [
            subprocess.Popen(command, cwd=PEERS, env=env, stdout=said, stderr=said) for command in starts
        ]
        try:
            codes = [process.wait(90) for process in started]
        except subprocess.TimeoutExpired:
            codes = [124]
            for process in started:
                process.kill()
                process.wait()
        seconds = time.time() - began
        said.seek(0)
        if not notes.exists():
            print(f"{' '.join(starts[0])} ended with {codes}:\n{said.read()[-2000:]}", file=sys.stderr)
            return {"seconds": seconds, "code": max(map(abs, codes))}
    time.sleep(0.1)
    with suppress(ChildProcessError):
        # what a launcher left behind; the processes that keep the nodes' namespaces go on
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    facts = json.loads(notes.read_text())
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    start_s = facts.pop("first_step") - began
    return {**facts, "start_s": start_s, "seconds": seconds, "cpu_s": cpu_s, "code": max(map(abs, codes))}


def row_of(system: str, found: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The medians of a system's runs; ratios of whole runs are formed within each round."""
    rounds = list(zip(found, base, strict=False))
    # a run that aborted at its exit took another time
    rounds = [both for both in rounds if not any(run["code"] for run in both)] or rounds
    names = ("start_s", "step_s", "seconds", "cpu_s", "accuracy", "truth")
    middle = {name: round(median(run[name] for run in found if name in run), 4) for name in names}
    command = (COMMANDS | TWO_NODES)[system]
    return {
        "system": system, **middle, "runs": len(found), "failed_exits": sum(run["code"] != 0 for run in found),
        "lines": changed(PEERS / "serial.py", PEERS / command[-1]),
        **spread(mine["seconds"] / theirs["seconds"] for mine, theirs in rounds),
    }  # fmt: skip


def table(rows: Rows) -> list[str]:
    """The table of docs/peers.md."""
    heads = ["system", "two processes by", "changed lines", "first step, s", "step, ms", "end to end, s", "of torchrun",
             "CPU, s", "memory, MB", "printed", "true", "failed exits"]  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [row["system"], STARTED_BY[row["system"]], row["lines"], f"{row['start_s']:.2f}",
                 f"{1e3 * row['step_s']:.2f}", f"{row['seconds']:.2f}", f"{row['ratio']:.2f}", f"{row['cpu_s']:.1f}",
                 f"{row['bytes'] / 1e6:.0f}", f"{row['accuracy']:.2%}", f"{row['truth']:.2%}",
                 f"{row['failed_exits']} of {row['runs']}"]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |".replace("%", " %"))
    if torch.cuda.device_count() < 2:
        lines.append("| DataParallel | - | not measured: it needs 2 GPUs" + " | " * 10 + "|")
    rounds = max(row["runs"] for row in rows)
    busy = "" if rounds > _FEW else ", on a machine that was busy with other programs: the times say little"
    return [*lines, "", f"Medians of {rounds} rounds{busy}."]


def write(rows: Rows) -> None:
    """The table between the page's marks, and the plot."""
    whole = re.sub(
        r"(<!-- peers -->\n).*?(<!-- end -->)",
        lambda found: found[1] + "\n".join([*table(rows), ""]) + found[2],
        PAGE.read_text(),
        flags=re.DOTALL,
    )
    PAGE.write_text(whole)
    runpy.run_path(str(PAGE.parent / "pictures" / "draw.py"), run_name="__main__")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--rounds-of-nodes", type=int, default=5)
    parser.add_argument("--systems", default=",".join((*COMMANDS, *TWO_NODES)))
    parser.add_argument("--minutes", type=float, default=12, help="begin no round that would end later")
    parser.add_argument("--page", action="store_true", help="write the page again from the last results")
    asked = parser.parse_args()
    if asked.page:
        write(json.loads((RESULTS / "peers.json").read_text())["rows"])
        return
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)
    chosen = asked.systems.split(",")
    began, runs = time.monotonic(), {system: list[dict[str, Any]]() for system in chosen}
    with ExitStack() as stack:
        folder, at = stack.enter_context(tempfile.TemporaryDirectory()), None
        if network.possible():
            at = Network(Path(folder, "hosts"), NODES)
            stack.callback(at.close)
            for node in NODES:
                at.limit(node, LINK)
        weights = dict[str, int]()
        for system in chosen:  # in runs of their own: looking takes time
            if at or system in COMMANDS:
                with Weight() as weight:
                    run(commands(system, at), folder)
                weights[system] = weight.bytes
        for number in range(asked.rounds):
            of_nodes = TWO_NODES if at and number < asked.rounds_of_nodes else {}
            systems = [system for system in (*COMMANDS, *of_nodes) if system in chosen]
            shift, round_began = number % len(systems), time.monotonic()
            for system in [*systems[shift:], *systems[:shift]]:
                runs[system].append(run(commands(system, at), folder))
            print(f"round {number + 1} of {asked.rounds}: {time.monotonic() - began:.0f} s", flush=True)
            if 2 * time.monotonic() - round_began - began > 60 * asked.minutes:
                break
    rows = [
        row_of(system, found, runs.get("torchrun", found)) | {"bytes": weights[system]}
        for system, found in runs.items()
        if any("step_s" in run for run in found)
    ]
    if chosen == [*COMMANDS, *TWO_NODES]:
        keep(max(map(len, runs.values())), rows)
        write(rows)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
