"""Starts the real command in a directory of its own, and looks at which of its processes live."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

STUBBORN = """
    import multiprocessing, os, signal, time
    def loader_worker():
        note()
        time.sleep(100)
    def note():
        with open("pids", "a") as file:
            file.write(f"{os.getpid()}\\n")
    if __name__ == "__main__":
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        multiprocessing.Process(target=loader_worker).start()
        note()
        time.sleep(100)
"""


class Started:
    """A `samestep run` in the background."""

    def __init__(self, process: subprocess.Popen[str], home: Path) -> None:
        self.process, self.home = process, home

    def wait_for_lines(self, name: str, count: int = 1) -> list[str]:
        """The lines of a file that workers append to, once there are so many."""
        until = time.monotonic() + 30
        path = self.home / name
        while time.monotonic() < until:
            lines = path.read_text().splitlines() if path.exists() else []
            if len(lines) >= count:
                return lines
            time.sleep(0.01)
        raise AssertionError(f"{name} never had {count} lines")

    def finish(self) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        out, err = self.process.communicate(timeout=90)
        return self.process.returncode, out, err


class Launcher:
    """`samestep run` in one directory."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.way = ["-m", "samestep"]
        self.started: list[Started] = []
        self.env = {
            name: value for name, value in os.environ.items() if not name.startswith(("SAMESTEP", "OMP"))
        }

    def write(self, source: str, name: str = "train.py") -> str:
        """Put a script there."""
        (self.home / name).write_text(dedent(source))
        return name

    def start_stubborn(self, *options: str) -> tuple[Started, list[int]]:
        """Two workers that ignore signals, each with a child that does; the four processes."""
        self.write(STUBBORN)
        started = self.start("-n", "2", *options, "train.py")
        return started, [int(pid) for pid in started.wait_for_lines("pids", 4)]

    def start(self, *args: str) -> Started:
        """Start and go on."""
        process = subprocess.Popen(
            [sys.executable, *self.way, "run", *args],
            cwd=self.home,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.started.append(Started(process, self.home))
        return self.started[-1]

    def run(self, *args: str) -> tuple[int, str, str]:
        """Start, wait: exit code, stdout, stderr."""
        return self.start(*args).finish()

    def log(self, rank: int) -> str:
        """What a rank of the newest run wrote."""
        newest = max((self.home / "runs").iterdir(), key=lambda run: run.stat().st_mtime_ns)
        return (newest / "logs" / f"rank-{rank}.log").read_text(errors="replace")


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    found = Launcher(tmp_path)
    yield found
    for started in found.started:
        if started.process.poll() is None:
            started.process.kill()
            started.process.communicate()


@pytest.fixture
def gone() -> Callable[[list[int], float], None]:
    """Asserts that processes end within so many seconds."""

    def check(pids: list[int], seconds: float) -> None:
        until = time.monotonic() + seconds
        while left := [pid for pid in pids if _lives(pid)]:
            assert time.monotonic() < until, f"{left} of {pids} live on"
            time.sleep(0.01)

    return check


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
