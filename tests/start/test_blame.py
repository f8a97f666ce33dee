"""A failure is told with the exception and the rank that began it, not with what other ranks met because of it."""

import re
import signal

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("calls", "says"),
    [
        (
            "dist.all_reduce(torch.ones(1)); dist.barrier()",
            "rank 1, which is in barrier (train.py:12) after {}; these",
        ),
        ("dist.all_reduce(torch.ones(1)); time.sleep(99)", "rank 1, which is at train.py:12 after {}\n"),
        (
            "samestep.sum(1); samestep.save('state.pt', {{}})",
            "at samestep.save (train.py:12); every rank has to make",
        ),
    ],
)
def test_an_exception_that_a_script_handles_is_told_where_its_finally_waits_for_others(calls, says, launcher):
    others, finally_calls = calls.split("; ")
    launcher.write(
        f"""
        import time, torch, torch.distributed as dist, samestep
        rank = samestep.init().rank
        try:
            if rank == 1:
                raise ValueError("mine")
            {others}
        except KeyError:
            print()
        finally:
            if rank == 1:
                {finally_calls.format()}
        """
    )
    code, _, err = launcher.run("-n", "2", "--fork", "--hang-timeout", "7", "train.py")
    assert code == 1
    assert "failed on rank 1 of 2" in err
    assert says.format("ValueError: mine (train.py:6)") in err
    assert ("while it handled ValueError: mine (train.py:6)" in err) == ("save" in finally_calls)


@pytest.mark.slow
def test_a_rank_that_reads_what_rank_0_still_writes_is_told_how_to_wait_for_it(launcher):
    launcher.write(
        """
        import torch, samestep
        open("whole.pt", "wb").close()
        rank = samestep.init().rank
        if rank == 1:
            torch.load("whole.pt")
        samestep.sum(1)
        """
    )
    code, _, err = launcher.run("-n", "2", "--fork", "train.py")
    assert (code, "failed on rank 1 of 2" in err, "EOFError" in err) == (1, True, True)
    assert "other ranks have to wait for it: write it with samestep.save" in err


@pytest.mark.slow
def test_what_a_rank_printed_is_told_where_a_script_goes_on_after_every_exception(launcher):
    launcher.write(
        """
        import traceback, torch, torch.distributed as dist, samestep
        rank = samestep.init().rank
        try:
            if rank == 1:
                raise ValueError("mine")
            dist.all_reduce(torch.ones(1))
        except Exception:
            traceback.print_exc()
        """
    )
    code, _, err = launcher.run("-n", "2", "--fork", "train.py")
    assert code == 0
    assert (
        "although rank 0 lost another rank: rank 1 had printed ValueError: mine (train.py:6). Logs: " in err
    )


@pytest.mark.slow
@pytest.mark.parametrize("left_out", ["first", "second"])
@pytest.mark.parametrize("size", [2, 3])
def test_the_rank_that_leaves_out_the_backward_of_one_of_two_models_is_named(size, left_out, launcher):
    launcher.write(
        f"""
        import torch, samestep
        rank = samestep.init().rank
        models = [samestep.replicate(torch.nn.Linear(8, width)) for width in (8, 3)]
        train = samestep.loader(torch.utils.data.TensorDataset(torch.ones(240, 8)), 12)
        for step, (x,) in enumerate(train):
            for name, model in zip(("first", "second"), models):
                loss = model(x).square().mean()
                if (step, rank, name) != (6, 0, "{left_out}"):
                    loss.backward()
        """
    )
    code, _, err = launcher.run("-n", str(size), "--fork", "--hang-timeout", "7", "train.py")
    assert f"failed on rank 0 of {size}" in err
    if code == 128 + signal.SIGABRT:  # the models' sizes differ, and Gloo may see that first, and aborts
        assert "on every rank call backward() of the same models" in err
        return
    assert code == 1
    others, number = ("rank 1 has" if size == 2 else "ranks 1, 2 have"), (2 if left_out == "first" else 1)
    assert f"{others} waited " in err
    assert (
        f"for rank 0, which is in the gradient exchange of step {7 if number == 2 else 8} of model {number} ("
        in err
    )
    assert f"for the first time after model {number}; these are different calls" in err


@pytest.mark.slow
def test_ranks_that_all_wait_to_receive_are_not_asked_for_a_cut_link(launcher):
    launcher.write(
        """
        import torch, torch.distributed as dist, samestep
        world = samestep.init()
        dist.recv(torch.zeros(3), (world.rank + 1) % world.size)
        """
    )
    code, _, err = launcher.run("-n", "2", "--fork", "--hang-timeout", "7", "train.py")
    assert code == 1
    assert "all ranks have been in recv (train.py:4) for " in err
    assert (
        "each waits for what another one sends, and none sends; let one of every two ranks send first" in err
    )
    assert "link" not in err


IN_A_THREAD = """
    import threading, time, torch, samestep

    def train():
        rank = samestep.init().rank
        model = samestep.replicate(torch.nn.Linear(4, 1))
        for (x,) in samestep.loader(torch.utils.data.TensorDataset(torch.ones(6, 4)), batch_size=6):
            until = time.monotonic() + 7
            going = torch.ones(1)
            while going:  # in calls of torch, while the main thread sleeps
                going.fill_(time.monotonic() < until)
                torch.distributed.all_reduce(going, torch.distributed.ReduceOp.MIN)
            if rank == 1:
                time.sleep(1000)
            model(x).mean().backward()

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    thread.join()
"""


@pytest.mark.slow
def test_a_rank_that_trains_in_a_thread_is_told_by_the_line_of_that_thread(launcher):
    launcher.write(IN_A_THREAD)
    code, _, err = launcher.run("-n", "2", "--fork", "--hang-timeout", "8", "train.py")
    assert code == 1
    waits = r"samestep: rank 0 has waited .* in the gradient exchange .*\(train.py:15\) "
    assert re.match(waits + r"for rank 1, which is in train \(train.py:14\)\n", err), err
