"""How the ranks of a run find each other: a store that all share, reached over a network that was tried.

Below torchrun its own store is used. Everywhere else rank 0 opens a door at the given or derived port, the
others show that they belong to the same run, and a store is made for them at a port of its own.
"""

import json
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from samestep.errors import PlacementError
from samestep.placement.place import ASSUMED, Placement
from samestep.rendezvous import addresses
from samestep.rendezvous.join import Place, say
from samestep.rendezvous.listen import LOOP, listen
from samestep.rendezvous.peers import Peers
from samestep.rendezvous.ranks import Publish, connect_ranks, is_one_machine

_MOST_TRIED = 64


class Found(NamedTuple):
    """Where this process really is, a store that all ranks share, and variables that name its interface to torch."""

    here: Placement
    store: Any
    interface: dict[str, str]


def find(here: Placement, timeout: timedelta) -> Found:
    """Collective. Where this process is among all ranks, and what they share."""
    publish = None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not is_one_machine(here):
        publish = _through_store(here, timeout)
    with closing(connect_ranks(here, timeout.total_seconds(), publish)) as peers:
        return _meet(peers, here, timeout)


def _meet(peers: Peers, here: Placement, timeout: timedelta) -> Found:
    """Three rounds: on which machines, at which addresses, and whether these were reached."""
    limit_s = timeout.total_seconds()
    machine = addresses.machine()
    reached = peers.own_address if here.rank else ""
    roster = [tuple(one) for one in peers.gather([machine, reached], limit_s)]
    everyones = [one for one, _ in roster]
    machines = list(dict.fromkeys(everyones))
    here = _placed(here, everyones)
    if machine != machines[0]:
        address = reached
    else:
        away = next((reached for other, reached in roster if other != machine), None)
        address = addresses.source_for(away) if away else LOOP
    interface = _interface(address)
    store: Any = None
    if here.rank == 0:
        (held,) = listen([0], [address])
        port = held.getsockname()[1]
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, None, True, timeout, wait_for_workers=False, master_listen_fd=held.detach()
        )
    with listen([0], [address])[0] as door:
        at = peers.gather(
            [address, door.getsockname()[1], store and store.port, interface.get("GLOO_SOCKET_IFNAME")],
            limit_s,
        )
        firsts = [everyones.index(one) for one in machines]
        before = firsts[: firsts.index(here.rank)][-_MOST_TRIED:] if here.rank in firsts else []
        places = {(at[rank][0], at[rank][1]): rank for rank in before}
        lost = [places[place] for place in addresses.unreachable(places)]
        tried = peers.gather(lost, limit_s)
    _check_reached(tried, peers.names, at)
    meeting, port = at[0][0] if machine == machines[0] else peers.address, at[0][2]
    if store is None:
        store = dist.TCPStore(meeting, port, None, False, timeout, wait_for_workers=False)  # type: ignore[attr-defined]
    elif len(machines) > 1:
        through = ", ".join(dict.fromkeys(one[3] for one in at if one[3]))
        say(f"{here.size} ranks on {len(machines)} nodes meet at {address}:{port} through {through}")
    return Found(replace(here, master_addr=meeting, master_port=port), store, interface)


def _check_reached(tried: Sequence[Sequence[int]], names: Sequence[str], at: Sequence[Sequence[Any]]) -> None:
    for rank, lost in enumerate(tried):
        for other in lost:
            raise PlacementError(
                f"rank {rank} ({names[rank]}) cannot reach rank {other} ({names[other]}) at {at[other][0]} within "
                "2 s; open the network between them, or choose another with SAMESTEP_ADDRESS_SUFFIX"
            )


def _placed(here: Placement, machines: Sequence[str]) -> Placement:
    """What the launcher did not say, from the machines of all ranks."""
    if "=" in here.origin.get("node", "") and "=" in here.origin.get("local_rank", ""):
        return here
    mine = machines[here.rank]
    order = list(dict.fromkeys(machines))
    here = replace(here, node=order.index(mine), nodes=len(order))
    if here.origin.get("local_rank") != ASSUMED:
        return here
    return replace(
        here,
        local_rank=machines[: here.rank].count(mine),
        local_size=machines.count(mine),
        notes=tuple(note for note in here.notes if not note.startswith("nothing says which process")),
    )


def _through_store(here: Placement, timeout: timedelta) -> Publish:
    """torchrun's agent has the only port that the nodes know; its store says where rank 0 listens."""
    store, _, _ = next(dist.rendezvous("env://", here.rank, here.size, timeout=timeout))  # type: ignore[attr-defined]
    name = f"samestep/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"

    def publish(places: Sequence[Place]) -> Sequence[Place]:
        if places:
            store.set(name, json.dumps(places))
        found: list[Place] = json.loads(store.get(name))
        return found

    return publish


def _interface(address: str) -> dict[str, str]:
    """Gloo would ask what this machine's name resolves to, and NCCL takes the first that it finds."""
    name = addresses.interface_of(address)
    if name is None:
        return {}
    names = {"GLOO_SOCKET_IFNAME": name} | ({} if address == LOOP else {"NCCL_SOCKET_IFNAME": f"={name}"})
    return {variable: os.environ.get(variable, value) for variable, value in names.items()}
