"""`samestep run` in an allocation's own shell: its step has every core and device of each node."""

import subprocess
import sys
from pathlib import Path

import pytest
from fournodes import Cluster

pytestmark = pytest.mark.slurm

_SAMESTEP = str(Path(sys.executable).with_name("samestep"))
_SHOW = """
import os, time
here = os.environ
print(*(f"{name}={here.get(name, '')}" for name in ("SLURMD_NODENAME", "LOCAL_WORLD_SIZE", "WORLD_SIZE",
    "CUDA_VISIBLE_DEVICES", "SLURM_CPUS_ON_NODE", "SLURM_CPUS_PER_TASK")))
"""
_EXPORTED = "export SLURM_EXACT=1 SRUN_CPUS_PER_TASK=10; "


# For each node: its processes, devices and cores, and what the allocation counted for a task.
@pytest.mark.parametrize(
    ("given", "before", "seen"),
    [
        ("--ntasks-per-node=2 --gpus-per-task=1", "", "2 0,1 2 - | 2 0,1 2 -"),
        ("--ntasks=3 --gpus-per-task=2", "", "2 0,1,2,3 2 - | 1 0,1 1 -"),
        ("--ntasks-per-node=2 --gpus-per-task=1 --cpus-per-task=10", _EXPORTED, "2 0,1 20 10 | 2 0,1 20 10"),
        ("--ntasks=3 --cpus-per-task=10", _EXPORTED, "2 - 20 10 | 1 - 10 10"),
        ("--gpus=4", "", "3 0,1,2 1 - | 1 0 1 -"),
        ("--gpus=4 --gpus-per-node=2", "", "2 0,1 1 - | 2 0,1 1 -"),
        ("--gpus-per-node=2 --ntasks-per-gpu=1", "", "2 0,1 2 - | 2 0,1 2 -"),
        ("--gres=gpu:2 --exclusive", "", "2 0,1 80 - | 2 0,1 80 -"),
        (
            "--ntasks-per-node=1",
            "export SLURM_DISTRIBUTION=arbitrary SLURM_HOSTFILE={hosts}; ",
            "1 - 1 - | 1 - 1 -",
        ),
    ],
)
def test_the_step_has_all_that_each_node_was_allocated(cluster: Cluster, tmp_path, given, before, seen):
    (tmp_path / "show.py").write_text(_SHOW)
    (tmp_path / "hosts").write_text("ssnode2\nssnode1\n")
    shell = before.format(hosts=tmp_path / "hosts") + f"exec {_SAMESTEP} run --all-ranks show.py"
    words = ("salloc", "--quiet", "--nodes=2", "--nodelist=ssnode[1-2]", *given.split(), "bash", "-c", shell)
    done = subprocess.run(cluster.command(*words, cwd=tmp_path), capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    told = [
        dict(word.split("=", 1) for word in line.split("]")[-1].split()) for line in done.stdout.splitlines()
    ]
    nodes = {task.pop("SLURMD_NODENAME"): task for task in told if "WORLD_SIZE" in task}
    names = ("LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "SLURM_CPUS_ON_NODE", "SLURM_CPUS_PER_TASK")
    found = [" ".join(nodes[node][name] or "-" for name in names) for node in sorted(nodes)]
    assert " | ".join(found) == seen
