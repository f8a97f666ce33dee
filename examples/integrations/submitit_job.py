"""Submits a run with submitit; `cluster="local"` starts it here, `cluster="slurm"` as a job."""

import subprocess
import sys

import submitit


def train(script, processes):
    """Start the script under samestep's launcher, on the machine that the job gets."""
    command = [sys.executable, "-m", "samestep", "run", "-n", str(processes), script]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


executor = submitit.AutoExecutor(folder="submitit", cluster="local")
executor.update_parameters(timeout_min=10)
job = executor.submit(train, sys.argv[1], 2)
print(job.result(), end="")
