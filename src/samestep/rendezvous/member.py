"""A process that joins a run: its identity, its hello message, and how long it waits."""

import ipaddress
import os
import re
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from samestep.files import read_text
from samestep.rendezvous import addresses
from samestep.rendezvous.channel import CLAIM
from samestep.rendezvous.key import derive

SAY_S, _SAY_LATER_S = 5.0, 30.0  # between two lines about a wait, at first and after a minute

_UNIX_SOCKETS = Path("/proc/net/unix")

Place = tuple[str, int] | str  # an address and a port, or the path of a Unix socket


@dataclass(frozen=True)
class Member:
    """A process that joins a run, with its key; number -1 takes any number that is free."""

    # A member that finds no place to try within no_place_s gives up with the advice. The script, if given, must be the
    # same for all members, and so must the versions in the facts.

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
    sign: str = ""  # a name that /proc/net/unix shows with the process number, while it is in the run

    @property
    def title(self) -> str:
        return f"{self.noun} {self.number}" + (f" of {self.run}" if self.run else "")

    @property
    def twin(self) -> str:
        """In words, the process of this machine that is this member of a run that has begun; "" if there is none."""
        found = re.search(rf"@{self.sign}/(\d+)$", read_text(_UNIX_SOCKETS), re.M) if self.sign else None
        if found is None:
            return ""
        return f"process {found[1]} is {self.title}, and its run has begun; was {self.title} started twice?"

    @property
    def digest(self) -> bytes:
        """A digest of the run's name, made with the key."""
        return derive(self.key, "run", self.run)

    @property
    def claim(self) -> bytes:
        """What the member claims and proves: run, number, size."""
        return CLAIM.pack(self.digest, self.number, self.size)

    def hello(self, places: Sequence[Place] = ()) -> dict[str, Any]:
        """The first message; `places` are where its children connect."""
        who = {"host": socket.gethostname(), "pid": os.getpid(), "machine": addresses.machine()}
        return who | {"script": self.script, "places": list(places), "facts": dict(self.facts)}


class Patience:
    """A wait with a limit; from time to time it is worth a line."""

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
    # one write: where Python is unbuffered, another rank's output could come before the newline
    print(f"samestep: {text}\n", end="", file=sys.stderr, flush=True)


def merged(spans: Iterable[list[int]]) -> list[list[int]]:
    """The same numbers as the fewest spans; a span is its first and last number."""
    joined: list[list[int]] = []
    for first, last in sorted(spans):
        if joined and first <= joined[-1][1] + 1:
            joined[-1][1] = max(last, joined[-1][1])
        else:
            joined.append([first, last])
    return joined


def place_of(listener: socket.socket) -> Place:
    """The place where others connect to this listening socket."""
    return place_from(listener.getsockname())


def place_from(value: Any) -> Place:
    """A place from a socket's name or from JSON; raises one of NONSENSE if it is no place."""
    if isinstance(value, str):
        return value
    return str(ipaddress.ip_address(value[0])), int(value[1])
