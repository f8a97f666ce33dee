"""The processes of a run as a tree of channels: rounds in which all take part, a store that each has a copy of, news.

A thread of each process passes on what comes, whatever its script does, and never waits for a neighbour to read: two
that wait for each other would wait for ever. A round costs each process one message to its parent and one to each
child. Covered: a process that ends, leaves early, comes too late, or falls silent. Not covered: going on without it.
"""

import json
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any

from samestep.errors import RankMissing
from samestep.rendezvous.channel import NONSENSE, Channel, checked
from samestep.rendezvous.position import Position
from samestep.text import name_ranks, printable

_BEAT_S = 1.0
_SEND_S = 60.0
_ANSWER_S = 0.5
_LEAVE_S = 1.0
_LONGEST_ERROR = 2000
# A round's part goes up, and its answer down. A change goes up to number 0 and comes down to all in one order. News
# go from any process to all others.
_ROUND, _CHANGE, _NEWS = b"rcn"
_OF_CHANGE = (int, int, str, str, str, str)  # who asks, its number, and what is to be done
_OF_NEWS = {"told": (object,), "left": (int, str), "late": (int,), "lost": (str,)}
_NO_MESSAGE = "it sends what is no message"
_OPERATIONS: Mapping[str, Callable[[bytes | None, bytes, bytes], bytes | None]] = {
    "set": lambda before, value, expected: value,
    "add": lambda before, value, expected: b"%d" % (int(before or b"0") + int(value)),
    "replace": lambda before, value, expected: value if before == (expected or None) else before,
    "delete": lambda before, value, expected: None,
}
_open_trees: "weakref.WeakSet[Tree]" = weakref.WeakSet()


class Late(RankMissing):
    """The `ranks` did not come to a round in time."""


class Tree:
    """This process among all: a channel to its parent, none for number 0, and channels to its children."""

    def __init__(
        self,
        number: int,
        size: int,
        channels: Mapping[int, Channel],
        position: Position,
        names: Mapping[int, str],
        *,
        silence_s: float = inf,
        noun: str = "rank",
    ) -> None:
        self.number, self.size, self.names, self.position = number, size, dict(names), position
        self.stored: dict[str, bytes] = {}
        self.rounds = 0
        self.left: dict[int, tuple[int, str]] = {}  # after how many rounds, and where in the script
        self.lost: RankMissing | None = None
        self._channels, self._silence_s, self._noun = dict(channels), silence_s, noun
        self._parent = position.path[0] if number else None
        self._children = [other for other in self._channels if other != self._parent]
        self._parts: dict[int, dict[int, bytes]] = {}  # of each round, from each neighbour
        self._late: dict[int, set[int]] = {}  # who waited in a round until it was too late
        self._news: list[tuple[int, Any]] = []
        self._changes = 0
        self._results: dict[int, tuple[bytes | None, bytes | None]] = {}
        self._own_changes = deque[bytes]()
        self._condition = threading.Condition()
        self._is_open = True
        self._unsent = set[int]()  # neighbours that have not read all that is for them
        for channel in self._channels.values():
            channel.connection.setblocking(False)
            channel.heard_at = time.monotonic()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        _open_trees.add(self)
        self._thread = threading.Thread(target=self._run, name="samestep tree", daemon=True)
        self._thread.start()

    def round(self, read: Callable[[bytes], Any], join: Callable[[Any], bytes], limit_s: float) -> Any:
        """Collective. What number 0 makes of all parts; `join` makes one part of this process's and its children's.

        Raises Late with the same ranks on all that have come, RankMissing where one is lost, has left, or sends what
        `read` cannot take.
        """
        self.rounds += 1
        number = self.rounds
        if number in self._late:
            raise self._gone(number) or self._missing(number, limit_s)
        parts = self._await_parts(number, self._children, limit_s)
        part = join([self.understood(child, read, said) for child, said in parts.items()])
        body = bytes([_ROUND]) + number.to_bytes(4, "big") + part
        if self._parent is None:
            self._send(self._children, body)
        else:
            self._send([self._parent], body)
            part = self._await_parts(number, [self._parent], limit_s)[self._parent]
        with self._condition:
            self._parts.pop(number, None)
        return self.understood(self._parent or 0, read, part)

    def gather(self, mine: Any, limit_s: float, read: Callable[[Any], Any] = lambda said: said) -> list[Any]:
        """Collective. What every process brought, by number, as `read` has it; raises what `round` raises."""

        def join(parts: Sequence[dict[str, Any]]) -> bytes:
            here = {} if mine is None else {str(self.number): mine}
            for part in parts:
                here |= part
            return json.dumps(here).encode()

        found = self.round(lambda part: dict(json.loads(part)), join, limit_s)
        return [self.understood(number, read, found.get(str(number))) for number in range(self.size)]

    def understood(self, number: int, read: Callable[[Any], Any], said: Any) -> Any:
        """Local. What a process has said, as `read` has it; where that is no message, it is lost for all."""
        try:
            return read(said)
        except NONSENSE as error:
            self._lose(number, _NO_MESSAGE)
            raise RankMissing(str(self.lost), ranks=[number]) from error

    def tell(self, news: Any) -> None:
        """Local. Everyone else can take it soon."""
        self._say(_NEWS, "told", self.number, news)

    def take_news(self, read: Callable[[Any], Any] = lambda said: said) -> list[tuple[int, Any]]:
        """Local. What others have told since the last time, and who; one that is not understood is lost."""
        with self._condition:
            news, self._news = self._news, []
        with suppress(RankMissing):
            return [(number, self.understood(number, read, said)) for number, said in news]
        return []

    def gone(self) -> RankMissing | None:
        """Local. Why a round that began now could not be completed, as far as that is known."""
        return self._gone(self.rounds + 1)

    def unheard(self, seconds: float) -> list[int]:
        """Local. The neighbours that have said nothing for so long."""
        before = time.monotonic() - seconds
        channels = self._channels.items()
        return [number for number, one in channels if one.heard_at < before and number not in self.left]

    def change(
        self, operation: str, key: str, value: bytes = b"", expected: bytes = b""
    ) -> tuple[bytes | None, bytes | None]:
        """Local. Change the store of all processes, in one order for all; the value before and after, None for none."""
        with self._condition:
            self._changes += 1
            serial = self._changes
        self._say(_CHANGE, self.number, serial, operation, key, value.hex(), expected.hex())
        with self._condition:
            self._condition.wait_for(lambda: serial in self._results or self._gone())
            if serial not in self._results and (gone := self._gone()):
                raise gone
            return self._results.pop(serial)

    def await_keys(self, keys: Sequence[str], limit_s: float) -> bool:
        """Local. Whether the store has all of these in time."""

        def are_there() -> bool:
            return all(key in self.stored for key in keys)

        with self._condition:
            limit_s = min(limit_s, threading.TIMEOUT_MAX)
            if not self._condition.wait_for(lambda: are_there() or self._gone(), limit_s):
                return False
            if not are_there() and (gone := self._gone()):
                raise gone
            return True

    def leave(self, place: str = "") -> None:
        """Local. Say where this process was last, and go; what others still send to it is lost."""
        self._say(_NEWS, "left", self.number, self.rounds, place)
        self._is_open = False
        self._wake_thread()
        self._thread.join(_LEAVE_S)
        for number in tuple(self._unsent):
            with suppress(OSError):
                self._channels[number].connection.settimeout(_LEAVE_S)
                self._channels[number].flush()
        self.drop()

    def drop(self) -> None:
        """Local. Close the connections, as a forked child does with its copies."""
        for channel in self._channels.values():
            channel.close()
        self._wake.close()
        self._woken.close()
        _open_trees.discard(self)

    def _await_parts(self, number: int, sources: Collection[int], limit_s: float) -> dict[int, bytes]:
        """Those of a round that came from these neighbours."""

        def are_there() -> bool:
            return all(source in self._parts.get(number, ()) for source in sources)

        with self._condition:
            self._condition.wait_for(
                lambda: are_there() or number in self._late or self._gone(number),
                min(limit_s, threading.TIMEOUT_MAX),
            )
            if are_there():
                return {source: self._parts[number][source] for source in sources}
            if gone := self._gone(number):
                raise gone
        # All who wait say so, so that all name the same ranks.
        self._say(_NEWS, "late", self.number, number)
        time.sleep(_ANSWER_S)
        raise self._missing(number, limit_s)

    def _missing(self, number: int, limit_s: float) -> Late:
        missing = sorted(set(range(self.size)) - self._late.get(number, set()))
        return Late(f"{self._named(missing)} did not come within {limit_s:g} s", ranks=missing)

    def _gone(self, number: int = 0) -> RankMissing | None:
        """Why a round cannot be completed any more; without a number, why no change comes back."""
        if self.lost is not None:
            return RankMissing(str(self.lost), ranks=self.lost.ranks)
        if number:
            gave_up = self._late.get(number, ())
            gone = [rank for rank, (rounds, _) in self.left.items() if rounds < number or rank in gave_up]
        else:
            gone = [rank for rank in self.position.path if rank in self.left]
        if not gone:
            return None
        return RankMissing(f"{self._named(gone)} left before", ranks=gone)

    def _named(self, numbers: Sequence[int]) -> str:
        """In words, with the hosts that are known: number 0 knows all, others those of their neighbours."""
        hosts = [self.names.get(number, "") for number in range(max(numbers, default=0) + 1)]
        return name_ranks(numbers, hosts, self._noun)

    def _run(self) -> None:
        """The thread: hear every channel, and act on what it says."""
        numbers = {channel.connection.fileno(): number for number, channel in self._channels.items()}
        poll = select.poll()
        for fd in (self._woken.fileno(), *numbers):
            poll.register(fd, select.POLLIN)
        for number, channel in self._channels.items():
            self._act_on_all(number, channel.taken())
        beat_at = 0.0
        while self._is_open:
            self._serve(poll, numbers)
            while self._own_changes:
                self._act(self.number, self._own_changes.popleft())
            if beat_at < (now := time.monotonic()) - _BEAT_S:
                beat_at = now
                self._beat(now)

    def _serve(self, poll: select.poll, numbers: Mapping[int, int]) -> None:
        """Wait for neighbours, by their descriptors: hear what they say, and send what they can take."""
        for number in tuple(self._unsent):
            poll.register(self._channels[number].connection.fileno(), select.POLLIN | select.POLLOUT)
        for fd, events in poll.poll(_BEAT_S * 1000 if self._unsent or self._silence_s < inf else None):
            if fd not in numbers:
                self._woken.recv(1 << 12)
            elif events == select.POLLOUT:
                poll.register(fd, select.POLLIN)
                self._unsent.discard(numbers[fd])
                self._flush(numbers[fd])
            elif not self._hear(numbers[fd]):
                poll.unregister(fd)
                self._unsent.discard(numbers[fd])

    def _beat(self, now: float) -> None:
        for number in tuple(self._unsent):
            if self._channels[number].sent_at < now - _SEND_S:
                self._channels[number].shut()
        if self._silence_s == inf:
            return
        self._send(self._channels, b"")
        for number, channel in self._channels.items():
            if channel.heard_at < now - self._silence_s:
                self._lose(number, f"nothing was heard of it for {self._silence_s:g} s")

    def _hear(self, number: int) -> bool:
        try:
            self._channels[number].fill()
            self._act_on_all(number, self._channels[number].taken())
        except (EOFError, *NONSENSE) as error:
            if self._is_open and number not in self.left:
                is_gone = isinstance(error, EOFError)
                self._lose(number, "its process has ended or its network is cut" if is_gone else _NO_MESSAGE)
            return False
        return True

    def _lose(self, number: int, why: str) -> None:
        if self.lost is None:
            text = f"{self._named([number])} was lost: {why}"
            self._act(self.number, _framed(_NEWS, "lost", number, text))

    def _act_on_all(self, source: int, bodies: Sequence[bytes]) -> None:
        for body in bodies:
            if body:  # else it is a beat
                self._act(source, body)

    def _act(self, source: int, body: bytes) -> None:
        """Take in what a neighbour or this process has said, and pass on what is a message before anyone sees it."""
        kind, rest = body[0], body[1:]
        is_for_all = source == self._parent or (self._parent is None and kind == _CHANGE)
        with self._condition:
            if kind == _ROUND:
                self._parts.setdefault(int.from_bytes(rest[:4], "big"), {})[source] = rest[4:]
            elif kind == _NEWS:
                what, *words = json.loads(rest)
                self._take(what, *checked(words, (int, *_OF_NEWS[what])))
                self._send([number for number in self._channels if number != source], body)
            elif kind != _CHANGE:
                raise ValueError("another kind")
            elif is_for_all:
                self._apply(*checked(json.loads(rest), _OF_CHANGE))
            elif self._parent is not None:
                self._send([self._parent], body)
            if is_for_all and kind != _NEWS:
                self._send(self._children, body)
            self._condition.notify_all()

    def _take(self, what: str, origin: int, *rest: Any) -> None:
        if what == "told" and origin != self.number:
            self._news.append((origin, rest[0]))
        elif what == "left":
            self.left[origin] = rest[0], printable(rest[1])
        elif what == "late":
            self._late.setdefault(rest[0], set()).add(origin)
        elif what == "lost" and self.lost is None:
            self.lost = RankMissing(printable(rest[0], _LONGEST_ERROR), ranks=[origin])

    def _apply(self, asker: int, serial: int, operation: str, key: str, value: str, expected: str) -> None:
        before = self.stored.get(key)
        after = _OPERATIONS[operation](before, bytes.fromhex(value), bytes.fromhex(expected))
        if after is None:
            self.stored.pop(key, None)
        else:
            self.stored[key] = after
        if asker == self.number:
            self._results[serial] = before, after

    def _say(self, kind: int, *words: Any) -> None:
        if kind == _CHANGE and self._parent is None:
            self._own_changes.append(_framed(kind, *words))  # the thread puts the changes of all in one order
            self._wake_thread()
        else:
            self._act(self.number, _framed(kind, *words))

    def _wake_thread(self) -> None:
        with suppress(OSError):  # full: it wakes anyhow
            self._wake.send(b"x")

    def _send(self, numbers: Collection[int], body: bytes) -> None:
        for number in numbers:
            if number not in self.left:
                self._channels[number].keep(body)
                self._flush(number)

    def _flush(self, number: int) -> None:
        """Send a neighbour what it can take now; the thread sends the rest."""
        try:
            if not self._channels[number].flush():
                self._unsent.add(number)
                self._wake_thread()
        except OSError:
            self._channels[number].shut()  # the thread hears the end, after what came before it


def _framed(kind: int, *words: Any) -> bytes:
    return bytes([kind]) + json.dumps(words).encode()


def _drop_copies() -> None:
    for tree in list(_open_trees):
        tree.drop()


os.register_at_fork(after_in_child=_drop_copies)
