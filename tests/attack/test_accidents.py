"""What a script does by accident to its own process or run, and what becomes of the run."""

import os
import re
import subprocess
import sys
from textwrap import dedent

import pytest

pytestmark = pytest.mark.timeout(170)
TRAIN = """
    import os, shutil, sys, time
    import torch, samestep
    world = samestep.init()
    net = torch.nn.Linear(2, 1)
    data = torch.utils.data.TensorDataset(torch.ones(24, 2))
    train = samestep.loader(data, batch_size=8)
    model = samestep.replicate(net)
    run = samestep.Checkpoint("ck", every=1, model=net, train=train)
    run.resume()
    for epoch in train.epochs(2):
        for x, in train:
            model(x).mean().backward()
            ACCIDENT
            run.step()
    if world.rank == 0:
        print("ended after step", run.steps)
"""


@pytest.fixture
def launched(attempt, tmp_path):
    def start(accident, *words, name="train.py", **variables):
        attempt(accident)
        (tmp_path / name).write_text(dedent(TRAIN.replace("ACCIDENT", accident)))
        env = {key: value for key, value in os.environ.items() if not key.startswith(("SAMESTEP", "OMP"))}
        command = [sys.executable, "-m", "samestep", "run", "-n", "2", *words, name]
        return subprocess.run(
            command, cwd=tmp_path, env=env | variables, capture_output=True, text=True, errors="replace"
        )

    return start


@pytest.mark.slow
def test_a_script_that_changes_its_directory_commits_where_it_began(launched, tmp_path):
    done = launched("os.chdir('/')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended after step 6\n", "")
    assert len(list((tmp_path / "ck").glob("*.samestep"))) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "option"),
    [("sys.stderr = None", "--fork"), ("sys.stderr.close()", "--fork"), ("sys.stderr = None", "--no-fork")],
)
def test_a_failure_is_told_of_a_script_that_lost_its_stderr(launched, loss, option):
    done = launched(f"{loss}; int('mine')", option)
    assert done.returncode == 1
    assert "ValueError: invalid literal for int() with base 10: 'mine'\n\n" in done.stderr


@pytest.mark.slow
def test_a_script_runs_whose_name_its_locale_cannot_write(launched):
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = launched("pass", name="trüin.py", **ascii_only)
    assert (done.returncode, done.stdout) == (0, "ended after step 6\n"), done.stderr


@pytest.mark.slow
def test_a_clock_that_is_put_back_a_day_does_not_make_a_run_last_less_than_nothing(launched, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import time\n"
        "clock, began = time.time, time.monotonic()\n"
        "time.time = lambda: clock() - 86400 * (time.monotonic() > began + 0.7)\n"
    )
    done = launched("int('mine') if run.steps == 4 else time.sleep(0.2)", PYTHONPATH=str(tmp_path))
    assert re.match(r"train.py failed on rank \d of 2 \(.*\) after [\d.]+ s, in step 5\n", done.stderr)
