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
from samestep.rendezvous.channel import Channel
from samestep.rendezvous.listen import allow_descriptors
from samestep.rendezvous.member import Member, Patience
from samestep.rendezvous.position import positions
from samestep.rendezvous.tree import Tree
from samestep.text import name_ranks, printable

_STEP_S = 0.25
# Of those who have not proved that they have the key: how long, how many of one address, how many in all.
_GREETING_S = 5.0
_MOST_STRANGERS_EACH, _MOST_STRANGERS = 32, 128
_ACCEPTED_AT_ONCE = 16
_MOST_GREETINGS = 1 << 16


def host(listeners: Sequence[socket.socket], me: Member) -> Tree:
    """Number 0: accept all members of this run, and tell each its position; closes the listeners."""
    allow_descriptors(me.size, f"{me.noun} 0 is connected to by {me.size} {me.noun}s")
    admission = Admission(me, range(1, me.size))
    try:
        channels = admission.accept(listeners, me.limit_s)
        hellos = [admission.hellos[number] for number in range(me.size)]
        if objection := me.objection([hello["facts"] for hello in hellos]):
            raise objection
    except SamestepError as error:
        admission.end(error)
        raise
    outside = (channel.connection for channel in channels.values())
    peers = [connection.getpeername()[0] for connection in outside if connection.family != socket.AF_UNIX]
    source = addresses.source_for(peers[0]) if peers else ""
    own, *others = positions(hellos, source)
    for number, position in enumerate(others, 1):
        with suppress(OSError):
            channels[number].send_json({"complete": position})
        if number not in own.children:
            channels.pop(number).close()
    names = {number: hello["host"] for number, hello in enumerate(hellos)}
    return Tree(0, me.size, channels, own, names, silence_s=me.silence_s, noun=me.noun)


class Admission:
    """Accepts the wanted members: number 0 all of them, another process its children in the tree."""

    def __init__(self, me: Member, wanted: Sequence[int]) -> None:
        self.hellos: dict[int, dict[str, Any]] = {me.number: me.hello()}
        self._me, self._wanted, self._absent = me, set(wanted), set(wanted)
        self._members: dict[int, Channel] = {}
        self._selector = selectors.DefaultSelector()
        self._strangers: dict[Channel, str] = {}  # and from which address, the oldest first
        self._greetings: set[bytes] = set()

    def accept(self, listeners: Sequence[socket.socket], limit_s: float) -> dict[int, Channel]:
        """The channels to the wanted members; closes the listeners."""
        patience = Patience(limit_s)
        try:
            for listener in listeners:
                listener.settimeout(0)
                self._selector.register(listener, selectors.EVENT_READ)
            while self._absent:
                ready = [key for key, _ in self._selector.select(_STEP_S)]
                # Whoever has the key says so at once, and is heard before a flood of others is let in.
                for key in sorted(ready, key=lambda key: key.data is None):
                    self._hear(key.data) if key.data else self._open(key.fileobj)
                self._drop_strangers()
                if patience.left_s < 0 and self._absent:
                    raise RankMissing(
                        f"{self._missing()} did not come within {limit_s:g} s", ranks=sorted(self._absent)
                    )
                if patience.is_worth_a_line:
                    patience.say(f"waiting for {self._missing()}")
        finally:
            for key in list(self._selector.get_map().values()):
                if key.data not in self._members.values():
                    (key.data or key.fileobj).close()  # type: ignore[union-attr]
            self._selector.close()
        return self._members

    def end(self, error: SamestepError) -> None:
        """Tell all who have come why there is no run."""
        for channel in self._members.values():
            _refuse(channel, error)
            channel.close()

    def _open(self, listener: Any) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, address = listener.accept()
                channel = Channel(connection, self._me.key, is_server=True)
            except OSError:
                return
            self._selector.register(connection, selectors.EVENT_READ, channel)
            self._strangers[channel] = str(address[0]) if isinstance(address, tuple) else ""

    def _hear(self, channel: Channel) -> None:
        if channel.connection.fileno() < 0:  # closed within this turn
            return
        try:
            had_greeted = bool(channel.client_nonce)
            channel.fill()
            if channel.client_nonce and not had_greeted:
                self._note_greeting(channel.client_nonce)
            if channel.is_proven:
                self._strangers.pop(channel, None)
            if hello := channel.take_json():
                self._admit(channel, hello)
        except RanksDiffer as error:
            _refuse(channel, error)
            raise
        except (EOFError, ValueError, KeyError, TypeError, OSError):
            self._forget(channel)

    def _note_greeting(self, nonce: bytes) -> None:
        """A greeting that was made with the key is no part of a flood, unless it is the copy of another."""
        if nonce in self._greetings or len(self._greetings) > _MOST_GREETINGS:
            raise ValueError("a repeated greeting")
        self._greetings.add(nonce)

    def _drop_strangers(self) -> None:
        """The slow, and of too many the oldest of the address that has most."""
        late = time.monotonic() - _GREETING_S
        for channel in [channel for channel in self._strangers if channel.opened_at < late]:
            self._forget(channel)
        silent = {channel: at for channel, at in self._strangers.items() if not channel.client_nonce}
        counts = Counter(silent.values())
        for channel, at in silent.items():
            is_crowd = counts.total() > _MOST_STRANGERS and counts[at] == max(counts.values())
            if counts[at] > _MOST_STRANGERS_EACH or is_crowd:
                counts[at] -= 1
                self._forget(channel)

    def _admit(self, channel: Channel, hello: dict[str, Any]) -> None:
        me = self._me
        if hello["run"] != me.run:
            channel.send_json({"unknown": me.run})
            self._forget(channel)
            return
        hello["host"], hello["pid"] = printable(hello["host"], 64), int(hello["pid"])
        hello["facts"], hello["places"] = dict(hello["facts"]), list(hello["places"])
        number = int(hello["number"])
        self._check(number, hello)
        if number < 0:
            number = min(self._absent)
        if number in self._members:
            self._forget(self._members[number])
        self._members[number], self.hellos[number] = channel, hello
        self._absent.discard(number)
        channel.send_json({"welcome": number, "host": self.hellos[me.number]["host"]})
        if me.number > 0:
            # A child goes on at once; what it says next is for the tree.
            self._selector.unregister(channel.connection)

    def _check(self, number: int, hello: dict[str, Any]) -> None:
        """Raises RanksDiffer where this member cannot be of this run."""
        me, script = self._me, str(hello["script"])
        here = f"{me.noun} {me.number} ({self.hellos[me.number]['host']})"
        member = f"{me.noun} {number}" if number >= 0 else f"another {me.noun}"
        who = f"{member} ({hello['host']})"
        if me.script and script and script != me.script:
            raise RanksDiffer(
                f"{here} runs {me.script!r:.200} and {who} runs {script!r:.200}; "
                f"run one script on all {me.noun}s, or let each run meet at a place of its own"
            )
        if hello["size"] != me.size:
            raise RanksDiffer(
                f"{here} counts {me.size} {me.noun}s and {who} counts {hello['size']}; "
                "start all of them with the same number"
            )
        if number < 0 and not self._absent:
            raise RanksDiffer(
                f"{who} came, which is one too many for {me.size}; start as many as are counted"
            )
        if number >= me.size:
            raise RanksDiffer(f"{member} came, but there are {me.size}; count from 0")
        known = self.hellos.get(number, hello)
        same = (known["host"], known["pid"]) == (hello["host"], hello["pid"])
        if not same or number not in (-1, me.number, *self._wanted):
            raise RanksDiffer(
                f"{member} came twice: process {known['pid']} on {known['host']} and process {hello['pid']} on "
                f"{hello['host']}; give every {me.noun} a number of its own"
            )

    def _forget(self, channel: Channel) -> None:
        is_stranger = self._strangers.pop(channel, None) is not None
        members = {} if is_stranger else self._members
        for number in [number for number, member in members.items() if member is channel]:
            del self._members[number], self.hellos[number]
            self._absent.add(number)
        # ValueError: it was closed within this turn, when the same member came again.
        with suppress(KeyError, ValueError):
            self._selector.unregister(channel.connection)
        channel.close()

    def _missing(self) -> str:
        return name_ranks(self._absent, self._me.expected, self._me.noun)


def _refuse(channel: Channel, error: SamestepError) -> None:
    kind, ranks = type(error).__name__, getattr(error, "ranks", ())
    with suppress(OSError):
        channel.send_json({"error": str(error), "kind": kind, "ranks": ranks})
