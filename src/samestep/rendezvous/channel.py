"""An authenticated connection: both ends have proved that they have the key, and no message can be changed.

It begins with three messages: the client's nonce with a proof made with the key, the server's nonce with a proof over
both nonces, and the client's claim (its run, its number, the run's size) with a proof over both nonces and the claim.
After that every message has a number and a digest, made with a key that belongs to this connection and claim alone.
Covered: strangers, replays, reflections, changed or inserted messages, a proof for another claim. Not covered:
eavesdropping, for nothing is encrypted.
"""

import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from contextlib import suppress
from typing import Any

from samestep.rendezvous.key import derive

MOST_BYTES = 1 << 27
# What a client claims to be: a digest of the run's name, the member's number, the size of the run.
CLAIM = struct.Struct(">32sqq")
# What reading a message may raise that has a right digest but not our format.
NONSENSE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
_MAGIC = b"samestep-1\n"
_NONCE = _PROOF = 32
_DIGEST = 16
_CHUNK = 1 << 18
_SEND_S = 10.0


class Channel:
    """One end of the connection: the client's end, which has a claim, or the server's end, which receives it."""

    def __init__(self, connection: socket.socket, key: bytes, claim: bytes = b"") -> None:
        self.connection = connection
        self.claim = claim
        self.opened_at = self.heard_at = time.monotonic()
        self.is_proven = False
        self.client_nonce = b""  # the server sets it once its proof was right
        self._key = key
        self._out_key = self._in_key = b""
        self._sent = 0
        self._sending = threading.Lock()
        self._unsent, self.sent_at = bytearray(), 0.0
        self._received, self._messages = bytearray(), deque[bytes]()
        connection.settimeout(_SEND_S)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._parser = self._parse(is_server=not claim)
        self._wanted = next(self._parser)

    def send(self, body: bytes) -> None:
        """Send a message; raises OSError if the other end is gone. Several threads may call it."""
        with self._sending:
            self.connection.sendall(self._framed(body))

    def keep(self, body: bytes) -> None:
        """Keep a message for `flush`, which sends without waiting for the other end to read."""
        with self._sending:
            if not self._unsent:
                self.sent_at = time.monotonic()
            self._unsent += self._framed(body)

    def flush(self) -> bool:
        """Send kept messages on a non-blocking connection; whether all are sent. OSError if the other end is gone."""
        with self._sending, suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self.connection.send(self._unsent[:_CHUNK])]
                self.sent_at = time.monotonic()
        return not self._unsent

    def _framed(self, body: bytes) -> bytes:
        digest = _digest(self._out_key, self._sent, body)
        self._sent += 1
        return b"".join((len(body).to_bytes(4, "big"), digest, body))

    def send_json(self, message: Mapping[str, Any]) -> None:
        """Send an object as JSON; raises OSError if the other end is gone."""
        self.send(json.dumps(message).encode())

    def fill(self) -> None:
        """Receive what has arrived; EOFError at the end, ValueError if the other end is a stranger."""
        try:
            data = self.connection.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            raise EOFError(str(error)) from error
        if not data:
            raise EOFError("closed")
        self.heard_at = time.monotonic()
        self._received += data
        while len(self._received) >= self._wanted:
            part = bytes(self._received[: self._wanted])
            del self._received[: self._wanted]
            self._wanted = self._parser.send(part)

    def taken(self) -> list[bytes]:
        messages = list(self._messages)
        self._messages.clear()
        return messages

    def take_json(self) -> dict[str, Any] | None:
        """Remove and return the first received message, a JSON object; None if there is none."""
        if not self._messages:
            return None
        message = json.loads(self._messages.popleft())
        if not isinstance(message, dict):
            raise ValueError("no object")
        return message

    def wait_json(self) -> dict[str, Any]:
        while (message := self.take_json()) is None:
            self.fill()
        return message

    def shut(self) -> None:
        """End the connection for both ends, from any thread."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.connection.close()

    def _parse(self, *, is_server: bool) -> Generator[int, bytes, None]:
        """Parse the protocol: yields how many bytes it needs next; raises ValueError if they are wrong."""
        mine = secrets.token_bytes(_NONCE)
        if is_server:
            if (yield len(_MAGIC)) != _MAGIC:
                raise ValueError("another protocol")
            theirs = yield _NONCE
            self._check((yield _PROOF), "greeting", theirs)
            self.client_nonce = theirs
            self.connection.sendall(mine + derive(self._key, "server", theirs, mine))
            self.claim = yield CLAIM.size
            self._check((yield _PROOF), "client", theirs, mine, self.claim)
            nonces, out_side, in_side = (theirs, mine), "server", "client"
        else:
            self.connection.sendall(_MAGIC + mine + derive(self._key, "greeting", mine))
            theirs = yield _NONCE
            self._check((yield _PROOF), "server", mine, theirs)
            self.connection.sendall(self.claim + derive(self._key, "client", mine, theirs, self.claim))
            nonces, out_side, in_side = (mine, theirs), "client", "server"
        self._out_key = derive(self._key, f"from {out_side}", *nonces, self.claim)
        self._in_key = derive(self._key, f"from {in_side}", *nonces, self.claim)
        self.is_proven = True
        number = 0
        while True:
            size = int.from_bytes((yield 4), "big")
            if size > MOST_BYTES:
                raise ValueError("a message without end")
            digest = yield _DIGEST
            body = yield size
            if not hmac.compare_digest(digest, _digest(self._in_key, number, body)):
                raise ValueError("a changed message")
            number += 1
            self._messages.append(body)

    def _check(self, proof: bytes, *words: str | bytes) -> None:
        if not hmac.compare_digest(proof, derive(self._key, *words)):
            raise ValueError("another key")


def checked(values: Any, kinds: Iterable[Any]) -> list[Any]:
    """The values as a list, if they have these types in this order; otherwise raises one of NONSENSE."""
    if not all(isinstance(value, kind) for value, kind in zip(values, kinds, strict=True)):
        raise TypeError("other types")
    return list(values)


def as_kind(kind: Any, values: Any) -> Any:
    """The values as this named tuple, if its fields have these types; otherwise raises one of NONSENSE."""
    return kind(*checked(values, kind.__annotations__.values()))


def _digest(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + body, "sha256")[:_DIGEST]
