"""The placement of this process (rank, size, node), read from the environment that its launcher set."""

import ctypes
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from samestep.errors import PlacementError
from samestep.files import read_text
from samestep.placement import launchers
from samestep.placement.launchers import FIELDS, Env, Fact, Facts, LauncherFacts
from samestep.text import counted, printable

# The name of the memory file with a run's key, which the launcher holds open, followed by the number of ranks.
KEY_NAME = "samestep-key-of-"
_GET_PARENT_DEATH_SIGNAL = 2  # PR_GET_PDEATHSIG
ASSUMED = "one node, assumed"
_BY_BLOCKS = "computed from local_size"
_BELOW_TASKS = ("torchrun", "samestep")  # launchers that may run inside another launcher's task
_MOST_PROCESSES = 1 << 20
_HOST = re.compile(r"[A-Za-z0-9._:%\[\]-]{1,255}")


@dataclass(frozen=True)
class Placement:
    """Who this process is, where each fact comes from, and notes for the user."""

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
    run: str | None = None


def place(env: Env, *, run: str | None = None, usable: int | None = None, cores: int = 1) -> Placement:
    """The placement that an environment describes, for a process that may use `usable` of its machine's `cores`."""
    # `run` is a name that only the processes of this run share, for launchers that name no run.
    env = launchers.without_leftovers(env)
    launch = launchers.recognise(env)
    facts, notes = _complete(launch.facts)
    _check(facts)
    launch = LauncherFacts(launch.launcher, facts, launch.notes + notes)
    address, port = _meeting(env, launch, run)
    known = facts | {"master_addr": address, "master_port": port}
    return Placement(
        **{name: facts[name].number for name in FIELDS},
        launcher=launch.launcher,
        master_addr=address[0] if address else None,
        master_port=port.number if port else None,
        origin={name: fact[1] for name, fact in known.items() if fact},
        notes=launch.notes + _core_note(env, launch, usable, cores),
        run=launchers.run_name(env, launch.launcher, run),
    )


def this_process() -> Placement:
    env = launchers.without_leftovers(os.environ)
    if launchers.in_step(env) and _is_batch_script():
        # sbatch passes on the variables of the step in which it was called.
        env = {**env, "SLURM_STEP_ID": launchers.BATCH_STEP}
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    here = place(env, run=_mpi_daemon(), usable=usable, cores=os.cpu_count() or 1)
    return replace(here, notes=here.notes + _began_with_more()) if here.launcher == "alone" else here


def _began_with_more() -> tuple[str, ...]:
    """A note for a process that runs alone because a script removed its launcher's variables."""
    sizes = [(os.getpid(), _size_of_parent())]
    for pid, _ in _ancestors():
        variables = read_text(Path(f"/proc/{pid}/environ")).split("\0")
        env = dict(variable.split("=", 1) for variable in variables if "=" in variable)
        with suppress(PlacementError):
            size = launchers.recognise(launchers.without_leftovers(env)).facts.get("size")
            sizes.append((pid, size.number if size else 1))
    for pid, number in sizes:
        if number > 1:
            which = "it" if pid == os.getpid() else f"process {pid}, which started it,"
            return (
                f"this process runs alone, and {which} was started as one of {number}: its launcher's "
                "variables, such as RANK and WORLD_SIZE, were removed before init; leave them",
            )
    return ()


def _size_of_parent() -> int:
    """The number of ranks if its parent started this process as a rank, even before `os.execve`; else 1."""
    number = ctypes.c_int()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_GET_PARENT_DEATH_SIGNAL, ctypes.byref(number))
    if number.value != signal.SIGKILL:
        return 1
    with suppress(OSError):
        folder = Path(f"/proc/{os.getppid()}/fd")
        names = "\n".join(os.readlink(descriptor) for descriptor in folder.iterdir())
        if match := re.search(f"/memfd:{KEY_NAME}([0-9]+)", names):
            return int(match[1])
    return 1


def by_hand(rank: int | None, size: int | None, rendezvous: str | None) -> dict[str, str]:
    """torch's variables for a process that its script has started and numbered."""
    if type(rank) is not int or type(size) is not int:
        given, missing = ("rank", "size") if size is None else ("size", "rank")
        raise PlacementError(f"init got {given}= without {missing}=; give both, as whole numbers")
    match = re.fullmatch(r"tcp://(.+):([0-9]{1,5})|env://", str(rendezvous))
    if not match:
        raise PlacementError(
            f"rendezvous={rendezvous!r} is not a meeting point; write tcp://HOST:PORT or env://"
        )
    variables = {"RANK": str(rank), "WORLD_SIZE": str(size)}
    return variables | ({"MASTER_ADDR": match[1].strip("[]"), "MASTER_PORT": match[2]} if match[1] else {})


def exports(p: Placement, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """torch's variables as torchrun sets them; values of `env` about roles and restarts are kept."""
    here = {
        "RANK": p.rank,
        "LOCAL_RANK": p.local_rank,
        "WORLD_SIZE": p.size,
        "LOCAL_WORLD_SIZE": p.local_size,
        "GROUP_RANK": p.node,
        "GROUP_WORLD_SIZE": p.nodes,
        "MASTER_ADDR": p.master_addr,
        "MASTER_PORT": p.master_port,
    }
    described = {
        "ROLE_RANK": p.rank,
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": p.size,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_RUN_ID": p.run if p.launcher == "slurm" and p.run else "none",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
    }
    env = launchers.without_leftovers(env or {})
    known = here | {name: env.get(name, value) for name, value in described.items()}
    return {name: str(value) for name, value in known.items() if value is not None}


def device_index(p: Placement, visible: int) -> int | None:
    """The index of this process's device among the visible devices; None if none is visible."""
    if visible < 2:
        return 0 if visible else None
    if p.local_rank >= visible:
        raise PlacementError(
            f"local rank {p.local_rank} has no device of its own among the {visible} that are visible; "
            f"start at most {visible} processes on this node"
        )
    return p.local_rank


def idle_devices(p: Placement, visible: int, script: str) -> str | None:
    """A remark of rank 0 about devices of its node that no process uses; None if there are none."""
    size = p.local_size
    if p.rank != 0 or visible <= size:
        return None
    use = "1 process of this node uses 1" if size == 1 else f"{size} processes of this node use {size}"
    write = f"`samestep run {script}` uses all" if p.size == 1 else f"start {visible} processes on each node"
    if p.launcher == "slurm":
        write = f"write `srun --ntasks-per-node={visible}`"
    return f"{visible} devices are visible and {use} of them; {write}"


def _complete(known: Facts) -> tuple[Facts, tuple[str, ...]]:
    """All facts, with those that follow from others, and a note if a fact had to be assumed."""
    facts = dict(known) or {"rank": Fact(0, "nothing is set"), "size": Fact(1, "nothing is set")}
    for name, unknown in (("rank", "which of them this is"), ("size", "how many processes there are")):
        if name not in facts:
            raise PlacementError(
                f"{next(iter(facts.values()))} but nothing says {unknown}; set RANK and WORLD_SIZE"
            )
    rank, size = facts["rank"], facts["size"]
    notes: tuple[str, ...] = ()
    if size.number == 1:
        facts = {"local_rank": rank, "local_size": size} | facts
    if "local_rank" not in facts:
        facts["local_rank"] = Fact(rank.number, ASSUMED)
        notes = (
            "nothing says which process of its node this is, so all are taken to be on one node; "
            "set LOCAL_RANK and LOCAL_WORLD_SIZE where there are several",
        )
    if "local_size" not in facts:
        if facts["local_rank"].number != rank.number:
            raise PlacementError(
                f"{rank} and {facts['local_rank']}, so there are several nodes, but LOCAL_WORLD_SIZE is not set; "
                "set it to the number of processes on this node",
                variable="LOCAL_WORLD_SIZE",
            )
        facts["local_size"] = Fact(size.number, ASSUMED)
    per_node = max(1, facts["local_size"].number)
    by_blocks = {"node": rank.number // per_node, "nodes": -(-size.number // per_node)}
    return {name: Fact(number, _BY_BLOCKS) for name, number in by_blocks.items()} | facts, notes


def _check(facts: Facts) -> None:
    for name in FIELDS:
        if facts[name].number < 0:
            raise facts[name].wrong(", which is below 0; count from 0")
    size, local_size, nodes = facts["size"], facts["local_size"], facts["nodes"]
    if size.number > _MOST_PROCESSES:
        raise size.wrong(f", which is more than {_MOST_PROCESSES} processes; set the real number")
    for name, limit in (("rank", size), ("local_rank", local_size), ("node", nodes)):
        if facts[name].number >= limit.number:
            raise facts[name].wrong(f" but {limit}; count from 0 to {limit.variable} - 1")
    if nodes.number == 1:
        fits = local_size.number == size.number
    else:
        fits = local_size.number + nodes.number - 1 <= size.number
    if not fits and local_size.origin == ASSUMED:
        raise PlacementError(
            f"{nodes} but nothing says how many processes this node has; "
            "set RANK, WORLD_SIZE and LOCAL_WORLD_SIZE"
        )
    if not fits:
        raise PlacementError(f"{local_size} and {nodes}, but {size}; make the three agree")


def _meeting(env: Env, launch: LauncherFacts, run: str | None) -> tuple[tuple[str, str] | None, Fact | None]:
    if launch.launcher == "alone":
        return None, None
    host, port = launchers.text(env, "MASTER_ADDR"), launchers.fact(env, "MASTER_PORT")
    if host and not _HOST.fullmatch(host):
        raise PlacementError(
            f"MASTER_ADDR is {printable(host)}, which is not a host name; set a name or an address",
            variable="MASTER_ADDR",
        )
    if port and not 0 < port.number < 1 << 16:
        raise port.wrong(", which is not a port; set one from 1 to 65535")
    size = launch.facts["size"]
    if launch.launcher in _BELOW_TASKS and size.number > 1 and not (host and port):
        missing = "MASTER_PORT" if host else "MASTER_ADDR"
        raise PlacementError(
            f"{size} but {missing} is not set; start this with `samestep run` or set both MASTER_ADDR and MASTER_PORT",
            variable=missing,
        )
    derived_address, derived_port = launchers.meeting(env, launch, run)
    return (host, f"MASTER_ADDR={host}") if host else derived_address, port or derived_port


def _core_note(env: Env, launch: LauncherFacts, usable: int | None, cores: int) -> tuple[str, ...]:
    """A note if srun or mpirun has bound this process to too few cores, which slows every step silently."""
    if usable is None or launch.launcher in ("alone", *_BELOW_TASKS):
        return ()
    # since Slurm 22.05, srun does not read it from sbatch
    wanted = launchers.count(env, "SLURM_CPUS_PER_TASK") if launch.launcher == "slurm" else 0
    wanted = wanted or (cores // launch.facts["local_size"].number if usable == 1 else 0)
    if usable >= wanted:
        return ()
    how = {"slurm": "srun --cpus-per-task", "openmpi": "mpirun --map-by slot:PE"}.get(launch.launcher)
    write = f"write `{how}={wanted}`" if how else f"bind each to {wanted}"
    return (f"{launch.launcher} lets this process use {usable} of {counted(cores, 'core')}; {write}",)


def _is_batch_script() -> bool:
    for pid, name in _ancestors():
        if name == "slurmstepd":
            return ".batch]" in read_text(Path(f"/proc/{pid}/cmdline"))
    return False


def _mpi_daemon() -> str | None:
    """A name of the run for MPICH, which sets none: the address in the command line of its ancestor."""
    for pid, name in _ancestors():
        if name.startswith(("hydra_", "mpispawn")):
            match = re.search(r"--control-port\0([^\0]+)", read_text(Path(f"/proc/{pid}/cmdline")))
            return f"mpirun at {match[1]}" if match else f"the mpirun daemon, process {pid}"
    return None


def _ancestors() -> Iterator[tuple[int, str]]:
    """This process, its parent, and so on, with their names."""
    pid = os.getpid()
    while pid > 1:
        name, _, status = read_text(Path(f"/proc/{pid}/stat")).rpartition(")")
        if not status:
            return
        yield pid, name.partition("(")[2]
        pid = int(status.split()[1])
