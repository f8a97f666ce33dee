"""Two runs never write to one directory, and a run that is killed leaves nothing behind that stops the next."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from trail import Trail, differing_bits

from samestep.state import file

SURVIVOR = Path(__file__).parents[2] / "survivor.py"
MEMORY = Path("/dev/shm")


def steps(directory):
    return [entry.step for entry in file.listing(directory)]


@pytest.mark.slow
def test_a_second_run_in_the_same_directory_is_refused_on_every_rank_and_the_first_is_undisturbed(
    nest, tmp_path
):
    undisturbed, trail = Trail(tmp_path / "undisturbed"), Trail(tmp_path / "run")
    nest.wait(nest.start(SURVIVOR, 2, undisturbed.directory, "--notes", undisturbed.log))
    first = nest.start(SURVIVOR, 2, trail.directory, "--notes", trail.log, "--pause", 0.1)
    while len(trail.taken()) < 2:
        nest.look(0.01)
    second = nest.start(SURVIVOR, 3, trail.directory, "--notes", tmp_path / "second")
    assert nest.wait(second) == [1, 1, 1]
    sentence = (
        f"{trail.directory} is held by another run (process {first[0].pid} on {os.uname().nodename}, last"
    )
    assert all(sentence in rank.said for rank in second), second[0].said
    assert nest.wait(first) == [0, 0]
    assert differing_bits(trail.state(), undisturbed.state()) == 0


@pytest.mark.slow
def test_a_script_that_never_resumes_is_refused_at_its_first_commit(nest, run, tmp_path):
    source = f"""
        checkpoint = samestep.Checkpoint({str(tmp_path / "commits")!r}, model=model, train=train)
        checkpoint.commit(wait=True)
        if len(sys.argv) > 1:
            print("committed", flush=True)
            time.sleep(30)
    """
    (tmp_path / "first").mkdir()
    script = tmp_path / "train.py"
    with suppress(AssertionError):
        run("raise SystemExit")
    text = script.read_text().replace("raise SystemExit", "")
    (tmp_path / "first.py").write_text(text + "\n".join(line[8:] for line in source.splitlines()))
    (first,) = nest.start(tmp_path / "first.py", 1, "wait")
    while "committed" not in first.said:
        nest.look(0.01)
    codes, said = run(source, 2)
    assert codes == [1, 1]
    assert all("commits is held by another run (process " in text for text in said)
    first.kill()
    nest.wait([first])
    assert run(source, 2)[0] == [0, 0]


@pytest.mark.slow
def test_a_run_that_is_restarted_while_its_ranks_are_still_dying_goes_on_at_once(nest, tmp_path):
    trail = Trail(tmp_path)
    for attempt in range(3):
        ranks = nest.start(
            SURVIVOR, 2, trail.directory, "--notes", trail.log, "--attempt", attempt, "--every", 1
        )
        began, before = time.monotonic(), len(trail.taken())
        while len(trail.taken()) < before + 2 and any(rank.code is None for rank in ranks):
            nest.look(0.01)
        assert time.monotonic() - began < 20
        assert len(trail.taken()) >= before + 2
        for rank in ranks:
            rank.kill()
    ranks = nest.start(SURVIVOR, 2, trail.directory, "--notes", trail.log, "--attempt", 9)
    assert nest.wait(ranks) == [0, 0], ranks[0].said


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_resumes_leaves_no_memory_behind(nest, tmp_path):
    trail = Trail(tmp_path)
    asked = (trail.directory, "--notes", trail.log, "--bulk", 100_000_000)
    assert nest.wait(nest.start(SURVIVOR, 1, *asked, "--stop-at", 1)) == [0]
    before = set(os.listdir(MEMORY))
    first, second = nest.start(SURVIVOR, 2, *asked)
    until = time.monotonic() + 30
    while not (held := in_memory(second.pid)) and second.code is None and time.monotonic() < until:
        nest.look(0.001)
    second.kill(signal.SIGKILL)
    first.kill()
    nest.wait([first, second])
    assert held, "the rank was not seen while it received the state"
    assert all(name.endswith(" (deleted)") for name in held)
    assert set(os.listdir(MEMORY)) <= before


def in_memory(pid):
    """The files in /dev/shm that a process has open."""
    names = []
    with suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                names += [name for name in [os.readlink(fd)] if name.startswith(f"{MEMORY}/")]
    return names


@pytest.mark.slow
def test_workers_whose_launcher_and_guardian_were_killed_commit_nothing_more(nest, tmp_path):
    trail, undisturbed = Trail(tmp_path / "run"), Trail(tmp_path / "undisturbed")
    nest.wait(nest.start(SURVIVOR, 1, undisturbed.directory, "--notes", undisturbed.log))
    asked = [SURVIVOR, trail.directory, "--notes", trail.log, "--pause", "0.1", "--every", "1"]
    with subprocess.Popen(
        [sys.executable, "-m", "samestep", "run", "-n", "2", *asked], cwd=tmp_path
    ) as launcher:
        while len(trail.taken()) < 3:
            time.sleep(0.02)
        workers = {
            int(path.name) for path in Path("/proc").glob("[0-9]*") if str(trail.log) in words_of(path)
        }
        for child in psutil.Process(launcher.pid).children():
            if child.pid not in workers:
                child.kill()
        launcher.kill()
    # a run that goes on at once neither meets the old workers nor waits for them
    ranks = nest.start(SURVIVOR, 2, trail.directory, "--notes", trail.log, "--attempt", 1)
    assert nest.wait(ranks) == [0, 0], ranks[0].said
    assert not any(str(trail.log) in words_of(Path(f"/proc/{pid}")) for pid in workers)
    assert differing_bits(trail.state(), undisturbed.state()) == 0


def words_of(process):
    try:
        return (process / "cmdline").read_text().split("\0")
    except OSError:
        return []
