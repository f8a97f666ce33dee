"""A directory of commits: after a crash at any moment it holds the old state or the new one, complete.

A commit is written under a name of its own, synced, renamed, and the directory synced; only then do older
ones go, and never one of the two newest that are known to be good. Known means written or read by this object.
"""

import errno
import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from platform import node
from typing import Generic, TypeVar

import psutil

from samestep.errors import CheckpointError, UsageError
from samestep.files import BOOT_ID, make_private_directory, open_directory, read_text
from samestep.state import file as state_file
from samestep.text import size

T = TypeVar("T")
_UNFINISHED = re.compile(r"\.writing-([0-9a-f]{16})-(\d{1,9})-[0-9a-f]{8}")
_ABANDONED_SECONDS = 3600
_MARGIN = 1.1


@dataclass(frozen=True)
class Newest(Generic[T]):
    """The newest good commit, as its reader gave it, and why each newer one was refused."""

    value: T
    path: Path
    refused: tuple[str, ...]


class CheckpointDirectory:
    """The commits of one run; one process at a time writes here."""

    def __init__(self, directory: str | os.PathLike[str], keep: int = 2) -> None:
        if keep < 2:
            raise UsageError(f"keep={keep} leaves nothing to go back to when one file is damaged; use keep=2")
        self.directory = Path(directory)
        self.keep = keep
        self._made = False
        self._good: dict[str, tuple[int, int, int]] = {}

    def commit(self, packed: state_file.Packed, step: int) -> Path:
        """Write a state as the newest commit; a CheckpointError means all older ones are as they were."""
        if step < 0:
            raise UsageError(f"step {step} is negative; count the steps taken")
        try:
            # once: under a mount that went away the same path is another disk
            if not self._made:
                make_private_directory(self.directory)
                self._made = True
            # every later name is looked up in this descriptor, so no link put in its way leads out of it
            with open_directory(self.directory) as dir_fd:
                self._sweep(dir_fd)
                if _free(os.fstatvfs(dir_fd)) < packed.size * _MARGIN:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                name = self._write(dir_fd, packed, step)
                self._prune(dir_fd)
        except OSError as error:
            raise self._error(f"checkpoint skipped: {self._why(error, packed.size)}") from error
        return self.directory / name

    def newest(self, read: Callable[[str, int], T]) -> Newest[T] | None:
        """What `read(name, dir_fd)` makes of the newest commit it accepts; None where there never was one."""
        refused: list[str] = []
        try:
            with open_directory(self.directory) as dir_fd:
                for entry in state_file.listing(dir_fd):
                    try:
                        value = read(entry.name, dir_fd)
                        self._good[entry.name] = _identity(dir_fd, entry.name)
                    except (CheckpointError, OSError) as error:
                        refused.append(str(error))
                    else:
                        return Newest(value, self.directory / entry.name, tuple(refused))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._error(f"{self.directory} cannot be read ({error.strerror})") from error
        if refused:
            raise self._error(f"{self.directory} holds no good checkpoint: {'; '.join(refused)}")
        return None

    def _error(self, text: str) -> CheckpointError:
        return CheckpointError(text, path=self.directory)

    def _write(self, dir_fd: int, packed: state_file.Packed, step: int) -> str:
        number = 1 + max((entry.number for entry in state_file.listing(dir_fd)), default=0)
        nonce = secrets.token_hex(4)
        unfinished = f".writing-{_here()}-{os.getpid()}-{nonce}"
        name = f"{number:06d}-step-{step}-{nonce}.samestep"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(unfinished, flags, 0o600, dir_fd=dir_fd)
        try:
            try:
                state_file.write(fd, packed)
            finally:
                os.close(fd)
            os.rename(unfinished, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        except BaseException:
            with suppress(OSError):
                os.unlink(unfinished, dir_fd=dir_fd)
            raise
        os.fsync(dir_fd)
        self._good[name] = _identity(dir_fd, name)
        return name

    def _prune(self, dir_fd: int) -> None:
        """Remove what is older than the `keep` newest commits known to be good, and unchanged since."""
        good = 0
        for entry in state_file.listing(dir_fd):
            # a commit that stands is not undone because an old one cannot be removed; the next tries again
            with suppress(OSError):
                if good >= self.keep:
                    os.unlink(entry.name, dir_fd=dir_fd)
                    self._good.pop(entry.name, None)
                else:
                    good += self._good.get(entry.name) == _identity(dir_fd, entry.name)

    def _sweep(self, dir_fd: int) -> None:
        """Remove what dead writers left; whether one on another machine is dead, only time tells."""
        for name in os.listdir(dir_fd):
            match = _UNFINISHED.fullmatch(name)
            with suppress(OSError):
                if match and self._is_abandoned(dir_fd, name, match[1], int(match[2])):
                    os.unlink(name, dir_fd=dir_fd)

    def _is_abandoned(self, dir_fd: int, name: str, place: str, pid: int) -> bool:
        if place == _here():
            return not psutil.pid_exists(pid)
        # both times are the file server's, so no two clocks are compared
        os.utime(dir_fd)
        return os.fstat(dir_fd).st_mtime - os.stat(name, dir_fd=dir_fd).st_mtime > _ABANDONED_SECONDS

    def _why(self, error: OSError, num_bytes: int) -> str:
        if not self.directory.is_dir():
            return f"{self.directory} is gone"
        if error.errno == errno.ENOSPC:
            with suppress(OSError):
                free = _free(os.statvfs(self.directory))
                if free < num_bytes * _MARGIN:
                    return f"{size(free, of=num_bytes * _MARGIN)} free on {self.directory}"
        return f"{self.directory} cannot be written ({error.strerror})"


def _free(room: os.statvfs_result) -> float:
    # a file system that reports no blocks at all does not know
    return room.f_bavail * room.f_frsize if room.f_blocks else float("inf")


def _identity(dir_fd: int, name: str) -> tuple[int, int, int]:
    found = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    return found.st_ino, found.st_size, found.st_mtime_ns


def _here() -> str:
    """Where a process number means something: this boot of this machine, this process namespace."""
    try:
        place = f"{read_text(BOOT_ID)}{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        place = node()
    return blake2b(place.encode(), digest_size=8).hexdigest()
