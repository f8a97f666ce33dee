"""Connects the ranks of a run: at a given or derived port, or where a note says; no torch."""

import os
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from samestep.errors import PlacementError
from samestep.placement.launchers import hosts_of_ranks, port_choices
from samestep.placement.place import Placement
from samestep.rendezvous import addresses, note
from samestep.rendezvous.join import Member, host, join
from samestep.rendezvous.listen import listen
from samestep.rendezvous.peers import Peers

_LOOP = "127.0.0.1"
_NO_NOTE_S = 120.0


def connect_ranks(here: Placement, limit_s: float) -> Peers:
    """Collective. Connect this process with all ranks of its run."""
    expected = hosts_of_ranks(os.environ, here.size)
    me = Member(here.run or "", here.rank, here.size, limit_s=limit_s, expected=expected)
    if here.master_addr is None or here.master_port is None:
        return _by_note(here, me)
    said = here.origin.get("master_port", "")
    is_given = said.lower().startswith("master_port=")
    ports = [here.master_port] if is_given else port_choices(here.master_port)
    if here.rank == 0:
        return host(listen(ports, said), me)
    names = _names(here, here.master_addr)
    return join(lambda: [(name, port) for port in ports for name in names], me)


def _by_note(here: Placement, me: Member) -> Peers:
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


def _names(here: Placement, master: str) -> Sequence[str]:
    """Where rank 0's machine is for this process."""
    is_told = "=" in here.origin.get("node", "")
    if here.node == 0 and is_told:
        return [_LOOP]
    is_given = here.origin.get("master_addr", "").lower().startswith("master_addr=")
    return addresses.resolve(master, "" if is_given else os.environ.get("SAMESTEP_ADDRESS_SUFFIX", ""))
