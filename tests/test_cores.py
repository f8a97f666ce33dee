"""The cores that a process may use: its affinity, cut to the quota of its control group."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.placement import cores


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_cores_are_those_this_process_may_use():
    told = "import os; os.sched_setaffinity(0, [0]); from samestep.placement import cores; print(cores())"
    assert subprocess.check_output([sys.executable, "-c", told], text=True) == "[0]\n"


@pytest.mark.root
@pytest.mark.skipif(len(cores()) < 2, reason="one core cannot be cut")
def test_cores_are_cut_to_the_control_groups_quota():
    version_1 = Path("/sys/fs/cgroup/cpu")
    folder, limit = (version_1, "cpu.cfs_quota_us") if version_1.is_dir() else (version_1.parent, "cpu.max")
    group = folder / f"samestep-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        if not (group / limit).exists():
            pytest.skip(f"this system's control groups have no {limit}")
        (group / limit).write_text("150000")
        told = "from samestep.placement import cores; print(len(cores()))"
        inside = f'echo $$ > {group}/cgroup.procs && exec "$0" -c "{told}"'
        assert subprocess.check_output(["sh", "-c", inside, sys.executable], text=True) == "1\n"
    finally:
        group.rmdir()
