"""A connection whose two ends have proved to each other that they have the key, and whose messages nobody changes.

Three messages come before anything is said: the client's nonce with a proof made with the key, the server's nonce with
a proof over both nonces, and the client's claim (its run, its number, the run's size) with a proof over both nonces and
the claim. After that every message carries its number and a digest made with a key of this connection and claim alone.
Covered: strangers, replays, reflections, changed or inserted messages, a proof for another claim. Not covered: reading
along, for nothing is encrypted.
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
# As which member a client comes: a digest of the run's name, the number of the member, the size of the run.
CLAIM = struct.Struct(">32sqq")
# What may come of reading a message that was made with the key, and is none of ours.
NONSENSE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
_MAGIC = b"samestep-1\n"
_NONCE = _PROOF = 32
_DIGEST = 16
_CHUNK = 1 << 18
_SEND_S = 10.0


class Channel:
    """One end of such a connection: the client's, which has a claim, or that of the server, which hears it."""

    def __init__(self, connection: socket.socket, key: bytes, claim: bytes = b"") -> None:
        self.connection = connection
        self.claim = claim
        self.opened_at = self.heard_at = time.monotonic()
        self.is_proven = False
        self.client_nonce = b""  # known to the server once the proof that came with it was right
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
        """Raises OSError where the other end is gone; may be called from several threads."""
        with self._sending:
            self.connection.sendall(self._framed(body))

    def keep(self, body: bytes) -> None:
        """For `flush`, which sends what is kept without waiting for the other end to read it."""
        with self._sending:
            if not self._unsent:
                self.sent_at = time.monotonic()
            self._unsent += self._framed(body)

    def flush(self) -> bool:
        """Whether all that was kept is sent; raises OSError where the other end is gone. It must not block."""
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
        """Raises OSError where the other end is gone."""
        self.send(json.dumps(message).encode())

    def fill(self) -> None:
        """Take in what has arrived; EOFError at the end, ValueError where a stranger speaks."""
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
        """All messages that have been taken in."""
        messages = list(self._messages)
        self._messages.clear()
        return messages

    def take_json(self) -> dict[str, Any] | None:
        """The first message that has been taken in, an object; those behind it stay."""
        if not self._messages:
            return None
        found = json.loads(self._messages.popleft())
        if not isinstance(found, dict):
            raise ValueError("no object")
        return found

    def wait_json(self) -> dict[str, Any]:
        """Wait for one message, an object, and leave those behind it."""
        while (found := self.take_json()) is None:
            self.fill()
        return found

    def shut(self) -> None:
        """End the connection for both ends, whichever thread reads it."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.connection.close()

    def _parse(self, *, is_server: bool) -> Generator[int, bytes, None]:
        """Asks for so many bytes at a time; what is no answer to them is a ValueError."""
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
        self._out_key, self._in_key = (
            derive(self._key, f"from {side}", *nonces, self.claim) for side in (out_side, in_side)
        )
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


def checked(said: Any, kinds: Iterable[Any]) -> list[Any]:
    """What was said, where it is one value of each of these types; otherwise one of NONSENSE."""
    if not all(isinstance(value, kind) for value, kind in zip(said, kinds, strict=True)):
        raise TypeError("other types")
    return list(said)


def as_kind(kind: Any, said: Any) -> Any:
    """What was said as this named tuple, field by field of its type; otherwise one of NONSENSE."""
    return kind(*checked(said, kind.__annotations__.values()))


def _digest(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + body, "sha256")[:_DIGEST]
