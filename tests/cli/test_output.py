"""How every command ends where its arguments cannot be."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from samestep.cli import COMMANDS, main
from samestep.cli.output import print_table


@pytest.mark.parametrize(
    "args",
    [
        "run",
        "run -n",
        "run --bogus train.py",
        "run --devices= train.py",
        "run --max-restarts x train.py",
        "run --shutdown-timeout nan train.py",
        "run --hang-timeout 10s train.py",
        "run --nodes 2 --node-rank 0 --rendezvous env:// train.py",
        "scale --repat 3 train.py",
        "scale --predict 8 --link 1.2.3GB/s,5us train.py",
        "submit --scale ' train.py",
        "completion ksh",
        "compare --tolerance nan a b",
        "export a -o b",
        "status ''",
        "env extra",
    ],
)
def test_a_wrong_argument_ends_with_one_sentence_and_exit_code_2(tmp_path, monkeypatch, capsys, args):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    (tmp_path / "train.py").touch()
    with pytest.raises(SystemExit) as ended:
        main([word.replace("''", "") for word in args.split()])
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert out == ""
    assert err.startswith("samestep")
    assert err.count("\n") == 1
    assert ";" in err  # what to write comes after what is wrong
    assert os.listdir() == ["train.py"]


def test_an_option_of_the_script_before_it_is_said_to_stand_after_it(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--epochs", "3", "train.py"])
    hint = "options of the script stand after it; see `samestep run --help`"
    assert capsys.readouterr().err == f"samestep: no such option '--epochs'; {hint}\n"


def test_a_full_disk_under_the_output_is_said_in_one_sentence(tmp_path):
    with Path("/dev/full").open("wb", buffering=0) as full:
        command = [sys.executable, "-m", "samestep", "runs"]
        done = subprocess.run(
            command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=50
        )
    assert done.returncode == 1
    assert done.stderr.startswith("samestep runs: the output cannot be used (no space left on device)\n")


@pytest.mark.parametrize(("command", "code"), [("run", 126), ("verify", 2), ("convert", 2), ("scale", 2)])
def test_a_script_that_may_not_be_read_is_refused_before_it_is_started(
    command, code, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "train.py")
    with pytest.raises(SystemExit) as ended:
        main([command, "train.py"])
    err = capsys.readouterr().err.removeprefix("samestep").removeprefix(f" {command}")
    assert (ended.value.code, err) == (code, ": train.py cannot be read (permission denied)\n")
    assert os.listdir() == ["train.py"]


@pytest.mark.parametrize("close", ["| (exec 0<&-; sleep 0.5)", ">&-"])
def test_help_without_a_reader_ends_without_a_traceback(close):
    command = f"PYTHONUNBUFFERED=1 {sys.executable} -m samestep --help {close}"
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True, timeout=50)
    assert done.stderr == ""


def test_a_last_column_of_numbers_is_not_broken_at_the_edge_of_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    rows = [("processes", "samples/s each", "cores each", "device time an epoch")]
    print_table([*rows, ("2, bucket_cap_mb=25", 940, 1, "4.3 s")])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


def on_a_terminal(columns: int, *words: str, module: tuple[str, ...] = ("-m", "samestep")) -> str:
    """What samestep, or Python without a module, writes to a terminal of that many columns."""
    end, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [sys.executable, *module, *words]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=env)
    os.close(terminal)
    said = b""
    with open(end, "rb", buffering=0) as file:
        try:
            while data := file.read(1 << 16):
                said += data
        except OSError:  # the terminal's other end is closed
            pass
    process.wait(50)
    return said.decode().replace("\r", "")


@pytest.mark.parametrize("verb", ["help", *COMMANDS])
def test_help_fits_forty_columns_except_lines_to_copy(verb):
    said = on_a_terminal(40, *([verb, "--help"] if verb in COMMANDS else [verb]))
    assert "samestep" in said
    wide = [line for line in said.splitlines() if len(line) > 40]
    assert all(re.match("  (samestep|srun|mpirun) |`samestep", line) for line in wide), wide


def test_a_long_line_is_broken_between_words_on_a_terminal_alone(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("model = 1\n")
    said = on_a_terminal(50, "convert", str(script)).splitlines()
    assert max(map(len, said[-4:])) <= 50 + len(str(script))
    assert len([line for line in said if line.startswith("    ")]) > 1
    command = [sys.executable, "-m", "samestep", "convert", str(script)]
    plain = subprocess.run(command, capture_output=True, text=True).stderr.splitlines()
    assert " ".join(" ".join(said).split()) == " ".join(" ".join(plain).split())


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_what_cannot_be_written_is_said_in_one_line(word, tmp_path):
    with open("/dev/full", "wb", buffering=0) as full:
        words = [sys.executable, "-m", "samestep", word]
        done = subprocess.run(words, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=50)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "(no space left on device)" in done.stderr.lower()


def test_a_terminal_shows_a_line_with_the_time_and_ends_it_before_an_error() -> None:
    code = (
        "import time; from samestep.cli.output import progress, working\n"
        "with working('reading'): time.sleep(0.3)\n"
        "with progress(4) as report: report(2, 'half', ' done'); time.sleep(0.3); raise SystemExit('stopped')\n"
    )
    assert on_a_terminal(60, "-c", code, module=()) == (
        "reading ... 0:00\x1b[K" * 2 + "\x1b[K" + f"half done [{'=' * 15:30}] 0:00\x1b[K" * 2 + "\nstopped\n"
    )
    assert f"{'=' * 15:30}" not in on_a_terminal(40, "-c", code, module=())
