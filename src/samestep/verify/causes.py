"""Lists what may have caused a difference, the surest first, each with what to remove from a run to find out.

A sentence says what differs, from the records, and then what to write, from remedies.py.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from samestep.verify.read import Digests, Run, alike, record_path, shares
from samestep.verify.remedies import (
    AGAINST_THE_UNTOUCHED,
    CARELESS,
    COUNT,
    DECIDED,
    MADE_BY_A_RANK,
    NO_SYNC,
    OF_THE_SHARE,
    OF_WORLD,
    OWN_SEED,
    SHOWN,
    SUM,
    UNSTABLE,
)
from samestep.verify.trajectory import Difference, total

_SAME = 1e-4
_APART = 1e-2
_CLOSE = 1e-5
_MOST_LINES = 3
_EXCEPTION = re.compile(r"^(?:\[rank\d+\]: )?(?:\w+\.)*(?!Logs)([A-Z]\w+): (\S.*)", re.MULTILINE)
_NOTE = re.compile(r"^(?:\[rank\d+\]: )?samestep: (.*\breplicate\b.*)", re.MULTILINE)
_WAITED = re.compile(r"RuntimeError: .*\b[Tt]imed out waiting")
_OF_RANKS = {"RanksDiffer", "RankMissing"}


@dataclass(frozen=True)
class Cause:
    """Why runs differ: a suspicion, until they agree with it removed; or a fact that the records show."""

    sentence: str
    removed: str | None = None
    is_harmless: bool = False


def unstable(first: Run) -> list[Cause]:
    """What two runs that should be equal may have different."""
    clock = ", ".join(first.fact("clock")[:_MOST_LINES])
    facts = {"clock": (clock, first.at)}
    return [
        Cause(said.format(*facts.get(removed, (first.at,))), removed) for removed, said in UNSTABLE.items()
    ]


def suspects(first: Run, other: Run, found: Difference) -> Iterator[Cause]:
    """Possible causes of a difference."""
    if foreign := other.fact("foreign"):
        yield Cause(f"{_foreign(foreign)[1]}; {SHOWN['foreign']}", "loaders")
    if any(facts.get("seeded") != first.fact("seeded") for facts in other.facts) and _is_drawn(
        first, other, found
    ):
        yield Cause(OWN_SEED, f"reseeded={record_path(first.directory, 0)}", not first.is_untouched)
    lines: dict[str, list[str]] = {}
    for facts in other.facts:
        lines = facts.get("told", {}) | lines
    of_world = _of_world(first, other, found)
    for line, asked in lines.items():
        yield Cause(f"{of_world} ({line} reads {' and '.join(asked)})", f"world={line}")
    if _is_in_a_step(first, other, found):
        yield from _of_the_gradient(first, other, found.step or 0)
    for removed, sentence, line in (
        ("no_sync", NO_SYNC, other.fact("no_sync")),
        ("statistics", CARELESS, other.fact("careless")),
    ):
        if line:
            yield Cause(sentence.format(line), removed)
    yield Cause(_of_the_share(first, other, found), "shares")
    if found.kind == "hyper":
        yield Cause(str(stated(first, other, found)), f"settings={record_path(first.directory, 0)}")


def _is_drawn(first: Run, other: Run, found: Difference) -> bool:
    """Whether samples, weights and the loaders' rows are the same, and the difference comes after them."""
    is_after = found.kind in ("loss", "grad", "buffer") and _is_in_a_step(first, other, found)
    step = found.step or 0
    return is_after and (
        _changed_in_the_loop(first, other, step) or not _rows_differ(first, other, step, "rows")
    )


def stated(first: Run, other: Run, found: Difference) -> str | None:
    """What the records show without an experiment: a fact that differs, and what to write."""
    kind, said = _shown(first, other, found)
    if kind == "failed":
        error, said = failure_of(other)
        return f"{said}; {MADE_BY_A_RANK}" if error == "FileNotFoundError" else said
    instead = (first.is_untouched and AGAINST_THE_UNTOUCHED.get(kind)) or SHOWN.get(kind)
    if first.is_untouched and not kind and other.size == 1 and found.kind in AGAINST_THE_UNTOUCHED:
        return AGAINST_THE_UNTOUCHED[found.kind]
    return f"{said}; {instead}" if instead else None


def failure_of(run: Run) -> tuple[str, str]:
    """The kind and the words of the exception that ended a run."""
    if _WAITED.search(run.failure):
        return "RankMissing", "a rank waited for another that did not come: it ran other code, or stood still"
    found = _EXCEPTION.findall(run.failure)
    if not found:
        lines = [line for line in run.failure.splitlines() if line.strip() and "Logs: " not in line]
        return "", (lines or ["no message"])[-1]
    kind, said = found[-1]
    note = _NOTE.findall(run.failure)
    return kind, f"{said}; {note[-1]}" if note else said


def says_its_cause(run: Run) -> bool:
    """Whether the error that ended a run is about the script's lines, and not about ranks that came apart."""
    kind, said = failure_of(run)
    return bool(kind) and kind not in _OF_RANKS and ("replicate" in said or "samestep" in said)


def _of_world(first: Run, other: Run, found: Difference) -> str:
    """What depends on the rank or the number of ranks."""
    kind, said = _shown(first, other, found)
    if kind in OF_WORLD:
        return f"{said}; {OF_WORLD[kind]}"
    if not _is_in_a_step(first, other, found):
        return OF_WORLD["numbers"]
    step = found.step or 0
    if _rows_differ(first, other, step, "rows") and not _changed_in_the_loop(first, other, step):
        return OF_WORLD["inputs"]
    return _scaled(first, other, step) or OF_WORLD["numbers"]


def _of_the_share(first: Run, other: Run, found: Difference) -> str:
    """What is computed from a rank's share."""
    kind, said = _shown(first, other, found)
    if kind in ("", "buffer") and _is_in_a_step(first, other, found) and (drawn := other.fact("apart")):
        return f"{drawn}; without that draw verify can tell what else differs"
    if kind in OF_THE_SHARE:
        return f"{said}; {OF_THE_SHARE[kind]}"
    if kind:
        return f"{said}; {DECIDED}"
    if not _is_in_a_step(first, other, found):
        return DECIDED
    step = found.step or 0
    parts = shares(other.parts(step))
    if _rows_differ(first, other, step, "rows"):
        if _changed_in_the_loop(first, other, step):
            return OF_THE_SHARE["loop drew" if any(part.get("loop_drew") for part in parts) else "loop"]
        if first.batch("given", step):
            return OF_THE_SHARE["given"]
    elif _rows_differ(first, other, step, "out"):
        return OF_THE_SHARE["outputs"]
    if step < len(first.losses) and math.isclose(first.losses[step], other.losses[step], rel_tol=_CLOSE):
        return OF_THE_SHARE["gradients"]
    is_picked = bool(parts) and all(part.get("picked") for part in parts)
    return OF_THE_SHARE["picked" if is_picked else "numbers"]


def _at(first: Run, other: Run) -> str:
    return other.at if first.is_untouched else f"at {other.size}"


def _is_in_a_step(first: Run, other: Run, found: Difference) -> bool:
    return (found.step or 0) < min(first.length, other.length)


def _shown(first: Run, other: Run, found: Difference) -> tuple[str, str]:
    """What the records show to differ, where it is no number of the training: its name in the tables, and in words."""
    kind, name = found.kind, found.name
    if kind in ("batch", "samples"):
        return _samples(first, other, found.step or 0)
    if kind == "hyper":
        return _hyper(first, other, found)
    if kind == "apart" and name.startswith("optimizer"):
        return "own", f"{name} belongs to no replicated model, so each rank trains its own"
    words = {
        "failed": failure_of(other)[1],
        "mode": f"rank {found.rank} is in another mode (training or evaluation) than rank 0",
        "steps": f"{first.length} steps {first.at} and {other.length} {_at(first, other)}",
        "uneven": name,
        "no steps": name,
        "apart": f"{name} of rank {found.rank} is not that of rank 0",
        "first weights": f"the first weights are not those {first.at}",
        "buffer": f"forward changes the buffer {name} from each rank's share",
    }
    if (
        kind == "buffer"
        and _is_in_a_step(first, other, found)
        and _rows_differ(first, other, found.step or 0, "rows")
    ):
        return "", ""  # what other inputs do to a buffer is no change of its own
    if kind == "uneven" and not other.length:
        kind = "no steps"
    if kind == "weights" and not found.step:
        kind = "first weights"
    return (kind, words[kind]) if kind in words else ("", "")


def _samples(first: Run, other: Run, step: int) -> tuple[str, str]:
    """Why a step has other samples, or another number of them."""
    if not other.steps[step].is_ours:
        return _foreign(other.fact("foreign"))
    mine, theirs = first.num_samples(step), other.num_samples(step)
    said = f"a step has {mine} samples {first.at} and {theirs} {_at(first, other)}"
    if mine == theirs:
        said = "the order of samples depends on the number of processes"
        if first.is_untouched:
            said = "the samples or their order are not those of the untouched script"
    if first.is_untouched and mine == theirs and any(part.get("streamed") for part in other.parts(step)):
        return "stream", said
    sampler = next((part["sampler"] for part in other.steps[step].parts if part.get("sampler")), None)
    if sampler and not first.is_untouched:
        return (
            "sampler",
            f"{said}: the script's own sampler ({sampler}) chooses samples by the number of ranks",
        )
    if mine != theirs and theirs * first.size == mine * other.size:
        return "multiplied", said
    if mine != theirs and theirs * other.size == mine * first.size:
        return "divided", said
    return "samples", said


def _foreign(loader: dict[str, str] | None) -> tuple[str, str]:
    if not loader:
        return "foreign", "batches do not come from samestep.loader"
    sampler, line = loader["sampler"], loader["line"]
    if sampler:
        return "foreign", f"a {sampler} ({line}) chooses each rank's samples"
    return "foreign", f"the batches come from a plain DataLoader ({line}), so every rank takes all samples"


def _hyper(first: Run, other: Run, found: Difference) -> tuple[str, str]:
    name, step, rank = found.name, found.step or 0, found.rank
    if rank is None:
        kind = "schedule" if step and not first.is_untouched else "rate"
        pair, places = (first.steps[step], other.steps[step]), (first.at, _at(first, other))
    else:
        kind = "rate of a rank"
        pair, places = (other.steps[step], other.ranks[rank][step]), ("on rank 0", f"on rank {rank}")
    groups = [(a[name], b[name]) for a, b in zip(pair[0].hyper, pair[1].hyper, strict=False) if name in a]
    mine, theirs = (
        f"{value:.4g}" if isinstance(value, float) else str(value)
        for value in next((a, b) for a, b in groups if a != b)
    )
    since = f", from step {step + 1} on" if step else ""
    return kind, f"{name} is {mine} {places[0]} and {theirs} {places[1]}{since}"


def _of_the_gradient(first: Run, other: Run, step: int) -> Iterator[Cause]:
    """Causes of another loss or gradient from the same samples and weights."""
    factor = _common_factor(first.steps[step].grad, other.steps[step].grad)
    parts = other.parts(step)
    is_small = factor is not None and math.isclose(factor, first.size / other.size, rel_tol=0.05)
    is_summed = any(part.get("reduction") == "sum" for part in parts)
    if (is_small or is_summed) and not any(part.get("adds") for part in parts):
        yield Cause(SUM, "sum")
    if any(part.get("count") for part in parts):
        mine, theirs = " and ".join(_counts(first, step)[:1]), " and ".join(_counts(other, step)[:2])
        shown = f" ({mine} samples {first.at}, {theirs} at {other.size})" if mine and theirs else ""
        yield Cause(COUNT.format(shown), "counts")
    if factor and abs(factor - 1) > _APART and first.size != other.size:
        sentence = _scaled(first, other, step) or f"gradients are {factor:.3g} times those {first.at}"
        power = math.log(factor) / math.log(other.size / first.size)
        yield Cause(sentence, f"scale={round(power, 1)}")


def _counts(run: Run, step: int) -> list[str]:
    parts = [part for part in run.parts(step) if part.get("count") and part.get("mine")]
    return [f"{part['count']:g} for {part['mine']}" for part in parts]


def _scaled(first: Run, other: Run, step: int) -> str | None:
    """A common factor in loss and gradients, or in the gradients alone."""
    gradients = _common_factor(first.steps[step].grad, other.steps[step].grad)
    if not first.losses[step] or gradients is None or abs(gradients - 1) < _APART:
        return None
    loss = other.losses[step] / first.losses[step]
    if math.isclose(loss, 1, rel_tol=_SAME):
        return (
            f"gradients are {gradients:.3g} times those {first.at} and the loss is the same; samestep "
            "averages gradients over the ranks: do not divide, multiply or all-reduce them"
        )
    if math.isclose(loss, gradients, rel_tol=_APART):
        return (
            f"the loss is {loss:.3g} times that {first.at}: one of its factors depends on the number of "
            "processes (world.size, the length of a share); leave that factor out"
        )
    return None


def _common_factor(first: Digests, other: Digests) -> float | None:
    """The factor between the gradients of two steps, where all tensors have the same one."""
    norm = total(first)
    if not norm or first.keys() != other.keys():
        return None
    factor = total(other) / norm
    apart = [abs(other[name].along - factor * digest.along) for name, digest in first.items()]
    return factor if math.isfinite(factor) and max(apart) <= _SAME * factor * norm else None


def _rows_differ(first: Run, other: Run, step: int, name: str) -> bool:
    """Whether the models' inputs (`rows`) or outputs (`out`) are others, where they have a row for each sample."""
    mine, theirs = (_rows(run, step, name) for run in (first, other))
    return mine is not None and theirs is not None and not alike(mine, theirs)


def _rows(run: Run, step: int, name: str) -> list[float] | None:
    found = [
        (len(part.get("samples", ())), forward.get(name, ()))
        for part in shares(run.parts(step))
        for forward in part["forwards"]
    ]
    has_a_row_for_each = all(len(rows) == samples for samples, rows in found)
    return sorted(row for _, rows in found for row in rows) if has_a_row_for_each else None


def _changed_in_the_loop(first: Run, other: Run, step: int) -> bool:
    """Whether the loaders gave the same, and the loop made other inputs of it."""
    mine = first.batch("given", step)
    return bool(mine) and alike(mine, other.batch("given", step))
