"""How the ranks of a run find each other: builds a tree of connections, and tries the network between machines."""

import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from samestep.errors import PlacementError
from samestep.placement.place import ASSUMED, Placement
from samestep.rendezvous import addresses
from samestep.rendezvous.listen import LOOP, listen
from samestep.rendezvous.member import say
from samestep.rendezvous.position import Position
from samestep.rendezvous.ranks import connect_ranks
from samestep.rendezvous.tree import Tree

_MOST_TRIED = 64


def find(
    here: Placement, timeout: timedelta, facts: Mapping[str, Any]
) -> tuple[Placement, Tree, dict[str, str]]:
    """Collective. Connect to all ranks; returns this process's placement, the tree and variables for its interface."""
    is_port_used = dist.is_initialized() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    tree = connect_ranks(here, timeout.total_seconds(), facts, is_port_used=is_port_used)
    address = tree.position.address if tree.position.nodes > 1 else LOOP
    interface = _interface(address)
    here = placed(here, tree.position)
    if tree.position.nodes > 1:
        meeting = _try_network(
            tree, address, interface.get("GLOO_SOCKET_IFNAME", ""), timeout.total_seconds()
        )
        here = replace(here, master_addr=here.master_addr or meeting)
    return replace(here, master_addr=here.master_addr or LOOP), tree, interface


def _try_network(tree: Tree, address: str, interface: str, limit_s: float) -> str:
    """Collective. Raise if the first rank of a machine cannot reach those of others; returns rank 0's address."""
    with ExitStack() as stack:
        mine = None
        if tree.position.local_rank == 0:
            listener = stack.enter_context(listen([0], [address])[0])
            mine = [address, listener.getsockname()[1], socket.gethostname(), interface]
        at = {rank: place for rank, place in enumerate(tree.gather(mine, limit_s)) if place}
        before = [rank for rank in at if mine and rank < tree.number][-_MOST_TRIED:]
        places = {(at[rank][0], at[rank][1]): rank for rank in before}
        lost = [places[place] for place in addresses.unreachable(places)]
        for rank, others in enumerate(tree.gather(lost or None, limit_s)):
            for other in others or ():
                raise PlacementError(
                    f"rank {rank} ({at[rank][2]}) cannot reach rank {other} ({at[other][2]}) at {at[other][0]} within "
                    "2 s; open the network between them, or choose another with SAMESTEP_ADDRESS_SUFFIX"
                )
    if tree.number == 0:
        through = ", ".join(dict.fromkeys(place[3] for place in at.values() if place[3]))
        say(f"{tree.size} ranks on {tree.position.nodes} nodes meet at {address} through {through}")
    return str(at[0][0])


def placed(here: Placement, position: Position) -> Placement:
    """The placement, with the facts that the launcher did not give taken from the machines of all ranks."""
    if "=" in here.origin.get("node", "") and "=" in here.origin.get("local_rank", ""):
        return here
    here = replace(here, node=position.node, nodes=position.nodes)
    if here.origin.get("local_rank") != ASSUMED:
        return here
    notes = tuple(note for note in here.notes if not note.startswith("nothing says which process"))
    return replace(here, local_rank=position.local_rank, local_size=position.local_size, notes=notes)


def _interface(address: str) -> dict[str, str]:
    """Variables with the interface: by default Gloo resolves the host's name, and NCCL takes the first interface."""
    name = addresses.interface_of(address)
    if name is None and address == LOOP:
        raise PlacementError(
            f"no interface of {socket.gethostname()} has the address {LOOP}, over which ranks of one machine connect; "
            "bring the loopback interface up (`ip link set lo up`)"
        )
    if name is None:
        return {}
    names = {"GLOO_SOCKET_IFNAME": name} | ({} if address == LOOP else {"NCCL_SOCKET_IFNAME": f"={name}"})
    return {variable: os.environ.get(variable, value) for variable, value in names.items()}
