"""A connection whose two ends have proved to each other that they know the key, and whose messages nobody changes.

Three messages before anything is said: the comer's nonce with a mark made with the key, the host's nonce with a
proof over both, the comer's proof over both. After that every message carries its number and a digest made with a
key of this connection alone. Covered: strangers, replays, reflections, changed or inserted messages. Not covered:
reading along, for nothing is encrypted.
"""

import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from samestep.rendezvous.key import derive

MOST_BYTES = 1 << 27
_MAGIC = b"samestep-1\n"
_NONCE = _PROOF = 32
_DIGEST = 16
_HEAD = 4 + _DIGEST
_CHUNK = 1 << 18
_SEND_S = 10.0


class Link:
    """One end of such a connection: the host's, which was connected to, or the comer's."""

    def __init__(self, connection: socket.socket, key: bytes, *, is_host: bool) -> None:
        self.connection = connection
        self.opened_at = self.heard_at = time.monotonic()
        self.is_proven = False
        self.others_nonce = b""
        self._key, self._is_host = key, is_host
        self._nonce = secrets.token_bytes(_NONCE)
        self._rest = bytearray()
        self._sending = threading.Lock()
        self._out_key = self._in_key = b""
        self._sent = self._received = 0
        connection.settimeout(_SEND_S)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not is_host:
            connection.sendall(_MAGIC + self._nonce + derive(key, "knock", self._nonce))

    def send(self, body: bytes) -> None:
        """Raises OSError where the other end is gone; may be called from several threads."""
        with self._sending:
            digest = _digest(self._out_key, self._sent, body)
            self._sent += 1
            self.connection.sendall(b"".join((len(body).to_bytes(4, "big"), digest, body)))

    def read(self) -> list[bytes]:
        """All that has arrived, nothing before both have proved themselves; raises what `fill` raises."""
        self.fill()
        return self.read_rest()

    def read_rest(self) -> list[bytes]:
        """What has arrived before."""
        bodies = []
        while self.is_proven and (body := self._taken()) is not None:
            bodies.append(body)
        return bodies

    def fill(self) -> None:
        """Take in what has arrived; EOFError at the end, ValueError where a stranger speaks."""
        try:
            data = self.connection.recv(_CHUNK)
        except OSError as error:
            raise EOFError(str(error)) from error
        if not data:
            raise EOFError("closed")
        self.heard_at = time.monotonic()
        self._rest += data
        if not self.is_proven:
            self._greet()

    def take_json(self) -> dict[str, Any] | None:
        """The first message that is here, an object; those behind it stay for whoever reads next."""
        if not self.is_proven or (body := self._taken()) is None:
            return None
        try:
            found = json.loads(body)
        except RecursionError:
            raise ValueError("nested too deep") from None
        if not isinstance(found, dict):
            raise ValueError("no object")
        return found

    def send_json(self, message: Mapping[str, Any]) -> None:
        """Raises OSError where the other end is gone."""
        self.send(json.dumps(message).encode())

    def read_first(self) -> dict[str, Any]:
        """Wait for one message, an object, and leave those behind it."""
        while (found := self.take_json()) is None:
            self.fill()
        return found

    def close(self) -> None:
        self.connection.close()

    def _greet(self) -> None:
        if not self._is_host:
            if len(self._rest) < _NONCE + _PROOF:
                return
            self.others_nonce = self._cut(_NONCE)
            self._check(self._cut(_PROOF), "host", self._nonce, self.others_nonce)
            self.connection.sendall(derive(self._key, "comer", self._nonce, self.others_nonce))
            self._enter("comer", "host", self._nonce, self.others_nonce)
            return
        if not self.others_nonce:
            if not _MAGIC.startswith(self._rest[: len(_MAGIC)]):
                raise ValueError("another protocol")
            if len(self._rest) < len(_MAGIC) + _NONCE + _PROOF:
                return
            self._cut(len(_MAGIC))
            nonce = self._cut(_NONCE)
            self._check(self._cut(_PROOF), "knock", nonce)
            self.others_nonce = nonce
            self.connection.sendall(self._nonce + derive(self._key, "host", nonce, self._nonce))
        if len(self._rest) >= _PROOF:
            self._check(self._cut(_PROOF), "comer", self.others_nonce, self._nonce)
            self._enter("host", "comer", self.others_nonce, self._nonce)

    def _check(self, proof: bytes, *words: str | bytes) -> None:
        if not hmac.compare_digest(proof, derive(self._key, *words)):
            raise ValueError("another key")

    def _enter(self, mine: str, theirs: str, *nonces: bytes) -> None:
        self._out_key, self._in_key = (derive(self._key, f"from {side}", *nonces) for side in (mine, theirs))
        self.is_proven = True

    def _cut(self, count: int) -> bytes:
        found = bytes(self._rest[:count])
        del self._rest[:count]
        return found

    def _taken(self) -> bytes | None:
        """The next message, where all of it is there."""
        if len(self._rest) < _HEAD:
            return None
        size = int.from_bytes(self._rest[:4], "big")
        if size > MOST_BYTES:
            raise ValueError("a message without end")
        if len(self._rest) < _HEAD + size:
            return None
        found = self._cut(_HEAD + size)
        body = found[_HEAD:]
        if not hmac.compare_digest(found[4:_HEAD], _digest(self._in_key, self._received, body)):
            raise ValueError("a changed message")
        self._received += 1
        return body


def _digest(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + body, "sha256")[:_DIGEST]
