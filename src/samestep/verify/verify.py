"""Runs a script at several numbers of processes and says whether each takes the same step, and if not, why."""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from samestep.errors import UsageError
from samestep.measure.trial import Result, Trial
from samestep.text import counted
from samestep.verify.causes import careless_evaluation, draws_of, explain_rounding
from samestep.verify.printed import Printed, compare_printed
from samestep.verify.read import Run, read_record
from samestep.verify.search import Cause, Found, Removed, Search
from samestep.verify.trajectory import Difference

Verdict = Literal["bits", "rounding", "with_same", "printed", "different", "failed"]
_ORDER: tuple[Verdict, ...] = ("bits", "rounding", "with_same", "printed", "different", "failed")
_LEAST_TIMEOUT_S = 20.0
_TIMES_THE_FIRST = 5.0
# The record tells replicas that come apart, and goes on to the line that does it; the comparison would end the run.
_RECORDED_INSTEAD = {"SAMESTEP_CHECK_EVERY": "0"}
_WORDS = {
    "draws": "with --same",
    "seeds": "with seeds set",
    "world": "with its rank hidden at {}",
    "settings": "with the first run's settings",
    "sum": 'with loss="sum"',
    "counts": "with each loss weighed by its count",
    "scale": "with gradients divided by {}",
    "shares": "with the whole batch on every rank",
    "no_sync": "without no_sync",
    "loaders": "with samestep.loader for each DataLoader",
    "statistics": "without evaluation in training mode",
}


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
    causes: tuple[Cause, ...] = ()
    printed: tuple[Printed, ...] = ()
    draws: str = ""  # what of the runs differs only because each rank draws its own
    careless: tuple[str, ...] = ()

    @property
    def step(self) -> Verdict:
        """The verdict on the training step."""
        return "with_same" if self.draws else self.worst.verdict

    @property
    def findings(self) -> list[Printed]:
        return [one for one in self.printed if not one.is_remark]

    @property
    def remarks(self) -> list[str]:
        """What is no mistake, or is one of the serial script too."""
        return [*(str(one) for one in self.printed if one.is_remark), *self.careless]

    @property
    def verdict(self) -> Verdict:
        return "printed" if self.is_same_step and self.findings else self.step

    @property
    def is_same_step(self) -> bool:
        return self.step == "bits" or (self.step in ("rounding", "with_same") and not self.wants_bits)

    @property
    def is_same(self) -> bool:
        return self.is_same_step and not self.findings

    @property
    def exit_code(self) -> int:
        return 0 if self.is_same else 3 if self.is_same_step else 1

    @property
    def worst(self) -> Outcome:
        """The first outcome with the worst verdict."""
        return max(self.outcomes, key=lambda outcome: _ORDER.index(outcome.verdict))

    @property
    def lines(self) -> list[str]:
        """What was found, harmful causes first; the last line is the verdict on the step, then on what is printed."""
        harmful = [cause for cause in self.causes if not cause.is_harmless]
        return [
            *(f"remark: {one}" for one in self.remarks),
            *(f"also: {cause.sentence}" for cause in harmful[1:]),
            *(f"no mistake: {cause.sentence}" for cause in self.causes if cause.is_harmless),
            *(f"printed: {one}" for one in self.findings),
            str(self),
        ]

    def __str__(self) -> str:
        is_conversion = self.is_same_step and self.outcomes[0].size is None
        said = "your conversion takes the serial script's step: " * is_conversion + self._found()
        return f"{said}; what it prints is not the same, see above" if self.verdict == "printed" else said

    def _found(self) -> str:
        worst = self.worst
        match self.step:
            case "bits":
                return "same to the bit"
            case "with_same":
                return f"same to rounding with --same; without it, {self.draws} are each rank's own"
            case "failed" if worst.size is None:
                return "the untouched script failed"
            case "failed":
                return f"the script failed at {counted(worst.size or 0, 'process')}" + (
                    f"; {worst.cause}" if worst.cause else ""
                )
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
    run: Callable[[Trial], Result] = Trial.run,
    progress: Callable[[str], None] = lambda said: None,
) -> Report:
    """Run `script` (a file, or `-m` and a module, and its arguments) at each size; compare with the first size.

    With `against`, the untouched script, compare with that, and draw its random numbers at every size. Without it
    runs that differ are run again in that way, to tell a mistake from what each rank draws for itself. `progress` is
    told of each run that begins.
    """
    directory = Path(tempfile.mkdtemp(prefix="samestep-verify-"))
    report: Report | None = None
    try:
        runs = _Runs(script, against, steps, directory, run, progress)
        report = _report(runs, [None, *sizes] if against else sizes, exact)
    finally:
        # The report of a failure names its logs, so they are kept.
        if report is None or report.step != "failed":
            shutil.rmtree(directory)
    return report


def _report(runs: "_Runs", sizes: Sequence[int | None], exact: bool) -> Report:
    search = Search(runs.record, sizes, ("draws",) if sizes[0] is None else ())
    found: dict[int | None, Found] = {}
    for size in sizes:
        found[size] = search.compared(size, search.removed)
        run = found[size].run
        if not run.code:
            runs.check(run, size, is_first=size == sizes[0])
        elif size == sizes[0]:
            return Report((_outcome(found[size], size),), exact)
    left = found
    for size in sizes[1:]:
        if search.causes or search.removed:
            left = {**left, size: search.compared(size, search.removed)}
        elif left[size].difference is None:
            continue
        if left[size].difference is not None and size is not None:
            left = {**left, size: search.find_all(left[size], size)}
    last = next((size for size in reversed(sizes) if found[size].difference), sizes[-1])
    draws = ""
    notes = {size: one.note for size, one in left.items()}
    if not search.causes and all(one.difference is None for one in left.values()):
        needed = any(one.difference is not None and not notes[size] for size, one in found.items())
        draws = draws_of(found[last].run) if needed else ""
    elif search.causes and (harmless := search.harmless(last or 1)):
        search.causes.append(harmless)
    printed = compare_printed(search, last) if last is not None else []
    outcomes = [
        replace(_outcome(one, size), cause=_first_cause(search, one), note=notes[size])
        if one.difference and not (notes[size] and not search.causes)
        else replace(_outcome(replace(one, difference=None), size), note=notes[size])
        for size, one in found.items()
    ]
    careless = found[sizes[0]].run.fact("careless")
    is_named = any(cause.removed == "statistics" for cause in search.causes)
    remarks = (careless_evaluation(careless),) if careless and not is_named else ()
    return Report(tuple(outcomes), exact, tuple(search.causes), tuple(printed), draws, remarks)


def _first_cause(search: Search, found: Found) -> str | None:
    return next((cause.sentence for cause in search.causes if not cause.is_harmless), None)


def _outcome(found: Found, size: int | None) -> Outcome:
    run = found.run
    samples = sum(map(run.num_samples, range(run.length)))
    loss = run.losses[-1] if run.losses else None
    outcome = Outcome(size, run.length, samples, loss, "bits")
    if run.code:
        return replace(outcome, loss=None, verdict="failed", difference=None, failure=run.failure)
    if found.difference:
        return replace(
            outcome, verdict="different", difference=found.difference, distance=found.difference.distance
        )
    if found.path.bits:
        cause = explain_rounding(run)
        return replace(
            outcome, verdict="rounding", difference=found.path.bits, distance=found.path.largest, cause=cause
        )
    return outcome


@dataclass(frozen=True)
class _Runs:
    """Runs a script, or the untouched one, and keeps what was recorded."""

    script: Sequence[str]
    untouched: Sequence[str]
    steps: int | None
    directory: Path
    run: Callable[[Trial], Result]
    progress: Callable[[str], None]
    kept: dict[tuple[int | None, Removed, str], Run] = field(default_factory=dict)

    def record(self, size: int | None, removed: Removed, kind: str = "") -> Run:
        """A run at this size, without some causes."""
        key = (size, removed, kind)
        if key not in self.kept:
            self.progress(_in_words(size, removed, kind))
            self.kept[key] = self._recorded(*key)
        return self.kept[key]

    def _recorded(self, size: int | None, removed: Removed, kind: str) -> Run:
        record = self.directory / str(len(self.kept)) / "record"
        record.mkdir(parents=True)
        options = ["--steps", str(self.steps)] if self.steps else []
        if self.kept:
            # Ranks that lost each other wait for this long; the first run tells how long all of it takes.
            first = next(iter(self.kept.values()))
            options += ["--timeout", str(max(_LEAST_TIMEOUT_S, _TIMES_THE_FIRST * first.seconds))]
        options += ["--nudge"] * (kind == "nudged") + ["--untouched"] * (size is None)
        for name in removed:
            options += ["--without", name] if name != "draws" else []
        trial = Trial(
            self.script if size else self.untouched,
            size or 1,
            record.parent,
            _RECORDED_INSTEAD | ({"SAMESTEP_SAME": "1"} if "draws" in removed and size else {}),
            through=["samestep.verify.record", str(record), *options, "--"],
        )
        return read_record(record, trial.size, self.run(trial))

    def check(self, run: Run, size: int | None, is_first: bool) -> None:
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
            raise UsageError(_without_steps(name, run))


def _without_steps(name: str, run: Run) -> str:
    if line := run.fact("children"):
        return (
            f"{name} trains in processes that it starts itself ({line}), which verify does not see; call the training "
            "in the script itself: samestep run starts the processes"
        )
    if run.fact("backwards"):
        return (
            f"{name} calls backward() and no optimizer of torch steps: it updates the weights by hand, and verify "
            "compares the steps of torch's optimizers; use one, such as torch.optim.SGD"
        )
    return f"{name} took no optimizer step; give it arguments with which it trains"


def _in_words(size: int | None, removed: Removed, kind: str) -> str:
    """A run as a line of progress."""
    what = "the untouched script" if size is None else counted(size, "process")
    how = {"again": ", once more", "nudged": ", from changed last bits"}.get(kind, "")
    parts = [name.partition("=") for name in removed]
    without = [_WORDS[name].format(value.replace("*", "every line")) for name, _, value in parts]
    return f"{what}{how}{', ' * bool(without)}{', '.join(without)}"
