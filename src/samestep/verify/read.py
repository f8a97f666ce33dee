"""The format of a recorded run, and its reader: the steps, printed lines and facts of each rank.

A rank's record has a line of JSON for each optimizer step and each printed line, and a last line with facts:
`optimizers` and `backwards` (counts), `serial`, `own` (what each rank draws or computes from its share), `precision`,
`seeded` (the seeds given to torch), `drawn` (draws.py), `param` and `buffer` (at the end). Further facts come with a
line of the script: `left` (a file of an earlier run that is read or tested for), `said` (samestep's remarks),
`foreign` (a loader that is not samestep's), `careless` (an evaluation in training mode; `careless_last` if no batch
came after it), `told` (reads of the rank or size), `clock` (reads of the time or the pid), `no_sync`, `children`
(where it starts processes), `apart` (a draw that --same cannot make equal).
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
from samestep.verify.lines import Line

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
_OF_BATCH = ("turn", "samples", "given", "apart")


class Digest(NamedTuple):
    norm: float
    along: float  # its projection on a fixed direction
    bits: int  # the sum of its bits


Digests = dict[str, Digest]


@dataclass(frozen=True)
class Step:
    """An optimizer step of a rank; parameters and buffers are those before the step."""

    # A part belongs to one backward pass: `loss`, `reduction` and `count` of the loss, `given` (a number for each row
    # of the loader's batch) and `apart` (for each tensor, as each sample may have its own), `turn` (the number of that
    # batch), and `forwards`, each with `training` and a number for each of the `rows` of its input and its `out`put.
    # With a loader of samestep it has `samples`, `mine` and `all` (the number of samples in this rank's share and in
    # the whole batch) and `adds` (whether ranks' gradients are added).

    parts: list[dict[str, Any]]
    hyper: list[dict[str, list[float]]]
    grad: Digests
    param: Digests
    buffer: Digests

    @property
    def training(self) -> bool:
        return all(forward["training"] for part in shares(self.parts) for forward in part["forwards"])

    @property
    def is_ours(self) -> bool:
        """Whether its batches came from samestep.loader or samestep.steps."""
        return bool(self.parts) and all("samples" in part for part in self.parts)


@dataclass(frozen=True)
class Run:
    """A recorded run of a script on `size` processes."""

    size: int
    code: int
    ranks: list[list[Step]]
    facts: list[dict[str, Any]]
    directory: Path
    printed: list[dict[str, list[Line]]]  # by rank and place in the script
    failure: str = ""
    seconds: float = 0.0

    @property
    def processes(self) -> str:
        return counted(self.size, "process")

    @property
    def is_untouched(self) -> bool:
        """Whether it is the serial script, whose samples are only known by their content."""
        return bool(self.fact("serial"))

    @property
    def at(self) -> str:
        return "in the untouched script" if self.is_untouched else f"at {self.processes}"

    @property
    def steps(self) -> list[Step]:
        return self.ranks[0]

    @property
    def batch_ranks(self) -> list[list[Step]]:
        """The ranks that together have each batch once: all ranks, or rank 0 if each rank gets whole batches."""
        return self.ranks[:1] if self.fact("whole_batches") else self.ranks

    @property
    def length(self) -> int:
        """The number of steps that all ranks took."""
        return min(map(len, self.ranks))

    @property
    def longest(self) -> int:
        """The largest number of steps that a rank took."""
        return max(map(len, self.ranks))

    @cached_property
    def losses(self) -> list[float]:
        """Each step's mean loss over the whole batch; the sum does not depend on the order of ranks."""
        size = len(self.batch_ranks)
        return [fsum(_weighed(part, size) for part in self.parts(step)) for step in range(self.length)]

    @property
    def last_loss(self) -> float | None:
        """The loss of the last step with a backward of its own; two optimizers may share a backward."""
        own = [loss for step, loss in enumerate(self.losses) if self.parts(step)]
        return own[-1] if own else None

    @property
    def samples(self) -> int:
        return sum(map(self.num_samples, range(self.length)))

    def fact(self, name: str) -> Any:
        """A fact of rank 0, or, in a failed run, of the first rank that has written it."""
        return next((facts[name] for facts in self.facts if name in facts), None)

    def parts(self, step: int) -> list[dict[str, Any]]:
        return [part for rank in self.batch_ranks for part in rank[step].parts]

    def batch(self, name: str, step: int) -> list[float]:
        """The samples or given rows of a step of all ranks, sorted, so that their distribution does not matter."""
        parts = (part for rank in self.batch_ranks for part in _batches(rank[step]))
        return sorted(item for part in parts for item in part.get(name, ()))

    def num_samples(self, step: int) -> int:
        """The size of a step's whole batch."""
        ranks = []
        for rank in self.batch_ranks:
            known = [len(part.get("samples") or part.get("given") or ()) for part in _batches(rank[step])]
            parts = shares(rank[step].parts)
            rows = [len(forward["rows"]) for part in parts for forward in part["forwards"]]
            ranks.append(sum(known) or max(rows, default=0))
        is_known = self.steps[step].is_ours or self.fact("foreign")
        is_copied = self.size > 1 and len(set(ranks)) == 1 and not is_known
        return ranks[0] if is_copied else sum(ranks)


def shares(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts with samples of this rank; a rank without samples computes with a borrowed sample."""
    return [part for part in parts if part.get("mine", 1)]


def _batches(step: Step) -> list[dict[str, Any]]:
    """One part per batch; a batch has several parts if it has several losses or calls of a closure."""
    return [*{str([part.get(key) for key in _OF_BATCH]): part for part in shares(step.parts)}.values()]


def are_given_alike(first: Run, other: Run, step: int) -> bool:
    """Whether the loaders gave the same batch in this step: in rows of a tensor, or in tensors for each sample."""
    (rows, apart), others = ([run.batch(name, step) for name in ("given", "apart")] for run in (first, other))
    return alike(rows, others[0]) or (bool(apart) and alike(apart, others[1]))


def alike(rows: Sequence[float], others: Sequence[float]) -> bool:
    """Whether two sorted lists of row numbers belong to the same rows, up to rounding."""
    scale = max((abs(row) for row in rows if math.isfinite(row)), default=0.0)
    return len(rows) == len(others) and all(
        a == b or math.isclose(a, b, rel_tol=_SAME_ROW, abs_tol=_SAME_ROW * scale)
        for a, b in zip(rows, others, strict=True)
    )


def record_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.jsonl"


def read_record(directory: Path, size: int, result: "Result") -> Run:
    records = (_read_rank(record_path(directory, rank)) for rank in range(size))
    ranks, facts, printed = zip(*records, strict=True)
    report = result.report or result.text
    return Run(size, result.code, [*ranks], [*facts], directory, [*printed], report, result.seconds)


def _read_rank(path: Path) -> tuple[list[Step], dict[str, Any], dict[str, list[Line]]]:
    steps: list[Step] = []
    facts: dict[str, Any] = {}
    printed: dict[str, list[Line]] = {}
    for row in _lines(path):
        if "facts" in row:
            facts = _digested(row["facts"])
        elif "verb" in row:
            line = Line(**row)
            if line.text.strip():
                printed.setdefault(line.place, []).append(line)
        else:
            steps.append(Step(**_digested(row) | {"parts": _of_training(row["parts"])}))
    return steps, facts, printed


def _of_training(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The parts without those of an evaluation, unless the step has no other part."""
    trained = [part for part in parts if any(forward["training"] for forward in part["forwards"])]
    return [part for part in parts if part in trained or not part["forwards"]] if trained else parts


def _digested(record: dict[str, Any]) -> dict[str, Any]:
    kinds = record.keys() & {"grad", "param", "buffer"}
    return record | {kind: {name: Digest(*sums) for name, sums in record[kind].items()} for kind in kinds}


def _lines(path: Path) -> Iterator[Any]:
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:  # a worker that was killed may leave half a line
            return


def _weighed(part: dict[str, Any], size: int) -> float:
    if part.get("adds"):
        return float(part["loss"])
    share = part["mine"] / part["all"] if part.get("all") else 1 / size
    return float(part["loss"] * share) if share else 0.0
