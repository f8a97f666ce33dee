"""A directory of checkpoints has one writer: another one is refused by name, and a dead one is not waited for."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import pytest

from samestep.errors import CheckpointError
from samestep.files import open_directory
from samestep.state import file, lease
from samestep.state.directory import CheckpointDirectory
from samestep.train.checkpoint.writer import holder

HOLD = """
import os, sys, time
from samestep.state.directory import CheckpointDirectory
from samestep.state.file import pack
commits = CheckpointDirectory(sys.argv[1])
commits.commit(pack({"step": 1}), 1)
if "fork" in sys.argv and not os.fork():
    time.sleep(20)
    os._exit(0)
if "release" in sys.argv:
    commits.release()
print("held", flush=True)
time.sleep(60)
"""
needs_strace = pytest.mark.skipif(
    not shutil.which("strace") and "CI" not in os.environ, reason="strace is not installed"
)


@contextmanager
def holding(directory, *words, tracer=()):
    command = [*tracer, sys.executable, "-c", HOLD, directory, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def step(directory, number):
    return CheckpointDirectory(directory).commit(file.pack({"step": number}), number)


def foreign(directory, **changes):
    """Leave a lease as a process on another machine would; returns its record."""
    other = lease.Holder("node07", "another boot", "another place", 4711, 1.0, "77.0")._replace(**changes)
    with open_directory(directory) as dir_fd:
        opened = lease._File(dir_fd, os.O_RDWR | os.O_CREAT)
        record = (opened.record() or lease.Record(bytes(16)))._replace(holder=other)
        opened.write(record)
        opened.close()
    return record


def age(directory, seconds):
    os.utime(directory / lease.NAME, (time.time() - seconds,) * 2)


@pytest.mark.slow
def test_a_second_writer_is_refused_and_told_who_the_first_is(tmp_path):
    with holding(tmp_path / "run") as first:
        began = time.monotonic()
        with pytest.raises(CheckpointError) as raised:
            step(tmp_path / "run", 2)
        assert time.monotonic() - began < 4
    who = rf"process {first.pid} on {os.uname().nodename}, last sign of life [\d.]+ s ago"
    assert raised.match(rf"^{tmp_path}/run is held by another run \({who}, counts as ended after 60 s")
    assert raised.match("give each run a directory of its own")
    assert [entry.step for entry in file.listing(tmp_path / "run")] == [1]


def test_a_killed_writer_is_followed_at_once(tmp_path):
    with holding(tmp_path / "run") as first:
        first.kill()
        first.wait()
        began = time.monotonic()
        step(tmp_path / "run", 2)
        assert time.monotonic() - began < 1


def test_a_process_that_a_killed_writer_forked_does_not_keep_the_directory(tmp_path):
    with holding(tmp_path / "run", "fork") as first:
        first.kill()
        first.wait()
        began = time.monotonic()
        step(tmp_path / "run", 2)
        assert time.monotonic() - began < 1


def test_a_writer_that_gave_the_directory_up_is_followed_while_it_lives(tmp_path):
    with holding(tmp_path / "run", "release"):
        step(tmp_path / "run", 2)


@pytest.mark.slow
@needs_strace
def test_without_locks_a_living_process_keeps_and_a_killed_one_loses_the_directory(tmp_path):
    tracer = [
        "strace",
        "-f",
        "-qq",
        "-o",
        tmp_path / "log",
        "-e",
        "trace=flock",
        "-e",
        "inject=flock:error=ENOLCK",
    ]
    again = [*tracer, sys.executable, "-c", HOLD, tmp_path / "run"]
    with holding(tmp_path / "run", tracer=tracer) as first:
        refused = subprocess.run(again, capture_output=True, text=True, timeout=20)
        assert "is held by another run (process " in refused.stderr
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    with holding(tmp_path / "run", tracer=tracer):
        pass


@contextmanager
def own(directory, say=lambda _: None):
    """A lease of this process, and the directory's descriptor."""
    directory.mkdir(exist_ok=True)
    with open_directory(directory) as dir_fd:
        taken = lease.Lease(
            directory, dir_fd, lease.this_process("", 0), say, "end it", lambda: lease.Record(bytes(16))
        )
        yield taken, dir_fd
        taken.release(dir_fd)


def test_a_lease_that_somebody_removed_is_written_again_at_the_next_commit(tmp_path):
    with own(tmp_path) as (held, dir_fd):
        (tmp_path / lease.NAME).unlink()
        held.check(dir_fd)
        assert lease.read(dir_fd).holder == lease.this_process("", 0)


def test_a_lease_that_is_looked_at_again_keeps_one_file_open_and_a_foreign_one_none(tmp_path):
    with open_directory(tmp_path) as dir_fd:
        looked_at = lease._File(dir_fd, os.O_RDWR | os.O_CREAT)
        before = len(os.listdir("/proc/self/fd"))
        looked_at.reopen(dir_fd)
        assert len(os.listdir("/proc/self/fd")) == before
        os.link(tmp_path / lease.NAME, tmp_path / "second name")
        with pytest.raises(OSError, match="is not this user's own file"):
            looked_at.reopen(dir_fd)
        assert len(os.listdir("/proc/self/fd")) == before - 1


def test_without_locks_the_one_that_wrote_last_has_the_directory(tmp_path, monkeypatch):
    """Two take it at once, as on a file system of a network whose server has no locks."""
    monkeypatch.setattr(lease._File, "lock", lambda _: None)
    threading.Timer(0.5, foreign, [tmp_path]).start()
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=r"is held by another run .*node07"), own(tmp_path):
        pass
    assert 1.0 < time.monotonic() - began < 5.0


def test_a_writer_on_another_machine_is_gone_when_its_lease_was_not_renewed_for_a_minute(tmp_path):
    step(tmp_path / "run", 1)
    foreign(tmp_path / "run")
    age(tmp_path / "run", lease.OVER_SECONDS + 5)
    began = time.monotonic()
    step(tmp_path / "run", 2)
    assert time.monotonic() - began < 3


@pytest.mark.slow
def test_a_writer_on_another_machine_that_renews_its_lease_is_alive(tmp_path):
    step(tmp_path / "run", 1)
    foreign(tmp_path / "run")
    age(tmp_path / "run", 30)
    renewing = [
        sys.executable,
        "-c",
        f"import os, time; time.sleep(2); os.utime({str(tmp_path / 'run' / lease.NAME)!r})",
    ]
    said = []
    with (
        subprocess.Popen(renewing),
        pytest.raises(CheckpointError, match=r"\(job 77.0, process 4711 on node07, last"),
    ):
        CheckpointDirectory(tmp_path / "run").hold(lease.this_process(), said.append, "end it")
    assert len(said) == 1
    assert "may still write" in said[0]


def test_a_requeued_job_takes_over_at_once_from_its_attempt_before(tmp_path):
    step(tmp_path / "run", 1)
    foreign(tmp_path / "run", job="77.0", attempt=0)
    env = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_RESTART_COUNT": "1"}
    began = time.monotonic()
    CheckpointDirectory(tmp_path / "run").hold(*holder(env, tmp_path))
    assert time.monotonic() - began < 3


@pytest.mark.slow
def test_an_element_of_a_job_array_is_told_to_take_a_directory_of_its_own(tmp_path):
    env = {"SLURM_JOB_ID": "78", "SLURM_ARRAY_TASK_ID": "1"}
    with holding(tmp_path / "run"), pytest.raises(CheckpointError) as raised:
        CheckpointDirectory(tmp_path / "run").hold(*holder(env, tmp_path / "run"))
    assert f"Checkpoint('{tmp_path}/run-' + os.environ['SLURM_ARRAY_TASK_ID'], ...)" in str(raised.value)


def test_a_writer_whose_lease_was_taken_over_commits_nothing_more(tmp_path):
    commits = CheckpointDirectory(tmp_path / "run")
    commits.commit(file.pack({"step": 1}), 1)
    foreign(tmp_path / "run")
    before = sorted(os.listdir(tmp_path / "run"))
    with pytest.raises(
        CheckpointError, match=r"run was taken over by job 77\.0, process 4711 on node07, so this"
    ):
        commits.commit(file.pack({"step": 2}), 2)
    assert sorted(os.listdir(tmp_path / "run")) == before
    commits.release()
    with open_directory(tmp_path / "run") as dir_fd:
        assert lease.read(dir_fd).holder.host == "node07"


def test_a_lease_that_was_taken_over_while_a_commit_was_written_keeps_that_commit_from_its_name(
    tmp_path, monkeypatch
):
    commits = CheckpointDirectory(tmp_path / "run")
    commits.commit(file.pack({"step": 1}), 1)
    write = file.write

    def long(*arguments):
        foreign(tmp_path / "run")
        return write(*arguments)

    monkeypatch.setattr(file, "write", long)
    with pytest.raises(CheckpointError, match=r"run was taken over by job 77\.0"):
        commits.commit(file.pack({"step": 2}), 2)
    assert [entry.step for entry in file.listing(tmp_path / "run")] == [1]


def test_two_objects_of_a_process_follow_each_others_commits(tmp_path):
    first, second = (CheckpointDirectory(tmp_path / "run", keep=9) for _ in range(2))
    for number in range(1, 7):
        (first, second)[number % 2].commit(file.pack({"step": number}), number)
    second.release()
    first.commit(file.pack({"step": 7}), 7)
    first.release()
    found = CheckpointDirectory(tmp_path / "run").newest(
        lambda name, dir_fd: file.read(name, dir_fd=dir_fd)[0]
    )
    assert (found.value, found.refused) == ({"step": 7}, ())
    assert [entry.number for entry in file.listing(tmp_path / "run")] == [7, 6, 5, 4, 3, 2, 1]
    with open_directory(tmp_path / "run") as dir_fd:
        assert lease.read(dir_fd).holder is None
        assert [number for number, _ in lease.read(dir_fd).commits] == [6, 7]


@pytest.mark.slow
def test_of_processes_that_begin_at_once_one_holds_the_directory(tmp_path):
    words = [sys.executable, "-c", HOLD, tmp_path / "run"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(words, **pipes) for _ in range(4)]
    try:
        until = time.monotonic() + 30
        while sum(process.poll() is None for process in started) > 1 and time.monotonic() < until:
            time.sleep(0.05)
        (winner,) = (process for process in started if process.poll() is None)
        assert winner.stdout.readline() == "held\n"
    finally:
        for process in started:
            process.kill()
        said = [process.communicate()[1] for process in started]
    assert sum("is held by another run (" in text for text in said) == 3


def test_a_lease_that_was_removed_is_written_again(tmp_path):
    commits = CheckpointDirectory(tmp_path / "run")
    commits.commit(file.pack({"step": 1}), 1)
    (tmp_path / "run" / lease.NAME).unlink()
    commits.commit(file.pack({"step": 2}), 2)
    with open_directory(tmp_path / "run") as dir_fd:
        assert lease.read(dir_fd).holder.pid == os.getpid()
    assert (
        CheckpointDirectory(tmp_path / "run")
        .newest(lambda name, dir_fd: file.peek(name, dir_fd=dir_fd))
        .refused
        == ()
    )


def test_the_lease_is_renewed_while_its_holder_does_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.05)
    commits = CheckpointDirectory(tmp_path / "run")
    commits.commit(file.pack({"step": 1}), 1)
    age(tmp_path / "run", 100)
    until = time.monotonic() + 5
    while time.time() - (tmp_path / "run" / lease.NAME).stat().st_mtime > 1 and time.monotonic() < until:
        time.sleep(0.01)
    assert time.monotonic() < until
    commits.release()


@pytest.mark.parametrize("kind", ["symbolic link", "hard link", "pipe", "directory"])
def test_what_lies_in_the_place_of_the_lease_is_not_written_through(tmp_path, kind):
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("mine")
    path = tmp_path / "run" / lease.NAME
    make = {
        "symbolic link": lambda: path.symlink_to(tmp_path / "precious"),
        "hard link": lambda: path.hardlink_to(tmp_path / "precious"),
        "pipe": lambda: os.mkfifo(path),
        "directory": path.mkdir,
    }
    make[kind]()
    with pytest.raises(CheckpointError, match="checkpoint skipped: "):
        step(tmp_path / "run", 1)
    assert (tmp_path / "precious").read_text() == "mine"


def test_no_lease_that_somebody_wrote_breaks_a_run(tmp_path):
    step(tmp_path / "run", 1)
    good = (tmp_path / "run" / lease.NAME).read_text()
    for text in (
        "",
        "[" * 5000,
        "\0" * 2048,
        good[:-1700],
        good.replace("commits", "x"),
    ):
        (tmp_path / "run" / lease.NAME).write_text(text)
        step(tmp_path / "run", 2)


def test_a_dead_process_whose_number_is_taken_is_not_the_holder(tmp_path):
    me = lease.this_process()
    assert lease._is_alive(me)
    assert not lease._is_alive(me._replace(began=me.began - 100))
    assert not lease._is_alive(me._replace(began=float("nan")))
    assert not lease._is_alive(me._replace(pid=2**80))
