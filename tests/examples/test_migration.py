"""A script and its conversion, side by side on two processes: the same accuracies and weights."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import Nest

SCRIPTS = Path(__file__).parents[2] / "examples" / "migration"
BEFORE = {
    "data_parallel": [sys.executable],
    "ddp": [str(Path(sys.executable).with_name("samestep")), "run", "-n", "2"],
}
Trained = tuple[list[str], dict[str, torch.Tensor]]


def trained(printed: str, directory: Path) -> Trained:
    """The accuracies that a script printed, and the weights that it saved."""
    accuracies = re.findall(r"^epoch \d: [\d.]+%$", printed, re.MULTILINE)
    assert len(accuracies) == 3
    return accuracies, torch.load(directory / "model.pt", weights_only=True)


@pytest.fixture(scope="module", params=list(BEFORE))
def before(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Trained]:
    """A script that knows nothing of samestep, as its user starts it; one for torchrun under `samestep run`."""
    directory = tmp_path_factory.mktemp(request.param)
    command = [*BEFORE[request.param], str(SCRIPTS / f"{request.param}.py")]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stderr
    return request.param, trained(done.stdout, directory)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_converted_script_trains_the_same_numbers(
    nest: Nest, tmp_path: Path, before: tuple[str, Trained], size: int
) -> None:
    script, (accuracies, weights) = before
    env = {"CUDA_VISIBLE_DEVICES": ""}
    ranks = nest.start(SCRIPTS / f"{script}_samestep.py", size, env=env, cwd=tmp_path, apart=True)
    assert nest.wait(ranks) == [0] * size, "".join(rank.said + rank.complained for rank in ranks)
    accuracies_after, weights_after = trained(ranks[0].said, tmp_path)
    assert accuracies_after == accuracies
    for name, tensor in weights.items():
        torch.testing.assert_close(weights_after[name], tensor, rtol=0, atol=1e-6)
