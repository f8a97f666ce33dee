"""Runs a script at several numbers of processes and says whether each takes the same step, and if not, why."""

import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

from samestep.compare.compare import compare
from samestep.compare.weights import read
from samestep.errors import CheckpointError, UsageError
from samestep.start.script import Script, run_script
from samestep.verify.causes import explain, explain_printed, explain_rounding
from samestep.verify.printed import is_steady, printed_otherwise
from samestep.verify.recorded import Run, read_run
from samestep.verify.trajectory import Difference, Trajectory, first_fact, follow

Verdict = Literal["bits", "rounding", "different", "failed"]
_END = 1e-3
_END_JUMP = 100.0
_SOFT = {"weights", "buffer", "loss", "grad"}


class SerialScript(UsageError):
    """The script trained, and nothing in it shares the work."""


@dataclass(frozen=True)
class Outcome:
    """One number of processes, against the first."""

    size: int
    steps: int
    samples: int
    loss: float | None
    verdict: Verdict
    difference: Difference | None = None
    distance: float = 0.0
    cause: str | None = None
    note: str | None = None


@dataclass(frozen=True)
class Report:
    """What `samestep verify` found."""

    outcomes: tuple[Outcome, ...]
    wants_bits: bool

    @property
    def verdict(self) -> Verdict:
        order: tuple[Verdict, ...] = ("bits", "rounding", "different", "failed")
        return max((one.verdict for one in self.outcomes), key=order.index)

    @property
    def is_same(self) -> bool:
        return self.verdict == "bits" or (self.verdict == "rounding" and not self.wants_bits)

    @property
    def cause(self) -> str | None:
        return self._telling.cause

    @property
    def _telling(self) -> Outcome:
        return next(one for one in self.outcomes if one.verdict == self.verdict)

    def __str__(self) -> str:
        one = self._telling
        match self.verdict:
            case "bits":
                return "same to the bit"
            case "failed":
                return f"the script failed at {_processes(one.size)}"
            case "different":
                return f"different: {one.difference}" + (f"; {one.cause}" if one.cause else "")
        rounding = f"same to rounding: {max(one.distance for one in self.outcomes):.1e}"
        if notes := [one.note for one in self.outcomes if one.note]:
            rounding += f"; {notes[0]}"
        if not self.wants_bits:
            return rounding
        what = one.cause or "use steps and replicate(exact=True) for the same bits"
        return f"{rounding}, not the same bits: {one.difference}; {what}"


def verify(
    script: Sequence[str], sizes: Sequence[int], *, exact: bool = False, steps: int | None = None
) -> Report:
    """Run `script` (a file, or `-m` and a module, and its arguments) at each size; the first is compared with."""
    directory = Path(tempfile.mkdtemp(prefix="samestep-verify-"))
    report: Report | None = None
    try:
        report = Report(tuple(_outcomes(script, sizes, steps, directory)), exact)
    finally:
        # Of a script that failed the logs are kept: what was printed about its end says where they lie.
        if report is None or report.verdict != "failed":
            shutil.rmtree(directory)
    return report


def _outcomes(
    script: Sequence[str], sizes: Sequence[int], steps: int | None, directory: Path
) -> Iterator[Outcome]:
    first: Run | None = None

    @cache
    def again(nudge: bool = False) -> Run:
        return _run(script, sizes[0], directory / ("nudged" if nudge else "again"), steps, nudge)

    for size in sizes:
        run = _run(script, size, directory / str(size), steps)
        if run.code:
            yield Outcome(size, run.length, 0, None, "failed")
            return
        _check_is_whole(run, script)
        if first is None:
            _check_is_parallel(run, script)
            first = run
        yield _outcome(first, run, again)


def _run(script: Sequence[str], size: int, directory: Path, steps: int | None, nudge: bool = False) -> Run:
    record = directory / "record"
    record.mkdir(parents=True)
    told = {
        "SAMESTEP_RECORD": str(record),
        "SAMESTEP_RECORD_STEPS": str(steps or ""),
        "SAMESTEP_RECORD_NUDGE": "1" if nudge else "",
    }
    code = run_script(
        Script(
            name=_name(script),
            command=[sys.executable, "-m", "samestep.verify.watch", *script],
            size=size,
            shown=frozenset(),
            run_dir=str(directory / "runs"),
            env=told,
        )
    )
    (run,) = (directory / "runs").iterdir()
    return read_run(record, run, size, code)


def _name(script: Sequence[str]) -> str:
    return script[1] if script[0] == "-m" else script[0]


def _check_is_whole(run: Run, script: Sequence[str]) -> None:
    """A process that leaves without Python's own end writes no facts, and maybe not all of its steps."""
    for rank, facts in enumerate(run.facts):
        if not facts:
            raise UsageError(
                f"{_name(script)} left on rank {rank} of {run.size} before its end could be recorded, as os._exit "
                "and os.exec do; let it end by itself, or with sys.exit"
            )


def _check_is_parallel(run: Run, script: Sequence[str]) -> None:
    name = _name(script)
    if run.fact("serial"):
        if not run.fact("optimizers"):
            raise UsageError(f"{name} took no optimizer step; give it arguments with which it trains")
        raise SerialScript(f"{name} is serial; change these lines, then verify it again")
    if not run.longest:
        raise UsageError(f"{name} took no optimizer step; give it arguments with which it trains")


def _outcome(first: Run, run: Run, again: Callable[..., Run]) -> Outcome:
    samples = sum(map(run.whole, range(run.length)))
    plain = Outcome(run.size, run.length, samples, run.losses[-1] if run.losses else None, "bits")

    def different(found: Difference, cause: str | None) -> Outcome:
        return replace(plain, verdict="different", difference=found, distance=found.distance, cause=cause)

    def rounding(path: Trajectory, note: str | None = None) -> Outcome:
        cause = explain_rounding(run)
        return replace(
            plain, verdict="rounding", difference=path.bits, distance=path.largest, cause=cause, note=note
        )

    path = follow(first, run)
    if path.beyond is None:
        path = _with_the_end(first, run, path)
    if path.beyond is not None:
        cause = explain(first, run, path.beyond, again)
        if cause is not None or (note := _of_itself(first, path.beyond, again)) is None:
            return different(path.beyond, cause)
        if fact := first_fact(first, run):
            return different(fact, explain(first, run, fact, again))
        return rounding(path, note)
    if run is first:
        return plain
    for odd, kind in printed_otherwise(first, run, path.bits is None):
        if is_steady(kind, first, again()):
            return different(odd, explain_printed())
    return plain if path.bits is None else rounding(path)


def _of_itself(first: Run, found: Difference, again: Callable[..., Run]) -> str | None:
    """Whether the training lets rounding grow that far: one process with other last bits goes apart too."""
    if found.kind not in _SOFT or not found.step:
        return None
    nudged = follow(first, again(nudge=True)).beyond
    if nudged is None or nudged.kind not in _SOFT or not nudged.step:
        return None
    return (
        f"from step {found.step + 1} on the training itself makes more of it, as it does from step "
        f"{nudged.step + 1} on where {_processes(first.size)} start{'s' * (first.size == 1)} from other last bits"
    )


def _with_the_end(first: Run, run: Run, path: Trajectory) -> Trajectory:
    """The same, with what the states at the end of the script show beside the steps."""
    bits, largest = path.bits, path.largest
    for one in _at_the_end(first, run):
        bits = bits or one
        if one.distance > max(_END, _END_JUMP * largest):
            return Trajectory(bits, one, largest)
    return Trajectory(bits, None, largest)


def _at_the_end(first: Run, run: Run) -> Iterator[Difference]:
    for rank, facts in enumerate(run.facts):
        for name, digest in facts["end"].items():
            if digest[2] != run.facts[0]["end"].get(name, digest)[2]:
                yield Difference("apart", run.length, rank, name, math.inf)
    try:
        states = read(first.state).state, read(run.state).state
    except CheckpointError as error:
        raise UsageError(f"the state at the end cannot be compared ({error})") from error
    names = (_processes(first.size), _processes(run.size))
    for one in compare(*states, names=names).differences:
        # What an optimizer averages may well be noise about zero; the gradients it averages were compared.
        noise = one.name.startswith("optimizer.") and one.kind == "value" and not one.exact
        yield Difference("end", None, None, f"{one.name} at the end", 0.0 if noise else one.relative)


def _processes(size: int) -> str:
    return "1 process" if size == 1 else f"{size} processes"
