"""A committed state is one file, and no byte of it is believed before it was checked; no torch, no pickle.

Workers write these files, and `samestep checkpoints` lists and verifies them where no torch is.
docs/checkpoint-format.md draws the layout.

Covered: torn, truncated, flipped, swapped, spliced and hostile files, with memory within twice the file.
Not covered: forgery. The digests carry no key, so who may write the directory may write a valid file; it is
data all the same, and nothing in it is ever run or used as a path.
"""

import json
import math
import os
import re
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EINVAL, EIO, ELOOP, ENOSYS, EOPNOTSUPP
from hashlib import blake2b
from typing import Any, NamedTuple, NoReturn

from samestep.errors import CheckpointError, UsageError
from samestep.state.tree import ITEMSIZE, Bad, Blob, Leaf, Packer, Unpacker
from samestep.text import printable

VERSION = 1
ALIGN = 64
_MAGIC = b"samestep"
_PREAMBLE = struct.Struct("<8sIIQQ32s")  # magic, version, blobs, header bytes, file bytes, root digest
_SEALED = _PREAMBLE.size - 32
_PIECE = 4 << 20
_META_LIMIT = 64 << 10
_ENTRY = re.compile(r"(\d{6,})-step-(\d+)-[0-9a-f]{8}\.samestep")


class Entry(NamedTuple):
    """A checkpoint's name in its directory: commits are numbered, so no clock decides which is newest."""

    name: str
    number: int
    step: int


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
    """What a file's own header says, sealed by its digest; the blobs are not read yet."""

    meta: dict[str, Any]
    size: int
    digest: str
    blobs: tuple[Blob, ...]
    names: tuple[str, ...]
    digests: tuple[bytes, ...]
    start: int
    tree: Any

    def offsets(self) -> Iterator[tuple[int, int]]:
        """Where each blob begins, and how many zero bytes follow it; they lie without gap or overlap."""
        at = self.start
        for blob in self.blobs:
            end = at + _aligned(blob.nbytes)
            yield at, end - at - blob.nbytes
            at = end


Room = Callable[[Blob], tuple[memoryview, Callable[[], object]]]


def pack(state: object, meta: Mapping[str, Any] | None = None, leaf: Leaf | None = None) -> Packed:
    """Lay a state out for writing, without a copy; `leaf` gives the buffer of what only its caller knows."""
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
    if len(header) > _header_limit(packed.size) or _is_rich(header, packed.size):
        raise UsageError(
            f"the state's outline takes {len(header)} of {packed.size} bytes, too much to be read safely; "
            "put long lists of numbers in a tensor"
        )
    return packed


def write(fd: int, packed: Packed) -> None:
    """Write a state to a new, empty file and wait until the disk has it."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, packed.size)
        except OSError as error:
            if error.errno not in (EOPNOTSUPP, EINVAL, ENOSYS):
                raise
    pieces = [piece for buffer in packed.buffers for piece in _pieces(buffer)]
    # two threads hash while this one writes and waits for the disk; more would take cores from the training
    with _in_threads(2, _piece_digest, pieces) as hashed:
        _write_all(fd, packed.start, _padded(packed.buffers))
        os.fsync(fd)
        digests = b"".join(_blob_digest(hashed, len(buffer)) for buffer in packed.buffers)
    body = packed.header + digests
    counts = (len(packed.buffers), len(packed.header), packed.size)
    sealed = _PREAMBLE.pack(_MAGIC, VERSION, *counts, b"")[:_SEALED]
    root = _digest(sealed + body, b"root")
    _write_all(fd, 0, [memoryview((sealed + root + body).ljust(packed.start, b"\0"))])
    os.fsync(fd)


def peek(file: str | os.PathLike[str], *, dir_fd: int | None = None) -> Outline:
    """Read and check the header alone."""
    with _opened(file, dir_fd) as fd:
        return _outline(fd)


def verify(file: str | os.PathLike[str], *, dir_fd: int | None = None) -> Outline:
    """Check every byte of a file, holding a few pieces of it at a time."""
    with _opened(file, dir_fd) as fd:
        outline = _outline(fd)
        _pull(fd, outline, None)
        return outline


def read(
    file: str | os.PathLike[str], room: Room | None = None, *, dir_fd: int | None = None
) -> tuple[Any, dict[str, Any]]:
    """The state and its meta, every byte checked; `room` gives a blob's memory and says what it becomes."""
    with _opened(file, dir_fd) as fd:
        outline = _outline(fd)
        room = room or _bytes_room
        rooms = [(_bytes_room if blob.dtype == "bytes" else room)(blob) for blob in outline.blobs]
        _pull(fd, outline, [memory for memory, _ in rooms])
        values = [value() for _, value in rooms]
        return Unpacker(outline.blobs, values).unpack(outline.tree), outline.meta


def listing(directory: str | os.PathLike[str] | int) -> list[Entry]:
    """The checkpoints of a directory by name, newest first; other names are not ours and are left alone."""
    matches = (_ENTRY.fullmatch(name) for name in os.listdir(directory))
    entries = (Entry(match[0], int(match[1]), int(match[2])) for match in matches if match)
    return sorted(entries, key=lambda entry: (entry.number, entry.step, entry.name), reverse=True)


def _outline(fd: int) -> Outline:
    size = os.fstat(fd).st_size
    preamble = _read_exactly(fd, min(size, _PREAMBLE.size), 0)
    if preamble[:8] != _MAGIC or size < _PREAMBLE.size:
        raise Bad("is not a samestep checkpoint")
    _, version, count, length, announced, root = _PREAMBLE.unpack(preamble)
    if version != VERSION:
        raise Bad(f"has format {version}, and this samestep reads format {VERSION}")
    if announced != size:
        raise Bad(f"is torn: {size} of {announced} bytes are there")
    start = _aligned(_PREAMBLE.size + length + 32 * count)
    if length > _header_limit(size) or start > size:
        raise Bad(f"announces a header of {length} bytes and {count} blobs in {size} bytes")
    body = _read_exactly(fd, start - _PREAMBLE.size, _PREAMBLE.size)
    sealed, gap = body[: length + 32 * count], body[length + 32 * count :]
    if _digest(preamble[:_SEALED] + sealed, b"root") != root or any(gap):
        raise Bad("has a damaged header")
    if _is_rich(sealed[:length], size):
        raise Bad("has a header of too many parts")
    try:
        described = json.loads(
            sealed[:length].decode("ascii"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
        meta, table, tree = described["meta"], described["blobs"], described["tree"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Bad(f"has a header that is not one ({printable(error)})") from error
    if not isinstance(meta, dict) or len(described) != 3:
        raise Bad("has a header that is not one")
    blobs = _blobs(table, count)
    unpacker = Unpacker(blobs)
    if start + sum(_aligned(blob.nbytes) for blob in blobs) != size:
        raise Bad(f"announces blobs that do not fill its {size} bytes")
    unpacker.unpack(tree)
    digests = tuple(sealed[i : i + 32] for i in range(length, len(sealed), 32))
    return Outline(meta, size, root.hex(), blobs, tuple(unpacker.names), digests, start, tree)


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
    # zeros apart, since torch computes the strides of empty tensors too
    spread: int = math.prod(max(n, 1) for n in shape)
    return spread < 2**58


def _pull(fd: int, outline: Outline, memory: Sequence[memoryview] | None) -> None:
    """Read all blobs, into `memory` or past it, and compare their digests."""
    jobs: list[tuple[int, int, memoryview | None]] = []
    for index, (at, gap) in enumerate(outline.offsets()):
        length = outline.blobs[index].nbytes
        for i in range(0, length, _PIECE):
            part = None if memory is None else memory[index][i : i + _PIECE]
            jobs.append((at + i, min(_PIECE, length - i), part))
        if any(_read_exactly(fd, gap, at + length)):
            raise Bad(f"is damaged after {printable(outline.names[index])}")

    def pull(job: tuple[int, int, memoryview | None]) -> bytes:
        at, length, view = job
        view = memoryview(bytearray(length)) if view is None else view
        _read_into(fd, view, at)
        return _piece_digest(view)

    with _in_threads(min(4, os.cpu_count() or 1), pull, jobs) as pulled:
        for blob, name, digest in zip(outline.blobs, outline.names, outline.digests, strict=True):
            if _blob_digest(pulled, blob.nbytes) != digest:
                raise Bad(f"has a damaged {printable(name)}")


@contextmanager
def _opened(file: str | os.PathLike[str], dir_fd: int | None) -> Iterator[int]:
    """A regular file open for reading; whatever is wrong with it is a CheckpointError that names it."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise Bad("is not a regular file")
            yield fd
        finally:
            os.close(fd)
    except OSError as error:
        reason = "is a symbolic link" if error.errno == ELOOP else f"cannot be read ({error.strerror})"
        raise CheckpointError(f"{printable(os.fspath(file))} {reason}", path=file) from error
    except Bad as bad:
        raise CheckpointError(f"{printable(os.fspath(file))} {bad}", path=file) from bad.__cause__


@contextmanager
def _in_threads(
    count: int, function: Callable[[Any], bytes], items: Sequence[Any]
) -> Iterator[Iterator[bytes]]:
    pool = ThreadPoolExecutor(count)
    try:
        results: Iterator[bytes] = pool.map(function, items)
    except RuntimeError:
        # while the interpreter ends no thread can start, and the last commit is worth its time
        results = map(function, items)
    try:
        yield results
    finally:
        pool.shutdown(cancel_futures=True)


def _write_all(fd: int, offset: int, views: Iterable[memoryview]) -> None:
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


def _read_into(fd: int, view: memoryview, offset: int) -> None:
    while view:
        got = os.preadv(fd, [view], offset)
        if got == 0:
            raise Bad("became shorter while it was read")
        view, offset = view[got:], offset + got


def _read_exactly(fd: int, length: int, offset: int) -> bytes:
    data = bytearray(length)
    _read_into(fd, memoryview(data), offset)
    return bytes(data)


def _bytes_room(blob: Blob) -> tuple[memoryview, Callable[[], object]]:
    memory = bytearray(blob.nbytes)
    return memoryview(memory), lambda: bytes(memory)


def _padded(buffers: Iterable[memoryview]) -> Iterator[memoryview]:
    zeros = memoryview(bytes(ALIGN))
    for buffer in buffers:
        yield from _pieces(buffer)
        yield zeros[: _aligned(len(buffer)) - len(buffer)]


def _pieces(buffer: memoryview) -> list[memoryview]:
    return [buffer[i : i + _PIECE] for i in range(0, len(buffer), _PIECE)]


def _aligned(length: int) -> int:
    return -(-length // ALIGN) * ALIGN


def _header_limit(size: int) -> int:
    """A parsed header takes up to 30 times its text, so it may be a small part of the file only."""
    return max(1 << 20, size // 32)


def _is_rich(header: bytes, size: int) -> bool:
    """Whether its lists and objects, 64 bytes and more for 2 bytes of text, would take too much memory."""
    return header.count(b"[") + header.count(b"{") > max(1 << 16, size >> 10)


def _digest(data: bytes | memoryview, level: bytes) -> bytes:
    return blake2b(data, digest_size=32, person=level).digest()


def _piece_digest(piece: memoryview) -> bytes:
    return _digest(piece, b"piece")


def _blob_digest(pieces: Iterator[bytes], nbytes: int) -> bytes:
    return _digest(b"".join(next(pieces) for _ in range(-(-nbytes // _PIECE))), b"blob")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number here")
