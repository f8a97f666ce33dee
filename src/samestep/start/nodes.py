"""Several machines' launchers as one: who brings how many processes, where their ranks meet, and who failed.

Covered: another number of processes on each node, restarts of all together, a node that fails, ends or falls
silent, and going on without a lost node or with another in its place. Not covered: more nodes than at the start.
"""

import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import samestep
from samestep.errors import RankMissing, UsageError
from samestep.hang import RankState
from samestep.placement.launchers import port_choices
from samestep.placement.place import Placement
from samestep.rendezvous import addresses, note
from samestep.rendezvous.channel import as_kind, checked
from samestep.rendezvous.host import host
from samestep.rendezvous.join import join
from samestep.rendezvous.key import derive, key_of_user
from samestep.rendezvous.listen import addresses_for, listen, listen_at
from samestep.rendezvous.member import Member
from samestep.rendezvous.tree import Tree
from samestep.rundir import CHECKPOINTED, STARTED, read_record
from samestep.start.signals import Asked, ending_signals

_SILENCE_S = 10.0
_TORCHRUN_PORT = 29_400
_END_S = 60.0
_AGAIN_S = 20.0  # what the nodes that are left have to find each other in
_ECHO_S = 2.0
_LONE_S = 30.0
# Of the ranks of other nodes that wait, or are waited for.
_RANKS = "ranks"
_FRESH_S = 3.0
_WORTH_TELLING_S = 2.0


class NodeMeeting(NamedTuple):
    """Which of how many nodes this is, and where their launchers meet: at a port of node 0, or by a file."""

    me: Member
    name: str = ""
    ports: Sequence[int] = ()
    file: Path | None = None
    least: int = 0  # nodes that go on where others are lost; 0: all of them


class NodeRanks(NamedTuple):
    """Which ranks of an attempt this node runs, and where they meet."""

    first: int
    total: int
    node: int
    nodes: int
    address: str
    port: int

    def place(self, local_rank: int, local_size: int) -> Placement:
        """The placement of a rank of this node."""
        at = (self.node, self.nodes, "samestep", self.address, self.port)
        return Placement(self.first + local_rank, self.total, local_rank, local_size, *at)


class End(NamedTuple):
    """How an attempt ended on a node."""

    code: int
    text: str | None
    place: str | None  # equal for two failures that are the same
    asked: int | None
    is_echo: bool
    at: float  # on node 0's clock and this one's: seconds after the attempt began
    step: int = -1  # the furthest that a rank of the node came to
    summary: str = ""  # for the line before the next attempt


class Past(NamedTuple):
    """What a run has been through: its starts after the first, those since it got further, and its furthest step."""

    generation: int = 0
    used: int = 0
    furthest: int = -1


def by_hand(options: Mapping[str, Any], script: str = "") -> NodeMeeting | None:
    """What the command line says of several nodes; None where it is about one."""
    least, count = numbers_of_nodes(str(options["nodes"] or "1"))
    number = options["node_rank"]
    if number is not None and not number < count:
        raise UsageError(f"--node-rank {number} does not fit --nodes {count}; count from 0 to {count - 1}")
    if count == 1:
        return None
    address, port = options["master_addr"], options["master_port"] or 29_500
    at = options["rendezvous"] or (f"tcp://{address}:{port}" if address else None)
    if at == "env://":
        if not (address := os.environ.get("MASTER_ADDR")):
            raise UsageError(
                "--rendezvous env:// reads MASTER_ADDR, which is not set; set it, or write tcp://HOST:PORT"
            )
        at = f"tcp://{address}:{os.environ.get('MASTER_PORT', _TORCHRUN_PORT)}"
    if at is None:
        raise UsageError(
            f"--nodes {options['nodes']} does not say where the nodes meet; add --rendezvous tcp://HOST:PORT of node "
            "0, or file:///PATH in a directory that all share"
        )
    me = _member(-1 if number is None else number, count, options["rdzv_id"] or "", options["wait"])
    me = replace(me, script=script)
    kind, _, rest = at.rpartition("://")
    if kind == "file":
        if number is None:
            raise UsageError("--rendezvous file:// does not say which node is the first; add --node-rank")
        file = Path(rest).absolute()
        advice = f"there is no note of it at {file}, which all nodes have to see"
        return NodeMeeting(replace(me, run=me.run or at, advice=advice), file=file, least=least)
    name, _, port = rest.rpartition(":") if re.search(r":\d+$", rest) else (rest, "", str(_TORCHRUN_PORT))
    if kind not in ("", "tcp") or not name or not 0 < int(port) < 1 << 16:
        raise UsageError(
            f"--rendezvous {at} is not a meeting point; write tcp://HOST:PORT, file:///PATH or env://"
        )
    return NodeMeeting(me, name.strip("[]"), [int(port)], least=least)


def numbers_of_nodes(text: str) -> tuple[int, int]:
    """With how many nodes a run may go on, and how many it begins with: of `2`, or of `1:2`."""
    found = re.fullmatch("([1-9][0-9]{0,4})(?::([0-9]{1,5}))?", text)
    least, count = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if least > count:
        raise UsageError(
            f"--nodes {text} is not a number of nodes; write for instance --nodes 2, or --nodes 1:2 for 2 of which "
            "1 is enough to go on"
        )
    return least, count


def check_alone(options: Mapping[str, Any]) -> None:
    """Refuses what tells this node from others where it would train by itself, as each of them would."""
    number, at = options["node_rank"], options["rendezvous"]
    said = f"--node-rank {number}" if number else f"--rendezvous {at}"
    # torchrun's localhost:0 is any free port, where no other node could find this one.
    if number or (at is not None and not at.endswith(":0")):
        raise UsageError(
            f"{said} needs --nodes; add --nodes and the number of nodes, or leave {said.partition(' ')[0]} out"
        )


def by_step(here: Placement, limit_s: float, nodes: str | None = None) -> NodeMeeting | None:
    """One launcher on each node of a Slurm step; None where this is not one of several."""
    if here.size == 1 or here.launcher == "alone":
        return None
    if here.launcher != "slurm" or here.size != here.nodes or not here.master_addr or not here.master_port:
        raise UsageError(
            f"{here.launcher} started {here.size} `samestep run` on {here.nodes} nodes; start one on each node "
            "(srun --ntasks-per-node=1), start the script itself, or add --standalone"
        )
    least, count = numbers_of_nodes(nodes or str(here.nodes))
    if count != here.nodes:
        raise UsageError(f"--nodes {nodes} does not fit the {here.nodes} nodes of the job step; leave it out")
    me = _member(here.node, here.nodes, here.run or "", limit_s)
    return NodeMeeting(me, here.master_addr, port_choices(here.master_port), least=least)


class Launchers:
    """The launchers of all nodes, of which this is one; None where there is no other."""

    def __init__(self, where: NodeMeeting | None) -> None:
        """Waits until all have come; RankMissing says who has not."""
        self._where, self._hosts = where, [""]
        self._began = 0.0
        self._meet(_peers(where) if where else None)

    def _meet(self, peers: Tree | None) -> None:
        self._peers = peers
        self.node, self.nodes = (peers.number, peers.size) if peers else (0, 1)
        self.lost: RankMissing | None = None
        self._stop_at = inf
        self._elsewhere: dict[int, tuple[float, list[RankState]]] = {}

    def agree_on_run(self, run: Path | None) -> Path | None:
        """The directory node 0 has made, where this node sees it too."""
        mine = [str(run), read_record(run / STARTED) if run else None]
        name, record = self._gather(mine, partial(checked, kinds=(str, dict | None)))[0]
        path = Path(name)
        self.run_name = path.name
        for _ in range(10):
            if run or (path.is_dir() and os.listdir(path) and read_record(path / STARTED) == record):
                return path
            time.sleep(0.1)
        return None

    def meet_again(self) -> None:
        """After a node was lost: without it where fewer may go on, otherwise with one in its place; or RankMissing."""
        assert self._where is not None
        assert self._peers is not None
        assert self.lost is not None
        me, _, ports, file, least = self._where
        self._peers.leave()
        if least in (0, me.size):
            self._meet(_peers(self._where._replace(me=replace(me, number=self.node))))
            return
        left, lost = list(range(self.nodes)), self.lost
        while True:
            left = [node for place, node in enumerate(left) if place not in lost.ranks]
            if len(left) < least or self.node not in left:
                raise RankMissing(f"{self.lost}, and {len(left)} of at least {least} nodes are left")
            # those who have lost the same nodes are a run of their own
            run = f"{me.run}, {left} of {self._hosts}"
            who = replace(me, run=run, number=left.index(self.node), size=len(left), limit_s=_AGAIN_S)
            try:
                at = NodeMeeting(who, self._hosts[left[0]], ports, file, least)
                self._meet(_peers(at) if len(left) > 1 else None)
                return
            except RankMissing as error:
                lost = error

    def begin(self, size: int, address: str, port: int, past: Past) -> tuple[NodeRanks, list[Past]]:
        """What is this node's in the next attempt, which has a new key, and what the nodes have been through.

        The address is for a run of this node alone.
        """
        if self._peers:
            self._peers.take_news(_news_from)
            address = self._peers.position.address or address
        self._stop_at = inf
        self._elsewhere.clear()
        mine = [size, address, port, secrets.token_hex(32), *past]
        try:
            told = self._gather(mine, partial(checked, kinds=(int, str, int, str, int, int, int)))
        except RankMissing as error:
            self.lost = error
            raise
        sizes, hosts, ports, words, *_ = zip(*told, strict=True)
        self._hosts = list(hosts)
        # The word of node 0 is no secret: it was sent over the network.
        is_shared = self._peers is not None
        self.key = derive(key_of_user(os.environ), "run", words[0]) if is_shared else secrets.token_bytes(32)
        self._began = time.monotonic()
        ranks = NodeRanks(sum(sizes[: self.node]), sum(sizes), self.node, self.nodes, hosts[0], ports[0])
        return ranks, [Past(*each[4:]) for each in told]

    def should_stop(self) -> bool:
        """Whether another node's end is a reason to stop this one's workers; to be asked often."""
        if self.lost is not None or self._peers is None:
            return self.lost is not None
        if self._peers.lost:
            self.lost = self._peers.lost
            return True
        now = time.monotonic()
        for node, news in self._peers.take_news(_news_from):
            if isinstance(news, list):
                self._elsewhere[node] = now, news
                continue
            is_known = news.is_echo or news.asked
            wait = _LONE_S if news.code == CHECKPOINTED else _ECHO_S if is_known else 0.0
            self._stop_at = min(self._stop_at, now + wait)
        return now >= self._stop_at

    def share(self, states: Sequence[RankState]) -> list[RankState]:
        """What the ranks of other nodes do; while ranks wait, all launchers tell each other of theirs."""
        now = time.monotonic()
        heard = self._elsewhere.values()
        told = [state for at, told in heard for state in told if state.is_gone or now - at < _FRESH_S]
        waits = any(state.waits_now and state.seconds > _WORTH_TELLING_S for state in [*states, *told])
        if self._peers and self.lost is None and (waits or any(state.is_gone for state in states)):
            self._peers.tell([_RANKS, states])
        return told

    def end(self, mine: End) -> tuple[int, End]:
        """Tell the others how it ended here, and hear on which node (-1: a lost one) the cause was, and its end."""
        mine = mine._replace(at=max(0.0, mine.at - self._began))
        try:
            if self.lost is None:
                if mine.code and self._peers:
                    self._peers.tell(mine)
                # what another node still does, such as a last save, may take hours
                with ending_signals():
                    ends = self._gather(mine, partial(as_kind, End), _END_S if mine.code else inf)
                node = min(range(self.nodes), key=lambda node: _blame(ends[node]))
                return node, ends[node]
        except Asked as asked:
            return self.node, mine._replace(code=128 + asked.number, asked=asked.number)
        except RankMissing as error:
            self.lost = error
        if (mine.code or mine.asked) and not mine.is_echo:
            return self.node, mine
        lost = str(self.lost)
        return -1, End(1, lost, None, mine.asked, False, mine.at, mine.step, lost)

    def close(self) -> None:
        if self._peers:
            self._peers.leave()

    def _gather(self, mine: Any, read: Callable[[Any], Any], limit_s: float = _END_S) -> list[Any]:
        return self._peers.gather(mine, limit_s, read) if self._peers else [mine]


def _news_from(said: Any) -> End | list[RankState]:
    """What another launcher told: how an attempt ended there, or what its ranks do."""
    return [as_kind(RankState, state) for state in said[1]] if said[0] == _RANKS else as_kind(End, said)


def _blame(end: End) -> tuple[bool, bool, bool, bool, float]:
    """The smallest is the cause: a failure that was asked for, or does not only tell of another, or was first."""
    return not end.code, not end.asked, end.is_echo, end.code == CHECKPOINTED, end.at


def _member(number: int, count: int, run: str, limit_s: float) -> Member:
    """This node among others; -1 takes any number that is free."""
    facts = {"samestep": samestep.__version__}
    return Member(run, number, count, key_of_user(os.environ), "node", limit_s, _SILENCE_S, facts=facts)


def _peers(where: NodeMeeting) -> Tree:
    me, name, ports, file, _ = where
    if file:
        return note.meet(file, me)
    suffix = os.environ.get("SAMESTEP_ADDRESS_SUFFIX", "") if len(ports) > 1 else ""
    if me.number == 0:
        return host(listen(ports, addresses_for(name + suffix), "--rendezvous"), me)
    if me.number < 0 and _is_here(name) and (own := listen_at(ports[0], addresses_for(name))):
        return host(own, replace(me, number=0))
    # MASTER_ADDR, which a rank would be told, is not looked at here: it may be left from the launcher around.
    instead = f"write --nodes {me.size} --rendezvous tcp://HOST:{ports[0]} with"
    found = addresses.resolve(name, suffix, instead)
    return join(lambda: [(address, port) for port in ports for address in found], me)


def _is_here(name: str) -> bool:
    """Whether this is the machine of that name."""
    try:
        found = {str(one[4][0]) for one in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return bool(found & {"127.0.0.1", "127.0.1.1", "::1", *addresses.own_addresses()})
