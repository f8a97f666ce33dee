"""Attacks on a directory of checkpoints: only what the run committed is resumed from, and no file costs memory."""

import os
import shutil
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from samestep.errors import CheckpointError
from samestep.files import open_directory
from samestep.state import file, lease
from samestep.state.directory import CheckpointDirectory, examine

TERABYTE = 1 << 40


def packed(whose, step):
    return file.pack({"whose": whose, "step": step, "bulk": bytes(300)})


def read(name, dir_fd):
    state = file.read(name, dir_fd=dir_fd)[0]
    return state["whose"], state["step"]


def commit(directory, whose, *steps):
    commits = CheckpointDirectory(directory, keep=9)
    commits.newest(read)
    paths = [commits.commit(packed(whose, step), step) for step in steps]
    commits.release()
    return paths


class Scene:
    """A run's commits after steps 10, 20 and 30, another run's, and those of a copy of this run that went on alone."""

    def __init__(self, home: Path) -> None:
        self.ours, self.others, self.copy = home / "ours", home / "others", home / "copy"
        self.commits = commit(self.ours, "ours", 10, 20)
        shutil.copytree(self.ours, self.copy)
        self.commits += commit(self.ours, "ours", 30)
        self.foreign = commit(self.others, "others", *range(10, 60, 10))
        self.diverged = sorted(self.copy.glob("*.samestep"))[:2] + commit(self.copy, "copy", 30, 40)
        with open_directory(self.ours) as dir_fd:
            self.newest = examine(dir_fd)[0].outline

    def forge(self, number=4, step=40, **seal):
        """A well-formed file of the forger's, with a seal that is wrong in one thing."""
        sealed = file.Seal(self.newest.seal.run, number, step, self.newest.root)._replace(**seal)
        name = f"{sealed.number:06d}-step-{sealed.step}-0badf00d.samestep"
        with (self.ours / name).open("xb") as opened:
            file.write(opened.fileno(), packed("forged", step), sealed)
        return self.ours / name

    def swap(self, path, other):
        between = self.ours / "between"
        path.rename(between)
        other.rename(path)
        between.rename(other)

    def put(self, path, name=""):
        shutil.copy(path, self.ours / (name or path.name))

    def lease(self, change):
        with open_directory(self.ours) as dir_fd:
            opened = lease._File(dir_fd, os.O_RDWR)
            opened.write(change(opened.record()))
            opened.close()

    def preamble(
        self, *, version=2, blobs=0, header=100, size=TERABYTE, name="000004-step-40-0badf00d.samestep"
    ):
        """A file of holes with a beginning that is well formed."""
        seal = (self.newest.seal.run, 4, 40, self.newest.root)
        path = self.ours / name
        with path.open("xb") as opened:
            opened.write(file._PREAMBLE.pack(b"samestep", version, blobs, header, size, *seal, bytes(32)))
            opened.truncate(size)
        return path


def no_lease(scene):
    (scene.ours / lease.NAME).unlink()


def older_first(scene):
    scene.commits[0].rename(scene.ours / "000009-step-90-0badf00d.samestep")


def bind(path):
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(os.path.relpath(path))


NAME = "000004-step-40-0badf00d.samestep"
ATTACKS = {
    "an old commit under the newest name": lambda s: s.put(s.commits[0], NAME),
    "the oldest commit renamed to be the newest": older_first,
    "the newest renamed to be the oldest": lambda s: s.commits[2].rename(s.ours / "000000-step-0-0badf00d.samestep"),
    "the two newest swapped": lambda s: s.swap(s.commits[1], s.commits[2]),
    "the newest and the oldest swapped": lambda s: s.swap(s.commits[0], s.commits[2]),
    "the newest overwritten by the oldest": lambda s: shutil.copy(s.commits[0], s.commits[2]),
    "all three names exchanged": lambda s: (s.swap(*s.commits[:2]), s.swap(*s.commits[1:])),
    "the newest under another step": lambda s: s.commits[2].rename(s.ours / "000003-step-31-0badf00d.samestep"),
    "the newest removed": lambda s: s.commits[2].unlink(),
    "another run's newer commit": lambda s: s.put(s.foreign[4]),
    "another run's next commit": lambda s: s.put(s.foreign[3]),
    "another run's commit under our name": lambda s: shutil.copy(s.foreign[2], s.commits[2]),
    "all of another run's commits": lambda s: [s.put(path) for path in s.foreign],
    "another run's commits in place of ours": lambda s: [*map(shutil.copy, s.foreign, s.commits)],
    "a copy's next commit": lambda s: s.put(s.diverged[3]),
    "a copy's commit of the same number": lambda s: s.put(s.diverged[2]),
    "a copy's commit in place of the newest": lambda s: shutil.copy(s.diverged[2], s.commits[2]),
    "a copy's two newest": lambda s: (s.put(s.diverged[2]), s.put(s.diverged[3])),
    "a copy's two newest and ours removed": lambda s: ([s.put(p) for p in s.diverged[2:]], s.commits[2].unlink()),
    "a forged commit that follows the newest": lambda s: s.forge(),
    "a forged commit that follows nothing": lambda s: s.forge(previous=bytes(32)),
    "a forged commit that follows itself": lambda s: s.forge(previous=b"x" * 32),
    "a forged commit that follows the oldest": lambda s: s.forge(previous=file.peek(s.commits[0]).root),
    "a forged commit far ahead": lambda s: s.forge(number=10**6, previous=bytes(32)),
    "a forged commit of the largest number": lambda s: s.forge(number=2**64 - 1),
    "a forged commit of the largest step": lambda s: s.forge(step=2**64 - 1),
    "a forged commit number 0": lambda s: s.forge(number=0, run=bytes(16)),
    "a forged commit of no run": lambda s: s.forge(run=bytes(16)),
    "a forged commit in place of the newest": lambda s: s.forge(number=3, step=30),
    "a forged commit in place of the oldest": lambda s: (s.forge(number=1, step=10), s.commits[0].unlink()),
    "a name of 200 digits": lambda s: s.put(s.commits[0], "9" * 200 + "-step-1-0badf00d.samestep"),
    "a name with a huge step": lambda s: s.put(s.commits[0], "000004-step-" + "9" * 200 + "-0badf00d.samestep"),
    "a link to another run's commit": lambda s: (s.ours / NAME).symlink_to(s.foreign[3]),
    "a link to itself": lambda s: (s.ours / NAME).symlink_to(NAME),
    "a hard link to another run's commit": lambda s: (s.ours / NAME).hardlink_to(s.foreign[3]),
    "a pipe": lambda s: os.mkfifo(s.ours / NAME),
    "a socket": lambda s: bind(s.ours / NAME),
    "a directory": lambda s: (s.ours / NAME).mkdir(),
    "an empty file": lambda s: (s.ours / NAME).touch(),
    "a file of format 1": lambda s: s.preamble(version=1, size=4096),
    "a file of format 3": lambda s: s.preamble(version=3, size=4096),
    "a terabyte of holes": lambda s: s.preamble(),
    "a header of 2**63 bytes": lambda s: s.preamble(header=2**63),
    "a lease of another run": lambda s: shutil.copy(s.others / lease.NAME, s.ours / lease.NAME),
    "no lease, and another run's newer commit": lambda s: (no_lease(s), s.put(s.foreign[4])),
    "no lease, and a copy's next commit": lambda s: (no_lease(s), s.put(s.diverged[3])),
    "no lease, and the newest under another name": lambda s: (no_lease(s), older_first(s)),
    "no lease, and an old commit under the newest name": lambda s: (no_lease(s), s.put(s.commits[0], NAME)),
    "no lease, and the two newest swapped": lambda s: (no_lease(s), s.swap(s.commits[1], s.commits[2])),
    "a lease without a run": lambda s: s.lease(lambda record: record._replace(run=b"")),
    "a lease that is a list": lambda s: (s.ours / lease.NAME).write_text("[]"),
    "a lease of a megabyte of brackets": lambda s: (s.ours / lease.NAME).write_text("[" * 1_000_000),
    "a pipe in place of the lease": lambda s: (no_lease(s), os.mkfifo(s.ours / lease.NAME)),
}  # fmt: skip


# the newest is no longer there, or under a name that is not its own: then an older one may be used
WITHOUT_NEWEST = (
    "removed",
    "in place of",
    "overwritten",
    "our name",
    "swapped",
    "exchanged",
    "renamed",
    "another step",
)


@pytest.mark.parametrize("name", ATTACKS)
def test_only_this_runs_own_commits_are_resumed_from(attempt, tmp_path, monkeypatch, name):
    attempt(name)
    monkeypatch.chdir(tmp_path)
    scene = Scene(tmp_path)
    ATTACKS[name](scene)
    began = time.monotonic()
    refusal, found = "", None
    try:
        found = CheckpointDirectory(scene.ours).newest(read)
    except CheckpointError as error:
        refusal = str(error)
    if found is None:
        assert refusal.startswith(f"{scene.ours} holds no good checkpoint: ")
        assert "lease" in name or name == "another run's commits in place of ours"
    else:
        whose, step = found.value
        assert whose == "ours"
        assert step == 30 or any(words in name for words in WITHOUT_NEWEST)
    assert time.monotonic() - began < 5
    # and the run that goes on from there commits, and finds its commit again
    commits = CheckpointDirectory(scene.ours, keep=9)
    try:
        commits.newest(read)
        commits.commit(packed("ours", 50), 50)
    except CheckpointError as error:
        refusal = str(error)
    else:
        assert CheckpointDirectory(scene.ours).newest(read).value == ("ours", 50)
    assert not refusal or "lease" in name or found is None
    commits.release()
    assert all(path.exists() for path in scene.foreign), "another run's commits are not ours to remove"


@pytest.mark.parametrize("sparse", [{}, {"header": 2**63}], ids=str)
def test_a_terabyte_of_holes_is_refused_by_its_header(attempt, tmp_path, sparse):
    attempt(f"a terabyte of holes with {sparse}")
    path = Scene(tmp_path).preamble(**sparse)
    for look in (file.peek, file.verify, file.read):
        with pytest.raises(CheckpointError, match="has a damaged header"):
            look(path)


def test_a_file_larger_than_memory_is_refused_before_memory_is_taken(tmp_path, monkeypatch):
    path = commit(tmp_path, "ours", 1)[0]
    monkeypatch.setattr(file.psutil, "virtual_memory", lambda: SimpleNamespace(total=100))
    with pytest.raises(CheckpointError, match=r"takes 0\.\d kB, more than the 0\.1 kB of memory here"):
        file.read(path)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_that_another_user_put_there_is_refused(attempt, tmp_path):
    attempt("another user's file in a directory that is open to all")
    scene = Scene(tmp_path)
    os.chown(scene.forge(), 65534, 65534)
    found = CheckpointDirectory(scene.ours).newest(read)
    assert found.value == ("ours", 30)
    assert found.refused == (f"{NAME} belongs to user 65534, and its directory to user 0",)
    attempt("another user's lease")
    os.chown(scene.ours / lease.NAME, 65534, 65534)
    with pytest.raises(CheckpointError, match="cannot be written"):
        CheckpointDirectory(scene.ours).commit(packed("ours", 40), 40)
