"""Runs a script at several sizes or settings in turns, and keeps what each run's meter says.

Covered: an interrupted measurement goes on where it was; what disturbs the machine disturbs all variants alike,
because each repeat takes them all. Not covered: two measurements of one script at the same time.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from pathlib import Path

from samestep.errors import UsageError
from samestep.measure.trial import Trial
from samestep.placement.cores import cores as usable_cores
from samestep.rundir import step_times_path
from samestep.start.python import scripts_python
from samestep.steptimes import Breakdown, breakdown, read_step_times
from samestep.text import counted, duration

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
    def in_words(self) -> str:
        """`2 processes, backend=gloo`."""
        return f"{self}".replace(f"{self.size}", counted(self.size, "process"), 1)

    @property
    def launcher(self) -> list[str]:
        """What stands before the script where samestep's own launcher does not start it."""
        asked = dict(self.settings)
        name = asked.get("launcher") or ("srun" if "SLURM_JOB_ID" in os.environ else "run")
        if name == "torchrun":
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.size}"]
            return [scripts_python(), *torchrun]
        if name == "srun":
            srun = ["srun", f"--ntasks={self.size}", f"--cpus-per-task={self.cores}", "--exact"]
            return [*srun, *(f"--nodes={asked[key]}" for key in asked if key == "nodes"), scripts_python()]
        return []

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


@dataclass(frozen=True)
class Measured:
    """One run of a variant, as its meter saw it."""

    variant: Variant
    repeat: int
    seconds: float  # from the start of the launcher to the end
    said: Breakdown


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

    def trial(self, variant: Variant, directory: Path, env: Mapping[str, str]) -> Trial:
        """One run of a variant, which ends after the plan's steps."""
        told = {"SAMESTEP_METER": "0", "SAMESTEP_MEASURE_STEPS": str(self.steps), **variant.env, **env}
        told |= {"SAMESTEP_WEAK": "1"} if self.weak else {}
        cores = min(variant.cores * variant.size, len(usable_cores()))
        return Trial(self.script, variant.size, directory, told, cores, launcher=variant.launcher)


def variants(sizes: Sequence[int], vary: Sequence[str], each: int | None) -> list[Variant]:
    """Every size with every combination of the settings; at all sizes a process has as many cores."""
    choices = []
    for text in vary:
        name, _, values = text.partition("=")
        if not name or not all(values.split(",")):
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


def measure(plan: Plan, told: Callable[[int, str, str], None]) -> list[Measured]:
    """All runs of the plan, those of an interrupted measurement included.

    Before each run `told` hears how many are done, which is next, and how long they will take.
    Raises WorkerFailed where a run fails, UsageError where a script takes no steps that can be measured.
    """
    kept = plan.directory / "runs.jsonl"
    if (plan.directory / "report.json").exists():
        shutil.rmtree(plan.directory)
    plan.directory.mkdir(parents=True, exist_ok=True)
    found = [_from_json(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    done = {(one.variant, one.repeat) for one in found}
    order = []
    for repeat in range(plan.repeat):
        first = repeat % len(plan.variants)
        order += [(one, repeat) for one in (*plan.variants[first:], *plan.variants[:first])]
    with kept.open("a") as file:
        for number, (variant, repeat) in enumerate(order, 1):
            if (variant, repeat) in done:
                continue
            left = ""
            if found:
                mean_s = sum(one.seconds for one in found) / len(found)
                left = f", about {duration(mean_s * (len(order) - number + 1))} left"
            told(number - 1, f"run {number} of {len(order)}: {variant.in_words}", left)
            found.append(_run(plan, variant, repeat))
            print(json.dumps(asdict(found[-1])), file=file, flush=True)
    return found


def _run(plan: Plan, variant: Variant, repeat: int) -> Measured:
    with tempfile.TemporaryDirectory(prefix="run-", dir=plan.directory) as directory:
        result = plan.trial(variant, Path(directory), {}).run().checked()
        return measured_of(plan.script[0], result.run.path, variant, repeat, result.seconds)


def measured_of(name: str, run: Path, variant: Variant, repeat: int, seconds: float) -> Measured:
    """What the meters of a run's directory say."""
    paths = [step_times_path(run, rank) for rank in range(variant.size)]
    readings = {rank: one for rank, path in enumerate(paths) if (one := read_step_times(path))}
    said = breakdown(readings) if len(readings) == variant.size else None
    if said is None:
        raise UsageError(
            f"{name} took too few steps over samestep.loader or samestep.steps with {variant.in_words} to be measured; "
            "give it more to do, or convert it first"
        )
    return Measured(variant, repeat, seconds, said)


def _from_json(line: str) -> Measured:
    facts = json.loads(line)
    of = facts["variant"]
    variant = Variant(of["size"], of["cores"], tuple((name, value) for name, value in of["settings"]))
    return Measured(variant, facts["repeat"], facts["seconds"], Breakdown(**facts["said"]))
