"""Connects the ranks of a run: by a private socket on a single machine, by a port, or by a note; no torch."""

import os
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from samestep.errors import PlacementError
from samestep.files import is_own_directory
from samestep.placement.launchers import hosts_of_ranks, port_choices
from samestep.placement.place import ASSUMED, Placement
from samestep.rendezvous import addresses, note
from samestep.rendezvous.host import host
from samestep.rendezvous.join import join
from samestep.rendezvous.key import key_of_run
from samestep.rendezvous.listen import LOOP, addresses_for, listen, private_folder, private_socket
from samestep.rendezvous.member import Member
from samestep.rendezvous.tree import Tree

_NO_NOTE_S = 120.0
_TURNS = "01234567"
_FIRST = "0-0"


def connect_ranks(
    here: Placement, limit_s: float, facts: Mapping[str, Any] | None = None, *, is_port_used: bool = False
) -> Tree:
    """Collective. Connect this process with all ranks of its run, which compare some of their facts, as versions."""
    # If torch already listens at MASTER_PORT, rank 0 takes another port, which all ranks derive from it.
    key, run = key_of_run(os.environ, here.launcher), here.run or ""
    folders = [private_folder(key, run, str(here.master_port), turn) for turn in _TURNS]
    expected = hosts_of_ranks(os.environ, here.size)
    # a run that has no name may meet ranks of another run at its port
    script = "" if run else os.path.basename(sys.argv[0])
    sign = f"{folders[0].name}/{here.rank}"
    about: dict[str, Any] = {"facts": facts or {}, "script": script, "sign": sign}
    me = Member(run, here.rank, here.size, key, limit_s=limit_s, expected=expected, **about)
    is_local = is_one_machine(here)
    if not (is_local or (here.master_addr and here.master_port)):
        return _by_note(here, me)
    port = here.master_port or 0
    ports = [port] if _is_given(here, "master_port") and not is_port_used else port_choices(port)
    suffix = "" if _is_given(here, "master_addr") else os.environ.get("SAMESTEP_ADDRESS_SUFFIX", "")
    if here.rank == 0:
        with private_socket(_free(folders) / _FIRST) as private:
            listeners = [private]
            if not is_local:
                at, why = addresses_for(f"{here.master_addr}{suffix}"), here.origin.get("master_port", "")
                listeners += listen(ports, at, why)
            return host(listeners, me)
    if is_local or (here.node == 0 and "=" in here.origin.get("node", "")):
        return join(lambda: [str(folder / _FIRST) for folder in folders], me)
    names = addresses.resolve(here.master_addr or LOOP, suffix)
    return join(lambda: [(name, port) for port in ports for name in names], me)


def is_one_machine(here: Placement) -> bool:
    """Whether all ranks are known to run on one machine."""
    is_known = here.nodes == 1 and here.origin.get("local_size") != ASSUMED
    return is_known or here.master_addr in ("localhost", LOOP, "::1")


def _free(folders: Sequence[Path]) -> Path:
    """The first folder that no other user has taken: a name is visible in /tmp, and may be used again."""
    free = (folder for folder in folders if not os.path.lexists(folder) or is_own_directory(folder))
    return next(free, folders[0])


def _by_note(here: Placement, me: Member) -> Tree:
    """mpirun does not say where rank 0 runs, so rank 0 writes a note into the directory of the run's files."""
    if here.run is None or here.master_addr is not None:
        names = ("MASTER_ADDR", "MASTER_PORT") if here.master_addr is None else ("MASTER_PORT",)
        raise PlacementError(
            f"{here.launcher} does not say where rank 0 listens; set {' and '.join(names)} for every rank",
            variable=names[0],
        )
    folder = Path(os.environ.get("SAMESTEP_RUN_DIR") or "runs").absolute()
    path = folder / f".meet-{zlib.crc32(here.run.encode(errors='replace')):08x}"
    advice = (
        f"{here.launcher} does not say where rank 0 listens, and there is no note of it at {path}; "
        "set MASTER_ADDR to rank 0's host, or SAMESTEP_RUN_DIR to a directory that all nodes share"
    )
    # mpirun starts all ranks together: if no note appears soon, the directory is not shared.
    return note.meet(path, replace(me, advice=advice, no_place_s=min(me.limit_s, _NO_NOTE_S)))


def _is_given(here: Placement, fact: str) -> bool:
    return here.origin.get(fact, "").lower().startswith(f"{fact}=")
