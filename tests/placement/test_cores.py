"""The cores that a process may use: its affinity, cut to the quota of its control group; and its device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.errors import PlacementError
from samestep.placement.cores import cores
from samestep.placement.place import Placement, device_index, idle_devices


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_cores_are_those_this_process_may_use():
    told = (
        "import os; os.sched_setaffinity(0, [0]); from samestep.placement.cores import cores; print(cores())"
    )
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
        told = "from samestep.placement.cores import cores; print(len(cores()))"
        inside = f'echo $$ > {group}/cgroup.procs && exec "$0" -c "{told}"'
        assert subprocess.check_output(["sh", "-c", inside, sys.executable], text=True) == "1\n"
    finally:
        group.rmdir()


@pytest.mark.parametrize(("local_rank", "visible", "index"), [(0, 0, None), (3, 1, 0), (0, 2, 0), (1, 2, 1)])
def test_the_device_is_the_only_visible_one_or_that_of_the_local_rank(local_rank, visible, index):
    assert device_index(Placement(local_rank, 4, local_rank, 4, 0, 1, "torchrun"), visible) == index


def test_more_processes_than_devices_are_refused():
    with pytest.raises(
        PlacementError, match="local rank 2 has no device of its own among the 2 that are visible"
    ):
        device_index(Placement(2, 4, 2, 4, 0, 1, "torchrun"), 2)


@pytest.mark.parametrize(
    ("local_size", "nodes", "launcher", "said"),
    [
        (1, 1, "alone", "1 process of this node uses 1 of them; `samestep run train.py` uses all"),
        (1, 2, "slurm", "1 process of this node uses 1 of them; write `srun --ntasks-per-node=4`"),
        (2, 2, "torchrun", "2 processes of this node use 2 of them; start 4 processes on each node"),
    ],
)
def test_rank_0_says_for_all_which_devices_no_process_uses(local_size, nodes, launcher, said):
    size = local_size * nodes
    ranks = [
        Placement(rank, size, rank % local_size, local_size, rank // local_size, nodes, launcher)
        for rank in range(size)
    ]
    lines = [idle_devices(one, 4, "train.py") for one in ranks]
    assert lines == [f"4 devices are visible and {said}", *[None] * (size - 1)]
    assert not any(idle_devices(one, local_size, "train.py") for one in ranks)
