"""A directory of checkpoints gives back the newest good one; a failing disk costs only the commit tried."""

import os
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from samestep.errors import CheckpointError, UsageError
from samestep.files import here
from samestep.state import file
from samestep.state.directory import CheckpointDirectory
from samestep.state.lease import NAME as LEASE
from samestep.state.lease import this_process
from samestep.train.checkpoint import capture

TESTS = Path(__file__).parents[1]
needs_strace = pytest.mark.skipif(
    not shutil.which("strace") and "CI" not in os.environ, reason="strace is not installed"
)


def packed(step, numbers=1000):
    return capture.pack({"step": step, "w": torch.full((numbers,), float(step))}, {"step": step})


def read(name, dir_fd):
    return capture.read(name, dir_fd=dir_fd)[0]["step"]


def steps(directory):
    return [entry.step for entry in file.listing(directory)]


def files(directory):
    return sorted(set(os.listdir(directory)) - {LEASE})


def damage(path):
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    path.write_bytes(data)


def committed(tmp_path, *counts, keep=10):
    commits = CheckpointDirectory(tmp_path / "run", keep)
    return commits, [commits.commit(packed(step), step) for step in counts]


def test_the_newest_commit_comes_back(tmp_path):
    commits, paths = committed(tmp_path, 1, 5, 9)
    found = CheckpointDirectory(commits.directory).newest(read)
    assert (found.value, found.path, found.refused) == (9, paths[-1], ())
    assert re.fullmatch(r"000003-step-9-[0-9a-f]{8}\.samestep", paths[-1].name)


def test_newest_is_the_last_committed_whatever_its_step_and_the_clock(tmp_path):
    commits, paths = committed(tmp_path, 900, 3)
    os.utime(paths[0], (2e9, 2e9))
    assert CheckpointDirectory(commits.directory).newest(read).value == 3


def test_a_commit_that_another_file_has_replaced_since_is_not_handed_on(tmp_path):
    commits, paths = committed(tmp_path, 1, 5)
    found = CheckpointDirectory(commits.directory).newest(read)
    with commits.opened(found) as same:
        assert file.peek(same.fileno()).root == found.root
    shutil.copy(paths[0], paths[1])
    with pytest.raises(CheckpointError, match=rf"^{paths[1]} was exchanged after it was read; start again"):
        commits.opened(found)


def test_where_nothing_was_committed_nothing_is_found(tmp_path):
    assert CheckpointDirectory(tmp_path / "run").newest(read) is None
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").touch()
    assert CheckpointDirectory(tmp_path / "run").newest(read) is None


def test_a_second_object_of_this_process_reads_what_the_first_has_committed_since(tmp_path):
    first, _ = committed(tmp_path, 1)
    second = CheckpointDirectory(first.directory)
    second.hold(this_process(), str, "")
    first.commit(packed(2), 2)
    found = second.newest(read)
    assert (found.value, found.refused) == (2, ())


def test_only_the_owner_may_read_a_commit(tmp_path):
    commits, paths = committed(tmp_path / "deep" / "er", 1)
    assert commits.directory.stat().st_mode & 0o777 == 0o700
    assert paths[0].stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("keep", [2, 3])
def test_as_many_commits_are_kept_as_asked(tmp_path, keep):
    commits, _ = committed(tmp_path, *range(6), keep=keep)
    assert steps(commits.directory) == [5, 4, 3][:keep]


def test_fewer_than_two_commits_are_never_kept(tmp_path):
    with pytest.raises(
        UsageError, match="keep=1 leaves nothing to go back to when one file is damaged; use keep=2"
    ):
        CheckpointDirectory(tmp_path, keep=1)


def test_each_bad_commit_is_named_and_an_older_one_is_used(tmp_path):
    commits, paths = committed(tmp_path, 1, 2, 3, 4, 5)
    damage(paths[4])
    paths[3].write_bytes(paths[3].read_bytes()[:-64])
    paths[2].unlink()
    paths[2].symlink_to(paths[0])
    found = CheckpointDirectory(commits.directory).newest(read)
    assert found.value == 2
    assert found.refused == (
        f"{paths[4].name} has a damaged w",
        f"{paths[3].name} is torn: {paths[3].stat().st_size} of {paths[0].stat().st_size} bytes are there",
        f"{paths[2].name} is a symbolic link",
    )


def test_where_all_commits_are_bad_a_run_does_not_begin_anew_in_silence(tmp_path):
    commits, paths = committed(tmp_path, 1, 2)
    for path in paths:
        damage(path)
    with pytest.raises(CheckpointError) as raised:
        CheckpointDirectory(commits.directory).newest(read)
    reasons = "; ".join(f"{path.name} has a damaged w" for path in reversed(paths))
    assert str(raised.value) == f"{commits.directory} holds no good checkpoint: {reasons}"
    assert raised.value.path == str(commits.directory)


def test_an_older_commit_is_removed_only_when_enough_newer_ones_are_known_to_be_good(tmp_path):
    commits, paths = committed(tmp_path, 1, 2, 3, 4)
    damage(paths[3])
    later = CheckpointDirectory(commits.directory)
    assert later.newest(read).value == 3
    later.commit(packed(5), 5)
    assert steps(commits.directory) == [5, 4, 3]
    later.commit(packed(6), 6)
    assert steps(commits.directory) == [6, 5]


def test_a_directory_of_which_nothing_was_read_keeps_old_commits_until_two_are_written(tmp_path):
    commits, _ = committed(tmp_path, 1, 2, 3)
    later = CheckpointDirectory(commits.directory)
    later.commit(packed(4), 4)
    assert steps(commits.directory) == [4, 3, 2, 1]
    later.commit(packed(5), 5)
    assert steps(commits.directory) == [5, 4]


def test_a_commit_changed_behind_our_back_is_not_counted_as_good(tmp_path):
    commits, paths = committed(tmp_path, 1, 2, keep=2)
    damage(paths[1])
    commits.commit(packed(3), 3)
    assert steps(commits.directory) == [3, 2, 1]


def test_what_cannot_be_removed_stays_and_stops_nothing(tmp_path):
    commits, _ = committed(tmp_path, 1)
    stuck = commits.directory / "000000-step-7-00000000.samestep"
    (stuck / "inside").mkdir(parents=True)
    long = commits.directory / f"{'9' * 200}-step-{'9' * 20}-00000000.samestep"
    long.touch()
    for step in (2, 3, 4):
        commits.commit(packed(step), step)
    assert stuck.is_dir()
    assert CheckpointDirectory(commits.directory).newest(read).value == 4


def test_leftovers_of_dead_writers_are_removed_and_of_living_ones_kept(tmp_path):
    commits, _ = committed(tmp_path, 1)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    place, other = here(), "0" * 16
    leftovers = {
        f".writing-{place}-{dead.pid}-00000000": True,
        f".writing-{place}-{living.pid}-00000000": False,
        f".writing-{other}-{dead.pid}-00000000": False,
        f".writing-{other}-{dead.pid}-11111111": True,
        f".writing-{place}-999999999999-00000000": False,
        ".writing-by-someone-else": False,
        "notes.txt": False,
    }
    for name in leftovers:
        (commits.directory / name).touch()
    os.utime(commits.directory / f".writing-{other}-{dead.pid}-11111111", (time.time() - 4000,) * 2)
    commits.hold(this_process(), str, "")
    living.communicate()
    assert {name: not (commits.directory / name).exists() for name in leftovers} == leftovers


def test_a_vanished_directory_is_named_and_not_made_again(tmp_path):
    commits, _ = committed(tmp_path, 1)
    shutil.rmtree(commits.directory)
    with pytest.raises(CheckpointError, match=f"^checkpoint skipped: {commits.directory} is gone$"):
        commits.commit(packed(2), 2)
    assert not commits.directory.exists()
    commits.directory.mkdir()
    commits.commit(packed(3), 3)
    assert commits.newest(read).value == 3


def test_a_directory_that_is_a_file_is_named(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(CheckpointError, match=r"run cannot be read \(Not a directory\)"):
        CheckpointDirectory(tmp_path / "run").newest(read)
    with pytest.raises(CheckpointError, match="checkpoint skipped: "):
        CheckpointDirectory(tmp_path / "run").commit(packed(1), 1)


def test_a_file_larger_than_this_process_may_write_is_skipped_without_a_trace(tmp_path):
    commits, paths = committed(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(
            CheckpointError, match=r"^checkpoint skipped: .* cannot be written \(File too large\)$"
        ):
            commits.commit(packed(2, 10_000), 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(commits.directory) == [paths[0].name]


def test_a_commit_that_is_broken_off_leaves_no_file(tmp_path, monkeypatch):
    commits, paths = committed(tmp_path, 1)

    def interrupted(fd):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        commits.commit(packed(2), 2)
    assert files(commits.directory) == [paths[0].name]


@pytest.fixture
def small_disk(tmp_path):
    if os.geteuid():
        pytest.skip("needs root to mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.root
def test_a_full_disk_costs_only_the_commit_tried(small_disk):
    commits = CheckpointDirectory(small_disk / "run")
    kept = [commits.commit(packed(step, 125_000), step).name for step in (1, 2)]
    (small_disk / "data").write_bytes(bytes(800_000))
    reason = rf"^checkpoint skipped: \d+\.\d of 550\.\d kB free on {commits.directory}$"
    with pytest.raises(CheckpointError, match=reason):
        commits.commit(packed(3, 125_000), 3)
    assert files(commits.directory) == kept
    assert commits.newest(read).value == 2
    (small_disk / "data").unlink()
    commits.commit(packed(4, 125_000), 4)
    assert steps(commits.directory) == [4, 2]


@pytest.mark.root
def test_a_disk_that_became_read_only_costs_only_the_commit_tried(small_disk):
    commits = CheckpointDirectory(small_disk / "run")
    commits.commit(packed(1), 1)
    commits.release()  # a file that is open for writing keeps the disk writable
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(CheckpointError, match=r"run cannot be written \(Read-only file system\)$"):
        commits.commit(packed(2), 2)
    assert commits.newest(read).value == 1


COMMITS = """
import sys
from samestep.errors import CheckpointError
from samestep.state.directory import CheckpointDirectory
from samestep.state.file import pack
commits = CheckpointDirectory(sys.argv[1])
for step in (1, 2):
    try:
        commits.commit(pack({"step": step}), step)
        print("committed")
    except CheckpointError as error:
        print(error)
"""


@needs_strace
@pytest.mark.parametrize(
    ("error", "outcome"),
    [("EINVAL", "committed"), ("EIO", "checkpoint skipped: {} cannot be written (Input/output error)")],
)
def test_names_that_cannot_be_synced_are_no_failure_and_those_that_were_lost_are(tmp_path, error, outcome):
    run = tmp_path / "run"
    run.mkdir()
    tracer = ["strace", "-f", "-qq", "-o", tmp_path / "log", "-P", run, "-e", "trace=fsync"]
    command = [*tracer, "-e", f"inject=fsync:error={error}", sys.executable, "-c", COMMITS, run]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert ran.stdout.splitlines() == [outcome.format(run)] * 2
    assert (tmp_path / "log").read_text().count("INJECTED") == 2


@pytest.mark.slow
@needs_strace
def test_power_that_fails_at_any_moment_leaves_the_old_or_the_new_state_and_no_sync_is_needless():
    words = [sys.executable, TESTS / "power_loss.py", "--states", "64"]
    ran = subprocess.run(words, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"neither old nor new 0 \| syncs \d\d, needless 0$", ran.stdout.strip())


@pytest.mark.slow
@needs_strace
@pytest.mark.timeout(150)
def test_a_death_or_an_error_at_any_call_leaves_the_old_or_the_new_state():
    ran = subprocess.run(
        [sys.executable, TESTS / "crash_points.py", "--quick"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.strip().endswith("neither old nor new, or a mix: 0")
