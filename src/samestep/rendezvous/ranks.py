"""Connects the ranks of a run: by a private socket on one machine, else at a port, or where a note says; no torch."""

import os
import zlib
from collections.abc import Callable, Sequence
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
from samestep.rendezvous.member import Member, Place, place_from, place_of
from samestep.rendezvous.tree import Tree

_NO_NOTE_S = 120.0
Publish = Callable[[Sequence[Place]], Sequence[Any]]


def connect_ranks(here: Placement, limit_s: float, publish: Publish | None = None, **about: Any) -> Tree:
    """Collective. Connect this process with all ranks of its run; `about` is more of what Member holds.

    `publish` takes where rank 0 listens, and gives it to the others, which bring nothing.
    """
    key, run = key_of_run(os.environ, here.launcher), here.run or ""
    path = private_path(os.urandom(32)) if publish else private_path(key, run, str(here.master_port))
    expected = hosts_of_ranks(os.environ, here.size)
    me = Member(run, here.rank, here.size, key, limit_s=limit_s, expected=expected, private=path, **about)
    is_local = is_one_machine(here)
    if not (publish or is_local or (here.master_addr and here.master_port)):
        return _by_note(here, me)
    if here.rank == 0:
        with private_socket(path) as private:
            listeners = [private]
            if publish and not is_local:
                listeners += listen([0], addresses.own_addresses() or [LOOP])
            elif not is_local:
                name = f"{here.master_addr}{_suffix(here)}"
                listeners += listen(_ports(here), addresses_for(name), here.origin.get("master_port", ""))
            if publish:
                publish([place_of(listener) for listener in listeners])
            return host(listeners, me)
    if publish:
        places = [place_from(place) for place in publish([])]
    elif is_local or (here.node == 0 and "=" in here.origin.get("node", "")):
        places = [str(path)]
    else:
        names = addresses.resolve(here.master_addr or LOOP, _suffix(here))
        places = [(name, port) for port in _ports(here) for name in names]
    return join(lambda: places, me)


def is_one_machine(here: Placement) -> bool:
    """Whether all ranks are known to run on one machine."""
    is_told = here.nodes == 1 and here.origin.get("local_size") != ASSUMED
    return is_told or here.master_addr in ("localhost", LOOP, "::1")


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
    return note.meet(path, replace(me, nowhere=nowhere, untold_s=min(me.limit_s, _NO_NOTE_S)))


def _ports(here: Placement) -> list[int]:
    port = here.master_port or 0
    return [port] if _is_given(here, "master_port") else port_choices(port)


def _suffix(here: Placement) -> str:
    return "" if _is_given(here, "master_addr") else os.environ.get("SAMESTEP_ADDRESS_SUFFIX", "")


def _is_given(here: Placement, fact: str) -> bool:
    return here.origin.get(fact, "").lower().startswith(f"{fact}=")
