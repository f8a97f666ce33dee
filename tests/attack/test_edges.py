"""Attacks at the edges of a run: file modes, limits, leases, notes, memory, squatted names, and floods of addresses."""

import json
import os
import resource
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from textwrap import dedent

import pytest
import torch

import samestep
from samestep.errors import CheckpointError, PlacementError
from samestep.files import open_directory, write_atomically
from samestep.rendezvous import note
from samestep.rendezvous.host import host
from samestep.rendezvous.join import join
from samestep.rendezvous.listen import listen, private_folder, private_socket
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
TRAIN = """
    import hashlib, os, signal, sys
    import torch, samestep
    world = samestep.init()
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(24, 8), torch.arange(24) % 2)
    train = samestep.loader(data, batch_size=8, shuffle=True)
    net = torch.nn.Linear(8, 2)
    model = samestep.replicate(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    run = samestep.Checkpoint("ck", every=1, model=net, optimizer=optimizer, train=train)
    first = run.resume()
    for epoch in train.epochs(2):
        for x, y in train:
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
            if os.environ.get("DIES") == str(run.steps) and not first and world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    if world.rank == 0:
        print("bits", hashlib.sha256(net.weight.detach().numpy().tobytes()).hexdigest(), flush=True)
"""


def run_in(home, *words, before="", **variables):
    (home / "train.py").write_text(dedent(TRAIN))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SAMESTEP", "OMP"))}
    command = f"{before} exec {sys.executable} -m samestep run {' '.join(words)} train.py"
    return subprocess.run(
        ["bash", "-c", command], cwd=home, env=clean | variables, capture_output=True, text=True, timeout=50
    )


def bits(done):
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("bits ")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return bits(run_in(tmp_path_factory.mktemp("undisturbed"), "-n 2"))


# Files that a run leaves


def test_no_file_of_a_run_is_open_to_others_whatever_the_umask(attempt, tmp_path, undisturbed):
    done = run_in(tmp_path, "-n 2 --max-restarts 1", before="umask 0;", DIES="3")
    assert bits(done) == undisturbed
    made = [path for name in ("ck", "runs") for path in [tmp_path / name, *(tmp_path / name).rglob("*")]]
    assert len(made) > 10
    for path in made:
        attempt(f"umask 0: {path.name}")
        assert not stat.S_IMODE(path.lstat().st_mode) & 0o077, path


def test_a_killed_run_leaves_nothing_in_the_memory_of_the_machine(attempt, tmp_path, undisturbed):
    before = {Path("/dev/shm"): set(os.listdir("/dev/shm")), Path("/tmp"): set(os.listdir("/tmp"))}
    for step in (1, 3, 5):
        attempt(f"killed in step {step}, and again while it resumes")
        home = tmp_path / str(step)
        home.mkdir()
        assert bits(run_in(home, "-n 2 --max-restarts 2", DIES=str(step))) == undisturbed
    for folder, names in before.items():
        left = {
            name for name in set(os.listdir(folder)) - names if name.startswith(("samestep", "ss", "torch"))
        }
        assert not {name for name in left if (folder / name).exists()}, left


# Limits of the process and the machine


@pytest.mark.parametrize(
    ("before", "says"),
    [
        ("ulimit -n 20;", "too many open files|open files"),
        ("ulimit -n 64;", None),
        ("ulimit -f 0;", "cannot be written"),
        ("mkdir ck; ulimit -f 10;", "File too large"),
        ("mkdir -p small; mount -t tmpfs -o size=100k tmpfs small; ln -s small ck;", "checkpoint skipped"),
        ("mkdir -p small; mount -t tmpfs -o size=4k tmpfs small; ln -s small runs;", "cannot be written"),
        ("mkdir -p runs; mount -t tmpfs -o ro tmpfs runs;", "cannot be written"),
        ("mkdir -p ck; mount -t tmpfs -o ro tmpfs ck;", "checkpoint skipped"),
    ],
    ids=str,
)
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_limit_ends_in_a_sentence_or_in_the_right_bits(attempt, tmp_path, undisturbed, before, says):
    attempt(before)
    inner = f"{before} exec {sys.executable} -m samestep run -n 2 train.py"
    (tmp_path / "train.py").write_text(dedent(TRAIN))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SAMESTEP", "OMP"))}
    command = ["unshare", "-m", "bash", "-c", inner]
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=50)
    if says is None:
        assert bits(done) == undisturbed
        return
    assert done.returncode in (1, 2)
    assert any(word in done.stderr for word in says.split("|")), done.stderr
    assert "checkpoint" not in says or undisturbed[0] in done.stdout
    assert "samestep/" not in done.stderr.replace("samestep/bin", ""), done.stderr


@pytest.mark.parametrize("up", [False, True])
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a network")
def test_a_run_in_a_network_of_its_own_says_that_the_loop_is_down_or_goes_on(
    attempt, tmp_path, undisturbed, up
):
    attempt(f"a network namespace whose loop is {'up' if up else 'down'}")
    bring = "ip link set lo up;" if up else ""
    (tmp_path / "train.py").write_text(dedent(TRAIN))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SAMESTEP", "OMP"))}
    inner = f"{bring} exec {sys.executable} -m samestep run -n 2 train.py"
    command = ["unshare", "-n", "bash", "-c", inner]
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=50)
    if up:
        assert bits(done) == undisturbed
    else:
        assert "bring the loopback interface up (`ip link set lo up`)" in done.stderr


@pytest.mark.parametrize("name", ["\x1b[31mevil", "x\ny", "\udcff\udcfe", "%s%n", "$(touch canary)"])
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can name a machine")
def test_a_hostile_name_of_the_machine_is_printed_as_text(attempt, tmp_path, undisturbed, name):
    attempt(f"a machine named {name!r}")
    (tmp_path / "name").write_bytes(os.fsencode(name))
    (tmp_path / "train.py").write_text(dedent(TRAIN))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SAMESTEP", "OMP"))}
    ours = f"{sys.executable} -m samestep"
    inner = f"cat name > /proc/sys/kernel/hostname; {ours} run -n 2 train.py; touch ck/x; rm -r ck; touch ck;"
    inner += f"{ours} run -n 2 train.py; {ours} runs; {ours} status; {ours} runs --json"
    done = subprocess.run(
        ["unshare", "-u", "bash", "-c", inner], cwd=tmp_path, env=clean, capture_output=True, timeout=50
    )
    said = done.stdout.decode(errors="surrogateescape") + done.stderr.decode(errors="surrogateescape")
    assert undisturbed[0] in said
    assert not {"\x1b", "\udcff"} & set(said)
    assert "samestep/" not in said.replace(str(tmp_path), "")
    assert not (tmp_path / "canary").exists()


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
    with pytest.raises(PlacementError, match="is there and is no note of a run"), note.posted(path, []):
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
    "a pid below 0": ({"pid": -1, "place": lease.here()}, None),
    "a huge pid": ({"pid": 2**70, "place": lease.here()}, None),
    "pid 0": ({"pid": 0, "place": lease.here()}, None),
    "a start that is no number": ({"began": float("nan"), "place": lease.here()}, None),
    "an endless start": ({"began": float("inf"), "place": lease.here()}, None),
    "this process before it began": ({"pid": os.getpid(), "place": lease.here(), "began": 1.0}, None),
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
        "a huge step": right._replace(step=2**64 - 1),
    }


@pytest.mark.parametrize("name", ["another run", "no run", "the same number", "an older number",
                                  "a number far ahead", "the largest number", "nothing before it",
                                  "itself before it", "a huge step"])  # fmt: skip
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
    with pytest.raises(CheckpointError, match=r"exchanged after it was read|cannot be read|is torn"):
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


HEADERS = {
    "two trees": b'{"meta": {}, "blobs": [], "tree": 1, "tree": 2}',
    "two metas": b'{"meta": {}, "meta": {"a": 1}, "blobs": [], "tree": 1}',
    "two names in the meta": b'{"meta": {"a": 1, "a": 2}, "blobs": [], "tree": 1}',
    "two names in a dict": b'{"meta": {}, "blobs": [], "tree": {"dict": [["a", 1], ["a", 2]]}}',
    "two tags": b'{"meta": {}, "blobs": [], "tree": {"dict": [], "tuple": []}}',
    "one tag twice": b'{"meta": {}, "blobs": [], "tree": {"tuple": [1], "tuple": [2]}}',
    "no number": b'{"meta": {}, "blobs": [], "tree": NaN}',
    "an endless number": b'{"meta": {}, "blobs": [], "tree": -Infinity}',
    "a mark before it": b'\xef\xbb\xbf{"meta": {}, "blobs": [], "tree": 1}',
    "a byte that is no text": b'{"meta": {}, "blobs": [], "tree": "\xff"}',
    "a number of 5,000 digits": b'{"meta": {}, "blobs": [], "tree": ' + b"9" * 5000 + b"}",
    "a tree of a million brackets": b'{"meta": {}, "blobs": [], "tree": '
    + b"[" * 10**6
    + b"]" * 10**6
    + b"}",
    "a part too many": b'{"meta": {}, "blobs": [], "tree": 1, "more": 1}',
    "a part too few": b'{"meta": {}, "blobs": []}',
    "a list": b"[{}, [], 1]",
    "something behind it": b'{"meta": {}, "blobs": [], "tree": 1} 2',
    "nothing": b"",
    "a blob of no bytes": b'{"meta": {}, "blobs": [["bytes", [-1]]], "tree": {"bytes": 0}}',
    "a blob of a huge shape": b'{"meta": {}, "blobs": [["uint8", [4611686018427387904, 4]]], "tree": {"tensor": 0}}',
    "a blob of another kind": b'{"meta": {}, "blobs": [["object", [1]]], "tree": {"tensor": 0}}',
    "a blob that is true": b'{"meta": {}, "blobs": [["uint8", [true]]], "tree": {"tensor": 0}}',
    "a negative blob": b'{"meta": {}, "blobs": [], "tree": {"tensor": -1}}',
    "a blob of a fraction": b'{"meta": {}, "blobs": [["uint8", [1.0]]], "tree": {"tensor": 0}}',
    "a half letter": b'{"meta": {}, "blobs": [], "tree": {"int": "0x5"}}',
    "an int of words": b'{"meta": {}, "blobs": [], "tree": {"int": "__import__"}}',
    "a float of words": b'{"meta": {}, "blobs": [], "tree": {"float": "nan"}}',
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_of_the_right_digest_that_says_what_none_can_is_refused(attempt, tmp_path, name):
    attempt(f"a header with {name}")
    header = HEADERS[name]
    try:
        blobs = len(json.loads(header)["blobs"])
    except (ValueError, KeyError, TypeError, RecursionError):
        blobs = 0
    start = -(-(file._PREAMBLE.size + len(header) + 32 * blobs) // 64) * 64
    size = start + 64 * blobs
    sealed = file._PREAMBLE.pack(b"samestep", 2, blobs, len(header), size, *file.Seal(), bytes(32))[:96]
    body = header + bytes(32 * blobs)
    path = tmp_path / "forged"
    path.write_bytes((sealed + file.digest(sealed + body, b"root") + body).ljust(size, b"\0"))
    for look in (file.peek, file.verify, file.read):
        with pytest.raises(CheckpointError) as raised:
            look(path)
        assert len(str(raised.value)) < 1000


# Other users while ranks meet

OTHER_USER = """
import os, socket, sys
path = sys.argv[1]
os.setgroups([]), os.setgid(65534), os.setuid(65534)
def tried(name, act):
    try:
        act()
    except OSError:
        print(name, "refused")
    else:
        print(name, "got in")
tried("connect", lambda: socket.socket(socket.AF_UNIX).connect(path))
tried("listen in its place", lambda: socket.socket(socket.AF_UNIX).bind(path))
tried("listen beside it", lambda: socket.socket(socket.AF_UNIX).bind(os.path.dirname(path) + "/0-1"))
tried("remove it", lambda: os.unlink(path))
tried("rename it", lambda: os.rename(path, path + "x"))
tried("list the directory", lambda: os.listdir(os.path.dirname(path)))
tried("remove the directory", lambda: os.rmdir(os.path.dirname(path)))
tried("rename the directory", lambda: os.rename(os.path.dirname(path), os.path.dirname(path) + "x"))
tried("open the directory to all", lambda: os.chmod(os.path.dirname(path), 0o777))
tried("link into the directory", lambda: os.symlink("/etc/passwd", os.path.dirname(path) + "/x"))
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("place", ["0-0", "0-1", "0-4"])
def test_another_user_reaches_no_socket_at_which_ranks_of_a_machine_meet(attempt, place):
    path = private_folder(os.urandom(32)) / place
    with private_socket(path):
        words = [shutil.which("python3"), "-I", "-c", OTHER_USER, path]
        done = subprocess.run(words, capture_output=True, text=True, cwd="/")
        assert done.returncode == 0, done.stderr
        for line in done.stdout.splitlines():
            attempt(f"{place}: {line}")
            assert line.endswith("refused"), line
    assert not path.parent.exists()


IMPOSTOR = """
import os, socket, sys, time
folder, kind = sys.argv[1:]
os.setgroups([]), os.setgid(65534), os.setuid(65534)
os.mkdir(folder, 0o777)
os.chmod(folder, 0o777)
for name in ("0-0", "0-1", "0-2"):
    line = socket.socket(socket.AF_UNIX)
    line.bind(f"{folder}/{name}")
    os.chmod(f"{folder}/{name}", 0o777)
    line.listen(50)
    globals()["kept" + name] = line
print("ready", flush=True)
time.sleep(30)
"""
RANK = """
import sys
from samestep.placement.place import Placement
from samestep.rendezvous.ranks import connect_ranks
rank, size = int(sys.argv[1]), int(sys.argv[2])
told = {"node": "GROUP_RANK=0", "local_rank": "LOCAL_RANK=0", "local_size": "LOCAL_WORLD_SIZE=1"}
here = Placement(rank, size, rank, size, 0, 1, "torchrun", "127.0.0.1", int(sys.argv[3]), told, run="squatted")
tree = connect_ranks(here, 20)
print(tree.gather(rank, 20))
tree.leave()
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("turns", [1, 3])
def test_sockets_of_another_user_in_our_place_do_not_even_slow_a_start(attempt, turns):
    attempt(f"{turns} directories of known names with sockets that stay silent")
    port = "23456"
    folders = [private_folder(KEY, "squatted", port, str(turn)) for turn in range(turns)]
    with ExitStack() as stack:
        for folder in folders:
            words = [shutil.which("python3"), "-I", "-c", IMPOSTOR, folder, "silent"]
            squatter = stack.enter_context(
                subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd="/")
            )
            stack.callback(shutil.rmtree, folder)
            stack.callback(squatter.kill)
            assert squatter.stdout.readline() == "ready\n"
        env = {**os.environ, "SAMESTEP_KEY": KEY.hex()}
        began = time.monotonic()
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(rank), "4", port], env=env, stdout=-1, text=True
            )
            for rank in range(4)
        ]
        assert [one.communicate(timeout=30)[0] for one in ranks] == ["[0, 1, 2, 3]\n"] * 4
        assert time.monotonic() - began < 6


@pytest.mark.parametrize("kind", ["silent", "babbling"])
def test_a_flood_from_400_addresses_keeps_nobody_out(attempt, kind):
    attempt(f"{kind} connections from 400 addresses at once")
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    (opened,) = listen([0], ["127.0.0.1"])
    place, found, ended = opened.getsockname(), [], threading.Event()

    def flood():
        kept = []
        while not ended.is_set():
            for number in range(400):
                with suppress(OSError):
                    line = socket.socket()
                    line.settimeout(0.2)
                    line.bind((f"127.1.{number // 200}.{number % 200 + 1}", 0))
                    line.connect(place)
                    if kind == "babbling":
                        line.send(b"samestep-1\n" + os.urandom(64))
                    kept.append(line)
            for line in kept[:-400]:
                line.close()
            del kept[:-400]
        for line in kept:
            line.close()

    hosting = threading.Thread(
        target=lambda: found.append(host([opened], Member("r", 0, 4, KEY, limit_s=40)))
    )
    flooding = threading.Thread(target=flood)
    flooding.start()
    hosting.start()
    time.sleep(0.5)
    began = time.monotonic()
    coming = []
    joins = [
        threading.Thread(
            target=lambda n=n: coming.append(join(lambda: [place], Member("r", n, 4, KEY, limit_s=40)))
        )
        for n in (1, 2, 3)
    ]
    try:
        for one in joins:
            one.start()
        for one in (*joins, hosting):
            one.join(40)
    finally:
        ended.set()
        flooding.join(20)
    assert len(found) == 1
    assert len(coming) == 3
    assert time.monotonic() - began < 30
    for tree in (*found, *coming):
        tree.leave()


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
    with pytest.raises(PlacementError):
        key.key_of_user({"XDG_STATE_HOME": str(tmp_path)})


def test_a_wrong_limit_of_ranks_is_no_python_error(attempt):
    attempt("a hard limit of 64 open files for 1,000 ranks without places")
    code = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
    code += "from samestep.rendezvous.host import *\nfrom samestep.rendezvous.listen import listen\n"
    code += "try:\n    host(listen([0], ['127.0.0.1']), Member('r', 0, 1000, bytes(32)))\n"
    code += "except UsageError as error:\n    print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert "this process may have 64 (`ulimit -Hn`)" in done.stdout, done.stderr
