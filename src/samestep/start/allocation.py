"""A run inside a Slurm allocation but in no step of it: the step that covers the whole allocation."""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence

from samestep.placement.launchers import count, in_step
from samestep.placement.nodelist import device_count, expand_nodes, tasks_per_node

# From these srun would take fewer cores or devices than each node has, more tasks than nodes, or another order.
_UNSET = (
    *("SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_EXACT", "SLURM_EXCLUSIVE"),
    *("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_GPU_BIND"),
    *("SLURM_DISTRIBUTION", "SLURM_HOSTFILE"),
)


def allocation_command(env: Mapping[str, str], args: Sequence[str], is_counted: bool) -> list[str] | None:
    """The command that has `samestep run args` on each node; None where this process is where it should be.

    Where the arguments do not say how many processes a node has, the allocation's tasks do, or its devices.
    """
    srun, clean = shutil.which("srun"), shutil.which("env")
    if not env.get("SLURM_JOB_NODELIST") or not srun or not clean:
        return None
    names = expand_nodes(env["SLURM_JOB_NODELIST"])
    here = os.uname().nodename.partition(".")[0]
    if len(names) == 1 and (here == names[0].partition(".")[0] or "SLURM_NODEID" in env):
        return None
    # Slurm also fills whole nodes with tasks that nobody asked for
    is_asked = count(env, "SLURM_NTASKS") or count(env, "SLURM_NTASKS_PER_NODE")
    tasks = tasks_per_node(each_has) if is_asked and (each_has := env.get("SLURM_TASKS_PER_NODE")) else []
    step = [clean, *(f"-u{name}" for name in _UNSET if name in env)]
    step += [srun, *_devices(env, tasks, len(names)), "--disable-status", "--cpu-bind=none"]
    step += ["--kill-on-bad-exit=0", f"--nodes={len(names)}", f"--ntasks={len(names)}", "--ntasks-per-node=1"]
    # Scripts read how many cores each of their processes was allocated; only srun must not.
    cores = count(env, "SLURM_CPUS_PER_TASK")
    step += [clean, f"SLURM_CPUS_PER_TASK={cores}"] if cores else []
    each = ["-n", ",".join(map(str, tasks))] if sum(tasks) > len(names) and not is_counted else []
    return [*step, sys.executable, "-m", "samestep", "run", *each, *args]


def _devices(env: Mapping[str, str], tasks: Sequence[int], nodes: int) -> list[str]:
    """What gives the step every device of each node; of those counted by task it would have one task's."""
    per_task = device_count(env.get("SLURM_GPUS_PER_TASK", ""))
    if per_task and len(set(tasks)) == 1:
        return ["--overlap", f"--gpus-per-node={per_task * tasks[0]}"]
    is_total = bool(env.get("SLURM_GPUS")) and not env.get("SLURM_GPUS_PER_NODE")
    # A number for all nodes is refused to a step that may overlap (Slurm 22.05); inside a step it must.
    if nodes == 1 or in_step(env) or not (per_task or is_total):
        return ["--overlap"]
    return [f"--gpus={per_task * sum(tasks)}"] if per_task else []
