"""Reads what the workers of one recorded run wrote: its steps, facts, final state and printed lines."""

import json
from dataclasses import dataclass
from functools import cached_property
from math import fsum
from pathlib import Path
from typing import Any

from samestep.rundir import log_path

Digest = tuple[float, float, int]  # norm, projection, sum of bits


@dataclass(frozen=True)
class Step:
    """One optimizer step of one rank; tensors stand as digests, parameters as they were before it."""

    optimizer: int
    parts: list[dict[str, Any]]
    hyper: list[dict[str, Any]]
    grad: dict[str, Digest]
    param: dict[str, Digest]
    buffer: dict[str, Digest]
    drew_after: bool = False  # random numbers, between backward and the step

    @property
    def samples(self) -> list[int]:
        return [one for part in self.parts for one in part.get("samples", ())]

    @property
    def rows(self) -> list[str]:
        return [one for part in self.parts for one in part.get("rows", ())]

    @property
    def given(self) -> list[str]:
        """The rows as samestep.loader gave them, before the loop did anything to them."""
        return [one for part in self.parts for one in part.get("given", ())]

    @property
    def training(self) -> bool:
        return all(part.get("training", True) for part in self.parts)

    @property
    def drew(self) -> bool:
        return any(part.get("drew") for part in self.parts)

    @property
    def is_ours(self) -> bool:
        """Whether its batches came from samestep.loader or samestep.steps."""
        return all("samples" in part for part in self.parts)


@dataclass(frozen=True)
class Run:
    """What a script did on `size` processes."""

    size: int
    code: int
    ranks: list[list[Step]]
    facts: list[dict[str, Any]]
    state: Path
    printed: list[list[str]]

    @property
    def steps(self) -> list[Step]:
        return self.ranks[0]

    @cached_property
    def losses(self) -> list[float]:
        """Each step's mean loss over the whole batch, added so that no order of ranks shows."""
        return [fsum(_weighed(one, self.size) for one in self._at(step)) for step in range(self.length)]

    @property
    def length(self) -> int:
        """The steps that all ranks took."""
        return min(map(len, self.ranks))

    @property
    def longest(self) -> int:
        """The steps that any rank took."""
        return max(map(len, self.ranks))

    def samples(self, step: int) -> list[int]:
        """The samples of a step in their order: ranks, or microbatches, follow each other."""
        return [one for rank in self.ranks for one in rank[step].samples]

    def whole(self, step: int) -> int:
        """How many samples a step is made of, counted over all ranks."""
        if self.steps[step].is_ours:
            return len(self.samples(step))
        return sum(len(rank[step].rows) for rank in self.ranks)

    def raw_loss(self, step: int) -> float:
        """The sum of what all ranks called backward on."""
        return fsum(part["loss"] for part in self._at(step))

    def fact(self, name: str) -> Any:
        return self.facts[0].get(name)

    @property
    def roots(self) -> list[dict[str, Any]]:
        """The models that were trained."""
        return list(self.fact("roots") or ())

    def _at(self, step: int) -> list[dict[str, Any]]:
        return [part for rank in self.ranks for part in rank[step].parts]


def _weighed(part: dict[str, Any], size: int) -> float:
    share = part["mine"] / part["all"] if part.get("all") else 1 / size
    return float(part["loss"] * share) if share else 0.0


def read_run(record: Path, run: Path, size: int, code: int) -> Run:
    """The run that was recorded in one directory and whose logs lie in the other."""
    ranks: list[list[Step]] = []
    facts: list[dict[str, Any]] = []
    for rank in range(size):
        steps: list[Step] = []
        ended: dict[str, Any] = {}
        path = record / f"rank-{rank}.jsonl"
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                found = json.loads(line)
            except ValueError:  # a worker that was killed may leave half a line
                break
            if "facts" in found:
                ended = found["facts"]
            else:
                steps.append(Step(**found))
        ranks.append(steps)
        facts.append(ended)
    printed = [
        log_path(run, rank).read_text(encoding="utf-8", errors="replace").splitlines() for rank in range(size)
    ]
    return Run(size, code, ranks, facts, record / "state.pt", printed)
