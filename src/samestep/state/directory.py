"""A directory of commits: after a crash at any moment it holds the old state or the new state, complete.

A commit is written to a new file and synced. Then the lease names the commit, the file gets its final name, and the
directory is synced. Only then are older commits removed, but never the two newest that this object has written or read
and so knows to be good. A file's header says which commit it is: a renamed, foreign or substituted file is refused.
"""

import errno
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Generic, NamedTuple, TypeVar

from samestep.errors import CheckpointError, UsageError
from samestep.files import (
    make_private_directory,
    open_directory,
    open_regular,
    sync_names,
    unfinished_name,
)
from samestep.state import file as state_file
from samestep.state import lease
from samestep.state.lease import Record
from samestep.state.leftovers import remove_unfinished
from samestep.state.slots import Slots
from samestep.text import size

T = TypeVar("T")
_AMBIGUOUS = "holds commits of two runs, or two copies of a run, and no lease; move those of the other away"
_WRITING = ".writing-"
_MARGIN = 1.1  # the free space that a commit needs, relative to its size
_REMEDY = "give each run a directory of its own, or end that one first"


@dataclass(frozen=True)
class Newest(Generic[T]):
    """The newest good commit, as `read` returned it, and why each newer commit was refused."""

    value: T
    path: Path
    root: bytes
    refused: tuple[str, ...]
    is_memory: bool = False


Numbered = tuple[int, bytes]  # the number and root digest of a commit
Read = Callable[[str | int, int | None], T]


class Candidate(NamedTuple):
    """A file with the name of a commit, its header, and why it is not used (`why`)."""

    entry: state_file.Entry
    outline: state_file.Outline | None
    why: str = ""
    is_renamed: bool = False

    @property
    def numbered(self) -> Numbered:
        """The number in its header, or in its name if the header cannot be read, and its root digest."""
        return (self.outline.seal.number, self.outline.root) if self.outline else (self.entry.number, b"")


def examine(dir_fd: int, record: Record | None = None) -> list[Candidate]:
    """The files with names of commits, the newest first, judged by their headers and the lease."""
    files = [_peeked(dir_fd, entry) for entry in state_file.listing(dir_fd)]
    outlines = [file.outline for file in files if file.outline]
    record = record or lease.read(dir_fd) or _record_of(outlines)
    return sorted((_judged(file, record) for file in files), key=lambda file: file.numbered[0], reverse=True)


class CheckpointDirectory:
    """The commits of a run in a directory, which one process at a time writes."""

    def __init__(self, directory: str | os.PathLike[str], keep: int = 2) -> None:
        if not isinstance(keep, int) or keep < 2:
            raise UsageError(
                f"keep={keep!r} leaves nothing to go back to when one file is damaged; use keep=2"
            )
        self.directory = Path(directory)
        self._at = self.directory.absolute()  # absolute: the script may change its working directory
        self.keep = keep
        self._is_made = False
        self._good: dict[str, tuple[int, int, int]] = {}
        self._lease: lease.Lease | None = None
        self._me = lease.this_process()
        self._say: Callable[[str], object] = str
        self._remedy = _REMEDY
        # the last commit, valid while the lease names the commits in `_named`
        self._before: Numbered | None = None
        self._named: tuple[Numbered, ...] | None = None

    def hold(self, me: lease.Holder, say: Callable[[str], object], remedy: str) -> None:
        """Become the only process that writes here; CheckpointError names another process that does."""
        self._me, self._say, self._remedy = me, say, remedy
        try:
            self._make()
            with open_directory(self._at) as dir_fd:
                self._hold(dir_fd)
                remove_unfinished(dir_fd, _WRITING)
        except OSError as error:
            # no error yet: a full or read-only disk can be read, and may be writable at the first commit
            say(f"commits would fail now: {self._why(error, 0)}")

    def release(self) -> None:
        """Let another process write here."""
        if self._lease is not None:
            with suppress(OSError), open_directory(self._at) as dir_fd:
                self._lease.release(dir_fd)
            self._lease = None

    def commit(self, packed: state_file.Packed, step: int) -> Path:
        """Write a state as the newest commit; after a CheckpointError all older commits are unchanged."""
        try:
            self._make()
            # all names are looked up in this descriptor, so no link can lead out of the directory
            with open_directory(self._at) as dir_fd:
                held = self._hold(dir_fd)
                remove_unfinished(dir_fd, _WRITING)
                if _free(os.fstatvfs(dir_fd)) < packed.size * _MARGIN:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                name = self._write(dir_fd, packed, step, held)
                self._prune(dir_fd, held.record.run)
        except OSError as error:
            raise self._error(f"checkpoint skipped: {self._why(error, packed.size)}") from error
        return self.directory / name

    def remember(self, packed: state_file.Packed, step: int, slots: Slots) -> None:
        """Keep a state in memory, sealed as the successor of the newest commit."""
        with open_directory(self._at) as dir_fd:
            slots.write(packed, self._seal(dir_fd, step, self._hold(dir_fd)))

    def newest(self, read: Read[T], slots: Slots | None = None) -> Newest[T] | None:
        """The result of `read(name, dir_fd)` for the newest commit that it accepts; None if there is no commit."""
        # If `slots` hold a newer state, `read` gets its descriptor as the name.
        refused: list[str] = []
        try:
            with open_directory(self._at) as dir_fd:
                if self._lease:
                    self._lease.check(dir_fd)  # another object of this process may have committed since
                record = self._lease.record if self._lease else lease.read(dir_fd)
                commits = examine(dir_fd, record)
                if slots and self._lease and (recalled := self._recalled(read, slots, self._lease.record)):
                    self._named = ()  # makes the next commit look for its predecessor
                    return recalled
                # renamed commits come last: they are good, but better than nothing only
                for commit in (*commits, *(commit for commit in commits if commit.is_renamed)):
                    if commit.why and commit.why not in refused:
                        refused.append(commit.why)
                        continue
                    try:
                        value = self._read(dir_fd, commit, read)
                    except (CheckpointError, OSError) as error:
                        refused.append(str(error))
                        continue
                    self._before, self._named = commit.numbered, record.commits if record else ()
                    last = max(self._named, default=commit.numbered)[0]
                    if commit.numbered[0] < last and not refused:
                        refused = [f"commit {last}, the last that this run named, is not there"]
                    path = self.directory / commit.entry.name
                    return Newest(value, path, commit.numbered[1], tuple(refused))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._error(f"{self.directory} cannot be read ({error.strerror})") from error
        if refused:
            why = "; ".join(dict.fromkeys(refused))
            raise self._error(f"{self.directory} holds no good checkpoint: {why}")
        return None

    def opened(self, newest: Newest[T]) -> BinaryIO:
        """Open the file that was read; CheckpointError if another file has its name now."""
        with ExitStack() as unless_same:
            try:
                fd = os.open(newest.path, os.O_RDONLY) if newest.is_memory else open_regular(newest.path)
                file = unless_same.enter_context(os.fdopen(fd, "rb"))
                if state_file.peek(fd).root == newest.root:
                    unless_same.pop_all()
                    return file
            except (OSError, CheckpointError) as error:
                raise self._error(f"{newest.path} cannot be read any more ({error}); start again") from error
            raise self._error(f"{newest.path} was exchanged after it was read; start again")

    def _recalled(self, read: Read[T], slots: Slots, record: Record) -> Newest[T] | None:
        """The newest readable state in memory that follows the newest commit; None if there is none."""
        after = max(record.commits, default=(0, bytes(32)))
        for descriptor, outline in slots.following(record.run, after):
            with suppress(CheckpointError):
                path = Path(f"/proc/self/fd/{descriptor}")
                newest = Newest(read(descriptor, None), path, outline.root, (), is_memory=True)
                slots.keep(descriptor)
                return newest
        slots.keep(None)
        return None

    def _read(self, dir_fd: int, commit: Candidate, read: Read[T]) -> T:
        name = commit.entry.name
        before = _identity(dir_fd, name)
        value = read(name, dir_fd)
        if not commit.is_renamed:
            self._good[name] = before
        return value

    def _make(self) -> None:
        # only once: after an unmount the same path would be on another disk
        if not self._is_made:
            make_private_directory(self._at)
            self._is_made = True

    def _hold(self, dir_fd: int) -> lease.Lease:
        if self._lease is not None:
            self._lease.check(dir_fd)
            return self._lease

        def first() -> Record:
            """The record for a directory without a lease: the run of its commits, or a new run."""
            record = _record_of([commit.outline for commit in examine(dir_fd) if commit.outline])
            if record is None:
                raise self._error(f"{self.directory} {_AMBIGUOUS}")
            return record

        self._lease = lease.Lease(self.directory, dir_fd, self._me, self._say, self._remedy, first)
        return self._lease

    def _error(self, text: str) -> CheckpointError:
        return CheckpointError(text, path=self.directory)

    def _write(self, dir_fd: int, packed: state_file.Packed, step: int, held: lease.Lease) -> str:
        seal, nonce = self._seal(dir_fd, step, held), secrets.token_hex(4)
        unfinished = unfinished_name(_WRITING)
        name = f"{seal.number:06d}-step-{step}-{nonce}.samestep"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(unfinished, flags, 0o600, dir_fd=dir_fd)
        try:
            with open(fd, "wb"):
                root = state_file.write(fd, packed, seal)
            # another process may have taken over while a large file was written
            held.check(dir_fd)
            held.name(*([self._before] if self._before else []), (seal.number, root))
            os.rename(unfinished, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        except BaseException:
            with suppress(OSError):
                os.unlink(unfinished, dir_fd=dir_fd)
            raise
        self._before, self._named = (seal.number, root), held.record.commits
        sync_names(dir_fd)
        self._good[name] = _identity(dir_fd, name)
        return name

    def _seal(self, dir_fd: int, step: int, held: lease.Lease) -> state_file.Seal:
        record = held.record
        if self._named != record.commits:
            readable = [file for file in examine(dir_fd, record) if file.outline]
            usable = [file for file in readable if not file.why or file.is_renamed]
            if usable and self._named is None:  # this object has not read or written a commit yet
                text = f"{self.directory} holds commits up to step {max(file.entry.step for file in usable)}"
                self._say(
                    f"{text}, and this run began without them; call resume() before the first step to go on"
                )
            self._before, self._named = max((file.numbered for file in usable), default=None), record.commits
        number, previous = self._before or (0, bytes(32))
        newest = max((number for number, _ in record.commits), default=0)
        return state_file.Seal(record.run, max(number, newest) + 1, step, previous)

    def _prune(self, dir_fd: int, run: bytes) -> None:
        """Remove commits older than the `keep` newest good commits; of several commits of a step, the newest counts."""
        steps: set[int] = set()
        for entry in state_file.listing(dir_fd):
            # failing to remove an old file must not fail the new commit; the next commit tries again
            with suppress(OSError):
                is_good = self._good.get(entry.name) == _identity(dir_fd, entry.name)
                if len(steps) < self.keep and not (is_good and entry.step in steps):
                    steps.update([entry.step] if is_good else [])
                    continue
                outline = None if entry.name in self._good else _peeked(dir_fd, entry).outline
                if outline is None or outline.seal.run == run:
                    os.unlink(entry.name, dir_fd=dir_fd)

    def _why(self, error: OSError, num_bytes: int) -> str:
        if self._is_made and not self._at.is_dir():
            return f"{self.directory} is gone"
        if error.errno == errno.ENOSPC:
            with suppress(OSError):
                free = _free(os.statvfs(self._at))
                if free < num_bytes * _MARGIN:
                    return f"{size(free, of=num_bytes * _MARGIN)} free on {self.directory}"
        return f"{self.directory} cannot be written ({error.strerror})"


def _free(room: os.statvfs_result) -> float:
    # a file system that reports no blocks does not know its free space
    return room.f_bavail * room.f_frsize if room.f_blocks else float("inf")


def _identity(dir_fd: int, name: str) -> tuple[int, int, int]:
    status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _peeked(dir_fd: int, entry: state_file.Entry) -> Candidate:
    try:
        return Candidate(entry, state_file.peek(entry.name, dir_fd=dir_fd))
    except CheckpointError as error:
        return Candidate(entry, None, str(error))


def _record_of(outlines: Sequence[state_file.Outline]) -> Record | None:
    """A record in the place of a lost lease, from the commits; None if they contradict each other."""
    if not outlines:
        return Record(os.urandom(16))
    newest = max(outlines, key=lambda outline: outline.seal.number)
    before = [outline.root for outline in outlines if outline.seal.number < newest.seal.number]
    follows = not before or newest.seal.previous in before
    is_same_run = len({outline.seal.run for outline in outlines}) == 1
    return Record(newest.seal.run, ((newest.seal.number, newest.root),)) if follows and is_same_run else None


def _judged(commit: Candidate, record: Record | None) -> Candidate:
    """The file with the reason why it is no commit of this directory's run, if there is a reason."""
    if commit.outline is None:
        return commit
    seal, name, why, is_renamed = commit.outline.seal, commit.entry.name, "", False
    known = dict(record.commits) if record else {}
    if record is None:
        why = f"is one of several commits here: the directory {_AMBIGUOUS}"
    elif seal.run != record.run:
        why = "is a commit of another run"
    elif known.get(seal.number, commit.outline.root) != commit.outline.root:
        why = f"is not the commit {seal.number} that this run made"
    elif known and seal.number > max(known):
        why = f"is not a commit of this run: its last is commit {max(known)}"
    elif (commit.entry.number, commit.entry.step) != (seal.number, seal.step):
        why, is_renamed = f"is commit {seal.number} after step {seal.step} under another name", True
    return commit._replace(why=why and f"{name} {why}", is_renamed=is_renamed)
