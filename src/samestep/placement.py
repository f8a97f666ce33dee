"""Which of how many processes this one is, read from the environment that whatever started it left."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

from samestep.errors import PlacementError
from samestep.nodelist import expand_nodes, shown, tasks_per_node

Names = Mapping[str, tuple[str, ...]]  # of each fact, the variables that may hold it
Facts = dict[str, tuple[int, str]]  # of each fact, its number and what said so

_FIELDS = ("rank", "size", "local_rank", "local_size", "node", "nodes")
_MOST_PROCESSES = 1 << 20
_HOST = re.compile(r"[A-Za-z0-9._:%\[\]-]{1,255}")

# Slurm counts the steps for its own use (interactive, batch, extern) down from 2**32.
_FIRST_PSEUDO_STEP = (1 << 32) - 16

# Below Linux' ephemeral ports, where an outgoing connection could sit already, and below torchrun's 29400 and 29500.
_FIRST_PORT, _NUM_PORTS = 10_000, 18_999

_TORCH: Names = {
    "rank": ("RANK",),
    "size": ("WORLD_SIZE",),
    "local_rank": ("LOCAL_RANK",),
    "local_size": ("LOCAL_WORLD_SIZE",),
    "node": ("GROUP_RANK",),
    "nodes": ("GROUP_WORLD_SIZE",),
}
_SLURM: Names = {
    "rank": ("SLURM_PROCID",),
    "size": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
    "local_rank": ("SLURM_LOCALID",),
    "node": ("SLURM_NODEID",),
    "nodes": ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
}
_HYDRA: Names = {
    "local_rank": ("MPI_LOCALRANKID",),
    "rank": ("PMI_RANK",),
    "size": ("PMI_SIZE",),
    "local_size": ("MPI_LOCALNRANKS",),
}

# mpirun starts its daemons as a Slurm step, whose variables the processes inherit: these are closer than a step.
_WITHIN_A_STEP: tuple[tuple[str, Names], ...] = (
    (
        "openmpi",
        {
            "rank": ("OMPI_COMM_WORLD_RANK",),
            "size": ("OMPI_COMM_WORLD_SIZE",),
            "local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK",),
            "local_size": ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        },
    ),
    (
        "mpich",
        {
            "rank": ("MV2_COMM_WORLD_RANK",),
            "size": ("MV2_COMM_WORLD_SIZE",),
            "local_rank": ("MV2_COMM_WORLD_LOCAL_RANK",),
            "local_size": ("MV2_COMM_WORLD_LOCAL_SIZE",),
        },
    ),
    ("mpich", _HYDRA),
)
# srun sets these as well when it serves MPI (--mpi=pmi2, pmix, cray_shasta), less completely than its own.
_WITHOUT_A_STEP: tuple[tuple[str, Names], ...] = (
    (
        "pals",
        {
            "rank": ("PALS_RANKID",),
            "size": ("PMI_SIZE",),
            "local_rank": ("PALS_LOCAL_RANKID",),
            "local_size": ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
            "node": ("PALS_NODEID",),
        },
    ),
    (
        "mpich",
        {
            "rank": ("PMI_RANK",),
            "size": ("PMI_SIZE",),
            "local_rank": ("PMI_LOCAL_RANK",),
            "local_size": ("PMI_LOCAL_SIZE",),
        },
    ),
    ("pmix", {"rank": ("PMIX_RANK",)}),
)
_JOB_NAMES = {
    "openmpi": ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    "pals": ("PALS_APID",),
    "pmix": ("PMIX_NAMESPACE",),
}


@dataclass(frozen=True)
class Placement:
    """Who this process is, what said so, and what its user may want to know about it."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    launcher: str
    master_addr: str | None = None
    master_port: int | None = None
    origin: Mapping[str, str] = field(default_factory=dict, hash=False)
    notes: tuple[str, ...] = ()


def place(
    env: Mapping[str, str],
    *,
    rank: int | None = None,
    size: int | None = None,
    local_rank: int | None = None,
    local_size: int | None = None,
    node: int | None = None,
    nodes: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    job: str | None = None,
    cores: int | None = None,
) -> Placement:
    """Arguments win over variables; `job` tells this run from others where its launcher's variables do not."""
    flags = dict(zip(_FIELDS, (rank, size, local_rank, local_size, node, nodes), strict=True))
    given: Facts = {name: (value, f"{name}={value}") for name, value in flags.items() if value is not None}
    launcher, facts, notes = _recognise(env, given)
    _complete(facts, notes)
    _check(facts)
    numbers = {name: facts[name][0] for name in _FIELDS}
    origin = {name: facts[name][1] for name in _FIELDS}
    addr = _host(env, "MASTER_ADDR") if master_addr is None else (master_addr, f"master_addr={master_addr}")
    port = _number(env, "MASTER_PORT") if master_port is None else (master_port, f"master_port={master_port}")
    if launcher != "alone":
        default_addr, default_port = _meeting(env, launcher, facts, job)
        addr, port = addr or default_addr, port or default_port
    elif master_addr is None:
        addr = port = None
    if addr:
        origin["master_addr"] = addr[1]
    if port:
        if not 0 < port[0] < 1 << 16:
            raise PlacementError(f"{_said(port)}, which is no port; write one from 1 to 65535")
        origin["master_port"] = port[1]
    if launcher in ("torchrun", "samestep") and numbers["size"] > 1 and not (addr and port):
        missing = "MASTER_PORT" if addr else "MASTER_ADDR"
        raise PlacementError(
            f"{_said(facts['size'])} but {missing} is not set; "
            "start this with `samestep run` or set MASTER_ADDR and MASTER_PORT to where rank 0 listens"
        )
    if launcher == "slurm" and cores is not None and _count(env, "SLURM_CPUS_PER_TASK") > cores:
        asked = _count(env, "SLURM_CPUS_PER_TASK")
        notes.append(
            f"SLURM_CPUS_PER_TASK is {asked} but this task may use {cores}, for srun does not read what sbatch was told; "
            f"write `srun --cpus-per-task={asked}`"
        )
    if addr is None and numbers["nodes"] > 1:
        notes.append(
            f"{launcher} does not say where rank 0 is on {numbers['nodes']} nodes; set MASTER_ADDR to its node"
        )
    return Placement(
        **numbers,
        launcher=launcher,
        master_addr=addr[0] if addr else None,
        master_port=port[0] if port else None,
        origin=origin,
        notes=tuple(notes),
    )


def here() -> Placement:
    """`place` for this very process."""
    return place(os.environ, job=_hydra(), cores=len(cores()))


def exports(p: Placement, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """torch's variables as torchrun sets them; what `env` already says of roles and restarts stays."""
    told = {
        "RANK": str(p.rank),
        "LOCAL_RANK": str(p.local_rank),
        "WORLD_SIZE": str(p.size),
        "LOCAL_WORLD_SIZE": str(p.local_size),
        "GROUP_RANK": str(p.node),
        "GROUP_WORLD_SIZE": str(p.nodes),
    }
    if p.master_addr is not None:
        told["MASTER_ADDR"] = p.master_addr
    if p.master_port is not None:
        told["MASTER_PORT"] = str(p.master_port)
    described = {
        "ROLE_RANK": str(p.rank),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(p.size),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    return told | {name: (env or {}).get(name, value) for name, value in described.items()}


def device_index(p: Placement, visible: int) -> int | None:
    """Which of the devices this process sees is its own; None where it sees none."""
    if visible < 2:
        return 0 if visible else None
    if p.local_rank >= visible:
        raise PlacementError(
            f"local rank {p.local_rank} has no device of its own among the {visible} that are visible; "
            f"start at most {visible} processes on this node"
        )
    return p.local_rank


def cores() -> list[int]:
    """The CPUs this process may use: its affinity, cut to the CPU quota of its control group."""
    if not hasattr(os, "sched_getaffinity"):
        return list(range(os.cpu_count() or 1))
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[: _quota(len(allowed))]


def _recognise(env: Mapping[str, str], given: Facts) -> tuple[str, Facts, list[str]]:
    if given:
        _need_both(given, "give rank and size together")
        return "flags", given, []
    torch = _read(env, _TORCH)
    if "rank" in torch and "size" in torch and _text(env, "SAMESTEP_RUN"):
        return "samestep", torch, []
    if "rank" in torch and "size" in torch and _text(env, "TORCHELASTIC_RUN_ID"):
        return "torchrun", torch, []
    launcher, facts, notes = _launcher(env)
    if not {"rank", "size"} & torch.keys():
        return launcher, facts, notes
    if launcher == "alone":
        _need_both(torch, "start this with `samestep run` or set both")
        return "torchrun", torch, []
    for name in ("rank", "size"):
        if name in torch and name in facts and torch[name][0] != facts[name][0]:
            if _is_another_world(torch, facts):
                return "torchrun", torch, []
            raise PlacementError(
                f"{_said(torch[name])} but {_said(facts[name])}; unset {_name(torch[name])}, or make them agree"
            )
    return launcher, facts | torch, notes


def _launcher(env: Mapping[str, str]) -> tuple[str, Facts, list[str]]:
    for launcher, names in _WITHIN_A_STEP:
        if _text(env, next(iter(names.values()))[0]):
            return launcher, _read(env, names), []
    step = _number(env, "SLURM_STEP_ID")
    if step is not None and step[0] < _FIRST_PSEUDO_STEP and _text(env, "SLURM_PROCID"):
        facts = _step(env)
        if _text(env, "SLURM_PTY_PORT") and facts.get("size", (0, ""))[0] == 1:
            return "alone", {}, [_srun_line(env, "an interactive step", "srun --overlap")]
        return "slurm", facts, []
    if step is None:
        for launcher, names in _WITHOUT_A_STEP:
            if _text(env, names["rank"][0]):
                return launcher, _read(env, names), []
    if _text(env, "SLURM_JOB_ID"):
        return "alone", {}, [_srun_line(env, "an allocation and no step", "srun")]
    return "alone", {}, []


def _is_another_world(torch: Facts, facts: Facts) -> bool:
    """A launcher that we do not know may have started more processes below this one; then the numbers differ anyhow."""
    if "rank" not in torch or "size" not in torch:
        return False
    if "size" in facts and torch["size"][0] == facts["size"][0]:
        return facts["size"][0] == 1
    return torch["rank"][0] != facts["rank"][0] or torch["rank"][0] == 0


def _step(env: Mapping[str, str]) -> Facts:
    facts = _read(env, _SLURM)
    name = next(filter(env.get, ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")), None)
    if name is None or not {"rank", "size"} <= facts.keys():
        return facts
    said = f"{name}={shown(env[name])}"
    tasks = tasks_per_node(env[name].strip())
    if sum(tasks) != facts["size"][0]:
        raise PlacementError(
            f"{_said(facts['size'])} but {name} is {shown(env[name])}, which adds up to {sum(tasks)}; unset both or "
            "start this with srun"
        )
    facts.setdefault("nodes", (len(tasks), said))
    left, on = facts["rank"][0], 0
    while on < len(tasks) - 1 and left >= tasks[on]:
        left, on = left - tasks[on], on + 1
    facts.setdefault("node", (on, said))
    if facts["node"][0] in range(len(tasks)):
        facts.setdefault("local_rank", (left, said))
        facts["local_size"] = (tasks[facts["node"][0]], said)
    return facts


def _srun_line(env: Mapping[str, str], what: str, srun: str) -> str:
    nodes = _count(env, "SLURM_JOB_NUM_NODES") or _count(env, "SLURM_NNODES") or 1
    tasks = _count(env, "SLURM_NTASKS")
    size = max(1, tasks, nodes * max(_count(env, "SLURM_NTASKS_PER_NODE"), _count(env, "SLURM_GPUS_ON_NODE")))
    cpus = _count(env, "SLURM_CPUS_PER_TASK") if size == tasks else 0
    options = f"--ntasks={size}" + (f" --cpus-per-task={cpus}" if cpus else "")
    return (
        f"Slurm job {shown(env.get('SLURM_JOB_ID', ''))} is {what} here, so this is one process alone; "
        f"start one for each task with `{srun} {options} python ...`"
    )


def _complete(facts: Facts, notes: list[str]) -> None:
    if not facts:
        facts.update(rank=(0, "nothing set"), size=(1, "nothing set"))
    for name, what in (("rank", "which of them this is"), ("size", "how many processes there are")):
        if name not in facts:
            other = facts.get("size" if name == "rank" else "rank", (0, "the launcher=0"))
            raise PlacementError(f"{_said(other)} but nothing says {what}; set RANK and WORLD_SIZE")
    (rank, _), (size, _) = facts["rank"], facts["size"]
    if "local_rank" not in facts:
        facts["local_rank"] = (rank, "assumed: one node")
        if size > 1:
            notes.append(
                "nothing says which process of its node this is, so all are taken to be on one; "
                "set LOCAL_RANK and LOCAL_WORLD_SIZE where there are several nodes"
            )
    if "local_size" not in facts:
        if facts["local_rank"][0] != rank:
            raise PlacementError(
                f"{_said(facts['rank'])} and {_said(facts['local_rank'])}, so there are several nodes, but "
                "LOCAL_WORLD_SIZE is not set; set it to the number of processes on this node"
            )
        facts["local_size"] = (size, "assumed: one node")
    per_node = max(1, facts["local_size"][0])
    facts.setdefault(
        "nodes", (-(-size // per_node), f"{_name(facts['size'])} / {_name(facts['local_size'])}")
    )
    facts.setdefault("node", (rank // per_node, f"{_name(facts['rank'])} / {_name(facts['local_size'])}"))


def _check(facts: Facts) -> None:
    for name in _FIELDS:
        if facts[name][0] < 0:
            raise PlacementError(f"{_said(facts[name])}, which is below 0; count from 0")
    for small, large in (("rank", "size"), ("local_rank", "local_size"), ("node", "nodes")):
        if facts[small][0] >= facts[large][0]:
            raise PlacementError(
                f"{_said(facts[small])} but {_said(facts[large])}; count from 0 to {_name(facts[large])} - 1"
            )
    size, local_size, nodes = facts["size"], facts["local_size"], facts["nodes"]
    if size[0] > _MOST_PROCESSES:
        raise PlacementError(
            f"{_said(size)}, which is more than {_MOST_PROCESSES} processes; set the real number"
        )
    fits = local_size[0] == size[0] if nodes[0] == 1 else local_size[0] + nodes[0] - 1 <= size[0]
    if not fits:
        raise PlacementError(
            f"{_said(local_size)} and {_said(nodes)}, which {_said(size)} does not fit; make the three agree"
        )


def _meeting(
    env: Mapping[str, str], launcher: str, facts: Facts, job: str | None
) -> tuple[tuple[str, str] | None, tuple[int, str] | None]:
    """Where the ranks meet when no variable says so."""
    if launcher == "slurm":
        name = next(filter(env.get, ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")), None)
        first = (expand_nodes(env[name].strip())[0], f"{name}={shown(env[name])}") if name else None
        number, step = _number(env, "SLURM_JOB_ID"), _number(env, "SLURM_STEP_ID")
        if number is None or step is None:
            return first, None
        # 64 and the number of ports have no common divisor: neighbouring jobs and their first 64 steps never meet.
        return first, (_port(64 * number[0] + step[0]), f"{number[1]} {step[1]}")
    if launcher not in (*_JOB_NAMES, "mpich"):
        return None, None
    here = ("127.0.0.1", "one node") if facts["nodes"][0] == 1 else None
    for name in _JOB_NAMES.get(launcher, ()):
        if text := _text(env, name):
            return here, (_port(crc32(text.encode(errors="replace"))), f"{name}={shown(text)}")
    return here, (_port(crc32(job.encode())), job) if job else None


def _port(key: int) -> int:
    return _FIRST_PORT + key % _NUM_PORTS


def _read(env: Mapping[str, str], names: Names) -> Facts:
    found = {name: _number(env, *variables) for name, variables in names.items()}
    return {name: fact for name, fact in found.items() if fact is not None}


def _number(env: Mapping[str, str], *names: str) -> tuple[int, str] | None:
    for name in names:
        text = _text(env, name)
        if text is not None:
            if not re.fullmatch(r"-?[0-9]{1,18}", text):
                raise PlacementError(
                    f"{name} is {shown(text)}, which is no whole number; set a number or unset it"
                )
            return int(text), f"{name}={int(text)}"
    return None


def _host(env: Mapping[str, str], name: str) -> tuple[str, str] | None:
    text = _text(env, name)
    if text is None:
        return None
    if not _HOST.fullmatch(text):
        raise PlacementError(f"{name} is {shown(text)}, which is no host name; set a name or an address")
    return text, f"{name}={text}"


def _text(env: Mapping[str, str], name: str) -> str | None:
    return env.get(name, "").strip() or None


def _count(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    return int(text) if re.fullmatch("[0-9]{1,7}", text) else 0


def _name(fact: tuple[int, str]) -> str:
    return fact[1].partition("=")[0]


def _said(fact: tuple[int, str]) -> str:
    return f"{_name(fact)} is {fact[0]}"


def _need_both(facts: Facts, remedy: str) -> None:
    for name, other in (("rank", "size"), ("size", "rank")):
        if name in facts and other not in facts:
            missing = _TORCH[other][0] if facts[name][1][0].isupper() else other
            raise PlacementError(f"{_said(facts[name])} but {missing} is not set; {remedy}")


def _hydra() -> str | None:
    """MPICH's processes have no name of their run in common, but they have an ancestor."""
    pid = os.getpid()
    while pid > 1:
        try:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
        except OSError:
            return None
        if "(hydra" in name:
            return f"hydra={pid}"
        pid = int(rest.split()[1])
    return None


def _quota(most: int) -> int:
    """How many CPUs the control groups above this process let it keep busy, at least one."""
    try:
        group = Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
        limits = [Path("/sys/fs/cgroup", group), *Path("/sys/fs/cgroup", group).parents]
    except OSError:
        return most
    for folder in limits:
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        if quota.isdigit():
            most = min(most, int(quota) // int(period))
    return max(1, most)
