"""Makes runs hang in every way that is known, and judges what is said of them: `make hang`.

python tests/hang.py [--healthy 200] [--only sleep]: a line for each hang, and one of result; exit code 1 where a notice
named another rank or line than the one that is stuck, came too late, or was not true of a slow but healthy run.
"""

import argparse
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from cluster.network import DYING, Network, possible

SCRIPT = Path(__file__).with_name("stuck.py")
WHERE = ("first step", "middle", "evaluation", "checkpoint")
LIMIT_S = 6.5
LOST_S = 14.0
# what is said of a node whose network is cut, and of one whose launcher is stopped, and after how long at most
CUT = "its process has ended or its network is cut", 7.0
SILENT = "nothing was heard of it for 10 s", LOST_S
ALLOWED_S = 8.0  # 5 s, what two looks and a stack take, and what a loaded machine adds
# What the notice says of the stuck rank, where that is not the line where it is stuck.
SAYS = {"stop": "which is stopped (SIGSTOP)", "d-state": "which is in uninterruptible sleep (D)"}

SLOW_S = (0.0, 0.5, 1.0, 2.0, 4.0, 6.0)
CODES = {"exit": 77, "os-exit": 5}
ON_MACHINES = threading.Lock()


class Case(NamedTuple):
    kind: str
    where: str = "middle"
    exact: bool = False
    rank: int = 1
    size: int = 3
    nodes: int = 1

    def __str__(self):
        others = ", exact" * self.exact + ", 2 machines" * (self.nodes == 2)
        return f"{self.kind} in {self.where}, rank {self.rank} of {self.size}{others}"


def cases():
    kinds = ("sleep", "loop", "gil", "lock", "fifo", "stop")
    for kind, where in itertools.product(kinds, WHERE):
        yield Case(kind, where)
    yield from (Case(kind, exact=True) for kind in kinds)
    yield from (Case("stop", where, True) for where in ("first step", "evaluation", "checkpoint"))
    yield from (Case(kind, rank=0) for kind in ("sleep", "stop", "barrier", "work", "extra"))
    yield from (Case("c-sleep", where) for where in ("first step", "middle"))
    # in a step, the others would take what DDP sends for their own exchange, and fail
    yield from (Case("ddp", "evaluation", rank=rank) for rank in (0, 1))
    yield from (Case("hook", exact=exact) for exact in (False, True))
    yield from (Case("d-state", where) for where in ("first step", "middle"))
    yield from (Case(kind, exact=exact) for kind in ("loader", "uneven") for exact in (False, True))
    # with exact=True a skipped microbatch is no hang: it adds nothing, and every rank exchanges all of them
    yield Case("skip")
    yield from (Case("barrier", where) for where in ("middle", "checkpoint"))
    yield Case("extra")
    yield from (Case("stop", size=2), Case("sleep", size=2, rank=0))
    yield from (Case(kind, where) for kind in CODES for where in ("middle", "evaluation"))
    if possible():
        kinds = (*kinds, "barrier", "os-exit", "link", "launcher")
        yield from (Case(kind, rank=2, nodes=2) for kind in kinds)
        yield from (
            Case(kind, "evaluation", exact, rank=1, nodes=2)
            for kind in ("sleep", "stop")
            for exact in (False, True)
        )


@contextmanager
def machines(case):
    """Two machines with a network of their own for a case that has two, else None; the last rank is on the second."""
    if case.nodes == 1:
        yield None
        return
    with ON_MACHINES, tempfile.TemporaryDirectory() as home:
        network = Network(Path(home, "hosts"), ["ss1", "ss2"])
        try:
            yield network
        finally:
            network.close()


def launchers(case, network):
    """What to put before `samestep run`, and its options, for each launcher of a case."""
    if network is None:
        return [([], ["-n", case.size])]
    options = ["--nodes", 2, "--rendezvous", f"tcp://{network.address['ss1']}:29500"]
    return [
        ([*DYING, *network.enter(name)], ["-n", count, *options, "--node-rank", node])
        for node, (name, count) in enumerate((("ss1", case.size - 1), ("ss2", 1)))
    ]


def run(case, home, *options, patience_s=60, limit_s=LIMIT_S):
    """Exit code; each line that was printed, with its time since the rank was stuck; the line where it is stuck."""
    fifo = home / "fifo"
    fifo.exists() or os.mkfifo(fifo)
    words = ["--kind", case.kind, "--where", case.where, "--rank", case.rank, "--fifo", fifo, *options]
    words += ["--exact"] * case.exact
    # a launcher learns of the ranks on another machine up to a second later
    watched = ["--fork", "--all-ranks", "--hang-timeout", limit_s + case.nodes - 1]
    with machines(case) as network:
        read, write = os.pipe()
        processes = []
        for before, of_node in launchers(case, network):
            command = [*before, sys.executable, "-m", "samestep", "run", *of_node, *watched, SCRIPT, *words]
            out = {"cwd": home, "stdout": write, "stderr": subprocess.STDOUT, "start_new_session": True}
            processes.append(subprocess.Popen([str(word) for word in command], **out))
        os.close(write)
        try:
            with open(read) as said:
                lines, line = follow(said, lambda: strike(case, network, processes[-1]))
            return processes[0].wait(patience_s), lines, line
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def follow(said, strike):
    """Each line with its time since the rank was stuck, and the line where that is; calls `strike` at that moment."""
    lines, stuck, line = [], None, None
    for text in said:
        now = time.monotonic()
        if found := re.search(r"stuck at (\d+)", text):
            stuck, line = now, int(found[1])
            strike()
        lines.append((now - (stuck or now), text.rstrip("\n")))
    return lines, line


def strike(case, network, launcher):
    """Cut the link of the second machine, or stop its launcher until the other one has missed it."""
    if case.kind == "link":
        network.cut("ss2")
    elif case.kind == "launcher":
        launcher.send_signal(signal.SIGSTOP)
        threading.Timer(LOST_S, launcher.kill).start()


def fault(case, code, lines, line, allowed_s=ALLOWED_S):
    """What is wrong with what was said of a hang; None where it was right."""
    report = "\n".join(text for _, text in lines)
    if line is None and case.kind != "skip":
        return f"the rank never got stuck\n{report}"
    where = f"stuck.py:{line}"
    if case.kind in ("link", "launcher"):
        why, limit_s = CUT if case.kind == "link" else SILENT
        lost = f"was stopped on node 0 (ss1): node 1 (ss2) was lost: {why}"
        said = [after for after, text in lines if lost in text]
        return None if code == 1 and said and said[0] < limit_s else f"node 1 was not named in time\n{report}"
    if f"failed on rank {case.rank} of {case.size}" not in report:
        return f"another rank is the run's cause, or none\n{report}"
    if case.kind in CODES:
        says_where = case.kind == "os-exit" or f"rank {case.rank} left the script at {where}" in report
        return (
            None if says_where and code == CODES[case.kind] else f"it ended with exit code {code}\n{report}"
        )
    if case.kind == "uneven" and case.exact:
        return None if "at different calls: rank 1 at " in report else f"its call was not named\n{report}"
    notices = [(after, text) for after, text in lines if text.startswith("samestep: ") and " waited " in text]
    if code != 1 or not notices:
        return f"it ended with exit code {code} and {len(notices)} notices\n{report}"
    after, said = notices[0]
    if after > allowed_s:
        return f"it was said after {after:.1f} s"
    host = f" (ss{1 + (case.rank == case.size - 1)})" if case.nodes == 2 else ""
    if f" for rank {case.rank}{host}, which " not in said:
        return f"another rank was named: {said}"
    if case.kind in ("skip", "uneven"):  # the rank is stuck at no line: it goes on, or is at its next call
        return None
    # the line that is printed is that before the loop, whose body is up to two lines below
    wheres = [f"stuck.py:{line + below})" for below in range(3 if case.kind == "loop" else 1)]
    says_where = any(words in said for words in ([SAYS[case.kind]] if case.kind in SAYS else wheres))
    return None if says_where else f"another line was named: {said}"


def untrue(case, slow_s, code, lines):
    """What is not true of a run that went on: only the slow rank may be named, and only if it was slow for long."""
    said = [text for _, text in lines if " waited " in text]
    batches = 4 if case.where == "evaluation" else 1
    allowed = slow_s * batches > 4.5
    wrong = [
        text for text in said if not allowed or f" for rank {case.rank}, which is in stick (" not in text
    ]
    return wrong or ([] if code == 0 else [f"it ended with exit code {code}"])


def said_of(case, *options, limit_s=LIMIT_S):
    with tempfile.TemporaryDirectory() as home:
        return run(case, Path(home), *options, limit_s=limit_s)


def hangs(kinds, pool):
    """How many hangs were made, how many were said wrongly, and after how long at most."""
    made = [case for case in cases() if kinds is None or case.kind in kinds]
    wrong, latest = 0, 0.0
    for case, (code, lines, line) in zip(made, pool.map(said_of, made), strict=True):
        why = fault(case, code, lines, line)
        wrong += why is not None
        after, said = next(
            ((after, text) for after, text in lines if " waited " in text), (0.0, f"exit code {code}")
        )
        latest = max(latest, after)
        print(f"{'WRONG' if why else 'right'} | {case} | {after:.1f} s | {why or said}", flush=True)
    return len(made), wrong, latest


def healthy(count, draw, pool):
    """Slow runs that go on: for how many something untrue was said, and how many notices there were."""
    made = [
        (Case("slow", draw.choice(WHERE), draw.random() < 0.3, draw.randrange(2), 2), draw.choice(SLOW_S))
        for _ in range(count)
    ]
    wrong = notices = 0
    ends = pool.map(lambda run: said_of(run[0], "--slow", run[1], limit_s=60), made)
    for (case, slow_s), (code, lines, _) in zip(made, ends, strict=True):
        found = untrue(case, slow_s, code, lines)
        notices += sum(" waited " in text for _, text in lines)
        wrong += bool(found)
        for text in found:
            print(f"WRONG | {case}, {slow_s} s | {text}", flush=True)
    return wrong, notices


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--healthy", type=int, default=200)
    kinds = sorted({case.kind for case in cases()})
    parser.add_argument("--only", nargs="*", choices=kinds, help="these kinds of hangs alone")
    parser.add_argument("--jobs", type=int, default=1, help="so many runs at a time")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    asked = parser.parse_args()
    with ThreadPoolExecutor(asked.jobs) as pool:
        made, wrong, latest = hangs(asked.only, pool)
        print(f"hangs {made} | wrong {wrong} | said after at most {latest:.1f} s", flush=True)
        untrue_runs, notices = healthy(asked.healthy, random.Random(asked.seed), pool)
    print(
        f"slow runs {asked.healthy} | notices {notices} | runs with an untrue one {untrue_runs} | seed {asked.seed}"
    )
    sys.exit(bool(wrong or untrue_runs))


if __name__ == "__main__":
    main()
