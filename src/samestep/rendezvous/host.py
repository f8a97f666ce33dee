"""Accepts the members of a run: checks their proofs, names missing members, and limits strangers' connections.

All members connect to number 0. When all have come, it tells each its place in the tree. Then every process accepts
its children.
"""

import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NoReturn

from samestep.errors import PlacementError, RankMissing, RanksDiffer, SamestepError, UsageError
from samestep.rendezvous import addresses
from samestep.rendezvous.channel import CLAIM, NONSENSE, Channel
from samestep.rendezvous.listen import allow_descriptors
from samestep.rendezvous.member import Member, Patience, place_from
from samestep.rendezvous.position import Position, positions
from samestep.rendezvous.tree import Tree
from samestep.text import counted, name_ranks, printable

_STEP_S = 0.25
# Limits for connections without a proof of the key: their time, their number from one address, and in total.
_GREETING_S = 5.0
_MOST_STRANGERS_EACH, _MOST_STRANGERS = 32, 128
_ACCEPTED_AT_ONCE = 16
_VERSIONS = ("torch", "samestep", "python")
_MOST_GREETINGS = 1 << 16
_LONGEST_ERROR = 2000
_WITHOUT_RANKS = {kind.__name__: kind for kind in (UsageError, PlacementError)}


def host(listeners: Sequence[socket.socket], me: Member) -> Tree:
    """Number 0: accept all members of this run, and send each its position; closes the listeners."""
    others = me.size - 1
    allow_descriptors(others, f"{me.noun} 0 is connected to {counted(others, me.noun)}")
    with ExitStack() as stack:
        for listener in listeners:
            stack.enter_context(listener)
        meeting = stack.enter_context(Meeting(me, listeners))
        meeting.run(lambda: meeting.is_complete, me.limit_s, meeting.absent)
        return meeting.tree(meeting.tell_positions())


class Meeting:
    """The members that have connected to this process, and the process above; entered while members may come."""

    def __init__(self, me: Member, listeners: Sequence[socket.socket], above: Channel | None = None) -> None:
        self._me, self._above = me, above
        self.hellos: dict[int, dict[str, Any]] = {me.number: me.hello()}
        self.members: dict[int, Channel] = {}
        self._selector = selectors.DefaultSelector()
        for listener in listeners:
            listener.settimeout(0)
            self._selector.register(listener, selectors.EVENT_READ)
        if above is not None:
            self._selector.register(above.connection, selectors.EVENT_READ, above)
        self._strangers: dict[Channel, str] = {}  # with their addresses, the oldest first
        self._greetings: set[bytes] = set()

    def __enter__(self) -> "Meeting":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """After an error, tell all members and close their connections; otherwise keep the connections."""
        if isinstance(error, SamestepError):
            refuse([*self.members.values(), *([self._above] if self._above else [])], error)
        for channel in [*self._strangers, *(self.members.values() if error else ())]:
            channel.close()
        self._selector.close()

    @property
    def is_complete(self) -> bool:
        return len(self.hellos) >= self._me.size

    def answer(self) -> dict[str, Any] | None:
        """This process's position, which the process above sends once all have come; None before."""
        assert self._above is not None
        if (message := self._above.take_json()) is None:
            return None
        raise_refusal(message)
        return dict(message["complete"])

    def run(
        self, is_done: Callable[[], Any], limit_s: float, awaited: Callable[[], list[int]] | None = None
    ) -> Any:
        """Accept members until `is_done` is true, and return its value; at the limit raises RankMissing or EOFError."""
        patience = Patience(limit_s)
        while not (done := is_done()):
            ready = [key for key, _ in self._selector.select(_STEP_S)]
            # Read known connections before accepting new ones: a flood of strangers must not delay a member's proof.
            for key in sorted(ready, key=lambda key: key.data is None):
                self._hear(key.data) if key.data else self._open(key.fileobj)
            self._drop_strangers()
            if patience.left_s < 0:
                self._give_up(awaited, limit_s)
            if awaited and patience.is_worth_a_line:
                patience.say(f"waiting for {self._named(awaited())}")
        return done

    def tell_positions(self) -> Position:
        """Number 0: send all members their positions; returns its own."""
        sharing: dict[str, Counter[str]] = {}
        for hello in self.hellos.values():
            sharing.setdefault(hello["machine"], Counter())[str(hello["facts"].get("cores"))] += 1
        connections = (channel.connection for channel in self.members.values())
        peers = [end.getpeername()[0] for end in connections if end.family != socket.AF_UNIX]
        source = addresses.source_for(peers[0]) if peers else ""
        all_positions = positions(self.hellos, sharing, source)
        for number in self.hellos.keys() - {0}:
            with suppress(OSError):  # the tree will notice
                self.members[number].send_json({"complete": all_positions[number]._asdict()})
            if number not in all_positions[0].children:
                self.members.pop(number).close()
        self.hand_on()
        return all_positions[0]

    def hand_on(self) -> None:
        """From now on only the tree reads the channels."""
        for channel in [*self.members.values(), *([self._above] if self._above else [])]:
            with suppress(KeyError, ValueError):
                self._selector.unregister(channel.connection)
        self._above = None

    def tree(self, position: Position, above: Mapping[int, Channel] | None = None, host: str = "") -> Tree:
        """The tree, once all neighbours of this process are connected."""
        me, names = self._me, dict.fromkeys(above or (), host)
        names |= {number: hello["host"] for number, hello in self.hellos.items()}
        channels = self.members | dict(above or {})
        about = me.silence_s, me.noun, me.sign
        return Tree(me.number, me.size, channels, position, names, *about)

    def _give_up(self, awaited: Callable[[], list[int]] | None, limit_s: float) -> NoReturn:
        if awaited is None:
            raise EOFError("too slow")
        missing = awaited()
        raise RankMissing(f"{self._named(missing)} did not come within {limit_s:g} s", ranks=missing)

    def _open(self, listener: Any) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, address = listener.accept()
                channel = Channel(connection, self._me.key)
            except OSError:
                return
            self._selector.register(connection, selectors.EVENT_READ, channel)
            self._strangers[channel] = str(address[0]) if isinstance(address, tuple) else ""

    def _hear(self, channel: Channel) -> None:
        if channel is self._above:
            channel.fill()
            return
        if channel.connection.fileno() < 0:  # closed earlier in this turn
            return
        try:
            had_greeted = bool(channel.client_nonce)
            channel.fill()
            if channel.client_nonce and not had_greeted:
                self._note_greeting(channel.client_nonce)
            if channel.is_proven:
                self._strangers.pop(channel, None)
            while (message := channel.take_json()) is not None:
                number = next((at for at, member in self.members.items() if member is channel), None)
                if number is not None:
                    raise_refusal(message)
                    raise ValueError("another message")
                elif not self._admit(channel, message):
                    break
        except SamestepError as error:
            refuse([channel], error)
            channel.close()
            raise
        except (EOFError, OSError, *NONSENSE):
            self._forget(channel)

    def _note_greeting(self, nonce: bytes) -> None:
        """Accept each greeting once: one that was made with the key is genuine, unless it is a replay."""
        if nonce in self._greetings or len(self._greetings) > _MOST_GREETINGS:
            raise ValueError("a repeated greeting")
        self._greetings.add(nonce)

    def _drop_strangers(self) -> None:
        """Drop slow strangers; if there are too many, drop the oldest of the address that has most."""
        oldest = time.monotonic() - _GREETING_S
        for channel in [channel for channel in self._strangers if channel.opened_at < oldest]:
            self._forget(channel)
        silent = {end: address for end, address in self._strangers.items() if not end.client_nonce}
        counts = Counter(silent.values())
        for channel, address in silent.items():
            is_crowd = counts.total() > _MOST_STRANGERS and counts[address] == max(counts.values())
            if counts[address] > _MOST_STRANGERS_EACH or is_crowd:
                counts[address] -= 1
                self._forget(channel)

    def _admit(self, channel: Channel, hello: dict[str, Any]) -> bool:
        """Admit a member; whether to read on: after the hello of a child in the tree, only the tree reads."""
        me = self._me
        run, number, size = CLAIM.unpack(channel.claim)
        if run != me.digest:
            channel.send_json({"unknown": me.run})
            self._forget(channel)
            return False
        hello["host"], hello["pid"] = printable(hello["host"], 64), int(hello["pid"])
        hello["facts"], hello["places"] = dict(hello["facts"]), [*map(place_from, hello["places"])]
        hello["machine"] = str(hello["machine"])
        self._check(number, size, hello)
        if number < 0:
            number = self.absent()[0]
        if number in self.members:
            self._forget(self.members[number])
        self.members[number], self.hellos[number] = channel, hello
        channel.send_json({"welcome": number, "host": self.hellos[me.number]["host"]})
        if me.number:
            self._selector.unregister(channel.connection)
        return not me.number

    def _check(self, number: int, size: int, hello: dict[str, Any]) -> None:
        """Raise RanksDiffer if this member cannot belong to this run."""
        me, script = self._me, str(hello["script"])
        here = f"{me.noun} {me.number} ({self.hellos[me.number]['host']})"
        member = f"{me.noun} {number}" if number >= 0 else f"another {me.noun}"
        who = f"{member} ({hello['host']})"
        if me.script and script and script != me.script:
            raise RanksDiffer(
                f"{here} runs {me.script!r:.200} and {who} runs {script!r:.200}; "
                f"run one script on all {me.noun}s, or let each run meet at a port or place of its own"
            )
        if size != me.size:
            raise RanksDiffer(
                f"{here} counts {me.size} {me.noun}s and {who} counts {size}; "
                "start all of them with the same number"
            )
        if number < 0 and not self.absent():
            raise RanksDiffer(
                f"{who} came, which is one too many for {me.size}; start as many as are counted"
            )
        if number >= me.size:
            raise RanksDiffer(f"{member} came, but there are {me.size}; count from 0")
        known = self.hellos.get(number, hello)
        if (known["host"], known["pid"]) != (hello["host"], hello["pid"]) or number == me.number:
            raise RanksDiffer(
                f"{member} came twice: process {known['pid']} on {known['host']} and process {hello['pid']} on "
                f"{hello['host']}; give every {me.noun} a number of its own"
            )
        for fact in _VERSIONS:
            ours, theirs = (printable(facts.get(fact), 40) for facts in (me.facts, hello["facts"]))
            if ours != theirs:
                raise RanksDiffer(
                    f"{fact} is {ours} on {here} and {theirs} on {who}; "
                    f"start every {me.noun} from the same environment"
                )

    def _forget(self, channel: Channel) -> None:
        is_stranger = self._strangers.pop(channel, None) is not None
        members = {} if is_stranger else self.members
        for number in [number for number, member in members.items() if member is channel]:
            del self.members[number], self.hellos[number]
        # ValueError: it was closed in this turn, because the same member connected again.
        with suppress(KeyError, ValueError):
            self._selector.unregister(channel.connection)
        channel.close()

    def absent(self) -> list[int]:
        return [number for number in range(self._me.size) if number not in self.hellos]

    def _named(self, numbers: Sequence[int]) -> str:
        return name_ranks(numbers, self._me.expected, self._me.noun)


def refuse(channels: Iterable[Channel], error: SamestepError) -> None:
    """Send an error to these members: the run cannot begin."""
    message = {"error": str(error), "kind": type(error).__name__, "ranks": getattr(error, "ranks", ())}
    for channel in channels:
        with suppress(OSError):
            channel.send_json(message)


def raise_refusal(message: Mapping[str, Any]) -> None:
    """Raise the error that another process sent in this message, if there is one."""
    if "error" in message:
        text, ranks = printable(message["error"], _LONGEST_ERROR), message.get("ranks", ())
        if kind := _WITHOUT_RANKS.get(str(message.get("kind"))):
            raise kind(text)
        raise (RanksDiffer if message.get("kind") == "RanksDiffer" else RankMissing)(text, ranks=ranks)
