"""`init` and `World`: finds out what started this process, and joins the group of all ranks."""

import atexit
import gc
import os
import platform
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

import samestep
from samestep.errors import SamestepError, UsageError
from samestep.failure import add_remedy
from samestep.placement.devices import CUBLAS, FIXED_CUBLAS, cores, own_instance
from samestep.placement.place import Placement, by_hand, exports, this_process
from samestep.rendezvous.channel import as_kind
from samestep.rendezvous.listen import LOOP, allow_descriptors
from samestep.rendezvous.member import say
from samestep.text import duration, name_ranks
from samestep.train.group import rendezvous
from samestep.train.group.alive import load_and_freeze
from samestep.train.group.device import overlaps, take_device, uuid_of
from samestep.train.group.group import Group, open_pulse, restore_environment
from samestep.train.group.layout import Place, say_layout
from samestep.train.group.store import TreeStore
from samestep.train.group.tasks import Output, share_run

_GLOO_FILES = 2
_DRAWN_SEED = 1 << 48  # torch draws seeds of 64 bits; people write smaller seeds

_group: Group | None = None


@dataclass(frozen=True)
class World:
    """Facts about this process and its run; `samestep.init()` returns them.

    rank, size: the number of this process, from 0, and how many processes there are.
    local_rank, local_size: the same among the processes of this node.
    node, nodes: the number of this node, from 0, and how many nodes there are.
    device: where the model and the batches of this process belong.
    launcher: what started this process: "alone", "samestep", "torchrun", "slurm", "openmpi", …
    cores: how many cores this process has to itself.
    host, hosts: the name of this node's machine, and those of all nodes.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int
    device: torch.device
    launcher: str
    cores: int = 1
    host: str = ""
    hosts: tuple[str, ...] = ()


def init(
    *,
    backend: str | None = None,
    timeout: timedelta = timedelta(minutes=10),
    rank: int | None = None,
    size: int | None = None,
    rendezvous: str = "env://",
) -> World:
    """Collective. Join the group of all ranks that the launcher started; under plain `python` a group of one.

    Call it first, before the model is made. A second call returns the same World, and takes no other settings. The
    process leaves the group by itself when it ends.

    backend: of torch.distributed, such as "gloo" or "nccl"; by default the one for this process's device.
    timeout: how long a rank waits for the others before it raises RankMissing; default 10 minutes.
    rank, size: for a script that starts its own processes (`mp.spawn`, or by hand with flags): which of how many this
        is. By default what the launcher says.
    rendezvous: where these meet: "tcp://HOST:PORT" of rank 0, or "env://" (default) for MASTER_ADDR and MASTER_PORT.

    Returns the World. Raises PlacementError if the environment contradicts itself, RanksDiffer if the ranks run
    different versions, RankMissing if a rank does not come.

        device = samestep.init().device
        model = Net().to(device)
    """
    if not isinstance(timeout, timedelta):
        raise UsageError(
            f"timeout={timeout!r} is not a timedelta; write timedelta(seconds={timeout})"
            if isinstance(timeout, int | float)
            else f"timeout={timeout!r} is not a timedelta; write timedelta(minutes=10)"
        )
    if _group is None:
        if rank is not None or size is not None:
            os.environ.update(by_hand(rank, size, rendezvous))
        backend = os.environ.get("SAMESTEP_BACKEND") or backend
        if backend is not None:
            _check_backend(backend)
        try:
            _open(backend, timeout)
        except SamestepError as error:
            raise error.with_traceback(None) from None  # it says all; the frames of samestep say nothing more
    elif timeout not in (timedelta(minutes=10), _group.timeout):
        raise UsageError(
            f"init got a timeout of {duration(timeout.total_seconds())}, and this process has joined its group with "
            f"{duration(_group.timeout.total_seconds())}, in an earlier init, loader or replicate; call init with the "
            "timeout before them"
        )
    return joined().world  # type: ignore[no-any-return]


@contextmanager
def first(*, per: str = "node") -> Iterator[None]:
    """Collective. Context manager: one process of each node runs the block before the others of its node do.

    Use it for a download, or a file that is made once: the first process makes it, the others find it. Raises
    RankMissing if a rank does not come.

    per: "node" (default), for a disk of each node; "run" for a directory that all nodes share: one process of the run
        goes before all others.

        with samestep.first():
            data = download("data/")
    """
    if per not in ("node", "run"):
        raise UsageError(f"first got per={per!r}, which is neither 'node' nor 'run'; write one of them")
    group = joined()
    is_first = (group.world.local_rank if per == "node" else group.world.rank) == 0
    if is_first:
        yield
    group.all_gather("samestep.first")
    if not is_first:
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
    """Find this process's place, connect to the other ranks, take a device and open torch's group, in this order."""
    global _group
    atexit.unregister(_leave)
    atexit.register(_leave, os.getpid())
    before = dict(os.environ)
    here, tree, store, own_cores = this_process(), None, None, len(cores())
    interface: Mapping[str, str] = {}
    pulse = open_pulse(here.rank, timeout)
    if here.size > 1:
        here, tree, interface = rendezvous.find(here, timeout, _facts())
    os.environ.update(own_instance(os.environ, here.local_rank))
    device = take_device(here)
    os.environ.setdefault(CUBLAS, FIXED_CUBLAS[0])
    output = None
    if run := share_run(here, tree, timeout.total_seconds()):
        os.environ["SAMESTEP_RUN"] = run
        pulse = pulse or open_pulse(here.rank, timeout)
        output = Output(here.rank)
    backend = (backend or dist.get_default_backend_for_device(device)) if tree else ""
    own = Place(here.node, socket.gethostname(), str(device), own_cores, backend, "", "")
    places = [own]
    if tree is not None:
        os.environ.update(exports(here, os.environ))
        store = TreeStore(tree, timeout)
        own = own._replace(
            cores=max(1, own_cores // tree.position.sharing[str(cores())]),
            interface=interface.get("GLOO_SOCKET_IFNAME", ""),
            address=tree.position.address or LOOP,
        )
        with _variables(interface):
            places = _open_process_group(here, store, device, own, timeout)
        _set_threads(here, own.cores)
    if here.rank == 0:
        say_layout(places)
    for note in here.notes if here.rank == 0 else ():
        say(note)
    at = (here.rank, here.size, here.local_rank, here.local_size, here.node, here.nodes)
    hosts = tuple(host for _, host in sorted({(place.node, place.host) for place in places}))
    changed = {name: before.get(name) for name, value in os.environ.items() if before.get(name) != value}
    world = World(*at, device, here.launcher, own.cores, own.host, hosts)
    _group = Group(world, store, changed, timeout, output, pulse)
    if tree is not None:
        _draw_alike(_group)
        _group.hidden = load_and_freeze()
        _watch_end()


def _open_process_group(
    here: Placement, store: TreeStore, device: torch.device, own: Place, timeout: timedelta
) -> list[Place]:
    """Collective. Open torch's default group over the tree, or use the group that the script has opened."""
    backend, tree = own.backend, store.tree
    _check_backend(backend)
    limit_s, of_nccl = timeout.total_seconds(), overlaps(device) and "nccl" in backend
    own = own._replace(uuid=uuid_of(device) if of_nccl else "")
    places = tree.gather(own, limit_s, partial(as_kind, Place))
    if of_nccl:  # NCCL's own error does not name the device that ranks share
        _check_devices(places)
    if not dist.is_initialized():
        if "gloo" in backend:
            files = _GLOO_FILES * here.size
            allow_descriptors(files, f"Gloo connects each of {here.size} ranks to all others")
        try:
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("samestep/world", store),  # type: ignore[attr-defined]
                rank=here.rank,
                world_size=here.size,
                timeout=timeout,
                device_id=device if of_nccl else None,
            )
        except RuntimeError as error:
            add_remedy(error)
            raise
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) != (here.rank, here.size):
        raise UsageError(
            f"the script's init_process_group made this rank {rank} of {size}, but it is rank {here.rank} of "
            f"{here.size}; call it without rank and world_size, or leave it out: samestep.init() makes the group"
        )
    return places


def _draw_alike(group: Group) -> None:
    """Collective. If the script has not seeded torch, give all ranks rank 0's random stream."""
    own = torch.get_rng_state().numpy().tobytes() if torch.initial_seed() >= _DRAWN_SEED else b""
    first = group.broadcast("samestep.init", own)
    if own and first:
        torch.set_rng_state(torch.frombuffer(bytearray(first), dtype=torch.uint8))


@cache
def _watch_end() -> None:
    """Note the script's end before Python waits for threads and calls what the script has registered."""
    threading._register_atexit(_note_end_of_script)  # type: ignore[attr-defined]


def _note_end_of_script() -> None:
    if _group is not None:
        _group.leaving.note_end_of_script()


def _leave(pid: int) -> None:
    if os.getpid() != pid:
        return
    if _group is not None:
        _group.leaving.at_exit()
    elif dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()
    if "triton._C.libtriton" in sys.modules:
        gc.unfreeze()  # from torch 2.15 on, Triton complains of what Python does not collect at its end


@contextmanager
def _variables(some: Mapping[str, str]) -> Iterator[None]:
    """Context manager: set variables for a while; a job that the script submits later must not inherit them."""
    before = {name: os.environ.get(name) for name in some}
    os.environ.update(some)
    try:
        yield
    finally:
        restore_environment(before)


def _check_backend(backend: str) -> None:
    for part in str(backend).split(","):
        name = part.split(":")[-1]
        if not dist.is_backend_available(name):
            known = [
                other for other in ("gloo", "nccl", "xccl", "mpi", "ucc") if dist.is_backend_available(other)
            ]
            raise UsageError(f"backend {name!r} is not in this build of torch; use one of {', '.join(known)}")


def _facts() -> dict[str, Any]:
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    return versions | {"samestep": samestep.__version__, "cores": cores()}


def _check_devices(places: Sequence[Place]) -> None:
    ranks_of: dict[tuple[int, str], list[int]] = {}
    for rank, place in enumerate(places):
        ranks_of.setdefault((place.node, place.uuid), []).append(rank)
    for ranks in ranks_of.values():
        if len(ranks) > 1:
            at = places[ranks[0]]
            raise UsageError(
                f"{name_ranks(ranks)} of {len(places)} share one device ({at.device} on {at.host}), which NCCL cannot; "
                "start one process a device, or use init(backend='gloo')"
            )


def _set_threads(here: Placement, own_cores: int) -> None:
    """Use as many threads as this process has cores; OMP_NUM_THREADS=1 under torchrun is only its default."""
    asked = os.environ.get("OMP_NUM_THREADS")
    if not asked or (here.launcher == "torchrun" and asked == "1"):
        torch.set_num_threads(own_cores)
