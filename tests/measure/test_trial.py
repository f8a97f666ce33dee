"""A trial returns what a script did, and nothing of it is left running however the trial ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from samestep.errors import WorkerFailed
from samestep.measure.trial import Result, Trial, end_on_signals

WAITS = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n"


def script(directory: Path, source: str) -> str:
    path = directory / "script.py"
    path.write_text(source)
    return str(path)


def ended(pid: int) -> bool:
    """Whether a process is gone within five seconds."""
    try:
        psutil.Process(pid).wait(5)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


@pytest.mark.slow
def test_a_trial_returns_exit_code_output_failure_and_run(tmp_path):
    source = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
print("rank", os.environ["RANK"], sys.argv[1:], os.environ["TOLD"], sys.stdin.read(), flush=True)
printed = Path(__file__).with_name("printed")
if os.environ["RANK"] == "0":
    printed.touch()
while not printed.exists():
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    raise ValueError("seven")
"""
    heard = []
    trial = Trial([script(tmp_path, source), "--lr", "1"], 2, tmp_path / "trial", {"TOLD": "me"})
    result = trial.run(heard.append)
    assert result.code == 1
    assert result.printed()[0] == "rank 0 ['--lr', '1'] me "
    assert "rank 1" in result.printed(1)[0]
    assert result.printed()[0] in heard
    assert result.failure is not None
    assert "script.py failed on rank 1 of 2" in result.failure
    assert "ValueError: seven" in result.failure
    assert result.run.size == 2
    assert result.run.path.parent == tmp_path / "trial"
    assert 0 < result.seconds < 30


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_trial_on_one_core_has_one(tmp_path):
    source = "import os\nprint(len(os.sched_getaffinity(0)))\n"
    result = Trial([script(tmp_path, source)], 1, tmp_path / "trial", cores=1).run()
    assert (result.code, result.printed()) == (0, ["1"])
    assert len(os.sched_getaffinity(0)) > 1


def test_a_module_runs_the_script_where_one_is_named(tmp_path):
    path = script(tmp_path, "print('here')\n")
    result = Trial(
        [path, "a"], 1, tmp_path / "trial", through=["trace", "--count", "-C", str(tmp_path)]
    ).run()
    assert result.code == 0
    assert "here" in result.printed()
    assert list(tmp_path.glob("*.cover"))


def test_an_exception_ends_the_script(tmp_path):
    pids = []

    def interrupt(line):
        pids.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trial([script(tmp_path, WAITS)], 1, tmp_path / "trial").run(interrupt)
    assert ended(pids[0])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_script_ends_with_the_process_that_tries_it(tmp_path, number):
    source = f"""
from pathlib import Path
from types import SimpleNamespace
from samestep.errors import WorkerFailed
from samestep.measure.trial import Result, Trial, end_on_signals
with end_on_signals():
    Trial([{script(tmp_path, WAITS)!r}], 1, Path({str(tmp_path)!r}) / "trial").run(lambda line: print(line, flush=True))
"""
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        began = time.monotonic()
        process.send_signal(number)
    assert ended(pid)
    assert time.monotonic() - began < 10


def test_signals_do_after_a_trial_what_they_did_before():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    with pytest.raises(SystemExit), end_on_signals():
        signal.raise_signal(signal.SIGTERM)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


@pytest.mark.slow
def test_another_launcher_starts_the_ranks_on_the_same_cores(tmp_path):
    source = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
said = [os.environ["RANK"], os.environ["WORLD_SIZE"], str(len(os.sched_getaffinity(0))), os.environ["TOLD"]]
os.write(1, (" ".join(said) + "\\n").encode())
Path(__file__).with_name(f"printed-{os.environ['RANK']}").touch()
while len(list(Path(__file__).parent.glob("printed-*"))) < 2:  # torchrun ends the other at the first exit
    time.sleep(0.01)
sys.exit(sys.argv[1])
"""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [script(tmp_path, source), "seven"]
    result = Trial(words, 2, tmp_path / "trial", {"TOLD": "me"}, cores=1, launcher=torchrun).run()
    assert {"0 2 1 me", "1 2 1 me"} <= set(result.text.splitlines()), result.text
    assert result.run.size == 2
    with pytest.raises(WorkerFailed, match="seven"):
        result.checked()


def test_what_the_script_printed_stands_before_a_report_without_an_exception():
    report = "train.py failed on rank 0 of 1 (n1) after 1.4 s\n\nexit code 2\n\nLogs: runs/1/logs/rank-0.log"
    run = SimpleNamespace(ended=SimpleNamespace(failure=report))
    printed = f"usage: train.py\ntrain.py: error: unrecognized arguments: --epohs\n{report}\n"
    with pytest.raises(WorkerFailed, match="unrecognized arguments: --epohs") as caught:
        Result(2, 1.4, printed, run).checked()
    assert str(caught.value).endswith(report)
