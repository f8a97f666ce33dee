"""Whatever workers write is kept whole, and shown in whole lines."""

import os
import subprocess
import sys

import pytest

FLOOD = """
import os, sys
rank = os.environ["RANK"]
for number in range(33_400):
    stream = sys.stderr if number % 7 == 0 else sys.stdout
    stream.write(f"rank {rank} line {number:06d} {'x' * (number % 50)}|\\n")
"""


def lines_of(rank: int) -> set[str]:
    return {f"rank {rank} line {number:06d} {'x' * (number % 50)}|" for number in range(33_400)}


def test_a_hundred_thousand_lines_of_three_ranks_arrive_whole(launcher):
    launcher.write(FLOOD)
    code, out, err = launcher.run("-n", "3", "--tee", "all", "train.py")
    assert code == 0
    shown = (out + err).splitlines()
    assert len(shown) == 100_200
    for rank in range(3):
        prefix = f"[rank {rank}] " if rank else ""
        mine = {line.removeprefix(prefix) for line in shown if line.startswith(f"{prefix}rank {rank}")}
        assert mine == lines_of(rank)
        kept = launcher.log(rank).splitlines()
        assert len(kept) == 33_400
        assert set(kept) == lines_of(rank)


def test_only_rank_0_is_shown_and_every_rank_is_kept(launcher):
    launcher.write("import os, sys\nprint('out', os.environ['RANK'])\nprint('err', file=sys.stderr)")
    code, out, err = launcher.run("-n", "3", "train.py")
    assert (code, out, err) == (0, "out 0\n", "err\n")
    assert sorted(launcher.log(2).splitlines()) == ["err", "out 2"]
    newest = next((launcher.home / "runs").iterdir())
    assert (newest / "logs" / "rank-2.log").stat().st_mode & 0o777 == 0o600


def test_rank_0s_unfinished_lines_are_shown_at_once(launcher):
    launcher.write("import time\nprint('50%', end='\\r')\nprint('loading', end='')\ntime.sleep(100)")
    started = launcher.start("-n", "1", "train.py")
    assert os.read(started.process.stdout.fileno(), 100).startswith(b"50%")


def test_a_line_that_is_ended_later_has_one_prefix(launcher):
    launcher.write(
        """
        import os, time
        if os.environ["RANK"] == "1":
            print("epoch 1 ...", end="", flush=True)
            time.sleep(0.5)
            print(" done\\nnext")
        """
    )
    assert launcher.run("-n", "2", "--tee", "all", "train.py")[1] == (
        "[rank 1] epoch 1 ... done\n[rank 1] next\n"
    )


def test_binary_and_endless_lines_are_kept_byte_for_byte(launcher):
    launcher.write(
        """
        import os, random
        data = random.Random(0).randbytes(3_000_000) + b"x" * 1_000_000
        while data:
            data = data[os.write(1, data):]
        """
    )
    code = (
        "import random, subprocess, sys;"
        f"out = subprocess.run([{sys.executable!r}, '-m', 'samestep', 'run', '-n', '1', 'train.py'],"
        "stdout=subprocess.PIPE).stdout;"
        "log = next(__import__('pathlib').Path('runs').glob('*/logs/rank-0.log')).read_bytes();"
        "want = random.Random(0).randbytes(3_000_000) + b'x' * 1_000_000;"
        "assert out == want and log == want"
    )
    subprocess.run([sys.executable, "-c", code], cwd=launcher.home, env=launcher.env, check=True)


@pytest.mark.slow
def test_a_console_nobody_reads_bounds_memory_and_loses_nothing(launcher):
    launcher.write(
        "for number in range(400_000):\n    print(number, 'x' * 20)\nopen('done', 'w').write('1\\n')"
    )
    started = launcher.start("-n", "1", "train.py")
    log = None
    size = -1
    while log is None or log.stat().st_size != size:
        size = log.stat().st_size if log else -1
        found = list(launcher.home.glob("runs/*/logs/rank-0.log"))
        log = found[0] if found else None
        subprocess.run(["sleep", "0.5"], check=True)
    assert not (launcher.home / "done").exists()
    assert size < 4 << 20
    code, out, _ = started.finish()
    assert code == 0
    assert out.splitlines() == [f"{number} {'x' * 20}" for number in range(400_000)]


def test_a_console_that_went_away_does_not_end_the_run(launcher):
    launcher.write("for number in range(20_000):\n    print(number)\nopen('done', 'w').write('1\\n')")
    started = launcher.start("-n", "1", "train.py")
    started.process.stdout.close()
    assert started.process.wait(timeout=30) == 0
    assert (launcher.home / "done").exists()
    started.process.stderr.close()
    started.process.stdout = started.process.stderr = None
    assert len(launcher.log(0).splitlines()) == 20_000


def test_the_launchers_lines_begin_anew_after_an_unfinished_line_of_rank_0(launcher):
    launcher.write(
        """
        import os, sys, time
        if os.environ["RANK"] == "0":
            sys.stderr.write("\\r 50%|###   |")
            time.sleep(20)
        time.sleep(0.3)
        sys.exit(3)
        """
    )
    code, _, err = launcher.run("-n", "2", "train.py")
    assert code == 3
    assert " 50%|###   |\ntrain.py failed on rank 1 of 2" in err


FILES = """
import os, samestep
class Log:
    def __init__(self, name):
        self.file, self.me = open(f"{name}{os.environ['RANK']}", "w"), self
        self.file.write("written")
def main():
    file = open(f"local{os.environ['RANK']}", "w")
    samestep.init()
    file.write("written")
    END
if __name__ == "__main__":
    kept = Log("kept")
    main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("end", "code"), [("pass", 0), ("raise SystemExit(3)", 3)])
def test_files_that_are_left_open_have_what_was_written(launcher, end, code):
    launcher.write(FILES.replace("END", end))
    assert launcher.run("-n", "2", "train.py")[0] == code
    for name in ("local", "kept"):
        assert [(launcher.home / f"{name}{rank}").read_text() for rank in (0, 1)] == ["written"] * 2
