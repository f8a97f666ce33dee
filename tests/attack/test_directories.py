"""Attacks on who looks at runs: a directory that somebody else prepared is listed, shown and stopped without harm."""

import json
import math
import os
import re
import socket
import subprocess
import sys
import time
from importlib import import_module
from zlib import crc32

import pytest
from click.testing import CliRunner

from samestep import rundir
from samestep.failure import write_failure
from samestep.rundir import Pulse, begin_run, pulse_of

RECORD = {"argv": ["train.py", "3"], "size": 1, "host": "elsewhere", "pid": 1, "started": 1.7e9, "cwd": "/"}
EVIL = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x9b31m\u202etxt\r\x08\x00"
SECRET = "what is only this user's"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def make(run, record=RECORD, result=None, log="step 1\n"):
    """What a run leaves, with these records and this output."""
    for folder in ("logs", "pulse", "failures"):
        (run / folder).mkdir(parents=True)
    (run / "run.json").write_text(record if isinstance(record, str) else json.dumps(record))
    if result is not None:
        (run / "result.json").write_text(result if isinstance(result, str) else json.dumps(result))
    (run / "logs" / "rank-0.log").write_bytes(log if isinstance(log, bytes) else log.encode())
    Pulse(run / "pulse" / "rank-0").beat(3)


def instead(name, put):
    """An attack that replaces a part of a run by what `put` makes there."""

    def attack(run, home):
        make(run)
        path = run / name
        if path.is_dir():
            for inner in path.iterdir():
                inner.unlink()
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        put(path, home)

    return attack


def link(to):
    return lambda path, home: path.symlink_to(home / to)


def bind(path, home):
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(os.path.relpath(path))


def pulse(time):
    """A pulse whose checksum is right, and whose times are all this one."""

    def attack(run, home):
        make(run, RECORD, {"exit_code": 0})
        said = rundir._BEAT.pack(3, 0, time, time, 0, 0, b"call", time, 1, b"samestep.sum")
        opened = rundir._MAGIC + rundir._OPENED.pack(b"cpu", 1, time) + rundir._RAISED.pack(0, b"")
        checksum = rundir._CHECKSUM.pack(crc32(said))
        (run / "pulse" / "rank-0").write_bytes(opened + checksum + said)

    return attack


def record(**changes):
    return lambda run, home: make(run, RECORD | changes)


def named(name):
    return lambda run, home: (make(run), (run / "logs" / f"rank-{name}.log").touch())


def text(written, result=None):
    return lambda run, home: make(run, written, result)


def result(**changes):
    return lambda run, home: make(run, RECORD, {"exit_code": 1, "seconds": 1.0, "failure": "x"} | changes)


ATTACKS = {
    **{f"started is {value!r:.20}": record(started=value) for value in (
        1e308, -1e308, math.nan, math.inf, [], {}, "x", None, True, -1, 2**70, 10**400, 1e14)},
    **{f"size is {value!r:.20}": record(size=value) for value in (0, -1, 1e9, 2**70, 10**400, "1", [], None, True)},
    **{f"argv is {value!r:.20}": record(argv=value) for value in (
        "x", None, [], {}, [1], [[]], [EVIL], ["python3", EVIL], ["x" * 10**6], [None])},
    **{f"pid is {value!r:.20}": record(host=os.uname().nodename, pid=value) for value in (
        -1, 0, 1, 2**31, 2**63, 10**400, "1", [], math.nan)},
    "pid is that of the test": record(host=os.uname().nodename, pid=os.getpid()),
    **{f"host is {value!r:.20}": record(host=value) for value in (EVIL, [], None, 3, "x" * 10**6)},
    **{f"exit_code is {value!r:.20}": result(exit_code=value) for value in (
        [], {}, "0", EVIL, None, math.nan, 10**400, 1e308, True)},
    **{f"seconds is {value!r:.20}": result(seconds=value) for value in (
        [], "x", EVIL, None, math.nan, math.inf, 1e308, -1, 10**400)},
    **{f"failure is {value!r:.20}": result(failure=value) for value in ([], 3, EVIL, "x\n" * 10**5, {"a": EVIL})},
    "a record of a million brackets": text("[" * 10**6),
    "a record of nested objects": text('{"a":' * 10**5),
    "a record of 100 MB": text(json.dumps(RECORD | {"more": "x" * 10**8})),
    "a record of a number of a million digits": text('{"size": ' + "9" * 10**6 + "}"),
    "a record that is no text": text("\udcff".encode("utf-8", "surrogateescape").decode("latin-1")),
    "a result of a million brackets": text(RECORD, "[" * 10**6),
    "a result that is a list": text(RECORD, "[1]"),
    **{f"{name} is a link": instead(name, link("secret")) for name in (
        "run.json", "result.json", "logs/rank-0.log", "pulse/rank-0", "stop")},
    **{f"{name} is a link to a device": instead(name, lambda path, home: path.symlink_to("/dev/zero")) for name in (
        "run.json", "result.json", "logs/rank-0.log", "pulse/rank-0", "stop")},
    **{f"{name} is a pipe": instead(name, lambda path, home: os.mkfifo(path)) for name in (
        "run.json", "result.json", "logs/rank-0.log", "pulse/rank-0", "stop")},
    **{f"{name} is a socket": instead(name, bind) for name in ("run.json", "logs/rank-0.log", "pulse/rank-0")},
    **{f"{name} is a directory": instead(name, lambda path, home: path.mkdir()) for name in (
        "run.json", "result.json", "logs/rank-0.log", "pulse/rank-0", "stop")},
    **{f"{name} leads elsewhere": instead(name, link("elsewhere")) for name in ("logs", "pulse")},
    **{f"{name} is a file": instead(name, lambda path, home: path.touch()) for name in ("logs", "pulse")},
    "stop is a link to nothing": instead("stop", link("made-by-stop")),
    "stop is a link to a directory": instead("stop", link("elsewhere")),
    **{f"the pulse holds {value}": pulse(value) for value in (math.nan, math.inf, -1e308, 1e308, 1e18, 3e12)},
    "the pulse holds escapes": lambda run, home: (make(run), Pulse(run / "pulse" / "rank-0", EVIL[:15]).beat(1)),
    "the log holds escapes": lambda run, home: make(run, log=EVIL + "\n"),
    "the log holds bytes that are no text": lambda run, home: make(run, log=b"\x9b31m\xff\xfe\x1b[1m\n" * 99),
    "the log ends within a letter": lambda run, home: make(run, log=b"\xe2\x80"),
    **{f"a log is named rank-{name}.log": named(name) for name in (
        "9" * 100, "-1", "\u00b2", "007", "\x1b[31m", "1\n2", " 1")},
}  # fmt: skip


def look(verb, *words):
    return CliRunner().invoke(import_module(f"samestep.cli.{verb}").command, list(words))


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("SAMESTEP_RUN_DIR", "SAMESTEP_RUN"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "rank-0").write_text(SECRET)
    (tmp_path / "elsewhere" / "rank-0.log").write_text(SECRET)
    make(tmp_path / "runs" / "honest", RECORD | {"argv": ["honest.py"]}, {"exit_code": 0, "seconds": 1.0})
    return tmp_path


def harmless(done, name):
    """What every command must be on every directory."""
    assert done.exit_code in (0, 1, 2), done.output
    assert done.exception is None or isinstance(done.exception, SystemExit), (name, repr(done.exception))
    assert not RAW.search(done.output), (name, RAW.search(done.output))
    assert SECRET not in done.output, name
    assert "Traceback" not in done.output


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_run_directory_does_no_harm(attempt, home, name):
    run = home / "runs" / "hostile"
    ATTACKS[name](run, home)
    before = {path: path.lstat().st_mtime_ns for path in home.iterdir() if path.name != "runs"}
    began = time.monotonic()
    verbs = (["runs"], ["runs", "--json"], ["status", "hostile"], ["status", "--json", "hostile"],
             ["logs", "hostile"], ["logs", "--rank", "all", "hostile"], ["stop", "hostile"], ["status"])  # fmt: skip
    for words in verbs:
        attempt(f"{name}: samestep {' '.join(words)}")
        done = look(*words)
        harmless(done, f"{name}: {words}")
        if words[0] == "runs":
            assert "honest" in done.output
            assert words[-1] != "--json" or json.loads(done.output)["runs"]
    assert time.monotonic() - began < 20
    assert {path: path.lstat().st_mtime_ns for path in home.iterdir() if path.name != "runs"} == before
    assert (home / "elsewhere" / "rank-0").read_text() == SECRET


@pytest.mark.parametrize("kind", ["link", "name"])
def test_a_hostile_root_of_runs_does_no_harm(attempt, home, kind):
    if kind == "link":
        make(home / "elsewhere" / "run")
        (home / "runs" / "hostile").symlink_to(home / "elsewhere" / "run")
        (home / "runs" / "hostile.out").symlink_to(home / "secret")
    else:
        make(home / "runs" / f"evil{EVIL[:-1]}")
        make(home / "runs" / "two\nlines")
    for words in (["runs"], ["runs", "--json"], ["status"], ["logs"], ["stop"]):
        attempt(f"{kind}: samestep {words}")
        done = look(*words)
        harmless(done, f"{kind}: {words}")
    listed = json.loads(look("runs", "--json").output)["runs"]
    assert len(listed) == (1 if kind == "link" else 3)


def test_the_output_of_a_batch_job_is_no_way_to_another_file(attempt, home):
    attempt("a job's output is a link")
    run = home / "runs" / "job_7"
    make(run)
    (run / "logs" / "rank-0.log").unlink()
    (home / "runs" / "job_7.out").symlink_to(home / "secret")
    for words in (["logs", "job_7"], ["status", "job_7"], ["runs"]):
        harmless(look(*words), words)


def test_stop_signals_nobody_and_a_number_that_is_taken_again_is_no_running_launcher(attempt, home):
    attempt("the pid of another process")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        make(
            home / "runs" / "hostile",
            RECORD | {"host": os.uname().nodename, "pid": other.pid, "started": 1.7e9},
        )
        done = look("stop", "hostile")
        assert "has ended (ended without a result), so there is nothing to stop" in done.output
        assert other.poll() is None
        other.communicate()
        assert other.returncode in (0, 1)


def test_a_pipe_is_not_waited_for_by_a_real_command(attempt, home):
    attempt("a pipe for run.json, in a process of its own")
    ATTACKS["run.json is a pipe"](home / "runs" / "hostile", home)
    ran = subprocess.run(
        [sys.executable, "-m", "samestep", "runs"], capture_output=True, text=True, timeout=20
    )
    assert "honest" in ran.stdout


@pytest.mark.parametrize("part", ["", "failures", "pulse", "logs"])
@pytest.mark.parametrize("kind", ["a link", "another user's"])
def test_a_job_goes_on_in_no_directory_that_somebody_else_prepared(attempt, home, part, kind):
    attempt(f"{part or 'the directory of a job'} is {kind}")
    run, mine = home / "runs" / "job_7", home / "mine"
    make(run)
    make(mine)
    (mine / "rank-0.json").write_text(SECRET)
    before = {path: path.read_bytes() for path in mine.rglob("*") if path.is_file()}
    if kind == "a link":
        (run / part).rename(home / "moved")
        (run / part).symlink_to(mine)
    elif os.geteuid():
        pytest.skip("only root can give a directory away")
    else:
        os.chown(run / part, 65534, 65534)
    with pytest.raises(PermissionError, match="it is another user's or a link"):
        begin_run(run, RECORD)
    write_failure({"SAMESTEP_RUN": str(run)}, ValueError("mine"), 1)
    if part in ("", "pulse"):
        assert pulse_of({"SAMESTEP_RUN": str(run)}, 0) is None
    assert {path: path.read_bytes() for path in mine.rglob("*") if path.is_file()} == before


def test_a_pulse_is_not_written_through_a_link(attempt, home):
    attempt("a pulse is a link")
    run = home / "runs" / "job_7"
    make(run)
    (home / "file").write_text(SECRET)
    (run / "pulse" / "rank-1").symlink_to(home / "file")
    with pytest.raises(OSError, match="symbolic links"):
        Pulse(run / "pulse" / "rank-1")
    assert (home / "file").read_text() == SECRET
