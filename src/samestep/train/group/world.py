"""Who this process is: adopts whatever started it, and joins the group of all ranks."""

import atexit
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import samestep
from samestep.errors import PlacementError, RanksDiffer, SamestepError, UsageError
from samestep.placement.cores import cores
from samestep.placement.devices import (
    COUNTED,
    CUBLAS,
    FIXED_CUBLAS,
    masking_variable,
    own_instance,
    visible_devices,
)
from samestep.placement.place import Placement, device_index, exports, idle_devices, this_process
from samestep.rendezvous.listen import allow_descriptors
from samestep.rendezvous.tree import Tree
from samestep.rundir import begin_run, start_record
from samestep.text import name_ranks
from samestep.train.group import rendezvous
from samestep.train.group.control import Control
from samestep.train.group.device import kind_of_device, overlaps, reads_cublas, uuid_of, why_unused
from samestep.train.group.group import Group, restore_environment


@dataclass(frozen=True)
class World:
    """Facts about this process and its run; `samestep.init()` returns them.

    rank, size: the number of this process, from 0, and how many processes there are.
    local_rank, local_size: the same among the processes of this node.
    node, nodes: the number of this node, from 0, and how many nodes there are.
    device: where the model and the batches of this process belong.
    launcher: what started this process: "alone", "samestep", "torchrun", "slurm", "openmpi", …
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    device: torch.device
    launcher: str


_GLOO_FILES = 2

_group: Group | None = None


def init(*, backend: str | None = None, timeout: timedelta = timedelta(minutes=10)) -> World:
    """Collective. Join the group of all ranks that the launcher started; under plain `python` a group of one.

    Call it first, before the model is made. A second call returns the same World. The process leaves the group by
    itself when it ends.

    backend: of torch.distributed, such as "gloo" or "nccl"; by default the one for this process's device.
    timeout: how long a rank waits for the others before it raises RankMissing; default 10 minutes.

    Returns the World. Raises PlacementError if the environment contradicts itself, RanksDiffer if the ranks run
    different versions, RankMissing if a rank does not come.

        device = samestep.init().device
        model = Net().to(device)
    """
    if _group is None:
        backend = os.environ.get("SAMESTEP_BACKEND") or backend
        if backend is not None:
            _check_backend(backend)
        if not isinstance(timeout, timedelta):
            raise UsageError(
                f"timeout={timeout!r} is not a timedelta; write timedelta(seconds={timeout})"
                if isinstance(timeout, int | float)
                else f"timeout={timeout!r} is not a timedelta; write timedelta(minutes=10)"
            )
        _open(backend, timeout)
    return joined().world  # type: ignore[no-any-return]


@contextmanager
def first() -> Iterator[None]:
    """Collective. Context manager: one process of each node runs the block before the others of its node do.

    Use it for a download, or a file that is made once: the first process makes it, the others find it. Raises
    RankMissing if a rank does not come.

        with samestep.first():
            data = download("data/")
    """
    group = joined()
    if group.world.local_rank == 0:
        yield
    group.all_gather("samestep.first")
    if group.world.local_rank != 0:
        yield


def joined() -> Group:
    """Collective. The group of this process; the first call joins it."""
    if _group is None:
        init()
    assert _group is not None
    return _group


def close() -> None:
    """Collective. Leave the group; `init` may join another one later."""
    global _group
    if _group is not None:
        group, _group = _group, None
        group.close()


def _open(backend: str | None, timeout: timedelta) -> None:
    global _group
    atexit.unregister(_leave)
    atexit.register(_leave, os.getpid())
    before = dict(os.environ)
    here, tree, control = this_process(), None, None
    interface: Mapping[str, str] = {}
    if here.size > 1:
        facts = _facts(here, None)
        here, tree, interface = rendezvous.find(here, timeout, facts=facts, objection=_objection)
    os.environ.update(own_instance(os.environ, here.local_rank))
    device = _take_device(here)
    if reads_cublas(device):
        os.environ.setdefault(CUBLAS, FIXED_CUBLAS[0])
    if here.rank == 0 and here.launcher == "slurm":
        _begin_run(here)
    own_cores = len(cores())
    if tree is not None:
        os.environ.update(exports(here, os.environ))
        with _variables(interface):
            control, own_cores = _join(here, tree, device, backend, timeout)
    if here.rank == 0:
        for note in here.notes:
            print(f"samestep: {note}", file=sys.stderr)
    places = (here.rank, here.size, here.local_rank, here.local_size, here.node, here.nodes)
    changed = {name: before.get(name) for name, value in os.environ.items() if before.get(name) != value}
    _group = Group(World(*places, device, here.launcher), control, own_cores, changed, timeout)


@contextmanager
def _variables(some: Mapping[str, str]) -> Iterator[None]:
    """While entered, these are set; a job that is submitted later, perhaps to other machines, inherits none."""
    before = {name: os.environ.get(name) for name in some}
    os.environ.update(some)
    try:
        yield
    finally:
        restore_environment(before)


def _leave(pid: int) -> None:
    if os.getpid() != pid:
        return
    if _group is not None:
        _group.leave()
    elif dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()


def _take_device(here: Placement) -> torch.device:
    """The device of this process, chosen before any group is made: NCCL binds to the current device."""
    kind = kind_of_device(here.size)
    if kind == "cpu":
        _say_unused(here)
        return torch.device(kind)
    visible = torch.accelerator.device_count()
    index = device_index(here, visible)
    if idle := idle_devices(here, visible, sys.argv[0]):
        print(f"samestep: {idle}", file=sys.stderr)
    if index is None or not overlaps(torch.device(kind)):
        return torch.device(kind)
    torch.accelerator.set_device_index(index)
    return torch.device(kind, index)


def _say_unused(here: Placement) -> None:
    """Devices are here, and torch cannot use them: a driver does not match, or torch was built for CPU alone."""
    counted = os.environ.get(COUNTED)
    if not counted and (here.rank or torch.accelerator.is_available()):
        return
    count = int(counted or len(visible_devices(os.environ)))
    if not count:
        return
    said = (
        f"{count} {'devices are' if count > 1 else 'device is'} visible, and torch {torch.__version__} cannot train on "
        f"{'them' if count > 1 else 'it'} ({why_unused(masking_variable(os.environ))}); install a torch for this driver"
    )
    if counted:
        raise PlacementError(f"{said}, or write -n {count} to train on the cores")
    print(f"samestep: {said}; this run trains on the cores", file=sys.stderr)


def _begin_run(here: Placement) -> None:
    """Where a batch script names a directory for its run, `samestep status` and the others find it there."""
    if not (run := os.environ.get("SAMESTEP_RUN")):
        return
    try:
        begin_run(Path(run), start_record([sys.executable, *sys.argv], here.size, time.time()))
    except OSError as error:
        reason = (error.strerror or "").lower()
        print(f"samestep: {run} cannot be written ({reason}); the run goes on without it", file=sys.stderr)


def _check_backend(backend: str) -> None:
    for part in str(backend).split(","):
        name = part.split(":")[-1]
        if not dist.is_backend_available(name):
            known = [one for one in ("gloo", "nccl", "xccl", "mpi", "ucc") if dist.is_backend_available(one)]
            raise UsageError(f"backend {name!r} is not in this build of torch; use one of {', '.join(known)}")


def _join(
    here: Placement, tree: Tree, device: torch.device, backend: str | None, timeout: timedelta
) -> tuple[Control, int]:
    """The control channel, and how many cores this process shares with no other rank."""
    backend = backend or dist.get_default_backend_for_device(device)
    _check_backend(backend)
    of_nccl = overlaps(device) and "nccl" in backend
    control = Control(tree, timeout)
    if of_nccl:
        _check_devices(control, here, device)
    if not dist.is_initialized():
        if "gloo" in backend:
            allow_descriptors(
                _GLOO_FILES * here.size, f"Gloo connects each of {here.size} ranks to all others"
            )
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("samestep/world", control.store),  # type: ignore[attr-defined]
            rank=here.rank,
            world_size=here.size,
            timeout=timeout,
            device_id=device if of_nccl else None,
        )
    control.all_gather("samestep.init", b"", None)
    own_cores = max(1, len(cores()) // tree.seat.sharing)
    _set_threads(here, own_cores)
    return control, own_cores


def _facts(here: Placement, device: torch.device | None) -> dict[str, Any]:
    """What must be alike on all ranks, and what each needs for itself."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "samestep": samestep.__version__,
        "host": socket.gethostname(),
        "node": here.node,
        "cores": cores(),
        "device": device and [str(device), uuid_of(device)],
    }


def _check_devices(control: Control, here: Placement, device: torch.device) -> None:
    """Collective. Done before the group is made: NCCL does not name a device that ranks share."""
    everyones, _ = control.all_gather(
        "samestep.init", json.dumps([here.node, uuid_of(device)]).encode(), None
    )
    if len(set(everyones)) < here.size:
        ranks, _ = control.all_gather("samestep.init", json.dumps(_facts(here, device)).encode(), None)
        if objection := _objection([json.loads(facts) for facts in ranks]):
            raise objection


def _objection(ranks: Sequence[Mapping[str, Any]]) -> SamestepError | None:
    """Why these processes cannot be one world, if so."""
    for fact in ("torch", "samestep", "python"):
        for rank, facts in enumerate(ranks):
            if facts[fact] != ranks[0][fact]:
                return RanksDiffer(
                    f"{fact} is {ranks[0][fact]} on rank 0 ({ranks[0]['host']}) and {facts[fact]} on rank {rank} "
                    f"({facts['host']}); start every rank from the same environment"
                )
    holders: dict[Any, list[int]] = {}
    for rank, facts in enumerate(ranks):
        if facts["device"]:
            holders.setdefault((facts["node"], facts["device"][1]), []).append(rank)
    for sharing in holders.values():
        if len(sharing) > 1:
            facts = ranks[sharing[0]]
            return UsageError(
                f"{name_ranks(sharing)} of {len(ranks)} share one device ({facts['device'][0]} on "
                f"{facts['host']}), which NCCL cannot; start one process a device, or use init(backend='gloo')"
            )
    return None


def _set_threads(here: Placement, own_cores: int) -> None:
    """Use as many threads as this process has cores; torchrun's OMP_NUM_THREADS=1 is only its default."""
    asked = os.environ.get("OMP_NUM_THREADS")
    if not asked or (here.launcher == "torchrun" and asked == "1"):
        torch.set_num_threads(own_cores)
