"""Attacks through every string of `samestep submit`: the script that bash would run does what was asked and no more."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from attack.smuggled import OF_A_FORM, runs_as_code
from click.testing import CliRunner

from samestep.cli.submit import command

PAYLOADS = (
    "$(>canary)", "`>canary`", "x;>canary;", "x\n>canary\n", "x\n#SBATCH --wrap=x", "'>canary'", '">canary;"',
    "x&&>canary", "x|>canary", "${x:=>canary}", "x\r>canary", "\\\n>canary", "$'\\n>canary'", "<(>canary)", "-c>canary",
)  # fmt: skip
STRINGS = ("time", "account", "partition", "qos", "constraint", "hint", "signal", "python", "container", "module",
           "env", "option", "name", "array", "run-dir", "script", "argument")  # fmt: skip


def words(name, payload):
    options = {"env": ["--env", f"NAME={payload}"], "option": ["--option", f"--comment={payload}"]}
    options |= {"script": [], "argument": []}
    chosen = options.get(name, [f"--{name}", payload])
    script = payload if name == "script" else "train.py"
    return ["submit", "--dry-run", *chosen, "--", script, *([payload] if name == "argument" else [])]


@pytest.mark.parametrize("name", STRINGS)
def test_no_string_is_run_as_code(attempt, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SAMESTEP_RUN_DIR", raising=False)
    Path("train.py").touch()
    accepted = 0
    for payload in PAYLOADS:
        attempt(f"{name} {payload!r}")
        if name == "script" and "/" not in payload:
            Path(payload).touch()
        monkeypatch.setattr(sys, "argv", ["samestep", *words(name, payload)])
        done = CliRunner().invoke(command, sys.argv[2:])
        assert done.exit_code in (0, 2), done.output
        if done.exit_code:
            assert done.output.startswith(("samestep submit: ", "Usage: "))
            continue
        accepted += 1
        header = done.output.partition("\n\n")[0].splitlines()
        # every line before the first empty one is a directive of ours or the comment of what was asked
        assert all(
            line.startswith(("#!/bin/bash", "#SBATCH --", '#SBATCH "--', "# samestep ")) for line in header
        ), header
        assert sum(line.startswith("#SBATCH --wrap") for line in header) == 0
        assert not runs_as_code(done.stdout.encode()), (name, payload)
    assert bool(accepted) == (name not in OF_A_FORM)


@pytest.mark.parametrize("payload", ["$(>canary)", "x;>canary;", "x\n>canary\n"])
def test_a_payload_that_no_quotes_hold_is_seen(attempt, tmp_path, monkeypatch, payload):
    attempt(f"{payload!r} without quotes")
    monkeypatch.chdir(tmp_path)
    assert runs_as_code(f"echo {payload}\nsrun\n".encode())


@pytest.mark.slow
def test_thirty_submissions_at_once_have_scripts_of_their_own(attempt, tmp_path):
    attempt("thirty submissions at once")
    (tmp_path / "train.py").touch()
    (tmp_path / "bin").mkdir()
    env = {**os.environ, "PATH": f"{tmp_path / 'bin'}"}
    env.pop("SAMESTEP_RUN_DIR", None)
    code = "import os; os.umask(0); from samestep.cli import main; main()"

    def submit(number):
        command = [sys.executable, "-c", code, "submit", "train.py", "--seed", str(number)]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True).stdout

    with ThreadPoolExecutor(8) as pool:
        said = list(pool.map(submit, range(30)))
    written = [
        line.removeprefix("wrote ")
        for text in said
        for line in text.splitlines()
        if line.startswith("wrote ")
    ]
    assert len(set(written)) == 30
    for number, path in enumerate(written):
        assert f"train.py --seed {number}\n" in (tmp_path / path).read_text()
    assert (tmp_path / "runs").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / written[0]).stat().st_mode & 0o777 == 0o700


def test_a_link_in_the_place_of_a_script_is_not_written_through(attempt, tmp_path, monkeypatch):
    attempt("links under every name that the script may take")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SAMESTEP_RUN_DIR", raising=False)
    Path("train.py").touch()
    Path("precious").write_text("mine")
    Path("runs").mkdir()
    for second in range(30):
        stamp = time.strftime("%m%d-%H%M%S", time.localtime(time.time() + second))
        Path("runs", f"train-{stamp}.sh").symlink_to(Path("precious").absolute())
    monkeypatch.setenv("PATH", "")
    CliRunner().invoke(command, ["train.py"])
    assert Path("precious").read_text() == "mine"
    assert [path.stem[-2:] for path in Path("runs").iterdir() if not path.is_symlink()] == ["-2"]
    assert sum(not path.is_symlink() for path in Path("runs").iterdir()) == 1
