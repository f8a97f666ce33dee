"""A function on N processes: its values, or the worker's own exception."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest

from samestep import UsageError, WorkerFailed, launch


class OwnError(Exception):
    """An exception of the test's own."""


def rank() -> int:
    return int(os.environ["RANK"])


def who(greeting: str, *, loud: bool) -> tuple[str, int, int]:
    return greeting.upper() if loud else greeting, rank(), int(os.environ["WORLD_SIZE"])


@pytest.mark.parametrize("size", [1, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 3))])
def test_values_come_back_in_the_order_of_ranks(size):
    assert launch(who, size, "hello", loud=True) == [("HELLO", number, size) for number in range(size)]


@pytest.mark.slow
def test_lambdas_and_closures_are_called():
    factor = 10
    assert launch(lambda x: factor * x + rank(), 2, 5) == [50, 51]


def test_every_call_is_in_a_process_of_its_own_even_for_one():
    assert os.getpid() not in launch(os.getpid, 1)


@pytest.mark.slow
def test_the_workers_own_exception_is_raised_with_its_traceback_and_the_others_are_stopped():
    def fail() -> None:
        if rank() == 1:
            raise OwnError("mine")
        time.sleep(100)

    began = time.monotonic()
    with pytest.raises(OwnError, match="mine") as raised:
        launch(fail, 3)
    assert time.monotonic() - began < 10
    (note,) = raised.value.__notes__
    assert note.startswith("on rank 1 of 3:\nTraceback")
    assert 'raise OwnError("mine")' in note
    assert "samestep/launch" not in note


def test_pytest_shows_the_frames_of_the_worker_and_none_of_samestep(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import samestep\n\ndef fails():\n    raise KeyError('here')\n\n"
        "def test_it():\n    samestep.launch(fails, 1)\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_it.py"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50).stdout
    assert 'test_it.py", line 4, in fails' in said
    assert "spawn.py" not in said


@pytest.mark.slow
def test_a_killed_worker_is_named_with_its_signal():
    def die() -> None:
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)

    with pytest.raises(
        WorkerFailed, match="rank 1 of 2 ended without an answer: killed by SIGKILL"
    ) as raised:
        launch(die, 2)
    assert (raised.value.rank, raised.value.code) == (1, -9)


def test_a_worker_that_exits_is_named_with_its_code():
    with pytest.raises(WorkerFailed, match="rank 0 of 1 ended without an answer: exit code 3"):
        launch(lambda: sys.exit(3), 1)
    with pytest.raises(WorkerFailed, match="left with exit code 0 before it returned"):
        launch(lambda: sys.exit(0), 1)


class TwoArguments(Exception):
    """Keeps one of its arguments, so that pickle alone cannot make it again."""

    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)
        self.number = number


def test_an_exception_whose_class_takes_other_arguments_travels_too():
    def fail() -> None:
        raise TwoArguments("mine", 7)

    with pytest.raises(TwoArguments, match="mine") as raised:
        launch(fail, 1)
    assert raised.value.number == 7


@pytest.mark.parametrize(("fn", "size"), [(who, "2"), (who, 1.5), (who, None), (who, True), ("who", 2)])
def test_what_cannot_be_launched_is_one_sentence(fn, size):
    with pytest.raises(UsageError, match=r"cannot be|is not a number of processes"):
        launch(fn, size)


@pytest.mark.slow
def test_an_exception_outside_exception_is_the_workers_own_too():
    def fail() -> None:
        if rank() == 1:
            raise asyncio.CancelledError("mine")
        time.sleep(100)

    with pytest.raises(asyncio.CancelledError, match="mine"):
        launch(fail, 2)


def test_an_exception_that_cannot_travel_comes_as_text():
    class Stuck(Exception):
        def __init__(self, text: str) -> None:
            super().__init__(text)
            self.held = (number for number in range(3))

    def fail() -> None:
        raise Stuck("a")

    with pytest.raises(WorkerFailed, match=r"(?s)rank 0 of 1 failed:.*Stuck: a"):
        launch(fail, 1)


def test_a_value_that_cannot_travel_is_said():
    with pytest.raises(TypeError, match="generator cannot be returned from a worker"):
        launch(lambda: (number for number in range(3)), 1)


@pytest.mark.slow
def test_large_arguments_and_values_travel():
    data = os.urandom(20_000_000)
    assert launch(lambda x: x[::-1], 2, data) == [data[::-1]] * 2


@pytest.mark.slow
def test_only_rank_0_writes_to_the_callers_stdout(capsys):
    launch(lambda: print("rank", rank()), 3)
    assert capsys.readouterr().out == "rank 0\n"


def test_launch_refuses_a_size_of_zero():
    with pytest.raises(
        UsageError, match="launch got size 0, which is not a number of processes; use a whole"
    ):
        launch(rank, 0)


@pytest.mark.slow
def test_nothing_is_written_to_the_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert launch(os.getcwd, 2) == [str(tmp_path)] * 2
    assert not list(tmp_path.iterdir())


def test_neither_side_imports_torch_before_the_function_does():
    code = """
import sys, samestep
assert samestep.launch(lambda: "torch" in sys.modules, 2) == [False, False]
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_script_calls_its_own_functions_without_a_main_guard(tmp_path):
    (tmp_path / "script.py").write_text(
        dedent(
            """
            import os, samestep
            def rank():
                return int(os.environ["RANK"])
            class Found(Exception): pass
            def fail():
                raise Found(rank())
            print(samestep.launch(rank, 2))
            try:
                samestep.launch(fail, 1)
            except Found as error:
                print("found", error)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[0, 1]\nfound 0\n"


def test_the_package_of_the_same_name_can_be_called_too():
    import_first = "import samestep.placement.devices, samestep; print(samestep.launch(lambda: 1, 2))"
    done = subprocess.run([sys.executable, "-c", import_first], capture_output=True, text=True, check=True)
    assert done.stdout == "[1, 1]\n"


@pytest.mark.slow
def test_workers_meet_in_a_group():
    def total() -> float:
        import torch

        import samestep

        world = samestep.init()
        return float(samestep.sum(torch.tensor(world.rank + 1.0)))

    assert launch(total, 2) == [3.0, 3.0]


@pytest.mark.slow
def test_a_worker_that_fails_in_a_group_does_not_wait_for_the_others():
    def fail() -> None:
        import samestep

        samestep.init()
        samestep.sum(1)
        if rank() == 1:
            raise OwnError("mine")
        time.sleep(40)

    began = time.monotonic()
    with pytest.raises(OwnError, match="mine"):
        launch(fail, 2)
    assert time.monotonic() - began < 30


def test_an_interrupted_caller_leaves_no_worker(tmp_path, gone):
    (tmp_path / "script.py").write_text(
        dedent(
            """
            import os, time, samestep
            def work():
                print(os.getpid(), file=open("pids", "a"), flush=True)
                time.sleep(100)
            samestep.launch(work, 2)
            """
        )
    )
    caller = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, stderr=subprocess.DEVNULL)
    pids = tmp_path / "pids"
    while not (pids.exists() and len(pids.read_text().splitlines()) == 2):
        time.sleep(0.01)
    caller.send_signal(signal.SIGINT)
    caller.wait(timeout=30)
    gone([int(pid) for pid in pids.read_text().split()], 2)


@pytest.mark.slow
def test_ranks_of_a_caller_that_has_torch_are_forked_from_one_process_that_has_it_too():
    import torch  # noqa: F401

    was_there = launch(lambda: ("torch" in sys.modules, Path("/proc/self/cmdline").read_bytes()), 2)
    assert [found for found, _ in was_there] == [True, True]
    assert all(b"warm.py" in command for _, command in was_there)
