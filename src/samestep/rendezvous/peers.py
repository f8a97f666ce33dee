"""The processes of a run connected through number 0: they gather values, and hear when a peer is lost.

Covered: members that come late, twice, from another run, or are lost. Not covered: a member that has the key and lies.
"""

import selectors
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from samestep.errors import RankMissing
from samestep.rendezvous.link import Link
from samestep.rendezvous.listen import LOOP
from samestep.text import name_ranks, printable

_STEP_S = 0.25
_BEAT_S = 1.0
_LONGEST_ERROR = 2000


class Peers:
    """All members of a run; number 0 has a stream to each other member, each of them has a stream to number 0."""

    def __init__(
        self, rank: int, names: Sequence[str], streams: Mapping[int, Link], silence_s: float, noun: str
    ) -> None:
        self.rank, self.size, self.names = rank, len(names), list(names)
        self.news: list[tuple[int, Any]] = []
        self._streams = dict(streams)
        self._silence_s, self._noun = silence_s, noun
        self._parts: dict[int, Any] = {}
        self._gathered: list[Any] | None = None
        self._beat_at = 0.0
        self._selector = selectors.DefaultSelector()
        for number, stream in self._streams.items():
            stream.heard_at = time.monotonic()
            self._selector.register(stream.connection, selectors.EVENT_READ, number)

    @property
    def address(self) -> str:
        """Number 0's address, as number 0 or this member sees it."""
        stream = next(iter(self._streams.values()))
        return _address(stream.connection.getpeername() if self.rank else stream.connection.getsockname())

    @property
    def own_address(self) -> str:
        """The address of this machine that leads to number 0."""
        return _address(self._streams[0].connection.getsockname())

    def gather(self, mine: Any, limit_s: float) -> list[Any]:
        """Collective. What every member brought, by number; RankMissing where one is lost or too late."""
        until = time.monotonic() + limit_s
        if self.rank:
            self._send(0, {"part": mine})
        else:
            self._parts[0] = mine
        while self._gathered is None and (self.rank or len(self._parts) < self.size):
            if time.monotonic() > until:
                missing = [number for number in range(self.size) if number not in self._parts]
                missing, names = ([0], []) if self.rank else (missing, self.names)
                self._fail(
                    f"{name_ranks(missing, names, self._noun)} said nothing for {limit_s:g} s", missing
                )
            self.turn(_STEP_S)
        if not self.rank:
            self._gathered, self._parts = [self._parts[number] for number in range(self.size)], {}
            self._send_all({"gathered": self._gathered})
        gathered, self._gathered = self._gathered or [], None
        return gathered

    def tell(self, news: Any) -> None:
        """Local. Everyone else finds this in `news` soon."""
        self._send_all({"news": news, "of": self.rank})

    def turn(self, wait_s: float = 0.0) -> None:
        """Take in what has arrived, and give a sign of life; RankMissing where a member is lost."""
        now = time.monotonic()
        if now - self._beat_at > _BEAT_S:
            self._beat_at = now
            self._send_all({})
        for key, _ in self._selector.select(wait_s):
            try:
                messages = self._streams[key.data].read_json()
            except (EOFError, ValueError):
                self._lose(key.data, "its process has ended or its network is cut")
            for message in messages:
                self.take(key.data, message)
        now = time.monotonic()
        for number, stream in self._streams.items():
            if now - stream.heard_at > self._silence_s:
                self._lose(number, f"nothing was heard of it for {self._silence_s:g} s")

    def close(self) -> None:
        """Leave; others that are still there see a lost member."""
        self._selector.close()
        for stream in self._streams.values():
            stream.close()

    def take(self, number: int, message: dict[str, Any]) -> None:
        """Local. Note one message of a member; RankMissing where it says that a member is lost."""
        if "error" in message:
            raise RankMissing(printable(message["error"], _LONGEST_ERROR), ranks=message.get("ranks", ()))
        if "part" in message:
            self._parts[number] = message["part"]
        if "gathered" in message:
            self._gathered = message["gathered"]
        if "news" in message:
            self.news.append((int(message["of"]), message["news"]))
            for other in self._streams if not self.rank else ():
                if other != number:
                    self._send(other, message)

    def _send_all(self, message: Mapping[str, Any]) -> None:
        for number in self._streams:
            self._send(number, message)

    def _send(self, number: int, message: Mapping[str, Any]) -> None:
        try:
            self._streams[number].send_json(message)
        except OSError:
            # What it sent before it went may say why it did.
            with suppress(EOFError, ValueError):
                for last in self._streams[number].read_json():
                    self.take(number, last)
            self._lose(number, "its process has ended or its network is cut")

    def _lose(self, number: int, why: str) -> None:
        self._fail(f"{name_ranks([number], self.names, self._noun)} was lost: {why}", [number])

    def _fail(self, text: str, numbers: Sequence[int]) -> None:
        for stream in self._streams.values() if not self.rank else ():
            with suppress(OSError):
                stream.send_json({"error": text, "ranks": numbers})
        raise RankMissing(text, ranks=numbers)


def _address(name: Any) -> str:
    """The loop where it is a Unix socket, whose ends have no addresses."""
    return str(name[0]).removeprefix("::ffff:") if isinstance(name, tuple) else LOOP
