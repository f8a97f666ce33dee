"""What each launcher leaves in the environment: who this process is, and where its ranks could meet."""

import re
from collections.abc import Mapping
from typing import NamedTuple
from zlib import crc32

from samestep.errors import PlacementError
from samestep.placement.nodelist import device_count, expand_nodes, tasks_per_node
from samestep.text import printable

Env = Mapping[str, str]
Fact = tuple[int, str]  # a number, and `VARIABLE=value` or the words that say where it comes from
Facts = dict[str, Fact]

FIELDS = ("rank", "size", "local_rank", "local_size", "node", "nodes")

_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
_SLURM = (
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS SLURM_NTASKS SLURM_NPROCS",
    "SLURM_LOCALID",
    "",
    "SLURM_NODEID",
    "SLURM_STEP_NUM_NODES SLURM_NNODES",
)
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_PMI = ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
_PALS = ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE PMI_LOCAL_SIZE", "PALS_NODEID")


def _prefixed(prefix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))


# Launcher, the variable that shows it was there, and its names of the FIELDS. mpirun starts its daemons as a
# Slurm step, whose variables its processes inherit: so these are closer to the process than a step.
_CLOSER_THAN_A_STEP = (
    ("openmpi", "OMPI_COMM_WORLD_RANK", _prefixed("OMPI")),
    ("mpich", "MV2_COMM_WORLD_RANK", _prefixed("MV2")),
    ("mpich", "MPI_LOCALRANKID", _HYDRA),
)
# srun sets these as well when it serves MPI (--mpi=pmi2, pmix, cray_shasta), where its own say more.
_OUTSIDE_A_STEP = (
    ("pals", "PALS_RANKID", _PALS),
    ("mpich", "PMI_RANK", _PMI),
    ("pmix", "PMIX_RANK", ("PMIX_RANK",)),
)
_RUN_NAMES = {
    "openmpi": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    "mpich": (),
    "pals": ("PALS_APID",),
    "pmix": ("PMIX_NAMESPACE",),
}

# Slurm counts the steps for its own use (interactive, batch, extern) down from 2**32.
_FIRST_PSEUDO_STEP = (1 << 32) - 16
BATCH_STEP = str((1 << 32) - 5)

# Below Linux' ephemeral ports, of which an outgoing connection may hold any, and below torch's 29400, 29500.
_FIRST_PORT, _NUM_PORTS = 10_000, 18_999


class LauncherFacts(NamedTuple):
    """What started this process, as far as its variables say."""

    launcher: str
    facts: Facts
    notes: tuple[str, ...] = ()


def recognise(env: Env) -> LauncherFacts:
    """The nearest launcher; torch's variables win where they describe a world of their own."""
    torch = _read(env, _TORCH)
    complete = "rank" in torch and "size" in torch
    if complete and text(env, "SAMESTEP_RUN"):
        return LauncherFacts("samestep", torch)
    if complete and text(env, "TORCHELASTIC_RUN_ID"):
        notes = _by_itself(env, torch, "start one torchrun on each node with --nnodes")
        return LauncherFacts("torchrun", torch, notes)
    found = _outer(env)
    if "rank" not in torch and "size" not in torch:
        if found.launcher == "alone" and count(env, "SLURM_PROCID") and not text(env, "SLURM_STEP_ID"):
            raise PlacementError(
                f"SLURM_PROCID is {count(env, 'SLURM_PROCID')} but SLURM_STEP_ID is not set; "
                "let all variables of the step through to this process",
                variable="SLURM_STEP_ID",
            )
        return found
    if found.launcher == "alone":
        if not complete:
            there, missing = ("rank", "WORLD_SIZE") if "rank" in torch else ("size", "RANK")
            raise PlacementError(
                f"{said(torch[there])} but {missing} is not set; start this with `samestep run` or set both",
                variable=missing,
            )
        return LauncherFacts("torchrun", torch)
    if complete and _is_another_world(torch, found.facts):
        return LauncherFacts("torchrun", torch, _by_itself(env, torch, "unset RANK and WORLD_SIZE"))
    for field in ("rank", "size"):
        mine, theirs = torch.get(field), found.facts.get(field)
        if mine and theirs and mine[0] != theirs[0]:
            raise wrong(mine, f" but {said(theirs)}; unset {variable(mine)} or make them agree")
    return found._replace(facts=found.facts | torch)


def without_leftovers(env: Env) -> Env:
    """Without what `init` exported in another Slurm step, one of whose ranks then called sbatch or srun."""
    run = env.get("TORCHELASTIC_RUN_ID", "")
    is_changed = any(env.get(name) != env.get(f"ROLE_{name}") for name in ("RANK", "WORLD_SIZE"))
    if not run.startswith("job ") or is_changed or not text(env, "SLURM_JOB_ID"):
        return env
    if run == run_name(env, "slurm", None):
        return env
    exported = (*_TORCH, "MASTER_ADDR", "MASTER_PORT")
    kept = (name for name in env if name not in exported and not name.startswith(("ROLE_", "TORCHELASTIC_")))
    return {name: env[name] for name in kept}


def meeting(env: Env, found: LauncherFacts, run: str | None) -> tuple[tuple[str, str] | None, Fact | None]:
    """Address and port that every rank derives alike, as far as the launcher's variables allow."""
    if found.launcher == "slurm":
        # A host file may begin with any node, and the list is sorted: it does not say which.
        is_sorted = text(env, "SLURM_DISTRIBUTION") == "arbitrary" and found.facts["nodes"][0] > 1
        return None if is_sorted else _first_node(env), _step_port(env)
    if found.launcher not in _RUN_NAMES:
        return None, None
    name, value = _first(env, *_RUN_NAMES[found.launcher])
    told, said_by = (value, f"{name}={printable(value)}") if value else (run, run)
    port = _FIRST_PORT + crc32(told.encode(errors="replace")) % _NUM_PORTS if told else None
    address = ("127.0.0.1", "one node") if found.facts["nodes"][0] == 1 else None
    return address, (port, said_by) if port and said_by else None


def run_name(env: Env, launcher: str, run: str | None) -> str | None:
    """What only the processes of this run know, as far as the launcher's variables allow."""
    if launcher == "slurm":
        job, step = text(env, "SLURM_JOB_ID"), text(env, "SLURM_STEP_ID")
        return f"job {printable(f'{job}.{step}')}{_again(env, 'SLURM_RESTART_COUNT')}"
    if named := _first(env, *_RUN_NAMES.get(launcher, ()))[1]:
        return f"{launcher} run {printable(named)}"
    if launcher in ("samestep", "torchrun") and (value := text(env, "TORCHELASTIC_RUN_ID")):
        return f"run {printable(value)}{_again(env, 'TORCHELASTIC_RESTART_COUNT')}"
    return run


def port_choices(first: int) -> list[int]:
    """A derived port and where to look when it is taken, for both sides in the same order."""
    return [_FIRST_PORT + (first - _FIRST_PORT + 2_371 * turn) % _NUM_PORTS for turn in range(8)]


def hosts_of_ranks(env: Env, size: int) -> list[str]:
    """Where each rank of a Slurm step is to run; nothing where that is not to be known."""
    nodes, tasks = _first(env, "SLURM_STEP_NODELIST")[1], _first(env, "SLURM_STEP_TASKS_PER_NODE")[1]
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


def number(env: Env, *names: str) -> Fact | None:
    """The first of these that is set, as a number."""
    name, value = _first(env, *names)
    if not value:
        return None
    if not re.fullmatch(r"-?[0-9]{1,18}", value):
        raise PlacementError(
            f"{name} is {printable(value)}, which is no whole number; set one or unset {name}", variable=name
        )
    return int(value), f"{name}={int(value)}"


def text(env: Env, name: str) -> str | None:
    """A variable that is empty is one that is not set."""
    return env.get(name, "").strip() or None


def count(env: Env, name: str) -> int:
    """A number that is only good for advice: 0 where there is none."""
    value = env.get(name, "")
    return int(value) if re.fullmatch("[0-9]{1,7}", value) else 0


def said(fact: Fact) -> str:
    return f"{variable(fact)} is {fact[0]}"


def wrong(fact: Fact, why: str) -> PlacementError:
    return PlacementError(f"{said(fact)}{why}", variable=variable(fact))


def variable(fact: Fact) -> str:
    return fact[1].partition("=")[0]


def _read(env: Env, names: tuple[str, ...]) -> Facts:
    found = {field: number(env, *some.split()) for field, some in zip(FIELDS, names, strict=False)}
    return {field: fact for field, fact in found.items() if fact is not None}


def _outer(env: Env) -> LauncherFacts:
    for launcher, sign, names in _CLOSER_THAN_A_STEP:
        if text(env, sign):
            return LauncherFacts(launcher, _read(env, names))
    step = number(env, "SLURM_STEP_ID")
    if step and step[0] < _FIRST_PSEUDO_STEP and text(env, "SLURM_PROCID"):
        facts = _step(env)
        if text(env, "SLURM_PTY_PORT") and facts.get("size", (0, ""))[0] == 1:
            return LauncherFacts(
                "alone", {}, (_advice(env, "this is an interactive step of", "srun --overlap"),)
            )
        return LauncherFacts("slurm", facts)
    # What is set beside a step of Slurm's own was set by it, for the shell it started.
    for launcher, sign, names in () if step else _OUTSIDE_A_STEP:
        if text(env, sign):
            return LauncherFacts(launcher, _read(env, names))
    is_in_job = text(env, "SLURM_JOB_ID") is not None
    return LauncherFacts("alone", {}, (_advice(env, "this is in no step of", "srun"),) if is_in_job else ())


def _is_another_world(torch: Facts, outer: Facts) -> bool:
    """A launcher unknown to us may have started more processes below each of the outer one's."""
    if "size" not in outer or torch["size"][0] == outer["size"][0]:
        return False
    return torch["rank"][0] == 0 or torch["rank"][0] != outer["rank"][0]


def _by_itself(env: Env, torch: Facts, write: str) -> tuple[str, ...]:
    """What is said where a task that is not the first of its step has begun a run of one node."""
    nodes, task = torch.get("nodes", torch["size"]), count(env, "SLURM_PROCID")
    if not in_step(env) or task == 0 or torch["rank"][0] != 0 or nodes[0] != 1:
        return ()
    tasks = count(env, "SLURM_STEP_NUM_TASKS")
    return (
        f"task {task} of {tasks} in this Slurm step runs by itself, for {said(nodes)}; {write} for one run",
    )


def _step(env: Env) -> Facts:
    facts = _read(env, _SLURM)
    name, value = _first(env, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if not value or "rank" not in facts or "size" not in facts:
        return facts
    tasks, origin = tasks_per_node(value), f"{name}={printable(value)}"
    if sum(tasks) != facts["size"][0]:
        raise PlacementError(
            f"{said(facts['size'])} but {name} is {printable(value)}, {sum(tasks)} in all; start this with srun",
            variable=name,
        )
    local_rank, node = facts["rank"][0], 0
    while node < len(tasks) - 1 and local_rank >= tasks[node]:
        local_rank, node = local_rank - tasks[node], node + 1
    by_blocks = {"local_rank": (local_rank, origin), "node": (node, origin), "nodes": (len(tasks), origin)}
    facts = by_blocks | facts
    if 0 <= facts["node"][0] < len(tasks):
        facts["local_size"] = (tasks[facts["node"][0]], origin)
    return facts


def _first_node(env: Env) -> tuple[str, str] | None:
    name, value = _first(env, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return (expand_nodes(value)[0], f"{name}={printable(value)}") if value else None


def _step_port(env: Env) -> Fact | None:
    job, step = number(env, "SLURM_JOB_ID", "SLURM_JOBID"), number(env, "SLURM_STEP_ID")
    if job is None or step is None:
        return None
    # 64 and the number of ports have no common divisor: 296 jobs in a row differ, each in 64 steps.
    return _FIRST_PORT + (64 * job[0] + step[0]) % _NUM_PORTS, f"{job[1]} {step[1]}"


def _again(env: Env, name: str) -> str:
    times = count(env, name)
    return f" after {times} restart{'s' if times > 1 else ''}" if times else ""


def _first(env: Env, *names: str) -> tuple[str, str]:
    return next(((name, value) for name in names if (value := text(env, name))), ("", ""))


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
