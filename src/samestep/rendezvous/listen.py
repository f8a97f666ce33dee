"""Opens listening sockets: at addresses of this machine, or a Unix socket that only its user can reach.

It can also keep a port free for rank 0.
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
_TAKEN_S = 30.0  # how long to wait for a port that is taken
_BACKLOG = 1024
# Other descriptors of a rank: what it needs at least, and with what its script may open.
_LEAST_DESCRIPTORS, _OTHER_DESCRIPTORS = 32, 128


def listen(ports: Sequence[int], addresses: Sequence[str], why: str = "") -> list[socket.socket]:
    """Listen at these addresses, on the first of these ports that is free (0: any port)."""
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
    """Sockets that listen on this port of these addresses; none if it is taken."""
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
    """The addresses of this machine to which its name resolves on other machines."""
    try:
        resolved = {str(answer[4][0]) for answer in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        resolved = set()
    outside = own_addresses()
    if matching := [address for address in outside if address in resolved]:
        return matching
    # A machine may resolve its own name to the loopback address, which other machines cannot reach.
    return [LOOP] if name in (LOOP, "localhost", "::1") else outside or [LOOP]


@contextmanager
def private_socket(path: Path) -> Iterator[socket.socket]:
    """While entered, a listening Unix socket in a directory of mode 0700; both are removed at the end."""
    folder = path.parent
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as opened:
        while opened.getsockname() != str(path):
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            if not is_own_directory(folder):
                raise PlacementError(f"{folder} is not this user's own directory; remove it")
            _remove_stale(path)
            with suppress(FileNotFoundError):  # a process of an earlier run has just removed the directory
                opened.bind(str(path))
        opened.listen(_BACKLOG)
        try:
            yield opened
        finally:
            with suppress(OSError):
                path.unlink()
                folder.rmdir()


def private_folder(key: bytes, *words: str) -> Path:
    """The directory where a machine's ranks meet; without their key nobody can guess its name and take it first."""
    folder = f"samestep-{os.geteuid()}-{derive(key, 'directory', *words).hex()[:24]}"
    base = "/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir()
    return Path(base, folder)


def _remove_stale(path: Path) -> None:
    """Remove a socket that a crash left behind; PlacementError if a process listens at it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as opened:
        opened.settimeout(_STEP_S)
        try:
            opened.connect(str(path))
        except (BlockingIOError, TimeoutError):
            pass  # its queue is full, so a process listens
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise PlacementError(
        f"another process listens at {path}; give every rank a number, and every run a MASTER_PORT, of its own"
    )


def hold_port() -> tuple[socket.socket, int]:
    """A bound socket that keeps a port free and never listens; rank 0, also with SO_REUSEADDR, can listen there."""
    for address in ("::", "0.0.0.0"):
        with suppress(OSError):
            held = _bound(address, 0)
            return held, held.getsockname()[1]
    raise OSError("no TCP port can be bound on this machine")


def allow_descriptors(needed: int, why: str) -> None:
    """Raise the soft limit of open files for so many; UsageError if the hard limit is too low."""
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
        # The launcher's socket may be bound to the port without listening; of two listeners the second fails here.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((address, port))
    except OSError:
        opened.close()
        raise
    return opened
