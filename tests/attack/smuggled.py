"""Runs a batch script without Slurm, and sees whether a string that stands in it was run as code."""

import os
import subprocess
from pathlib import Path

# These options of `samestep submit` have a form of their own, and refuse every payload.
OF_A_FORM = ("time", "signal", "array")
_SHELL = ["bash", "-c", "srun() { >reached; }; module() { :; }; scontrol() { :; }; source /dev/stdin"]


def runs_as_code(script: bytes) -> bool:
    """Whether the script makes the file `canary` here, as a payload would; it has to come as far as srun."""
    subprocess.run(_SHELL, input=script, capture_output=True, env={"PATH": os.environ["PATH"]})
    Path("reached").unlink()
    return Path("canary").exists()
