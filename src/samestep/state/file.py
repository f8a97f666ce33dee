"""The file of a committed state: every byte is checked before it is used; no torch, no pickle.

Workers write these files, and `samestep checkpoints` lists and verifies them without torch.
docs/checkpoint-format.md draws the layout.

Covered: torn, truncated, flipped, swapped, spliced, sparse and hostile files; reading takes at most twice the memory
of the bytes on the disk. Not covered: forgery. The digests have no key, so a user who may write the directory may
write a valid file. Still, nothing in it is ever run or used as a path.
"""

import json
import math
import os
import re
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from errno import EINVAL, ELOOP, ENOSYS, EOPNOTSUPP
from typing import Any, NamedTuple, NoReturn

import psutil

from samestep.errors import CheckpointError, UsageError
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
from samestep.state.tree import ITEMSIZE, Bad, Blob, Leaf, Packer, Unpacker
from samestep.text import printable
from samestep.text import size as in_bytes

VERSION = 2
ALIGN = 64
_MAGIC = b"samestep"
# magic, version, blobs, header bytes, file bytes; the seal: run, number, step, root of the previous commit; root digest
_PREAMBLE = struct.Struct("<8sIIQQ16sQQ32s32s")
_SEALED = _PREAMBLE.size - 32
_LARGEST_COUNT = 1 << 62  # of commits and steps
_SMALL = 64 << 20  # smaller files are not checked for holes
_META_LIMIT = 64 << 10  # bytes of JSON
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
    names: tuple[str, ...]
    digests: tuple[bytes, ...]
    start: int
    tree: Any

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
    try:
        described = json.dumps(dict(meta or {}), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"meta is not plain JSON ({error}); give str, finite numbers, bool, None") from error
    if len(described) > _META_LIMIT:
        raise UsageError(f"meta takes {len(described)} bytes, above {_META_LIMIT}; put it in the state")
    for blob in packer.blobs:
        if not _is_shape(blob.shape, blob.dtype):
            raise UsageError(f"a tensor has the shape {blob.shape}, which no file holds; leave it out")
    outline = {"meta": dict(meta or {}), "blobs": packer.blobs, "tree": tree}
    header = json.dumps(outline, separators=(",", ":"), allow_nan=False).encode("ascii")
    packed = Packed(header, tuple(packer.buffers))
    if packed.start > _header_limit(packed.size, packed.size) or _is_rich(header, packed.size, packed.size):
        raise UsageError(
            f"the state's outline takes {len(header)} of {packed.size} bytes, too much to be read safely; "
            "put long lists of numbers in a tensor"
        )
    return packed


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
        _check_size(fd, outline)
        rooms = _rooms(outline.blobs, room)
        _read_blobs(fd, outline, [memory for memory, _ in rooms])
        values = [value() for _, value in rooms]
        return Unpacker(outline.blobs, values).unpack(outline.tree), outline.meta


def message_of(packed: Packed) -> bytes:
    """A small state as bytes; equal states give equal bytes."""
    return b"".join([len(packed.header).to_bytes(8), packed.header, *packed.buffers])


def of_message(message: bytes, room: Room | None = None) -> Any:
    """The state in such a message; `room` as in `read`."""
    at = 8 + int.from_bytes(message[:8])
    _, table, tree = _described(message[8:at])
    blobs, values = _blobs(table, len(table)), []
    for blob, (memory, value) in zip(blobs, _rooms(blobs, room), strict=True):
        memory[:] = message[at : at + blob.nbytes]
        values.append(value())
        at += blob.nbytes
    return Unpacker(blobs, values).unpack(tree)


def listing(directory: str | os.PathLike[str] | int) -> list[Entry]:
    """The files of a directory with names of checkpoints, newest first; other files are ignored."""
    matches = (_ENTRY.fullmatch(name) for name in os.listdir(directory))
    entries = (Entry(match[0], int(match[1]), int(match[2])) for match in matches if match)
    return sorted(entries, key=lambda entry: (entry.number, entry.step, entry.name), reverse=True)


def _outline(fd: int) -> Outline:
    size, on_disk = _sizes(fd)
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
    seal = Seal(*sealing)
    if announced != size:
        raise Bad(f"is torn: {size} of {announced} bytes are there")
    start = _aligned(_PREAMBLE.size + length + 32 * count)
    if start > min(size, _header_limit(size, on_disk)):
        raise Bad(f"announces a header of {length} bytes and {count} blobs in {on_disk} bytes on the disk")
    body = read_exactly(fd, start - _PREAMBLE.size, _PREAMBLE.size)
    sealed, gap = body[: length + 32 * count], body[length + 32 * count :]
    if digest(preamble[:_SEALED] + sealed, b"root") != root or any(gap):
        raise Bad("has a damaged header")
    if max(seal.number, seal.step) > _LARGEST_COUNT:
        raise Bad(f"announces commit {seal.number} after step {seal.step}")
    if _is_rich(sealed[:length], size, on_disk):
        raise Bad("has a header of too many parts")
    meta, table, tree = _described(sealed[:length])
    blobs = _blobs(table, count)
    unpacker = Unpacker(blobs)
    if start + sum(_aligned(blob.nbytes) for blob in blobs) != size:
        raise Bad(f"announces blobs that do not fill its {size} bytes")
    unpacker.unpack(tree)
    digests = tuple(sealed[i : i + 32] for i in range(length, len(sealed), 32))
    return Outline(meta, size, seal, root, blobs, tuple(unpacker.names), digests, start, tree)


def _described(header: bytes) -> tuple[dict[str, Any], Any, Any]:
    """The header's meta, table of blobs and tree."""
    try:
        described = json.loads(header.decode("ascii"), object_pairs_hook=_unique, parse_constant=_no_constant)
        meta, table, tree = described["meta"], described["blobs"], described["tree"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Bad(f"has a header that is not one ({printable(error)})") from error
    if not isinstance(meta, dict) or len(described) != 3:
        raise Bad("has a header that is not one")
    return meta, table, tree


def _sizes(fd: int) -> tuple[int, int]:
    """A file's length, and how many bytes of it are on the disk; all of them if that is not known."""
    status = os.fstat(fd)
    blocks = getattr(status, "st_blocks", 0) * 512
    return status.st_size, min(status.st_size, blocks or status.st_size)


def _check_size(fd: int, outline: Outline) -> None:
    """Check before memory is allocated that a file really has its size: a file of holes costs nothing to make."""
    size, on_disk = _sizes(fd)
    if size > (memory := psutil.virtual_memory().total):
        raise Bad(f"takes {in_bytes(size)}, more than the {in_bytes(memory)} of memory here")
    # only a file with holes, or a compressed one, is read twice
    if size > _SMALL and 2 * on_disk < size:
        _read_blobs(fd, outline, None)


def _blobs(table: Any, count: int) -> tuple[Blob, ...]:
    if not isinstance(table, list) or len(table) != count:
        raise Bad(f"does not describe its {count} blobs")
    blobs = []
    for row in table:
        match row:
            case [str(dtype), list(shape)] if dtype in ITEMSIZE and _is_shape(shape, dtype):
                blobs.append(Blob(dtype, tuple(shape)))
            case _:
                raise Bad(f"describes blob {len(blobs)} as {printable(row)}")
    return tuple(blobs)


def _is_shape(shape: Sequence[Any], dtype: str) -> bool:
    if not all(type(n) is int and n >= 0 for n in shape):
        return False
    if len(shape) > 64 or (dtype == "bytes" and len(shape) != 1):
        return False
    # zeros count as 1: torch computes strides of empty tensors too
    spread: int = math.prod(max(n, 1) for n in shape)
    return spread < 2**58


def _read_blobs(fd: int, outline: Outline, memory: Sequence[memoryview] | None) -> None:
    """Read all blobs, into `memory` if it is given, and check their digests."""

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
        for blob, name, sealed in zip(outline.blobs, outline.names, outline.digests, strict=True):
            if blob_digest(pulled, blob.nbytes) != sealed:
                raise Bad(f"has a damaged {printable(name)}")


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


def _header_limit(size: int, on_disk: int) -> int:
    """The largest header: parsed, it takes up to 30 times its text, so it may only be a small part of the file."""
    return min(max(1 << 20, min(size // 32, on_disk // 2)), 1 << 28)


def _is_rich(header: bytes, size: int, on_disk: int) -> bool:
    """Whether its lists and objects would take too much memory: 64 bytes and more for 2 bytes of text."""
    return header.count(b"[") + header.count(b"{") > max(1 << 16, min(size >> 10, on_disk >> 6))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name stands twice")
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number here")
