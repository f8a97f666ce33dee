"""Runs a script at several sizes or settings in turns, and keeps what each run's meter says.

Covered: an interrupted measurement goes on where it was; what disturbs the machine disturbs all variants alike,
because each repeat takes them all. Not covered: two measurements of one script at the same time.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from samestep.errors import UsageError, WorkerFailed
from samestep.measure.trial import Trial
from samestep.placement.cores import cores as usable_cores
from samestep.rundir import step_times_path
from samestep.steptimes import Breakdown, Reading, breakdown, read_step_times

LAUNCHERS = ("run", "torchrun", "srun")
_NOT_OFFERED = {"method": "samestep trains with DistributedDataParallel", "n": "sizes are given by -n"}


@dataclass(frozen=True)
class Variant:
    """How a script is run: on how many processes, with how many cores each, and what is set besides."""

    size: int
    cores: int
    settings: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return ", ".join([str(self.size), *(f"{name}={value}" for name, value in self.settings)])

    @property
    def launcher(self) -> str:
        return self._asked("launcher") or ("srun" if "SLURM_JOB_ID" in os.environ else "run")

    @property
    def nodes(self) -> str:
        return self._asked("nodes")

    @property
    def env(self) -> dict[str, str]:
        """The variables that make the settings so."""
        env, ddp = {}, {}
        for name, value in self.settings:
            if name == "backend":
                env["SAMESTEP_BACKEND"] = value
            elif name.isupper():
                env[name] = value
            elif name not in ("launcher", "nodes"):
                ddp[name] = json.loads(value) if value[:1] in "0123456789-[tf" else value
        return env | ({"SAMESTEP_DDP": json.dumps(ddp)} if ddp else {})

    def _asked(self, name: str) -> str:
        return dict(self.settings).get(name, "")


@dataclass(frozen=True)
class Measured:
    """One run of a variant, as its meter saw it."""

    variant: Variant
    repeat: int
    seconds: float  # from the start of the launcher to the end
    step_s: float
    samples_per_second: float
    parts: Mapping[str, float]
    slowest: int | None
    hidden: float | None
    steps: int
    samples_per_epoch: int
    ranks: Sequence[Mapping[str, float]]  # parts by rank, as seconds of a step


@dataclass(frozen=True)
class Plan:
    """What is to be measured."""

    script: Sequence[str]
    variants: Sequence[Variant]
    repeat: int
    steps: int
    weak: bool

    @cached_property
    def directory(self) -> Path:
        """Where what was measured is kept: the same for the same plan."""
        facts = json.dumps(
            [os.getcwd(), list(self.script), [asdict(one) for one in self.variants], self.steps, self.weak]
        )
        root = Path(os.environ.get("SAMESTEP_RUN_DIR") or "runs")
        name = next((Path(word).stem for word in self.script if word != "-m"), "script")
        return root / f"scale-{name}-{hashlib.sha256(facts.encode()).hexdigest()[:6]}"


def variants(sizes: Sequence[int], vary: Sequence[str], each: int | None) -> list[Variant]:
    """Every size with every combination of the settings; at all sizes a process has as many cores."""
    choices = []
    for text in vary:
        name, equals, values = text.partition("=")
        if not name or not equals or not all(values.split(",")):
            raise UsageError(
                f"--vary {text} is not a name and its values; write for instance --vary bucket_cap_mb=1,25"
            )
        if name in _NOT_OFFERED:
            raise UsageError(f"--vary {name}=... is not offered: {_NOT_OFFERED[name]}; leave it out")
        if name == "launcher" and (unknown := set(values.split(",")) - set(LAUNCHERS)):
            raise UsageError(f"--vary launcher={min(unknown)} is unknown; choose from {', '.join(LAUNCHERS)}")
        choices.append([(name, value) for value in values.split(",")])
    cores = each or max(1, len(usable_cores()) // max(sizes))
    return [Variant(size, cores, settings) for size in sizes for settings in product(*choices)]


def measure(plan: Plan, told: Callable[[Variant, int, int, float | None], None]) -> list[Measured]:
    """All runs of the plan, those of an interrupted measurement included; `told` before each: which, and how long.

    Raises WorkerFailed where a run fails, UsageError where a script takes no steps that can be measured.
    """
    kept = plan.directory / "runs.jsonl"
    if (plan.directory / "report.json").exists():
        shutil.rmtree(plan.directory)
    plan.directory.mkdir(parents=True, exist_ok=True)
    found = [_from_json(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    done = {(one.variant, one.repeat) for one in found}
    order = [
        (variant, repeat)
        for repeat in range(plan.repeat)
        for variant in (
            *plan.variants[repeat % len(plan.variants) :],
            *plan.variants[: repeat % len(plan.variants)],
        )
    ]
    with kept.open("a") as file:
        for number, (variant, repeat) in enumerate(order, 1):
            if (variant, repeat) in done:
                continue
            told(variant, number, len(order), _left_s(order[number - 1 :], found))
            found.append(_run(plan, variant, repeat))
            print(json.dumps(asdict(found[-1])), file=file, flush=True)
    return found


def environment(plan: Plan) -> dict[str, str]:
    """What every run of a plan is told."""
    weak = {"SAMESTEP_WEAK": "1"} if plan.weak else {}
    return {"SAMESTEP_METER": "0", "SAMESTEP_MEASURE_STEPS": str(plan.steps), **weak}


def _left_s(order: Sequence[tuple[Variant, int]], found: Sequence[Measured]) -> float | None:
    """How long the runs still to do will take, as far as runs so far tell."""
    if not found:
        return None
    took: dict[Variant, list[float]] = {}
    for one in found:
        took.setdefault(one.variant, []).append(one.seconds)
    mean = sum(one.seconds for one in found) / len(found)
    return sum(sum(took[variant]) / len(took[variant]) if variant in took else mean for variant, _ in order)


def _run(plan: Plan, variant: Variant, repeat: int) -> Measured:
    env = environment(plan) | variant.env
    with tempfile.TemporaryDirectory(prefix="run-", dir=plan.directory) as directory:
        began = time.monotonic()
        by_us = variant.launcher == "run"
        run = (_by_samestep if by_us else _by_another)(plan.script, variant, env, Path(directory).absolute())
        seconds = time.monotonic() - began
        return measured_of(plan.script[0], run, variant, repeat, seconds)


def measured_of(name: str, run: Path, variant: Variant, repeat: int, seconds: float) -> Measured:
    """What the meters of a run's directory say."""
    paths = [step_times_path(run, rank) for rank in range(variant.size)]
    readings = {rank: one for rank, path in enumerate(paths) if (one := read_step_times(path))}
    said = breakdown(readings) if len(readings) == variant.size else None
    if said is None:
        raise UsageError(
            f"{name} took too few steps over samestep.loader or samestep.steps at {variant} to be measured; "
            "give it more to do, or convert it first"
        )
    return _measured(variant, repeat, seconds, said, readings)


def _measured(
    variant: Variant, repeat: int, seconds: float, said: Breakdown, readings: Mapping[int, Reading]
) -> Measured:
    progress = readings[0].progress
    ranks = [
        {name: value / one.progress.steps for name, value in one.sums.items()} for one in readings.values()
    ]
    return Measured(
        variant,
        repeat,
        seconds,
        said.step_s,
        said.samples_per_second,
        said.parts,
        said.slowest,
        said.hidden,
        progress.steps,
        round(progress.all / progress.steps * progress.batches),
        ranks,
    )


def _by_samestep(script: Sequence[str], variant: Variant, env: Mapping[str, str], directory: Path) -> Path:
    cores = min(variant.cores * variant.size, len(usable_cores()))
    result = Trial(script, variant.size, directory, env, cores).run()
    if result.code:
        raise WorkerFailed(result.failure or result.text)
    return result.run.path


def _by_another(script: Sequence[str], variant: Variant, env: Mapping[str, str], directory: Path) -> Path:
    """By torchrun or srun, with the same cores; the meter's files go where a run of ours has them."""
    for part in ("pulse", "logs", "failures"):
        (directory / part).mkdir()
    if variant.launcher == "torchrun":
        allowed = sorted(usable_cores())[: variant.cores * variant.size]
        bind = f"import os, sys; os.sched_setaffinity(0, {allowed}); os.execv(sys.argv[1], sys.argv[1:])"
        command = [sys.executable, "-c", bind]
        command += [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={variant.size}", *script]
    else:
        command = ["srun", f"--ntasks={variant.size}", f"--cpus-per-task={variant.cores}", "--exact"]
        command += [f"--nodes={variant.nodes}"] if variant.nodes else []
        command += [sys.executable, *script]
    done = subprocess.run(
        command,
        env={**os.environ, **env, "SAMESTEP_RUN": str(directory)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode:
        raise WorkerFailed(f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stdout}")
    return directory


def _from_json(line: str) -> Measured:
    facts: dict[str, Any] = json.loads(line)
    of = facts["variant"]
    settings = tuple((name, value) for name, value in of["settings"])
    return Measured(**{**facts, "variant": Variant(of["size"], of["cores"], settings)})
