"""What a stranger tries at a port, run as a program of its own: without the key, as another user, in another network.

Standard input has a JSON list: host, ports, and what was recorded of a real connection. For each attempt a line is
printed: its name, and the number of bytes that it was answered.
"""

import encodings.idna  # noqa: F401 - another user may not be able to read it later
import json
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator

MAGIC = b"samestep-1\n"
OLD_HELLO = (
    json.dumps({"run": "", "number": 1, "size": 2, "host": "x", "pid": 1, "script": ""}).encode() + b"\n"
)
HOSTILE = json.dumps({"error": "\x1b[2Jrank 0 was lost", "ranks": [0]}).encode() + b"\n"


def answered(line: socket.socket, seconds: float = 0.4) -> int:
    line.settimeout(seconds)
    try:
        return len(line.recv(1 << 16))
    except OSError:
        return 0


def said(*parts: bytes, pause: float = 0.0) -> Callable[[tuple[str, int]], int]:
    def attempt(place: tuple[str, int]) -> int:
        with socket.create_connection(place, timeout=3) as line:
            try:
                for part in parts:
                    line.sendall(part)
                    time.sleep(pause)
            except OSError:
                return 0
            return answered(line)

    return attempt


def closed_at_once(place: tuple[str, int]) -> int:
    with socket.create_connection(place, timeout=3) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return 0


def half_open(place: tuple[str, int]) -> int:
    lines = [socket.create_connection(place, timeout=3) for _ in range(40)]
    KEPT.extend(lines)
    return sum(answered(line, 0.01) for line in lines)


def flood(place: tuple[str, int]) -> int:
    total, until = 0, time.monotonic() + 1.0
    while time.monotonic() < until:
        try:
            with socket.create_connection(place, timeout=1) as line:
                line.sendall(secrets.token_bytes(40))
                total += answered(line, 0.001)
        except OSError:
            continue
    return total


def reflected(place: tuple[str, int]) -> int:
    """What the host says to one connection is sent back to it in another."""
    with (
        socket.create_connection(place, timeout=3) as first,
        socket.create_connection(place, timeout=3) as second,
    ):
        first.sendall(MAGIC + bytes(64))
        first.settimeout(0.3)
        try:
            heard = first.recv(1 << 12)
        except OSError:
            heard = b""
        second.sendall(MAGIC + (heard or bytes(64)) + bytes(32))
        return answered(second)


KEPT: list[socket.socket] = []
ATTEMPTS: dict[str, Callable[[tuple[str, int]], int]] = {
    "nothing": said(),
    "zeros": said(bytes(200)),
    "random bytes": said(secrets.token_bytes(4096)),
    "a web request": said(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    "the greeting of an older version": said(OLD_HELLO),
    "an error for all": said(HOSTILE),
    "a pickle": said(b"\x80\x04cposix\nsystem\n(S'touch /tmp/pwned'\ntR."),
    "the magic alone": said(MAGIC),
    "the magic and random proof": said(MAGIC + secrets.token_bytes(64)),
    "the magic and zeros": said(MAGIC + bytes(64)),
    "all three messages at once": said(MAGIC + secrets.token_bytes(64) + secrets.token_bytes(32) + OLD_HELLO),
    "a huge length": said(MAGIC + secrets.token_bytes(96) + b"\xff" * 20),
    "half a magic, slowly": said(*(bytes([byte]) for byte in MAGIC[:6]), pause=0.1),
    "a greeting without end": said(*[b"s" * 60_000] * 5),
    "deep nesting": said(b"[" * 100_000),
    "gloo's number 0": said((0).to_bytes(8, "little")),
    "torch's store: set": said(
        b"\x00" + (4).to_bytes(8, "little") + b"init" + (1).to_bytes(8, "little") + b"x"
    ),
    "torch's store: get": said(b"\x03\x3c\x85\xf7\x3c" + b"\x02" + (4).to_bytes(8, "little") + b"init"),
    "torch's store: delete": said(b"\x03\x3c\x85\xf7\x3c" + b"\x08" + (4).to_bytes(8, "little") + b"init"),
    "closed at once": closed_at_once,
    "half-open connections": half_open,
    "a flood": flood,
    "a reflected challenge": reflected,
}


def recorded(parts: list[str]) -> Iterator[tuple[str, Callable[[tuple[str, int]], int]]]:
    """What a real comer said to the host, sent again: all at once, in pieces, and cut short."""
    data = [bytes.fromhex(part) for part in parts]
    yield "a replay", said(*data)
    yield "a slow replay", said(*data, pause=0.15)
    for cut in (40, 75, 100, 123, 155):
        yield f"a replay cut after {cut} bytes", said(b"".join(data)[:cut])


def main() -> None:
    host, ports, replay = json.load(sys.stdin)
    known = dict(recorded(replay)) if replay else ATTEMPTS
    for port in ports:
        for name, attempt in known.items():
            try:
                count = attempt((host, port))
            except OSError:
                count = 0
            print(json.dumps([f"{name} at {port}", count]), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        os.setgroups([])
        os.setgid(int(sys.argv[1]))
        os.setuid(int(sys.argv[1]))
    main()
