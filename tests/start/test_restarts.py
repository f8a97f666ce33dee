"""Whether a run is started again, and what it says when it is not."""

import os
import subprocess

import pytest

ROOT = (
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root"),
)


def test_restart_on_starts_all_ranks_again_and_counts(launcher):
    launcher.write(
        """
        import os, sys
        count = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print(count, os.environ["RANK"], file=open("seen", "a"), flush=True)
        sys.exit(0 if count == "2" else 75)
        """
    )
    code, _, err = launcher.run("-n", "2", "--restart-on", "75", "--max-restarts", "5", "train.py")
    assert code == 0
    assert "exit code 75: restart 2 of 5" in err
    assert "restart 3" not in err
    assert "2 1" in (launcher.home / "seen").read_text().splitlines()


def test_a_run_that_was_asked_to_end_is_not_started_again(launcher):
    launcher.write("import os; open(os.environ['SAMESTEP_RUN'] + '/stop', 'w').close(); raise SystemExit(75)")
    code, _, err = launcher.run("-n", "2", "--restart-on", "75", "--max-restarts", "5", "train.py")
    assert code == 75
    assert "restart" not in err


def test_restart_on_does_not_hide_another_code(launcher):
    launcher.write("raise SystemExit(3)")
    code, _, err = launcher.run("-n", "1", "--restart-on", "75", "--max-restarts", "5", "train.py")
    assert code == 3
    assert "restart" not in err


def test_the_same_failure_in_the_same_step_twice_is_not_restarted_again(launcher):
    launcher.write(
        """
        import os
        from samestep.rundir import Pulse, pulse_of
        Pulse(pulse_of(os.environ, 0)).beat(5)
        raise ValueError("always")
        """
    )
    code, _, err = launcher.run("-n", "1", "--max-restarts", "9", "train.py")
    assert code == 1
    assert "rank 0 failed in step 5 (ValueError: always): restart 1 of 9" in err
    assert "The same failure came again at the same place, so the run is not restarted:\n" in err
    assert err.count("train.py failed on rank 0 of 1") == err.count("\nValueError: always\n") == 2
    assert "restart 2" not in err


def test_the_same_exit_code_in_the_same_step_twice_is_not_restarted_again_but_a_kill_from_outside_is(
    launcher,
):
    launcher.write(
        """
        import os, sys
        from samestep.rundir import Pulse, pulse_of
        Pulse(pulse_of(os.environ, 0)).beat(5)
        sys.exit(3) if sys.argv[1:] else os.kill(os.getpid(), 9)
        """
    )
    code, _, err = launcher.run("-n", "1", "--max-restarts", "9", "train.py", "exit")
    assert (code, err.count("\nexit code 3\n"), err.count("restart ")) == (3, 2, 1)
    code, _, err = launcher.run("-n", "1", "--max-restarts", "2", "train.py")
    assert (code, err.count("restart ")) == (137, 2)


def test_a_failure_comes_to_its_place_again_also_after_another_one(launcher):
    launcher.write(
        """
        import os
        from samestep.rundir import Pulse, pulse_of
        Pulse(pulse_of(os.environ, 0)).beat(5)
        raise (ValueError, KeyError)[int(os.environ["TORCHELASTIC_RESTART_COUNT"]) % 2]("mine")
        """
    )
    code, _, err = launcher.run("-n", "1", "--max-restarts", "9", "train.py")
    assert (code, err.count("restart ")) == (1, 2)
    assert err.count("\nValueError: mine\n") == 2


def test_a_run_that_gets_further_has_all_its_restarts_again(launcher):
    launcher.write(
        """
        import os, sys
        from samestep.rundir import Pulse, pulse_of
        count = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        Pulse(pulse_of(os.environ, 0)).beat(min(count, 4))
        os.kill(os.getpid(), 9)
        """
    )
    code, _, err = launcher.run("-n", "1", "--max-restarts", "2", "train.py")
    assert code == 137
    assert (err.count("restart 1 of 2"), err.count("restart 2 of 2")) == (5, 1)


def test_a_run_whose_directory_was_removed_is_restarted_and_says_what_failed(launcher):
    launcher.write(
        """
        import os, shutil
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            shutil.rmtree("runs")
            raise ValueError("mine")
        print("went on")
        """
    )
    code, out, err = launcher.run("-n", "1", "--max-restarts", "2", "train.py")
    assert (code, out) == (0, "went on\n")
    assert "(ValueError: mine): restart 1 of 2" in err
    assert "cannot be written any more (no such file or directory); the run goes on" in err


@pytest.mark.parametrize(
    ("spoiled", "heard"),
    [
        ("shutil.rmtree(run)", "a file"),
        pytest.param(
            "mount('--bind', runs, runs), mount('-o', 'remount,ro,bind', runs)", "SIGTERM", marks=ROOT
        ),
        pytest.param(
            "mount('-t', 'tmpfs', '-o', 'size=4k,nr_inodes=3', 'tmpfs', run), fill()", "a file", marks=ROOT
        ),
    ],
)
def test_a_signal_in_a_recovery_reaches_the_ranks_where_the_runs_directory_cannot_be_used(
    launcher, spoiled, heard
):
    launcher.write(
        f"""
        import os, pathlib, shutil, signal, subprocess, sys, time
        run = pathlib.Path(os.environ["SAMESTEP_RUN"])
        runs, beat = run.parent, run / "pulse" / "rank-0"
        heard = []

        def mount(*args):
            subprocess.run(["mount", *map(str, args)], check=True)

        def fill():
            (run / "filler").write_bytes(bytes(4096))

        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.write(int(os.environ["SAMESTEP_SLOT_A"]), b"a state")
            beat.touch()
            {spoiled}
            raise ValueError("mine")
        signal.signal(signal.SIGTERM, lambda *_: heard.append("SIGTERM"))
        os.kill(os.getppid(), signal.SIGTERM)
        while not heard:
            heard += ["a file"] * (run / "stop").exists()
            time.sleep(0.01)
        print(heard[0], flush=True)
        sys.exit(75)
        """
    )
    try:
        code, out, err = launcher.run("-n", "1", "--max-restarts", "2", "train.py")
    finally:
        for place in (*(launcher.home / "runs").iterdir(), launcher.home / "runs"):
            subprocess.run(["umount", "-q", place], check=False)
    assert (code, out) == (75, f"{heard}\n"), err
    assert "(ValueError: mine): restart 1 of 2" in err


def test_a_program_that_cannot_be_started_again_ends_with_its_own_failure(launcher):
    path = launcher.home / "program"
    path.write_text("#!/bin/sh\nrm program\necho mine >&2\nexit 3\n")
    path.chmod(0o755)
    code, _, err = launcher.run("-n", "1", "--no-python", "--max-restarts", "2", "./program")
    assert code == 3
    assert "restart 1 of 2" in err
    assert "exit code 3" in err
    assert err.endswith("It cannot be started again: [Errno 2] No such file or directory: './program'\n"), err
