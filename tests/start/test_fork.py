"""Ranks that are forked from a warm process: what they are beside those that Python started, and what kills do."""

import json
import os
import resource
import signal
import time
from pathlib import Path
from textwrap import dedent

import pytest

FACTS = """
    import sys
    was_there = "torch" in sys.modules
    import faulthandler, json, os, random, signal, threading
    import numpy, torch
    if __name__ == "__main__":
        volatile = "MASTER_PORT SAMESTEP_RUN SAMESTEP_KEY_FD TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT".split()
        facts = {
            "argv": sys.argv, "path": sys.path, "orig": sys.orig_argv, "flags": str(sys.flags),
            "file": __file__, "spec": str(__spec__ and __spec__.name), "package": __package__, "doc": __doc__,
            "names": sorted(name for name in globals() if name.startswith("__")),
            "env": {name: value for name, value in os.environ.items() if name not in volatile},
            "cores": sorted(os.sched_getaffinity(0)), "cwd": os.getcwd(),
            "signals": {number: str(signal.getsignal(number)) for number in signal.valid_signals()},
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "faulthandler": faulthandler.is_enabled(), "leads": os.getsid(0) == os.getpid() == os.getpgrp(),
            "threads": threading.active_count(), "main": threading.current_thread() is threading.main_thread(),
            "stdin": sys.stdin.read(), "descriptors": len(os.listdir("/proc/self/fd")),
            "torch": torch.get_num_threads(),
        }
        own = [was_there, random.random(), numpy.random.rand(), torch.rand(1).item()]
        with open(f"facts-{os.environ['RANK']}", "w") as file:
            json.dump([facts, own], file)
"""


def facts(launcher, size, *words):
    """What the ranks of a run say of themselves, and what is their own."""
    code, _, err = launcher.run("-n", str(size), *words)
    assert code == 0, err
    return [json.loads((launcher.home / f"facts-{rank}").read_text()) for rank in range(size)]


@pytest.mark.slow
@pytest.mark.parametrize(("module", "size"), [(False, 2), (True, 1)])
def test_a_forked_rank_has_all_that_python_gives_a_script(launcher, module, size):
    launcher.write(FACTS)
    words = ["-m", "train", "--epochs", "3"] if module else ["train.py", "--epochs", "3"]
    forked, started = facts(launcher, size, "--fork", *words), facts(launcher, size, *words)
    for rank in range(size):
        for name, value in started[rank][0].items():
            assert (name, forked[rank][0][name]) == (name, value)
        assert (forked[rank][1][0], started[rank][1][0]) == (True, False)
    draws = [draw for _, [_, *own] in forked for draw in own]
    assert len(set(draws)) == len(draws)


@pytest.mark.slow
def test_what_ends_a_forked_script_ends_it_as_python_would(launcher):
    """One end for each start."""
    launcher.write(
        """
        import atexit, ctypes, os, sys, torch
        class Held:
            def __del__(self, os=os):  # Python may have cleared the script's names before
                deleted = os.open("deleted", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.write(deleted, b"gone ")
        held = Held()
        file = open("unflushed", "a")
        file.write("kept ")
        atexit.register(lambda: open("atexit", "a").write("ran "))
        ctypes.CDLL(None).printf(b"printed in C\\n")
        exec(sys.argv[1 + int(os.environ["TORCHELASTIC_RESTART_COUNT"])])
        """
    )
    said = []
    for option in ("--fork", "--no-fork"):
        ends = ("sys.exit(77)", "1/0", "raise KeyboardInterrupt")
        code, out, err = launcher.run("-n", "1", option, "--max-restarts", "2", "train.py", *ends)
        assert (code, out) == (130, 3 * "printed in C\n")
        assert "(exit code 77): restart 1 of 2" in err
        assert "(ZeroDivisionError: division by zero): restart 2 of 2" in err
        # a traceback may have been shown before, where the process took long to end
        report = err.rpartition("failed on rank")[2].splitlines()[1:]
        said.append([line for line in report if "Logs" not in line])
        for name, text in (("unflushed", "kept "), ("atexit", "ran "), ("deleted", "gone ")):
            assert (launcher.home / name).read_text() == 3 * text
            (launcher.home / name).unlink()
    assert said[0] == said[1]


@pytest.mark.slow
def test_a_forked_rank_ends_without_a_copy_of_what_it_was_forked_from(launcher):
    launcher.write("import torch")
    pages = []
    for size in ("1", "4"):
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
        assert launcher.run("-n", size, "--fork", "train.py")[0] == 0
        pages.append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt - before)
    # 22,000 for each rank with torch 2.13; 43,000 where Python takes torch apart at the end of each
    assert pages[1] - pages[0] < 3 * 32_000


LOADERS = """
    import os, subprocess, sys
    import samestep, torch
    from torch.utils.data import DataLoader
    def double(number):
        return 2 * number
    class Numbers:
        def __len__(self):
            return 4
        def __getitem__(self, index):
            return torch.tensor(double(index))
    if __name__ == "__main__":
        samestep.init()
        for way in ("fork", "spawn", "forkserver"):
            loader = DataLoader(Numbers(), num_workers=1, multiprocessing_context=way)
            assert [int(number) for number in loader] == [0, 2, 4, 6], way
        assert subprocess.run(["echo", "a child"], capture_output=True).stdout == b"a child\\n"
        if not (pid := os.fork()):
            os._exit(5)
        assert os.waitpid(pid, 0)[1] == 5 << 8
        print("sum", samestep.sum(1))
"""


@pytest.mark.slow
def test_a_forked_rank_has_loader_workers_of_every_kind_and_children(launcher):
    launcher.write(LOADERS)
    code, out, err = launcher.run("-n", "1", "--fork", "train.py")
    assert (code, out, err) == (0, "sum 1\n", "")


@pytest.mark.slow
def test_a_script_from_stdin_is_forked_too(launcher):
    started = launcher.start("-n", "1", "--fork", "-")
    assert started.process.stdin is None  # it reads ours, which is empty
    assert started.finish()[0] == 0


WAITING = """
    import os, sys, time
    import samestep
    world = samestep.init()
    print(os.getpid(), os.environ["TORCHELASTIC_RESTART_COUNT"], file=open("pids", "a"), flush=True)
    from samestep.train.group.world import joined
    from samestep.train.meter import Meter
    from samestep.rundir import Pulse, pulse_of
    pulse = Pulse(pulse_of(os.environ, world.rank))
    while not os.path.exists("end"):
        pulse.beat(int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
        time.sleep(0.01)
"""


def warm_of(launcher_pid, patience_s=20.0):
    """The warm process of a launcher, once it waits for orders."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        for child in children(launcher_pid):
            words = read(f"/proc/{child}/cmdline").split("\0")
            if any(word.endswith("warm.py") for word in words) and "unix_stream" in read(
                f"/proc/{child}/wchan"
            ):
                return child
        time.sleep(0.02)
    raise AssertionError("no warm process waits")


def children(pid):
    return [int(child) for child in read(f"/proc/{pid}/task/{pid}/children").split()]


def read(path):
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def ranks(started, generation):
    """The processes of the ranks of a generation, once both have come."""
    count = 2 * (generation + 1)
    lines = [line.split() for line in started.wait_for_lines("pids", count)]
    return [int(pid) for pid, of in lines if int(of) == generation]


@pytest.mark.slow
@pytest.mark.parametrize("victims", [[1], pytest.param([0, 1], marks=pytest.mark.long)])
def test_killed_ranks_are_forked_anew_by_the_warm_process(launcher, gone, victims):
    launcher.write(WAITING)
    started = launcher.start("-n", "2", "--max-restarts", "1", "train.py")
    first = ranks(started, 0)
    warm = warm_of(started.process.pid)
    for generation in range(2):
        killed = time.monotonic()
        for victim in victims:
            os.kill(ranks(started, generation)[victim], signal.SIGKILL)
        again = ranks(started, generation + 1)
        assert time.monotonic() - killed < 3
        assert all(read(f"/proc/{pid}/cmdline") == read(f"/proc/{warm}/cmdline") for pid in again)
        assert {started.process.pid} == {
            int(read(f"/proc/{pid}/stat").rpartition(")")[2].split()[1]) for pid in again
        }
    (launcher.home / "end").touch()
    code, _, err = started.finish()
    assert code == 0
    assert err.count("restart 1 of 1") == 2  # each had got one step further
    gone([*first, *again, warm], 2)


@pytest.mark.slow
def test_a_killed_warm_process_harms_no_rank_and_is_replaced(launcher, gone):
    launcher.write(WAITING)
    started = launcher.start("-n", "2", "--max-restarts", "2", "--fork", "train.py")
    first, warm = ranks(started, 0), warm_of(started.process.pid)
    os.kill(warm, signal.SIGKILL)
    other = warm_of(started.process.pid)
    assert other != warm
    assert all(Path(f"/proc/{pid}").exists() for pid in first)
    os.kill(other, signal.SIGKILL)
    os.kill(first[0], signal.SIGKILL)  # with no warm process ready, Python starts the ranks
    second = ranks(started, 1)
    (launcher.home / "end").touch()
    assert started.finish()[0] == 0
    gone([*first, *second, warm, other], 2)


@pytest.mark.slow
def test_kill_9_of_launcher_and_guardian_leaves_no_forked_rank_nor_warm_process(launcher, gone):
    launcher.write(WAITING)
    started = launcher.start("-n", "2", "--fork", "train.py")
    pids = [*ranks(started, 0), warm_of(started.process.pid)]
    for pid in children(started.process.pid):
        if pid not in pids:
            os.kill(pid, signal.SIGKILL)
    started.process.kill()
    started.finish()
    gone(pids, 2)


@pytest.mark.slow
def test_where_a_fork_is_not_safe_spare_processes_become_ranks_and_end_with_the_launcher(launcher, gone):
    launcher.write(WAITING)
    launcher.write(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n",
        "sitecustomize.py",
    )
    launcher.env["PYTHONPATH"] = str(launcher.home)
    started = launcher.start("-n", "2", "--max-restarts", "3", "train.py")
    first = ranks(started, 0)
    until = time.monotonic() + 30
    while (
        len(
            spares := [
                pid
                for pid in children(started.process.pid)
                if "warm.py" in read(f"/proc/{pid}/cmdline") and "unix_stream" in read(f"/proc/{pid}/wchan")
            ]
        )
        < 2
    ):
        assert time.monotonic() < until
        time.sleep(0.05)
    os.kill(first[1], signal.SIGKILL)
    assert sorted(ranks(started, 1)) == sorted(spares)
    started.process.kill()
    started.finish()
    gone([*first, *spares], 2)


@pytest.mark.slow
def test_a_script_that_sets_threads_before_it_imports_torch_is_restarted_by_python(launcher):
    launcher.write("import os\nos.environ['OMP_NUM_THREADS'] = '1'\n" + dedent(WAITING))
    started = launcher.start("-n", "2", "--max-restarts", "1", "train.py")
    first = ranks(started, 0)
    time.sleep(1)
    assert not any("warm.py" in read(f"/proc/{pid}/cmdline") for pid in children(started.process.pid))
    os.kill(first[0], signal.SIGKILL)
    ranks(started, 1)
    (launcher.home / "end").touch()
    assert started.finish()[0] == 0


@pytest.mark.long
def test_two_failures_within_a_second_are_two_restarts(launcher):
    launcher.write(WAITING)
    started = launcher.start("-n", "2", "--max-restarts", "3", "--fork", "train.py")
    os.kill(ranks(started, 0)[0], signal.SIGKILL)
    os.kill(ranks(started, 1)[1], signal.SIGKILL)
    ranks(started, 2)
    (launcher.home / "end").touch()
    assert started.finish()[0] == 0


@pytest.mark.slow
def test_a_run_that_cannot_have_a_warm_process_is_started_by_python(launcher):
    launcher.write("raise ImportError('no torch here')", "torch.py")
    launcher.write(
        """
        import os, time
        from samestep.rundir import Pulse, pulse_of
        Pulse(pulse_of(os.environ, int(os.environ["RANK"]))).beat(1)
        time.sleep(3)
        print("ran")
        """
    )
    code, out, _ = launcher.run("-n", "2", "--fork", "train.py")
    assert (code, out) == (0, "ran\n")
    said = next((launcher.home / "runs").iterdir()) / "logs" / "warm.log"
    assert said.read_text().count("ImportError: no torch here") == 1  # it is not tried again
    code, out, _ = launcher.run("-n", "1", "--fork", "--no-python", "echo", "a program")
    assert (code, out) == (0, "a program\n")


@pytest.mark.slow
def test_a_run_goes_on_where_its_directory_was_removed_before_a_warm_process_was_started(launcher):
    launcher.write(
        """
        import os, shutil, time
        from samestep.rundir import Pulse, pulse_of
        pulse = Pulse(pulse_of(os.environ, 0))
        time.sleep(2)  # the launcher has seen it by then
        shutil.rmtree("runs")
        pulse.beat(1)
        time.sleep(2)
        print("ran")
        """
    )
    code, out, err = launcher.run("-n", "1", "--max-restarts", "1", "train.py")
    assert (code, out) == (0, "ran\n"), err


@pytest.mark.slow
def test_a_child_that_ends_leaves_what_is_known_of_its_rank(launcher):
    launcher.write(
        """
        import multiprocessing, os, samestep
        from samestep.rundir import pulse_of, read_pulse
        world = samestep.init()
        child = multiprocessing.get_context("fork").Process(target=os.getpid)
        child.start()
        child.join()
        print(read_pulse(pulse_of(os.environ, world.rank)).phase)
        """
    )
    code, out, err = launcher.run("-n", "2", "--fork", "train.py")
    assert (code, out) == (0, "user\n"), err
