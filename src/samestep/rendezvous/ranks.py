"""Connects the ranks of a run: by a private socket on one machine, else at a port, or where a note says; no torch."""

import os
import socket
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from samestep.errors import PlacementError
from samestep.placement.launchers import hosts_of_ranks, port_choices
from samestep.placement.place import ASSUMED, Placement
from samestep.rendezvous import addresses, note
from samestep.rendezvous.host import host
from samestep.rendezvous.join import join
from samestep.rendezvous.key import key_of_run
from samestep.rendezvous.listen import LOOP, addresses_for, listen, private_path, private_socket
from samestep.rendezvous.member import Member, Place
from samestep.rendezvous.tree import Tree

_NO_NOTE_S = 120.0
Publish = Callable[[Sequence[Place]], Sequence[Place]]


def connect_ranks(here: Placement, limit_s: float, publish: Publish | None = None, **about: Any) -> Tree:
    """Collective. Connect this process with all ranks of its run; `about` is more of what Member holds.

    `publish` takes where rank 0 listens, and gives it to the others, which bring nothing.
    """
    key = key_of_run(os.environ, here.launcher)
    expected = hosts_of_ranks(os.environ, here.size)
    run = here.run or ""
    path = private_path(os.urandom(32)) if publish else private_path(key, run, str(here.master_port))
    me = Member(run, here.rank, here.size, key, limit_s=limit_s, expected=expected, private=path, **about)
    if publish:
        return _published(here, me, publish)
    is_alone = is_one_machine(here)
    if not is_alone and (here.master_addr is None or here.master_port is None):
        return _by_note(here, me)
    if here.rank == 0:
        with ExitStack() as stack:
            private = stack.enter_context(private_socket(path))
            return host([private, *([] if is_alone else _doors(here))], me)
    if is_alone or (here.node == 0 and "=" in here.origin.get("node", "")):
        return join(lambda: [str(path)], me)
    names = addresses.resolve(here.master_addr or LOOP, _suffix(here))
    return join(lambda: [(name, port) for port in _ports(here) for name in names], me)


def is_one_machine(here: Placement) -> bool:
    """Whether all ranks are known to run on one machine."""
    is_told = here.nodes == 1 and here.origin.get("local_size") != ASSUMED
    return is_told or here.master_addr in ("localhost", LOOP, "::1")


def _published(here: Placement, me: Member, publish: Publish) -> Tree:
    if here.rank:
        places = publish([])
        return join(
            lambda: [place if isinstance(place, str) else (place[0], place[1]) for place in places], me
        )
    if is_one_machine(here):
        assert me.private is not None
        with private_socket(me.private) as private:
            publish([str(me.private)])
            return host([private], me)
    listeners = listen([0], addresses.own_addresses() or [LOOP])
    publish([one.getsockname()[:2] for one in listeners])
    return host(listeners, me)


def _by_note(here: Placement, me: Member) -> Tree:
    """mpirun does not say where rank 0 runs, so rank 0 leaves a note where the run's files go."""
    if here.run is None or here.master_addr is not None:
        names = ("MASTER_ADDR", "MASTER_PORT") if here.master_addr is None else ("MASTER_PORT",)
        raise PlacementError(
            f"{here.launcher} does not say where rank 0 listens; set {' and '.join(names)} for every rank",
            variable=names[0],
        )
    folder = Path(os.environ.get("SAMESTEP_RUN_DIR") or "runs").absolute()
    path = folder / f".meet-{zlib.crc32(here.run.encode(errors='replace')):08x}"
    nowhere = (
        f"{here.launcher} does not say where rank 0 listens, and there is no note of it at {path}; "
        "set MASTER_ADDR to rank 0's host, or SAMESTEP_RUN_DIR to a directory that all nodes share"
    )
    # mpirun starts all ranks together: where no note comes soon, the directory is not shared.
    no_note_s = min(me.limit_s, _NO_NOTE_S)
    return note.meet(path, replace(me, nowhere=nowhere, untold_s=no_note_s))


def _doors(here: Placement) -> list[socket.socket]:
    name = f"{here.master_addr}{_suffix(here)}"
    return listen(_ports(here), addresses_for(name), here.origin.get("master_port", ""))


def _ports(here: Placement) -> list[int]:
    port = here.master_port or 0
    is_given = here.origin.get("master_port", "").lower().startswith("master_port=")
    return [port] if is_given else port_choices(port)


def _suffix(here: Placement) -> str:
    is_given = here.origin.get("master_addr", "").lower().startswith("master_addr=")
    return "" if is_given else os.environ.get("SAMESTEP_ADDRESS_SUFFIX", "")
