"""A script and its conversion, side by side on two processes: the same accuracies and weights."""

import re
from pathlib import Path

import pytest
import torch
from forked import Nest

SCRIPTS = Path(__file__).parents[2] / "examples" / "migration"
BEFORE = {"data_parallel": 0, "ddp": 2}  # by Python, and by a launcher with torch's variables
Trained = tuple[list[str], dict[str, torch.Tensor]]


def ran(nest: Nest, script: str, size: int, directory: Path) -> Trained:
    """The accuracies that a script printed, and the weights that it saved."""
    env = {"CUDA_VISIBLE_DEVICES": ""}
    ranks = nest.start(SCRIPTS / f"{script}.py", size, env=env, cwd=directory, apart=True)
    assert not any(nest.wait(ranks)), "".join(rank.said + rank.complained for rank in ranks)
    accuracies = re.findall(r"^epoch \d: [\d.]+%$", ranks[0].said, re.MULTILINE)
    assert len(accuracies) == 3
    return accuracies, torch.load(directory / "model.pt", weights_only=True)


@pytest.fixture(scope="module", params=list(BEFORE))
def before(
    nest: Nest, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Trained]:
    """A script that knows nothing of samestep."""
    return request.param, ran(
        nest, request.param, BEFORE[request.param], tmp_path_factory.mktemp(request.param)
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_converted_script_trains_the_same_numbers(
    nest: Nest, tmp_path: Path, before: tuple[str, Trained], size: int
) -> None:
    script, (accuracies, weights) = before
    accuracies_after, weights_after = ran(nest, f"{script}_samestep", size, tmp_path)
    assert accuracies_after == accuracies
    for name, tensor in weights.items():
        torch.testing.assert_close(weights_after[name], tensor, rtol=0, atol=1e-6)
