"""How processes started apart find each other: number 0 listens, the others connect, both say who is missing."""

import os
import selectors
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any

from samestep.errors import PlacementError, RankMissing, RanksDiffer
from samestep.rendezvous.link import Link
from samestep.rendezvous.peers import Peers
from samestep.text import name_ranks, printable, reason_of

_STEP_S = 0.25
_CONNECT_S = 2.0
_REPLY_S = 3.0
_SAY_S = 5.0
_SAY_LATER_S = 30.0
# Of those who have not proved that they have the key: how long, how many of one address, how many in all.
_GREETING_S = 5.0
_MOST_STRANGERS_EACH, _MOST_STRANGERS = 32, 128
_ACCEPTED_AT_ONCE = 16
_MOST_KNOCKS = 1 << 16

_LONGEST_ERROR = 2000

Place = tuple[str, int] | str  # an address and a port, or the path of a Unix socket


def say(text: str) -> None:
    print(f"samestep: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Member:
    """Who joins which run, and the key that shows it; number -1 takes any that is free.

    A member that learns of no address within untold_s gives up with the advice in nowhere. Where script is given,
    it has to be the same for all members.
    """

    run: str
    number: int
    size: int
    key: bytes = field(repr=False)
    noun: str = "rank"
    limit_s: float = 600.0
    silence_s: float = 60.0
    expected: Sequence[str] = ()
    nowhere: str = "nothing says where it is"
    untold_s: float = inf
    script: str = ""

    @property
    def title(self) -> str:
        return f"{self.noun} {self.number}" + (f" of {self.run}" if self.run else "")


def host(listeners: Sequence[socket.socket], me: Member) -> Peers:
    """Number 0: accept members of this run until all are there; closes the listeners."""
    with ExitStack() as stack:
        for listener in listeners:
            stack.enter_context(listener)
        return _Host(me).run(listeners)


def join(where: Callable[[], Iterable[Place]], me: Member) -> Peers:
    """The other members: try each address in turn, again and again, until number 0 of the same run answers."""
    began, said_at = time.monotonic(), _SAY_S
    seen: dict[Place, str] = {}
    pause = 0.05
    was_told = False
    while True:
        seen.clear()
        for target in where():
            was_told = True
            found = _connect(target, me, began)
            if isinstance(found, Peers):
                return found
            seen[target] = found
        waited = time.monotonic() - began
        if not was_told and waited > me.untold_s:
            raise PlacementError(me.nowhere)
        if waited > me.limit_s:
            raise RankMissing(
                f"{me.title} found no {me.noun} 0 within {me.limit_s:g} s ({_tried(seen, me.nowhere)}); "
                f"is {me.noun} 0 started, and can {socket.gethostname()} reach it?",
                ranks=[0],
            )
        if waited > said_at:
            said_at = _next_saying(waited)
            if me.number <= 1 or me.noun != "rank":
                say(
                    f"{me.title} looks for {me.noun} 0 ({_tried(seen, me.nowhere)}); {_patience(waited, me.limit_s)}"
                )
        time.sleep(pause)
        pause = min(0.5, pause * 1.5)


class _Host:
    def __init__(self, me: Member) -> None:
        self._me = me
        self._members: dict[int, Link] = {}
        self._processes = {0: (socket.gethostname(), os.getpid())}
        self._selector = selectors.DefaultSelector()
        self._strangers: dict[Link, str] = {}
        self._knocks: set[bytes] = set()

    def run(self, listeners: Sequence[socket.socket]) -> Peers:
        me, began, said_at = self._me, time.monotonic(), _SAY_S
        for listener in listeners:
            listener.settimeout(0)
            self._selector.register(listener, selectors.EVENT_READ)
        try:
            while len(self._members) + 1 < me.size:
                ready = [key for key, _ in self._selector.select(_STEP_S)]
                # Whoever has the key says so at once, and is heard before a flood of others is let in.
                for key in sorted(ready, key=lambda key: key.data is None):
                    self._hear(key.data) if key.data else self._open(key.fileobj)
                self._drop_strangers()
                waited = time.monotonic() - began
                if waited > me.limit_s:
                    raise RankMissing(
                        f"{self._missing()} did not come within {me.limit_s:g} s", ranks=self._absent()
                    )
                if waited > said_at:
                    said_at = _next_saying(waited)
                    say(f"waiting for {self._missing()}; {_patience(waited, me.limit_s)}")
        except (RankMissing, RanksDiffer) as error:
            self._tell({"error": str(error), "ranks": error.ranks})
            self._members.clear()
            raise
        finally:
            for key in list(self._selector.get_map().values()):
                if key.data and key.data not in self._members.values():
                    key.data.close()
            self._selector.close()
        names = [self._processes[number][0] for number in range(me.size)]
        self._tell({"complete": names})
        return Peers(0, names, self._members, me.silence_s, me.noun)

    def _open(self, listener: Any) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, address = listener.accept()
                link = Link(connection, self._me.key, is_host=True)
            except OSError:
                return
            self._selector.register(connection, selectors.EVENT_READ, link)
            self._strangers[link] = str(address[0]) if isinstance(address, tuple) else ""

    def _hear(self, link: Link) -> None:
        if link.connection.fileno() < 0:  # closed within this turn
            return
        try:
            has_knocked = bool(link.others_nonce)
            messages = link.read_json()
            if link.others_nonce and not has_knocked:
                self._believe(link.others_nonce)
            if link.is_proven:
                self._strangers.pop(link, None)
            for message in messages:
                self._admit(link, message)
        except RanksDiffer as error:
            with suppress(OSError):
                link.send_json({"error": str(error)})
            raise
        except (EOFError, ValueError, KeyError, TypeError, OSError):
            self._forget(link)

    def _believe(self, nonce: bytes) -> None:
        """A knock that was made with the key is no part of a flood, unless it is the copy of another."""
        if nonce in self._knocks or len(self._knocks) > _MOST_KNOCKS:
            raise ValueError("a repeated knock")
        self._knocks.add(nonce)

    def _drop_strangers(self) -> None:
        """The slow, and of too many the oldest of the address that has most."""
        late = time.monotonic() - _GREETING_S
        silent = {link: address for link, address in self._strangers.items() if not link.others_nonce}
        counts = Counter(silent.values())
        for link, address in list(self._strangers.items()):
            is_crowd = counts[address] > _MOST_STRANGERS_EACH or (
                counts.total() > _MOST_STRANGERS and counts[address] == max(counts.values())
            )
            if link.opened_at < late or (link in silent and is_crowd):
                counts[address] -= link in silent
                self._forget(link)

    def _admit(self, stream: Link, hello: dict[str, Any]) -> None:
        me = self._me
        if hello["run"] != me.run:
            stream.send_json({"unknown": me.run})
            self._forget(stream)
            return
        number, who = int(hello["number"]), (printable(hello["host"], 64), int(hello["pid"]))
        comer = f"{me.noun} {number}" if number >= 0 else f"another {me.noun}"
        script, host = str(hello.get("script", "")), f"{me.noun} 0 ({self._processes[0][0]})"
        if me.script and script and script != me.script:
            raise RanksDiffer(
                f"{host} runs {me.script!r:.200} and {comer} ({who[0]}) runs {script!r:.200}; "
                f"run one script on all {me.noun}s, or let each run meet at a place of its own"
            )
        if hello["size"] != me.size:
            raise RanksDiffer(
                f"{host} counts {me.size} {me.noun}s and {comer} ({who[0]}) counts "
                f"{hello['size']}; start all of them with the same number"
            )
        if number < 0:
            number = min(self._absent(), default=-1)
        if number < 0:
            raise RanksDiffer(
                f"{comer} ({who[0]}) came, which is one too many for {me.size}; start as many as are counted"
            )
        if not number < me.size:
            raise RanksDiffer(f"{me.noun} {number} came, but there are {me.size}; count from 0")
        before = self._processes.get(number, who)
        if before != who:
            raise RanksDiffer(
                f"{me.noun} {number} came twice: process {before[1]} on {before[0]} and process {who[1]} on "
                f"{who[0]}; give every {me.noun} a number of its own"
            )
        if number in self._members:
            self._forget(self._members[number])
        self._members[number], self._processes[number] = stream, who
        stream.send_json({"welcome": number})

    def _forget(self, stream: Link) -> None:
        self._strangers.pop(stream, None)
        for number in [number for number, member in self._members.items() if member is stream]:
            del self._members[number], self._processes[number]
        # ValueError: it was closed within this turn, when the same member came again.
        with suppress(KeyError, ValueError):
            self._selector.unregister(stream.connection)
        stream.close()

    def _tell(self, message: dict[str, Any]) -> None:
        for stream in self._members.values():
            with suppress(OSError):
                stream.send_json(message)

    def _missing(self) -> str:
        me = self._me
        return name_ranks(self._absent(), me.expected, me.noun)

    def _absent(self) -> list[int]:
        return [number for number in range(1, self._me.size) if number not in self._members]


def dial(target: Place, timeout_s: float) -> socket.socket:
    """A connection to this place; raises OSError."""
    if isinstance(target, tuple):
        return socket.create_connection(target, timeout=timeout_s)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(target)
    except BaseException:
        connection.close()
        raise
    return connection


def _connect(target: Place, me: Member, began: float) -> Peers | str:
    """The connection to all members, or why this address does not lead to it."""
    hello = {"run": me.run, "number": me.number, "size": me.size, "script": me.script}
    hello |= {"host": socket.gethostname(), "pid": os.getpid()}
    number: int | None = None
    peers: Peers | None = None
    link: Link | None = None
    with ExitStack() as unless_joined:
        try:
            connection = unless_joined.enter_context(dial(target, _CONNECT_S))
        except OSError as error:
            return reason_of(error)
        try:
            link = Link(connection, me.key, is_host=False)
            is_said = False
            while peers is None:
                wait = _REPLY_S if number is None else me.limit_s + _REPLY_S - (time.monotonic() - began)
                connection.settimeout(max(0.1, wait))
                for message in link.read_json():
                    if peers is not None:
                        peers.take(0, message)
                    elif said := _refused(message):
                        return said
                    elif "complete" in message and number is not None:
                        names = [printable(name, 64) for name in message["complete"]]
                        peers = Peers(number, names, {0: link}, me.silence_s, me.noun)
                    else:
                        number = message.get("welcome", number)
                if link.is_proven and not is_said:
                    is_said = True
                    link.send_json(hello)
        except (EOFError, ValueError, OSError):
            if number is not None:
                return f"{me.noun} 0 went away"
            return "found nothing with this run's key there; machines without a common home need SAMESTEP_KEY"
        unless_joined.pop_all()
        return peers


def _refused(message: Mapping[str, Any]) -> str | None:
    if "error" in message:
        raise RankMissing(printable(message["error"], _LONGEST_ERROR), ranks=message.get("ranks", ()))
    if "unknown" in message:
        return f"found {printable(message['unknown']) or 'a run without name'} there"
    return None


def _tried(seen: dict[Place, str], nowhere: str) -> str:
    reasons: dict[str, list[str]] = {}
    for place, reason in seen.items():
        reasons.setdefault(reason, []).append(place if isinstance(place, str) else f"{place[0]}:{place[1]}")
    parts = [
        f"{places[0]}{f' and {len(places) - 1} more' if len(places) > 1 else ''}: {reason}"
        for reason, places in sorted(reasons.items(), key=lambda item: not item[0].startswith("found"))
    ]
    return "; ".join(parts) or nowhere


def _next_saying(waited: float) -> float:
    return waited + (_SAY_S if waited < 60 else _SAY_LATER_S)


def _patience(waited: float, limit_s: float) -> str:
    return f"{waited:.0f} s so far, {limit_s:g} at most"
