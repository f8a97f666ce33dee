"""Connects the processes of a run as a tree: collective rounds, a store with a copy in each process, and news.

A thread of each process forwards messages, whatever the script does. It never blocks in a send: two processes that send
to each other could block for ever. A round costs each process one message to its parent and one to each child.
Covered: a process that ends, leaves early, comes too late, or falls silent. Not covered: continuing without it.
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

_BEAT_S = 1.0  # between two signs of life
_SEND_S = 60.0  # a neighbour that has read nothing for this long is lost
_ANSWER_S = 0.5  # for the names of other processes that waited in a round
_LEAVE_S = 1.0  # for the last messages
_CUT = 0.4  # of the silence: no kernel has acknowledged a beat, as it does for a busy or stopped process too
_LONGEST_ERROR = 2000
# The parts of a round go up, and the answer goes down. A change of the store goes up to number 0 and comes down to all,
# in the same order everywhere. News go from any process to all others.
_ROUND, _CHANGE, _NEWS = b"rcn"
_CHANGE_KINDS = (int, int, str, str, str, str)  # origin, its number of this change, and what `change` takes
_NEWS_KINDS = {"told": (object,), "left": (int, str), "late": (int,), "lost": (str,)}
_NO_MESSAGE = "it sends what is no message"
_OPERATIONS: Mapping[str, Callable[[bytes | None, bytes, bytes], bytes | None]] = {
    "set": lambda before, value, expected: value,
    "add": lambda before, value, expected: b"%d" % (int(before or b"0") + int(value)),
    "replace": lambda before, value, expected: value if before == (expected or None) else before,
    "delete": lambda before, value, expected: None,
}
_open_trees: "weakref.WeakSet[Tree]" = weakref.WeakSet()


class Late(RankMissing):
    """The processes `ranks` did not come to a round in time."""


class Tree:
    """This process in the tree: a channel to its parent (number 0 has none) and channels to its children."""

    def __init__(
        self,
        number: int,
        size: int,
        channels: Mapping[int, Channel],
        position: Position,
        names: Mapping[int, str],
        silence_s: float = inf,
        noun: str = "rank",
        sign: str = "",
    ) -> None:
        self.number, self.size, self.names, self.position = number, size, dict(names), position
        self.stored: dict[str, bytes] = {}
        self.rounds = 0
        self.left: dict[int, tuple[int, str]] = {}  # after how many rounds, and at which line of the script
        self.lost: RankMissing | None = None
        self._channels, self._silence_s, self._noun = dict(channels), silence_s, noun
        self._parent = position.path[0] if number else None
        self._children = [other for other in self._channels if other != self._parent]
        self._parts: dict[int, dict[int, bytes]] = {}  # by round and neighbour
        self._late: dict[int, set[int]] = {}  # by round, who waited in it until its time was over
        self._news: list[tuple[int, Any]] = []
        self._changes = 0
        self._results: dict[int, tuple[bytes | None, bytes | None]] = {}
        self._own_changes = deque[bytes]()
        self._condition = threading.Condition()
        self._is_open = True
        self._unsent = set[int]()  # neighbours with messages that are not sent yet
        for channel in self._channels.values():
            channel.connection.setblocking(False)
            channel.heard_at = time.monotonic()
            if silence_s < inf and channel.connection.family != socket.AF_UNIX:
                with suppress(AttributeError):  # only Linux has it
                    limit = socket.TCP_USER_TIMEOUT, int(1000 * _CUT * silence_s)
                    channel.connection.setsockopt(socket.IPPROTO_TCP, *limit)
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        with suppress(OSError):  # another system than Linux; the name is gone when the process is
            self._woken.bind(f"\0{sign}/{os.getpid()}")
        _open_trees.add(self)
        self._thread = threading.Thread(target=self._run, name="samestep tree", daemon=True)
        self._thread.start()

    def round(self, read: Callable[[bytes], Any], join: Callable[[Any], bytes], limit_s: float) -> Any:
        """Collective. What number 0 joined from all parts; `join` joins this process's part with its children's.

        Raises Late with the same ranks on every process that has come; RankMissing if a process is lost, has left, or
        sends what `read` refuses.
        """
        number = self.rounds = self.rounds + 1
        if number in self._late:
            raise self._failure_of(number) or self._missing(number, limit_s)
        parts = self._await_parts(number, self._children, limit_s)
        part = join([self.parsed(child, read, message) for child, message in parts.items()])
        message = bytes([_ROUND]) + number.to_bytes(4, "big") + part
        if self._parent is None:
            self._send(self._children, message)
        else:
            self._send([self._parent], message)
            part = self._await_parts(number, [self._parent], limit_s)[self._parent]
        with self._condition:
            self._parts.pop(number, None)
        return self.parsed(self._parent or 0, read, part)

    def gather(self, mine: Any, limit_s: float, read: Callable[[Any], Any] = lambda part: part) -> list[Any]:
        """Collective. Every process's value, by number, converted by `read`; raises what `round` raises."""

        def join(parts: Sequence[dict[str, Any]]) -> bytes:
            joined = {} if mine is None else {str(self.number): mine}
            for part in parts:
                joined |= part
            return json.dumps(joined).encode()

        values = self.round(lambda part: dict(json.loads(part)), join, limit_s)
        return [self.parsed(number, read, values.get(str(number))) for number in range(self.size)]

    def parsed(self, number: int, read: Callable[[Any], Any], value: Any) -> Any:
        """Local. A value that a process sent, converted by `read`; if that fails, the process counts as lost."""
        try:
            return read(value)
        except NONSENSE as error:
            self._lose(number, _NO_MESSAGE)
            raise RankMissing(str(self.lost), ranks=[number]) from error

    def tell(self, news: Any) -> None:
        """Local. Send news to all other processes."""
        self._say(_NEWS, "told", self.number, news)

    def take_news(self, read: Callable[[Any], Any] = lambda value: value) -> list[tuple[int, Any]]:
        """Local. The news since the last call, with who sent them; who sends what `read` refuses counts as lost."""
        with self._condition:
            news, self._news = self._news, []
        with suppress(RankMissing):
            return [(number, self.parsed(number, read, value)) for number, value in news]
        return []

    def gone(self) -> RankMissing | None:
        """Local. Why a round that begins now cannot be completed; None if no reason is known."""
        return self._failure_of(self.rounds + 1)

    def silent_neighbours(self, seconds: float) -> list[int]:
        """Local. The neighbours that have sent nothing for this long."""
        since = time.monotonic() - seconds
        channels = self._channels.items()
        return [number for number, end in channels if end.heard_at < since and number not in self.left]

    def change(
        self,
        operation: str,
        key: str,
        value: bytes = b"",
        expected: bytes = b"",
        limit_s: float | None = None,
    ) -> tuple[bytes | None, bytes | None]:
        """Local. Change the store of all processes, in the same order everywhere; the value before and after."""
        # Raises RankMissing if number 0 is gone, or does not answer within the limit.
        with self._condition:
            self._changes += 1
            serial = self._changes
        self._say(_CHANGE, self.number, serial, operation, key, value.hex(), expected.hex())
        with self._condition:
            self._condition.wait_for(lambda: serial in self._results or self._failure_of(), limit_s)
            if serial not in self._results:
                raise self._failure_of() or RankMissing(f"no answer within {limit_s} s")
            return self._results.pop(serial)

    def await_keys(self, keys: Sequence[str], limit_s: float) -> bool:
        """Local. Whether the store gets all of these keys in time."""

        def are_there() -> bool:
            return all(key in self.stored for key in keys)

        with self._condition:
            limit_s = min(limit_s, threading.TIMEOUT_MAX)
            if not self._condition.wait_for(lambda: are_there() or self._failure_of(), limit_s):
                return False
            if not are_there() and (gone := self._failure_of()):
                raise gone
            return True

    def leave(self, place: str = "") -> None:
        """Local. Tell all that this process leaves, and where; messages that are sent to it later are lost."""
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
        """Local. Close the connections without a message; a forked child does so with its copies."""
        for channel in self._channels.values():
            channel.close()
        self._wake.close()
        self._woken.close()
        _open_trees.discard(self)

    def _await_parts(self, number: int, sources: Collection[int], limit_s: float) -> dict[int, bytes]:
        """The parts of a round from these neighbours."""

        def are_there() -> bool:
            return all(source in self._parts.get(number, ()) for source in sources)

        with self._condition:
            self._condition.wait_for(
                lambda: are_there() or number in self._late or self._failure_of(number),
                min(limit_s, threading.TIMEOUT_MAX),
            )
            if are_there():
                return {source: self._parts[number][source] for source in sources}
            if gone := self._failure_of(number):
                raise gone
        # Every process that waited tells the others, so that all name the same missing ranks.
        self._say(_NEWS, "late", self.number, number)
        time.sleep(_ANSWER_S)
        raise self._missing(number, limit_s)

    def _missing(self, number: int, limit_s: float) -> Late:
        missing = sorted(set(range(self.size)) - self._late.get(number, set()))
        return Late(f"{self._named(missing)} did not come within {limit_s:g} s", ranks=missing)

    def _failure_of(self, number: int = 0) -> RankMissing | None:
        """Why a round cannot be completed any more; without a number, why a change cannot come back."""
        if self.lost is not None:
            return RankMissing(str(self.lost), ranks=self.lost.ranks)
        if number:
            gave_up = self._late.get(number, ())
            gone = [rank for rank, (rounds, _) in self.left.items() if rounds < number or rank in gave_up]
        else:
            gone = [rank for rank in self.position.path if rank in self.left]
        if not gone:
            return None
        where = "".join(sorted({f", at {place}" for rank in gone if (place := self.left[rank][1])}))
        return RankMissing(f"{self._named(gone)} left before{where}", ranks=gone)

    def _named(self, numbers: Sequence[int]) -> str:
        """In words, with known hosts: number 0 knows all hosts, other processes those of their neighbours."""
        hosts = [self.names.get(number, "") for number in range(max(numbers, default=0) + 1)]
        return name_ranks(numbers, hosts, self._noun)

    def _run(self) -> None:
        """The thread's loop: read every channel, and act on its messages."""
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
        """Wait until neighbours can be read from or written to, then do so; `numbers` has them by descriptor."""
        for number in tuple(self._unsent):
            poll.register(self._channels[number].connection.fileno(), select.POLLIN | select.POLLOUT)
        for fd, events in poll.poll(_BEAT_S * 1000 if self._unsent or self._silence_s < inf else None):
            if fd not in numbers:
                self._woken.recv(1 << 12)
            elif events == select.POLLOUT:
                poll.register(fd, select.POLLIN)
                self._unsent.discard(numbers[fd])
                self._flush(numbers[fd])
            elif not self._read(numbers[fd]):
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

    def _read(self, number: int) -> bool:
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
            if body:  # an empty body only says that the sender lives
                self._act(source, body)

    def _act(self, source: int, body: bytes) -> None:
        """Act on a message of a neighbour or of this process, and forward it before a waiting thread can see it."""
        kind, rest = body[0], body[1:]
        is_for_all = source == self._parent or (self._parent is None and kind == _CHANGE)
        with self._condition:
            if kind == _ROUND:
                self._parts.setdefault(int.from_bytes(rest[:4], "big"), {})[source] = rest[4:]
            elif kind == _NEWS:
                topic, *words = json.loads(rest)
                self._note_news(topic, *checked(words, (int, *_NEWS_KINDS[topic])))
                self._send([number for number in self._channels if number != source], body)
            elif kind != _CHANGE:
                raise ValueError("another kind")
            elif is_for_all:
                self._apply(*checked(json.loads(rest), _CHANGE_KINDS))
            elif self._parent is not None:
                self._send([self._parent], body)
            if is_for_all and kind != _NEWS:
                self._send(self._children, body)
            self._condition.notify_all()

    def _note_news(self, topic: str, origin: int, *rest: Any) -> None:
        if topic == "told" and origin != self.number:
            self._news.append((origin, rest[0]))
        elif topic == "left":
            self.left[origin] = rest[0], printable(rest[1])
        elif topic == "late":
            self._late.setdefault(rest[0], set()).add(origin)
        elif topic == "lost" and self.lost is None:
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
            self._own_changes.append(_framed(kind, *words))  # the thread orders the changes of all processes
            self._wake_thread()
        else:
            self._act(self.number, _framed(kind, *words))

    def _wake_thread(self) -> None:
        with suppress(OSError):  # the socket is full, so the thread wakes anyway
            self._wake.send(b"x")

    def _send(self, numbers: Collection[int], body: bytes) -> None:
        for number in numbers:
            if number not in self.left:
                self._channels[number].keep(body)
                self._flush(number)

    def _flush(self, number: int) -> None:
        """Send as much to a neighbour as possible without blocking; the thread sends the rest."""
        try:
            if not self._channels[number].flush():
                self._unsent.add(number)
                self._wake_thread()
        except OSError:
            self._channels[number].shut()  # the thread notices it, after the last messages


def _framed(kind: int, *words: Any) -> bytes:
    return bytes([kind]) + json.dumps(words).encode()


def _drop_copies() -> None:
    for tree in list(_open_trees):
        tree.drop()


os.register_at_fork(after_in_child=_drop_copies)
