"""What a run does with a rank that does not end, whatever it is sent."""

import os
import time
from types import SimpleNamespace

import pytest

from samestep.start import supervise
from samestep.start.supervise import WorkerGroup
from samestep.start.worker import Guardian, WorkerSpec, start_process


def test_a_rank_that_the_kernel_does_not_end_keeps_no_run_from_its_end(monkeypatch):
    """As in a read of a file system that is gone: no poll ever sees its end."""
    monkeypatch.setattr(supervise, "_PATIENCE_S", 0.5)

    made = {}

    def unending(spec):
        made[spec.rank] = start_process(spec)
        return made[spec.rank]._replace(poll=lambda: None) if spec.rank else made[spec.rank]

    commands = ["exit 3", "exec sleep 100"]
    specs = [WorkerSpec(rank, ["sh", "-c", text], {}, None, None) for rank, text in enumerate(commands)]
    with Guardian() as guardian:
        group = WorkerGroup(specs, guardian, warm=SimpleNamespace(start=unending), grace_s=0.0)
        assert group.watch().status == 3
        guardian.stdin.close()
    left = made[1]
    while left.poll() is None:
        time.sleep(0.01)
    for opened in (left.stdout, left.stderr, os.fdopen(group.workers[1].pidfd)):
        opened.close()


@pytest.mark.slow
def test_a_process_that_a_rank_waits_for_at_its_end_is_told(launcher):
    launcher.write(
        """
        import multiprocessing, time, samestep
        samestep.init()
        multiprocessing.Process(target=time.sleep, args=(15,)).start()
        """
    )
    code, _, err = launcher.run("-n", "2", "--fork", "train.py")
    said = "ranks 0, 1, which have come to the end of the script, and wait for a process of multiprocessing"
    assert (code, said in err) == (0, True), err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "limit", "code", "said"),
    [
        ("os.kill(os.getpid(), 19)", "12", 1, "for the end of rank 1, which is stopped (SIGSTOP)\n"),
        ("time.sleep(100)", "6", 1, "for the end of rank 1, which is at train.py:6\n"),
        ("os.system('sleep 12')", "6", 0, ""),
    ],
)
def test_a_rank_that_does_nothing_after_all_others_have_ended_is_ended_for_a_hang_timeout(
    launcher, last, limit, code, said
):
    launcher.write(
        f"""
        import os, time, samestep
        world = samestep.init()
        samestep.mean(1.0)
        if world.rank:
            {last}
        """
    )
    ended, _, err = launcher.run("-n", "2", "--fork", "--hang-timeout", limit, "train.py")
    assert (ended, said in err) == (code, True), err
    assert err.count("the run has waited") == (2 if said else 0)
