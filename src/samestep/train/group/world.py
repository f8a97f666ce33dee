"""Who this process is: adopts whatever started it, joins the group of all ranks, and leaves it cleanly."""

import atexit
import gc
import json
import multiprocessing
import os
import platform
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

import samestep
from samestep.errors import RanksDiffer, SamestepError, UsageError
from samestep.failure import write_failure
from samestep.placement.cores import cores
from samestep.placement.place import Placement, device_index, exports, idle_devices, this_process
from samestep.rundir import begin_run, start_record
from samestep.train.group import control as meet
from samestep.train.group import rendezvous

_LEAVE = timedelta(seconds=1)


@dataclass(frozen=True)
class World:
    """Facts about this process and its run."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    device: torch.device
    launcher: str


_world: World | None = None
_failed: int | None = None
_own_cores = 0
_leavers: weakref.WeakSet[Any] = weakref.WeakSet()


def init(*, backend: str | None = None, timeout: timedelta = timedelta(minutes=10)) -> World:
    """Collective. Adopts whatever started this process; a world of one under plain `python`."""
    global _world
    if _world is not None:
        return _world
    if backend is not None:
        _check_backend(backend)
    if not isinstance(timeout, timedelta):
        raise UsageError(f"timeout={timeout!r} is no timedelta; write timedelta(minutes=10)")
    atexit.register(_leave, os.getpid())
    here, store = this_process(), None
    if here.size > 1 and not dist.is_initialized():
        here, store = rendezvous.find(here, timeout)
    device = _take_device(here)
    if here.rank == 0 and here.launcher == "slurm":
        _begin_run(here)
    if here.size > 1:
        os.environ.update(exports(here, os.environ))
        _join(here, store, device, backend, timeout)
    if here.rank == 0:
        for note in here.notes:
            print(f"samestep: {note}", file=sys.stderr)
    _world = World(
        here.rank, here.size, here.local_rank, here.local_size, here.node, here.nodes, device, here.launcher
    )
    return _world


@contextmanager
def first() -> Iterator[None]:
    """Collective. One process of each node goes through the block before the others of its node."""
    world = init()
    if world.local_rank == 0:
        yield
    meet.meet("samestep.first")
    if world.local_rank != 0:
        yield


def own_cores() -> int:
    """How many cores this process need not share with another rank."""
    return _own_cores or len(cores())


def at_leaving(thing: Any) -> None:
    """Have thing.leave() called before this process leaves the group."""
    _leavers.add(thing)


def _take_device(here: Placement) -> torch.device:
    """The device of this process, chosen before any group is made: NCCL binds to the current one."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None or (kind.type == "mps" and here.size > 1):
        return torch.device("cpu")
    visible = torch.accelerator.device_count()
    index = device_index(here, visible)
    if idle := idle_devices(here, visible, sys.argv[0]):
        print(f"samestep: {idle}", file=sys.stderr)
    if index is None or kind.type == "mps":
        return torch.device(kind.type)
    torch.accelerator.set_device_index(index)
    return torch.device(kind.type, index)


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


def _join(here: Placement, found: Any, device: torch.device, backend: str | None, timeout: timedelta) -> None:
    backend = backend or dist.get_default_backend_for_device(device)
    _check_backend(backend)
    of_nccl = device.type == "cuda" and "nccl" in backend
    facts = json.dumps(_facts(here, device if of_nccl else None))
    store: meet.Store | None = None
    if found is not None:
        _check_alike(found, here.rank, here.size, facts, timeout)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("samestep/world", found),  # type: ignore[attr-defined]
            rank=here.rank,
            world_size=here.size,
            timeout=timeout,
            device_id=device if of_nccl else None,
        )
        store = dist.PrefixStore("samestep/meet", found)  # type: ignore[attr-defined]
    group = dist.new_group(backend="gloo", timeout=timeout)
    meet.sit_down(group, store, here.rank, here.size, timeout)
    ranks = [json.loads(one) for one in meet.meet("samestep.init", facts.encode())]
    if found is None and (objection := _objection(ranks)):
        raise objection
    mine = ranks[here.rank]
    _set_threads(here, sum((one["node"], one["cores"]) == (mine["node"], mine["cores"]) for one in ranks))
    _watch_failure()


def _facts(here: Placement, device: torch.device | None) -> dict[str, Any]:
    """What must be alike on all ranks, and what each needs for itself."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "samestep": samestep.__version__,
        "host": socket.gethostname(),
        "node": here.node,
        "cores": cores(),
        "device": device and [str(device), str(torch.cuda.get_device_properties(device).uuid)],
    }


def _check_alike(found: Any, rank: int, size: int, facts: str, timeout: timedelta) -> None:
    """Collective. Before the group is made: at other versions, or two on a device, NCCL fails in its own words."""
    store = dist.PrefixStore("samestep/facts", found)  # type: ignore[attr-defined]
    store.set(str(rank), facts)

    def everyones(name: str) -> list[str]:
        keys = [f"{name}{one}" for one in range(size)]
        store.wait(keys, timeout)
        return keys

    def objection() -> SamestepError | None:
        return _objection([json.loads(one) for one in store.multi_get(everyones(""))])

    if rank == 0:
        store.set("alike", "no" if objection() else "yes")
    store.wait(["alike"], timeout)
    if store.get("alike") == b"no" and (error := objection()):
        store.set(f"told {rank}", "")
        if rank == 0:  # whose end is the store's
            with suppress(RuntimeError):
                everyones("told ")
        raise error


def _objection(ranks: Sequence[Mapping[str, Any]]) -> SamestepError | None:
    """Why these processes cannot be one world, if so."""
    for fact in ("torch", "samestep", "python"):
        for rank, one in enumerate(ranks):
            if one[fact] != ranks[0][fact]:
                return RanksDiffer(
                    f"{fact} is {ranks[0][fact]} on rank 0 ({ranks[0]['host']}) and {one[fact]} on rank {rank} "
                    f"({one['host']}); start every rank from the same environment"
                )
    holders: dict[Any, list[int]] = {}
    for rank, one in enumerate(ranks):
        if one["device"]:
            holders.setdefault((one["node"], one["device"][1]), []).append(rank)
    for sharing in holders.values():
        if len(sharing) > 1:
            one = ranks[sharing[0]]
            return UsageError(
                f"{meet.ranks_in_words(sharing)} of {len(ranks)} share one device ({one['device'][0]} on "
                f"{one['host']}), which NCCL cannot; start one process a device, or use init(backend='gloo')"
            )
    return None


def _set_threads(here: Placement, sharing: int) -> None:
    """As many threads as cores of its own; torchrun's OMP_NUM_THREADS=1 is its default, not a wish."""
    global _own_cores
    _own_cores = max(1, len(cores()) // sharing)
    asked = os.environ.get("OMP_NUM_THREADS")
    if not asked or (here.launcher == "torchrun" and asked == "1"):
        torch.set_num_threads(_own_cores)


def _watch_failure() -> None:
    before: Callable[[type[BaseException], BaseException, TracebackType | None], Any] = sys.excepthook

    def note_failure(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        global _failed
        _failed = 130 if issubclass(kind, KeyboardInterrupt) else 1
        before(kind, error, traceback)
        write_failure(os.environ, error, _failed)

    sys.excepthook = note_failure


def _leave(pid: int) -> None:
    """At the end of the interpreter, also where the script forgot everything.

    Gloo's threads abort a process that exits under them, and a peer that is still sending does the same: so
    the replicas go first, then all ranks come together for a moment, then the groups are destroyed. A failed
    rank waits for nobody: it leaves at once with the code of its failure.
    """
    if os.getpid() != pid:
        return
    if _failed is not None:
        for child in multiprocessing.active_children():
            child.kill()
        _exit(_failed)
    lost = False
    for thing in list(_leavers):
        try:
            thing.leave()
        except SamestepError as error:
            lost = True
            print(f"samestep: {error}", file=sys.stderr)
    if dist.is_initialized():
        gc.collect()
        with suppress(SamestepError, RuntimeError):
            meet.meet("the end of the script", patience=_LEAVE)
        with suppress(RuntimeError):
            meet.stand_up()
            dist.destroy_process_group()
    if lost:
        _exit(1)


def _exit(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
