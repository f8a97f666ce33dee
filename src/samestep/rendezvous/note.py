"""A file in a directory that all nodes share: it says where number 0 listens, as long as it does."""

import json
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from samestep.errors import PlacementError
from samestep.files import write_atomically
from samestep.rendezvous.addresses import own_addresses
from samestep.rendezvous.host import host
from samestep.rendezvous.join import join
from samestep.rendezvous.listen import LOOP, listen
from samestep.rendezvous.member import Member
from samestep.rendezvous.tree import Tree
from samestep.text import reason_of


@contextmanager
def posted(path: Path, listeners: Sequence[socket.socket]) -> Iterator[None]:
    """While entered, the note is there; a note that a crash left is replaced."""
    places = [listener.getsockname() for listener in listeners]
    mine = {"addresses": [place[0] for place in places], "port": places[0][1], "mark": secrets.token_hex(8)}
    text = json.dumps(mine | {"host": os.uname().nodename, "pid": os.getpid()})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
    except OSError as error:
        raise PlacementError(
            f"{path} cannot be written ({reason_of(error)}); name a file in a directory that all nodes share"
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):
            if path.read_text() == text:
                path.unlink()


def meet(path: Path, me: Member) -> Tree:
    """Connect the members of a run: number 0 leaves the note, the others read it."""
    if me.number:
        return join(lambda: read(path), me)
    listeners = listen([0], own_addresses() or [LOOP])
    with posted(path, listeners):
        return host(listeners, me)


def read(path: Path) -> list[tuple[str, int]]:
    """Where the note says that number 0 listens; nothing where there is none."""
    try:
        os.listdir(path.parent)  # a network file system may remember for a minute that the file was not there
        note = json.loads(path.read_text())
        return [(str(address), int(note["port"])) for address in note["addresses"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []
