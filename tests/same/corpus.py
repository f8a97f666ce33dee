"""Runs a script of the corpus, and says how far what it prints and its weights are from the untouched script's."""

import re
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
        same = all(torch.equal(weight, other.weights[name]) for name, weight in self.weights.items())
        return self.printed == other.printed and self.weights.keys() == other.weights.keys() and same

    def difference(self, other: "Outcome") -> float:
        """The largest relative difference of a printed number, and of a weight beside the largest of its tensor."""
        ours, theirs = (_NUMBER.findall(outcome.printed) for outcome in (self, other))
        words = [_NUMBER.sub("#", outcome.printed) for outcome in (self, other)]
        if words[0] != words[1]:
            return float("inf")
        printed = [
            abs(float(a) - float(b)) / max(abs(float(b)), 1e-9) for a, b in zip(ours, theirs, strict=True)
        ]
        return max(
            [*printed, *(_apart(weight, other.weights[name]) for name, weight in self.weights.items())]
        )


def _apart(tensor: torch.Tensor, other: torch.Tensor) -> float:
    tensor, other = tensor.double(), other.double()
    return float((tensor - other).abs().max() / other.abs().max().clamp_min(1e-9)) if tensor.numel() else 0.0


def run(nest: Nest, script: Path, size: int, home: Path) -> Outcome:
    """The script on `size` ranks, or for size 0 the untouched script."""
    home.mkdir()
    words = [script] if size else [HERE / "serially.py", script]
    ranks = nest.start(*words[:1], size, *words[1:], cwd=home, apart=True)
    codes = nest.wait(ranks)
    assert codes == [0] * len(ranks), "\n".join(f"{rank.code}: {rank.complained[-3000:]}" for rank in ranks)
    weights = torch.load(home / "weights.pt", weights_only=True)
    return Outcome(ranks[0].said, ranks[0].complained, weights)
