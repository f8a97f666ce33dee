"""Runs a script at several numbers of processes and says whether each takes the same step, and if not, why."""

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from samestep.compare.compare import compare
from samestep.compare.weights import read
from samestep.errors import CheckpointError, UsageError
from samestep.measure.trial import Trial
from samestep.text import counted
from samestep.verify.causes import explain, explain_rounding
from samestep.verify.printed import printed_otherwise
from samestep.verify.read import Run, read_record
from samestep.verify.trajectory import Difference, Trajectory, first_fact, follow

Verdict = Literal["bits", "rounding", "with_same", "different", "failed"]
_ORDER: tuple[Verdict, ...] = ("bits", "rounding", "with_same", "different", "failed")
_END = 1e-3
_END_JUMP = 100.0
_SOFT = {"weights", "buffer", "loss", "grad"}
_OF_DRAWS = _SOFT | {"end", "printed"}


class SerialScript(UsageError):
    """The script trains, and nothing in it shares the work."""


@dataclass(frozen=True)
class Outcome:
    """One run, against the first."""

    size: int | None  # None: the untouched script
    steps: int
    samples: int
    loss: float | None
    verdict: Verdict
    difference: Difference | None = None
    distance: float = 0.0
    cause: str | None = None
    note: str | None = None
    failure: str | None = None


@dataclass(frozen=True)
class Report:
    """What `samestep verify` found."""

    outcomes: tuple[Outcome, ...]
    wants_bits: bool
    needs_same: bool = False  # the runs differ by nothing that --same does not make equal

    @property
    def verdict(self) -> Verdict:
        return "with_same" if self.needs_same else self.worst.verdict

    @property
    def is_same(self) -> bool:
        return self.verdict == "bits" or (self.verdict in ("rounding", "with_same") and not self.wants_bits)

    @property
    def worst(self) -> Outcome:
        """The first outcome with the worst verdict."""
        return max(self.outcomes, key=lambda outcome: _ORDER.index(outcome.verdict))

    def __str__(self) -> str:
        is_conversion = self.is_same and self.outcomes[0].size is None
        return "your conversion takes the serial script's step: " * is_conversion + self._found()

    def _found(self) -> str:
        worst = self.worst
        match self.verdict:
            case "bits":
                return "same to the bit"
            case "with_same":
                return (
                    "same to rounding with --same; without it, dropout masks and BatchNorm statistics are each "
                    "rank's own"
                )
            case "failed" if worst.size is None:
                return "the untouched script failed"
            case "failed":
                return f"the script failed at {counted(worst.size or 0, 'process')}"
            case "different":
                return f"different: {worst.difference}" + (f"; {worst.cause}" if worst.cause else "")
        rounding = f"same to rounding: {max(outcome.distance for outcome in self.outcomes):.1e}"
        if notes := [outcome.note for outcome in self.outcomes if outcome.note]:
            rounding += f"; {notes[0]}"
        if not self.wants_bits:
            return rounding
        remedy = worst.cause or "use steps and replicate(exact=True) for the same bits"
        return f"{rounding}, not the same bits: {worst.difference}; {remedy}"


def verify(
    script: Sequence[str],
    sizes: Sequence[int],
    *,
    exact: bool = False,
    steps: int | None = None,
    against: Sequence[str] = (),
) -> Report:
    """Run `script` (a file, or `-m` and a module, and its arguments) at each size; compare with the first size.

    With `against`, the untouched script, compare with that, and draw its random numbers at every size. Without it
    runs that differ are run again in that way, to tell a mistake from what each rank draws for itself.
    """
    directory = Path(tempfile.mkdtemp(prefix="samestep-verify-"))
    report: Report | None = None
    try:
        runs = _Runs(script, against, steps, directory, same=bool(against))
        report = Report(tuple(runs.outcomes([None, *sizes] if against else sizes)), exact)
        found = report.worst.difference
        if report.verdict == "different" and not against and found and found.kind in _OF_DRAWS:
            again = Report(tuple(replace(runs, same=True).outcomes(sizes)), exact)
            if again.verdict in ("bits", "rounding"):
                report = replace(report, needs_same=True)
            elif again.verdict == "different" and again.worst.cause:
                report = again
    finally:
        # The report of a failure names its logs, so they are kept.
        if report is None or report.verdict != "failed":
            shutil.rmtree(directory)
    return report


@dataclass(frozen=True)
class _Runs:
    """Runs a script, or the untouched one; with `same` all ranks draw the serial script's numbers."""

    script: Sequence[str]
    untouched: Sequence[str]
    steps: int | None
    directory: Path
    same: bool = False

    def outcomes(self, sizes: Sequence[int | None]) -> Iterator[Outcome]:
        """Of the run at each size (None: the untouched script) against the first; one that fails is the last."""
        first: Run | None = None

        @cache
        def again(nudge: bool = False) -> Run:
            return self._record(sizes[0], "nudged" if nudge else "again", nudge)

        for size in sizes:
            run = self._record(size, str(size))
            if run.code:
                yield Outcome(size, run.length, 0, None, "failed", failure=run.failure)
                return
            self._check(run, size, is_first=first is None)
            first = first or run
            yield replace(_outcome(first, run, again), size=size)

    def _record(self, size: int | None, name: str, nudge: bool = False) -> Run:
        record = self.directory / ("same" if self.same else "default") / name / "record"
        record.mkdir(parents=True)
        limit = ["--steps", str(self.steps)] if self.steps else []
        options = [*limit, *["--nudge"] * nudge, *["--untouched"] * (size is None)]
        trial = Trial(
            self.script if size else self.untouched,
            size or 1,
            record.parent,
            {"SAMESTEP_SAME": "1"} if self.same and size else {},
            through=["samestep.verify.record", str(record), *options, "--"],
        )
        return read_record(record, trial.size, trial.run())

    def _check(self, run: Run, size: int | None, is_first: bool) -> None:
        """Refuse what was not recorded to its end, does not train, or does not share its work."""
        script = self.script if size else self.untouched
        name = script[script[0] == "-m"]
        if not all(run.facts):
            # A process that ends without Python's own exit writes no facts, and perhaps not all of its steps.
            raise UsageError(
                f"{name} left on rank {run.facts.index({})} of {run.size} before its end could be recorded, as "
                "os._exit and os.exec do; end it with sys.exit or at its last line"
            )
        if size and run.fact("serial") and run.fact("optimizers"):
            raise SerialScript(f"{name} is serial; change these lines, then verify it again")
        if is_first and not run.longest:
            raise UsageError(f"{name} took no optimizer step; give it arguments with which it trains")


def _outcome(first: Run, run: Run, again: Callable[..., Run]) -> Outcome:
    path = follow(first, run)
    if path.beyond is None:
        path = _with_the_end(first, run, path)
    found, note = path.beyond, None
    cause = explain(first, run, found, again) if found else None
    if found is None and run is not first:
        found = printed_otherwise(first, run, path.bits is None, again)
    elif found and cause is None and (note := _amplified(first, found, again)):
        found = first_fact(first, run)
    verdict: Verdict = "bits"
    distance = 0.0
    if found:
        verdict, distance, note = "different", found.distance, None
        cause = cause or explain(first, run, found, again)
    elif path.bits:
        verdict, distance, found, cause = "rounding", path.largest, path.bits, explain_rounding(run)
    samples = sum(map(run.num_samples, range(run.length)))
    loss = run.losses[-1] if run.losses else None
    return Outcome(run.size, run.length, samples, loss, verdict, found, distance, cause, note)


def _amplified(first: Run, found: Difference, again: Callable[..., Run]) -> str | None:
    """Says so where the training amplifies rounding this far at the first size too, from changed last bits."""
    if found.kind not in _SOFT or not found.step:
        return None
    nudged = follow(first, again(nudge=True)).beyond
    if nudged is None or nudged.kind not in _SOFT or not nudged.step:
        return None
    return (
        f"from step {found.step + 1} on the training itself amplifies rounding, as it does from step "
        f"{nudged.step + 1} on where {first.processes} start{'s' * (first.size == 1)} from changed last bits"
    )


def _with_the_end(first: Run, run: Run, path: Trajectory) -> Trajectory:
    """The same, with the differences between the states at the end of the script."""
    bits, largest = path.bits, path.largest
    for found in _at_the_end(first, run):
        bits = bits or found
        if found.distance > max(_END, _END_JUMP * largest):
            return Trajectory(bits, found, largest)
    return Trajectory(bits, None, largest)


def _at_the_end(first: Run, run: Run) -> Iterator[Difference]:
    for rank, facts in enumerate(run.facts):
        for name, digest in facts["end"].items():
            if digest != run.facts[0]["end"].get(name, digest):
                yield Difference("apart", run.length, rank, name, math.inf)
    try:
        states = read(first.state).state, read(run.state).state
    except CheckpointError as error:
        raise UsageError(f"the state at the end cannot be compared ({error})") from error
    for found in compare(*states, names=(first.processes, run.processes)).differences:
        # An optimizer's averages may be noise about zero; the gradients that it averages were compared.
        is_noise = found.name.startswith("optimizer.") and found.kind == "value" and not found.exact
        distance = 0.0 if is_noise else found.relative
        yield Difference("end", None, None, f"{found.name} at the end", distance)
