"""Runs a script with suspected causes removed, each combination once, and compares the runs with the first."""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from samestep.measure.trial import Result, Trial
from samestep.text import counted, duration
from samestep.verify.causes import failure_of
from samestep.verify.read import Run, read_record
from samestep.verify.trajectory import SOFT, Compared, Difference, follow

_LEAST_TIMEOUT_S = 20.0
_TIMES_THE_FIRST = 5.0
# SAMESTEP_CHECK_EVERY: the check would end the run when replicas differ; the record goes on and shows the line.
# PYTHONHASHSEED: only `samestep run` fixes it; a script that needs equal hashes is wrong under other launchers.
_ENVIRONMENT = {"SAMESTEP_CHECK_EVERY": "0", "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "random")}
_VARIABLES = {"draws": {"SAMESTEP_SAME": "1"}, "hashes": {"PYTHONHASHSEED": "0"}}
_AT_SIZE_1_TOO = ("seeds", "clock", "hashes", "loaders", "augment", "undrawn")
_WORDS = {
    "draws": "with --same",
    "seeds": "with seeds set",
    "clock": "with a clock that counts",
    "hashes": "with hashes fixed",
    "augment": "with each sample's draws seeded by the sample",
    "world": "with its rank hidden at {}",
    "reseeded": "with the first run's seeds",
    "undrawn": "without the draws at {}",
    "sum": 'with loss="sum"',
    "counts": "with each loss weighed by its count",
    "scale": "with gradients divided by {}",
    "shares": "with the whole batch on every rank",
    "no_sync": "without no_sync",
    "loaders": "with samestep.loader for each DataLoader",
}
_KINDS = {"again": ", once more", "third": ", a third time", "nudged": ", from changed last bits"}

Removed = tuple[str, ...]


@dataclass
class Experiments:
    """Runs of a script, or of the untouched script, whose size is None."""

    script: Sequence[str]
    untouched: Sequence[str]
    first: int | None  # the size of the run that the others are compared with
    steps: int | None
    directory: Path
    start: Callable[[Trial], Result]
    progress: Callable[[str], None]
    _began: float = field(default_factory=time.time)
    _runs: dict[tuple[int | None, Removed, str], Run] = field(default_factory=dict)

    def run(self, size: int | None, removed: Removed, kind: str = "") -> Run:
        """A run of this size; one process ignores causes that need several ranks. `kind` is "", or a key of _KINDS."""
        names = {name for name in removed if (size or 1) > 1 or name.startswith(_AT_SIZE_1_TOO)}
        if "world=*" in names:
            names = {name for name in names if not name.startswith("world=")} | {"world=*"}
        key = (size, tuple(sorted(names)), kind)
        if key not in self._runs:
            seconds = [run.seconds for run in self._runs.values()][-1:]
            time = "".join(f" (run {len(self._runs) + 1}, about {duration(last)})" for last in seconds)
            self.progress(_in_words(*key) + time)
            self._runs[key] = self._recorded(*key)
        return self._runs[key]

    def reference(self, removed: Removed, kind: str = "") -> Run:
        return self.run(self.first, removed, kind)

    def is_stable(self, size: int | None, removed: Removed) -> bool:
        """Whether a second run of this size gives the same numbers, or both fail."""
        run, again = self.run(size, removed), self.run(size, removed, "again")
        if run.code or again.code:
            return bool(run.code and again.code)
        # compare with the run itself: ranks that differ in it also differ in the second run
        return follow(run, again).difference == follow(run, run).difference

    def begin_later(self) -> bool:
        """If a third run equals the second, compare with the second from here on: only the first run found no files."""
        second, third = self.reference((), "again"), self.reference((), "third")
        is_shorter = second.longest < self.reference(()).longest
        if is_shorter or second.code or third.code or follow(second, third).difference:
            return False
        self._runs |= {(self.first, (), ""): second, (self.first, (), "again"): third}
        return True

    def compared(self, size: int | None, removed: Removed) -> Compared:
        """Compare the run of this size with the first run."""
        first, run = self.reference(removed), self.run(size, removed)
        if run.code or first.code:
            return Compared(first, run, Difference("failed", None, None, failure_of(run)[1]))
        if run is first:
            return Compared(first, run)
        result = follow(first, run)
        if result.kind in SOFT and self.is_stable(self.first, removed):
            result = follow(first, run, self.reference(removed, "nudged"))
        return result

    def _recorded(self, size: int | None, removed: Removed, kind: str) -> Run:
        record = self.directory / str(len(self._runs)) / "record"
        record.mkdir(parents=True)
        first = next(iter(self._runs.values()), None)
        # Ranks that have lost each other wait this long; the first run's time shows what is needed.
        timeout_s = max(_LEAST_TIMEOUT_S, _TIMES_THE_FIRST * first.seconds) if first else None
        options = {
            "without": [name for name in removed if name not in _VARIABLES],
            "steps": self.steps,
            "timeout_s": timeout_s,
            "began": self._began,
            "nudge": kind == "nudged",
            "untouched": size is None,
            "draws": self.first is None,
        }
        env = dict(_ENVIRONMENT)
        for name in removed:
            env |= _VARIABLES.get(name, {}) if size or name != "draws" else {}
        script, through = self.script if size else self.untouched, ["samestep.verify.record", str(record)]
        trial = Trial(script, size or 1, record.parent, env, through=[*through, json.dumps(options)])
        return read_record(record, trial.size, self.start(trial))


def _in_words(size: int | None, removed: Removed, kind: str) -> str:
    """The description of a run for the progress line."""
    what = "the untouched script" if size is None else counted(size, "process")
    parts = [name.partition("=") for name in removed]
    without = [_WORDS[name].format(value.replace("*", "every line")) for name, _, value in parts]
    return ", ".join([what + _KINDS.get(kind, ""), *without])
