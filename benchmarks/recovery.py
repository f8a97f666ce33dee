"""What recovery costs: starts with --fork beside torchrun, training with a kill now and then, and undisturbed training.

python benchmarks/recovery.py [--seconds 65] [--repeats 3]: a line for each. "Effective" are the new steps per second
of a run whose ranks are killed, as a part of those of the undisturbed run; steps that are taken again do not count.
"""

import argparse
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

SCRIPTS = Path(__file__).with_name("scripts")
SIZES = (2, 16)
KILLS_S = (30.0, 3.0)
SAMESTEP = (sys.executable, "-m", "samestep", "run", "--fork", "-n")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
START_S = 300.0


def tree(pid: int) -> list[psutil.Process]:
    """A process and all that it started."""
    try:
        return [(top := psutil.Process(pid)), *top.children(recursive=True)]
    except psutil.Error:
        return []


def memory_of(pid: int) -> float:
    """Bytes that it and all that it started hold; a page that several share counts once."""
    total = 0
    for process in tree(pid):
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def first_step(command: Sequence[str], kind: str) -> tuple[float, float]:
    """Seconds to the first step of all ranks, and the most memory that was held meanwhile."""
    began, most = time.time(), 0.0
    words = [*command, str(SCRIPTS / "first_step.py"), kind]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        while process.poll() is None:
            most = max(most, memory_of(process.pid))
            time.sleep(0.1)
        assert process.stdout is not None
        at = next(line for line in process.stdout if line.startswith("first step"))
    return float(at.split()[-1]) - began, most


def starts(repeats: int) -> None:
    for size in SIZES:
        ours, theirs, memory = [], [], 0.0
        for _ in range(repeats):
            seconds, most = first_step((*SAMESTEP, str(size)), "samestep")
            ours, memory = [*ours, seconds], max(memory, most)
            theirs.append(first_step((*TORCHRUN, str(size)), "ddp")[0])
        mine, other = statistics.median(ours), statistics.median(theirs)
        print(
            f"first step of {size} ranks: {mine:.1f} s with --fork, {other:.1f} s under torchrun ({mine / other:.2f}); "
            f"at most {memory / 1e9:.2f} GB",
            flush=True,
        )


def new_steps(notes: Path) -> list[float]:
    """When each step was taken for the first time."""
    seen, times = set(), []
    for line in notes.read_text().splitlines() if notes.exists() else ():
        if len(words := line.split()) == 3 and tuple(words[:2]) not in seen:
            seen.add(tuple(words[:2]))
            times.append(float(words[2]))
    return times


def steps_per_second(seconds: float, kill_s: float | None, *options: str) -> float:
    """New steps per second of a run, a rank of which is killed every so many seconds."""
    with tempfile.TemporaryDirectory() as home:
        command = [*SAMESTEP[:4], *options, "-n", "2", str(SCRIPTS / "steady.py"), home]
        with subprocess.Popen(
            command, cwd=home, stderr=subprocess.DEVNULL, start_new_session=True
        ) as process:
            notes, until = Path(home, "steps"), time.monotonic() + START_S
            while len(new_steps(notes)) < 100 and time.monotonic() < until:
                time.sleep(0.1)
            assert len(new_steps(notes)) >= 100, f"the run took no 100 steps in {START_S:.0f} s"
            time.sleep(4.0)  # the warm process is ready for the first kill
            began = time.monotonic()
            for number in itertools.count(1):
                time.sleep(
                    max(0.0, min(began + number * (kill_s or seconds), began + seconds) - time.monotonic())
                )
                if time.monotonic() >= began + seconds:
                    break
                ranks = [each for each in tree(process.pid) if is_rank(each)]
                if ranks:
                    os.kill(random.choice(ranks).pid, signal.SIGKILL)
            ended = time.monotonic()
            taken = [at for at in new_steps(notes) if began <= at <= ended]
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)
    return len(taken) / (ended - began)


def is_rank(process: psutil.Process) -> bool:
    """Whether it writes a pulse, as ranks do."""
    try:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return False
    return "/pulse/rank-" in maps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=65.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=("starts", "kills", "cost"))
    asked = parser.parse_args()
    if asked.only in (None, "starts"):
        starts(asked.repeats)
    restarts = ("--fork", "--max-restarts", "1000")
    undisturbed = steps_per_second(asked.seconds, None, *restarts) if asked.only != "starts" else 0.0
    for kill_s in KILLS_S if asked.only in (None, "kills") else ():
        disturbed = steps_per_second(asked.seconds, kill_s, *restarts)
        print(
            f"a kill every {kill_s:g} s: {disturbed:.1f} new steps a second, undisturbed {undisturbed:.1f}: "
            f"effective {disturbed / undisturbed:.1%}",
            flush=True,
        )
    if asked.only in (None, "cost"):
        # without restarts there are no commits in memory, and with no meter and pulse nothing is watched
        plain = steps_per_second(asked.seconds, None, "--fork")
        print(
            f"commits in memory: {plain:.2f} steps a second without, {undisturbed:.2f} with them", flush=True
        )


if __name__ == "__main__":
    main()
