"""The format of a recorded run, and its reader: the steps, facts, final state and printed lines of each rank.

A rank's record has a line of JSON for each optimizer step and, after a complete run, a last one of facts: `roots`
(the models), `optimizers` (how many), `serial`, `sampler`, `foreign` (loaders that are not samestep's), `precision`,
`careless` (where a model was evaluated in training mode) and `end` (the digests of the parameters).
"""

import json
from dataclasses import dataclass
from functools import cached_property
from math import fsum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from samestep.text import counted

if TYPE_CHECKING:
    from samestep.measure.trial import Result


class Digest(NamedTuple):
    """What stands for a tensor."""

    norm: float
    along: float  # its projection on a fixed direction
    bits: int  # the sum of its bits


@dataclass(frozen=True)
class Step:
    """One optimizer step of one rank; parameters and buffers as they were before it.

    A part is what one backward pass added: `loss`, `reduction`, `count` and `picked` of the loss, `training`, `drew`,
    `rows` (of the model's input), and with a loader of samestep `samples`, `mine` and `all` (how many of them are in
    this rank's share and in the whole batch), `epoch`, `given` (the loader's rows) and `loop_drew`.
    """

    optimizer: int
    parts: list[dict[str, Any]]
    hyper: list[dict[str, Any]]
    grad: dict[str, Digest]
    param: dict[str, Digest]
    buffer: dict[str, Digest]
    drew_after: bool = False  # whether random numbers were drawn between backward and the step

    def each(self, name: str) -> list[Any]:
        """A list that each part has, of all parts in the rank's share together: samples, rows or given."""
        return [item for part in self.parts if part.get("mine", 1) for item in part.get(name, ())]

    @property
    def samples(self) -> list[int]:
        return self.each("samples")

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
    failure: str | None = None

    @property
    def processes(self) -> str:
        return counted(self.size, "process")

    @property
    def is_untouched(self) -> bool:
        """Whether it is the serial script, whose samples are known by their content alone."""
        return bool(self.fact("serial"))

    @property
    def at(self) -> str:
        return "in the untouched script" if self.is_untouched else f"at {self.processes}"

    @property
    def steps(self) -> list[Step]:
        """Rank 0's."""
        return self.ranks[0]

    @cached_property
    def losses(self) -> list[float]:
        """Each step's mean loss over the whole batch, added so that the order of ranks does not matter."""
        return [fsum(_weighed(part, self.size) for part in self._parts(step)) for step in range(self.length)]

    @property
    def length(self) -> int:
        """The number of steps that all ranks took."""
        return min(map(len, self.ranks))

    @property
    def longest(self) -> int:
        """The largest number of steps that a rank took."""
        return max(map(len, self.ranks))

    def each(self, name: str, step: int) -> list[Any]:
        """A list that the parts of a step have, in the order of ranks: samples, rows or given."""
        return [item for rank in self.ranks for item in rank[step].each(name)]

    def num_samples(self, step: int) -> int:
        """The size of a step's whole batch."""
        return len(self.each("samples" if self.steps[step].is_ours else "rows", step))

    def raw_loss(self, step: int) -> float:
        """The sum of the losses on which all ranks called backward."""
        return fsum(part["loss"] for part in self._parts(step))

    def fact(self, name: str) -> Any:
        return self.facts[0].get(name)

    @property
    def roots(self) -> list[dict[str, Any]]:
        """The models that were trained."""
        return list(self.fact("roots") or ())

    def _parts(self, step: int) -> list[dict[str, Any]]:
        return [part for rank in self.ranks for part in rank[step].parts]


def record_path(directory: Path, rank: int) -> Path:
    """Where a rank's record lies."""
    return directory / f"rank-{rank}.jsonl"


def state_path(directory: Path) -> Path:
    """Where rank 0's models and optimizers at the end of the script lie."""
    return directory / "state.pt"


def read_record(directory: Path, size: int, result: "Result") -> Run:
    """The run that was recorded in this directory, with what its trial returned."""
    ranks, facts = zip(*(_read_rank(record_path(directory, rank)) for rank in range(size)), strict=True)
    printed = [result.printed(rank) for rank in range(size)]
    state = state_path(directory)
    return Run(size, result.code, [*ranks], [*facts], state, printed, result.failure or result.text)


def _read_rank(path: Path) -> tuple[list[Step], dict[str, Any]]:
    steps: list[Step] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found = json.loads(line)
        except ValueError:  # a worker that was killed may leave half a line
            break
        if "facts" in found:
            return steps, found["facts"]
        for kind in ("grad", "param", "buffer"):
            found[kind] = {name: Digest(*numbers) for name, numbers in found[kind].items()}
        steps.append(Step(**found))
    return steps, {}


def _weighed(part: dict[str, Any], size: int) -> float:
    share = part["mine"] / part["all"] if part.get("all") else 1 / size
    return float(part["loss"] * share) if share else 0.0
