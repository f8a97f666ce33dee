"""A run that hangs ends when it is asked to, or when its time is over, and goes on where restarts are on."""

import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

HUNG = """
    import os, re, sys, torch, samestep
    from datetime import timedelta
    world = samestep.init(timeout=timedelta(seconds={timeout}))
    model = samestep.replicate(torch.nn.Linear(2, 1), exact=True)
    data = torch.utils.data.TensorDataset(torch.ones(24, 2))
    for step, batch in enumerate(samestep.steps(data, 6, microbatch=2)):
        if world.rank == 1 and step == 2 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            print(file=open("stuck", "a"))
            re.match("(a+)+$", "a" * 60 + "b")  # holds the GIL
        for (x,) in batch:
            model(x).mean().backward()
"""


@pytest.mark.slow
def test_the_timeout_of_init_ends_a_hung_run_of_an_exact_model(launcher):
    launcher.write(HUNG.format(timeout=9))
    started = launcher.start("-n", "2", "--fork", "train.py")
    started.wait_for_lines("stuck")
    began = time.monotonic()
    code, _, err = started.finish()
    assert (code, 8 < time.monotonic() - began < 25) == (1, True)
    assert err.count("for rank 1, which is at train.py:10\n") == 2  # the notice, and the report
    assert "failed on rank 1 of 2" in err


@pytest.mark.slow
@pytest.mark.parametrize("way", ["Ctrl-C", "samestep stop"])
def test_a_hung_run_that_hears_nothing_is_ended_within_the_shutdown_timeout(launcher, way):
    launcher.write(HUNG.format(timeout=600))
    started = launcher.start("-n", "2", "--fork", "--shutdown-timeout", "7", "train.py")
    started.wait_for_lines("stuck")
    began = time.monotonic()
    if way == "Ctrl-C":
        started.process.send_signal(signal.SIGINT)
    else:
        command = [sys.executable, "-m", "samestep", "stop"]
        subprocess.run(command, cwd=launcher.home, env=launcher.env, check=True, capture_output=True)
    code, _, err = started.finish()
    assert time.monotonic() - began < 25  # of 30 s without the option
    assert code == 128 + (signal.SIGINT if way == "Ctrl-C" else signal.SIGTERM)
    *_, said = err.splitlines()
    assert re.match(
        f"train.py was stopped by {'SIGINT' if way == 'Ctrl-C' else '`samestep stop`'} after ", said
    )
    assert "failed" not in err
    assert way == "Ctrl-C" or "in a hang: rank 0 has waited " in said  # Ctrl-C ends rank 0's wait


@pytest.mark.slow
@pytest.mark.parametrize("way", ["SIGTERM", "samestep stop"])
def test_a_run_that_hangs_in_init_and_is_stopped_says_so_in_one_sentence(launcher, way):
    launcher.write(
        "import os, signal, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    time.sleep(99)\n"
        "import samestep\nprint(file=open('there', 'a'))\nsamestep.init()"
    )
    started = launcher.start("-n", "2", "--fork", "--shutdown-timeout", "7", "train.py")
    started.wait_for_lines("there")
    if way == "SIGTERM":
        started.process.send_signal(signal.SIGTERM)
    else:
        command = [sys.executable, "-m", "samestep", "stop"]
        subprocess.run(command, cwd=launcher.home, env=launcher.env, check=True, capture_output=True)
    code, _, err = started.finish()
    *_, said = err.splitlines()
    assert (code, "failed" in err) == (128 + signal.SIGTERM, False)
    assert re.match(f"train.py was stopped by `?{way}`? after .*Logs: ", said)


@pytest.mark.slow
def test_a_hung_run_is_started_again_and_ends_well(launcher):
    launcher.write(HUNG.format(timeout=600))
    options = ["--fork", "--hang-timeout", "6", "--max-restarts", "2"]
    started = launcher.start("-n", "2", *options, "train.py")
    started.wait_for_lines("stuck")
    code, _, err = started.finish()
    assert code == 0
    assert "rank 1 failed in step 3 (rank 0 has waited" in err
    assert "which is at train.py:10): restart 1 of 2" in err
    assert "restart 2 of 2" not in err


@pytest.mark.slow
def test_a_rank_that_goes_into_the_background_ends_with_the_run(launcher):
    launcher.write(
        """
        import os, time
        if os.environ["RANK"] == "1":
            if child := os.fork():
                os.waitpid(child, 0)
                os._exit(0)
            os.setsid()
            if os.fork():
                os._exit(0)
        import samestep
        rank = samestep.init().rank
        samestep.sum(1)
        if rank == 1:
            open("pid", "w").write(str(os.getpid()))
            time.sleep(50)
        while not os.path.exists("pid"):
            time.sleep(0.1)
        raise ValueError("why")
        """
    )
    code, _, err = launcher.run("-n", "2", "train.py")
    pid = int((launcher.home / "pid").read_text())
    assert code == 1
    assert f"rank 1 went on in the background as process {pid}; it was killed" in err
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_process_that_a_rank_put_in_a_session_of_its_own_is_named_and_lives_on(launcher):
    launcher.write(
        """
        import os, subprocess
        if os.environ["RANK"] == "1":
            for apart in (False, True):
                child = subprocess.Popen(["sleep", "40"], start_new_session=apart)
            open("pid", "w").write(str(child.pid))
        """
    )
    code, _, err = launcher.run("-n", "2", "train.py")
    child = psutil.Process(int((launcher.home / "pid").read_text()))
    child.kill()
    says = f"samestep: process {child.pid}, which rank 1 started apart, lives on: sleep 40"
    assert (code, err.splitlines()) == (0, [says])


def test_a_process_that_lives_on_is_named_once_over_all_restarts(launcher):
    launcher.write(
        """
        import os, subprocess
        if not os.path.exists("pid"):
            open("pid", "w").write(str(subprocess.Popen(["sleep", "40"], start_new_session=True).pid))
        os._exit(3 + int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
        """
    )
    code, _, err = launcher.run("-n", "1", "--max-restarts", "2", "train.py")
    child = psutil.Process(int((launcher.home / "pid").read_text()))
    child.kill()
    assert (code, err.count("restart "), err.count("lives on: sleep 40")) == (5, 2, 1)


def test_a_script_without_init_is_said_not_to_be_watched_where_a_hang_timeout_is_written(launcher):
    launcher.write("import time\ntime.sleep(2)")
    code, _, err = launcher.run("-n", "2", "--hang-timeout", "0.5", "train.py")
    says = "samestep: no rank has called samestep.init yet, and --hang-timeout ends no hang before that"
    assert (code, err.splitlines()) == (0, [says])


@pytest.mark.slow
def test_status_names_a_rank_that_does_not_come_to_init(launcher):
    launcher.write(
        "import os, time, samestep\nif os.environ['RANK'] == '1':\n    time.sleep(99)\nsamestep.init()"
    )
    run = launcher.start("-n", "2", "--fork", "--hang-timeout", "12", "train.py")
    status, said = [sys.executable, "-m", "samestep", "status"], ""
    while run.process.poll() is None and "waited" not in said:
        time.sleep(0.5)
        said = subprocess.run(status, cwd=launcher.home, capture_output=True, text=True).stdout
    assert "\n  rank 1    has not come to samestep.init\n" in said
    assert re.search(
        "rank 0 has waited .* in samestep.init .* for rank 1, which has not come to samestep.init\n", said
    )
    assert run.finish()[0] == 1


@pytest.mark.slow
def test_an_evaluation_in_training_mode_that_leaves_ranks_without_a_sample_fails_and_does_not_hang(launcher):
    launcher.write(
        """
        import torch, samestep
        samestep.init()
        data = torch.utils.data.TensorDataset(torch.randn(9, 3, 4, 4))
        model = samestep.replicate(torch.nn.BatchNorm2d(3))
        with torch.no_grad():
            for (x,) in samestep.loader(data, 8):
                model(x)
        samestep.sum(1)
        """
    )
    code, _, err = launcher.run("-n", "2", "--fork", "--same", "train.py")
    said = "in an evaluation, and its batch of 1 sample leaves ranks without one; call model.eval() before"
    assert (code, said in err) == (1, True), err
