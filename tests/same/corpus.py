"""Runs a script of the corpus, and says how far what it prints and its weights are from the untouched script's."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from forked import Nest

HERE = Path(__file__).parent
SCRIPTS = {path.stem: path for path in sorted((HERE / "scripts").glob("*.py"))}
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?|nan|inf")


@dataclass
class Outcome:
    """What a run printed on rank 0 and said to stderr, and the weights it saved."""

    printed: str
    complained: str
    weights: dict[str, torch.Tensor]

    def has_bits_of(self, other: "Outcome") -> bool:
        are_alike = self.printed == other.printed and self.weights.keys() == other.weights.keys()
        return are_alike and all(
            torch.equal(self.weights[name], other.weights[name]) for name in self.weights
        )

    def difference(self, other: "Outcome") -> float:
        """The largest relative difference of a printed number, and of a weight beside the largest of its tensor.

        What is not comparable, or not a number in one of them, is infinitely far apart.
        """
        words = [_NUMBER.sub("#", outcome.printed) for outcome in (self, other)]
        if words[0] != words[1] or self.weights.keys() != other.weights.keys():
            return math.inf
        numbers = (
            torch.tensor([float(number) for number in _NUMBER.findall(outcome.printed)], dtype=torch.float64)
            for outcome in (self, other)
        )
        pairs = [*zip(*numbers, strict=True)]
        pairs += [(self.weights[name], other.weights[name]) for name in self.weights]
        return max(_apart(*pair) for pair in pairs)


def _apart(tensor: torch.Tensor, other: torch.Tensor) -> float:
    if tensor.shape != other.shape:
        return math.inf
    if not tensor.numel():
        return 0.0
    tensor, other = tensor.double(), other.double()
    apart = (tensor - other).abs().max() / other.abs().max().clamp_min(1e-9)
    return float(apart.nan_to_num(math.inf, math.inf))


def run(
    nest: Nest,
    script: Path,
    size: int,
    home: Path,
    by: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Outcome:
    """The script on `size` ranks, or for size 0 the untouched script; with `by`, a script that runs it."""
    home.mkdir()
    words = [*filter(None, [by]), *([] if size else [HERE / "serially.py"]), script]
    ranks = nest.start(words[0], size, *words[1:], cwd=home, apart=True, env=env)
    codes = nest.wait(ranks)
    assert codes == [0] * len(ranks), "\n".join(f"{rank.code}: {rank.complained[-3000:]}" for rank in ranks)
    weights = torch.load(home / "weights.pt", weights_only=True)
    return Outcome(ranks[0].said, ranks[0].complained, weights)
