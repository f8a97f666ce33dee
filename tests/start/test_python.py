"""The script runs with the Python that its user expects, or a line says which one; a script may come from stdin."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

COMMAND = Path(sys.executable).with_name("samestep")
SCRIPT = "import sys, helper\nprint(sys.executable, helper.NAME, sys.argv[1:])\n"


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """An environment that is active, and one in which samestep is a tool, as `uv tool install` lays it out."""
    home = tmp_path_factory.mktemp("home")
    active, tool = home / "project/.venv", home / "uv/tools/samestep"
    for path in (active, tool):
        venv.create(path, symlinks=True)
    # what is installed beside this samestep is there too
    site = next(path for path in sys.path if path.endswith("site-packages"))
    for path in (active, tool):
        inside = next(path.glob("lib/python*/site-packages"))
        (inside / "all.pth").write_text(f"{site}\n{Path(__file__).parents[2] / 'src'}\n")
    return active, tool


def run(python, *words, cwd, **options):
    (cwd / "helper.py").write_text("NAME = 'helper'")
    (cwd / "train.py").write_text(SCRIPT)
    env = os.environ | options.pop("env", {})
    return subprocess.run(
        [python, "-m", "samestep", "run", "-n", "1", *words],
        cwd=cwd,
        env=env,
        text=True,
        capture_output=True,
        **options,
    )


def test_a_tool_runs_scripts_with_the_active_environments_python_and_says_so(places, tmp_path):
    active, tool = places
    done = run(tool / "bin/python", "train.py", cwd=tmp_path, env={"VIRTUAL_ENV": str(active)})
    assert done.stdout == f"{active}/bin/python helper []\n", done.stderr
    assert f"installed as a tool, so the script runs with {active}/bin/python" in done.stderr


def test_another_active_environment_is_named_and_the_command_for_it(places, tmp_path):
    active, _ = places
    done = run(sys.executable, "train.py", cwd=tmp_path, env={"VIRTUAL_ENV": str(active)})
    assert done.stdout == f"{sys.executable} helper []\n", done.stderr
    assert f"runs with {sys.executable}, and not with {active}/bin/python" in done.stderr
    assert f"write {active}/bin/python -m samestep run" in done.stderr


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_nothing_is_said_in_the_environment_itself(variable, tmp_path):
    done = run(sys.executable, "train.py", cwd=tmp_path, env={variable: sys.prefix})
    assert (done.stdout, done.stderr) == (f"{sys.executable} helper []\n", "")


def test_a_script_from_stdin_finds_modules_beside_it_and_gets_its_arguments(tmp_path):
    done = run(sys.executable, "-", "--epochs", "3", cwd=tmp_path, input=SCRIPT)
    assert done.stdout == f"{sys.executable} helper ['--epochs', '3']\n", done.stderr
    failed = run(sys.executable, "-", cwd=tmp_path, input="x = 1\nraise ValueError('no')\n")
    assert failed.returncode == 1
    assert "stdin.py:2 in <module>" in failed.stderr
    assert "raise ValueError('no')" in failed.stderr
