"""Connects processes through a file in a shared directory, which says where number 0 listens."""

import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from samestep.errors import PlacementError
from samestep.files import read_regular, write_atomically
from samestep.rendezvous.addresses import own_addresses
from samestep.rendezvous.channel import NONSENSE
from samestep.rendezvous.host import host
from samestep.rendezvous.join import join, refuse_twin
from samestep.rendezvous.listen import LOOP, listen
from samestep.rendezvous.member import Member, Place, place_from, place_of
from samestep.rendezvous.tree import Tree
from samestep.text import reason_of

_WRITTEN_S = 0.2
_MOST_BYTES, _MOST_PLACES = 1 << 16, 64


def meet(path: Path, me: Member) -> Tree:
    """Connect the members of a run: number 0 writes the note, the others read it."""
    if me.number:
        return join(lambda: read(path), me)
    with ExitStack() as stack:
        listeners = [stack.enter_context(opened) for opened in listen([0], own_addresses() or [LOOP])]
        stack.enter_context(posted(path, listeners, me))
        return host(listeners, me)


@contextmanager
def posted(path: Path, listeners: Sequence[socket.socket], me: Member) -> Iterator[None]:
    """While entered, the note exists; a note that a crash left behind is replaced, RanksDiffer if its writer lives."""
    note = {"places": [place_of(listener) for listener in listeners], "mark": secrets.token_hex(8)}
    text = json.dumps(note).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(path, "xb") as file:  # so of two that begin together, one finds the note of the other
                file.write(text)
        except FileExistsError:
            time.sleep(_WRITTEN_S)  # its writer may have just made it
            if not (places := read(path)):
                raise PlacementError(
                    f"{path} exists and is not from samestep; name a file that does not exist"
                ) from None
            refuse_twin(places, me)
            write_atomically(path, text)
    except OSError as error:
        raise PlacementError(
            f"{path} cannot be written ({reason_of(error)}); name a file in a directory that all nodes share"
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):
            if read_regular(path, _MOST_BYTES) == text:
                path.unlink()


def read(path: Path) -> list[Place]:
    """The places of number 0 in the note; none if there is no note."""
    try:
        os.listdir(path.parent)  # makes a network file system forget a cached "no such file"
        places = json.loads(read_regular(path, _MOST_BYTES))["places"]
        return [place_from(place) for place in places[:_MOST_PLACES]]
    except (OSError, *NONSENSE):
        return []
