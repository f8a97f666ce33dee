"""Runs a script with settings, under `samestep run` or another launcher, and returns the result.

Covered: the script, its launcher and all their processes end with the trial: when it is over, after an exception such
as Ctrl-C, and, under `samestep run`, when this process is killed.
"""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired
from threading import Thread

from samestep.errors import UsageError, WorkerFailed
from samestep.measure.runs import Run, read_run
from samestep.placement.devices import share_cores
from samestep.rundir import begin_run, log_path, start_record
from samestep.start.python import scripts_python
from samestep.start.scan import names_early_variable
from samestep.start.script import Script, run_script
from samestep.start.signals import handling
from samestep.start.worker import bound

_STOP_S = 2.0  # workers must end within this time after a request
_LAUNCHER_STOP_S = 10.0
_MOST_LINES = 20
_NO_EXCEPTION = re.compile(r"^exit code \d+$", re.MULTILINE)
_LAST_LINES = 5


@dataclass(frozen=True)
class Result:
    code: int
    seconds: float  # including the start of Python and torch
    text: str  # the output of rank 0 and of the launcher
    run: Run

    @property
    def failure(self) -> str | None:
        """The launcher's report of the first failure."""
        return self.run.ended.failure if self.run.ended else None

    @property
    def report(self) -> str | None:
        """The failure; if it has no exception (argparse exits without), with the last lines printed before."""
        failure = self.failure
        if failure and _NO_EXCEPTION.search(failure):
            last_words = self.text.partition(failure)[0].rstrip().splitlines()[-_LAST_LINES:]
            failure = "\n".join([*last_words, "", failure])
        return failure

    def checked(self) -> "Result":
        """This result; raises WorkerFailed with the report if the script failed."""
        if self.code:
            # under another launcher the rank prints its report, and the launcher's output is long
            own = re.search(rf"^.* failed on rank (.*\n){{1,{_MOST_LINES}}}", self.text, re.MULTILINE)
            raise WorkerFailed(self.report or (own[0] if own else self.text))
        return self

    def printed(self, rank: int = 0) -> list[str]:
        return log_path(self.run.path, rank).read_text(encoding="utf-8", errors="replace").splitlines()


@dataclass(frozen=True)
class Trial:
    """A script to run (a file, or `-m` and a module, with arguments), and how to run it."""

    script: Sequence[str]
    size: int
    directory: Path  # the parent of the run's directory
    env: Mapping[str, str] = field(default_factory=dict)
    cores: int | None = None  # for all processes together; None: all usable cores
    through: Sequence[str] = ()  # a module that runs the script, such as a recorder, with its arguments
    launcher: Sequence[str] = ()  # the words before the script for another launcher

    def run(self, on_line: Callable[[str], None] = lambda line: None) -> Result:
        """Run the script to its end; `on_line` gets each line of rank 0 and of the launcher as it is printed."""
        began = time.monotonic()
        lines = []
        with self._started() as launcher:
            assert launcher.stdout is not None
            for line in launcher.stdout:
                lines.append(line)
                on_line(line.rstrip("\n"))
            code = launcher.wait()
        text = "".join(lines)
        runs = [run for path in self.directory.glob("*") if (run := read_run(path))]
        if not runs:
            raise WorkerFailed(text.strip() or f"the launcher ended with exit code {code}")
        return Result(code, time.monotonic() - began, text, runs[0])

    @contextmanager
    def _started(self) -> Iterator[Popen[str]]:
        """While entered, the launcher runs in its own process group; it is ended at the exit."""
        # -P: do not import modules from the user's directory.
        command, env = [sys.executable, "-P", "-m", "samestep.measure.trial"], dict(os.environ)
        if self.launcher:
            command, run = [*self.launcher, *self.script], self.directory.absolute() / "run"
            begin_run(run, start_record(command, self.size, time.time()))
            env |= {**self._env, "SAMESTEP_RUN": str(run)}
        with bound(_cores_apart(self.cores)):
            stdin = DEVNULL if self.launcher else PIPE
            process = Popen(
                command,
                env=env,
                stdin=stdin,
                stdout=PIPE,
                stderr=STDOUT,
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
            except TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()

    @property
    def _env(self) -> dict[str, str]:
        """The variables; a trial has its own commits, so it starts at step 0 and leaves the script's commits alone."""
        return {"SAMESTEP_CHECKPOINTS": str(self.directory.absolute() / "commits"), **self.env}

    def _order(self) -> dict[str, object]:
        """The order that the launcher process reads from its stdin."""
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
    """While entered, SIGTERM and SIGHUP raise SystemExit, so that trials end and their files are removed."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    with handling((signal.SIGTERM, signal.SIGHUP), end):
        yield


def _cores_apart(count: int | None) -> set[int]:
    """`count` cores that are far apart; an empty set means all cores, as with None or under a quota."""
    shares, _ = share_cores(max(2, count or 0))
    chosen = {share[0] for share in shares[:count] if share}
    return set() if count is None or len(chosen) < count else chosen


def main() -> int:
    """The launcher process: run the script that stdin describes, and end when stdin is closed."""
    # The workers get an empty stdin; the pipe tells this process when the trial's process has ended.
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
