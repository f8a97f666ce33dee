"""Jobs that Slurm stops in the middle, for real: each ends COMPLETED with the bits of the undisturbed run."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from fournodes import Cluster

from samestep.state import file as carry

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from trail import Trail, differing_bits  # noqa: E402

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(280)]

_SAMESTEP = str(Path(sys.executable).with_name("samestep"))
_EPOCHS, _STEPS_AN_EPOCH = 12, 4
_TRAIN = f"""
import os, runpy, sys
sys.argv[1:] += ["--attempt", os.environ.get("SLURM_RESTART_COUNT", "0")]
runpy.run_path({str(TESTS / "survivor.py")!r}, run_name="__main__")
"""


def _signal(cluster: Cluster, job: str) -> None:
    cluster.run("scancel", "--signal=USR1", job)


def _terminate(cluster: Cluster, job: str) -> None:
    cluster.run("scancel", "--signal=TERM", job)


def _requeue(cluster: Cluster, job: str) -> None:
    cluster.run("scontrol", "requeue", job)


def _preempt(cluster: Cluster, job: str) -> None:
    words = ("--partition=urgent", "--nodes=4", "--exclusive", "--wrap=sleep 1", "--output=/dev/null")
    cluster.wait_state(cluster.submit(*words), "COMPLETED")


def _kill_node(cluster: Cluster, job: str) -> None:
    nodes = cluster.run("scontrol", "show", "hostnames", cluster.field(job, "NodeList")).split()
    cluster.kill_node(nodes[1])
    cluster.wait_state(job, "PENDING", "RUNNING", timeout=30)
    cluster.wait_nodes("down*", "down", nodes=[nodes[1]])
    cluster.start_node(nodes[1])


def _wait(cluster: Cluster, job: str) -> None:
    """Its time limit of a minute is near: Slurm may send the signal up to a minute before the time told."""


def _restart_controller(cluster: Cluster, job: str) -> None:
    cluster.restart_controller()


class Fault(NamedTuple):
    """What happens to a job, how often it is requeued for it at least, and how it was submitted."""

    act: Callable[[Cluster, str], None]
    requeues: int
    words: tuple[str, ...] = ("--nodes=2", "--time=10")
    pause: str = "0.1"


FAULTS = {
    "scancel --signal=USR1": Fault(_signal, 1),
    "scancel --signal=TERM": Fault(_terminate, 1),
    "a node is killed": Fault(_kill_node, 1),
    "scontrol requeue": Fault(_requeue, 1),
    "preempted": Fault(_preempt, 1),
    "slurmctld restarts": Fault(_restart_controller, 0),
    "time limit": Fault(_wait, 1, ("--nodes=2", "--time=1", "--signal=USR1@25"), pause="0.6"),
    "TERM under torchrun": Fault(_terminate, 1, ("--launcher=torchrun", "--nodes=2", "--time=10")),
    "USR1, array's element": Fault(_signal, 1, ("--array=3", "--time=10")),
    "USR1, array ranks": Fault(_signal, 1, ("--array-ranks", "--nodes=2", "--time=10")),
}
_SHORT = 1


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trail:
    trail = Trail(tmp_path_factory.mktemp("undisturbed"))
    words = [str(trail.directory), "--notes", str(trail.log), "--epochs", str(_EPOCHS)]
    subprocess.run([sys.executable, str(TESTS / "survivor.py"), *words], check=True, timeout=60)
    return trail


def _wait_for_step(trail: Trail, step: int) -> None:
    until = time.monotonic() + 60
    while max(trail.taken(), default=0) < step:
        assert time.monotonic() < until, trail.log.parent.glob("*")
        time.sleep(0.1)


def _seconds_lost(trail: Trail) -> float:
    """The longest silence between two steps, and the steps taken again, at the pace of the others."""
    times = sorted(when for attempts in trail.taken().values() for when, _ in attempts.values())
    gaps = sorted(after - before for before, after in pairwise(times))
    redone = sum(len(attempts) - 1 for attempts in trail.taken().values())
    return gaps[-1] + redone * gaps[len(gaps) // 2]


@pytest.mark.slow
def test_a_job_is_looked_at_and_stopped_from_outside(isolated: Cluster, tmp_path: Path) -> None:
    trail = Trail(tmp_path / "run")
    (tmp_path / "train.py").write_text(_TRAIN)
    asked = ["--profile=cpu-node", "--nodes=2", "--tasks-per-node=1", "train.py", str(trail.directory)]
    asked += ["--notes", str(trail.log), "--epochs", "500", "--pause", "0.1"]
    job = isolated.run(_SAMESTEP, "submit", *asked, cwd=tmp_path).split("job ", 1)[1].split(";")[0]
    _wait_for_step(trail, 3)
    seen = json.loads(isolated.run(_SAMESTEP, "status", "--json", cwd=tmp_path))
    assert (Path(seen["run"]).name, seen["state"], seen["ranks"]) == (f"train_{job}", "running", 2)
    assert [row["step"] > 1 for row in seen["by_rank"]] == [True, True]
    isolated.run(_SAMESTEP, "stop", cwd=tmp_path)
    with pytest.raises(RuntimeError, match="is FAILED"):
        isolated.wait_state(job, "COMPLETED", timeout=60)
    assert (isolated.field(job, "ExitCode"), isolated.field(job, "Restarts")) == ("75:0", "0")
    assert "stopped at a checkpoint" in isolated.run(_SAMESTEP, "runs", cwd=tmp_path)
    assert "stopped by samestep stop after step" in isolated.run(_SAMESTEP, "logs", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("fault", list(FAULTS)[: None if os.environ.get("LONG") else _SHORT])
def test_a_job_that_is_stopped_ends_with_the_bits_of_the_undisturbed_run(
    fault: str, isolated: Cluster, undisturbed: Trail, tmp_path: Path, losses: list[str]
) -> None:
    """LONG=1 tries every fault."""
    trail = Trail(tmp_path / "run")
    (tmp_path / "train.py").write_text(_TRAIN)
    act, requeues, words, pause = FAULTS[fault]
    asked = ["--profile=cpu-node", "--tasks-per-node=1", *words, "train.py", str(trail.directory)]
    asked += ["--notes", str(trail.log), "--epochs", str(_EPOCHS), "--every", "0.5", "--pause", pause]
    number = isolated.run(_SAMESTEP, "submit", *asked, cwd=tmp_path).split("job ", 1)[1].split(";")[0]
    elements = {"--array=3": ["_3"], "--array-ranks": ["_0", "_1"]}.get(words[0], [""])
    jobs = [number + element for element in elements]
    _wait_for_step(trail, 10)
    logs = [tmp_path / "runs" / f"train_{job}.out" for job in jobs]
    act(isolated, jobs[-1])
    try:
        for job in jobs:
            isolated.wait_state(job, "COMPLETED", timeout=200)
    except RuntimeError as error:
        raise AssertionError("\n".join([str(error), *(log.read_text() for log in logs)])) from None
    lost, twice = trail.against(undisturbed)
    bits = differing_bits(trail.state(), undisturbed.state())
    redone = sum(len(attempts) - 1 for attempts in trail.taken().values())
    (restarts,) = {int(isolated.field(job, "Restarts")) for job in jobs}
    losses.append(
        f"{fault:<22}  requeued {restarts}  steps redone {redone:>2}  samples lost {lost} twice {twice}  "
        f"bits differing {bits}  time lost {_seconds_lost(trail):5.1f} s"
    )
    assert (lost, twice, bits) == (0, 0, 0)
    assert restarts == requeues or (fault == "time limit" and restarts > 0)
    log = "".join(log.read_text() for log in logs)
    assert len(re.findall("^samestep: going on after step", log, re.MULTILINE)) == restarts
    assert len(carry.listing(trail.directory)) == 2
