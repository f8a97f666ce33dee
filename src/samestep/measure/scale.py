"""Runs a script at several sizes or settings in turns, and keeps the step times of each run.

Covered: an interrupted measurement continues where it was, unless the script has changed; disturbances of the machine
affect all variants equally, because each repeat runs all of them; a variant that fails leaves the others measured.
"""

import fcntl
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
from typing import TextIO

from samestep.errors import UsageError, WorkerFailed
from samestep.measure.trial import Trial
from samestep.placement.devices import cores as usable_cores
from samestep.placement.devices import masked, visible_devices
from samestep.placement.launchers import count
from samestep.placement.nodelist import tasks_per_node
from samestep.rundir import step_times_path
from samestep.start.python import scripts_python
from samestep.steptimes import Breakdown, breakdown, read_step_times
from samestep.text import counted, duration

LAUNCHERS = ("run", "torchrun", "srun", "mpirun")
METHODS = ("ddp", "dataparallel")
# options of DistributedDataParallel; _NUMBER takes a number and the others true or false
_NUMBER = "bucket_cap_mb"
_SWITCHES = (
    *("broadcast_buffers", "find_unused_parameters", "gradient_as_bucket_view", "static_graph", "init_sync"),
    *("skip_all_reduce_unused_params", "check_reduction", "batched_grad_copy", "forward_sync_buffers"),
)
_NAMES = ("launcher", "backend", "method", "nodes", _NUMBER, *_SWITCHES)
_CHOICES = {"launcher": LAUNCHERS, "method": METHODS, **dict.fromkeys(_SWITCHES, ("true", "false"))}
# mpirun refuses root and more processes than it counts cores
_MPI = dict.fromkeys(
    ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe"), "1"
)


@dataclass(frozen=True)
class Variant:
    """A way to run a script: the number of processes, the cores of each, and further settings."""

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
    def asked(self) -> dict[str, str]:
        return dict(self.settings)

    @property
    def processes(self) -> int:
        """The number of processes; with DataParallel a single process drives all devices."""
        return 1 if self.asked.get("method") == "dataparallel" else self.size

    @property
    def launcher(self) -> list[str]:
        """The words before the script for another launcher; empty for samestep's own launcher."""
        python, size = scripts_python(), self.processes
        nodes = [f"--nodes={self.asked['nodes']}"] if "nodes" in self.asked else []
        return {
            "run": [],
            "torchrun": [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"],
            "srun": ["srun", f"--ntasks={size}", f"--cpus-per-task={self.cores}", "--exact", *nodes, python],
            "mpirun": ["mpirun", "-n", f"{size}", "--bind-to", "none", python],
        }[self.asked.get("launcher") or ("srun" if "SLURM_JOB_ID" in os.environ else "run")]

    @property
    def env(self) -> dict[str, str]:
        env, ddp = dict(_MPI), dict[str, float | bool]()
        if self.launcher[:1] == ["srun"]:  # not every Slurm binds a task to its cores
            env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(self.cores))
        for name, value in self.settings:
            if name in ("backend", "method"):
                env[f"SAMESTEP_{name.upper()}"] = value
            elif name.isupper():
                env[name] = value
            elif name == _NUMBER or name in _SWITCHES:
                ddp[name] = float(value) if name == _NUMBER else value == "true"
        if self.asked.get("method") == "dataparallel":
            env |= masked(os.environ, ",".join(map(str, range(self.size))))[0]
        return env | ({"SAMESTEP_DDP": json.dumps(ddp)} if ddp else {})

    @property
    def lacks(self) -> str:
        """A sentence why it cannot be measured here; empty if it can."""
        visible, needed = len(visible_devices(os.environ)), max(2, self.size)
        program, why = next(iter(self.launcher), scripts_python()), ""
        is_in_slurm = program == "srun" and "SLURM_JOB_ID" in os.environ
        if self.asked.get("method") == "dataparallel" and visible < needed:
            why = f"it needs {needed} devices, and {visible} are visible"
        elif (program == "srun" or "nodes" in self.asked) and not is_in_slurm:
            why = "it needs srun in a Slurm allocation"
        elif shutil.which(program) is None:
            why = f"{program} is not installed"
        return why and f"{self.in_words} was not measured: {why}"


@dataclass(frozen=True)
class Measured:
    variant: Variant
    repeat: int
    seconds: float  # from the start of the launcher to the end
    steps: int
    said: Breakdown


@dataclass(frozen=True)
class Plan:
    script: Sequence[str]
    variants: Sequence[Variant]
    repeat: int
    steps: int
    weak: bool

    @cached_property
    def directory(self) -> Path:
        """The directory of the results; the same plan of the same script has the same directory."""
        variants = [*map(asdict, self.variants)]
        facts = json.dumps([os.getcwd(), list(self.script), variants, self.steps, self.weak, self._contents])
        root = Path(os.environ.get("SAMESTEP_RUN_DIR") or "runs")
        name = next((Path(word).stem for word in self.script if word != "-m"), "script")
        return root / f"scale-{name}-{hashlib.sha256(facts.encode()).hexdigest()[:6]}"

    @property
    def _contents(self) -> list[str]:
        """Digests of the script and of the Python files beside it, which it may import."""
        is_module = self.script[0] == "-m"
        path = Path(self.script[1].replace(".", "/") if is_module else self.script[0])
        files = sorted({path, *path.parent.glob("*.py")} if path.suffix or is_module else {path})
        return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()]

    def trial(self, variant: Variant, directory: Path, env: Mapping[str, str]) -> Trial:
        """A run of a variant, which ends after the plan's steps."""
        variables = {"SAMESTEP_METER": "0", "SAMESTEP_MEASURE_STEPS": str(self.steps), **variant.env, **env}
        variables |= {"SAMESTEP_WEAK": "1"} if self.weak else {}
        cores = min(variant.cores * variant.size, len(usable_cores()))
        return Trial(self.script, variant.processes, directory, variables, cores, launcher=variant.launcher)


def variants(sizes: Sequence[int], vary: Sequence[str], each: int | None) -> list[Variant]:
    """Every size with every combination of the settings; a process has the same number of cores at all sizes."""
    here, most = len(usable_cores()), max(sizes)
    if each and "SLURM_JOB_ID" not in os.environ and each > max(1, here // most):
        raise UsageError(
            f"--cores {each} is more than the {counted(here, 'core')} here have for each of {counted(most, 'process')};"
            f" write at most {max(1, here // most)}"
        )
    cores = each or count(os.environ, "SLURM_CPUS_PER_TASK") or max(1, here // most)
    chosen = [Variant(size, cores, settings) for size in sizes for settings in product(*choices_of(vary))]
    _check_room(chosen, cores)
    return chosen


def choices_of(vary: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Each --vary as its name with each of its values, checked."""
    choices = []
    for text in vary:
        name, _, values = text.partition("=")
        values = values.lower() if name in _SWITCHES else values
        if not name or not all(values.split(",")):
            raise UsageError(
                f"--vary {text} is not a name and its values; write for instance --vary bucket_cap_mb=1,25"
            )
        if name == "n":
            raise UsageError(f"--vary {text} names sizes; write -n {values}")
        if not name.isupper() and name not in _NAMES:
            raise UsageError(
                f"--vary {text} names no setting; choose from {', '.join(_NAMES)}, or write a variable in capitals"
            )
        if name == "nodes" and not all(value.isdecimal() and int(value) for value in values.split(",")):
            raise UsageError(f"--vary {text} has a value that is no number of nodes; write nodes=1,2")
        if name == _NUMBER and not all(value.replace(".", "", 1).isdecimal() for value in values.split(",")):
            raise UsageError(
                f"--vary {text} has a value that is not a number; write for instance {name}=1,25"
            )
        if unknown := set(values.split(",")).difference(_CHOICES.get(name, values.split(","))):
            raise UsageError(
                f"--vary {name}={min(unknown)} is unknown; choose from {', '.join(_CHOICES[name])}"
            )
        choices.append([(name, value) for value in dict.fromkeys(values.split(","))])
    return choices


def _check_room(chosen: Sequence[Variant], cores: int) -> None:
    """Refuse more processes than the Slurm allocation has cores for: srun would, after the smaller sizes have run."""
    nodes = tasks_per_node(text) if (text := os.environ.get("SLURM_JOB_CPUS_PER_NODE")) else []
    room = sum(here // cores for here in nodes)
    most = max((variant.processes for variant in chosen if variant.launcher[:1] == ["srun"]), default=0)
    wanted = max((int(variant.asked.get("nodes", 1)) for variant in chosen), default=1)
    if nodes and wanted > len(nodes):
        raise UsageError(
            f"--vary nodes={wanted} is more than the {counted(len(nodes), 'node')} of this Slurm allocation; use at "
            f"most {len(nodes)}"
        )
    if nodes and most > room:
        of_cores = f" of {counted(cores, 'core')} each"
        raise UsageError(
            f"-n {most} is more than the {counted(room, 'process')}{of_cores} that this Slurm allocation has room for; "
            f"use at most {room}, or fewer --cores"
        )


def measure(
    plan: Plan, report: Callable[[int, str, str], None]
) -> tuple[list[Measured], dict[Variant, WorkerFailed]]:
    """All runs of the plan, including those of an interrupted measurement, and the variants that failed."""
    # Before each run, `report` gets the number of finished runs, the next run, and the time left. Raises WorkerFailed
    # if the script fails before anything else could matter, UsageError if it takes no steps that can be measured.
    failures: dict[Variant, WorkerFailed] = {}
    plan.directory.mkdir(parents=True, exist_ok=True)
    order = []
    for repeat in range(plan.repeat):
        first = repeat % len(plan.variants)
        order += [(run, repeat) for run in (*plan.variants[first:], *plan.variants[:first])]
    with (plan.directory / "runs.jsonl").open("a+") as file:
        measured = _kept(plan.directory, file)
        done = {(run.variant, run.repeat) for run in measured}
        for number, (variant, repeat) in enumerate(order, 1):
            if (variant, repeat) in done or variant in failures:
                continue
            left = ""
            if measured:
                mean_s = sum(run.seconds for run in measured) / len(measured)
                left = f", about {duration(mean_s * (len(order) - number + 1))} left"
            report(number - 1, f"run {number} of {len(order)}: {variant.in_words}", left)
            try:
                measured.append(_run(plan, variant, repeat))
            except WorkerFailed as error:
                if not measured and not variant.settings:
                    raise  # the script itself is broken, at the smallest size
                failures[variant] = error
                continue
            print(json.dumps(asdict(measured[-1])), file=file, flush=True)
    if not measured:
        raise next(iter(failures.values()))
    return measured, failures


def _kept(directory: Path, file: TextIO) -> list[Measured]:
    """The runs of an interrupted measurement, from its open file; refuses a measurement that is still going on."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"{directory} is written by another `samestep scale` of the same script; wait for its end, and type it "
            "without mpirun, srun or torchrun: it starts the processes itself"
        ) from None
    except OSError:
        pass  # the file system has no locks
    if (report := directory / "report.json").exists():
        report.unlink()
        file.truncate(0)
    for failed in directory.glob("run-*"):
        shutil.rmtree(failed)
    file.seek(0)
    return [_from_json(line) for line in file]


def _run(plan: Plan, variant: Variant, repeat: int) -> Measured:
    directory, is_to_keep = Path(tempfile.mkdtemp(prefix="run-", dir=plan.directory)), False
    try:
        result = plan.trial(variant, directory, {}).run()
        is_to_keep = result.code != 0  # keep it: its report names the logs
        return measured_of(plan.script[0], result.checked().run.path, variant, repeat, result.seconds)
    finally:
        if not is_to_keep:
            shutil.rmtree(directory)


def measured_of(name: str, run: Path, variant: Variant, repeat: int, seconds: float) -> Measured:
    paths = [step_times_path(run, rank) for rank in range(variant.processes)]
    readings = {rank: times for rank, path in enumerate(paths) if (times := read_step_times(path))}
    times_together = breakdown(readings) if len(readings) == variant.processes else None
    if times_together is None:
        raise UsageError(
            f"{name} took too few steps over samestep.loader or samestep.steps with {variant.in_words} to be measured; "
            "give it more to do, or convert it first"
        )
    return Measured(variant, repeat, seconds, readings[0].progress.rows, times_together)


def _from_json(line: str) -> Measured:
    facts = json.loads(line)
    size, cores, settings = (facts["variant"][name] for name in ("size", "cores", "settings"))
    variant = Variant(size, cores, tuple((name, value) for name, value in settings))
    return Measured(variant, facts["repeat"], facts["seconds"], facts["steps"], Breakdown(**facts["said"]))
