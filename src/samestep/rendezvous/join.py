"""How separately started processes find each other: number 0 listens, and the others connect to it.

Each gets the place of its parent in the tree from number 0, connects to the parent, and leaves number 0.
"""

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path

from samestep.errors import PlacementError, RankMissing, SamestepError
from samestep.files import is_own_directory
from samestep.rendezvous.channel import NONSENSE, Channel
from samestep.rendezvous.host import Meeting, raise_refusal
from samestep.rendezvous.listen import listen, private_folder, private_socket
from samestep.rendezvous.member import Member, Patience, Place, place_of
from samestep.rendezvous.position import Position, read_position
from samestep.rendezvous.tree import Tree
from samestep.text import printable, reason_of

_CONNECT_S = 2.0
_REPLY_S, _SHORT_S = 3.0, 0.05  # for an answer; the shortest timeout of a socket
_TREE_S = 30.0  # for the connections of the tree, once all members have come
_STRANGER = "found nothing with this run's key there; machines without a common home need SAMESTEP_KEY"


class _NotHere(Exception):
    """A place does not lead to this run; the message says why."""


def join(where: Callable[[], Iterable[Place]], me: Member) -> Tree:
    """Try all places repeatedly until number 0 of the same run answers; return when all members have come."""
    patience = Patience(me.limit_s)
    pause, has_place = 0.05, False
    is_first = me.number <= 1 or me.noun != "rank"
    with private_socket(private_folder(os.urandom(32)) / "rank") as listener:
        while True:
            tried: dict[Place, str] = {}
            for place in where():
                has_place = True
                try:
                    return _join_at(place, me, patience, listener)
                except _NotHere as reason:
                    tried[place] = str(reason)
            summary = me.twin or _summary(tried) or me.advice
            if not has_place and patience.waited_s > me.no_place_s:
                raise PlacementError(me.advice)
            if patience.left_s < 0:
                raise RankMissing(
                    f"{me.title} found no {me.noun} 0 within {me.limit_s:g} s ({summary}); "
                    f"is {me.noun} 0 started, and can {socket.gethostname()} reach it?",
                    ranks=[0],
                )
            if patience.is_worth_a_line and (is_first or me.twin):
                patience.say(f"{me.title} looks for {me.noun} 0 ({summary})")
            time.sleep(pause)
            pause = min(0.5, pause * 1.5)


def refuse_twin(places: Iterable[Place], me: Member) -> None:
    """Number 0, before it listens: RanksDiffer here and there if another number 0 of the run listens at a place."""
    for place in places:
        with suppress(_NotHere), closing(_connect(place, me)) as channel:
            _introduce(channel, me, [])


def _join_at(place: Place, me: Member, patience: Patience, listener: socket.socket) -> Tree:
    """Join the run through this place; _NotHere if it does not lead to the run."""
    with ExitStack() as stack, ExitStack() as unless_joined:
        channel = _connect(place, me)
        unless_joined.callback(channel.close)
        listeners, address = [listener], ""
        if isinstance(place, tuple):
            address = str(channel.connection.getsockname()[0])
            listeners.append(stack.enter_context(listen([0], [address])[0]))
        number, host = _introduce(channel, me, listeners)
        me = replace(me, number=number)
        meeting = stack.enter_context(Meeting(me, listeners, channel))
        try:
            position = read_position(meeting.run(meeting.answer, max(0.0, patience.left_s) + _REPLY_S))
        except SamestepError:
            raise
        except (EOFError, OSError, *NONSENSE):
            raise _NotHere(f"{me.noun} 0 went away") from None
        position = position._replace(address=position.address or address)
        meeting.hand_on()
        if position.path[0]:
            channel.close()
            channel, host = _connect_to_parent(position, me)
            unless_joined.callback(channel.close)

        def awaited() -> list[int]:
            return [child for child in position.children if child not in meeting.members]

        meeting.run(lambda: not awaited(), _TREE_S, awaited)
        unless_joined.pop_all()
        return meeting.tree(position, {position.path[0]: channel}, host)


def _connect_to_parent(position: Position, me: Member) -> tuple[Channel, str]:
    """The channel to the parent in the tree and the parent's host; the parent may still be connecting itself."""
    patience = Patience(_TREE_S)
    tried: dict[Place, str] = {}
    while patience.left_s > 0:
        for place in position.parent_places:
            with ExitStack() as unless_known:
                try:
                    channel = _connect(place, me)
                    unless_known.callback(channel.close)
                    host = _introduce(channel, me, [])[1]
                except _NotHere as reason:
                    tried[place] = str(reason)
                    continue
                unless_known.pop_all()
                return channel, host
        time.sleep(0.02)
    raise PlacementError(
        f"{me.title} ({socket.gethostname()}) cannot reach {me.noun} {position.path[0]} ({_summary(tried)}); "
        "open the network between them, or choose another with SAMESTEP_ADDRESS_SUFFIX"
    )


def _connect(place: Place, me: Member) -> Channel:
    """A channel to the process at this place, if it has the run's key."""
    with ExitStack() as unless_proven:
        try:
            if isinstance(place, str):
                if not is_own_directory(Path(place).parent):
                    raise _NotHere("no directory of this user")
                connection = unless_proven.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                connection.settimeout(_CONNECT_S)
                connection.connect(place)
            else:
                connection = unless_proven.enter_context(socket.create_connection(place, _CONNECT_S))
        except OSError as error:
            raise _NotHere(reason_of(error)) from None
        except (ValueError, OverflowError):
            raise _NotHere("no place") from None
        patience = Patience(_REPLY_S)
        try:
            channel = Channel(connection, me.key, me.claim)
            while not channel.is_proven:
                # A stranger may send single bytes, so the whole exchange has a limit too.
                connection.settimeout(max(_SHORT_S, patience.left_s))
                channel.fill()
                if patience.left_s < 0:
                    raise EOFError("too slow")
        except (EOFError, ValueError, OSError):
            raise _NotHere(_STRANGER) from None
        unless_proven.pop_all()
        return channel


def _introduce(channel: Channel, me: Member, listeners: Iterable[socket.socket]) -> tuple[int, str]:
    """Send this member's hello with the places where it listens; returns its number, and the other's host."""
    channel.connection.settimeout(_REPLY_S)
    try:
        channel.send_json(me.hello([place_of(listener) for listener in listeners]))
        message = channel.wait_json()
        raise_refusal(message)
        if "unknown" in message:
            raise _NotHere(f"found {printable(message['unknown']) or 'a run without name'} there")
        number = int(message["welcome"])
        if number != me.number and not me.number < 0 < number < me.size:
            raise ValueError("another number")
        return number, printable(message["host"], 64)
    except SamestepError:
        raise
    except (EOFError, OSError, *NONSENSE):
        raise _NotHere(_STRANGER) from None


def _summary(tried: Mapping[Place, str]) -> str:
    """Why each place was no success; places with another run come first."""
    places_of: dict[str, list[str]] = {}
    for place, reason in tried.items():
        places_of.setdefault(reason, []).append(
            printable(place if isinstance(place, str) else f"{place[0]}:{place[1]}")
        )
    return "; ".join(
        f"{places[0]}{f' and {len(places) - 1} more' if len(places) > 1 else ''}: {reason}"
        for reason, places in sorted(places_of.items(), key=lambda item: not item[0].startswith("found"))
    )
