"""Which of how many processes this one is, read from the environment that whatever started it left."""

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

# The file in memory with a run's key, which its launcher holds open, is named so and by the number of ranks.
KEY_NAME = "samestep-key-of-"
_GET_PARENT_DEATH_SIGNAL = 2
ASSUMED = "one node, assumed"
_BY_BLOCKS = "computed from local_size"
_BELOW_TASKS = ("torchrun", "samestep")
_MOST_PROCESSES = 1 << 20
_HOST = re.compile(r"[A-Za-z0-9._:%\[\]-]{1,255}")


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
    run: str | None = None


def place(env: Env, *, run: str | None = None, usable: int | None = None, cores: int = 1) -> Placement:
    """What an environment says of a process that may use `usable` of its machine's `cores`.

    `run` is what only the processes of this run share, for launchers that name no run.
    """
    env = launchers.without_leftovers(env)
    found = launchers.recognise(env)
    facts, notes = _complete(found.facts)
    _check(facts)
    found = LauncherFacts(found.launcher, facts, found.notes + notes)
    address, port = _meeting(env, found, run)
    known = facts | {"master_addr": address, "master_port": port}
    return Placement(
        **{name: facts[name].number for name in FIELDS},
        launcher=found.launcher,
        master_addr=address[0] if address else None,
        master_port=port.number if port else None,
        origin={name: fact[1] for name, fact in known.items() if fact},
        notes=found.notes + _core_note(env, found, usable, cores),
        run=launchers.run_name(env, found.launcher, run),
    )


def this_process() -> Placement:
    """The placement of the process that asks."""
    env = launchers.without_leftovers(os.environ)
    if launchers.in_step(env) and _is_batch_script():
        # sbatch hands on the variables of the step that it was called in.
        env = {**env, "SLURM_STEP_ID": launchers.BATCH_STEP}
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    here = place(env, run=_mpi_daemon(), usable=usable, cores=os.cpu_count() or 1)
    return replace(here, notes=here.notes + _began_with_more()) if here.launcher == "alone" else here


def _began_with_more() -> tuple[str, ...]:
    """What is said of a lone process where a launcher's variables were removed, by its script or its parents'."""
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
    """How many ranks its parent started where this process is one of them, also after `os.execve`; else 1."""
    number = ctypes.c_int()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_GET_PARENT_DEATH_SIGNAL, ctypes.byref(number))
    if number.value != signal.SIGKILL:
        return 1
    with suppress(OSError):
        folder = Path(f"/proc/{os.getppid()}/fd")
        names = "\n".join(os.readlink(descriptor) for descriptor in folder.iterdir())
        if found := re.search(f"/memfd:{KEY_NAME}([0-9]+)", names):
            return int(found[1])
    return 1


def by_hand(rank: int | None, size: int | None, rendezvous: str) -> dict[str, str]:
    """torch's variables of a process that its script has started and numbered."""
    if type(rank) is not int or type(size) is not int:
        given, missing = ("rank", "size") if size is None else ("size", "rank")
        raise PlacementError(f"init got {given}= without {missing}=; give both, as whole numbers")
    found = re.fullmatch(r"tcp://(.+):([0-9]{1,5})|env://", rendezvous)
    if not found:
        raise PlacementError(
            f"rendezvous={rendezvous!r} is not a meeting point; write tcp://HOST:PORT or env://"
        )
    said = {"RANK": str(rank), "WORLD_SIZE": str(size)}
    return said | ({"MASTER_ADDR": found[1].strip("[]"), "MASTER_PORT": found[2]} if found[1] else {})


def exports(p: Placement, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """torch's variables as torchrun sets them; what `env` already says of roles and restarts stays."""
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
    """Which of the devices this process sees is its own; None where it sees none."""
    if visible < 2:
        return 0 if visible else None
    if p.local_rank >= visible:
        raise PlacementError(
            f"local rank {p.local_rank} has no device of its own among the {visible} that are visible; "
            f"start at most {visible} processes on this node"
        )
    return p.local_rank


def idle_devices(p: Placement, visible: int, script: str) -> str | None:
    """What rank 0 says, for all, of devices of its node that no process uses."""
    size = p.local_size
    if p.rank != 0 or visible <= size:
        return None
    use = "1 process of this node uses 1" if size == 1 else f"{size} processes of this node use {size}"
    write = f"`samestep run {script}` uses all" if p.size == 1 else f"start {visible} processes on each node"
    if p.launcher == "slurm":
        write = f"write `srun --ntasks-per-node={visible}`"
    return f"{visible} devices are visible and {use} of them; {write}"


def _complete(known: Facts) -> tuple[Facts, tuple[str, ...]]:
    """The facts that follow from the others, and a note where one had to be assumed."""
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
    for name, of in (("rank", size), ("local_rank", local_size), ("node", nodes)):
        if facts[name].number >= of.number:
            raise facts[name].wrong(f" but {of}; count from 0 to {of.variable} - 1")
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


def _meeting(env: Env, found: LauncherFacts, run: str | None) -> tuple[tuple[str, str] | None, Fact | None]:
    if found.launcher == "alone":
        return None, None
    host, port = launchers.text(env, "MASTER_ADDR"), launchers.fact(env, "MASTER_PORT")
    if host and not _HOST.fullmatch(host):
        raise PlacementError(
            f"MASTER_ADDR is {printable(host)}, which is not a host name; set a name or an address",
            variable="MASTER_ADDR",
        )
    if port and not 0 < port.number < 1 << 16:
        raise port.wrong(", which is not a port; set one from 1 to 65535")
    size = found.facts["size"]
    if found.launcher in _BELOW_TASKS and size.number > 1 and not (host and port):
        missing = "MASTER_PORT" if host else "MASTER_ADDR"
        raise PlacementError(
            f"{size} but {missing} is not set; start this with `samestep run` or set both MASTER_ADDR and MASTER_PORT",
            variable=missing,
        )
    derived_address, derived_port = launchers.meeting(env, found, run)
    return (host, f"MASTER_ADDR={host}") if host else derived_address, port or derived_port


def _core_note(env: Env, found: LauncherFacts, usable: int | None, cores: int) -> tuple[str, ...]:
    """srun and mpirun may bind a process to one core, which slows every step and shows nowhere."""
    if usable is None or found.launcher in ("alone", *_BELOW_TASKS):
        return ()
    # srun, since Slurm 22.05, does not read it from sbatch.
    asked = launchers.count(env, "SLURM_CPUS_PER_TASK") if found.launcher == "slurm" else 0
    asked = asked or (cores // found.facts["local_size"].number if usable == 1 else 0)
    if usable >= asked:
        return ()
    how = {"slurm": "srun --cpus-per-task", "openmpi": "mpirun --map-by slot:PE"}.get(found.launcher)
    write = f"write `{how}={asked}`" if how else f"bind each to {asked}"
    return (f"{found.launcher} lets this process use {usable} of {counted(cores, 'core')}; {write}",)


def _is_batch_script() -> bool:
    for pid, name in _ancestors():
        if name == "slurmstepd":
            return ".batch]" in read_text(Path(f"/proc/{pid}/cmdline"))
    return False


def _mpi_daemon() -> str | None:
    """MPICH names no run in its processes' variables, but their ancestor knows where mpirun listens."""
    for pid, name in _ancestors():
        if name.startswith(("hydra_", "mpispawn")):
            found = re.search(r"--control-port\0([^\0]+)", read_text(Path(f"/proc/{pid}/cmdline")))
            return f"mpirun at {found[1]}" if found else f"the mpirun daemon, process {pid}"
    return None


def _ancestors() -> Iterator[tuple[int, str]]:
    """This process, what started it, and so on, with their names."""
    pid = os.getpid()
    while pid > 1:
        name, _, status = read_text(Path(f"/proc/{pid}/stat")).rpartition(")")
        if not status:
            return
        yield pid, name.partition("(")[2]
        pid = int(status.split()[1])
