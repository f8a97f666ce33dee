"""What each launcher leaves in the environment: who this process is, and where its ranks could meet."""

import re
from collections.abc import Mapping
from typing import NamedTuple
from zlib import crc32

from samestep.errors import PlacementError
from samestep.placement.nodelist import device_count, expand_nodes, tasks_per_node
from samestep.text import printable

Env = Mapping[str, str]
FIELDS = ("rank", "size", "local_rank", "local_size", "node", "nodes")


class Fact(NamedTuple):
    """A number, and `VARIABLE=value` or the words that say where it comes from."""

    number: int
    origin: str

    @property
    def variable(self) -> str:
        return self.origin.partition("=")[0]

    def __str__(self) -> str:
        return f"{self.variable} is {self.number}"

    def wrong(self, why: str) -> PlacementError:
        return PlacementError(f"{self}{why}", variable=self.variable)


Facts = dict[str, Fact]


class LauncherFacts(NamedTuple):
    """What started this process, as far as its variables say."""

    launcher: str
    facts: Facts
    notes: tuple[str, ...] = ()


class _Launcher(NamedTuple):
    """A launcher, the variable that shows it was there, its names of the FIELDS, and of the run."""

    name: str
    sign: str
    fields: str  # in the order of FIELDS; of `A|B` the first that is set
    run: str = ""


_TORCH = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE"
_SLURM = (
    "SLURM_PROCID SLURM_STEP_NUM_TASKS|SLURM_NTASKS|SLURM_NPROCS SLURM_LOCALID - SLURM_NODEID "
    "SLURM_STEP_NUM_NODES|SLURM_NNODES"
)
_MPI = "{0}_COMM_WORLD_RANK {0}_COMM_WORLD_SIZE {0}_COMM_WORLD_LOCAL_RANK {0}_COMM_WORLD_LOCAL_SIZE"
# mpirun starts its daemons as a Slurm step, whose variables its processes inherit: these are closer than a step.
_CLOSER_THAN_A_STEP = (
    _Launcher(
        "openmpi", "OMPI_COMM_WORLD_RANK", _MPI.format("OMPI"), "PMIX_NAMESPACE|OMPI_MCA_ess_base_jobid"
    ),
    _Launcher("mpich", "MV2_COMM_WORLD_RANK", _MPI.format("MV2")),
    _Launcher("mpich", "MPI_LOCALRANKID", "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS"),
)
# srun sets these as well when it serves MPI (--mpi=pmi2, pmix, cray_shasta), where its own say more.
_OUTSIDE_A_STEP = (
    _Launcher(
        "pals",
        "PALS_RANKID",
        "PALS_RANKID PMI_SIZE PALS_LOCAL_RANKID PALS_LOCAL_SIZE|PMI_LOCAL_SIZE PALS_NODEID",
        "PALS_APID",
    ),
    _Launcher("mpich", "PMI_RANK", "PMI_RANK PMI_SIZE PMI_LOCAL_RANK PMI_LOCAL_SIZE"),
    _Launcher("pmix", "PMIX_RANK", "PMIX_RANK", "PMIX_NAMESPACE"),
)
_RUN_NAMES = {known.name: known.run for known in (*_OUTSIDE_A_STEP, *_CLOSER_THAN_A_STEP)}

# Slurm counts the steps for its own use (interactive, batch, extern) down from 2**32.
_FIRST_PSEUDO_STEP = (1 << 32) - 16
BATCH_STEP = str((1 << 32) - 5)

# Below Linux' ephemeral ports, of which an outgoing connection may hold any, and below torch's 29400, 29500.
_FIRST_PORT, _NUM_PORTS = 10_000, 18_999


def recognise(env: Env) -> LauncherFacts:
    """The nearest launcher; torch's variables win where they describe a world of their own."""
    torch = _read(env, _TORCH)
    rank, size = torch.get("rank"), torch.get("size")
    if rank and size and text(env, "SAMESTEP_RUN"):
        return LauncherFacts("samestep", torch)
    if rank and size and text(env, "TORCHELASTIC_RUN_ID"):
        notes = _by_itself(env, torch, "start one torchrun on each node with --nnodes")
        return LauncherFacts("torchrun", torch, notes)
    outer = _outer(env)
    if outer.launcher == "alone" and (there := rank or size):
        if not (rank and size):
            missing = "WORLD_SIZE" if rank else "RANK"
            raise PlacementError(
                f"{there} but {missing} is not set; start this with `samestep run` or set both",
                variable=missing,
            )
        return LauncherFacts("torchrun", torch)
    if outer.launcher == "alone":
        if count(env, "SLURM_PROCID") and not text(env, "SLURM_STEP_ID"):
            raise PlacementError(
                f"SLURM_PROCID is {count(env, 'SLURM_PROCID')} but SLURM_STEP_ID is not set; "
                "let all variables of the step through to this process",
                variable="SLURM_STEP_ID",
            )
        return outer
    if rank and size and _is_another_world(rank, size, outer.facts):
        return LauncherFacts("torchrun", torch, _by_itself(env, torch, "unset RANK and WORLD_SIZE"))
    for mine, theirs in ((rank, outer.facts.get("rank")), (size, outer.facts.get("size"))):
        if mine and theirs and mine.number != theirs.number:
            raise mine.wrong(f" but {theirs}; unset {mine.variable} or make them agree")
    return outer._replace(facts=outer.facts | torch) if rank or size else outer


def without_leftovers(env: Env) -> Env:
    """Without what `init` exported in another Slurm step, one of whose ranks then called sbatch or srun."""
    run = env.get("TORCHELASTIC_RUN_ID", "")
    is_changed = any(env.get(name) != env.get(f"ROLE_{name}") for name in ("RANK", "WORLD_SIZE"))
    if not run.startswith("job ") or is_changed or not text(env, "SLURM_JOB_ID"):
        return env
    if run == run_name(env, "slurm", None):
        return env
    exported = (*_TORCH.split(), "MASTER_ADDR", "MASTER_PORT")
    kept = (name for name in env if name not in exported and not name.startswith(("ROLE_", "TORCHELASTIC_")))
    return {name: env[name] for name in kept}


def meeting(env: Env, found: LauncherFacts, run: str | None) -> tuple[tuple[str, str] | None, Fact | None]:
    """Address and port that every rank derives alike, as far as the launcher's variables allow."""
    if found.launcher == "slurm":
        # A host file may begin with any node, and the list is sorted: it does not say which.
        is_sorted = text(env, "SLURM_DISTRIBUTION") == "arbitrary" and found.facts["nodes"].number > 1
        return None if is_sorted else _first_node(env), _step_port(env)
    if found.launcher not in _RUN_NAMES:
        return None, None
    name, value = _first(env, _RUN_NAMES[found.launcher])
    told, origin = (value, f"{name}={printable(value)}") if value else (run, run)
    port = told and Fact(_FIRST_PORT + crc32(told.encode(errors="replace")) % _NUM_PORTS, str(origin))
    return ("127.0.0.1", "one node") if found.facts["nodes"].number == 1 else None, port or None


def run_name(env: Env, launcher: str, run: str | None) -> str | None:
    """What only the processes of this run know, as far as the launcher's variables allow."""
    if launcher == "slurm":
        job, step = text(env, "SLURM_JOB_ID"), text(env, "SLURM_STEP_ID")
        return f"job {printable(f'{job}.{step}')}{_again(env, 'SLURM_RESTART_COUNT')}"
    if named := _first(env, _RUN_NAMES.get(launcher, ""))[1]:
        return f"{launcher} run {printable(named)}"
    if launcher in ("samestep", "torchrun") and (value := text(env, "TORCHELASTIC_RUN_ID")):
        return f"run {printable(value)}{_again(env, 'TORCHELASTIC_RESTART_COUNT')}"
    return run


def port_choices(first: int) -> list[int]:
    """A derived port and where to look when it is taken, for both sides in the same order."""
    return [_FIRST_PORT + (first - _FIRST_PORT + 2_371 * turn) % _NUM_PORTS for turn in range(8)]


def hosts_of_ranks(env: Env, size: int) -> list[str]:
    """Where each rank of a Slurm step is to run; nothing where that is not to be known."""
    nodes, tasks = text(env, "SLURM_STEP_NODELIST"), text(env, "SLURM_STEP_TASKS_PER_NODE")
    layout = env.get("SLURM_DISTRIBUTION", "block").partition(":")[0].partition(",")[0]
    if not nodes or not tasks or layout not in ("block", "cyclic"):
        return []
    names, counts = expand_nodes(nodes), tasks_per_node(tasks)
    if len(names) != len(counts) or sum(counts) != size:
        return []
    if layout == "block":
        return [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
    rounds = range(max(counts))
    return [name for turn in rounds for name, count in zip(names, counts, strict=True) if turn < count]


def in_step(env: Env) -> bool:
    """Whether this is in a step that srun started, and not one of Slurm's own."""
    return bool(re.fullmatch("[0-9]{1,8}", env.get("SLURM_STEP_ID", "")) and text(env, "SLURM_PROCID"))


def fact(env: Env, names: str) -> Fact | None:
    """The first of these variables that is set, as a number."""
    name, value = _first(env, names)
    if not value:
        return None
    if not re.fullmatch(r"-?[0-9]{1,18}", value):
        raise PlacementError(
            f"{name} is {printable(value)}, which is no whole number; set one or unset {name}", variable=name
        )
    return Fact(int(value), f"{name}={int(value)}")


def text(env: Env, name: str) -> str | None:
    """A variable that is empty is one that is not set."""
    return env.get(name, "").strip() or None


def count(env: Env, name: str) -> int:
    """A number that is only good for advice: 0 where there is none."""
    value = env.get(name, "")
    return int(value) if re.fullmatch("[0-9]{1,7}", value) else 0


def _first(env: Env, names: str) -> tuple[str, str]:
    return next(((name, value) for name in names.split("|") if (value := text(env, name))), ("", ""))


def _read(env: Env, fields: str) -> Facts:
    found = {field: fact(env, names) for field, names in zip(FIELDS, fields.split(), strict=False)}
    return {field: known for field, known in found.items() if known is not None}


def _outer(env: Env) -> LauncherFacts:
    for known in _CLOSER_THAN_A_STEP:
        if text(env, known.sign):
            return LauncherFacts(known.name, _read(env, known.fields))
    step = fact(env, "SLURM_STEP_ID")
    if step and step.number < _FIRST_PSEUDO_STEP and text(env, "SLURM_PROCID"):
        facts = _step(env)
        if text(env, "SLURM_PTY_PORT") and "size" in facts and facts["size"].number == 1:
            return LauncherFacts(
                "alone", {}, (_advice(env, "this is an interactive step of", "srun --overlap"),)
            )
        return LauncherFacts("slurm", facts)
    # What is set beside a step of Slurm's own was set by it, for the shell it started.
    for known in () if step else _OUTSIDE_A_STEP:
        if text(env, known.sign):
            return LauncherFacts(known.name, _read(env, known.fields))
    is_in_job = text(env, "SLURM_JOB_ID") is not None
    return LauncherFacts("alone", {}, (_advice(env, "this is in no step of", "srun"),) if is_in_job else ())


def _is_another_world(rank: Fact, size: Fact, outer: Facts) -> bool:
    """A launcher unknown to us may have started more processes below each of the outer one's."""
    if "size" not in outer or size.number == outer["size"].number:
        return False
    return rank.number == 0 or rank.number != outer["rank"].number


def _by_itself(env: Env, torch: Facts, write: str) -> tuple[str, ...]:
    """What is said where a task that is not the first of its step has begun a run of one node."""
    nodes, task = torch.get("nodes", torch["size"]), count(env, "SLURM_PROCID")
    if not in_step(env) or task == 0 or torch["rank"].number != 0 or nodes.number != 1:
        return ()
    tasks = count(env, "SLURM_STEP_NUM_TASKS")
    return (f"task {task} of {tasks} in this Slurm step runs by itself, for {nodes}; {write} for one run",)


def _step(env: Env) -> Facts:
    facts = _read(env, _SLURM)
    name, value = _first(env, "SLURM_STEP_TASKS_PER_NODE|SLURM_TASKS_PER_NODE")
    if not value or "rank" not in facts or "size" not in facts:
        return facts
    tasks, origin = tasks_per_node(value), f"{name}={printable(value)}"
    if sum(tasks) != facts["size"].number:
        raise PlacementError(
            f"{facts['size']} but {name} is {printable(value)}, {sum(tasks)} in all; start this with srun",
            variable=name,
        )
    local_rank, node = facts["rank"].number, 0
    while node < len(tasks) - 1 and local_rank >= tasks[node]:
        local_rank, node = local_rank - tasks[node], node + 1
    by_blocks = {"local_rank": local_rank, "node": node, "nodes": len(tasks)}
    facts = {field: Fact(number, origin) for field, number in by_blocks.items()} | facts
    if 0 <= facts["node"].number < len(tasks):
        facts["local_size"] = Fact(tasks[facts["node"].number], origin)
    return facts


def _first_node(env: Env) -> tuple[str, str] | None:
    name, value = _first(env, "SLURM_STEP_NODELIST|SLURM_JOB_NODELIST|SLURM_NODELIST")
    return (expand_nodes(value)[0], f"{name}={printable(value)}") if value else None


def _step_port(env: Env) -> Fact | None:
    job, step = fact(env, "SLURM_JOB_ID|SLURM_JOBID"), fact(env, "SLURM_STEP_ID")
    if job is None or step is None:
        return None
    # 64 and the number of ports have no common divisor: 296 jobs in a row differ, each in 64 steps.
    return Fact(_FIRST_PORT + (64 * job.number + step.number) % _NUM_PORTS, f"{job.origin} {step.origin}")


def _again(env: Env, name: str) -> str:
    times = count(env, name)
    return f" after {times} restart{'s' if times > 1 else ''}" if times else ""


def _advice(env: Env, where: str, srun: str) -> str:
    """The line that starts a process for each task of the allocation, or for each device where it counts nodes."""
    nodes = count(env, "SLURM_JOB_NUM_NODES") or count(env, "SLURM_NNODES") or 1
    tasks = max(count(env, "SLURM_NTASKS"), nodes * count(env, "SLURM_NTASKS_PER_NODE"))
    cpus = count(env, "SLURM_CPUS_PER_TASK")
    alone = f"{where} Slurm job {printable(env.get('SLURM_JOB_ID', ''))}, so it runs alone"
    if (parts := count(env, "SLURM_HET_SIZE")) > 1:
        return f"{alone}; `{srun} --het-group=0-{parts - 1} python ...` starts one for each task of its {parts} parts"
    if tasks > nodes:
        options = f"--ntasks={tasks}" + (f" --cpus-per-task={cpus}" if cpus else "")
        return f"{alone}; `{srun} {options} python ...` starts one for each task"
    # srun would refuse more tasks than the allocation has, and a login machine does not see --gres.
    per_node = device_count(env.get("SLURM_GPUS_PER_NODE", "")) or count(env, "SLURM_GPUS_ON_NODE")
    devices = device_count(env.get("SLURM_GPUS", "")) or nodes * per_node
    each = f"each of its {devices} devices" if devices > 1 else "each device"
    return f"{alone}; `samestep run ...` starts one for {each}"
