"""The format of a recorded run, and its reader: the steps, printed lines and facts of each rank.

A rank's record has a line of JSON for each optimizer step, for each printed line, and a last one of facts:
`optimizers` and `backwards` (how many), `serial`, `own` (what each rank draws or computes from its share),
`precision`, `seeded` (the seeds it gave torch), `param` and `buffer` (at the end), and, each with its line,
`left` (a file of an earlier run that it reads or asks for), `said` (samestep's own remarks), `foreign` (a
loader that is not samestep's), `careless` (an evaluation in training mode), `told` (where the script asks for
its rank), `clock` (where it reads the time or its process's number), `no_sync`, `children` (where it starts
processes), and `apart` (a draw that --same does not make the serial script's).
"""

import json
import math
import re
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
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_SAME_ROW = 1e-4
_OF_BATCH = ("turn", "samples", "given")


class Digest(NamedTuple):
    """What stands for a tensor."""

    norm: float
    along: float  # its projection on a fixed direction
    bits: int  # the sum of its bits


Digests = dict[str, Digest]


@dataclass(frozen=True)
class Step:
    """One optimizer step of one rank; parameters and buffers as they were before it.

    A part is what one backward pass added: `loss`, `reduction` and `count` of the loss, `given` (numbers for
    the loader's rows), `turn` (the number of that batch), and `forwards`, each with `training` and numbers
    for the `rows` of its input and its `out`put. With a loader of samestep it has `samples`, `mine` and `all` (how many
    of them are in this rank's share and in the whole batch) and `adds` (whether the gradients of ranks are added).
    """

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
class Line:
    """What a rank printed, wrote or saved: where, and whether inside a loop over batches to train on."""

    verb: str
    text: str
    at: str
    inside: bool


@dataclass(frozen=True)
class Run:
    """What a script did on `size` processes."""

    size: int
    code: int
    ranks: list[list[Step]]
    facts: list[dict[str, Any]]
    directory: Path
    printed: list[
        dict[str, list[Line]]
    ]  # lines that differ only in their numbers, and blanks, are of one kind
    failure: str = ""
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

    @cached_property
    def losses(self) -> list[float]:
        """Each step's mean loss over the whole batch, added so that the order of ranks does not matter."""
        size = len(self.batch_ranks)
        return [fsum(_weighed(part, size) for part in self.parts(step)) for step in range(self.length)]

    @property
    def samples(self) -> int:
        """How many all steps had."""
        return sum(map(self.num_samples, range(self.length)))

    def fact(self, name: str) -> Any:
        """Of rank 0; where a run failed, of the first rank that could still write it."""
        return next((facts[name] for facts in self.facts if name in facts), None)

    def parts(self, step: int) -> list[dict[str, Any]]:
        """All ranks' parts of a step."""
        return [part for rank in self.batch_ranks for part in rank[step].parts]

    def batch(self, name: str, step: int) -> list[float]:
        """A step's samples or given rows of all ranks, sorted: how the ranks share them makes no difference."""
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
    """Those that have samples of the rank's own; where a rank has none, it computes with one that it was lent."""
    return [part for part in parts if part.get("mine", 1)]


def _batches(step: Step) -> list[dict[str, Any]]:
    """A part of each batch, which several losses or calls of a closure may have."""
    return [*{str([part.get(key) for key in _OF_BATCH]): part for part in shares(step.parts)}.values()]


def alike(rows: Sequence[float], others: Sequence[float]) -> bool:
    """Whether two sorted lists of numbers of rows are of the same rows, up to rounding."""
    scale = max((abs(row) for row in rows if math.isfinite(row)), default=0.0)
    return len(rows) == len(others) and all(
        a == b or math.isclose(a, b, rel_tol=_SAME_ROW, abs_tol=_SAME_ROW * scale)
        for a, b in zip(rows, others, strict=True)
    )


def record_path(directory: Path, rank: int) -> Path:
    """Where a rank's record lies."""
    return directory / f"rank-{rank}.jsonl"


def read_record(directory: Path, size: int, result: "Result") -> Run:
    """The run that was recorded in this directory, with what its trial returned."""
    ranks, facts, said = zip(*(_read_rank(record_path(directory, rank)) for rank in range(size)), strict=True)
    report = result.report or result.text
    return Run(size, result.code, [*ranks], [*facts], directory, [*said], report, result.seconds)


def _read_rank(path: Path) -> tuple[list[Step], dict[str, Any], dict[str, list[Line]]]:
    steps: list[Step] = []
    facts: dict[str, Any] = {}
    said: dict[str, list[Line]] = {}
    for found in _lines(path):
        if "facts" in found:
            facts = _digested(found["facts"])
        elif "verb" in found:
            line = Line(**found)
            if NUMBER.search(line.text):
                said.setdefault("".join(NUMBER.sub("#", f"{line.verb} {line.text}").split()), []).append(line)
        else:
            steps.append(Step(**_digested(found) | {"parts": _of_training(found["parts"])}))
    return steps, facts, said


def _of_training(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what backward() did in an evaluation, where the step has another part."""
    trained = [part for part in parts if any(forward["training"] for forward in part["forwards"])]
    return [part for part in parts if part in trained or not part["forwards"]] if trained else parts


def _digested(found: dict[str, Any]) -> dict[str, Any]:
    kinds = found.keys() & {"grad", "param", "buffer"}
    return found | {kind: {name: Digest(*sums) for name, sums in found[kind].items()} for kind in kinds}


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
