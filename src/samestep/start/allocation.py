"""For `samestep run` inside a Slurm allocation but outside a job step: the srun command for the whole allocation."""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence

from samestep.placement.launchers import count, in_step
from samestep.placement.nodelist import device_count, expand_nodes, tasks_per_node

# With these set, srun would take fewer cores or devices per node, more tasks than nodes, or another order.
_UNSET = (
    *("SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_EXACT", "SLURM_EXCLUSIVE"),
    *("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU", "SLURM_GPU_BIND"),
    *("SLURM_DISTRIBUTION", "SLURM_HOSTFILE"),
)


def allocation_command(env: Mapping[str, str], args: Sequence[str], is_counted: bool) -> list[str] | None:
    """The command that starts `samestep run args` on each node; None if no job step is needed."""
    # Unless the arguments fix the number of processes per node (`is_counted`), the allocation's tasks or devices do.
    srun, clean = shutil.which("srun"), shutil.which("env")
    if not env.get("SLURM_JOB_NODELIST") or not srun or not clean:
        return None
    names = expand_nodes(env["SLURM_JOB_NODELIST"])
    here = os.uname().nodename.partition(".")[0]
    if len(names) == 1 and (here == names[0].partition(".")[0] or "SLURM_NODEID" in env):
        return None
    # Slurm also counts tasks for whole nodes when the user asked for none
    tasks_requested = count(env, "SLURM_NTASKS") or count(env, "SLURM_NTASKS_PER_NODE")
    tasks = tasks_per_node(counts) if tasks_requested and (counts := env.get("SLURM_TASKS_PER_NODE")) else []
    step = [clean, *(f"-u{name}" for name in _UNSET if name in env)]
    step += [srun, *_devices(env, tasks, len(names)), "--disable-status", "--cpu-bind=none"]
    step += ["--kill-on-bad-exit=0", f"--nodes={len(names)}", f"--ntasks={len(names)}", "--ntasks-per-node=1"]
    # Scripts read this number of cores per process, so set it again after srun, which must not see it.
    cores = count(env, "SLURM_CPUS_PER_TASK")
    step += [clean, f"SLURM_CPUS_PER_TASK={cores}"] if cores else []
    numbers = ["-n", ",".join(map(str, tasks))] if sum(tasks) > len(names) and not is_counted else []
    return [*step, sys.executable, "-m", "samestep", "run", *numbers, *args]


def _devices(env: Mapping[str, str], tasks: Sequence[int], nodes: int) -> list[str]:
    """Options that give the step every device of each node; devices counted per task would be those of one task."""
    per_task = device_count(env.get("SLURM_GPUS_PER_TASK", ""))
    if per_task and len(set(tasks)) == 1:
        return ["--overlap", f"--gpus-per-node={per_task * tasks[0]}"]
    is_total = bool(env.get("SLURM_GPUS")) and not env.get("SLURM_GPUS_PER_NODE")
    # Slurm 22.05 refuses a number for all nodes with --overlap, and inside a step --overlap is needed.
    if nodes == 1 or in_step(env) or not (per_task or is_total):
        return ["--overlap"]
    return [f"--gpus={per_task * sum(tasks)}"] if per_task else []
