"""How processes started apart find each other: number 0 listens, the others connect, both say who is missing.

Number 0 then tells each its parent in a tree, to which it connects, and the connection to number 0 ends.
"""

import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from samestep.errors import PlacementError, RankMissing, RanksDiffer, UsageError
from samestep.rendezvous.host import Host
from samestep.rendezvous.link import Link
from samestep.rendezvous.listen import listen, private_socket
from samestep.rendezvous.member import SAY_S, Member, Place, hello_of, next_saying, patience, say
from samestep.rendezvous.seats import Seat
from samestep.rendezvous.tree import Tree
from samestep.text import printable, reason_of

_CONNECT_S = 2.0
_REPLY_S, _SHORT_S = 3.0, 0.05
_MOVE_S = 30.0
_LONGEST_ERROR = 2000


def join(where: Callable[[], Iterable[Place]], me: Member) -> Tree:
    """The other members: try each address in turn, again and again, until number 0 of the same run answers."""
    began, said_at = time.monotonic(), SAY_S
    seen: dict[Place, str] = {}
    pause = 0.05
    was_told = False
    while True:
        seen.clear()
        for target in where():
            was_told = True
            found = _join_at(target, me, began)
            if isinstance(found, Tree):
                return found
            seen[target] = found
        waited = time.monotonic() - began
        if not was_told and waited > me.untold_s:
            raise PlacementError(me.nowhere)
        if waited > me.limit_s:
            raise RankMissing(
                f"{me.title} found no {me.noun} 0 within {me.limit_s:g} s ({_tried(seen, me.nowhere)}); "
                f"is {me.noun} 0 started, and can {socket.gethostname()} reach it?",
                ranks=[0],
            )
        if waited > said_at:
            said_at = next_saying(waited)
            if me.number <= 1 or me.noun != "rank":
                say(
                    f"{me.title} looks for {me.noun} 0 ({_tried(seen, me.nowhere)}); {patience(waited, me.limit_s)}"
                )
        time.sleep(pause)
        pause = min(0.5, pause * 1.5)


def dial(target: Place, timeout_s: float) -> socket.socket:
    """A connection to this place; raises OSError."""
    if isinstance(target, tuple):
        return socket.create_connection(target, timeout=timeout_s)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(target)
    except BaseException:
        connection.close()
        raise
    return connection


def _join_at(target: Place, me: Member, began: float) -> Tree | str:
    """This member's place among all, or why this address does not lead to them."""
    with ExitStack() as doors, ExitStack() as unless_joined:
        listeners: list[socket.socket] = []

        def open_doors(connection: socket.socket) -> list[Place]:
            if me.private is not None:
                path = me.private.with_name(f"rank-{me.number}")
                listeners.append(doors.enter_context(private_socket(path)))
                if connection.family != socket.AF_UNIX:
                    listeners.extend(listen([0], [connection.getsockname()[0]]))
            names = [listener.getsockname() for listener in listeners]
            return [name if isinstance(name, str) else (name[0], name[1]) for name in names]

        found = _knock(target, me, open_doors)
        if isinstance(found, str):
            return found
        link, number = found
        unless_joined.callback(link.close)
        me = replace(me, number=number)
        link.connection.settimeout(max(0.1, me.limit_s + _REPLY_S - (time.monotonic() - began)))
        try:
            message = link.read_first()
        except (EOFError, ValueError, OSError):
            return f"{me.noun} 0 went away"
        _refused(message)
        seat, name = Seat(*message["complete"]), link.connection.getsockname()
        seat = seat._replace(address=seat.address or (str(name[0]) if isinstance(name, tuple) else ""))
        if seat.parent:
            link.close()
            link = _parent(seat, me)
            unless_joined.callback(link.close)
        children = Host(me, seat.children).accept(listeners, _MOVE_S)
        unless_joined.pop_all()
        return Tree(number, me.size, link, children, seat=seat, silence_s=me.silence_s, noun=me.noun)


def _parent(seat: Seat, me: Member) -> Link:
    """The link to the parent in the tree, which may itself be on its way."""
    until = time.monotonic() + _MOVE_S
    seen: dict[Place, str] = {}
    while time.monotonic() < until:
        for door in seat.doors:
            place = door if isinstance(door, str) else (door[0], door[1])
            found = _knock(place, me, lambda connection: [])
            if not isinstance(found, str):
                return found[0]
            seen[place] = found
        time.sleep(0.02)
    raise PlacementError(
        f"{me.title} ({socket.gethostname()}) cannot reach {me.noun} {seat.parent} ({_tried(seen, '')}); "
        "open the network between them, or choose another with SAMESTEP_ADDRESS_SUFFIX"
    )


def _knock(
    target: Place, me: Member, open_doors: Callable[[socket.socket], list[Place]]
) -> tuple[Link, int] | str:
    """A link to a member of this run and the number that it gave, or why there is none at this place."""
    with ExitStack() as unless_met:
        try:
            connection = unless_met.enter_context(dial(target, _CONNECT_S))
        except OSError as error:
            return reason_of(error)
        try:
            link = Link(connection, me.key, is_host=False)
            while not link.is_proven:
                # A stranger at this place may send a byte now and then.
                connection.settimeout(max(_SHORT_S, link.opened_at + _REPLY_S - time.monotonic()))
                link.fill()
                if link.opened_at + _REPLY_S < time.monotonic():
                    raise EOFError("too slow")
            connection.settimeout(_REPLY_S)
            link.send_json(hello_of(me, open_doors(connection)))
            message = link.read_first()
        except (EOFError, ValueError, OSError):
            return "found nothing with this run's key there; machines without a common home need SAMESTEP_KEY"
        if said := _refused(message):
            return said
        unless_met.pop_all()
        return link, int(message["welcome"])


def _refused(message: Mapping[str, Any]) -> str | None:
    if "error" in message:
        text, ranks = printable(message["error"], _LONGEST_ERROR), message.get("ranks", ())
        kinds = {kind.__name__: kind for kind in (UsageError, PlacementError)}
        if kind := kinds.get(str(message.get("kind"))):
            raise kind(text)
        raise (RanksDiffer if message.get("kind") == "RanksDiffer" else RankMissing)(text, ranks=ranks)
    if "unknown" in message:
        return f"found {printable(message['unknown']) or 'a run without name'} there"
    return None


def _tried(seen: dict[Place, str], nowhere: str) -> str:
    reasons: dict[str, list[str]] = {}
    for place, reason in seen.items():
        reasons.setdefault(reason, []).append(place if isinstance(place, str) else f"{place[0]}:{place[1]}")
    parts = [
        f"{places[0]}{f' and {len(places) - 1} more' if len(places) > 1 else ''}: {reason}"
        for reason, places in sorted(reasons.items(), key=lambda item: not item[0].startswith("found"))
    ]
    return "; ".join(parts) or nowhere
