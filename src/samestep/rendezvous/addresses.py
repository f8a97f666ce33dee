"""Addresses: what a name resolves to, at which address other machines reach this machine, and its interface."""

import ipaddress
import os
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil

from samestep.errors import PlacementError
from samestep.files import BOOT_ID, read_text

_REACH_S = 2.0
_HOSTS = Path("/etc/hosts")


def resolve(name: str, suffix: str = "", instead: str = "set MASTER_ADDR to") -> list[str]:
    """The addresses of another machine; PlacementError with a remedy if there are none, or only this machine's."""
    with suppress(ValueError):
        return [name if name == "localhost" else str(ipaddress.ip_address(name))]
    here, full_name = socket.gethostname(), name + suffix
    try:
        answers = socket.getaddrinfo(full_name, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        why = f"; SAMESTEP_ADDRESS_SUFFIX is {suffix}" if suffix else ""
        raise PlacementError(
            f"{here} cannot resolve {full_name} ({str(getattr(error, 'strerror', error)).lower()}{why}); "
            f"{'correct the suffix' if suffix else f'{instead} an address of {name}'}"
        ) from None
    resolved = list(dict.fromkeys(str(answer[4][0]) for answer in answers))
    outside = [address for address in resolved if not ipaddress.ip_address(address.split("%")[0]).is_loopback]
    if not outside:
        raise PlacementError(
            f"{here} resolves {full_name} to {resolved[0]}{_line_of(full_name)}, which is {here} itself; correct that, "
            f"or {instead} an address of {name}"
        )
    return outside


def own_addresses() -> list[str]:
    """This machine's addresses that other machines may reach, IPv4 first."""
    ordered = [
        (entry.family != socket.AF_INET, name.startswith(("docker", "virbr")), entry.address)
        for name, addresses in psutil.net_if_addrs().items()
        for entry in addresses
        if entry.family in (socket.AF_INET, socket.AF_INET6) and not _is_local(entry.address)
    ]
    return [address for *_, address in sorted(ordered)]


def source_for(peer: str) -> str:
    """The address of this machine that packets to a peer have as their source."""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as unsent:
        unsent.connect((peer, 9))
        return str(unsent.getsockname()[0])


def interface_of(address: str) -> str | None:
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in addresses):
            return str(name)
    return None


def unreachable(places: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """The places that do not accept a connection within two seconds."""

    def is_lost(place: tuple[str, int]) -> bool:
        try:
            socket.create_connection(place, timeout=_REACH_S).close()
        except OSError:
            return True
        return False

    places = list(places)
    with ThreadPoolExecutor(64) as pool:
        return [place for place, lost in zip(places, pool.map(is_lost, places), strict=True) if lost]


def machine() -> str:
    """An identity of this machine; a container with a host name of its own counts as another machine."""
    return f"{os.uname().nodename} {read_text(BOOT_ID).strip()}"


def _is_local(address: str) -> bool:
    parsed = ipaddress.ip_address(address.split("%")[0])
    return parsed.is_loopback or parsed.is_link_local


def _line_of(name: str) -> str:
    """The line of /etc/hosts that has this name, for a message."""
    for number, line in enumerate(read_text(_HOSTS).splitlines(), 1):
        if name in line.partition("#")[0].split()[1:]:
            return f" ({_HOSTS} line {number})"
    return ""
