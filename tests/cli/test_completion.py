"""Shells complete samestep's commands and options; what no shell completes is one command away."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.cli import COMMANDS

COMMAND = Path(sys.executable).with_name("samestep")


def completed(script, *words):
    """What bash offers for the last of the words."""
    listed = " ".join(f"'{word}'" for word in words)
    ask = f'COMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; _samestep; printf "%s\\n" "${{COMPREPLY[@]}}"'
    return subprocess.check_output(["bash", "-c", f"source {script}\n{ask}"], text=True).split()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    for shell in ("bash", "zsh", "fish"):
        told = subprocess.check_output(
            [COMMAND, "completion", shell, "--install"], env=os.environ | {"HOME": str(home)}, text=True
        )
        assert told.startswith(f"{home}/.")
        assert f"is written; a new {shell} completes samestep" in told
    return home


def test_bash_completes_commands_options_and_files(home):
    script = home / ".local/share/bash-completion/completions/samestep"
    assert set(COMMANDS) == set(completed(script, "samestep", ""))
    assert completed(script, "samestep", "ver") == ["verify"]
    assert completed(script, "samestep", "run", "--max-re") == ["--max-restarts"]
    assert completed(script, "samestep", "run", "train") == []  # bash's own completion of files follows


def test_the_scripts_of_zsh_and_fish_name_every_command(home):
    zsh, fish = (
        (home / ".zfunc/_samestep").read_text(),
        (home / ".config/fish/completions/samestep.fish").read_text(),
    )
    assert zsh.startswith("#compdef samestep\n")
    for name in COMMANDS:
        assert f" {name}" in zsh
        assert f"-f -a {name} -d '" in fish
    assert "__fish_seen_subcommand_from run' -l max-restarts -d '" in fish
