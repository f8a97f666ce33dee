"""A run inside a Slurm allocation but in no step of it: the step that covers the whole allocation."""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence

from samestep.nodelist import expand_nodes, shown, tasks_per_node


def whole_allocation(env: Mapping[str, str], args: Sequence[str], is_counted: bool) -> list[str] | None:
    """The srun command that has `samestep run args` on each node; None where this process is where it should be.

    Where the arguments do not say how many processes a node has, the allocation's tasks do, or its devices.
    """
    srun = shutil.which("srun")
    if not env.get("SLURM_JOB_NODELIST") or not srun:
        return None
    names = expand_nodes(env["SLURM_JOB_NODELIST"])
    here = os.uname().nodename.partition(".")[0]
    if len(names) == 1 and (here == names[0].partition(".")[0] or "SLURM_NODEID" in env):
        return None
    step = [srun, "--overlap", "--disable-status", "--cpu-bind=none", "--kill-on-bad-exit=0"]
    step += [f"--nodes={len(names)}", f"--ntasks={len(names)}", "--ntasks-per-node=1"]
    tasks = tasks_per_node(env["SLURM_TASKS_PER_NODE"]) if env.get("SLURM_TASKS_PER_NODE") else []
    each = ["-n", ",".join(map(str, tasks))] if sum(tasks) > len(names) and not is_counted else []
    return [*step, sys.executable, "-m", "samestep", "run", *each, *args]


def explanation(env: Mapping[str, str]) -> str:
    """The line that says what happens."""
    job, nodes = shown(env.get("SLURM_JOB_ID", "")), shown(env["SLURM_JOB_NODELIST"])
    return f"this is in no step of Slurm job {job}, so one is started on {nodes} (srun --overlap)"
