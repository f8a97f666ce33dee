"""Safe use of files: atomic replacement, private directories, and no links or devices in the place of files."""

import mmap
import os
import secrets
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import EFBIG, EINVAL, ENOSYS, EOPNOTSUPP
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

_MOST_OF_NAME = 200
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def write_atomically(path: Path, write: bytes | Callable[[BinaryIO], object], mode: int = 0o666) -> None:
    """Replace a file by these bytes, or by what `write` writes; after an error the old file is unchanged."""
    handled = sys.exception()
    with suppress(FileNotFoundError):
        mode_there = path.lstat().st_mode
        if not (stat.S_ISREG(mode_there) or stat.S_ISLNK(mode_there)):
            raise OSError(EINVAL, "it is not a regular file", str(path))
    new = path.with_name(unfinished_name(unfinished_prefix(path)))
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(descriptor, "wb") as file:
            file.write(write) if isinstance(write, bytes) else write(file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException as error:
        with suppress(OSError):
            new.unlink()
        cause = error.__context__
        # torch hides the OSError of a full disk behind a RuntimeError about positions
        if isinstance(error, RuntimeError) and isinstance(cause, OSError) and cause is not handled:
            raise cause from None
        raise
    sync_directory(path.parent)


def unfinished_name(prefix: str) -> str:
    """A name for a file that this process begins to write; state/leftovers.py finds it after a crash."""
    return f"{prefix}{here()}-{os.getpid()}-{secrets.token_hex(4)}"


def unfinished_prefix(path: Path) -> str:
    """How the names begin of files that are to replace this one."""
    # cut: the longest name of a file has 255 bytes
    return f".{os.fsdecode(os.fsencode(path.name)[:_MOST_OF_NAME])}."


def here() -> str:
    """The identity of the space of process numbers: this boot of this machine, and this process namespace."""
    try:
        place = f"{read_text(BOOT_ID)}{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        place = os.uname().nodename
    return digest_of(place)


def digest_of(text: str) -> str:
    return blake2b(text.encode(), digest_size=8).hexdigest()


def make_private_directory(directory: Path) -> None:
    """Make a directory and its missing parents, for their owner alone, and wait until they are on the disk."""
    if not directory.is_dir():
        make_private_directory(directory.parent)
        # another process may have made it by now; if it is a file, its next use fails
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        sync_directory(directory.parent)


def is_own_directory(directory: Path) -> bool:
    """Whether this is a directory, not a link, of this user or of its parent's owner, who could replace it anyway."""
    try:
        facts, parent = directory.lstat(), directory.parent.stat()
    except OSError:
        return False
    # The parent's owner is accepted because some network file systems show another owner for all files of this user.
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid in (os.geteuid(), parent.st_uid)


def unnamed_file(data: bytes = b"", name: str = "samestep") -> BinaryIO:
    """A file without a name, only reachable by its descriptor: in memory on Linux, elsewhere in /tmp."""
    if hasattr(os, "memfd_create"):
        file: BinaryIO = os.fdopen(os.memfd_create(name), "r+b", buffering=0)
    else:
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
    file.seek(0)
    return file


def sync_directory(directory: Path) -> None:
    with open_directory(directory) as fd:
        sync_names(fd)


def sync_names(dir_fd: int) -> None:
    """Wait until the names in an open directory are on the disk, if its file system supports that."""
    try:
        os.fsync(dir_fd)
    except OSError as error:
        if error.errno not in (EINVAL, ENOSYS, EOPNOTSUPP):
            raise


@contextmanager
def open_directory(directory: Path) -> Iterator[int]:
    """While entered, a descriptor of a directory: names are looked up in it even if its path changes."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def open_regular(path: Path, depth: int = 1, way: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file in a directory that others may write: no pipe, no device, no link."""
    # The last `depth` parts of the path must not be links. `way` is how os.open opens it. Raises OSError.
    *folders, name = path.parts[-depth:]
    fd = os.open(path.parents[depth - 1], os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        for part in folders:
            outer, fd = fd, os.open(part, os.O_RDONLY | os.O_DIRECTORY | flags, dir_fd=fd)
            os.close(outer)
        # checked before the open: opening a device may have an effect
        if stat.S_ISREG(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            opened = os.open(name, way | flags, dir_fd=fd)
            if stat.S_ISREG(os.fstat(opened).st_mode):
                return opened
            os.close(opened)
        raise OSError(EINVAL, "not a regular file", str(path))
    finally:
        os.close(fd)


def in_memory(path: Path, begin: bytes, size: int) -> mmap.mmap:
    """Map a new file of this size, which begins with `begin`, into memory: other processes may read it any time."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        # Write it instead of only setting its size: in a full file system a hole causes SIGBUS at the first use.
        os.pwrite(descriptor, begin.ljust(size, b"\0"), 0)
        os.ftruncate(descriptor, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def read_regular(path: Path, limit: int, depth: int = 1) -> bytes:
    """The content of a file that `open_regular` accepts; OSError if it is longer than `limit`."""
    with open(open_regular(path, depth), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(EFBIG, os.strerror(EFBIG), str(path))
    return data


def read_text(path: Path) -> str:
    """The text of a system file; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
