"""The lease of a directory of commits: a file that names the only process that may write, and its last commits.

On one machine a lock shows whether the holder lives. Not every network file system has locks that reach other machines,
so the holder also renews the file's time every 10 s. A lease that was not renewed for 60 s has ended. The file also
names the run and its last commits, so that a substituted commit is noticed.
"""

import fcntl
import json
import math
import os
import stat
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import closing, suppress
from errno import EACCES, EAGAIN
from pathlib import Path
from platform import node
from typing import NamedTuple

import psutil

from samestep.errors import CheckpointError
from samestep.files import BOOT_ID, digest_of, here, read_text
from samestep.text import duration, printable

NAME = ".lease"
RENEW_SECONDS = 10.0
OVER_SECONDS = 60.0
_SETTLE_SECONDS = 5.0  # for a holder that is ending to release its lock
_DYING_SECONDS = 2.0  # for a killed process to disappear; then look again
_SAME_SECONDS = 2.0  # start times of the same process differ by less
_BYTES = 2048  # the size of the file


class Holder(NamedTuple):
    """A writing process: its machine, boot, process namespace and start time, and its job and attempt."""

    host: str
    boot: str
    place: str
    pid: int
    began: float
    job: str = ""
    attempt: int = 0

    def __str__(self) -> str:
        return printable(f"{f'job {self.job}, ' if self.job else ''}process {self.pid} on {self.host}")


class Record(NamedTuple):
    """The content of the file: the run's identity, its last commits with their root digests, and the holder."""

    run: bytes
    commits: tuple[tuple[int, bytes], ...] = ()
    holder: Holder | None = None


def this_process(job: str = "", attempt: int = 0) -> Holder:
    began = psutil.Process().create_time()
    return Holder(
        node()[:200], digest_of(read_text(BOOT_ID) or node()), here(), os.getpid(), began, job[:200], attempt
    )


def read(dir_fd: int) -> Record | None:
    """The record in a directory's lease; None if there is no valid lease."""
    try:
        with closing(_File(dir_fd, os.O_RDONLY)) as file:
            return file.record()
    except OSError:
        return None


class Lease:
    """The lease, held by this process until `release`; CheckpointError names another holder."""

    def __init__(
        self,
        directory: Path,
        dir_fd: int,
        me: Holder,
        say: Callable[[str], object],
        remedy: str,
        first: Callable[[], Record],
    ) -> None:
        """`say` prints a wait; `remedy` ends the sentence of a refusal; `first` returns the record of a new lease."""
        self._directory, self._me = directory, me
        self._file = _File(dir_fd, os.O_RDWR | os.O_CREAT)
        self._ended = threading.Event()
        weakref.finalize(self, _end, self._ended, self._file)
        # a forked child must not keep the lock after this process has ended
        os.register_at_fork(after_in_child=self._file.close)
        try:
            self.record = self._acquire(dir_fd, say, remedy, first)
        except BaseException:
            self._file.close()
            raise
        threading.Thread(
            target=_renew, args=(self._file, self._ended), name="samestep-lease", daemon=True
        ).start()

    def check(self, dir_fd: int) -> None:
        """Raise CheckpointError if another process took over, because this process was stopped or cut off for long."""
        current = read(dir_fd)
        if current and current.holder and not _is_same(current.holder, self._me):
            raise CheckpointError(
                f"{self._directory} was taken over by {current.holder}, so this process commits nothing more there",
                path=self._directory,
            )
        # another object of this process may have committed since
        self.record = (current or self.record)._replace(holder=self._me)
        if current is None or current.holder is None:
            # the file was removed, or the other object released it
            self._file.reopen(dir_fd)
            self._file.lock()
            self._file.write(self.record)

    def name(self, *commits: tuple[int, bytes]) -> None:
        """Write the run's last commits to the disk, before the newest file gets its name: no others are accepted."""
        is_first = not self.record.commits
        self.record = Record(self.record.run, commits, self._me)
        self._file.write(self.record)
        if not is_first:
            os.fdatasync(self._file.fd)

    def release(self, dir_fd: int) -> None:
        """Let another process write here at once."""
        with suppress(OSError, CheckpointError):
            self.check(dir_fd)
            self._file.write(self.record._replace(holder=None))
        _end(self._ended, self._file)

    def _acquire(
        self, dir_fd: int, say: Callable[[str], object], remedy: str, first: Callable[[], Record]
    ) -> Record:
        """Acquire the lease, after a wait if only time can show whether its holder lives."""
        began, last_age, longest = time.monotonic(), -math.inf, 0.0
        while True:
            lock, current, age = self._file.lock(), self._file.record(), self._file.age(dir_fd)
            holder, waited = current and current.holder, time.monotonic() - began
            # not renewed while this process waited: the age is at least that, even if the server's clock was set back
            limit = self._patience(holder, lock, max(age, waited))
            if limit <= 0:
                record = (current or first())._replace(holder=self._me)
                self._file.write(record)
                if lock or holder == self._me or self._is_confirmed(dir_fd):
                    return record
                age = math.inf  # another process wrote after this process, so it lives
            elif age < last_age or waited > max(limit, longest):
                who = str(holder) if holder else "a process that has not said its name yet"
                raise CheckpointError(
                    f"{self._directory} is held by another run ({who}, last sign of life {duration(max(age, 0.0))} "
                    f"ago, counts as ended after {OVER_SECONDS:.0f} s without one); {remedy}",
                    path=self._directory,
                )
            elif limit > _SETTLE_SECONDS and not longest:
                say(f"waiting up to {limit:.0f} s: {holder} may still write {self._directory}")
            last_age, longest = age, max(limit, longest)
            time.sleep(0.1 if limit <= _SETTLE_SECONDS else 1.0)
            self._file.reopen(dir_fd)

    def _patience(self, holder: Holder | None, lock: bool | None, age: float) -> float:
        """How many more seconds to wait for the holder's end."""
        me = self._me
        if holder and _is_same(holder, me):
            return 0
        is_here = holder is None or holder.boot == me.boot
        if holder is None or (holder.job == me.job != "" and holder.attempt < me.attempt):
            # Slurm or the launcher ended the earlier attempt before it started this one
            return _SETTLE_SECONDS if is_here and lock is False else 0
        if is_here and lock:
            # on the same kernel: we got the lock, so the holder has ended
            return 0
        if holder.place == me.place:
            is_settled = lock is None or age > OVER_SECONDS
            # a process that was killed just now may take a while to free its memory
            return _DYING_SECONDS if _is_alive(holder) else 0 if is_settled else _SETTLE_SECONDS
        return _DYING_SECONDS if is_here and lock is False else OVER_SECONDS - age

    def _is_confirmed(self, dir_fd: int) -> bool:
        """Without a lock, the last writer holds the lease: whether that is this process."""
        time.sleep(1.0)
        current = read(dir_fd)
        return current is not None and current.holder == self._me


class _File:
    """The file of the lease; it is never opened through a link."""

    def __init__(self, dir_fd: int, flags: int) -> None:
        self._flags, self.fd = flags, -1
        self.reopen(dir_fd)

    def reopen(self, dir_fd: int) -> None:
        """Open the file again: only then does a network file system show what other machines wrote."""
        self.close()
        flags = self._flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self.fd = os.open(NAME, flags, 0o600, dir_fd=dir_fd)
        status, owners = os.fstat(self.fd), (os.fstat(dir_fd).st_uid, os.geteuid())
        # a file with a second link may be another file, which a write would damage
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_uid not in owners:
            self.close()
            raise OSError(EACCES, f"{NAME} is not this user's own file")

    def lock(self) -> bool | None:
        """Whether this process has the lock now; None if the file system has no locks."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return False if error.errno in (EAGAIN, EACCES) else None
        return True

    def age(self, dir_fd: int) -> float:
        """Seconds since it was written or renewed, by the file server's clock only."""
        os.utime(dir_fd)
        return os.fstat(dir_fd).st_mtime - os.fstat(self.fd).st_mtime

    def record(self) -> Record | None:
        digest, _, text = os.pread(self.fd, _BYTES, 0).decode("ascii", "replace").strip().partition("\n")
        try:
            content = json.loads(text) if digest == digest_of(text) else {}  # it is torn, or another file
            commits = tuple((int(number), bytes.fromhex(root)) for number, root in content["commits"])
            holder = Holder(*content["holder"]) if content["holder"] else None
            return Record(bytes.fromhex(content["run"]), commits, holder)
        except (ValueError, KeyError):
            return None

    def write(self, record: Record) -> None:
        rows = [(number, root.hex()) for number, root in record.commits]
        text = json.dumps({"run": record.run.hex(), "commits": rows, "holder": record.holder})
        os.pwrite(self.fd, f"{digest_of(text)}\n{text}".ljust(_BYTES - 1).encode("ascii") + b"\n", 0)
        # closing any descriptor makes a network file system send the data
        os.close(os.dup(self.fd))

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _renew(file: _File, ended: threading.Event) -> None:
    """Renew the file's time until the lease has ended."""
    while not ended.wait(RENEW_SECONDS):
        with suppress(OSError):
            os.utime(file.fd)


def _end(ended: threading.Event, file: _File) -> None:
    ended.set()
    file.close()


def _is_same(first: Holder, second: Holder) -> bool:
    same_start = abs(first.began - second.began) < _SAME_SECONDS
    return (first.boot, first.place, first.pid) == (second.boot, second.place, second.pid) and same_start


def _is_alive(holder: Holder) -> bool:
    try:
        process = psutil.Process(holder.pid)
        is_same = abs(process.create_time() - holder.began) < _SAME_SECONDS
        return bool(is_same and process.status() != psutil.STATUS_ZOMBIE)
    except (psutil.Error, ValueError, OverflowError):
        return False
