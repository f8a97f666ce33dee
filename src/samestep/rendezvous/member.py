"""Who joins which run, what it says of itself, and how long the others wait for it."""

import ipaddress
import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from samestep.rendezvous import addresses
from samestep.rendezvous.channel import CLAIM
from samestep.rendezvous.key import derive

SAY_S, _SAY_LATER_S = 5.0, 30.0

Place = tuple[str, int] | str  # an address and a port, or the path of a Unix socket


@dataclass(frozen=True)
class Member:
    """Who joins which run, and the key that shows it; number -1 takes any that is free.

    A member that learns of no address within no_place_s gives up with the advice. Where script is given,
    it has to be the same for all members, and so have the versions that the facts hold.
    """

    run: str
    number: int
    size: int
    key: bytes = field(repr=False)
    noun: str = "rank"
    limit_s: float = 600.0
    silence_s: float = 60.0
    expected: Sequence[str] = ()
    advice: str = "nothing says where it is"
    no_place_s: float = inf
    script: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    above: Sequence[Sequence[Path]] = ()
    below: int = 1
    path: Path | None = None

    @property
    def title(self) -> str:
        return f"{self.noun} {self.number}" + (f" of {self.run}" if self.run else "")

    @property
    def heads(self) -> int:
        """How many connect to number 0 where each machine has as many members as this one."""
        return -(-self.size // self.below) - 1 + (self.below - 1).bit_length()

    @property
    def digest(self) -> bytes:
        """Of the run's name, for those who have the key."""
        return derive(self.key, "run", self.run)

    @property
    def claim(self) -> bytes:
        """As which member it proves itself."""
        return CLAIM.pack(self.digest, self.number, self.size)

    def hello(self, places: Sequence[Place] = (), *, is_near: bool = False) -> dict[str, Any]:
        """What it says of itself; `places` are where its children find it, unless it stays where it comes."""
        who = {"host": socket.gethostname(), "pid": os.getpid(), "machine": addresses.machine()}
        told = {"script": self.script, "places": list(places), "facts": dict(self.facts)}
        return who | told | {"is_near": is_near}


class Patience:
    """How long something has been waited for; from time to time it is worth a line."""

    def __init__(self, limit_s: float) -> None:
        self._began, self._limit_s, self._next_s = time.monotonic(), limit_s, SAY_S

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def left_s(self) -> float:
        return self._limit_s - self.waited_s

    @property
    def is_worth_a_line(self) -> bool:
        """After 5 s and every 5 s, later every 30 s."""
        return self.waited_s > self._next_s

    def say(self, text: str) -> None:
        waited = self.waited_s
        self._next_s = waited + (SAY_S if waited < 60 else _SAY_LATER_S)
        say(f"{text}; {waited:.0f} s so far, {self._limit_s:g} at most")


def say(text: str) -> None:
    print(f"samestep: {text}", file=sys.stderr, flush=True)


def merged(spans: Iterable[list[int]]) -> list[list[int]]:
    """Spans of numbers, first and last, as few as possible."""
    joined: list[list[int]] = []
    for first, last in sorted(spans):
        if joined and first <= joined[-1][1] + 1:
            joined[-1][1] = max(last, joined[-1][1])
        else:
            joined.append([first, last])
    return joined


def place_of(listener: socket.socket) -> Place:
    """Where others connect to this socket, if it listens."""
    return place_from(listener.getsockname())


def place_from(told: Any) -> Place:
    """A place as a socket or JSON has it; one of NONSENSE where it is none."""
    if isinstance(told, str):
        return told
    return str(ipaddress.ip_address(told[0])), int(told[1])
