"""Reads the variables of each launcher: who this process is, and where its ranks could meet."""

import re
from collections.abc import Mapping
from typing import NamedTuple
from zlib import crc32

from samestep.errors import PlacementError
from samestep.placement.nodelist import expand_nodes, tasks_per_node
from samestep.text import counted, printable

Env = Mapping[str, str]
FIELDS = ("rank", "size", "local_rank", "local_size", "node", "nodes")


class Fact(NamedTuple):
    """A number and its origin: `VARIABLE=value`, or words."""

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
    launcher: str
    facts: Facts
    notes: tuple[str, ...] = ()


class _Launcher(NamedTuple):
    """A launcher, the variable that reveals it, and its names for the FIELDS and for the run."""

    name: str
    sign: str
    fields: str  # in the order of FIELDS; `A|B` means the first that is set
    run: str = ""


# The launcher nearest to the process comes first. mpirun starts its daemons as a Slurm step, so its processes inherit
# Slurm's variables. When srun serves MPI (--mpi=...), it also sets the variables below its own, which say less.
_LAUNCHERS = tuple(
    _Launcher(*row)
    for row in (
        ("openmpi", "OMPI_COMM_WORLD_RANK",
         "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE",
         "PMIX_NAMESPACE|OMPI_MCA_ess_base_jobid"),
        ("mpich", "MPI_LOCALRANKID", "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS"),
        ("slurm", "SLURM_STEP_ID",
         "SLURM_PROCID SLURM_STEP_NUM_TASKS|SLURM_NTASKS|SLURM_NPROCS SLURM_LOCALID - SLURM_NODEID "
         "SLURM_STEP_NUM_NODES|SLURM_NNODES"),
        ("pals", "PALS_RANKID",
         "PALS_RANKID PMI_SIZE PALS_LOCAL_RANKID PALS_LOCAL_SIZE|PMI_LOCAL_SIZE PALS_NODEID", "PALS_APID"),
        ("mpich", "PMI_RANK", "PMI_RANK PMI_SIZE PMI_LOCAL_RANK PMI_LOCAL_SIZE"),
        ("pmix", "PMIX_RANK", "PMIX_RANK", "PMIX_NAMESPACE"),
    )
)  # fmt: skip
_RUN_NAMES = {launcher.name: launcher.run for launcher in reversed(_LAUNCHERS) if launcher.name != "slurm"}
_TORCH = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE"

# Slurm numbers its own steps (interactive, batch, extern) downwards from 2**32.
_FIRST_PSEUDO_STEP = (1 << 32) - 16
BATCH_STEP = str((1 << 32) - 5)

# Below Linux' ephemeral ports, which outgoing connections may use, and below torch's 29400 and 29500.
_FIRST_PORT, _NUM_PORTS = 10_000, 18_999


def recognise(env: Env) -> LauncherFacts:
    """The nearest launcher; torch's variables win if they describe another world than the launcher's."""
    torch = _read(env, _TORCH)
    rank, size = torch.get("rank"), torch.get("size")
    if rank and size and text(env, "SAMESTEP_RUN"):
        return LauncherFacts("samestep", torch)
    if rank and size and text(env, "TORCHELASTIC_RUN_ID"):
        return _torchrun(env, torch, "start one torchrun on each node with --nnodes")
    launcher, outer = _nearest(env)
    if launcher == "alone" and (rank or size):
        if missing := "" if rank and size else "WORLD_SIZE" if rank else "RANK":
            raise PlacementError(
                f"{rank or size} but {missing} is not set; start this with `samestep run` or set both",
                variable=missing,
            )
        return LauncherFacts("torchrun", torch)
    if launcher == "alone":
        return LauncherFacts("alone", {}, _alone(env))
    if rank and size and _is_another_world(rank, size, outer):
        return _torchrun(env, torch, "unset RANK and WORLD_SIZE")
    for mine, theirs in ((rank, outer.get("rank")), (size, outer.get("size"))):
        if mine and theirs and mine.number != theirs.number:
            raise mine.wrong(f" but {theirs}; unset {mine.variable} or make them agree")
    return LauncherFacts(launcher, outer | torch if rank or size else outer)


def without_leftovers(env: Env) -> Env:
    """The environment without what `init` exported in another Slurm step, whose rank then called sbatch or srun."""
    run = env.get("TORCHELASTIC_RUN_ID", "")
    is_changed = any(env.get(name) != env.get(f"ROLE_{name}") for name in ("RANK", "WORLD_SIZE"))
    if not run.startswith("job ") or is_changed or not text(env, "SLURM_JOB_ID"):
        return env
    if run == run_name(env, "slurm", None):
        return env
    exported = (*_TORCH.split(), "MASTER_ADDR", "MASTER_PORT")
    kept = (name for name in env if name not in exported and not name.startswith(("ROLE_", "TORCHELASTIC_")))
    return {name: env[name] for name in kept}


def meeting(env: Env, launch: LauncherFacts, run: str | None) -> tuple[tuple[str, str] | None, Fact | None]:
    """The address and port that every rank derives equally, as far as the launcher's variables allow."""
    nodes = launch.facts["nodes"].number
    if launch.launcher == "slurm":
        # With a host file any node may be the first, and the sorted list does not show which.
        is_sorted = text(env, "SLURM_DISTRIBUTION") == "arbitrary" and nodes > 1
        name, value = _first(env, "SLURM_STEP_NODELIST|SLURM_JOB_NODELIST|SLURM_NODELIST")
        first = (expand_nodes(value)[0], f"{name}={printable(value)}") if value and not is_sorted else None
        job, step = fact(env, "SLURM_JOB_ID|SLURM_JOBID"), fact(env, "SLURM_STEP_ID")
        if job is None or step is None:
            return first, None
        # 64 and the number of ports are coprime: 296 jobs in a row have different ports, each for 64 steps.
        return first, Fact(_port(64 * job.number + step.number), f"{job.origin} {step.origin}")
    if launch.launcher not in _RUN_NAMES:
        return None, None
    name, value = _first(env, _RUN_NAMES[launch.launcher])
    name_of_run, origin = (value, f"{name}={printable(value)}") if value else (run, run)
    port = Fact(_port(crc32(name_of_run.encode(errors="replace"))), str(origin)) if name_of_run else None
    return ("127.0.0.1", "one node") if nodes == 1 else None, port


def run_name(env: Env, launcher: str, run: str | None) -> str | None:
    """A name that only the processes of this run share, as far as the launcher's variables allow."""
    if launcher == "slurm":
        job, step = text(env, "SLURM_JOB_ID"), text(env, "SLURM_STEP_ID")
        return f"job {printable(f'{job}.{step}')}{_again(env, 'SLURM_RESTART_COUNT')}"
    if named := _first(env, _RUN_NAMES.get(launcher, ""))[1]:
        return f"{launcher} run {printable(named)}"
    if launcher in ("samestep", "torchrun") and (value := text(env, "TORCHELASTIC_RUN_ID")):
        return f"run {printable(value)}{_again(env, 'TORCHELASTIC_RESTART_COUNT')}"
    return run


def port_choices(first: int) -> list[int]:
    """A derived port and its alternatives if it is taken, in the same order for all ranks."""
    return [_port(first - _FIRST_PORT + 2_371 * turn) for turn in range(8)]


def hosts_of_ranks(env: Env, size: int) -> list[str]:
    """The node of each rank of a Slurm step; empty if that is not known."""
    nodes, tasks = text(env, "SLURM_STEP_NODELIST"), text(env, "SLURM_STEP_TASKS_PER_NODE")
    layout = re.split("[:,]", env.get("SLURM_DISTRIBUTION", "block"))[0]
    if not nodes or not tasks or layout not in ("block", "cyclic"):
        return []
    names, counts = expand_nodes(nodes), tasks_per_node(tasks)
    if len(names) != len(counts) or sum(counts) != size:
        return []
    turns = [(turn, name) for name, count in zip(names, counts, strict=True) for turn in range(count)]
    return [name for _, name in (turns if layout == "block" else sorted(turns, key=lambda item: item[0]))]


def in_step(env: Env) -> bool:
    """Whether this process is in a step that srun started, not in Slurm's own steps."""
    return bool(re.fullmatch("[0-9]{1,8}", env.get("SLURM_STEP_ID", "")) and text(env, "SLURM_PROCID"))


def fact(env: Env, names: str) -> Fact | None:
    """The first of these variables that is set, as a number."""
    name, value = _first(env, names)
    if not value:
        return None
    if not re.fullmatch(r"-?[0-9]{1,18}", value):
        raise PlacementError(
            f"{name} is {printable(value)}, which is not a whole number; set one or unset {name}",
            variable=name,
        )
    return Fact(int(value), f"{name}={int(value)}")


def text(env: Env, name: str) -> str | None:
    """A variable's value; None if it is not set or empty."""
    return env.get(name, "").strip() or None


def count(env: Env, name: str) -> int:
    """A variable's number, for advice only; 0 if it is none."""
    value = env.get(name, "")
    return int(value) if re.fullmatch("[0-9]{1,7}", value) else 0


def _first(env: Env, names: str) -> tuple[str, str]:
    return next(((name, value) for name in names.split("|") if (value := text(env, name))), ("", ""))


def _read(env: Env, fields: str) -> Facts:
    facts = {field: fact(env, names) for field, names in zip(FIELDS, fields.split(), strict=False)}
    return {field: value for field, value in facts.items() if value is not None}


def _nearest(env: Env) -> tuple[str, Facts]:
    launcher = next((launcher for launcher in _LAUNCHERS if text(env, launcher.sign)), None)
    if launcher is None:
        return "alone", {}
    if launcher.name != "slurm":
        return launcher.name, _read(env, launcher.fields)
    step = fact(env, launcher.sign)
    # Slurm's own steps run a shell, and so does a step of a single task with a terminal.
    if step is None or step.number >= _FIRST_PSEUDO_STEP or not text(env, "SLURM_PROCID"):
        return "alone", {}
    facts = _step(env, _read(env, launcher.fields))
    is_shell = text(env, "SLURM_PTY_PORT") and "size" in facts and facts["size"].number == 1
    return ("alone", {}) if is_shell else ("slurm", facts)


def _is_another_world(rank: Fact, size: Fact, outer: Facts) -> bool:
    """Whether torch's variables differ: an unknown launcher may have started processes inside the outer launcher's."""
    if "size" not in outer or size.number == outer["size"].number:
        return False
    return rank.number == 0 or rank.number != outer["rank"].number


def _torchrun(env: Env, torch: Facts, write: str) -> LauncherFacts:
    """The facts of torchrun, with a note if another task than the first starts a run of a single node."""
    nodes, task = torch.get("nodes", torch["size"]), count(env, "SLURM_PROCID")
    if not in_step(env) or task == 0 or torch["rank"].number != 0 or nodes.number != 1:
        return LauncherFacts("torchrun", torch)
    tasks = count(env, "SLURM_STEP_NUM_TASKS")
    note = f"task {task} of {tasks} in this job step runs by itself, for {nodes}; {write} for one run"
    return LauncherFacts("torchrun", torch, (note,))


def _alone(env: Env) -> tuple[str, ...]:
    if (task := count(env, "SLURM_PROCID")) and not text(env, "SLURM_STEP_ID"):
        raise PlacementError(
            f"SLURM_PROCID is {task} but SLURM_STEP_ID is not set; "
            "let all variables of the step through to this process",
            variable="SLURM_STEP_ID",
        )
    if not (job := text(env, "SLURM_JOB_ID")):
        return ()
    return (
        f"this process runs alone in Slurm job {printable(job)}; `srun python ...` starts one for each task, "
        "and `samestep run ...` one for each device",
    )


def _step(env: Env, facts: Facts) -> Facts:
    """The facts of a step, with the number of its tasks on this node."""
    name, value = _first(env, "SLURM_STEP_TASKS_PER_NODE|SLURM_TASKS_PER_NODE")
    if not value or not {"size", "node"} <= facts.keys():
        return facts
    tasks, node = tasks_per_node(value), facts["node"].number
    if sum(tasks) != facts["size"].number:
        raise PlacementError(
            f"{facts['size']} but {name} is {printable(value)}, {sum(tasks)} in all; start this with srun",
            variable=name,
        )
    here = {"local_size": Fact(tasks[node], f"{name}={printable(value)}")} if 0 <= node < len(tasks) else {}
    return facts | here


def _port(number: int) -> int:
    return _FIRST_PORT + number % _NUM_PORTS


def _again(env: Env, name: str) -> str:
    times = count(env, name)
    return f" after {counted(times, 'restart')}" if times else ""
