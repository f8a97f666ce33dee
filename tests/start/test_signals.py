"""Signals that reach a run: the keyboard's, a scheduler's, and what workers make of them."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest


def sent_sigterm(launcher):
    """Exit code and stderr of a launcher that hears it when both workers are ready."""
    started = launcher.start("-n", "2", "train.py")
    started.wait_for_lines("ready", 2)
    started.process.send_signal(signal.SIGTERM)
    code, _, err = started.finish()
    return code, err


def test_ctrl_c_once_lets_workers_end_in_order(launcher, gone):
    launcher.write(
        """
        import os, time
        print(os.getpid(), file=open("pids", "a"), flush=True)
        try:
            time.sleep(100)
        except KeyboardInterrupt:
            print("saved", file=open("saved", "a"), flush=True)
            raise
        """
    )
    started = launcher.start("-n", "2", "train.py")
    pids = [int(pid) for pid in started.wait_for_lines("pids", 2)]
    os.killpg(started.process.pid, signal.SIGINT)
    code, _, err = started.finish()
    assert code == 130
    waiting = "waiting at most 30 s for ranks 0, 1 to end"
    assert err.startswith(f"stopping; {waiting}; press Ctrl-C again to stop at once\n")
    assert "train.py was stopped by SIGINT after" in err
    assert "Traceback" not in err
    assert started.wait_for_lines("saved") == ["saved", "saved"]
    gone(pids, 2)


def test_ctrl_c_twice_does_not_wait_for_stubborn_workers(launcher, gone):
    started, pids = launcher.start_stubborn()
    started.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert started.process.poll() is None
    began = time.monotonic()
    started.process.send_signal(signal.SIGINT)
    code, _, _ = started.finish()
    assert time.monotonic() - began < 5  # of 30 s without the second
    assert code == 130
    gone(pids, 2)


def test_workers_that_ignore_ctrl_c_have_a_time_limit(launcher, gone):
    started, pids = launcher.start_stubborn("--shutdown-timeout", "0.2")
    started.process.send_signal(signal.SIGINT)
    code, _, _ = started.finish()
    assert code == 130
    gone(pids, 2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_signals_reach_the_workers_whose_exit_code_counts(launcher, number):
    launcher.write(
        f"""
        import signal, sys, time
        signal.signal({int(number)}, lambda *_: sys.exit(75))
        ready = open("ready", "a")  # Python would drop what a handler raises while it closes a file without a name
        print("ready", file=ready, flush=True)
        time.sleep(100)
        """
    )
    started = launcher.start("-n", "2", "train.py")
    started.wait_for_lines("ready", 2)
    started.process.send_signal(number)
    code, _, err = started.finish()
    assert code == 75
    assert "stopped at a checkpoint" in err


def test_a_signal_that_workers_only_note_ends_nothing(launcher):
    launcher.write(
        """
        import signal, time
        heard = []
        signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
        print("ready", file=open("ready", "a"), flush=True)
        while not heard:
            time.sleep(0.01)
        time.sleep(0.5)
        """
    )
    code, err = sent_sigterm(launcher)
    assert code == 0
    assert "train.py was asked to end by SIGTERM, and every rank came to the end of the script after" in err


def test_workers_that_sigterm_ends_are_no_failure(launcher):
    launcher.write("import time\nprint('ready', file=open('ready', 'a'), flush=True)\ntime.sleep(100)")
    code, err = sent_sigterm(launcher)
    assert code == 143
    assert "train.py was stopped by SIGTERM after" in err


def test_workers_that_print_their_stack_at_sigterm_are_stopped_as_any_other(launcher):
    launcher.write(
        """
        import signal, sys, time, traceback
        def leave(number, frame):
            traceback.print_stack(frame)
            sys.exit(3)
        signal.signal(signal.SIGTERM, leave)
        print("ready", file=open("ready", "a"), flush=True)
        time.sleep(100)
        """
    )
    code, err = sent_sigterm(launcher)
    assert code == 3
    assert "train.py was stopped by SIGTERM after" in err


def test_where_sigchld_is_ignored_a_failed_run_has_its_code(launcher):
    launcher.write("raise SystemExit(7)", "train.py")
    command = f"trap '' CHLD; exec {sys.executable} -m samestep run -n 2 train.py"
    done = subprocess.run(["bash", "-c", command], cwd=launcher.home, env=launcher.env, capture_output=True)
    assert done.returncode == 7


def test_ctrl_c_while_the_launcher_is_still_imported_is_one_line(launcher):
    launcher.write("open('imports', 'w').write('1\\n'); import time; time.sleep(100)", "click.py")
    launcher.env["PYTHONPATH"] = str(launcher.home)
    started = launcher.start("-n", "2", "train.py")
    started.wait_for_lines("imports")
    started.process.send_signal(signal.SIGINT)
    assert started.finish() == (130, "", "samestep: interrupted\n")


def test_ctrl_z_suspends_the_ranks_with_the_launcher_and_fg_lets_them_go_on(launcher):
    launcher.write(
        """
        import os, time
        print(os.getpid(), file=open("pids", "a"), flush=True)
        while not os.path.exists("end"):
            time.sleep(0.05)
        """
    )
    words = [sys.executable, "-m", "samestep", "run", "-n", "2", "train.py"]
    # a group of its own in this session, as a shell makes it: the kernel suspends no group whose shell is gone
    with subprocess.Popen(words, cwd=launcher.home, env=launcher.env, process_group=0) as process:
        started, until = launcher.home / "pids", time.monotonic() + 30
        while not (started.exists() and started.read_text().count("\n") == 2):
            assert time.monotonic() < until
            time.sleep(0.05)
        pids = [process.pid, *map(int, started.read_text().split())]
        for number, suspended in ((signal.SIGTSTP, True), (signal.SIGCONT, False)):
            os.killpg(process.pid, number)
            while [psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in pids] != [suspended] * 3:
                assert time.monotonic() < until
                time.sleep(0.05)
        (launcher.home / "end").touch()
        assert process.wait(20) == 0


@pytest.mark.slow
@pytest.mark.parametrize("late_s", [0.0, 0.05, 0.5, 2.0])
def test_a_run_without_a_checkpoint_that_is_asked_to_end_while_it_recovers_ends_at_once(launcher, late_s):
    launcher.write("""
        import os, time, samestep
        samestep.init()
        with open("pids", "a") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(100)
    """)
    started = launcher.start("-n", "2", "--max-restarts", "3", "train.py")
    pids = [int(pid) for pid in started.wait_for_lines("pids", 2)]
    os.kill(pids[0], signal.SIGKILL)
    time.sleep(late_s)
    began = time.monotonic()
    started.process.terminate()
    code, _, err = started.finish()
    assert (code, time.monotonic() - began < 5) == (143, True), err
