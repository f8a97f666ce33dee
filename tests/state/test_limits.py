"""The numbers and the order of calls that a state's file and a commit stand on; `make mutants` asked for these."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from samestep.errors import CheckpointError
from samestep.state import file, pieces
from samestep.state.directory import CheckpointDirectory, _free
from samestep.state.leftovers import ABANDONED_SECONDS
from samestep.state.tree import place

COMMIT = """
import sys
from samestep.state.directory import CheckpointDirectory
from samestep.state.file import pack
CheckpointDirectory(sys.argv[1]).commit(pack({"a": bytes(100)}), 1)
"""


@pytest.mark.skipif(not shutil.which("strace") and "CI" not in os.environ, reason="strace is not installed")
def test_a_commit_is_on_the_disk_before_it_has_its_name_and_its_name_before_it_counts(tmp_path):
    trace = tmp_path / "trace"
    calls = "--trace=/^(fallocate|pwritev2?|pwrite64|fsync|fdatasync|rename.*)$"
    words = ["strace", "--follow-forks", "--decode-fds=path", calls, f"--output={trace}"]
    subprocess.run([*words, sys.executable, "-c", COMMIT, tmp_path / "run"], check=True, timeout=50)
    seen = re.findall(
        rf"(fallocate|pwrite|fsync|fdatasync|rename)\w*\(.*{tmp_path}/run(/\.writing|/\.lease)?",
        trace.read_text(),
    )
    assert seen == [
        ("pwrite", "/.lease"),
        ("fallocate", "/.writing"),
        ("pwrite", "/.writing"),
        ("pwrite", "/.writing"),
        ("fsync", "/.writing"),
        ("pwrite", "/.lease"),
        ("rename", ""),
        ("fsync", ""),
    ]


@pytest.mark.parametrize("edge", [2**63 - 1, -(2**63)])
def test_an_int_above_64_bits_is_text_which_every_reader_of_json_keeps(edge):
    beyond = edge + (1 if edge > 0 else -1)
    tree = json.loads(file.pack([edge, beyond]).header)["tree"]
    assert tree == [edge, {"int": format(beyond, "x")}]


def test_a_good_file_of_several_pieces_is_verified(tmp_path, monkeypatch):
    for module in (file, pieces):
        monkeypatch.setattr(module, "PIECE", 1000)
    for count in (1, 999, 1000, 1001, 2500):
        path = tmp_path / "state"
        with path.open("wb") as opened:
            file.write(opened.fileno(), file.pack(bytes(range(256)) * (count // 256) + bytes(count % 256)))
        assert file.verify(path) == file.peek(path)


def test_many_small_buffers_are_written_in_their_order(tmp_path):
    state = [bytes([index]) * (index + 1) for index in range(150)]
    with (tmp_path / "state").open("wb") as opened:
        file.write(opened.fileno(), file.pack(state))
    assert file.read(tmp_path / "state")[0] == state


def test_a_long_name_is_cut_at_200_characters():
    assert place(("k" * 201,)) == "k" * 200


@pytest.mark.skipif(sys.platform != "linux", reason="/proc has no blocks")
def test_a_file_system_that_tells_no_number_of_blocks_is_not_full():
    assert _free(os.statvfs("/proc")) == math.inf


def test_a_pipe_in_the_directorys_place_is_named_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"run cannot be read \(Not a directory\)"):
        CheckpointDirectory(tmp_path / "run").newest(lambda name, dir_fd: None)


def test_a_commit_that_is_now_a_link_is_not_counted_as_good(tmp_path):
    vault = CheckpointDirectory(tmp_path / "run")
    paths = [vault.commit(file.pack(step), step) for step in (1, 2)]
    paths[1].rename(tmp_path / "elsewhere")
    paths[1].symlink_to(tmp_path / "elsewhere")
    vault.commit(file.pack(3), 3)
    assert [entry.step for entry in file.listing(vault.directory)] == [3, 2, 1]


def test_a_leftover_of_another_machine_is_old_by_the_file_servers_clock_now(tmp_path):
    vault = CheckpointDirectory(tmp_path / "run")
    vault.commit(file.pack(1), 1)
    left = vault.directory / f".writing-{'0' * 16}-1-00000000"
    left.touch()
    for path in (left, vault.directory):
        os.utime(path, (time.time() - ABANDONED_SECONDS - 60,) * 2)
    vault.commit(file.pack(2), 2)
    assert not left.exists()


@contextmanager
def small_disk(path, options):
    if os.geteuid():
        pytest.skip("needs root to mount a small disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], check=True)
    try:
        yield CheckpointDirectory(path / "run")
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.root
def test_a_disk_that_has_room_but_takes_no_more_files_is_not_said_to_be_full(tmp_path):
    with small_disk(tmp_path, "size=2m,nr_inodes=4") as vault:
        vault.commit(file.pack(1), 1)
        with pytest.raises(CheckpointError, match=r"run cannot be written \(No space left on device\)$"):
            vault.commit(file.pack(2), 2)


@pytest.mark.root
def test_a_commit_that_would_just_fit_is_not_begun(tmp_path):
    """A tenth of its size is to stay free, for what else is written beside it."""
    with small_disk(tmp_path, "size=2m") as vault:
        with pytest.raises(CheckpointError, match=r"2\.1 of 2\.2 MB free on"):
            vault.commit(file.pack(bytes(2_000_000)), 1)
        vault.commit(file.pack(bytes(1_800_000)), 1)
        assert [entry.step for entry in file.listing(vault.directory)] == [1]
