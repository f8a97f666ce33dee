"""Connects the launchers of several nodes: they agree on ranks, on rank 0's address, and on which failure came first.

Covered: different numbers of processes on the nodes, common restarts, a node that fails, ends or falls silent, and
continuing without a lost node or with a replacement. Not covered: more nodes than at the start.
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
from samestep.rendezvous.member import Member, say
from samestep.rendezvous.tree import Tree
from samestep.rundir import CHECKPOINTED, STARTED, read_record
from samestep.start.signals import StopRequested, ending_signals
from samestep.text import printable

_SILENCE_S = 10.0  # a launcher that is silent this long counts as lost
_TORCHRUN_PORT = 29_400
_END_S = 60.0  # for a message that every launcher sends at once
_AGAIN_S = 20.0  # for the remaining nodes to find each other
_ECHO_S = 2.0  # after another node's echo or requested end: for the end of the workers here
_LONE_S = 30.0  # after another node's commit: for the commit of the workers here
# The first word of a message with states of ranks; how long states count, and from which wait on they are sent.
_RANKS = "ranks"
_FRESH_S = 3.0
_WORTH_TELLING_S = 2.0


class NodeMeeting(NamedTuple):
    """This node's number, and where the launchers meet: at a port of node 0, or through a file."""

    me: Member
    name: str = ""
    ports: Sequence[int] = ()
    file: Path | None = None
    least: int = 0  # how many nodes are enough to continue after others are lost; 0: all


class NodeRanks(NamedTuple):
    """The ranks of this node in an attempt, and the address of rank 0."""

    first: int
    total: int
    node: int
    nodes: int
    address: str
    port: int

    def place(self, local_rank: int, local_size: int) -> Placement:
        shared = (self.node, self.nodes, "samestep", self.address, self.port)
        return Placement(self.first + local_rank, self.total, local_rank, local_size, *shared)


class End(NamedTuple):
    """How an attempt ended on a node."""

    code: int
    text: str | None
    place: str | None  # equal for two failures that are the same
    stop_signal: int | None
    is_echo: bool
    at: float  # seconds after the attempt began
    step: int = -1  # the furthest step of the node's ranks
    summary: str = ""  # printed before the next attempt


class Past(NamedTuple):
    """A run's history: all restarts, the restarts since it last made progress, and its furthest step."""

    generation: int = 0
    used: int = 0
    furthest: int = -1


def by_hand(options: Mapping[str, Any], script: str = "") -> NodeMeeting | None:
    """The meeting that the options describe; None if they name one node only."""
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
    me = _this_node(-1 if number is None else number, count, options["rdzv_id"] or "", options["wait"])
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
    """How many nodes are enough to continue, and how many the run begins with, from `2` or `1:2`."""
    match = re.fullmatch("([1-9][0-9]{0,4})(?::([0-9]{1,5}))?", text)
    least, count = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if least > count:
        raise UsageError(
            f"--nodes {text} is not a number of nodes; write for instance --nodes 2, or --nodes 1:2 for 2 of which "
            "1 is enough to go on"
        )
    return least, count


def check_alone(options: Mapping[str, Any]) -> None:
    """Refuse options that tell nodes apart when --nodes is missing: every node would train a model of its own."""
    number, rendezvous = options["node_rank"], options["rendezvous"]
    option = f"--node-rank {number}" if number else f"--rendezvous {rendezvous}"
    # torchrun's localhost:0 means any free port, so it names no meeting of several nodes.
    if number or (rendezvous is not None and not rendezvous.endswith(":0")):
        raise UsageError(
            f"{option} needs --nodes; add --nodes and the number of nodes, or leave {option.partition(' ')[0]} out"
        )


def by_step(here: Placement, limit_s: float, nodes: str | None = None) -> NodeMeeting | None:
    """The meeting of the launchers of a Slurm step, one on each node; None if there is only one launcher."""
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
    me = _this_node(here.node, here.nodes, here.run or "", limit_s)
    return NodeMeeting(me, here.master_addr, port_choices(here.master_port), least=least)


class Launchers:
    """This launcher's connection to the launchers of all nodes; without a meeting it is the only one."""

    def __init__(self, where: NodeMeeting | None) -> None:
        """Wait until all launchers have connected; RankMissing names those that have not."""
        self._where, self._hosts = where, [""]
        self._began = 0.0
        self._meet(_peers(where) if where else None)

    def _meet(self, peers: Tree | None) -> None:
        self._peers = peers
        self.node, self.nodes = (peers.number, peers.size) if peers else (0, 1)
        self.lost: RankMissing | None = None
        self._stop_at = inf
        self._states_elsewhere: dict[int, tuple[float, list[RankState]]] = {}

    def agree_on_run(self, run: Path | None) -> Path | None:
        """The directory that node 0 has made; None if this node does not see it, which node 0 remarks."""
        mine = [str(run), read_record(run / STARTED) if run else None]
        name, record = self._gather(mine, partial(checked, kinds=(str, dict | None)))[0]
        path = Path(name)
        self.run_name = path.name
        for _ in range(10):
            is_seen = run or (path.is_dir() and os.listdir(path) and read_record(path / STARTED) == record)
            if is_seen:
                break
            time.sleep(0.1)
        blind = [host for host in self._gather("" if is_seen else os.uname().nodename, printable) if host]
        if blind and run:
            say(
                f"{path} cannot be seen on {', '.join(blind)}, so the logs of the ranks there are in a "
                "directory of their own; name one that all nodes share with --run-dir"
            )
        return path if is_seen else None

    def meet_again(self) -> None:
        """After a node was lost, connect the remaining launchers, or all with a replacement; RankMissing if too few."""
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
            # only launchers that lost the same nodes can connect: the name of their run says which are left
            run = f"{me.run}, {left} of {self._hosts}"
            member = replace(me, run=run, number=left.index(self.node), size=len(left), limit_s=_AGAIN_S)
            try:
                meeting = NodeMeeting(member, self._hosts[left[0]], ports, file, least)
                self._meet(_peers(meeting) if len(left) > 1 else None)
                return
            except RankMissing as error:
                lost = error

    def begin(self, size: int, address: str, port: int, past: Past) -> tuple[NodeRanks, list[Past]]:
        """This node's ranks in the next attempt, which has a new key, and the histories of all nodes."""
        # `address` is used only if this is the only node.
        if self._peers:
            self._peers.take_news(_news_from)
            address = self._peers.position.address or address
        self._stop_at = inf
        self._states_elsewhere.clear()
        mine = [size, address, port, secrets.token_hex(32), *past]
        try:
            parts = self._gather(mine, partial(checked, kinds=(int, str, int, str, int, int, int)))
        except RankMissing as error:
            self.lost = error
            raise
        sizes, hosts, ports, words, *_ = zip(*parts, strict=True)
        self._hosts = list(hosts)
        # Node 0's random word went over the network unencrypted, so the key also needs the user's key.
        user_key = key_of_user(os.environ) if self._peers else b""
        self.key = derive(user_key, "run", words[0]) if self._peers else secrets.token_bytes(32)
        self._began = time.monotonic()
        ranks = NodeRanks(sum(sizes[: self.node]), sum(sizes), self.node, self.nodes, hosts[0], ports[0])
        return ranks, [Past(*part[4:]) for part in parts]

    def should_stop(self) -> bool:
        """Whether the end of another node is a reason to stop the workers here; poll it."""
        if self.lost is not None or self._peers is None:
            return self.lost is not None
        if self._peers.lost:
            self.lost = self._peers.lost
            return True
        now = time.monotonic()
        for node, news in self._peers.take_news(_news_from):
            if isinstance(news, list):
                self._states_elsewhere[node] = now, news
                continue
            is_follow_up = news.is_echo or news.stop_signal
            wait_s = _LONE_S if news.code == CHECKPOINTED else _ECHO_S if is_follow_up else 0.0
            self._stop_at = min(self._stop_at, now + wait_s)
        return now >= self._stop_at

    def share(self, states: Sequence[RankState]) -> list[RankState]:
        """The states of other nodes' ranks; while any rank waits, the launchers send each other these states."""
        now = time.monotonic()
        received = self._states_elsewhere.values()
        others = [state for at, sent in received for state in sent if state.is_gone or now - at < _FRESH_S]
        waits = any(state.waits_now and state.seconds > _WORTH_TELLING_S for state in [*states, *others])
        if self._peers and self.lost is None and (waits or any(state.is_gone for state in states)):
            self._peers.tell([_RANKS, states])
        return others

    def end(self, mine: End) -> tuple[int, End]:
        """Exchange how the attempt ended; returns the node of the cause (-1: a lost node) and how it ended there."""
        mine = mine._replace(at=max(0.0, mine.at - self._began))
        try:
            if self.lost is None:
                if mine.code and self._peers:
                    self._peers.tell(mine)
                # another node may still be busy for hours, for example with a last save
                with ending_signals():
                    ends = self._gather(mine, partial(as_kind, End), _END_S if mine.code else inf)
                node = min(range(self.nodes), key=lambda node: _blame(ends[node]))
                return node, ends[node]
        except StopRequested as request:
            return self.node, mine._replace(code=128 + request.number, stop_signal=request.number)
        except RankMissing as error:
            self.lost = error
        if (mine.code or mine.stop_signal) and not mine.is_echo:
            return self.node, mine
        lost = str(self.lost)
        return -1, End(1, lost, None, mine.stop_signal, False, mine.at, mine.step, lost)

    def close(self) -> None:
        if self._peers:
            self._peers.leave()

    def _gather(self, mine: Any, read: Callable[[Any], Any], limit_s: float = _END_S) -> list[Any]:
        return self._peers.gather(mine, limit_s, read) if self._peers else [mine]


def _news_from(message: Any) -> End | list[RankState]:
    """A message of another launcher: how an attempt ended there, or the states of its ranks."""
    is_states = message[0] == _RANKS
    return [as_kind(RankState, state) for state in message[1]] if is_states else as_kind(End, message)


def _blame(end: End) -> tuple[bool, bool, bool, bool, float]:
    """Sort key; the smallest is the cause: prefer failures, then requested ends, own errors, no commits, early ends."""
    return not end.code, not end.stop_signal, end.is_echo, end.code == CHECKPOINTED, end.at


def _this_node(number: int, count: int, run: str, limit_s: float) -> Member:
    """This node as a member of the meeting; number -1 takes any number that is free."""
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
    # MASTER_ADDR is ignored here: an outer launcher may have set it.
    instead = f"write --nodes {me.size} --rendezvous tcp://HOST:{ports[0]} with"
    resolved = addresses.resolve(name, suffix, instead)
    return join(lambda: [(address, port) for port in ports for address in resolved], me)


def _is_here(name: str) -> bool:
    try:
        named = {str(answer[4][0]) for answer in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return bool(named & {"127.0.0.1", "127.0.1.1", "::1", *addresses.own_addresses()})
