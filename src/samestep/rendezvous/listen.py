"""Where processes listen: at addresses of this machine, or at a Unix socket that only their user can reach.

A port can also be kept free for rank 0.
"""

import os
import resource
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from math import inf
from pathlib import Path

from samestep.errors import PlacementError, UsageError
from samestep.files import is_own_directory
from samestep.rendezvous.addresses import own_addresses
from samestep.rendezvous.key import derive

LOOP = "127.0.0.1"
_STEP_S = 0.25
_OLD_S = 3600.0
_TAKEN_S = 30.0
_BACKLOG = 1024
# What a rank has open besides, and what its script may open.
_LEAST_DESCRIPTORS, _OTHER_DESCRIPTORS = 32, 128


def listen(ports: Sequence[int], addresses: Sequence[str], why: str = "") -> list[socket.socket]:
    """Listen at these addresses, at the first of these ports that is free on this machine (0: any)."""
    until = time.monotonic() + _TAKEN_S
    while True:
        for port in ports:
            if listeners := listen_at(port, addresses):
                return listeners
        if time.monotonic() > until:
            listed = ", ".join(map(str, ports))
            is_given = why.startswith("MASTER_PORT")
            raise PlacementError(
                f"port {listed} ({why or 'derived'}) is taken on {socket.gethostname()}; "
                f"{'unset MASTER_PORT or ' if is_given else ''}choose another",
                variable="MASTER_PORT" if is_given else None,
            )
        time.sleep(_STEP_S)


def listen_at(port: int, addresses: Sequence[str]) -> list[socket.socket]:
    """Sockets that listen at this port of these addresses, none where it is taken."""
    listeners: list[socket.socket] = []
    with ExitStack() as unless_all:
        try:
            for address in addresses:
                listeners.append(unless_all.enter_context(_bound(address, port)))
                listeners[-1].listen(_BACKLOG)
                port = listeners[0].getsockname()[1]
        except OSError:
            return []
        unless_all.pop_all()
    return listeners


def addresses_for(name: str) -> list[str]:
    """Those of this machine at which others that know it by this name will look for it."""
    try:
        found = {str(answer[4][0]) for answer in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        found = set()
    outside = own_addresses()
    if at := [address for address in outside if address in found]:
        return at
    # A machine may resolve its own name to the loop, where nobody else comes.
    return [LOOP] if name in (LOOP, "localhost", "::1") else outside or [LOOP]


@contextmanager
def private_socket(path: Path) -> Iterator[socket.socket]:
    """Listen at a Unix socket in a directory of mode 0700, which is removed at the end."""
    folder = path.parent
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as opened:
        while opened.getsockname() != str(path):
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            if not is_own_directory(folder):
                raise PlacementError(f"{folder} is not this user's own directory; remove it")
            _remove_left(path)
            with suppress(FileNotFoundError):  # the last of an earlier run has just removed the directory
                opened.bind(str(path))
        opened.listen(_BACKLOG)
        try:
            yield opened
        finally:
            with suppress(OSError):
                path.unlink()
                folder.rmdir()


def private_folder(key: bytes, *words: str) -> Path:
    """Where the ranks of one machine meet; nobody without their key can make a directory of that name first."""
    folder = f"samestep-{os.geteuid()}-{derive(key, 'directory', *words).hex()[:24]}"
    base = "/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir()
    return Path(base, folder)


def sweep(base: Path) -> None:
    """Remove the directories there in which starts met that were killed more than an hour ago."""
    for folder in base.glob(f"samestep-{os.geteuid()}-*"):
        with suppress(OSError, PlacementError):
            if is_own_directory(folder) and time.time() - folder.stat().st_mtime > _OLD_S:
                for path in folder.iterdir():
                    _remove_left(path)
                folder.rmdir()


def _remove_left(path: Path) -> None:
    """Remove a socket that a crash left; PlacementError where a process listens at it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as opened:
        opened.settimeout(_STEP_S)
        try:
            opened.connect(str(path))
        except (BlockingIOError, TimeoutError):
            pass  # so many wait there that one more cannot
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise PlacementError(f"another process listens at {path}; give every rank a number of its own")


def hold_port() -> tuple[socket.socket, int]:
    """A socket bound to a free port that never listens: rank 0 sets SO_REUSEADDR too and may listen there."""
    for address in ("::", "0.0.0.0"):
        with suppress(OSError):
            held = _bound(address, 0)
            return held, held.getsockname()[1]
    raise OSError("no TCP port can be bound on this machine")


def allow_descriptors(needed: int, why: str) -> None:
    """Raise the soft limit of open files until there is room for so many, or say that the hard one is too low."""
    least, roomy = needed + _LEAST_DESCRIPTORS, needed + _OTHER_DESCRIPTORS
    soft, hard = (inf if limit == resource.RLIM_INFINITY else limit for limit in _limits())
    if hard < least:
        raise UsageError(
            f"{why}, which takes about {least} open files, and this process may have {hard} (`ulimit -Hn`); "
            "raise that limit, or start fewer processes"
        )
    if soft < roomy:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(min(hard, roomy)), _limits()[1]))


def _limits() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def _bound(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address != "::"))
        # A launcher may hold the port, bound and not listening; of two that listen one fails here.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((address, port))
    except OSError:
        opened.close()
        raise
    return opened
