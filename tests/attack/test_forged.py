"""Forged notes, leases, key files and commits in memory: each is refused with a sentence."""

import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import samestep
from samestep.errors import CheckpointError, PlacementError
from samestep.files import here, open_directory, write_atomically
from samestep.rendezvous import note
from samestep.rendezvous.member import Member
from samestep.rundir import SLOTS
from samestep.state import file, lease
from samestep.state.directory import CheckpointDirectory, examine
from samestep.state.slots import Slots, slots_of
from samestep.train.checkpoint import capture

PRECIOUS = "what was there before"
KEY = bytes(range(32))
AS_ROOT = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user"),
]

# Notes, and files that are written over


def put_text(path):
    path.write_text(PRECIOUS)


def put_link(path):
    path.with_name("precious").write_text(PRECIOUS)
    path.symlink_to("precious")


KINDS = {
    "text": put_text,
    "a link": put_link,
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a pipe": os.mkfifo,
    "a directory": Path.mkdir,
    "a list": lambda path: path.write_text("[1, 2]"),
    "another object": lambda path: path.write_text('{"weights": [1]}'),
    "an empty file": Path.touch,
    "no places": lambda path: path.write_text('{"places": []}'),
    "a socket": lambda path: socket.socket(socket.AF_UNIX).bind(os.path.relpath(path)),
    "a device": lambda path: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3)),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_a_note_takes_the_place_of_nothing_but_a_note(attempt, tmp_path, monkeypatch, kind):
    attempt(f"--rendezvous file:// on {kind}")
    if kind == "a device" and os.geteuid():
        pytest.skip("only root makes devices")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "note"
    KINDS[kind](path)
    before = path.lstat()
    me = Member("r", 0, 2, KEY)
    with pytest.raises(PlacementError, match="exists and is not from samestep"), note.posted(path, [], me):
        pass
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert not list(tmp_path.glob(".note*"))


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("kind", ["a pipe", "a directory", "a socket", "a device"])
def test_a_file_takes_the_place_of_nothing_but_a_file(attempt, tmp_path, monkeypatch, kind):
    attempt(f"samestep.save to {kind}")
    if kind == "a device" and os.geteuid():
        pytest.skip("only root makes devices")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.pt"
    KINDS[kind](path)
    before = path.lstat()
    with pytest.raises(CheckpointError, match=r"model\.pt cannot be written"):
        samestep.save(path, {"w": torch.ones(1)})
    with pytest.raises(OSError, match="regular file"):
        write_atomically(path, b"x")
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)


@pytest.mark.parametrize("written", [
    '{"places": [["192.0.2.1", 1]' + ', ["192.0.2.1", 1]' * 2000 + "]}",
    '{"places": {"0": ["127.0.0.1", 1]}}', '{"places": [["127.0.0.1", 1e400]]}', '{"places": [["127.0.0.1", NaN]]}',
    '{"places": [["127.0.0.1", ' + "9" * 5000 + "]]}", '{"places": "abc", "places": 3}', '{"places": [[null, null]]}',
    "\ufeff{}", "\x00" * 5000, '{"places": [["' + "x" * 100_000 + '", 1]]}',
])  # fmt: skip
def test_a_hostile_note_leads_to_few_places_or_none(attempt, tmp_path, written):
    attempt(f"a note that says {written:.40}")
    path = tmp_path / "note"
    path.write_text(written)
    assert len(note.read(path)) <= 64


# Leases


def other(**changes):
    facts = {"host": "elsewhere", "boot": "0" * 16, "place": "1" * 16, "pid": 5}
    return lease.this_process()._replace(**(facts | changes))


HOLDERS = {
    "a time of the next century": ({}, 4e9),
    "a time before all machines": ({}, -1e9),
    "the time 0": ({}, 0),
    "a pid below 0": ({"pid": -1, "place": here()}, None),
    "a huge pid": ({"pid": 2**70, "place": here()}, None),
    "pid 0": ({"pid": 0, "place": here()}, None),
    "a start that is no number": ({"began": float("nan"), "place": here()}, None),
    "an endless start": ({"began": float("inf"), "place": here()}, None),
    "this process before it began": ({"pid": os.getpid(), "place": here(), "began": 1.0}, None),
    "escapes for a host": ({"host": "\x1b[31m\n"}, None),
    "a job of escapes": ({"job": "\x1b]0;x\x07", "attempt": 2**70}, None),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_forged_holder_ends_in_a_sentence_or_gives_way_in_time(attempt, tmp_path, monkeypatch, name):
    attempt(f"a lease with {name}")
    for constant in ("OVER_SECONDS", "_SETTLE_SECONDS"):
        monkeypatch.setattr(lease, constant, 1.5)
    changes, when = HOLDERS[name]
    directory = tmp_path / "ck"
    commits = CheckpointDirectory(directory)
    commits.commit(file.pack({"step": 1}), 1)
    commits.release()
    with open_directory(directory) as dir_fd:
        opened = lease._File(dir_fd, os.O_RDWR)
        opened.write(opened.record()._replace(holder=other(**changes)))
        opened.close()
    if when is not None:
        os.utime(directory / lease.NAME, (when, when))
    said, began = [], time.monotonic()
    again = CheckpointDirectory(directory)
    try:
        again.hold(lease.this_process(), said.append, "end it")
    except CheckpointError as error:
        said.append(str(error))
    else:
        again.commit(file.pack({"step": 2}), 2)
    again.release()
    assert time.monotonic() - began < 20
    assert "\x1b" not in "".join(said)
    assert "\n" not in "".join(said)


# Commits in memory


@contextmanager
def slots_with(*states):
    """Two files in memory as a launcher keeps them, with these states and seals."""
    descriptors = [os.memfd_create(SLOTS[0]) for _ in SLOTS]
    try:
        for descriptor, (step, seal) in zip(descriptors, states, strict=False):
            file.write(descriptor, capture.pack({"step": step}, {}), seal)
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def forged_seals(newest):
    right = file.Seal(newest.seal.run, newest.seal.number + 1, 9, newest.root)
    return {
        "another run": right._replace(run=b"x" * 16),
        "no run": right._replace(run=bytes(16)),
        "the same number": right._replace(number=newest.seal.number),
        "an older number": right._replace(number=1, previous=bytes(32)),
        "a number far ahead": right._replace(number=10**6),
        "the largest number": right._replace(number=2**64 - 1),
        "nothing before it": right._replace(previous=bytes(32)),
        "itself before it": right._replace(previous=b"y" * 32),
    }


@pytest.mark.parametrize("name", ["another run", "no run", "the same number", "an older number",
                                  "a number far ahead", "the largest number", "nothing before it",
                                  "itself before it"])  # fmt: skip
def test_a_forged_state_in_memory_is_not_gone_on_from(attempt, tmp_path, name):
    attempt(f"a state in memory with {name}")
    directory = CheckpointDirectory(tmp_path / "ck")
    directory.hold(lease.this_process(), str, "end it")
    for step in (1, 2):
        directory.commit(capture.pack({"step": step}, {}), step)
    with open_directory(tmp_path / "ck") as dir_fd:
        newest = examine(dir_fd)[0].outline
    with slots_with((9, forged_seals(newest)[name])) as descriptors:
        found = directory.newest(
            lambda name, dir_fd: capture.read(name, dir_fd=dir_fd)[0]["step"], Slots(descriptors)
        )
        assert (found.value, found.is_memory) == (2, False)
    directory.release()


@pytest.mark.parametrize("pair", [("0", "1"), ("-1", "5"), ("x", "y"), ("99999", "99998"), ("9" * 30, "3"), ("", ""),
                                  ("\u0663", "\u0664"), ("1e3", "4"), (" 3", "4")])  # fmt: skip
def test_variables_that_name_other_descriptors_are_no_memory(attempt, pair):
    attempt(f"slots {pair}")
    assert slots_of(dict(zip(SLOTS, pair, strict=True))) is None


# Checkpoints while they are read


@pytest.mark.parametrize("name", ["exchanged", "a link", "a pipe", "removed", "shortened", "a directory"])
def test_a_commit_that_is_exchanged_after_it_was_read_is_not_sent(attempt, tmp_path, name):
    attempt(f"after it was read the file is {name}")
    directory = CheckpointDirectory(tmp_path / "ck", keep=5)
    for step in (1, 2):
        directory.commit(capture.pack({"step": step, "w": torch.ones(1000)}, {}), step)
    found = directory.newest(lambda name, dir_fd: capture.read(name, dir_fd=dir_fd)[0]["step"])
    older = next((tmp_path / "ck").glob("000001-*"))
    if name == "shortened":
        os.truncate(found.path, 100)
    else:
        found.path.unlink()
    if name == "exchanged":
        shutil.copy(older, found.path)
    elif name == "a link":
        found.path.symlink_to(older)
    elif name == "a pipe":
        os.mkfifo(found.path)
    elif name == "a directory":
        found.path.mkdir()
    with pytest.raises(CheckpointError, match=r"exchanged after it was read|cannot be read any more"):
        directory.opened(found).close()
    directory.release()


def test_a_run_whose_newest_commits_were_removed_says_so(attempt, tmp_path):
    attempt("the two newest commits removed, and an older one put back")
    directory = CheckpointDirectory(tmp_path / "ck")
    first = directory.commit(capture.pack({"step": 1}, {}), 1)
    shutil.copy(first, tmp_path / "kept")
    for step in (2, 3):
        directory.commit(capture.pack({"step": step}, {}), step)
    directory.release()
    for path in (tmp_path / "ck").glob("*.samestep"):
        path.unlink()
    shutil.copy(tmp_path / "kept", first)
    found = CheckpointDirectory(tmp_path / "ck").newest(
        lambda name, dir_fd: capture.read(name, dir_fd=dir_fd)[0]["step"]
    )
    assert found.value == 1
    assert found.refused == ("commit 3, the last that this run named, is not there",)


@pytest.mark.parametrize(
    "said", ["\ud800", "9" * 64, "0x" + "1" * 62, "g" * 64, " " * 64, "\u0661" * 64, "a" * 63, "\n" * 65]
)
def test_a_key_that_is_none_is_refused_without_showing_it(attempt, said):
    from samestep.rendezvous.key import key_of_user

    attempt(f"SAMESTEP_KEY of {len(said)} characters such as {said[:2]!r}")
    if said == "9" * 64:
        assert len(key_of_user({"SAMESTEP_KEY": said})) == 32
        return
    with pytest.raises(PlacementError) as raised:
        key_of_user({"SAMESTEP_KEY": said})
    assert said not in str(raised.value)


@pytest.mark.parametrize(
    "what", ["a link", "a directory", "a pipe", "open to others", "too long", "too short", "a hard link"]
)
def test_a_prepared_key_file_is_no_key(attempt, tmp_path, monkeypatch, what):
    from samestep.rendezvous import key

    attempt(f"the user's key file is {what}")
    monkeypatch.setattr(key, "_WRITTEN_S", 0.2)
    folder = tmp_path / "samestep"
    folder.mkdir(mode=0o700)
    path, theirs = folder / "key", tmp_path / "theirs"
    theirs.write_bytes(bytes(32))
    if what == "a link":
        path.symlink_to(theirs)
    elif what == "a directory":
        path.mkdir()
    elif what == "a pipe":
        os.mkfifo(path)
    elif what == "a hard link":
        path.hardlink_to(theirs)
    else:
        path.write_bytes(bytes(33 if what == "too long" else 3 if what == "too short" else 32))
        path.chmod(0o644 if what == "open to others" else 0o600)
    with pytest.raises(PlacementError, match=r"delete it|cannot be read"):
        key.key_of_user({"XDG_STATE_HOME": str(tmp_path)})


def test_a_wrong_limit_of_ranks_is_no_python_error(attempt):
    attempt("a hard limit of 64 open files for 1,000 ranks without places")
    code = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
    code += "from samestep.rendezvous.host import *\nfrom samestep.rendezvous.listen import listen\n"
    code += "try:\n    host(listen([0], ['127.0.0.1']), Member('r', 0, 1000, bytes(32)))\n"
    code += "except UsageError as error:\n    print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert "this process may have 64 (`ulimit -Hn`)" in done.stdout, done.stderr
