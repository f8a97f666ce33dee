"""A killed run goes on from the state that its launcher holds in memory, with the bits of the undisturbed run."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest

from samestep.errors import CheckpointError
from samestep.rundir import SLOTS
from samestep.state import file

TRAIN = """
    import hashlib, os, sys, time
    from datetime import timedelta
    import torch
    import samestep
    world = samestep.init()
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1))
    model = samestep.replicate(net, exact=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    train = samestep.steps(data, 8, microbatch=4, shuffle=True)
    run = samestep.Checkpoint("commits", every=timedelta(hours=1), model=model, optimizer=optimizer, train=train)
    run.resume()
    print(os.getpid(), file=open(f"pids-{world.rank}", "a"), flush=True)
    for epoch in train.epochs(int(sys.argv[1])):
        for step in train:
            for x, y in step:
                (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.01)
            run.step()
    bits = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    samestep.sum(1)
    if world.rank == 0:
        print("bits", hashlib.sha256(bits).hexdigest())
"""


def slots(launcher_pid):
    """The files that the launcher holds for the state."""
    found = []
    for path in Path(f"/proc/{launcher_pid}/fd").iterdir():
        try:
            if os.readlink(path).startswith(f"/memfd:{SLOTS[0]} "):
                found.append(path)
        except OSError:
            continue
    return found


def is_complete(slot):
    """Whether a state was written to its end."""
    try:
        with open(slot, "rb") as opened:
            return bool(file.verify(opened.fileno()))
    except CheckpointError:
        return False


def wait_until(is_so, seconds=30.0):
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture(scope="module")
def undisturbed(nest, tmp_path_factory):
    """What one process prints that nobody kills."""
    home = tmp_path_factory.mktemp("undisturbed")
    (home / "train.py").write_text(dedent(TRAIN))
    (rank,) = nest.start(home / "train.py", 1, "20", cwd=home, apart=True)
    assert nest.wait([rank]) == [0], rank.complained
    return rank.said


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("a rank", marks=pytest.mark.slow),
        pytest.param("all ranks", marks=pytest.mark.long),
        pytest.param("all ranks, and the memory is damaged", marks=pytest.mark.slow),
    ],
)
def test_killed_ranks_go_on_from_memory_with_the_same_bits(launcher, undisturbed, case):
    launcher.write(TRAIN)
    started = launcher.start("-n", "2", "--fork", "--max-restarts", "1", "train.py", "20")
    pids = [int(started.wait_for_lines(f"pids-{rank}")[0]) for rank in range(2)]
    held = slots(started.process.pid)
    assert len(held) == 2
    wait_until(lambda: any(map(is_complete, held)))
    for pid in pids if "all" in case else pids[1:]:
        os.kill(pid, signal.SIGKILL)
    if "damaged" in case:
        for path in held:
            with open(path, "r+b") as damaged:
                damaged.write(b"\0" * 64)
    code, out, err = started.finish()
    assert code == 0, err
    assert out == undisturbed
    found = re.search(r"going on after step (\d+) from memory", err)
    assert bool(found and int(found[1])) == ("damaged" not in case)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("later_s", [0.0, 0.2])
def test_a_run_that_is_asked_to_end_while_it_recovers_commits_what_it_kept_in_memory(
    launcher, later_s, number
):
    launcher.write(TRAIN)
    started = launcher.start("-n", "2", "--fork", "--max-restarts", "1", "train.py", "2000")
    pids = [int(started.wait_for_lines(f"pids-{rank}")[0]) for rank in range(2)]
    wait_until(lambda: any(map(is_complete, slots(started.process.pid))))
    os.kill(pids[1], signal.SIGKILL)
    time.sleep(later_s)
    started.process.send_signal(number)
    code, _, err = started.finish()
    assert code == (75 if number == signal.SIGTERM else 130), err
    kept = re.search(r"going on after step (\d+) from memory", err)
    committed = re.search(r"after step (\d+), which is committed", err)
    assert kept, err
    assert committed, err
    assert int(committed[1]) >= int(kept[1])


@pytest.mark.parametrize(("options", "count"), [([], 0), (["--max-restarts", "1", "--no-fork"], 2)])
def test_only_a_run_with_restarts_has_memory_for_its_state(launcher, options, count):
    launcher.write("open('up', 'w').write('up\\n')\nimport time\ntime.sleep(1)")
    started = launcher.start("-n", "1", *options, "train.py")
    started.wait_for_lines("up")
    assert len(slots(started.process.pid)) == count
    assert started.finish()[0] == 0


@pytest.mark.long
@pytest.mark.timeout(300)
def test_runs_killed_in_every_way_are_restarted_and_end_with_the_bits_of_the_undisturbed_run():
    words = [
        sys.executable,
        Path(__file__).parents[1] / "in_place.py",
        "--kills",
        "14",
        "--nodes",
        "0",
        "--torchrun",
        "0",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "unrecovered 0, lost 0, twice 0, bits 0" in done.stdout
