"""The format of a recorded run, and its reader: the steps, facts, final state and printed lines of each rank.

A rank's record has a line of JSON for each optimizer step, for each printed line and, after a complete run, a last one
of facts: `roots` (the models), `optimizers`, `backwards` (how many), `serial`, `foreign` (loaders that are not
samestep's), `precision`, `careless` (where a model was evaluated in training mode), `told` (where the script asks for
its rank), `no_sync`, `children` (where it starts processes) and `end` (the digests of the parameters).
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from samestep.text import counted

if TYPE_CHECKING:
    from samestep.measure.trial import Result

EPSILON = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "tf32": 2.0**-10,
}
_SAME_ROW = 1e-4


class Digest(NamedTuple):
    """What stands for a tensor."""

    norm: float
    along: float  # its projection on a fixed direction
    bits: int  # the sum of its bits


@dataclass(frozen=True)
class Step:
    """One optimizer step of one rank; parameters and buffers as they were before it.

    A part is what one backward pass added: `loss`, `reduction`, `count` and `picked` of the loss, and `forwards`, each
    with `training`, `drew` and numbers for the `rows` of its input and its `out`put. With a loader of samestep it has
    `samples`, `mine` and `all` (how many of them are in this rank's share and in the whole batch), `epoch`, `given`
    (numbers for the loader's rows), `loop_drew` and `adds` (whether the gradients of ranks are added).
    """

    optimizer: int
    parts: list[dict[str, Any]]
    hyper: list[dict[str, Any]]
    grad: dict[str, Digest]
    param: dict[str, Digest]
    buffer: dict[str, Digest]
    drew_after: bool = False  # whether random numbers were drawn between backward and the step

    def each(self, name: str) -> list[Any]:
        """A list that each part has, of all parts in the rank's share together: samples or given."""
        return [item for part in self.parts if part.get("mine", 1) for item in part.get(name, ())]

    def forwards(self, name: str) -> list[Any]:
        """What the forward passes of the rank's share have by that name."""
        return [
            forward.get(name) for part in self.parts if part.get("mine", 1) for forward in part["forwards"]
        ]

    @property
    def samples_key(self) -> tuple[list[Any], list[Any]]:
        """What two equal runs have alike: the samples, and the rows of the inputs."""
        return self.each("samples"), self.forwards("rows")

    @property
    def training(self) -> bool:
        return all(self.forwards("training"))

    @property
    def is_ours(self) -> bool:
        """Whether its batches came from samestep.loader or samestep.steps."""
        return bool(self.parts) and all("samples" in part for part in self.parts)


@dataclass(frozen=True)
class Line:
    """What a rank printed or saved: where, and whether inside a loop over batches to train on."""

    text: str
    at: str
    step: int
    inside: bool


@dataclass(frozen=True)
class Run:
    """What a script did on `size` processes."""

    size: int
    code: int
    ranks: list[list[Step]]
    facts: list[dict[str, Any]]
    state: Path
    printed: list[list[Line]]
    failure: str | None = None
    seconds: float = 0.0

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
        size = len(self.batch_ranks)
        return [fsum(_weighed(part, size) for part in self.parts(step)) for step in range(self.length)]

    @property
    def batch_ranks(self) -> list[list[Step]]:
        """The ranks that together have each batch once: all, or rank 0 where each was given all of it."""
        return self.ranks[:1] if self.fact("whole_batches") else self.ranks

    @property
    def length(self) -> int:
        """The number of steps that all ranks took."""
        return min(map(len, self.ranks))

    @property
    def longest(self) -> int:
        """The largest number of steps that a rank took."""
        return max(map(len, self.ranks))

    def each(self, name: str, step: int) -> list[list[Any]]:
        """The ways in which a step's samples or given rows may be those of the whole batch.

        Ranks have microbatches one after the other, or a share of each; without a loader each rank may have all.
        """
        ranks = [
            [part.get(name, []) for part in rank[step].parts if part.get("mine", 1)]
            for rank in self.batch_ranks
        ]
        one_after_the_other = [item for rank in ranks for part in rank for item in part]
        most = max(map(len, ranks))
        shares = [item for at in range(most) for rank in ranks if at < len(rank) for item in rank[at]]
        return [one_after_the_other, shares]

    def num_samples(self, step: int) -> int:
        """The size of a step's whole batch; several backward passes on the same samples count once."""
        ranks = []
        for rank in self.batch_ranks:
            parts = rank[step].parts
            if rank[step].is_ours:
                ranks.append(sum(map(len, {tuple(_mine(part)) for part in parts})))
            elif given := {tuple(part["given"]) for part in parts if part.get("given")}:
                ranks.append(sum(map(len, given)))
            else:
                ranks.append(max(map(len, rank[step].forwards("rows")), default=0))
        is_copied = (
            self.size > 1 and len(set(ranks)) == 1 and not (self.fact("foreign") or self.steps[step].is_ours)
        )
        return ranks[0] if is_copied else sum(ranks)

    def raw_loss(self, step: int) -> float:
        """The sum of the losses on which all ranks called backward."""
        return fsum(part["loss"] for part in self.parts(step))

    def fact(self, name: str) -> Any:
        """Of rank 0; where a run failed, of the first rank that could still write it."""
        return next((facts[name] for facts in self.facts if name in facts), None)

    @property
    def roots(self) -> list[dict[str, Any]]:
        """The models that were trained."""
        return list(self.fact("roots") or ())

    def parts(self, step: int) -> list[dict[str, Any]]:
        """All ranks' parts of a step."""
        return [part for rank in self.batch_ranks for part in rank[step].parts]


def alike(rows: Sequence[float], others: Sequence[float]) -> bool:
    """Whether two lists of numbers of rows are of the same rows, up to rounding."""
    scale = max((abs(row) for row in rows if math.isfinite(row)), default=0.0)
    return len(rows) == len(others) and all(
        a == b or math.isclose(a, b, rel_tol=_SAME_ROW, abs_tol=_SAME_ROW * scale)
        for a, b in zip(rows, others, strict=True)
    )


def record_path(directory: Path, rank: int) -> Path:
    """Where a rank's record lies."""
    return directory / f"rank-{rank}.jsonl"


def state_path(directory: Path) -> Path:
    """Where rank 0's models and optimizers at the end of the script lie."""
    return directory / "state.pt"


def read_record(directory: Path, size: int, result: "Result") -> Run:
    """The run that was recorded in this directory, with what its trial returned."""
    ranks, facts, said = zip(*(_read_rank(record_path(directory, rank)) for rank in range(size)), strict=True)
    state = state_path(directory)
    failure = result.failure or result.text
    return Run(size, result.code, [*ranks], [*facts], state, [*said], failure, result.seconds)


def _read_rank(path: Path) -> tuple[list[Step], dict[str, Any], list[Line]]:
    steps: list[Step] = []
    facts: dict[str, Any] = {}
    said: list[Line] = []
    for found in _lines(path):
        if "facts" in found:
            facts = found["facts"]
        elif "said" in found:
            said.append(Line(found["said"], found["at"], found["step"], found["inside"]))
        else:
            for kind in ("grad", "param", "buffer"):
                found[kind] = {name: Digest(*numbers) for name, numbers in found[kind].items()}
            steps.append(Step(**found))
    return steps, facts, said


def _lines(path: Path) -> Iterator[Any]:
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:  # a worker that was killed may leave half a line
            return


def _mine(part: dict[str, Any]) -> list[int]:
    return part["samples"] if part.get("mine", 1) else []


def _weighed(part: dict[str, Any], size: int) -> float:
    if part.get("adds"):
        return float(part["loss"])
    share = part["mine"] / part["all"] if part.get("all") else 1 / size
    return float(part["loss"] * share) if share else 0.0
