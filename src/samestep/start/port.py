"""A port for rank 0 that nobody else is given between the moment it is chosen and the moment it is used."""

import socket


def hold_port() -> tuple[socket.socket, int]:
    """A socket bound to a free port that never listens: rank 0, setting SO_REUSEADDR too, may."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            held = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue
        try:
            if family == socket.AF_INET6:
                held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind((address, 0))
        except OSError:
            held.close()
            continue
        return held, held.getsockname()[1]
    raise OSError("no TCP port can be bound on this machine")
