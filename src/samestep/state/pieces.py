"""Writes, reads and digests a file's bytes in pieces, with several threads where that is faster."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from errno import EIO
from hashlib import blake2b
from typing import Any

from samestep.state.tree import Bad

PIECE = 4 << 20  # bytes that are digested together; the format fixes it


@contextmanager
def in_threads(
    count: int, function: Callable[[Any], bytes], items: Iterable[Any]
) -> Iterator[Iterator[bytes]]:
    pool, listed = ThreadPoolExecutor(count), list(items)
    results: Iterator[bytes]
    try:
        results = pool.map(function, listed)
    except RuntimeError:
        # no thread can start while the interpreter exits; the last commit is then made without threads
        results = map(function, listed)
    try:
        yield results
    finally:
        pool.shutdown(cancel_futures=True)


def write_all(fd: int, offset: int, views: Iterable[memoryview]) -> None:
    left = [view for view in views if view][::-1]
    while left:
        wrote = os.pwritev(fd, left[:-65:-1], offset)
        if wrote == 0:
            raise OSError(EIO, os.strerror(EIO))
        offset += wrote
        while left and wrote >= len(left[-1]):
            wrote -= len(left.pop())
        if wrote:
            left[-1] = left[-1][wrote:]


def read_into(fd: int, view: memoryview, offset: int) -> None:
    while view:
        got = os.preadv(fd, [view], offset)
        if got == 0:
            raise Bad("became shorter while it was read")
        view, offset = view[got:], offset + got


def read_exactly(fd: int, length: int, offset: int) -> bytes:
    data = bytearray(length)
    read_into(fd, memoryview(data), offset)
    return bytes(data)


def pieces(buffer: memoryview) -> list[memoryview]:
    return [buffer[i : i + PIECE] for i in range(0, len(buffer), PIECE)]


def digest(data: bytes | memoryview, level: bytes) -> bytes:
    return blake2b(data, digest_size=32, person=level).digest()


def piece_digest(piece: memoryview) -> bytes:
    return digest(piece, b"piece")


def blob_digest(pieces: Iterator[bytes], nbytes: int) -> bytes:
    return digest(b"".join(next(pieces) for _ in range(-(-nbytes // PIECE))), b"blob")
