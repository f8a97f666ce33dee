"""The tutorial's commands, typed in its order, print what it shows (`make docs-test`)."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = ("digits_serial.py", "digits.py", "digits_checkpoint.py", "datasets.py")
TYPED = re.findall(
    r"^\$ (.+)\n((?:(?!\$ |```).*\n)*)", (ROOT / "docs" / "tutorial.md").read_text(), re.MULTILINE
)


def without_names(text: str) -> list[str]:
    """The lines, less progress and what differs from run to run: the meter's line, names, paths, distances."""
    left_out = (" samples/s, step ", "samestep verify: running ")
    lines = [line for line in text.splitlines() if line and not any(part in line for part in left_out)]
    text = "\n".join(lines)
    for pattern, name in (
        (r"-[0-9a-f]{8}\.samestep", "-DIGEST.samestep"),
        (r"\S*/bin/python", "PYTHON"),
        (r"=/\S+/runs/", "=/HOME/runs/"),
        (r"\d\.\de-\d\d", "DISTANCE"),
        (r"step 1, .*DISTANCE", "step 1 DISTANCE"),
        (" {2,}", "  "),  # the widest cell may be another
    ):
        text = re.sub(pattern, name, text)
    return text.splitlines()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("home")
    for name in FILES:
        shutil.copy(ROOT / "examples" / name, found)
    return found


@pytest.mark.parametrize(("command", "shown"), TYPED, ids=[command for command, _ in TYPED])
def test_a_command_of_the_tutorial_prints_what_it_shows(home: Path, command: str, shown: str) -> None:
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
        "SAMESTEP_RUN_DIR": "",
    }
    output = subprocess.STDOUT
    done = subprocess.run(
        command, shell=True, cwd=home, env=env, stdout=subprocess.PIPE, stderr=output, text=True, timeout=55
    )
    assert done.returncode == 0, done.stdout
    assert without_names(done.stdout) == without_names(shown)


def test_the_tutorial_has_a_command_for_each_of_its_six_steps() -> None:
    assert len(TYPED) == 7
