"""What lies where in a run's directory."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from samestep.errors import UsageError
from samestep.rundir import (
    Pulse,
    ask_for_stacks,
    begin_run,
    create_run,
    log_path,
    pulse_in,
    pulse_of,
    pulse_path,
    read_pulse,
    read_record,
    scratch_advice,
)


def test_a_run_keeps_everything_to_its_user(tmp_path):
    run = create_run(str(tmp_path / "runs"), {}, {"size": 2})
    assert read_record(run / "run.json") == {"size": 2}
    for path in (run, run / "logs", run / "pulse"):
        assert path.stat().st_mode & 0o777 == 0o700
    assert (run / "run.json").stat().st_mode & 0o777 == 0o600
    assert log_path(run, 3) == run / "logs" / "rank-3.log"


def test_a_run_that_a_batch_job_begins_has_every_folder_too(tmp_path):
    begin_run(tmp_path / "runs" / "train_7", {"size": 2})
    assert sorted(path.name for path in (tmp_path / "runs" / "train_7").iterdir() if path.is_dir()) == [
        "failures",
        "logs",
        "pulse",
    ]


def test_runs_are_private_whatever_the_umask_is(tmp_path):
    before = os.umask(0)
    try:
        run = create_run(str(tmp_path / "deep" / "runs"), {}, {"size": 2})
        begin_run(tmp_path / "other" / "train_7", {"size": 2})
    finally:
        os.umask(before)
    for path in (run, *run.parents[:2], *run.iterdir(), tmp_path / "other", *(tmp_path / "other").iterdir()):
        assert path.stat().st_mode & 0o077 == 0, path


def test_runs_that_begin_together_have_directories_of_their_own(tmp_path):
    assert len({create_run(str(tmp_path), {}, {}) for _ in range(20)}) == 20


def test_the_root_is_the_flag_then_the_variable_then_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env = {"SAMESTEP_RUN_DIR": str(tmp_path / "set")}
    assert create_run(str(tmp_path / "flag"), env, {}).parent == tmp_path / "flag"
    assert create_run(None, env, {}).parent == tmp_path / "set"
    assert create_run(None, {}, {}).parent == tmp_path / "runs"


def test_an_unwritable_root_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"file/runs cannot be written \(not a directory\); name another"):
        create_run(str(tmp_path / "file" / "runs"), {}, {})


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")
def test_a_full_disk_is_one_sentence_before_anything_starts(tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", full], check=True)
    try:
        (full / "filler").write_bytes(b"x" * 4096)
        with pytest.raises(UsageError, match="no space left on device"):
            create_run(str(full), {}, {"size": 2})
    finally:
        subprocess.run(["umount", full], check=True)


def test_a_pulse_tells_another_process_step_epoch_and_device(tmp_path):
    path = tmp_path / "rank-0"
    beat = f"""
from pathlib import Path
from samestep.rundir import Pulse
Pulse(Path({str(path)!r}), "cuda:3").beat(417, epoch=2)
"""
    subprocess.run([sys.executable, "-c", beat], check=True)
    reading = read_pulse(path)
    assert reading is not None
    assert (reading.step, reading.epoch, reading.device) == (417, 2, "cuda:3")
    assert (reading.phase, reading.call) == ("start", "")


def test_a_pulse_tells_the_phase_the_call_and_since_when(tmp_path):
    pulse = Pulse(tmp_path / "rank-0")
    pulse.beat(3)
    began = time.monotonic()
    pulse.enter("exchange", "samestep.sum (train.py:29)")
    reading = read_pulse(tmp_path / "rank-0")
    assert reading is not None
    assert (reading.step, reading.phase, reading.call) == (3, "exchange", "samestep.sum (train.py:29)")
    assert began <= reading.phase_began <= time.monotonic()
    pulse.beat(4, epoch=1)
    later = read_pulse(tmp_path / "rank-0")
    assert later is not None
    assert later[3:] != reading[3:]
    assert (later.step, later.epoch, later[5:]) == (4, 1, reading[5:])
    assert (later.waits, later.pid) == (1, os.getpid())
    pulse.enter("user")
    pulse.enter("call", "samestep.sum (train.py:29)")
    assert read_pulse(tmp_path / "rank-0").waits == 2


def test_a_call_of_any_length_and_script_fits_in_a_pulse(tmp_path):
    pulse = Pulse(tmp_path / "rank-0")
    pulse.enter("a phase of another version", "é" * 200)
    reading = read_pulse(tmp_path / "rank-0")
    assert reading is not None
    assert (reading.phase, reading.call) == ("other", "é" * 80)
    pulse.enter("data", "é" * 80 + "x")
    assert read_pulse(tmp_path / "rank-0").call == "é" * 80


def test_half_a_write_is_never_read_as_a_pulse(tmp_path):
    path = tmp_path / "rank-0"
    pulse = Pulse(path)
    pulse.beat(1)
    before = path.read_bytes()
    pulse.beat(2)
    pulse.enter("data", "next")
    after = path.read_bytes()
    for cut in range(9, len(after)):
        for torn in (after[:cut] + before[cut:], before[:cut] + after[cut:]):
            path.write_bytes(torn)
            reading = read_pulse(path)
            assert reading is None or (reading.step, reading.call) in ((1, ""), (2, "next")), cut


def test_a_reader_beside_a_fast_writer_sees_only_whole_pulses(tmp_path):
    path = tmp_path / "rank-0"
    write = f"""
from pathlib import Path
from samestep.rundir import Pulse
pulse = Pulse(Path({str(path)!r}))
print(flush=True)
step = 0
while True:
    step += 1
    pulse.beat(step, step)
    pulse.enter("data" if step % 2 else "forward", str(step))
"""
    with subprocess.Popen([sys.executable, "-c", write], stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None
            writer.stdout.readline()
            seen = set()
            until = time.monotonic() + 1
            while time.monotonic() < until:
                if (reading := read_pulse(path)) and reading.step > 1:
                    assert reading.step == reading.epoch
                    assert int(reading.call) in (reading.step, reading.step - 1)
                    seen.add(reading.step)
        finally:
            writer.kill()
    assert len(seen) > 10


def test_a_pulse_says_how_often_its_stacks_were_asked_for(tmp_path):
    pulse = Pulse(tmp_path / "rank-0")
    pulse.beat(3)
    with open(tmp_path / "rank-0", "r+b") as file:
        assert pulse.asked == 0
        ask_for_stacks(file.fileno())
        ask_for_stacks(file.fileno())
        assert pulse.asked == 2
        assert pulse_in(file.fileno()).step == 3


def test_a_pulse_of_another_version_is_none(tmp_path):
    path = tmp_path / "rank-0"
    Pulse(path).beat(1)
    data = bytearray(path.read_bytes())
    data[len(b"pulse\0\0")] -= 1
    path.write_bytes(data)
    assert read_pulse(path) is None
    path.write_bytes(data[:32])
    assert read_pulse(path) is None


def test_a_pulse_before_the_first_step_says_so(tmp_path):
    Pulse(tmp_path / "rank-0")
    reading = read_pulse(tmp_path / "rank-0")
    assert reading is not None
    assert (reading.step, reading.device) == (-1, "cpu")


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 32, b"x" * 33])
def test_a_damaged_pulse_is_none(tmp_path, content):
    (tmp_path / "rank-0").write_bytes(content)
    assert read_pulse(tmp_path / "rank-0") is None


def test_a_worker_finds_its_pulse_only_inside_a_run(tmp_path):
    run = create_run(str(tmp_path), {}, {})
    assert pulse_of({"SAMESTEP_RUN": str(run)}, 1) == pulse_path(run, 1)
    assert pulse_of({}, 1) is None
    assert pulse_of({"SAMESTEP_RUN": os.devnull}, 1) is None


def test_a_record_that_was_torn_is_none(tmp_path: Path):
    (tmp_path / "run.json").write_text('{"size": ')
    assert read_record(tmp_path / "run.json") is None


def test_a_run_in_the_home_directory_is_remarked_where_there_is_scratch(tmp_path):
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    scratch.mkdir()
    env = {"HOME": str(home), "SCRATCH": str(scratch)}
    assert scratch_advice(home / "runs" / "1120-2023", env) == (
        f"the run's files go to {home}/runs in the home directory; SAMESTEP_RUN_DIR={scratch} is made for them"
    )
    assert scratch_advice(scratch / "runs" / "1120-2023", env) is None
    assert scratch_advice(home / "runs" / "1120-2023", {"HOME": str(home)}) is None
    home.mkdir()
    (tmp_path / "link").symlink_to(home)
    assert scratch_advice(tmp_path / "link" / "runs" / "1120-2023", env)
