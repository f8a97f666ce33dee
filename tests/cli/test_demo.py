"""The demo runs for real, once, and what it says of equal and of unequal runs is true."""

import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from samestep.measure.demo import Run, Setup, compared, setups, speeds

SAMESTEP = str(Path(sys.executable).with_name("samestep"))
ROOT = Path(__file__).parents[2]


def start(directory: Path, *args: str, stderr: int, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [SAMESTEP, "demo", *args],
        env={**os.environ, "TMPDIR": str(directory), "COLUMNS": "100", "TERM": "xterm", **env},
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )


class Shown:
    """What one demo left: its exit code, its lines on stdout, its bar on a terminal, and its files."""

    def __init__(self, directory: Path) -> None:
        terminal, other = pty.openpty()
        process = start(directory, "--epochs", "3", stderr=other)
        os.close(other)
        self.bytes = b"".join(_read(terminal))
        self.lines = process.communicate()[0].splitlines()
        self.code = process.returncode
        self.left = list(directory.glob("samestep*"))


def _read(terminal: int) -> Iterator[bytes]:
    try:
        while data := os.read(terminal, 65536):
            yield data
    except OSError:  # Linux' way to say that nobody writes any more
        return
    finally:
        os.close(terminal)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    return Shown(tmp_path_factory.mktemp("demo"))


@pytest.mark.slow
def test_the_demo_ends_same_to_the_bit(shown: Shown) -> None:
    assert shown.code == 0
    assert shown.lines[-1] == "same to the bit"
    assert shown.lines[-4:-1] == [
        "  the same batches",
        "  the same test accuracy",
        "  largest difference in 65 tensors and 12 values, 705.0 kB (weights, BatchNorm, optimizer): 0",
    ]


@pytest.mark.slow
def test_the_demo_has_a_bar_on_a_terminal_and_leaves_no_files(shown: Shown) -> None:
    assert b"[====" in shown.bytes
    assert shown.left == []


@pytest.mark.slow
def test_the_demo_shows_one_process_beside_two(shown: Shown) -> None:
    table = [line for line in shown.lines if len(line) in (31, 40) and not line.startswith(" ")]
    rows = {line[:13].strip(): line[13:].split() for line in table}
    assert rows["processes"][:2] == ["1", "2"]
    assert rows["speed-up"][0] == "1.00"
    for row in ("batches", "test accuracy"):
        assert rows[row][0] == rows[row][1]
    assert float(rows["test accuracy"][0].rstrip("%")) > 70


def shape(lines: list[str]) -> list[str]:
    """Lines without their numbers, and without what is said of the speeds, which is this machine's."""
    text = "\n".join(line.rstrip() for line in lines)
    text = text[: text.index("\n\n", text.index("\nbatches"))] + text[text.index("\n\nNext:") :]
    text = re.sub(r"\S+/demo_train\.py", "PATH", text)
    text = re.sub(r"^(batches ).*", r"\1", text, flags=re.MULTILINE)
    return [re.sub(r" *\d+(\.\d+)?", " #", line) for line in text.splitlines() if line]


@pytest.mark.slow
def test_the_readme_shows_what_the_demo_prints(shown: Shown) -> None:
    if len(setups()) < 3:
        pytest.skip("one core: two of the three runs")
    readme = (ROOT / "README.md").read_text()
    block = readme.split("$ make demo\n", 1)[1].split("```", 1)[0].splitlines()
    table = next(at for at, line in enumerate(shown.lines) if line.startswith("processes "))
    ours = [*shown.lines[:2], *shown.lines[table:]]
    assert shape([line for line in block if not line.endswith(" ...")]) == shape(ours)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_ends_the_demo_with_its_processes_and_files(tmp_path: Path, number: int, code: int) -> None:
    demo = start(tmp_path, stderr=subprocess.PIPE)
    assert demo.stderr is not None
    assert "1 process" in demo.stderr.readline()
    run: list[psutil.Process] = []
    while not (run and list(tmp_path.glob("samestep*/*/*/run.json"))):
        time.sleep(0.01)
        run = psutil.Process(demo.pid).children(recursive=True)
    (os.killpg if number == signal.SIGINT else os.kill)(demo.pid, number)
    demo.communicate()
    assert demo.returncode == code
    assert list(tmp_path.glob("samestep*")) == []
    assert not [
        process for process in run if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]


@pytest.mark.slow
def test_a_run_that_fails_fails_the_demo_with_its_own_words(tmp_path: Path) -> None:
    demo = start(tmp_path, "--epochs", "1", stderr=subprocess.PIPE, SAMESTEP_CHECK_EVERY="soon")
    _, err = demo.communicate()
    assert demo.returncode == 1
    assert "samestep: 1 process on 1 core ended with exit code 1:" in err
    assert "SAMESTEP_CHECK_EVERY is 'soon', which is not a number of steps" in err
    assert list(tmp_path.glob("samestep*")) == []


def run_of(setup: Setup, seconds: float = 1.0, **changed: Any) -> Run:
    saved = {
        "model": {"weight": torch.ones(3)},
        "optimizer": {},
        "steps": 8,
        "order": "0123456789",
        "correct": 9,
        "tested": 10,
        "trained": 1437,
        "seconds": [seconds] * 4,
    }
    return Run(setup, {**saved, **changed}, 5.0)


ONE, TWO, WIDE = Setup(1, 1), Setup(2, 2), Setup(1, 2)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"order": "9876543210"}, "  different batches"),
        ({"correct": 8}, "  different test accuracy"),
        ({"model": {"weight": torch.tensor([1.0, 1.0, 1.5])}}, "different: 1 of 1 tensors, model.weight"),
    ],
)
def test_what_differs_is_named(changed: dict[str, Any], line: str) -> None:
    is_same, said = compared([run_of(ONE), run_of(TWO, **changed)])
    assert not is_same
    assert any(text.startswith(line) for text in said)
    assert said[-1].startswith("different")


def test_the_speeds_are_put_into_words() -> None:
    said = speeds([run_of(ONE), run_of(TWO, 0.5), run_of(WIDE, 2.0)])
    assert (
        "are 2.00 times as fast as one process with one core. One process with both cores is 0.50 times"
        in said
    )
    assert "busy" not in said
    assert "This machine gives one core" in speeds([run_of(ONE), run_of(Setup(2, 1), 2.0)])


def test_a_busy_machine_is_noticed() -> None:
    uneven = run_of(ONE, seconds=1.0)
    uneven.saved["seconds"] = [1.0, 1.1, 1.9, 2.0]
    assert "the machine was busy" in speeds([uneven, run_of(TWO), run_of(WIDE)])
