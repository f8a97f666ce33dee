"""Attacks through what else lies in a run's directory, and through longer and stranger strings of `submit`."""

import json
import math
import os
import shlex
import stat
import struct
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from attack.smuggled import OF_A_FORM, runs_as_code
from click.testing import CliRunner

from samestep.rundir import Pulse
from samestep.steptimes import _BYTES, _MAGIC

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202etxt\r\x08\x00"
SECRET = "what is only this user's"
RECORD = {"argv": ["train.py"], "size": 1, "host": "elsewhere", "pid": 1, "started": 1.7e9, "cwd": "/"}
FAILED = {"exit_code": 1, "seconds": 1.0, "failure": "x"}
STEPS = "pulse/steps-0"


def of_steps(fill):
    return lambda path, home: path.write_bytes((_MAGIC + fill * _BYTES)[:_BYTES])


def text(written):
    return lambda path, home: path.write_text(written)


def failure(**changes):
    said = {
        "exception": "x",
        "group": "",
        "cause": "",
        "frames": [["a.py", 1, "f", "x"]],
        "code": 1,
        "pid": 1,
        "rank": 0,
    }
    return text(json.dumps(said | changes))


LINKS = {
    "a link": lambda path, home: path.symlink_to(home / "secret"),
    "a device": lambda path, home: path.symlink_to("/dev/zero"),
    "a pipe": lambda path, home: os.mkfifo(path),
    "a directory": lambda path, home: path.mkdir(),
    "another user's secret": lambda path, home: path.hardlink_to(home / "secret"),
}
ATTACKS = {
    **{(name, kind): put for name in (STEPS, "failures/rank-0.json", "logs/rank-0.stack", "logs/warm.log", "time-is-up")
       for kind, put in LINKS.items() if kind != "another user's secret"},
    **{(STEPS, f"filled with {value}"): of_steps(struct.pack("<d", value)) for value in (
        math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324)},
    **{(STEPS, f"filled with the number {value}"): of_steps(struct.pack("<q", value)) for value in (
        -1, 2**63 - 1, -(2**63), 1, 2**40)},
    (STEPS, "random"): lambda path, home: path.write_bytes(os.urandom(_BYTES)),
    (STEPS, "its beginning and random"): lambda path, home: path.write_bytes((_MAGIC + os.urandom(_BYTES))[:_BYTES]),
    (STEPS, "a megabyte too long"): lambda path, home: path.write_bytes(_MAGIC + bytes(_BYTES + (1 << 20))),
    (STEPS, "a terabyte of holes"): lambda path, home: (path.touch(), os.truncate(path, 1 << 40)),
    ("failures/rank-0.json", "escapes"): failure(exception=EVIL, group=EVIL, cause=EVIL),
    ("failures/rank-0.json", "frames of escapes"): failure(frames=[[EVIL, 10**400, EVIL, EVIL]] * 1000),
    ("failures/rank-0.json", "frames that are none"): failure(frames=[1, None, {}, []]),
    ("failures/rank-0.json", "a code that is none"): failure(code="x"),
    ("failures/rank-0.json", "10 MB"): failure(exception="x" * 10**7),
    ("logs/rank-0.log", "a line of 10 MB"): text("x" * 10**7),
    ("logs", "two lines of 40 MB"): lambda path, home: [
        (path / f"rank-{rank}.log").write_bytes(b"x" * (40 << 20)) for rank in (0, 1)],
    ("logs/rank-0.log", "a million empty lines"): text("\n" * 10**6),
    ("result.json", "a failure of escapes and lines"): text(json.dumps(FAILED | {"failure": EVIL + "\n" * 1000})),
    ("result.json", "a name twice"): text('{"exit_code": 0, "exit_code": [1], "seconds": 1}'),
    ("run.json", "a name twice"): text(json.dumps(RECORD)[:-1] + ', "size": [1], "argv": {}}'),
    ("run.json", "a mark before it"): lambda path, home: path.write_bytes(
        b"\xef\xbb\xbf" + json.dumps(RECORD).encode()),
    ("run.json", "half a letter"): text(json.dumps(RECORD | {"argv": ["\ud800", "\udfff"]})),
    ("run.json", "other versions"): text(
        json.dumps(RECORD | {"versions": {"python": EVIL, EVIL: [1]}, "slurm_job": [EVIL]})),
    ("run.json", "a job of escapes"): text(json.dumps(RECORD | {"slurm_job": "$(touch canary); " + EVIL})),
    ("run.json", "a job of options"): text(json.dumps(RECORD | {"slurm_job": "--help"})),
    **{("logs", f"{count} logs"): lambda path, home, count=count: [
        (path / f"rank-{at}.log").touch() for at in range(1, count)] for count in (2000,)},
}  # fmt: skip


def look(verb, *words):
    return CliRunner().invoke(import_module(f"samestep.cli.{verb}").command, list(words))


_SLOW = ("logs", "two lines of 40 MB")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == _SLOW)) for name in ATTACKS], ids=str
)
def test_what_else_lies_in_a_run_does_no_harm(attempt, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SAMESTEP_RUN_DIR", raising=False)
    (tmp_path / "secret").write_text(SECRET)
    run = tmp_path / "runs" / "hostile"
    for folder in ("logs", "pulse", "failures"):
        (run / folder).mkdir(parents=True)
    (run / "run.json").write_text(json.dumps(RECORD))
    (run / "result.json").write_text(json.dumps(FAILED))
    (run / "logs" / "rank-0.log").write_text("step 1\n")
    Pulse(run / "pulse" / "rank-0").beat(3)
    ATTACKS[name](run / name[0], tmp_path)
    for words in (["runs"], ["runs", "--json"], ["status", "hostile"], ["status", "--json", "hostile"],
                  ["logs", "hostile"], ["logs", "--rank", "all", "hostile"], ["stop", "hostile"]):  # fmt: skip
        attempt(f"{name}: samestep {' '.join(words)}")
        done = look(*words)
        assert done.exit_code in (0, 1, 2), done.output
        assert done.exception is None or isinstance(done.exception, SystemExit), (words, repr(done.exception))
        assert not {"\x1b", "\x9b", "\u202e", "\x07", "\x08"} & set(done.output)
        assert SECRET not in done.output
        assert "Traceback" not in done.output
    assert (tmp_path / "secret").read_text() == SECRET
    assert not (tmp_path / "canary").exists()


PAYLOADS = (
    "\u2028>canary", "\u0085>canary", "x\v>canary", "x\f>canary", "!>canary", "~root/../../$(>canary)", "*;>canary",
    "--", "-", "", "\t", "$IFS>canary", "\udcff$(>canary)", "x" * 100_000 + "$(>canary)", "'\n>canary\n'",
    "EOF\n>canary\nEOF", "%j;>canary", "\\$(>canary)", "\u202e$(>canary)",
)  # fmt: skip
STRINGS = ("time", "account", "partition", "qos", "constraint", "signal", "python", "container", "module", "env",
           "option", "name", "array", "run-dir", "script", "argument")  # fmt: skip


@pytest.mark.parametrize("name", STRINGS)
def test_no_longer_or_stranger_string_is_run_as_code(attempt, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SAMESTEP_RUN_DIR", raising=False)
    Path("train.py").touch()
    accepted = 0
    for payload in PAYLOADS:
        attempt(f"{name} {payload[:40]!r}")
        options = {"env": ["--env", f"NAME={payload}"], "option": ["--option", f"--comment={payload}"]}
        chosen = (options | {"script": [], "argument": []}).get(name, [f"--{name}", payload])
        if name == "script" and payload and "/" not in payload and len(payload) < 200 and "\0" not in payload:
            Path(payload).touch()
        words = ["--dry-run", *chosen, "--", payload if name == "script" else "train.py"]
        words += [payload] if name == "argument" else []
        monkeypatch.setattr(sys, "argv", ["samestep", "submit", *words])
        done = look("submit", *words)
        assert done.exit_code in (0, 1, 2), (payload[:40], repr(done.exception))
        assert done.exception is None or isinstance(done.exception, SystemExit), (
            payload[:40],
            repr(done.exception),
        )
        if done.exit_code:
            continue
        accepted += 1
        header = done.output.partition("\n\n")[0].split("\n")
        ours = ("#!/bin/bash", "#SBATCH --", '#SBATCH "--', "# samestep ")
        assert all(line.startswith(ours) for line in header), header
        assert not runs_as_code(done.stdout_bytes), (name, payload[:40])
    assert bool(accepted) == (name not in OF_A_FORM)


@pytest.mark.parametrize(
    "kind", ["a full disk", "a file in the way", "a link in the way", "a name of 300 letters"]
)
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_submission_that_cannot_be_written_is_a_sentence(attempt, tmp_path, kind):
    attempt(f"samestep submit on {kind}")
    (tmp_path / "train.py").touch()
    (tmp_path / "runs").mkdir()
    first = {
        "a full disk": "mount -t tmpfs -o size=4k tmpfs runs; head -c 8k /dev/zero > runs/x",
        "a file in the way": "rmdir runs; touch runs",
        "a link in the way": "rmdir runs; ln -s /proc/self runs",
        "a name of 300 letters": "true",
    }[kind]
    name = f"--name {'x' * 300}" if "letters" in kind else ""
    inner = f"{first}; exec {shlex.quote(sys.executable)} -m samestep submit {name} train.py"
    env = {key: value for key, value in os.environ.items() if not key.startswith("SAMESTEP")} | {
        "PATH": "/usr/bin:/bin"
    }
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", inner],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr, done.stderr
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
