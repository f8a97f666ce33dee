"""The file of a committed state: every byte is checked before it is used; no torch, no pickle.

Workers write these files, and `samestep checkpoints` lists and verifies them without torch.
docs/checkpoint-format.md draws the layout.

Covered: torn, truncated, flipped, swapped and spliced files, and files of something else. Not covered: forgery. The
digests have no key, so a user who may write the directory may write a valid file. Still, nothing in it is ever run or
used as a path.
"""

import json
import os
import re
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from errno import EINVAL, ELOOP, ENOSYS, EOPNOTSUPP
from functools import cached_property
from typing import Any, NamedTuple

import psutil

from samestep.errors import CheckpointError
from samestep.state.pieces import (
    PIECE,
    blob_digest,
    digest,
    in_threads,
    piece_digest,
    pieces,
    read_exactly,
    read_into,
    write_all,
)
from samestep.state.tree import Bad, Blob, Leaf, Packer, place, unpacked
from samestep.text import printable
from samestep.text import size as in_bytes

VERSION = 2
ALIGN = 64
_MAGIC = b"samestep"
# magic, version, blobs, header bytes, file bytes; the seal: run, number, step, root of the previous commit; root digest
_PREAMBLE = struct.Struct("<8sIIQQ16sQQ32s32s")
_SEALED = _PREAMBLE.size - 32
_ENTRY = re.compile(r"(\d{6,})-step-(\d+)-[0-9a-f]{8}\.samestep")


class Entry(NamedTuple):
    """A checkpoint's name in its directory: commits are numbered, so no clock decides which is newest."""

    name: str
    number: int
    step: int


class Seal(NamedTuple):
    """Which commit a file is, whatever its name: the run's identity, the number, the step, the previous root."""

    run: bytes = bytes(16)
    number: int = 0
    step: int = 0
    previous: bytes = bytes(32)


@dataclass(frozen=True)
class Packed:
    """A state ready to be written; its buffers must not change before `write` returns."""

    header: bytes
    buffers: tuple[memoryview, ...]

    @property
    def start(self) -> int:
        return _aligned(_PREAMBLE.size + len(self.header) + 32 * len(self.buffers))

    @property
    def bulk(self) -> int:
        return sum(_aligned(len(buffer)) for buffer in self.buffers)

    @property
    def size(self) -> int:
        return self.start + self.bulk


@dataclass(frozen=True)
class Outline:
    """The content of a file's header, which its digest covers; the blobs are not read yet."""

    meta: dict[str, Any]
    size: int
    seal: Seal
    root: bytes
    blobs: tuple[Blob, ...]
    digests: tuple[bytes, ...]
    start: int
    tree: Any

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of each blob, the first place where it occurs."""
        names: dict[int, str] = {}
        unpacked(self.tree, lambda index, where: names.setdefault(index, place(where)))
        return tuple(names.values())

    def offsets(self) -> Iterator[tuple[int, int]]:
        """Where each blob begins, and how many zero bytes follow; blobs have no gap or overlap."""
        at = self.start
        for blob in self.blobs:
            end = at + _aligned(blob.nbytes)
            yield at, end - at - blob.nbytes
            at = end


Room = Callable[[Blob], tuple[memoryview, Callable[[], object]]]


def pack(state: object, meta: Mapping[str, Any] | None = None, leaf: Leaf | None = None) -> Packed:
    """Prepare a state for writing, without copies; `leaf` returns the buffer of values that are not plain."""
    packer = Packer(leaf or (lambda value, where: None))
    tree = packer.node(state)
    outline = {"meta": dict(meta or {}), "blobs": packer.blobs, "tree": tree}
    header = json.dumps(outline, separators=(",", ":"), allow_nan=False).encode("ascii")
    return Packed(header, tuple(packer.buffers))


def write(fd: int, packed: Packed, seal: Seal = Seal()) -> bytes:  # noqa: B008
    """Write a state to a new, empty file and wait until it is on the disk; returns its root digest."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, packed.size)
        except OSError as error:
            if error.errno not in (EOPNOTSUPP, EINVAL, ENOSYS):
                raise
    in_pieces = [piece for buffer in packed.buffers for piece in pieces(buffer)]
    # two threads hash while this thread writes and waits for the disk; more would take cores from training
    hashing = in_threads(2, piece_digest, in_pieces)
    with hashing if packed.bulk > PIECE else nullcontext(map(piece_digest, in_pieces)) as hashed:
        write_all(fd, packed.start, _padded(packed.buffers))
        digests = b"".join(blob_digest(hashed, len(buffer)) for buffer in packed.buffers)
    body = packed.header + digests
    counts = (len(packed.buffers), len(packed.header), packed.size)
    sealed = _PREAMBLE.pack(_MAGIC, VERSION, *counts, *seal, b"")[:_SEALED]
    root = digest(sealed + body, b"root")
    write_all(fd, 0, [memoryview((sealed + root + body).ljust(packed.start, b"\0"))])
    os.fsync(fd)
    return root


def peek(file: str | os.PathLike[str] | int, *, dir_fd: int | None = None) -> Outline:
    """Read and check only the header."""
    with _opened(file, dir_fd) as fd:
        return _outline(fd)


def verify(file: str | os.PathLike[str] | int, *, dir_fd: int | None = None) -> Outline:
    """Check every byte of a file, with a few pieces in memory at a time."""
    with _opened(file, dir_fd) as fd:
        outline = _outline(fd)
        _read_blobs(fd, outline, None)
        return outline


def read(
    file: str | os.PathLike[str] | int, room: Room | None = None, *, dir_fd: int | None = None
) -> tuple[Any, dict[str, Any]]:
    """The state and its meta, fully checked; `room` returns a blob's memory and a function for its final value."""
    with _opened(file, dir_fd) as fd:
        outline = _outline(fd)
        if outline.size > (memory := psutil.virtual_memory().total):
            raise Bad(f"takes {in_bytes(outline.size)}, more than the {in_bytes(memory)} of memory here")
        rooms = _rooms(outline.blobs, room)
        _read_blobs(fd, outline, [memory for memory, _ in rooms])
        values = [value() for _, value in rooms]
        return unpacked(outline.tree, lambda index, _: values[index]), outline.meta


def message_of(packed: Packed) -> bytes:
    """A small state as bytes; equal states give equal bytes."""
    return b"".join([len(packed.header).to_bytes(8), packed.header, *packed.buffers])


def of_message(message: bytes, room: Room | None = None) -> Any:
    """The state in such a message; `room` as in `read`."""
    at = 8 + int.from_bytes(message[:8])
    _, blobs, tree = _described(message[8:at])
    values = []
    for blob, (memory, value) in zip(blobs, _rooms(blobs, room), strict=True):
        memory[:] = message[at : at + blob.nbytes]
        values.append(value())
        at += blob.nbytes
    return unpacked(tree, lambda index, _: values[index])


def listing(directory: str | os.PathLike[str] | int) -> list[Entry]:
    """The files of a directory with names of checkpoints, newest first; other files are ignored."""
    matches = (_ENTRY.fullmatch(name) for name in os.listdir(directory))
    entries = (Entry(match[0], int(match[1]), int(match[2])) for match in matches if match)
    return sorted(entries, key=lambda entry: (entry.number, entry.step, entry.name), reverse=True)


def _outline(fd: int) -> Outline:
    size = os.fstat(fd).st_size
    preamble = read_exactly(fd, min(size, _PREAMBLE.size), 0)
    if preamble[:8] != _MAGIC or size < 16:
        raise Bad("is not a samestep checkpoint")
    if (version := int.from_bytes(preamble[8:12], "little")) != VERSION:
        raise Bad(
            f"has format {version}, and this samestep reads format {VERSION}; use the samestep that wrote it"
        )
    if size < _PREAMBLE.size:
        raise Bad(f"is torn: {size} bytes are there")
    _, _, count, length, announced, *sealing, root = _PREAMBLE.unpack(preamble)
    if announced != size:
        raise Bad(f"is torn: {size} of {announced} bytes are there")
    start = _aligned(_PREAMBLE.size + length + 32 * count)
    body = read_exactly(fd, start - _PREAMBLE.size, _PREAMBLE.size) if start <= size else b""
    sealed, gap = body[: length + 32 * count], body[length + 32 * count :]
    # from here on, the header is what samestep wrote
    if digest(preamble[:_SEALED] + sealed, b"root") != root or any(gap):
        raise Bad("has a damaged header")
    meta, blobs, tree = _described(sealed[:length])
    digests = tuple(sealed[i : i + 32] for i in range(length, len(sealed), 32))
    return Outline(meta, size, Seal(*sealing), root, blobs, digests, start, tree)


def _described(header: bytes) -> tuple[dict[str, Any], tuple[Blob, ...], Any]:
    described = json.loads(header)
    blobs = tuple(Blob(dtype, tuple(shape)) for dtype, shape in described["blobs"])
    return described["meta"], blobs, described["tree"]


def _read_blobs(fd: int, outline: Outline, memory: Sequence[memoryview] | None) -> None:

    def jobs() -> Iterator[tuple[int, int, memoryview | None]]:
        for index, (at, gap) in enumerate(outline.offsets()):
            length = outline.blobs[index].nbytes
            for i in range(0, length, PIECE):
                part = None if memory is None else memory[index][i : i + PIECE]
                yield at + i, min(PIECE, length - i), part
            if any(read_exactly(fd, gap, at + length)):
                raise Bad(f"is damaged after {printable(outline.names[index])}")

    def pull(job: tuple[int, int, memoryview | None]) -> bytes:
        at, length, view = job
        view = memoryview(bytearray(length)) if view is None else view
        read_into(fd, view, at)
        return piece_digest(view)

    with in_threads(min(4, os.cpu_count() or 1), pull, jobs()) as pulled:
        for index, blob in enumerate(outline.blobs):
            if blob_digest(pulled, blob.nbytes) != outline.digests[index]:
                raise Bad(f"has a damaged {printable(outline.names[index])}")


@contextmanager
def _opened(file: str | os.PathLike[str] | int, dir_fd: int | None) -> Iterator[int]:
    """While entered, a regular file open for reading; every error becomes a CheckpointError with its name."""
    name = "what was sent" if isinstance(file, int) else os.fspath(file)
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.dup(file) if isinstance(file, int) else os.open(file, flags, dir_fd=dir_fd)
        try:
            _check_kind(os.fstat(fd), None if dir_fd is None else os.fstat(dir_fd))
            yield fd
        finally:
            os.close(fd)
    except OSError as error:
        reason = "is a symbolic link" if error.errno == ELOOP else f"cannot be read ({error.strerror})"
        raise CheckpointError(f"{printable(name)} {reason}", path=name) from error
    except Bad as bad:
        raise CheckpointError(f"{printable(name)} {bad}", path=name) from bad.__cause__


def _check_kind(status: os.stat_result, directory: os.stat_result | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise Bad("is not a regular file")
    if directory is not None and status.st_uid not in (directory.st_uid, os.geteuid()):
        raise Bad(f"belongs to user {status.st_uid}, and its directory to user {directory.st_uid}")


def _rooms(blobs: Iterable[Blob], room: Room | None) -> list[tuple[memoryview, Callable[[], object]]]:
    return [(_room_of_bytes if blob.dtype == "bytes" or room is None else room)(blob) for blob in blobs]


def _room_of_bytes(blob: Blob) -> tuple[memoryview, Callable[[], object]]:
    memory = bytearray(blob.nbytes)
    return memoryview(memory), lambda: bytes(memory)


def _padded(buffers: Iterable[memoryview]) -> Iterator[memoryview]:
    zeros = memoryview(bytes(ALIGN))
    for buffer in buffers:
        yield from pieces(buffer)
        yield zeros[: _aligned(len(buffer)) - len(buffer)]


def _aligned(length: int) -> int:
    return -(-length // ALIGN) * ALIGN
