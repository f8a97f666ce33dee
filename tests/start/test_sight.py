"""A rank's stack is read without a signal while it runs Python: a signal would read frames that end meanwhile."""

import re
import subprocess
import sys

import pytest

SCRIPT = """\
import signal, time
import samestep
from samestep.rundir import STACK_SIGNAL

world = samestep.init()
signal.signal(STACK_SIGNAL, signal.SIG_IGN)
until = time.monotonic() + 8
while world.rank and time.monotonic() < until:
    pass
samestep.sum(1)
"""


@pytest.mark.slow
def test_the_line_of_a_rank_that_runs_python_is_read_without_a_signal(tmp_path):
    (tmp_path / "busy.py").write_text(SCRIPT)
    run = [sys.executable, "-m", "samestep", "run", "-n", "2", "busy.py"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert re.search(r"rank 0 has waited \S+ s in .* for rank 1, which is at busy.py:[89]\n", done.stderr)
