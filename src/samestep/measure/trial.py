"""Runs a script at a size with settings, under `samestep run` or another launcher, and returns what came out.

Covered: the script, its launcher and all that they start end with the trial: when it is over, at an exception such
as Ctrl-C, and, under `samestep run`, when this process is killed.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

from samestep.errors import UsageError, WorkerFailed
from samestep.measure.runs import Run, read_run
from samestep.placement.devices import share_cores
from samestep.rundir import begin_run, log_path, start_record
from samestep.start.python import scripts_python
from samestep.start.scan import names_early_variable
from samestep.start.script import Script, run_script
from samestep.start.signals import handled
from samestep.start.worker import bound

_STOP_S = 2.0  # what workers have to end in once they are told to
_LAUNCHER_STOP_S = 10.0
_MOST_LINES = 20
_NO_EXCEPTION = re.compile(r"^exit code \d+$", re.MULTILINE)
_LAST_LINES = 5


@dataclass(frozen=True)
class Result:
    """What came out of a trial."""

    code: int
    seconds: float  # with the start of Python and torch
    text: str  # what rank 0 and the launcher printed
    run: Run

    @property
    def failure(self) -> str | None:
        """The launcher's report of the first failure."""
        return self.run.ended.failure if self.run.ended else None

    @property
    def report(self) -> str | None:
        """That report; without an exception, as of argparse, with the last lines that were printed before it."""
        failure = self.failure
        if failure and _NO_EXCEPTION.search(failure):
            last_words = self.text.partition(failure)[0].rstrip().splitlines()[-_LAST_LINES:]
            failure = "\n".join([*last_words, "", failure])
        return failure

    def checked(self) -> "Result":
        """The same; a WorkerFailed with the report where the script failed."""
        if self.code:
            # under another launcher a rank reports itself, and the launcher's own words are long
            own = re.search(rf"^.* failed on rank (.*\n){{1,{_MOST_LINES}}}", self.text, re.MULTILINE)
            raise WorkerFailed(self.report or (own[0] if own else self.text))
        return self

    def printed(self, rank: int = 0) -> list[str]:
        """The lines that a rank printed."""
        return log_path(self.run.path, rank).read_text(encoding="utf-8", errors="replace").splitlines()


@dataclass(frozen=True)
class Trial:
    """A script to run: a file, or `-m` and a module, and its arguments; and how to run it."""

    script: Sequence[str]
    size: int
    directory: Path  # where the run's directory with its logs is made
    env: Mapping[str, str] = field(default_factory=dict)
    cores: int | None = None  # for all processes together; None: all that this process may use
    through: Sequence[str] = ()  # a module that runs the script, such as a recorder, and its own arguments
    launcher: Sequence[str] = ()  # what stands before the script on another launcher's command line

    def run(self, heard: Callable[[str], None] = lambda line: None) -> Result:
        """Run it to its end; `heard` gets each line of rank 0 and of the launcher as it is printed."""
        began = time.monotonic()
        lines = []
        with self._started() as launcher:
            assert launcher.stdout is not None
            for line in launcher.stdout:
                lines.append(line)
                heard(line.rstrip("\n"))
            code = launcher.wait()
        text = "".join(lines)
        runs = [run for path in self.directory.glob("*") if (run := read_run(path))]
        if not runs:
            raise WorkerFailed(text.strip() or f"the launcher ended with exit code {code}")
        return Result(code, time.monotonic() - began, text, runs[0])

    @contextmanager
    def _started(self) -> Iterator[subprocess.Popen[str]]:
        """The launcher, in a process group of its own, which ends on leaving."""
        # -P: a file in the user's directory must not be imported instead of a module.
        command, env = [sys.executable, "-P", "-m", "samestep.measure.trial"], dict(os.environ)
        if self.launcher:
            command, run = [*self.launcher, *self.script], self.directory.absolute() / "run"
            begin_run(run, start_record(command, self.size, time.time()))
            env |= {**self._env, "SAMESTEP_RUN": str(run)}
        with bound(_cores_apart(self.cores)):
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL if self.launcher else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                process_group=0,
            )
        try:
            if process.stdin is not None:
                print(json.dumps(self._order()), file=process.stdin, flush=True)
            yield process
        finally:
            process.terminate()
            try:
                process.communicate(timeout=_LAUNCHER_STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()

    @property
    def _env(self) -> dict[str, str]:
        """Its commits are its own: it starts at the first step, and the script's commits stay as they are."""
        return {"SAMESTEP_CHECKPOINTS": str(self.directory.absolute() / "commits"), **self.env}

    def _order(self) -> dict[str, object]:
        """What the launcher process reads from its stdin."""
        through = ["-m", *self.through] if self.through else []
        return {
            "name": self.script[1] if self.script[0] == "-m" else self.script[0],
            "command": [scripts_python(), *through, *self.script],
            "size": self.size,
            "run_dir": str(self.directory),
            "env": self._env,
            "fork": self.size > 1 and not names_early_variable(Path(self.script[0])),
        }


@contextmanager
def end_on_signals() -> Iterator[None]:
    """Meanwhile SIGTERM and SIGHUP end this process as an exception, so that trials and their files end with it."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    with handled((signal.SIGTERM, signal.SIGHUP), end):
        yield


def _cores_apart(count: int | None) -> set[int]:
    """So many cores that are far apart, or none to have them all; under a quota all cores are as good."""
    shares, _ = share_cores(max(2, count or 0))
    chosen = {share[0] for share in shares[:count] if share}
    return set() if count is None or len(chosen) < count else chosen


def main() -> int:
    """In the launcher process: run the script that is described on stdin, until stdin is closed."""
    # The workers get an empty stdin; the pipe tells this process when the trial's own process is gone.
    pipe = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with open(pipe, encoding="utf-8", closefd=False) as lines:
        order = json.loads(lines.readline())
    Thread(target=_end_with, args=(pipe,), daemon=True).start()
    try:
        return run_script(Script(**order, patience_s=_STOP_S))
    except (UsageError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


def _end_with(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
