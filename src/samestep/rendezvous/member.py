"""Who joins which run, what it says of itself, and how long the others wait for it."""

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from samestep.errors import SamestepError
from samestep.rendezvous import addresses

SAY_S = 5.0
_SAY_LATER_S = 30.0

Place = tuple[str, int] | str  # an address and a port, or the path of a Unix socket


def say(text: str) -> None:
    print(f"samestep: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Member:
    """Who joins which run, and the key that shows it; number -1 takes any that is free.

    A member that learns of no address within untold_s gives up with the advice in nowhere. Where script is given,
    it has to be the same for all members. Number 0 lets its objection, if any, look at the facts of all. Where private
    is given, members of one machine meet in that directory, and a tree is made; else all stay connected to number 0.
    """

    run: str
    number: int
    size: int
    key: bytes = field(repr=False)
    noun: str = "rank"
    limit_s: float = 600.0
    silence_s: float = 60.0
    expected: Sequence[str] = ()
    nowhere: str = "nothing says where it is"
    untold_s: float = inf
    script: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    objection: Callable[[Sequence[Mapping[str, Any]]], SamestepError | None] = lambda ranks: None
    private: Path | None = None

    @property
    def title(self) -> str:
        return f"{self.noun} {self.number}" + (f" of {self.run}" if self.run else "")


def hello_of(me: Member, doors: Sequence[Place]) -> dict[str, Any]:
    who = {"host": socket.gethostname(), "pid": os.getpid(), "machine": addresses.machine(), "doors": doors}
    told = {"run": me.run, "number": me.number, "size": me.size, "script": me.script, "facts": dict(me.facts)}
    return who | told


def next_saying(waited: float) -> float:
    return waited + (SAY_S if waited < 60 else _SAY_LATER_S)


def patience(waited: float, limit_s: float) -> str:
    return f"{waited:.0f} s so far, {limit_s:g} at most"
