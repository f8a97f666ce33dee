"""How a circle comes together: number 0 opens a door, the others find it, and both say who is still missing."""

import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

from samestep.errors import PlacementError, RankMissing, RanksDiffer
from samestep.rendezvous.star import Circle, Line
from samestep.text import name_ranks, reason_of

_STEP_S = 0.25
_CONNECT_S = 2.0
_REPLY_S = 3.0
_TAKEN_S = 30.0
_SAY_S = 5.0
_SAY_LATER_S = 30.0


def say(text: str) -> None:
    print(f"samestep: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Member:
    """Who wants to be in which circle; number -1 takes any that is free.

    One that no place was named to for untold_s gives up with the advice in nowhere. What script says has to be the
    same for all that say it.
    """

    run: str
    number: int
    size: int
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


def listen(ports: Sequence[int], why: str = "") -> socket.socket:
    """The first of these ports that is free on this machine (0: any), on all its addresses."""
    until = time.monotonic() + _TAKEN_S
    while True:
        for port in ports:
            if (door := free_door(port)) is not None:
                return door
        if time.monotonic() > until:
            listed = ", ".join(map(str, ports))
            raise PlacementError(
                f"port {listed} ({why or 'derived'}) is taken on {socket.gethostname()}; "
                f"{'unset MASTER_PORT or ' if why.startswith('MASTER_PORT') else ''}choose another"
            )
        time.sleep(_STEP_S)


def free_door(port: int) -> socket.socket | None:
    """A socket that listens at this port, or None where it is taken."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        if (door := _door(family, address, port)) is not None:
            return door
    return None


def host(door: socket.socket, me: Member) -> Circle:
    """Number 0: let in who belongs here until the circle is complete; closes the door."""
    with door:
        return _Host(door, me).run()


def join(where: Callable[[], Iterable[tuple[str, int]]], me: Member) -> Circle:
    """The others: look where number 0 may be, in turn and again, until one answers for the same run."""
    began, said_at = time.monotonic(), _SAY_S
    seen: dict[tuple[str, int], str] = {}
    pause = 0.05
    was_told = False
    while True:
        seen.clear()
        for target in where():
            was_told = True
            found = _knock(target, me, began)
            if isinstance(found, Circle):
                return found
            seen[target] = found
        waited = time.monotonic() - began
        if not was_told and waited > me.untold_s:
            raise PlacementError(me.nowhere)
        if waited > me.limit_s:
            raise RankMissing(
                f"{me.title} found no {me.noun} 0 within {me.limit_s:g} s ({_tried(seen, me.nowhere)}); "
                f"is {me.noun} 0 started, and can {socket.gethostname()} reach it?"
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
    def __init__(self, door: socket.socket, me: Member) -> None:
        self._door, self._me = door, me
        self._guests: dict[int, Line] = {}
        self._strangers: set[Line] = set()
        self._hosts = {0: socket.gethostname()}
        self._pids = {0: (socket.gethostname(), os.getpid())}
        self._selector = selectors.DefaultSelector()

    def run(self) -> Circle:
        me, began, said_at = self._me, time.monotonic(), _SAY_S
        self._door.settimeout(0)
        self._selector.register(self._door, selectors.EVENT_READ)
        try:
            while len(self._guests) + 1 < me.size:
                for key, _ in self._selector.select(_STEP_S):
                    self._open() if key.fileobj is self._door else self._hear(key.data)
                waited = time.monotonic() - began
                if waited > me.limit_s:
                    raise RankMissing(f"{self._missing()} did not come within {me.limit_s:g} s")
                if waited > said_at:
                    said_at = _next_saying(waited)
                    say(f"waiting for {self._missing()}; {_patience(waited, me.limit_s)}")
        except (RankMissing, RanksDiffer) as error:
            self._tell({"error": str(error)})
            for guest in self._guests.values():
                guest.close()
            raise
        finally:
            self._selector.close()
            for stranger in self._strangers:
                stranger.close()
        names = [self._hosts[number] for number in range(me.size)]
        self._tell({"complete": names})
        return Circle(0, names, self._guests, me.silence_s, me.noun)

    def _open(self) -> None:
        with suppress(OSError):
            connection, address = self._door.accept()
            line = Line(connection, str(address[0]))
            self._strangers.add(line)
            self._selector.register(connection, selectors.EVENT_READ, line)

    def _hear(self, line: Line) -> None:
        try:
            for message in line.read():
                if line in self._strangers:
                    self._greet(line, message)
        except RanksDiffer as error:
            with suppress(OSError):
                line.send({"error": str(error)})
            raise
        except (EOFError, ValueError, KeyError, TypeError, OSError):
            self._forget(line)

    def _greet(self, line: Line, hello: dict[str, Any]) -> None:
        me = self._me
        if hello["run"] != me.run:
            line.send({"stranger": me.run})
            self._forget(line)
            return
        number, who = int(hello["number"]), (str(hello["host"]), int(hello["pid"]))
        comer = f"{me.noun} {number}" if number >= 0 else f"another {me.noun}"
        script = str(hello.get("script", ""))
        if me.script and script and script != me.script:
            raise RanksDiffer(
                f"{me.noun} 0 ({self._hosts[0]}) runs {me.script!r:.200} and {comer} ({who[0]}) runs {script!r:.200}; "
                f"run one script on all {me.noun}s, or let each run meet at a place of its own"
            )
        if hello["size"] != me.size:
            raise RanksDiffer(
                f"{me.noun} 0 ({self._hosts[0]}) counts {me.size} {me.noun}s and one on {who[0]} counts "
                f"{hello['size']}; start all of them with the same number"
            )
        if number < 0:
            number = next((free for free in range(1, me.size) if free not in self._guests), number)
        if number < 0:
            raise RanksDiffer(
                f"{comer} ({who[0]}) came, which is one too many for {me.size}; start as many as are counted"
            )
        if not number < me.size:
            raise RanksDiffer(f"{me.noun} {number} came, but there are {me.size}; count from 0")
        if number in self._pids and self._pids[number] != who:
            before = self._pids[number]
            raise RanksDiffer(
                f"{me.noun} {number} came twice: process {before[1]} on {before[0]} and process {who[1]} on "
                f"{who[0]}; give every {me.noun} a number of its own"
            )
        if number in self._guests:
            self._forget(self._guests[number])
        self._strangers.discard(line)
        self._guests[number], self._pids[number], self._hosts[number] = line, who, who[0]
        line.send({"welcome": number})

    def _forget(self, line: Line) -> None:
        for number in [number for number, one in self._guests.items() if one is line]:
            del self._guests[number], self._pids[number], self._hosts[number]
        self._strangers.discard(line)
        # ValueError: it was closed within this turn, when the same member came again.
        with suppress(KeyError, ValueError):
            self._selector.unregister(line.connection)
        line.close()

    def _tell(self, message: dict[str, Any]) -> None:
        for line in self._guests.values():
            with suppress(OSError):
                line.send(message)

    def _missing(self) -> str:
        me = self._me
        numbers = [number for number in range(1, me.size) if number not in self._guests]
        return name_ranks(numbers, me.expected, me.noun)


def _door(family: int, address: str, port: int) -> socket.socket | None:
    try:
        door = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        return None
    try:
        if family == socket.AF_INET6:
            door.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # Beside it a launcher may hold the port, bound and not listening; of two that listen one fails here.
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind((address, port))
        door.listen(1024)
    except OSError:
        door.close()
        return None
    return door


def _knock(target: tuple[str, int], me: Member, began: float) -> Circle | str:
    """The complete circle, or why this is not the way to it."""
    try:
        connection = socket.create_connection(target, timeout=_CONNECT_S)
    except OSError as error:
        return reason_of(error)
    line = Line(connection, target[0])
    hello = {"run": me.run, "number": me.number, "size": me.size, "script": me.script}
    number: int | None = None
    circle: Circle | None = None
    try:
        line.send(hello | {"host": socket.gethostname(), "pid": os.getpid()})
        while True:
            wait = _REPLY_S if number is None else me.limit_s + _REPLY_S - (time.monotonic() - began)
            connection.settimeout(max(0.1, wait))
            for message in line.read():
                if circle is not None:
                    circle.take(0, message)
                elif "stranger" in message:
                    line.close()
                    return f"found {message['stranger'] or 'a run without name'} there"
                elif "error" in message:
                    line.close()
                    raise RankMissing(str(message["error"]))
                elif "complete" in message and number is not None:
                    circle = Circle(number, message["complete"], {0: line}, me.silence_s, me.noun)
                else:
                    number = message.get("welcome", number)
            if circle is not None:
                return circle
    except (EOFError, ValueError, OSError):
        line.close()
        return "found something else there" if number is None else f"{me.noun} 0 went away"


def _tried(seen: dict[tuple[str, int], str], nowhere: str) -> str:
    reasons: dict[str, list[str]] = {}
    for (name, port), reason in seen.items():
        reasons.setdefault(reason, []).append(f"{name}:{port}")
    parts = [
        f"{places[0]}{f' and {len(places) - 1} more' if len(places) > 1 else ''}: {reason}"
        for reason, places in sorted(reasons.items(), key=lambda item: not item[0].startswith("found"))
    ]
    return "; ".join(parts) or nowhere


def _next_saying(waited: float) -> float:
    return waited + (_SAY_S if waited < 60 else _SAY_LATER_S)


def _patience(waited: float, limit_s: float) -> str:
    return f"{waited:.0f} s so far, {limit_s:g} at most"
