"""Real workers that fail, hang, ignore signals and are killed."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest


def test_a_failed_run_ends_in_the_seven_lines(launcher):
    launcher.write(
        """
        import os, time
        from pathlib import Path
        from samestep.rundir import Pulse, pulse_of
        rank = int(os.environ["RANK"])
        pulse = Pulse(pulse_of(os.environ, rank), "cuda:1")
        pulse.beat(417)
        def read(path):
            return open(path)
        if rank == 1:
            read("/data/shard-01.bin")
        time.sleep(100)
        """
    )
    code, out, err = launcher.run("-n", "4", "train.py")
    assert (code, out) == (1, "")
    host = re.escape(os.uname().nodename)
    assert re.fullmatch(
        rf"train\.py failed on rank 1 of 4 \({host}, cuda:1\) after [\d.]+ s, in step 417\n"
        r"\n"
        r"  train\.py:9 in read\n"
        r"    return open\(path\)\n"
        r"FileNotFoundError: \[Errno 2\] No such file or directory: '/data/shard-01\.bin'\n"
        r"\n"
        r"ranks 0, 2, 3 were stopped\. Logs: runs/\d{4}-\d{4,6}/logs/rank-\{0\.\.3\}\.log\n",
        err,
    )


def test_a_failure_of_rank_0_is_shown_once(launcher):
    launcher.write("import time\nprint('step 1')\nraise ValueError('mine')")
    code, out, err = launcher.run("-n", "1", "train.py")
    assert (code, out) == (1, "step 1\n")
    assert err.count("ValueError: mine") == 1
    assert "Traceback" not in err
    assert "Traceback" in launcher.log(0)


@pytest.mark.slow
def test_a_failure_is_shown_once_also_where_its_rank_takes_long_to_end(launcher):
    launcher.write("import atexit, time; atexit.register(time.sleep, 2); raise ValueError('no shard')")
    code, _, err = launcher.run("-n", "1", "train.py")
    assert (code, err.count("ValueError: no shard"), err.count("Traceback")) == (1, 1, 0)


def test_a_failure_that_cannot_be_read_is_shown_by_its_last_words(launcher):
    (launcher.home / "two\nlines").mkdir()
    launcher.write("raise ValueError('mine')", "two\nlines/train.py")
    code, _, err = launcher.run("-n", "1", "two\nlines/train.py")
    assert code == 1
    assert "ValueError: mine\nexit code 1\n" in err


def test_a_logged_traceback_of_a_run_that_goes_on_is_shown(launcher):
    launcher.write(
        """
        import traceback
        try:
            1/0
        except ZeroDivisionError:
            traceback.print_exc()
        """
    )
    code, _, err = launcher.run("-n", "1", "train.py")
    assert code == 0
    assert err.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_workers_own_exit_code_is_the_runs(launcher, rank):
    launcher.write(f"import os, sys, time\nif os.environ['RANK'] == '{rank}': sys.exit(77)\ntime.sleep(100)")
    code, _, err = launcher.run("-n", "3", "train.py")
    assert code == 77
    assert f"train.py failed on rank {rank} of 3" in err
    assert "\nexit code 77\n" in err


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (signal.SIGKILL, "killed by SIGKILL"),
        (signal.SIGSEGV, "Fatal Python error: Segmentation fault"),
        (signal.SIGABRT, "Fatal Python error: Aborted"),
        (signal.SIGUSR2, "killed by SIGUSR2"),
    ],
)
def test_a_worker_ended_by_a_signal_is_named_with_it(launcher, number, says):
    launcher.write(
        f"import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), {int(number)})\ntime.sleep(100)"
    )
    code, _, err = launcher.run("-n", "2", "train.py")
    assert code == 128 + number
    assert "failed on rank 1 of 2" in err
    assert says in err


@pytest.mark.parametrize(
    ("when", "is_said"),
    [
        ("ctypes.pythonapi.Py_AtExit(terminate)", True),
        ("terminate()", False),
    ],
    ids=["while Python ends", "in a call of the script"],
)
def test_an_abort_of_torch_after_the_end_of_the_script_is_told_as_such(launcher, when, is_said):
    launcher.write(f"import ctypes\nterminate = ctypes.CDLL('libstdc++.so.6')._ZSt9terminatev\n{when}")
    code, _, err = launcher.run("-n", "2", "train.py")
    assert code == 128 + signal.SIGABRT
    assert "killed by SIGABRT" in err
    assert ("the script had ended: torch aborted" in err) == is_said


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_that_only_one_worker_got_is_shown_where_it_came(launcher, rank):
    launcher.write(
        f"import os, time\nif os.environ['RANK'] == '{rank}':\n    raise KeyboardInterrupt\ntime.sleep(100)"
    )
    code, _, err = launcher.run("-n", "2", "train.py")
    assert code == 130
    assert (
        "\n  train.py:3 in <module>\n    raise KeyboardInterrupt\nKeyboardInterrupt\nkilled by SIGINT\n"
        in err
    )


def test_stubborn_workers_and_their_children_are_gone_within_five_seconds_of_a_failure(launcher, gone):
    started, pids = launcher.start_stubborn()
    workers = [pid for pid in pids if os.getpgid(pid) == pid]
    began = time.monotonic()
    os.kill(workers[1], signal.SIGKILL)
    code, _, err = started.finish()
    assert time.monotonic() - began < 5
    assert code == 137
    assert "was stopped" in err
    gone(pids, 2)


def test_the_cause_is_not_a_rank_that_only_lost_its_peer(launcher):
    launcher.write(
        """
        import os, time
        if os.environ["RANK"] == "1":
            time.sleep(0.3)
            raise ValueError("the cause")
        raise RuntimeError("Connection closed by peer [127.0.0.1]:2266")
        """
    )
    code, _, err = launcher.run("-n", "3", "train.py")
    assert code == 1
    assert "failed on rank 1 of 3" in err
    assert "closed by peer" not in err
    assert "ranks 0, 2 were stopped" in err


@pytest.mark.slow
def test_a_rank_that_prints_its_exception_and_exits_is_the_cause_and_not_who_missed_it(launcher):
    launcher.write(
        """
        import sys, traceback
        import samestep
        world = samestep.init()
        try:
            if world.rank == 1:
                raise ValueError("the cause")
        except ValueError:
            traceback.print_exc()
            sys.exit(3)
        samestep.sum(1)
        """
    )
    code, _, err = launcher.run("-n", "2", "train.py")
    assert code in (1, 3)  # 1 where it was stopped while it left
    assert "failed on rank 1 of 2" in err
    assert "ValueError: the cause" in err
    assert "different calls" not in err


def test_kill_9_of_the_launcher_leaves_no_worker_nor_loader_worker(launcher, gone):
    started, pids = launcher.start_stubborn()
    started.process.kill()
    started.finish()
    gone(pids, 2)


def test_what_a_finished_worker_left_running_ends_with_it(launcher, gone):
    launcher.write(
        """
        import subprocess
        child = subprocess.Popen(["sleep", "100"])
        print(child.pid, file=open("pids", "a"), flush=True)
        """
    )
    began = time.monotonic()
    started = launcher.start("-n", "2", "train.py")
    code, _, _ = started.finish()
    assert (code, time.monotonic() - began < 10) == (0, True)
    gone([int(pid) for pid in started.wait_for_lines("pids", 2)], 1)


@pytest.mark.slow
def test_a_rank_blocked_in_a_collective_does_not_hide_its_peers_exception(launcher):
    launcher.write(
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            raise ValueError("bad shard")
        dist.all_reduce(torch.ones(1))
        """
    )
    code, _, err = launcher.run("-n", "2", "train.py")
    assert code == 1
    assert "train.py failed on rank 1 of 2" in err
    assert err.splitlines()[-3] == "ValueError: bad shard"
    # what it wrote to stderr may have been shown before, where the process took long to end
    assert "GLHF" not in err.rpartition("failed on rank")[2]


@pytest.mark.slow
def test_a_script_written_for_torchrun_runs_as_it_is(launcher):
    launcher.write(
        """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo", init_method="env://")
        total = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(total)
        names = "LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK ROLE_WORLD_SIZE TORCHELASTIC_RESTART_COUNT"
        assert all(name in os.environ for name in names.split())
        assert dist.is_torchelastic_launched()
        print(dist.get_rank(), dist.get_world_size(), total.item())
        dist.destroy_process_group()
        """
    )
    code, out, err = launcher.run("--standalone", "--nproc_per_node=3", "--tee", "3", "train.py")
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["0 3 3.0", "[rank 1] 1 3 3.0", "[rank 2] 2 3 3.0"]


def test_a_syntax_error_is_shown_with_its_line(launcher):
    launcher.write("import os\ndef f(:\n    pass\n")
    code, _, err = launcher.run("-n", "3", "train.py")
    assert code == 1
    assert err.splitlines()[2:5] == ["  train.py:2", "    def f(:", "SyntaxError: invalid syntax"]
    assert err.count("SyntaxError") == 1


def test_a_rank_that_fails_and_hangs_while_it_leaves_is_the_cause(launcher):
    launcher.write(
        """
        import atexit, os, time
        if os.environ["RANK"] == "1":
            atexit.register(time.sleep, 100)
            raise ValueError("the cause")
        time.sleep(0.5)
        raise RuntimeError("Connection closed by peer [127.0.0.1]:2266")
        """
    )
    code, _, err = launcher.run("-n", "2", "train.py")
    assert code == 1
    assert "failed on rank 1 of 2" in err
    assert "ValueError: the cause" in err


def test_a_rank_that_only_logged_a_traceback_is_not_blamed(launcher):
    launcher.write(
        """
        import os, time, traceback
        if os.environ["RANK"] == "0":
            try:
                1/0
            except ZeroDivisionError:
                traceback.print_exc()
            time.sleep(100)
        time.sleep(0.5)
        raise ValueError("the cause")
        """
    )
    _, _, err = launcher.run("-n", "2", "train.py")
    assert "failed on rank 1 of 2" in err
    assert err.splitlines()[-3] == "ValueError: the cause"


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="a control group of one's own needs root")
def test_a_worker_killed_for_memory_is_said_to_be_and_one_killed_after_it_is_not(launcher):
    top = Path("/sys/fs/cgroup/memory" if Path("/sys/fs/cgroup/memory").is_dir() else "/sys/fs/cgroup")
    group = top / f"samestep-test-{os.getpid()}"
    try:
        group.mkdir()
        limit = next(
            group / name for name in ("memory.max", "memory.limit_in_bytes") if (group / name).exists()
        )
        limit.write_text(str(200 << 20))
    except (OSError, StopIteration):
        pytest.skip("no memory control group can be made here")
    launcher.write(
        """
        import os, sys, time
        if os.environ["RANK"] == "0":
            time.sleep(100)
        elif os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            data = b"x" * (400 << 20)
        os.kill(os.getpid(), 9)
        """
    )
    inside = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group)]
    said = []
    try:
        for restarts in ("0", "1"):
            run = ["-m", "samestep", "run", "-n", "2", "--no-fork", "--max-restarts", restarts, "train.py"]
            done = subprocess.run(
                [*inside, sys.executable, *run],
                cwd=launcher.home,
                env=launcher.env,
                capture_output=True,
                text=True,
            )
            assert (done.returncode, "failed on rank 1 of 2" in done.stderr) == (137, True)
            said.append(done.stderr)
    finally:
        time.sleep(0.1)
        group.rmdir()
    assert re.search(r"\nkilled by SIGKILL: out of memory.* \(limit 0\.2 GiB\)\n", said[0])
    assert "\nkilled by SIGKILL, not for memory (the kernel counted no such kill)\n" in said[1]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")
def test_a_disk_that_fills_up_ends_the_logs_not_the_run(launcher):
    runs = launcher.home / "runs"
    runs.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", runs], check=True)
    try:
        launcher.write("for number in range(50_000):\n    print(number)")
        code, out, err = launcher.run("-n", "2", "train.py")
    finally:
        subprocess.run(["umount", runs], check=True)
    assert code == 0
    assert out.splitlines()[-1] == "49999"
    assert err.count("cannot be written any more (no space left on device); the run goes on") == 1


def test_with_closed_standard_descriptors_logs_and_exit_code_are_whole(launcher):
    launcher.write("""
        import sys, time
        sys.stderr.write("kept\\n" * 20_000)
        sys.stderr.flush()
        time.sleep(1)
        sys.exit(3)
    """)
    command = [sys.executable, "-m", "samestep", "run", "-n", "2", "train.py"]
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]
    assert subprocess.run(closed, cwd=launcher.home, env=launcher.env).returncode == 3
    for rank in range(2):
        assert launcher.log(rank).splitlines() == ["kept"] * 20_000
    assert len(list((launcher.home / "runs").glob("*/result.json"))) == 1


@pytest.mark.slow
def test_workers_end_also_where_launcher_and_guardian_are_killed_at_once(launcher):
    launcher.write("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(100)")
    words = [sys.executable, "-m", "samestep", "run", "-n", "3", "--tee", "all", "train.py"]
    with subprocess.Popen(words, cwd=launcher.home, stdout=subprocess.PIPE, text=True) as running:
        pids = [int(running.stdout.readline().split()[-1]) for _ in range(3)]
        children = {child.pid for child in psutil.Process(running.pid).children()}
        (guardian,) = children - set(pids)
        os.kill(guardian, signal.SIGKILL)
        running.kill()
    until = time.monotonic() + 2
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(psutil.pid_exists, pids))


def test_labels_made_from_a_set_of_strings_are_the_same_on_all_ranks(launcher):
    launcher.env.pop("PYTHONHASHSEED", None)
    launcher.write("print([*{f'class {number}' for number in range(9)}])")
    said = {launcher.run("-n", "3", "train.py")[1] for _ in range(2)}
    assert len(said | {launcher.log(rank) for rank in range(3)}) == 1
    launcher.env["PYTHONHASHSEED"] = "5"
    assert launcher.run("-n", "3", "train.py")[1] not in said
