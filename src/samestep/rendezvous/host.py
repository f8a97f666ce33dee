"""Accepts those who join: proves them, names who is missing, and lets no flood of strangers keep them out."""

import selectors
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from samestep.errors import RankMissing, RanksDiffer, SamestepError
from samestep.rendezvous import addresses
from samestep.rendezvous.link import Link
from samestep.rendezvous.listen import allow_descriptors
from samestep.rendezvous.member import SAY_S, Member, hello_of, next_saying, patience, say
from samestep.rendezvous.seats import seats
from samestep.rendezvous.tree import Tree
from samestep.text import name_ranks, printable

_STEP_S = 0.25
# Of those who have not proved that they have the key: how long, how many of one address, how many in all.
_GREETING_S = 5.0
_MOST_STRANGERS_EACH, _MOST_STRANGERS = 32, 128
_ACCEPTED_AT_ONCE = 16
_MOST_KNOCKS = 1 << 16


def host(listeners: Sequence[socket.socket], me: Member) -> Tree:
    """Number 0: accept members of this run until all are there; closes the listeners."""
    return Host(me, range(1, me.size)).run(listeners)


class Host:
    """Accepts the wanted members: number 0 all of them, another one its children in the tree."""

    def __init__(self, me: Member, wanted: Sequence[int]) -> None:
        self._me, self._wanted = me, wanted
        self._members: dict[int, Link] = {}
        self._hellos: dict[int, dict[str, Any]] = {me.number: hello_of(me, [])}
        self._selector = selectors.DefaultSelector()
        self._strangers: dict[Link, str] = {}
        self._knocks: set[bytes] = set()

    def run(self, listeners: Sequence[socket.socket]) -> Tree:
        """Number 0's part; all others hear how it ended."""
        me = self._me
        allow_descriptors(me.size, f"{me.noun} 0 is connected to by {me.size} {me.noun}s")
        try:
            self.accept(listeners, me.limit_s)
            hellos = [self._hellos[number] for number in range(me.size)]
            if objection := me.objection([hello["facts"] for hello in hellos]):
                raise objection
        except SamestepError as error:
            self._tell(_told(error))
            for link in self._members.values():
                link.close()
            raise
        here = next(
            (link for link in self._members.values() if link.connection.family != socket.AF_UNIX), None
        )
        source = addresses.source_for(here.connection.getpeername()[0]) if here else ""
        own, *others = seats(hellos, source, is_flat=me.private is None)
        for number, seat in enumerate(others, 1):
            with suppress(OSError):
                self._members[number].send_json({"complete": seat})
            if number not in own.children:
                self._members[number].close()
        names = [hello["host"] for hello in hellos]
        children = {number: self._members[number] for number in own.children}
        return Tree(0, me.size, None, children, seat=own, names=names, silence_s=me.silence_s, noun=me.noun)

    def accept(self, listeners: Sequence[socket.socket], limit_s: float) -> dict[int, Link]:
        """The links to the wanted members; closes the listeners."""
        began, said_at = time.monotonic(), SAY_S
        try:
            for listener in listeners:
                listener.settimeout(0)
                self._selector.register(listener, selectors.EVENT_READ)
            while self._absent():
                ready = [key for key, _ in self._selector.select(_STEP_S)]
                # Whoever has the key says so at once, and is heard before a flood of others is let in.
                for key in sorted(ready, key=lambda key: key.data is None):
                    self._hear(key.data) if key.data else self._open(key.fileobj)
                self._drop_strangers()
                waited = time.monotonic() - began
                if waited > limit_s:
                    raise RankMissing(
                        f"{self._missing()} did not come within {limit_s:g} s", ranks=self._absent()
                    )
                if waited > said_at:
                    said_at = next_saying(waited)
                    say(f"waiting for {self._missing()}; {patience(waited, limit_s)}")
        finally:
            for key in list(self._selector.get_map().values()):
                if key.data is None or key.data not in self._members.values():
                    (key.data or key.fileobj).close()  # type: ignore[union-attr]
            self._selector.close()
        return self._members

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
            link.fill()
            if link.others_nonce and not has_knocked:
                self._believe(link.others_nonce)
            if link.is_proven:
                self._strangers.pop(link, None)
            if message := link.take_json():
                self._admit(link, message)
                if self._me.number > 0:
                    # A child goes on at once; what it says next is for the tree.
                    self._selector.unregister(link.connection)
        except RanksDiffer as error:
            with suppress(OSError):
                link.send_json(_told(error))
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
        here = self._hellos[me.number]["host"]
        told = {
            **hello,
            "host": who[0],
            "pid": who[1],
            "facts": dict(hello["facts"]),
            "doors": list(hello["doors"]),
        }
        told["machine"] = str(hello["machine"])
        comer = f"{me.noun} {number}" if number >= 0 else f"another {me.noun}"
        script, host = str(hello["script"]), f"{me.noun} {me.number} ({here})"
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
        known = self._hellos.get(number)
        before = (known["host"], known["pid"]) if known else who
        if before != who or (number not in self._wanted and number != me.number):
            raise RanksDiffer(
                f"{me.noun} {number} came twice: process {before[1]} on {before[0]} and process {who[1]} on "
                f"{who[0]}; give every {me.noun} a number of its own"
            )
        if number in self._members:
            self._forget(self._members[number])
        self._members[number], self._hellos[number] = stream, told
        stream.send_json({"welcome": number})

    def _forget(self, stream: Link) -> None:
        self._strangers.pop(stream, None)
        for number in [number for number, member in self._members.items() if member is stream]:
            del self._members[number], self._hellos[number]
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
        return [number for number in self._wanted if number not in self._members]


def _told(error: SamestepError) -> dict[str, Any]:
    return {"error": str(error), "kind": type(error).__name__, "ranks": getattr(error, "ranks", ())}
