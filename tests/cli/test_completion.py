"""Shells complete samestep's commands, options and files; what no shell completes is one command away."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.cli import COMMANDS

COMMAND = Path(sys.executable).with_name("samestep")
ENV = os.environ | {"PATH": f"{COMMAND.parent}:{os.environ['PATH']}"}
READ_ONLY = {"bash": "-n", "zsh": "-n", "fish": "--no-execute"}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """Where each shell's completion was installed."""
    home, found = tmp_path_factory.mktemp("home"), {}
    for shell in READ_ONLY:
        told = subprocess.check_output(
            [COMMAND, "completion", shell, "--install"], env=os.environ | {"HOME": str(home)}, text=True
        )
        found[shell], _, rest = told.partition(" ")
        assert found[shell].startswith(f"{home}/.")
        assert f"is written; a new {shell} completes samestep" in rest
    return found


def completed(script, *words):
    """What bash offers for the last of the words."""
    listed = " ".join(f"'{word}'" for word in words)
    ask = f"COMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; _samestep_completion samestep 2>/dev/null"
    text = f'source {script}\n{ask}\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
    return subprocess.check_output(["bash", "-c", text], env=ENV, text=True).split()


def test_bash_completes_commands_options_and_values(scripts):
    assert set(COMMANDS) == set(completed(scripts["bash"], "samestep", ""))
    assert completed(scripts["bash"], "samestep", "ver") == ["verify"]
    assert completed(scripts["bash"], "samestep", "run", "--max-re") == ["--max-restarts"]
    assert completed(scripts["bash"], "samestep", "completion", "") == ["bash", "zsh", "fish"]


@pytest.mark.parametrize("words", [["run", "train"], ["run", "train.py", "da"], ["checkpoints", "ru"]])
def test_files_are_left_to_the_shell(words):
    at = str(len(words))
    asked = {
        "_SAMESTEP_COMPLETE": "bash_complete",
        "COMP_WORDS": f"samestep {' '.join(words)}",
        "COMP_CWORD": at,
    }
    offered = subprocess.check_output([COMMAND], env=ENV | asked, text=True)
    assert offered == f"{'dir' if words[0] == 'checkpoints' else 'file'},{words[-1]}\n"


@pytest.mark.parametrize(("shell", "at"), [("zsh", "2"), ("fish", "--max-re")])
def test_zsh_and_fish_are_told_what_an_option_does(shell, at):
    words = "samestep run --max-re"
    asked = {"_SAMESTEP_COMPLETE": f"{shell}_complete", "COMP_WORDS": words, "COMP_CWORD": at}
    said = subprocess.check_output([COMMAND], env=ENV | asked, text=True)
    assert "--max-restarts" in said
    assert "Start again after a failure" in said


@pytest.mark.shell
@pytest.mark.parametrize("shell", READ_ONLY)
def test_the_script_is_one_that_its_shell_can_read(scripts, shell):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, READ_ONLY[shell], scripts[shell]], check=True)
