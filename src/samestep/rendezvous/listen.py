"""Sockets on all addresses of this machine, IPv6 and IPv4: to listen at a port, or to keep one free for rank 0."""

import socket
import time
from collections.abc import Sequence

from samestep.errors import PlacementError

_STEP_S = 0.25
_TAKEN_S = 30.0
_ALL_ADDRESSES = ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0"))


def listen(ports: Sequence[int], why: str = "") -> socket.socket:
    """Listen at the first of these ports that is free on this machine (0: any)."""
    until = time.monotonic() + _TAKEN_S
    while True:
        for port in ports:
            if (listener := listen_at(port)) is not None:
                return listener
        if time.monotonic() > until:
            listed = ", ".join(map(str, ports))
            is_given = why.startswith("MASTER_PORT")
            raise PlacementError(
                f"port {listed} ({why or 'derived'}) is taken on {socket.gethostname()}; "
                f"{'unset MASTER_PORT or ' if is_given else ''}choose another",
                variable="MASTER_PORT" if is_given else None,
            )
        time.sleep(_STEP_S)


def listen_at(port: int) -> socket.socket | None:
    """A socket that listens at this port, or None where it is taken."""
    return _bound(port, listens=True)


def hold_port() -> tuple[socket.socket, int]:
    """A socket bound to a free port that never listens: rank 0 sets SO_REUSEADDR too and may listen there."""
    if (held := _bound(0, listens=False)) is None:
        raise OSError("no TCP port can be bound on this machine")
    return held, held.getsockname()[1]


def _bound(port: int, *, listens: bool) -> socket.socket | None:
    for family, address in _ALL_ADDRESSES:
        try:
            opened = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue
        try:
            if family == socket.AF_INET6:
                opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            # A launcher may hold the port, bound and not listening; of two that listen one fails here.
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind((address, port))
            if listens:
                opened.listen(1024)
        except OSError:
            opened.close()
            continue
        return opened
    return None
