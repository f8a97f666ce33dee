"""Runs a script with several numbers of processes, and reports whether all take the same step, or why not."""

import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from samestep.errors import UsageError
from samestep.measure.trial import Result, Trial
from samestep.verify.causes import Cause, failure_of
from samestep.verify.experiments import Experiments
from samestep.verify.printed import Printed, compare_printed
from samestep.verify.read import Run
from samestep.verify.remedies import CARELESS, EXACT, UNSTABLE
from samestep.verify.search import Search, draws_of
from samestep.verify.trajectory import Compared

_ORDER = ("bits", "rounding", "with_same", "augmented", "printed", "unfinished", "different", "failed")
_WRONG = ("printed", "unfinished", "different", "failed")
_IN_CHILDREN = (
    "{} trains in processes that it starts itself ({}), which verify does not see; call the training in the script "
    "itself: samestep run starts the processes"
)
_BY_HAND = (
    "{} calls backward() and no optimizer of torch steps: it updates the weights by hand, and verify compares the "
    "steps of torch's optimizers; use one, such as torch.optim.SGD"
)
_GOES_ON = (
    "{} begins from {}, which its last run left, so that each run goes on from the one before; let it write into a new "
    "directory, remove the file before it starts, or use samestep.Checkpoint, which verify keeps apart"
)
_ONLY_ONCE = (
    "{} fails when it is started again ({}), as verify has to; let it accept what its last run left, as "
    "os.makedirs(path, exist_ok=True) does"
)
_LEFT = "the first run leaves a file that later ones read, and trains other numbers than they do: {}"
_AUGMENTED = "same to rounding with equal augmentation; without it, each script draws its own for its samples"
_NO_CAUSES = "--no-causes left out"
# by exit code
_INTERRUPTED = {130: "Ctrl-C came before", 143: "SIGTERM came before", 129: "SIGHUP came before"}
_CUT_SHORT = (
    "{} left on rank {} of {} before its end could be recorded, as os._exit and os.exec do; end it with sys.exit or "
    "at its last line"
)


class SerialScript(UsageError):
    """The script trains, but no line of it shares the work among processes."""


@dataclass(frozen=True)
class Report:
    """The result of `samestep verify`."""

    outcomes: Mapping[int | None, Compared]  # by the number of processes; None: the untouched script
    wants_bits: bool
    causes: Sequence[Cause] = ()
    printed: Sequence[Printed] = ()
    draws: str = ""  # what differs without --same, because each rank draws its own numbers
    is_augmented: bool = False  # whether the scripts only agree if each sample draws equally
    of_first: Sequence[str] = ()  # remarks on the first run
    said: Sequence[str] = ()  # what the run at the last size says of the script, and the first does not
    unfinished: str = ""  # what kept the search for causes, and the comparison of printed lines, from its end

    @property
    def worst(self) -> Compared:
        """The outcome with the worst verdict; of several, the first."""
        return max(self.outcomes.values(), key=lambda outcome: _ORDER.index(outcome.verdict))

    @property
    def step(self) -> str:
        if self.is_augmented:
            return "augmented"
        verdict = "with_same" if self.draws else self.worst.verdict
        return "unfinished" if self.unfinished and verdict == "different" else verdict

    @property
    def verdict(self) -> str:
        return "printed" if self.is_same_step and self.findings else self.step

    @property
    def is_same_step(self) -> bool:
        is_close = self.step in ("rounding", "with_same", "augmented")
        return self.step == "bits" or (is_close and not self.wants_bits)

    @property
    def exit_code(self) -> int:
        for code, came in _INTERRUPTED.items():
            if self.unfinished == came:
                return code
        return 1 if not self.is_same_step else 3 if self.findings else 0

    @property
    def harmful(self) -> list[Cause]:
        return [cause for cause in self.causes if not cause.is_harmless]

    @property
    def findings(self) -> list[Printed]:
        return [line for line in self.printed if not line.is_remark]

    @property
    def remarks(self) -> list[str]:
        """Findings that are no mistake, or that the serial script has too."""
        return [*(str(line) for line in self.printed if line.is_remark), *self.of_first]

    @property
    def lines(self) -> list[str]:
        """The report: remarks, further causes, findings in the output, rounding; the last line is the verdict."""
        return [
            *(f"remark: {remark}" for remark in self.remarks),
            *(f"said: {text}" for text in self.said if self.verdict in _WRONG),
            *(f"also: {cause.sentence}" for cause in self.harmful[1:]),
            *(f"no mistake: {cause.sentence}" for cause in self.causes if cause.is_harmless),
            *(f"printed: {line}" for line in self.findings),
            *[f"rounding: {outcome.note}" for outcome in self.outcomes.values() if outcome.note][:1],
            str(self),
        ]

    def __str__(self) -> str:
        is_conversion = self.is_same_step and None in self.outcomes
        text = "your conversion takes the serial script's step: " * is_conversion + self._step_verdict()
        has_default = self.step != "with_same" and max(size or 1 for size in self.outcomes) > 1
        if is_conversion and has_default and not self.unfinished:
            own = f"without --same, {self.draws} are each rank's own" if self.draws else "also without --same"
            text += f"; {own}"
        if self.unfinished and self.is_same_step:
            default = "the run without --same and " * (is_conversion and has_default)
            return f"{text}; {self.unfinished} {default}the comparison of what it prints"
        if self.verdict == "printed":
            return f"what it prints is not the same, see above; {text}"
        is_cut = self.is_same_step and self.worst.first.fact("cut")
        return f"{text}; what it prints after the last of these steps was not compared" if is_cut else text

    def _step_verdict(self) -> str:
        worst = self.worst
        cause = f"; {self.harmful[0].sentence}" if self.harmful else ""
        match self.step:
            case "bits":
                return "same to the bit"
            case "with_same":
                return f"same to rounding with --same; without it, {self.draws} are each rank's own"
            case "augmented":
                return _AUGMENTED
            case "failed" if worst is self.outcomes.get(None):
                return "the untouched script failed"
            case "failed":
                return f"the script failed at {worst.run.processes}{cause}"
            case "unfinished":
                runs = f"{self.unfinished} the runs that tell whether it is a mistake, and which"
                return f"not finished: the runs differ: {worst.difference}{cause}; {runs}"
            case "different":
                is_earlier = worst.first.is_untouched and worst.run.size == 1
                return f"different{' already at one process' * is_earlier}: {worst.difference}{cause}"
        largest = max(outcome.distance for outcome in self.outcomes.values())
        noise = "the first run from changed last bits differs as much in each tensor"
        rounding = f"same to rounding: {f'{largest:.1e}' if largest else noise}"
        return f"{rounding}, not the same bits: {worst.bits}; {EXACT}" if self.wants_bits else rounding


def verify(
    script: Sequence[str],
    sizes: Sequence[int],
    *,
    exact: bool = False,
    steps: int | None = None,
    against: Sequence[str] = (),
    causes: bool = True,
    run: Callable[[Trial], Result] = Trial.run,
    progress: Callable[[str], None] = lambda run: None,
    differing: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Run `script` at each size; compare with the first size, or with the untouched script `against`. `differing` gets
    the report of these runs before further runs look for `causes`; an interrupt ends them."""
    directory = Path(tempfile.mkdtemp(prefix="samestep-verify-"))
    all_sizes = [None, *sizes] if against else sizes
    experiments = Experiments(script, against, all_sizes[0], steps, directory, run, progress)
    report: Report | None = None
    try:
        report = _report(experiments, all_sizes, exact)
        if report.unfinished and causes:
            if report.worst.difference:
                differing(report)
            search = Search(experiments)
            try:
                report = _explained(experiments, search, report)
            except (KeyboardInterrupt, SystemExit) as ended:
                code = ended.code if isinstance(ended, SystemExit) else 128 + signal.SIGINT
                if code not in _INTERRUPTED:
                    raise
                report = replace(report, causes=search.causes, unfinished=_INTERRUPTED[code])
    finally:
        # The report of a failure names its logs, so they are kept.
        if report is None or report.step != "failed":
            shutil.rmtree(directory)
    return report


def _report(experiments: Experiments, sizes: Sequence[int | None], exact: bool) -> Report:
    """The report of the planned runs alone."""
    search = Search(experiments)
    outcomes: dict[int | None, Compared] = {}
    for size in sizes:
        outcomes[size] = search.without(size)
        if not outcomes[size].run.code:
            _check(experiments, outcomes[size].run, size)
        elif size in (sizes[0], 1):
            return Report(outcomes, exact)
    return Report(outcomes, exact, unfinished=_NO_CAUSES)


def _explained(experiments: Experiments, search: Search, report: Report) -> Report:
    """The report with the causes of differences, and with what is printed differently."""
    outcomes, sizes = dict(report.outcomes), [*report.outcomes]
    remarks = _of_earlier_runs(experiments, outcomes)
    if remarks:
        outcomes = {size: search.without(size) for size in sizes}
    remaining = outcomes | {size: search.explain(size) for size in sizes[1:] if size}
    differing = [size for size in sizes if size and outcomes[size].difference]
    last = (differing or [size for size in sizes if size])[-1]
    draws, is_augmented = "", False
    if any(not cause.is_harmless for cause in search.causes):
        search.causes += search.harmless(last)
    elif not any(outcome.difference for outcome in remaining.values()):
        is_augmented = None in outcomes and bool(search.causes)
        draws = _draws(search, outcomes, last, [size for size in differing if not remaining[size].note])
    for size, outcome in outcomes.items():
        # A difference that only comes from rounding, which the training amplifies, does not count.
        note = remaining[size].note
        difference = None if note and not search.causes else outcome.difference
        outcomes[size] = replace(outcome, note=note, difference=difference)
    printed, noise = compare_printed(experiments, search.removed, last)
    if noise and not outcomes[last].note:
        outcomes[last] = replace(outcomes[last], note=noise)
    first = outcomes[sizes[0]].run
    if line := first.fact("careless") or first.fact("careless_last"):
        remarks.append(CARELESS.format(line))
    if first.size == 1:
        remarks += (first.fact("said") or {}).values()
    said = _said(experiments, last)
    return Report(outcomes, report.wants_bits, search.causes, printed, draws, is_augmented, remarks, said)


def _said(experiments: Experiments, size: int) -> list[str]:
    """The remarks of a planned run that the first run does not have."""
    planned = ("draws",) if experiments.first is None else ()
    first = experiments.reference(planned).fact("said") or {}
    other = experiments.run(size, planned).fact("said") or {}
    return [text for what, text in other.items() if what not in first]


def _draws(search: Search, outcomes: dict[int | None, Compared], last: int, differing: Sequence[int]) -> str:
    """In words, what differs without --same; with an untouched script all runs had it, so run once without it."""
    if None not in outcomes:
        return draws_of(outcomes[last]) if search.causes or differing else ""
    by_default = search.by_default(last)
    if by_default.kind == "failed":
        outcomes[last] = by_default
        return ""
    return draws_of(by_default) if by_default.difference else ""


def _of_earlier_runs(experiments: Experiments, outcomes: Mapping[int | None, Compared]) -> list[str]:
    """Refuse a script that does something else at each start. If only the first start is different, return a remark,
    and compare with a later start."""
    differs = any(outcome.difference for outcome in outcomes.values())
    if not differs or experiments.is_stable(experiments.first, ()):
        return []
    name = _name(experiments.script)
    if (second := experiments.reference((), "again")).code:
        raise UsageError(_ONLY_ONCE.format(name, failure_of(second)[1]))
    left = second.fact("left")
    if left and experiments.begin_later():
        return [_LEFT.format(left)]
    if left and not experiments.is_stable(experiments.first, tuple(UNSTABLE)):
        raise UsageError(_GOES_ON.format(name, left))
    return []


def _name(script: Sequence[str]) -> str:
    return script[script[0] == "-m"]


def _check(experiments: Experiments, run: Run, size: int | None) -> None:
    """Refuse a run that was not recorded to its end, does not train, or does not share its work."""
    name = _name(experiments.script if size else experiments.untouched)
    if not all(run.facts):
        # A process that ends without Python's own exit writes no facts, and perhaps not all of its steps.
        raise UsageError(_CUT_SHORT.format(name, run.facts.index({}), run.size))
    if size and run.fact("serial") and run.fact("optimizers"):
        raise SerialScript(f"{name} does not use samestep; change these lines, then verify it again")
    if size == experiments.first and not run.longest:
        if line := run.fact("children"):
            raise UsageError(_IN_CHILDREN.format(name, line))
        if run.fact("backwards"):
            raise UsageError(_BY_HAND.format(name))
        raise UsageError(f"{name} took no optimizer step; give it arguments with which it trains")
