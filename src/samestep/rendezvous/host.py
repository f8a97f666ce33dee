"""Accepts those who join: proves them, says who is missing, and lets no flood of strangers keep them out.

Every process accepts those that come to it, and tells the process above it which numbers have come. So number 0 hears
of all from a few. Once all are there its answer goes down the same connections.
"""

import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NoReturn

from samestep.errors import PlacementError, RankMissing, RanksDiffer, SamestepError, UsageError
from samestep.rendezvous import addresses
from samestep.rendezvous.channel import CLAIM, NONSENSE, Channel, checked
from samestep.rendezvous.listen import allow_descriptors
from samestep.rendezvous.member import Member, Patience, merged, place_from
from samestep.rendezvous.position import Position, positions
from samestep.rendezvous.tree import Tree
from samestep.text import counted, name_ranks, printable

_STEP_S = 0.25
# Of those who have not proved that they have the key: how long, how many of one address, how many in all.
_GREETING_S = 5.0
_MOST_STRANGERS_EACH, _MOST_STRANGERS = 32, 128
_ACCEPTED_AT_ONCE = 16
_VERSIONS = ("torch", "samestep", "python")
_MOST_GREETINGS = 1 << 16
_LONGEST_ERROR = 2000
_WITHOUT_RANKS = {kind.__name__: kind for kind in (UsageError, PlacementError)}


def host(listeners: Sequence[socket.socket], me: Member) -> Tree:
    """Number 0: accept all members of this run, and tell each its position; closes the listeners."""
    allow_descriptors(me.heads, f"{counted(me.heads, me.noun)} connect to {me.noun} 0")
    with ExitStack() as stack:
        for listener in listeners:
            stack.enter_context(listener)
        meeting = stack.enter_context(Meeting(me, listeners))
        meeting.run(lambda: meeting.is_complete, me.limit_s, meeting.absent)
        return meeting.tree(meeting.tell_positions())


class Meeting:
    """Those that have come to this process, and the one above that it came to; entered while others may come."""

    def __init__(self, me: Member, listeners: Sequence[socket.socket], above: Channel | None = None) -> None:
        self._me, self._above = me, above
        self.hellos: dict[int, dict[str, Any]] = {me.number: me.hello()}
        self.members: dict[int, Channel] = {}
        # Who has come through each member, by host, and how many of them share which cores, by machine.
        self._told: dict[int, dict[str, Any]] = {}
        self._count = 0
        self._note(me.number, _told_by(me.number, self.hellos[me.number]))
        self._is_news = False  # that this one is here, its hello has said
        self._selector = selectors.DefaultSelector()
        for listener in listeners:
            listener.settimeout(0)
            self._selector.register(listener, selectors.EVENT_READ)
        if above is not None:
            self._selector.register(above.connection, selectors.EVENT_READ, above)
        self._strangers: dict[Channel, str] = {}  # and from which address, the oldest first
        self._greetings: set[bytes] = set()

    def __enter__(self) -> "Meeting":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """All who have come are told of an error; without one their connections stay."""
        if isinstance(error, SamestepError):
            refuse([*self.members.values(), *([self._above] if self._above else [])], error)
        for channel in [*self._strangers, *(self.members.values() if error else ())]:
            channel.close()
        self._selector.close()

    @property
    def is_complete(self) -> bool:
        """Whether as many have come as are counted."""
        return self._count >= self._me.size

    def answer(self) -> dict[str, Any] | None:
        """What the process above has said: this one's position, once all have come."""
        assert self._above is not None
        if (message := self._above.take_json()) is None:
            return None
        raise_refusal(message)
        return dict(message["complete"])

    def run(
        self, is_done: Callable[[], Any], limit_s: float, awaited: Callable[[], list[int]] | None = None
    ) -> Any:
        """Accept members until this is true; what it was. Says who is awaited, or raises EOFError at the limit."""
        patience = Patience(limit_s)
        while not (done := is_done()):
            ready = [key for key, _ in self._selector.select(_STEP_S)]
            # Whoever has the key says so at once, and is heard before a flood of others is let in.
            for key in sorted(ready, key=lambda key: key.data is None):
                self._hear(key.data) if key.data else self._open(key.fileobj)
            self._drop_strangers()
            if self._above is not None and self._is_news and (not ready or self._count >= self._me.below):
                with suppress(OSError):  # what it said before it went is still to be heard
                    self._above.send_json({"told": self._all_told()})
                self._is_news = False
            if patience.left_s < 0:
                self._give_up(awaited, limit_s)
            if awaited and patience.is_worth_a_line:
                patience.say(f"waiting for {self._named(awaited())}")
        return done

    def tell_positions(self) -> Position:
        """Number 0: tell all members theirs, and give its own."""
        self._check_twice()
        hellos = {number: hello for number, hello in self.hellos.items() if not hello["is_near"]}
        outside = (channel.connection for channel in self.members.values())
        peers = [connection.getpeername()[0] for connection in outside if connection.family != socket.AF_UNIX]
        source = addresses.source_for(peers[0]) if peers else ""
        found = positions(hellos, self._all_told()["sharing"], source)
        for number in hellos.keys() - {0}:
            self._tell(number, found[number])
            if number not in found[0].children:
                self.members.pop(number).close()
        self.hand_on(found[0])
        return found[0]

    def hand_on(self, position: Position) -> None:
        """Tell the members that stay below this process theirs; what anyone says from now on is for the tree."""
        for channel in [*self.members.values(), *([self._above] if self._above else [])]:
            with suppress(KeyError, ValueError):
                self._selector.unregister(channel.connection)
        self._above = None
        near = [number for number in self.members if self.hellos[number]["is_near"]]
        for number in near:
            path = [self._me.number, *position.path]
            self._tell(number, position._replace(path=path, parent_places=(), children=()))

    def tree(self, position: Position, above: Mapping[int, Channel] | None = None, host: str = "") -> Tree:
        """This process among all, once all of its neighbours are connected."""
        me, names = self._me, dict(self._there()) | dict.fromkeys(above or (), host)
        names |= {number: self.hellos[number]["host"] for number in self.members}
        channels = self.members | dict(above or {})
        return Tree(me.number, me.size, channels, position, names, silence_s=me.silence_s, noun=me.noun)

    def _note(self, number: int, told: dict[str, Any] | None) -> None:
        """Keep who has come through a member, or that it is gone."""
        before = self._told.pop(number, None)
        self._count += (told["count"] if told else 0) - (before["count"] if before else 0)
        if told:
            self._told[number] = told
        self._is_news = True

    def _all_told(self) -> dict[str, Any]:
        hosts: dict[str, list[list[int]]] = {}
        sharing: dict[str, Counter[str]] = {}
        for told in self._told.values():
            for name, spans in told["hosts"].items():
                hosts.setdefault(name, []).extend(spans)
            for machine, cores in told["sharing"].items():
                sharing.setdefault(machine, Counter()).update(cores)
        spans_of = {name: merged(spans) for name, spans in hosts.items()}
        return {"hosts": spans_of, "sharing": sharing}

    def _tell(self, number: int, position: Position) -> None:
        with suppress(OSError):  # the tree finds out
            self.members[number].send_json({"complete": position._asdict()})

    def _give_up(self, awaited: Callable[[], list[int]] | None, limit_s: float) -> NoReturn:
        self._check_twice()
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
        if channel.connection.fileno() < 0:  # closed within this turn
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
                    self._note(number, _told_from(message["told"], self._me.size))
                elif not self._admit(channel, message):
                    break
        except SamestepError as error:
            refuse([channel], error)
            channel.close()
            raise
        except (EOFError, OSError, *NONSENSE):
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

    def _admit(self, channel: Channel, hello: dict[str, Any]) -> bool:
        """Whether this member may say more now: one that connects as the tree has it goes on with the tree at once."""
        me = self._me
        run, number, size = CLAIM.unpack(channel.claim)
        if run != me.digest:
            channel.send_json({"unknown": me.run})
            self._forget(channel)
            return False
        hello["host"], hello["pid"] = printable(hello["host"], 64), int(hello["pid"])
        hello["facts"], hello["places"] = dict(hello["facts"]), [*map(place_from, hello["places"])]
        hello["machine"], hello["is_near"] = str(hello["machine"]), bool(hello["is_near"])
        self._check(number, size, hello)
        if number < 0:
            number = self.absent()[0]
        if number in self.members:
            self._forget(self.members[number])
        self.members[number], self.hellos[number] = channel, hello
        channel.send_json({"welcome": number, "host": self.hellos[me.number]["host"]})
        if me.number and not hello["is_near"]:
            self._selector.unregister(channel.connection)
            return False
        self._note(number, _told_by(number, hello))
        return True

    def _check(self, number: int, size: int, hello: dict[str, Any]) -> None:
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

    def _there(self) -> Iterator[tuple[int, str]]:
        """The numbers that have come, and from which host."""
        for told in self._told.values():
            for name, spans in told["hosts"].items():
                yield from ((number, name) for first, last in spans for number in range(first, last + 1))

    def _check_twice(self) -> None:
        """Raises RanksDiffer where a number came through two members."""
        seen: dict[int, str] = {}
        for number, name in self._there():
            if number in seen:
                raise RanksDiffer(
                    f"{self._me.noun} {number} came twice, on {seen[number]} and on {name}; "
                    f"give every {self._me.noun} a number of its own"
                )
            seen[number] = name

    def _forget(self, channel: Channel) -> None:
        is_stranger = self._strangers.pop(channel, None) is not None
        members = {} if is_stranger else self.members
        for number in [number for number, member in members.items() if member is channel]:
            del self.members[number], self.hellos[number]
            self._note(number, None)
        # ValueError: it was closed within this turn, when the same member came again.
        with suppress(KeyError, ValueError):
            self._selector.unregister(channel.connection)
        channel.close()

    def absent(self) -> list[int]:
        """Who of the run has not come."""
        there = {number for number, _ in self._there()}
        return [number for number in range(self._me.size) if number not in there]

    def _named(self, numbers: Sequence[int]) -> str:
        return name_ranks(numbers, self._me.expected, self._me.noun)


def refuse(channels: Iterable[Channel], error: SamestepError) -> None:
    """Tell these why there is no run."""
    said = {"error": str(error), "kind": type(error).__name__, "ranks": getattr(error, "ranks", ())}
    for channel in channels:
        with suppress(OSError):
            channel.send_json(said)


def raise_refusal(message: Mapping[str, Any]) -> None:
    """Raise what another process has said of why there is no run, if so."""
    if "error" in message:
        text, ranks = printable(message["error"], _LONGEST_ERROR), message.get("ranks", ())
        if kind := _WITHOUT_RANKS.get(str(message.get("kind"))):
            raise kind(text)
        raise (RanksDiffer if message.get("kind") == "RanksDiffer" else RankMissing)(text, ranks=ranks)


def _told_by(number: int, hello: Mapping[str, Any]) -> dict[str, Any]:
    cores = str(hello["facts"].get("cores"))
    hosts, sharing = {hello["host"]: [[number, number]]}, {hello["machine"]: {cores: 1}}
    return {"count": 1, "hosts": hosts, "sharing": sharing}


def _told_from(said: Any, size: int) -> dict[str, Any]:
    """What a member says of those that came through it; where it cannot be so, one of NONSENSE."""
    hosts = {
        printable(name, 64): [checked(span, (int, int)) for span in spans]
        for name, spans in said["hosts"].items()
    }
    spans = [span for each in hosts.values() for span in each]
    count = sum(last - first + 1 for first, last in spans)
    if count > size or not all(0 <= first <= last < size for first, last in spans):
        raise ValueError("more than there are")
    for each in said["sharing"].values():
        checked(each.values(), [int] * len(each))
    return {"count": count, "hosts": hosts, "sharing": said["sharing"]}
