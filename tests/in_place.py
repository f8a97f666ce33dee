"""Kills a run that its launcher restarts, and times from each kill to the first step that was finished after it.

python tests/in_place.py [--kills 40] [--torchrun 5]: a line for each launcher, on the same script in the same run; exit
code 1 where ours lost anything. A part of `make kill-loop`.
"""

import argparse
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from trail import Trail, differing_bits

SCRIPT = Path(__file__).with_name("survivor.py")
KINDS = (
    *("random rank", "rank 0", "all ranks", "warm process", "recovery", "commit", "launcher"),
    "guardian and launcher",
)
OF_TORCHRUN = ("random rank", "rank 0", "all ranks")
EPOCHS = 150
PATIENCE_S = 40.0
BETWEEN_S = (0.5, 1.2)
ORPHANS_S = 2.0
COSTS = ("unrecovered", "lost", "twice", "bits", "orphans")
LAUNCHERS = {
    "samestep": ("samestep", "run", "-n", "2", "--fork", "--max-restarts", "9"),
    "two nodes": ("samestep", "run", "-n", "1", "--fork", "--max-restarts", "9"),
    "torchrun": ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1000"),
}


class Lost(Exception):
    """A run that did not go on after a kill."""


class Run(Trail):
    """A run of two ranks under a launcher that restarts it."""

    def __init__(self, home: Path, launcher: str, epochs: int = EPOCHS) -> None:
        super().__init__(home)
        self._home, self._launcher, self._epochs, self._starts = home, launcher, epochs, 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the launcher, for the first time or again."""
        self._starts += 1
        self._process = self._started()
        self.step_after(0.0)

    def _started(self, *options: object) -> "subprocess.Popen[bytes]":
        words = [self.directory, "--notes", self.log, "--epochs", self._epochs, "--every", "0.5"]
        words += ["--attempt", 1000 * self._starts]
        command = [sys.executable, "-m", *LAUNCHERS[self._launcher], *options, SCRIPT, *words]
        with (self._home / "said").open("ab") as said:
            return subprocess.Popen(
                [str(word) for word in command],
                cwd=self._home,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    def end(self) -> int:
        """Its exit code, once it has ended by itself."""
        try:
            return self._process.wait(PATIENCE_S + self._epochs)
        finally:
            self.kill([self._process.pid])

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ranks(self) -> list[int]:
        """The processes that write the notes, in the order of their ranks."""
        notes = {}
        for pid in self._children():
            try:
                opened = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
            except OSError:
                continue
            notes |= {int(name.rpartition("-")[2]): pid for name in opened if name.startswith(f"{self.log}-")}
        return [notes[rank] for rank in sorted(notes)]

    def warm(self) -> list[int]:
        """The warm process."""
        return [pid for pid in self._children() if pid not in self.ranks() and b"warm.py" in words_of(pid)]

    def launcher(self) -> list[int]:
        return [self._process.pid]

    def guardian(self) -> list[int]:
        return [pid for pid in self._children() if b"guardian.py" in words_of(pid)]

    def outlived(self, pids: Sequence[int]) -> int:
        """How many of these still live some time after their launcher was killed."""
        until = time.monotonic() + ORPHANS_S
        while (left := sum(lives(pid) for pid in pids)) and time.monotonic() < until:
            time.sleep(0.02)
        return left

    def kill(self, pids: Sequence[int]) -> float:
        """When they were killed."""
        now = time.monotonic()
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return now

    def newest(self) -> tuple[int, float]:
        """The newest attempt that has finished a step, and when it first did."""
        firsts = [(attempt, when) for by in self.taken().values() for attempt, (when, _) in by.items()]
        attempt = max((attempt for attempt, _ in firsts), default=0)
        return attempt, min((when for each, when in firsts if each == attempt), default=0.0)

    def step_after(self, killed: float) -> float:
        """When the first step after that moment was finished in a new attempt."""
        before, until = self.newest()[0], time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            attempt, when = self.newest()
            if attempt > before and when > killed:
                return when
            time.sleep(0.01)
        raise Lost

    def _children(self) -> list[int]:
        try:
            return [
                int(pid)
                for pid in Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
                .read_text()
                .split()
            ]
        except OSError:
            return []


class TwoNodes(Run):
    """A run of two launchers with a rank each, of which the second is killed and started again."""

    def __init__(self, home: Path, launcher: str) -> None:
        super().__init__(home, launcher)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._at = f"tcp://127.0.0.1:{free.getsockname()[1]}"

    def _started(self, *options: object) -> "subprocess.Popen[bytes]":
        self._second = self._node(1)
        return self._node(0)

    def _node(self, node: int) -> "subprocess.Popen[bytes]":
        return super()._started("--nodes", 2, "--node-rank", node, "--rendezvous", self._at)

    def kill_node(self) -> float:
        """Kill it, and start another in its place; from then to the first finished step."""
        killed = self.kill([self._second.pid])
        self._second.wait()
        self._second = self._node(1)
        return self.step_after(killed) - killed

    def end(self) -> int:
        code = super().end()
        return self._second.wait(PATIENCE_S) or code


def wchan_of(pid: int) -> str:
    """What it waits for in the kernel."""
    try:
        return Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        return ""


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def words_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def kill_as(kind: str, run: Run, draw: random.Random, cost: dict[str, int]) -> float | None:
    """Kill as the kind says; from the last kill to the first finished step, None where no step had to follow."""
    if len(ranks := run.ranks()) < 2:
        return None
    if kind == "warm process":
        run.kill(run.warm())
    if kind == "commit":
        until = time.monotonic() + 2
        while time.monotonic() < until and not any(run.directory.glob(".writing-*")):
            continue
    victims = {"all ranks": ranks, "rank 0": ranks[:1], "commit": ranks[:1]}.get(kind, [draw.choice(ranks)])
    if "launcher" in kind:
        run.kill([*(run.guardian() if "guardian" in kind else ()), *run.launcher()])
        run.end()
        cost["orphans"] += run.outlived(ranks)
        run.start()
        return None
    killed = run.kill(victims)
    if kind == "recovery":
        time.sleep(draw.uniform(0, 0.2))
        if again := [pid for pid in run.ranks() if pid not in victims]:
            killed = run.kill([draw.choice(again)])
    took = run.step_after(killed) - killed
    if kind != "warm process":
        return took
    until = time.monotonic() + PATIENCE_S  # Python started these ranks: a time that says nothing of forks
    while not any("unix" in wchan_of(pid) for pid in run.warm()) and time.monotonic() < until:
        time.sleep(0.05)
    return None


def recoveries(
    base: Path, launcher: str, kills: int, draw: random.Random, undisturbed: Trail | None
) -> tuple[list[float], dict[str, int]]:
    """The times of so many kills, and what they cost."""
    kinds = OF_TORCHRUN if launcher == "torchrun" else KINDS
    times, cost, done, rounds = [], dict.fromkeys(COSTS, 0), 0, 0
    while done < kills:
        rounds += 1
        home = base / f"{launcher}-{rounds}".replace(" ", "-")
        run = TwoNodes(home, launcher) if launcher == "two nodes" else Run(home, launcher)
        try:
            run.start()
            while done < kills and not run.has_ended:
                time.sleep(draw.uniform(*BETWEEN_S))
                if run.has_ended:
                    break
                is_node = isinstance(run, TwoNodes)
                took = run.kill_node() if is_node else kill_as(kinds[done % len(kinds)], run, draw, cost)
                times += [took] if took is not None else []
                done += 1
            code = run.end()
        except Lost:
            code = 0 if run.has_ended else 1
            run.kill(run.launcher())
        if code or not undisturbed:
            cost["unrecovered"] += bool(code)
            continue
        lost, twice = run.against(undisturbed)
        cost = {**cost, "lost": cost["lost"] + lost, "twice": cost["twice"] + twice}
        cost["bits"] += differing_bits(run.state(), undisturbed.state())
    return times, cost


def line(launcher: str, times: list[float], cost: dict[str, int]) -> str:
    ordered = sorted(times) or [0.0]
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    costs = ", ".join(f"{name} {count}" for name, count in cost.items())
    return (
        f"{launcher}, kill to first finished step, {len(times)} kills: p50 {statistics.median(ordered):.2f} s, "
        f"p99 {p99:.2f} s, max {ordered[-1]:.2f} s | {costs}"
    )


def beside_torchrun(kills: int, nodes: int, of_torchrun: int, draw: random.Random) -> bool:
    """Print a line for each launcher; whether nothing was lost under ours."""
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = Run(Path(folder, "undisturbed"), "samestep")
        undisturbed.start()
        if undisturbed.end():
            sys.exit(f"the undisturbed run failed:\n{Path(folder, 'undisturbed', 'said').read_text()}")
        times, cost = recoveries(Path(folder), "samestep", kills, draw, undisturbed)
        print(line("samestep run --fork --max-restarts", times, cost), flush=True)
        if nodes:
            of_nodes = recoveries(Path(folder), "two nodes", nodes, draw, undisturbed)
            print(line("a node of two, killed and started again", *of_nodes), flush=True)
            cost = {name: count + of_nodes[1][name] for name, count in cost.items()}
        if of_torchrun:
            theirs = recoveries(Path(folder), "torchrun", of_torchrun, draw, None)
            print(line("torchrun --max-restarts", *theirs), flush=True)
    return not any(cost.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--nodes", type=int, default=4, help="kills of one of two nodes")
    parser.add_argument("--torchrun", type=int, default=5, help="kills of torchrun's run")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    asked = parser.parse_args()
    print(f"seed {asked.seed}")
    sys.exit(not beside_torchrun(asked.kills, asked.nodes, asked.torchrun, random.Random(asked.seed)))
