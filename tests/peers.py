"""Scripts of Accelerate, Fabric, Lightning and idr_torch beside their conversions (`make integrations`)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[1] / "examples" / "migration"
BIN = Path(sys.executable).parent
PAIRS = {
    "accelerated.py": "accelerated_samestep.py",
    "fabric.py": "fabric_samestep.py",
    "lit.py": "lit_samestep.py",
    "idr.py": "ddp_samestep.py",
}


def trained(directory: Path, script: str, *start: object) -> tuple[list[str], dict[str, torch.Tensor]]:
    directory.mkdir()
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }
    command = [str(part) for part in (*start, SCRIPTS / script)]
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=55)
    # torch ends some processes of Accelerate by SIGABRT after the script's last line; what they made is complete.
    assert (directory / "model.pt").exists(), done.stderr
    accuracies = re.findall(r"^epoch \d: [\d.]+%$", done.stdout, re.MULTILINE)
    return accuracies, torch.load(directory / "model.pt", weights_only=True)


@pytest.mark.parametrize("before", PAIRS)
def test_a_script_converted_from_a_peer_trains_the_same_numbers(tmp_path: Path, before: str) -> None:
    said, weights = trained(tmp_path / "before", before, BIN / "torchrun", "--nproc-per-node", 2)
    after = PAIRS[before]
    said_after, weights_after = trained(tmp_path / "after", after, BIN / "samestep", "run", "-n", 2)
    assert len(said) == 3
    assert said_after == said
    for name, tensor in weights.items():
        torch.testing.assert_close(weights_after[name], tensor, rtol=0, atol=1e-6)
