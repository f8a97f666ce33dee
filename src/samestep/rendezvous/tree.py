"""The processes of a run as a tree: rounds in which all take part, a store that each has a copy of, and bad news.

A thread of each process passes on what comes, whatever its script does. A round costs each process one message to
its parent and one to each child. Covered: a process that ends, leaves early, or falls silent. Not covered: going on
without it.
"""

import json
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any

from samestep.errors import RankMissing
from samestep.rendezvous.link import Link
from samestep.rendezvous.listen import LOOP
from samestep.rendezvous.seats import Seat
from samestep.text import name_ranks, printable

_SLICE_S = 1.0
_BEAT_S = 1.0
_SEND_S = 60.0
_ANSWER_S = 1.0
_LONGEST_ERROR = 2000
_UP, _DOWN, _ORDER, _STORED, _NEWS, _LOST, _LEFT, _WAITS, _ASKS, _KNOWN = b"udosnlbwak"
_open_trees: "weakref.WeakSet[Tree]" = weakref.WeakSet()


class Tree:
    """This process's place among all: a link to its parent, none for number 0, and links to its children."""

    def __init__(
        self,
        number: int,
        size: int,
        parent: Link | None,
        children: Mapping[int, Link],
        *,
        names: Sequence[str] = (),
        seat: Seat,
        silence_s: float = inf,
        noun: str = "rank",
    ) -> None:
        self.number, self.size, self.names = number, size, list(names)
        self.news: list[tuple[int, Any]] = []
        self.stored: dict[str, bytes] = {}
        self.left: dict[int, tuple[int, str]] = {}
        self.rounds = 0
        self._lost: RankMissing | None = None
        self.seat, self._parent_number = seat, seat.parent
        self._parent, self._children = parent, dict(children)
        self._silence_s, self._noun = silence_s, noun
        self._parts: dict[int, dict[int, bytes]] = {}
        self._answers: dict[int, bytes] = {}
        self._waiting: dict[int, set[int]] = {}
        self._known: dict[int, list[int]] = {}
        self._results: dict[int, Any] = {}
        self._orders = 0
        self._changed = threading.Condition()
        self._ordering = threading.Lock()
        self._is_open = True
        self._links = {link.connection.fileno(): (number, link) for number, link in self._children.items()}
        if parent is not None:
            self._links[parent.connection.fileno()] = (seat.parent, parent)
        for _, link in self._links.values():
            link.connection.settimeout(_SEND_S)
            link.heard_at = time.monotonic()
        self._wake, self._woken = socket.socketpair()
        _open_trees.add(self)
        self._thread = threading.Thread(target=self._pass_on, name="samestep tree", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Number 0's address, where all are connected to it, as number 0 or this process sees it."""
        connection = (self._parent or next(iter(self._children.values()))).connection
        name = connection.getpeername() if self._parent else connection.getsockname()
        return str(name[0]) if isinstance(name, tuple) else LOOP

    @property
    def lost(self) -> RankMissing | None:
        """Which process was lost, and why, as far as this one has heard."""
        return self._lost

    def take_news(self) -> list[tuple[int, Any]]:
        """Local. What others have told since the last time, and who."""
        with self._changed:
            news, self.news = self.news, []
        return news

    def round(
        self,
        join: Callable[[Mapping[int, bytes]], bytes],
        limit_s: float,
        look: Callable[[float], None] = lambda waited: None,
    ) -> bytes:
        """Collective. What number 0 makes of all parts; `join` makes one part of this process's and its children's.

        `look` is called about once a second with how long it has waited, and may raise.
        """
        self.rounds += 1
        number = self.rounds
        self._await(lambda: len(self._parts.get(number, ())) == len(self._children), number, limit_s, look)
        with self._changed:
            parts = self._parts.pop(number, {})
        part = join(parts)
        if self._parent is None:
            self._send_down(_framed(_DOWN, part, number))
            return part
        self._send(self._parent_number, self._parent, _framed(_UP, part, number))
        self._await(lambda: number in self._answers, number, limit_s, look)
        with self._changed:
            self._waiting.pop(number, None)
            return self._answers.pop(number)

    def gather(self, mine: Any, limit_s: float) -> list[Any]:
        """Collective. What every process brought, by number; RankMissing where one is lost or too late."""

        def join(parts: Mapping[int, bytes]) -> bytes:
            here = {} if mine is None else {str(self.number): mine}
            for part in parts.values():
                here |= json.loads(part)
            return json.dumps(here).encode()

        def look(waited: float) -> None:
            if waited > limit_s:
                missing = [child for child in self._children if child not in self._parts.get(self.rounds, {})]
                missing = missing or [self._parent_number]
                self._fail(
                    f"{name_ranks(missing, self.names, self._noun)} said nothing for {limit_s:g} s", missing
                )

        found = json.loads(self.round(join, inf, look))
        return [found.get(str(number)) for number in range(self.size)]

    def tell(self, news: Any) -> None:
        """Local. Everyone else finds this in `news` soon."""
        self._flood(_framed(_NEWS, json.dumps([self.number, news]).encode()))

    def order(self, kind: str, key: str, value: bytes = b"", expected: bytes = b"") -> Any:
        """Local. Change the store as number 0 does, for all alike; the value after it, or None where there is none."""
        with self._changed:
            self._orders += 1
            name = self._orders
        said = [self.number, name, kind, key, value.hex(), expected.hex()]
        if self._parent is None:
            self._obey(said)
        else:
            self._send(self._parent_number, self._parent, _framed(_ORDER, json.dumps(said).encode()))
        self._await(lambda: name in self._results, 0, inf)
        with self._changed:
            return self._results.pop(name)

    def await_keys(self, keys: Sequence[str], limit_s: float) -> bool:
        """Local. Whether the store has all of these in time."""
        until = time.monotonic() + limit_s
        with self._changed:
            while not all(key in self.stored for key in keys):
                self._raise_if_gone()
                if time.monotonic() > until:
                    return False
                self._changed.wait(min(_SLICE_S, max(0.0, until - time.monotonic())))
        return True

    def waiting_in(self, number: int) -> list[int] | None:
        """The processes known to wait in this round, None where number 0 does not answer."""
        with self._changed:
            if self._parent is None:
                return sorted(self._waiting.get(number, ()))
            self._known.pop(number, None)
        with suppress(RankMissing):
            self._send(self._parent_number, self._parent, _framed(_ASKS, b"", number))
        with self._changed:
            self._changed.wait_for(lambda: number in self._known or self._lost is not None, _ANSWER_S)
            return self._known.get(number)

    def leave(self, place: str = "") -> None:
        """Local. Say where this process was last, and go; what others still send to it is lost."""
        with suppress(RankMissing):
            self._flood(_framed(_LEFT, json.dumps([self.number, self.rounds, place]).encode()))
        self._is_open = False
        with suppress(OSError):
            self._wake.send(b"x")
        self._thread.join(_ANSWER_S)
        self.drop()

    def drop(self) -> None:
        """Local. Close the connections, as a forked child does with its copies."""
        for _, link in list(self._links.values()):
            link.close()
        self._wake.close()
        self._woken.close()
        _open_trees.discard(self)

    def _await(
        self,
        is_there: Callable[[], bool],
        number: int,
        limit_s: float,
        look: Callable[[float], None] = lambda waited: None,
    ) -> None:
        """Wait in slices of a second, so that signals are heard and a long wait is noted."""
        since = time.monotonic()
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: is_there() or self._gone(number), min(_SLICE_S, limit_s)):
                    if is_there():
                        return
                    self._raise_if_gone(number)
            waited = time.monotonic() - since
            if number:
                self._note_waiting([self.number], number)
            look(waited)

    def _gone(self, number: int = 0) -> RankMissing | None:
        """Why a round cannot be completed any more, or an order answered."""
        if self._lost is not None:
            return RankMissing(str(self._lost), ranks=self._lost.ranks)
        missing = [child for child in self._children if child not in self._parts.get(number, ())]
        near = [self._parent_number] if self._parent else []
        gone = [
            left
            for left, (rounds, _) in self.left.items()
            if left in near or (number and (left in missing or rounds < number))
        ]
        if not gone:
            return None
        return RankMissing(f"{name_ranks(gone, self.names, self._noun)} left before", ranks=gone)

    def _raise_if_gone(self, number: int = 0) -> None:
        if gone := self._gone(number):
            raise gone

    def _pass_on(self) -> None:
        """The thread: hear every link, and act on what it says."""
        beat_at = 0.0
        poll = select.poll()
        for fd in (self._woken.fileno(), *self._links):
            poll.register(fd, select.POLLIN)
        for number, link in self._links.values():
            self._hear(number, link, Link.read_rest)
        beats = self._silence_s < inf
        while self._is_open:
            for fd, _ in poll.poll(_BEAT_S * 1000 if beats else None):
                if fd in self._links and not self._hear(*self._links[fd]):
                    poll.unregister(fd)
            if beats and time.monotonic() - beat_at > _BEAT_S:
                beat_at = time.monotonic()
                self._flood(b"")
                for number, link in self._links.values():
                    if link.heard_at < beat_at - self._silence_s:
                        self._lose(number, f"nothing was heard of it for {self._silence_s:g} s")

    def _hear(self, number: int, link: Link, read: Callable[[Link], list[bytes]] = Link.read) -> bool:
        try:
            for body in read(link):
                self._act(number, body)
        except (EOFError, ValueError, KeyError, TypeError):
            if self._is_open and number not in self.left:
                self._lose(number, "its process has ended or its network is cut")
            return False
        return True

    def _act(self, source: int, body: bytes) -> None:
        if not body:
            return
        kind, number, rest = body[0], int.from_bytes(body[1:5], "big"), body[5:]
        if kind == _DOWN:
            self._send_down(body)
            self._note(lambda: self._answers.__setitem__(number, rest))
        elif kind == _UP:
            self._note(lambda: self._parts.setdefault(number, {}).__setitem__(source, rest))
        elif kind == _ORDER:
            self._send_up(body) if self._parent else self._obey(json.loads(rest))
        elif kind == _STORED:
            self._send_down(body)
            self._keep(*json.loads(rest))
        elif kind == _WAITS:
            self._note_waiting(json.loads(rest), number)
        elif kind == _ASKS:
            waiting = json.dumps(sorted(self._waiting.get(number, ()))).encode()
            self._send_up(body) if self._parent else self._send_down(_framed(_KNOWN, waiting, number))
        elif kind == _KNOWN:
            self._send_down(body)
            self._note(lambda: self._known.__setitem__(number, json.loads(rest)))
        else:
            self._spread(kind, source, body, json.loads(rest))

    def _spread(self, kind: int, source: int, body: bytes, said: Sequence[Any]) -> None:
        self._flood(body, source)
        if kind == _NEWS:
            self._note(lambda: self.news.append((said[0], said[1])))
        elif kind == _LEFT:
            self._note(lambda: self.left.__setitem__(said[0], (said[1], printable(said[2]))))
        elif kind == _LOST and self._lost is None:
            error = RankMissing(printable(said[0], _LONGEST_ERROR), ranks=said[1])
            self._note(lambda: setattr(self, "_lost", error))

    def _obey(self, said: Sequence[Any]) -> None:
        """Number 0 puts the changes of all in one order."""
        asker, name, kind, key, value, expected = said
        with self._ordering:
            before = self.stored.get(key)
            after: bytes | None = bytes.fromhex(value)
            if kind == "add":
                after = b"%d" % (int(before or b"0") + int(after or b"0"))
            elif kind == "delete":
                after = None
            elif kind == "replace" and before != (bytes.fromhex(expected) or None):
                after = before
            result = before is not None if kind == "delete" else None if after is None else after.hex()
            news = [asker, name, key, None if after is None else after.hex(), result]
            self._send_down(_framed(_STORED, json.dumps(news).encode()))
            self._keep(*news)

    def _keep(self, asker: int, name: int, key: str, value: str | None, result: Any) -> None:
        with self._changed:
            if value is None:
                self.stored.pop(key, None)
            else:
                self.stored[key] = bytes.fromhex(value)
            if asker == self.number:
                self._results[name] = bytes.fromhex(result) if isinstance(result, str) else result
            self._changed.notify_all()

    def _note_waiting(self, numbers: Sequence[int], number: int) -> None:
        with self._changed:
            known = self._waiting.setdefault(number, set())
            new = [one for one in numbers if one not in known]
            known.update(new)
            for old in [one for one in self._waiting if one < number - 1]:
                del self._waiting[old]
        if new and self._parent is not None:
            self._send_up(_framed(_WAITS, json.dumps(new).encode(), number))

    def _note(self, change: Callable[[], object]) -> None:
        with self._changed:
            change()
            self._changed.notify_all()

    def _send_up(self, body: bytes) -> None:
        if self._parent is not None:
            with suppress(RankMissing):
                self._send(self._parent_number, self._parent, body)

    def _send_down(self, body: bytes) -> None:
        for number, link in self._children.items():
            with suppress(RankMissing):
                self._send(number, link, body)

    def _flood(self, body: bytes, but: int = -1) -> None:
        for number, link in list(self._links.values()):
            if number != but and number not in self.left:
                with suppress(RankMissing):
                    self._send(number, link, body)

    def _send(self, number: int, link: Link, body: bytes) -> None:
        try:
            link.send(body)
        except OSError:
            if threading.current_thread() is self._thread:
                return  # it hears soon what became of the link
            # What it sent before it went may say why; the thread hears it.
            with self._changed:
                self._changed.wait_for(lambda: self._lost is not None or number in self.left, _ANSWER_S)
                self._raise_if_gone()
            self._lose(number, "its process has ended or its network is cut")

    def _lose(self, number: int, why: str) -> None:
        with suppress(RankMissing):
            self._fail(f"{name_ranks([number], self.names, self._noun)} was lost: {why}", [number])

    def _fail(self, text: str, numbers: Sequence[int]) -> None:
        error = RankMissing(text, ranks=numbers)
        if self._lost is None:
            # Others hear it before this process, which may end of it.
            self._flood(_framed(_LOST, json.dumps([text, list(numbers)]).encode()))
            self._note(lambda: setattr(self, "_lost", self._lost or error))
        raise error


def _framed(kind: int, rest: bytes, number: int = 0) -> bytes:
    return bytes([kind]) + number.to_bytes(4, "big") + rest


def _drop_copies() -> None:
    for tree in list(_open_trees):
        tree.drop()


os.register_at_fork(after_in_child=_drop_copies)
