"""Kills a training run over and over, and compares what it ends with, bit for bit, with the undisturbed run.

python tests/kill_loop.py [--kills 60] [--seed S]: one line of result, exit code 1 where anything was lost.

Ranks are real processes over Gloo, forked from a process that has torch. A run is killed at times drawn uniformly,
and in the middle of commits (by time, and by strace at a given system call), and goes on at 1, 2 or 3 ranks. When it
has ended, the next run begins. Recovery is the time from a kill to the first step that had not been taken before;
further kills, the start of processes and steps taken again count in it.
"""

import argparse
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from forked import Nest, Rank, end_group
from trail import Trail, differing_bits

SCRIPT = Path(__file__).with_name("survivor.py")
EPOCHS = 40
SPAN_S = 1.0
CALLS = {"fallocate": 1, "pwritev2": 2, "fsync": 3, "renameat": 1, "unlinkat": 1}
KINDS = ("random rank", "rank 0", "all ranks", "loader worker", "commit", "system call", "recovery")


@dataclass
class Tally:
    """What was done, and what came of it."""

    kinds: Counter[str] = field(default_factory=Counter)
    survived: int = 0
    redone: int = 0
    lost: int = 0
    twice: int = 0
    bits: int = 0
    recoveries: list[float] = field(default_factory=list)

    def line(self) -> str:
        slowest = sorted(self.recoveries) or [0.0]
        p95 = slowest[min(len(slowest) - 1, int(len(slowest) * 0.95))]
        return (
            f"faults {self.kinds.total()} | survived {self.survived} | steps redone {self.redone} | "
            f"samples lost {self.lost}, twice {self.twice} | bits differing {self.bits} | "
            f"recovery p50 {statistics.median(slowest):.2f} s p95 {p95:.2f} s max {slowest[-1]:.2f} s"
        )


class Run(Trail):
    """One training run in a directory of its own, started as often as it takes."""

    def __init__(self, nest: Nest, home: Path) -> None:
        super().__init__(home)
        self.nest = nest
        self.attempts = 0

    def start(self, size: int, workers: int) -> list[Rank]:
        self.attempts += 1
        options = ["--notes", self.log, "--attempt", self.attempts, "--epochs", EPOCHS, "--workers", workers]
        return self.nest.start(SCRIPT, size, self.directory, *options)


def workers_of(rank: Rank) -> list[int]:
    try:
        tasks = Path(f"/proc/{rank.pid}/task").iterdir()
        return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    except OSError:
        return []


def disturb(kind: str, run: Run, ranks: list[Rank], draw: random.Random) -> float | None:
    """Kill as the kind says; returns when that was, or None where the run had ended before."""
    nest, until = run.nest, time.monotonic() + 20
    wait = draw.uniform(0, 0.3 if kind == "recovery" else SPAN_S)
    begun = time.monotonic()
    while time.monotonic() < begun + wait and all(rank.code is None for rank in ranks):
        nest.look(0.002)
    if kind == "system call":
        return kill_at_a_call(nest, ranks[0], until, draw)
    victims = {"all ranks": ranks, "rank 0": ranks[:1], "commit": ranks[:1]}.get(kind, [draw.choice(ranks)])
    if kind == "commit":
        while not unfinished(run.directory) and ranks[0].code is None and time.monotonic() < until:
            nest.look(0)
        time.sleep(draw.uniform(0, 0.01))
    nest.look()
    pids = [rank.pid for rank in victims]
    if kind == "loader worker":
        while not (pids := workers_of(victims[0])) and time.monotonic() < until:
            nest.look(0.002)
            if any(rank.code is not None for rank in ranks):
                return None
        pids = [draw.choice(pids)]
    return None if any(rank.code is not None for rank in ranks) else kill_now(pids)


def kill_at_a_call(nest: Nest, rank: Rank, until: float, draw: random.Random) -> float | None:
    # strace counts calls by thread, and each commit has a thread of its own: the counts of CALLS are those of a commit
    call = draw.choice(list(CALLS))
    inject = f"inject={call}:signal=KILL:when={draw.randint(1, CALLS[call])}"
    command = ["strace", "-f", "-qqq", "-o", os.devnull, "-p", str(rank.pid), "-e", inject]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, start_new_session=True, **silent) as tracer:
        while rank.code is None and time.monotonic() < until:
            nest.look(0.02)
        tracer.terminate()  # else it would kill a rank that makes the call only after `until`, and uncounted
    with suppress(ProcessLookupError):
        # a strace whose process was killed may stay, and wait for nothing
        os.killpg(tracer.pid, signal.SIGKILL)
    nest.look()
    return rank.ended_at if rank.code == -signal.SIGKILL else None


def kill_now(pids: list[int]) -> float | None:
    now = time.monotonic()
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return None
    return now


def unfinished(directory: Path) -> bool:
    try:
        return any(name.startswith(".writing-") for name in os.listdir(directory))
    except FileNotFoundError:
        return False


def clear(nest: Nest, ranks: list[Rank], patience_s: float) -> None:
    """Stop the ranks that do not end by themselves, with all that they started, as a launcher does."""
    nest.wait(ranks, patience_s)
    for rank in ranks:
        end_group(rank)
    if None in nest.wait(ranks, 20):
        sys.exit("a rank outlived SIGKILL by 20 s, and would count as a slow recovery")


def killed_until_done(run: Run, kinds: Iterator[str], left: int, draw: random.Random, tally: Tally) -> None:
    """Start a run until it ends by itself, and kill it on the way."""
    times: list[float] = []
    size = draw.choice((1, 2, 3))
    while True:
        kind = next(kinds) if len(times) < left else ""
        ranks = run.start(size, workers=int(kind == "loader worker"))
        if kind and (when := disturb(kind, run, ranks, draw)) is not None:
            times.append(when)
            tally.kinds[kind] += 1
            clear(run.nest, ranks, draw.choice((0.0, 0.5)) if kind != "loader worker" else 10)
        elif run.nest.wait(ranks) == [0] * size:
            break
        else:
            said = "\n".join(f"rank {rank.rank} ended with {rank.code}:\n{rank.said}" for rank in ranks)
            sys.exit(f"attempt {run.attempts}, with no fault, failed\n{said}")
        size = draw.choice((size, size, 1, 2, 3))
    tally.survived += len(times)
    seen, news = 0, []
    steps = run.taken()
    for _, step, when in sorted((a, s, t) for s, by in steps.items() for a, (t, _) in by.items()):
        if step > seen:
            seen = step
            news.append(when)
    for killed in times:
        tally.recoveries += [when - killed for when in news if when > killed][:1]
    tally.redone += sum(len(attempts) - 1 for attempts in steps.values())


def in_turn(draw: random.Random) -> Iterator[str]:
    known = [kind for kind in KINDS if kind != "system call" or shutil.which("strace")]
    while True:
        yield from draw.sample(known, len(known))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    asked = parser.parse_args()
    draw, tally, begun = random.Random(asked.seed), Tally(), time.monotonic()
    kinds = in_turn(draw)
    with tempfile.TemporaryDirectory() as base, Nest(Path(base)) as nest:
        undisturbed = Run(nest, Path(base, "undisturbed"))
        if nest.wait(ranks := undisturbed.start(1, workers=0)) != [0]:
            sys.exit(f"the undisturbed run failed:\n{ranks[0].said}")
        rounds = 0
        while (left := asked.kills - tally.kinds.total()) > 0:
            rounds += 1
            run = Run(nest, Path(base, f"run-{rounds}"))
            killed_until_done(run, kinds, left, draw, tally)
            lost, twice = run.against(undisturbed)
            tally.lost, tally.twice = tally.lost + lost, tally.twice + twice
            tally.bits += differing_bits(run.state(), undisturbed.state())
            shutil.rmtree(run.directory)
        steps = len(undisturbed.taken())
    counts = ", ".join(f"{kind} {count}" for kind, count in tally.kinds.items())
    print(f"seed {asked.seed} | {rounds} runs of {steps} steps | {time.monotonic() - begun:.0f} s | {counts}")
    print(tally.line())
    sys.exit(bool(tally.lost or tally.twice or tally.bits))


if __name__ == "__main__":
    main()
