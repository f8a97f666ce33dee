"""Lists what may have caused a difference, the surest first, each with what to remove from a run to find out.

A sentence says what differs, from the records, and then what to write, from remedies.py.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from samestep.verify import remedies
from samestep.verify.read import Run, alike, record_path, shares
from samestep.verify.remedies import OF_THE_SHARE, OF_WORLD, SHOWN
from samestep.verify.trajectory import Compared, total

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


def unstable(run: Run) -> list[Cause]:
    """What two runs that should be equal may have different."""
    lines = ", ".join((run.fact("clock") or [])[:_MOST_LINES])
    found = [(removed, said) for removed, said in remedies.UNSTABLE.items() if removed != "clock" or lines]
    return [Cause(said.format(at=run.at, lines=lines), removed) for removed, said in found]


def suspects(found: Compared) -> Iterator[Cause]:
    """Possible causes of a difference."""
    first, other = found.first, found.run
    if first.is_untouched:
        yield Cause(remedies.AUGMENTED, "augment", is_harmless=True)
    if foreign := other.fact("foreign"):
        yield Cause(f"the batches come from {foreign}; {SHOWN['foreign']}", "loaders")
    if any(facts.get("seeded") != first.fact("seeded") for facts in other.facts) and _is_drawn(found):
        removed = f"reseeded={record_path(first.directory, 0)}"
        yield Cause(remedies.OWN_SEED, removed, not first.is_untouched)
    lines: dict[str, list[str]] = {}
    for facts in other.facts:
        lines = facts.get("told", {}) | lines
    of_world = _of_world(found)
    for line, asked in lines.items():
        yield Cause(f"{of_world} ({line} reads {' and '.join(asked)})", f"world={line}")
    if found.is_in_a_step:
        yield from _of_the_gradient(found)
    if line := other.fact("no_sync"):
        yield Cause(remedies.NO_SYNC.format(line), "no_sync")
    yield Cause(_of_the_share(found), "shares")


def stated(found: Compared) -> str | None:
    """What the records show without an experiment: a fact that differs, and what to write."""
    kind, said = _shown(found)
    if kind == "failed":
        error, said = failure_of(found.run)
        return f"{said}; {remedies.MADE_BY_A_RANK}" if error == "FileNotFoundError" else said
    against = remedies.AGAINST_THE_UNTOUCHED if found.first.is_untouched else {}
    if not kind and found.run.size == 1 and found.kind in against:
        return against[found.kind]
    instead = against.get(kind) or SHOWN.get(kind)
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


def _is_drawn(found: Compared) -> bool:
    """Whether samples, weights and the loaders' rows are the same, and the difference comes after them."""
    is_after = found.kind in ("loss", "grad", "buffer") and found.is_in_a_step
    return is_after and (_is_of_the_loop(found) or not _rows_differ(found, "rows"))


def _of_world(found: Compared) -> str:
    """What depends on the rank or the number of ranks."""
    kind, said = _shown(found)
    if kind in OF_WORLD:
        return f"{said}; {OF_WORLD[kind]}"
    if not found.is_in_a_step:
        return OF_WORLD["numbers"]
    if _rows_differ(found, "rows") and not _is_of_the_loop(found):
        return OF_WORLD["inputs"]
    return _scaled(found) or OF_WORLD["numbers"]


def _of_the_share(found: Compared) -> str:
    """What is computed from a rank's share."""
    kind, said = _shown(found)
    if kind in ("", "buffer") and found.is_in_a_step and (drawn := found.run.fact("apart")):
        return f"{drawn}; without that draw verify can tell what else differs"
    if kind:
        return f"{said}; {OF_THE_SHARE.get(kind, remedies.DECIDED)}"
    return OF_THE_SHARE[_numbers_of_the_share(found)] if found.is_in_a_step else remedies.DECIDED


def _numbers_of_the_share(found: Compared) -> str:
    """Which numbers of a step are made of a rank's share, by their name in the table of remedies."""
    first, other, step = found.first, found.run, found.step
    if _rows_differ(found, "rows"):
        if _is_of_the_loop(found):
            return "loop"
        if first.batch("given", step):
            return "given"
    elif _rows_differ(found, "out"):
        return "outputs"
    if math.isclose(first.losses[step], other.losses[step], rel_tol=_CLOSE):
        return "gradients"
    return "numbers"


def _shown(found: Compared) -> tuple[str, str]:
    """What the records show to differ, where it is no number of the training: its name in the tables, and in words."""
    first, other, difference = found.first, found.run, found.difference
    assert difference is not None
    name, rank = difference.name, difference.rank
    match difference.kind:
        case "batch" | "samples":
            return _samples(found)
        case "hyper":
            return _hyper(found)
        case "uneven":
            return ("uneven" if other.length else "no steps"), name
        case "apart" if name.startswith("optimizer"):
            return "own", f"{name} belongs to no replicated model, so each rank trains its own"
        case "weights" if not found.step:
            return "first weights", f"the first weights are not those {first.at}"
        # what other inputs do to a buffer is no change of its own
        case "buffer" if found.is_in_a_step and _rows_differ(found, "rows"):
            return "", ""
    words = {
        "failed": failure_of(other)[1],
        "mode": f"rank {rank} is in another mode (training or evaluation) than rank 0",
        "steps": f"{first.length} steps {first.at} and {other.length} {_at(found)}",
        "apart": f"{name} of rank {rank} is not that of rank 0",
        "buffer": f"forward changes the buffer {name} from each rank's share",
    }
    return (found.kind, words[found.kind]) if found.kind in words else ("", "")


def _at(found: Compared) -> str:
    return found.run.at if found.first.is_untouched else f"at {found.run.size}"


def _samples(found: Compared) -> tuple[str, str]:
    """Why a step has other samples, or another number of them."""
    first, other, step = found.first, found.run, found.step
    if not other.steps[step].is_ours:
        return "foreign", f"the batches come from {other.fact('foreign') or 'elsewhere'}"
    mine, theirs = first.num_samples(step), other.num_samples(step)
    said = f"a step has {mine} samples {first.at} and {theirs} {_at(found)}"
    if first.is_untouched and mine == theirs:
        return "samples", "the samples or their order are not those of the untouched script"
    if mine == theirs:
        said = "the order of samples depends on the number of processes"
    return "samples", said


def _hyper(found: Compared) -> tuple[str, str]:
    first, other, step = found.first, found.run, found.step
    assert found.difference is not None
    name, rank = found.difference.name, found.difference.rank
    if rank is None:
        kind = "schedule" if step and not first.is_untouched else "rate"
        pair, places = (first.steps[step], other.steps[step]), (first.at, _at(found))
    else:
        kind = "rate of a rank"
        pair, places = (other.steps[step], other.ranks[rank][step]), ("on rank 0", f"on rank {rank}")
    groups = [(a[name], b[name]) for a, b in zip(pair[0].hyper, pair[1].hyper, strict=False) if name in a]
    unlike = next((a, b) for a, b in groups if a != b)
    mine, theirs = (", ".join(f"{number:.4g}" for number in numbers) for numbers in unlike)
    since = f", from step {step + 1} on" if step else ""
    return kind, f"{name} is {mine} {places[0]} and {theirs} {places[1]}{since}"


def _of_the_gradient(found: Compared) -> Iterator[Cause]:
    """Causes of another loss or gradient from the same samples and weights."""
    first, other, factor = found.first, found.run, _common_factor(found)
    parts = other.parts(found.step)
    is_small = factor is not None and math.isclose(factor, first.size / other.size, rel_tol=0.05)
    is_summed = any(part.get("reduction") == "sum" for part in parts)
    if (is_small or is_summed) and not any(part.get("adds") for part in parts):
        yield Cause(remedies.SUM, "sum")
    if lines := [part["line"] for part in parts if part.get("count")]:
        yield Cause(remedies.COUNT.format(lines[0]), "counts")
    if factor and abs(factor - 1) > _APART and first.size != other.size:
        sentence = _scaled(found) or f"gradients are {factor:.3g} times those {first.at}"
        power = math.log(factor) / math.log(other.size / first.size)
        yield Cause(sentence, f"scale={round(power, 1)}")


def _scaled(found: Compared) -> str | None:
    """A common factor in loss and gradients, or in the gradients alone."""
    mine, theirs = (run.losses[found.step] for run in (found.first, found.run))
    gradients = _common_factor(found)
    if not mine or gradients is None or abs(gradients - 1) < _APART:
        return None
    if math.isclose(theirs / mine, 1, rel_tol=_SAME):
        return remedies.GRADIENTS_SCALED.format(gradients, found.first.at)
    if math.isclose(theirs / mine, gradients, rel_tol=_APART):
        return remedies.LOSS_SCALED.format(theirs / mine, found.first.at)
    return None


def _common_factor(found: Compared) -> float | None:
    """The factor between the gradients of two steps, where all tensors have the same one."""
    first, other = found.first.steps[found.step].grad, found.run.steps[found.step].grad
    norm = total(first)
    if not norm or first.keys() != other.keys():
        return None
    factor = total(other) / norm
    apart = [abs(other[name].along - factor * digest.along) for name, digest in first.items()]
    return factor if math.isfinite(factor) and max(apart) <= _SAME * factor * norm else None


def _rows_differ(found: Compared, name: str) -> bool:
    """Whether the models' inputs (`rows`) or outputs (`out`) are others, where they have a row for each sample."""
    mine, theirs = (_rows(run, found.step, name) for run in (found.first, found.run))
    return mine is not None and theirs is not None and not alike(mine, theirs)


def _rows(run: Run, step: int, name: str) -> list[float] | None:
    found = [
        (len(part.get("samples", ())), forward.get(name, ()))
        for part in shares(run.parts(step))
        for forward in part["forwards"]
    ]
    has_a_row_for_each = all(len(rows) == samples for samples, rows in found)
    return sorted(row for _, rows in found for row in rows) if has_a_row_for_each else None


def _is_of_the_loop(found: Compared) -> bool:
    """Whether the loaders gave the same, and the loop made other inputs of it."""
    mine = found.first.batch("given", found.step)
    return bool(mine) and alike(mine, found.run.batch("given", found.step))
