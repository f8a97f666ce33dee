"""Lists possible causes of a difference, the most certain first, each with what to remove from a run to test it.

A sentence says what differs, from the records, and then what to write instead, from remedies.py.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest

from samestep.verify import remedies
from samestep.verify.read import Run, alike, are_given_alike, record_path, shares
from samestep.verify.remedies import OF_THE_SHARE, OF_WORLD, SHOWN
from samestep.verify.trajectory import Compared, total

_SAME = 1e-4  # equal factors
_APART = 1e-2  # factors that differ
_CLOSE = 1e-5  # equal losses
_MOST_LINES = 3
_MOST_DRAWS = 100
_BEFORE = r"^(?:\[rank\d+\]: |samestep: rank \d+ of \d+ ended in .*?: )?"
_EXCEPTION = re.compile(rf"{_BEFORE}(?:\w+\.)*(?!Logs)([A-Z]\w+): (\S.*)", re.MULTILINE)
_NOTE = re.compile(r"^(?:\[rank\d+\]: )?samestep: (.+)", re.MULTILINE)
_WAITED = re.compile(r"RuntimeError: .*\b[Tt]imed out waiting")
_UNLIKE_SIZES = "Received data size doesn't match expected size"  # Gloo ends the process
_OF_RANKS = {"RanksDiffer", "RankMissing"}


@dataclass(frozen=True)
class Cause:
    """A cause of a difference: suspected until runs without it agree, or, without `removed`, a fact in the records."""

    sentence: str
    removed: str | None = None
    is_harmless: bool = False


def unstable(run: Run) -> list[Cause]:
    """Possible causes of a difference between two runs of the same size."""
    lines = ", ".join((run.fact("clock") or [])[:_MOST_LINES])
    return [
        Cause(sentence.format(at=run.at, lines=lines), removed)
        for removed, sentence in remedies.UNSTABLE.items()
        if removed != "clock" or lines
    ]


def suspects(compared: Compared) -> Iterator[Cause]:
    """Possible causes of a difference between two sizes, the most certain first."""
    first, other = compared.first, compared.run
    # a failure that is gone in another run is not gone because of what samples draw
    if first.is_untouched and compared.kind != "failed":
        yield Cause(remedies.AUGMENTED, "augment", is_harmless=True)
        yield from _of_other_draws(first, other)
    if foreign := other.fact("foreign"):
        yield Cause(f"the batches come from {foreign}; {SHOWN['foreign']}", "loaders")
    if any(facts.get("seeded") != first.fact("seeded") for facts in other.facts) and _is_drawn(compared):
        removed = f"reseeded={record_path(first.directory, 0)}"
        is_own = _has_own_data(compared)
        sentence = remedies.OWN_DATA if is_own else remedies.OWN_SEED
        yield Cause(sentence, removed, not (is_own or first.is_untouched))
    lines: dict[str, list[str]] = {}
    for facts in other.facts:
        lines = facts.get("told", {}) | lines
    of_world = _of_world(compared)
    for line, reads in lines.items():
        yield Cause(f"{of_world} ({line} reads {' and '.join(reads)})", f"world={line}")
    if compared.is_in_a_step:
        yield from _of_the_gradient(compared)
    if line := other.fact("no_sync"):
        yield Cause(remedies.NO_SYNC.format(line), "no_sync")
    yield Cause(_of_the_share(compared), "shares")


def _of_other_draws(first: Run, other: Run) -> Iterator[Cause]:
    """The first draw from a global generator, at one process, that only the untouched script or only this one makes."""
    mine, theirs = (run.fact("drawn") or [] for run in (first, other))
    pairs = enumerate(zip_longest(mine, theirs, fillvalue=["", "", 0]))
    at = next((at for at, (a, b) in pairs if a[1:] != b[1:]), None)
    if at is None or other.size > 1:
        return
    kinds = [[(name, count) for _, name, count in draws[at : at + _MOST_DRAWS]] for draws in (mine, theirs)]
    way, i, _, j, _ = SequenceMatcher(a=kinds[0], b=kinds[1], autojunk=False).get_opcodes()[0]
    only = [("the untouched script", mine[at + i])] if way != "insert" else []
    only += [("this script", theirs[at + j])] if way != "delete" else []
    draws = " and ".join(f"only {who} draws by {name} ({line})" for who, (line, name, _) in only)
    yield Cause(remedies.DRAWN.format(draws), f"undrawn={','.join(line for _, (line, *_) in only)}")


def stated(compared: Compared) -> str | None:
    """A fact in the records that differs, with what to write instead; it needs no experiment."""
    kind, sentence = _shown(compared)
    if kind == "failed":
        error, sentence = failure_of(compared.run)
        return f"{sentence}; {remedies.MADE_BY_A_RANK}" if error == "FileNotFoundError" else sentence
    against = remedies.AGAINST_THE_UNTOUCHED if compared.first.is_untouched else {}
    if not kind and compared.run.size == 1 and compared.kind in against:
        return against[compared.kind]
    instead = against.get(kind) or SHOWN.get(kind)
    return f"{sentence}; {instead}" if instead else None


def failure_of(run: Run) -> tuple[str, str]:
    """The type and the message of the exception that ended a run."""
    if _WAITED.search(run.failure):
        return "RankMissing", "a rank waited for another that did not come: it ran other code, or stood still"
    if _UNLIKE_SIZES in run.failure:
        return (
            "",
            "ranks exchanged tensors of unlike sizes, as those of different models, since they ran other code",
        )
    exceptions = _EXCEPTION.findall(run.failure)
    if not exceptions:
        lines = [line for line in run.failure.splitlines() if line.strip() and "Logs: " not in line]
        return "", (lines or ["no message"])[-1]
    kind, message = exceptions[-1]
    note = _NOTE.findall(run.failure)
    return kind, f"{message}; {note[-1]}" if note else message


def came_apart(run: Run) -> bool:
    """Whether a run ended because its ranks were at different calls."""
    return failure_of(run)[0] in _OF_RANKS


def says_its_cause(run: Run) -> bool:
    """Whether the error that ended a run is about lines of the script, not about ranks that differ."""
    kind, message = failure_of(run)
    is_said = "replicate" in message or "samestep" in message or bool(_NOTE.search(run.failure))
    return bool(kind) and not came_apart(run) and is_said


def _is_drawn(compared: Compared) -> bool:
    """Whether random draws may cause the difference: it begins after equal samples, weights and rows."""
    is_after = compared.kind in ("loss", "grad", "buffer") and compared.is_in_a_step
    return is_after and (_is_of_the_loop(compared) or not _rows_differ(compared, "rows"))


def _has_own_data(compared: Compared) -> bool:
    """Whether the ranks train on other inputs that are no shares of a batch."""
    steps = [rank[compared.step].parts for rank in compared.run.ranks]
    rows = [[forward["rows"] for part in parts for forward in part["forwards"]] for parts in steps]
    return rows != rows[:1] * len(rows) and not any("samples" in part for parts in steps for part in parts)


def _of_world(compared: Compared) -> str:
    """The sentence if the rank or the number of ranks causes the difference."""
    kind, difference = _shown(compared)
    if kind in OF_WORLD:
        return f"{difference}; {OF_WORLD[kind]}"
    if not compared.is_in_a_step:
        return OF_WORLD["numbers"]
    if _rows_differ(compared, "rows") and not _is_of_the_loop(compared):
        return OF_WORLD["inputs"]
    return _scaled(compared) or OF_WORLD["numbers"]


def _of_the_share(compared: Compared) -> str:
    """The sentence if a value computed from a rank's share causes the difference."""
    kind, difference = _shown(compared)
    if kind in ("", "buffer") and compared.is_in_a_step and (drawn := compared.run.fact("apart")):
        return f"{drawn}; {remedies.DRAWN_APART}"
    if kind == "failed" and failure_of(compared.run)[0] in {"", *_OF_RANKS}:
        kind = "decided"
    if kind:
        return f"{difference.rstrip('.')}; {OF_THE_SHARE.get(kind, remedies.DECIDED)}"
    if not compared.is_in_a_step:
        return remedies.DECIDED
    return _scaled(compared) or OF_THE_SHARE[_numbers_of_the_share(compared)]


def _numbers_of_the_share(compared: Compared) -> str:
    """Which numbers of a step are computed from a rank's share, as a key of OF_THE_SHARE."""
    first, other, step = compared.first, compared.run, compared.step
    if compared.kind == "weights":
        return "weights"
    if _rows_differ(compared, "rows"):
        if _is_of_the_loop(compared):
            return "loop"
        if first.batch("given", step):
            return "given"
    elif _rows_differ(compared, "out"):
        return "outputs"
    if math.isclose(first.losses[step], other.losses[step], rel_tol=_CLOSE):
        return "gradients"
    return "numbers later" if step else "numbers"


def _shown(compared: Compared) -> tuple[str, str]:
    """A differing fact in the records, not a number of the training: its key in remedies.py, and a sentence."""
    first, other, difference = compared.first, compared.run, compared.difference
    assert difference is not None
    name, rank = difference.name, difference.rank
    match difference.kind:
        case "batch" | "samples":
            return _samples(compared)
        case "hyper":
            return _hyper(compared)
        case "uneven":
            return ("uneven" if other.length else "no steps"), name
        case "apart" if name.startswith("optimizer"):
            return "own", f"{name} belongs to no replicated model, so each rank trains its own"
        case "weights" if not compared.step:
            return "first weights", f"the first weights are not those {first.at}"
        # other inputs explain another buffer, so the buffer is no fact of its own
        case "buffer" if compared.is_in_a_step and _rows_differ(compared, "rows"):
            return "", ""
    words = {
        "failed": failure_of(other)[1],
        "mode": f"rank {rank} is in another mode (training or evaluation) than rank 0",
        "steps": f"{first.length} steps {first.at} and {other.length} {_at(compared)}",
        "apart": f"{name} of rank {rank} is not that of rank 0",
        "buffer": f"the buffer {name} is made of each rank's share, by forward or by the script",
    }
    return (compared.kind, words[compared.kind]) if compared.kind in words else ("", "")


def _at(compared: Compared) -> str:
    return compared.run.at if compared.first.is_untouched else f"at {compared.run.size}"


def _samples(compared: Compared) -> tuple[str, str]:
    """The kind and sentence for a step with other samples, or another number of samples."""
    first, other, step = compared.first, compared.run, compared.step
    if not other.steps[step].is_ours:
        return "foreign", f"the batches come from {other.fact('foreign') or 'elsewhere'}"
    first_count, other_count = first.num_samples(step), other.num_samples(step)
    sentence = f"a step has {first_count} samples {first.at} and {other_count} {_at(compared)}"
    if first.is_untouched and first_count == other_count:
        return "samples", "the samples or their order are not those of the untouched script"
    if first_count == other_count:
        sentence = "the order of samples depends on the number of processes"
    return "samples", sentence


def _hyper(compared: Compared) -> tuple[str, str]:
    first, other, step = compared.first, compared.run, compared.step
    assert compared.difference is not None
    name, rank = compared.difference.name, compared.difference.rank
    # the first step of a second optimizer is no later one
    is_later = any(before.param.keys() == first.steps[step].param.keys() for before in first.steps[:step])
    if rank is None:
        kind = "schedule" if is_later and not first.is_untouched else "rate"
        pair, places = (first.steps[step], other.steps[step]), (first.at, _at(compared))
    else:
        kind = "rate of a rank"
        pair, places = (other.steps[step], other.ranks[rank][step]), ("on rank 0", f"on rank {rank}")
    groups = [(a[name], b[name]) for a, b in zip(pair[0].hyper, pair[1].hyper, strict=False) if name in a]
    unlike = next((a, b) for a, b in groups if a != b)
    mine, theirs = (", ".join(f"{number:.4g}" for number in numbers) for numbers in unlike)
    if name in ("max_norm", "clip_value"):
        kind, name = "clip", f"{name} ({other.fact('clip')})"
    since = f", from step {step + 1} on" if is_later else ""
    return kind, f"{name} is {mine} {places[0]} and {theirs} {places[1]}{since}"


def _of_the_gradient(compared: Compared) -> Iterator[Cause]:
    """Possible causes of another loss or gradient from the same samples and weights."""
    first, other, factor = compared.first, compared.run, _common_factor(compared)
    parts = other.parts(compared.step)
    is_small = factor is not None and math.isclose(factor, first.size / other.size, rel_tol=0.05)
    is_summed = any(part.get("reduction") == "sum" for part in parts)
    if (is_small or is_summed) and not any(part.get("adds") for part in parts):
        yield Cause(remedies.SUM, "sum")
    if lines := [part["line"] for part in parts if part.get("count")]:
        yield Cause(remedies.COUNT.format(lines[0]), "counts")
    if factor and abs(factor - 1) > _APART and first.size != other.size:
        sentence = _scaled(compared) or f"gradients are {factor:.3g} times those {first.at}"
        power = math.log(factor) / math.log(other.size / first.size)
        yield Cause(sentence, f"scale={round(power, 1)}")


def _scaled(compared: Compared) -> str | None:
    """The sentence for a common factor in loss and gradients, or in the gradients alone; None without a factor."""
    mine, theirs = (run.losses[compared.step] for run in (compared.first, compared.run))
    gradients = _common_factor(compared)
    if not mine or gradients is None or abs(gradients - 1) < _APART:
        return None
    if math.isclose(theirs / mine, 1, rel_tol=_SAME):
        return remedies.GRADIENTS_SCALED.format(gradients, compared.first.at)
    if math.isclose(theirs / mine, gradients, rel_tol=_APART):
        return remedies.LOSS_SCALED.format(theirs / mine, compared.first.at)
    return None


def _common_factor(compared: Compared) -> float | None:
    """The factor between the gradients of two steps, if all tensors have the same factor."""
    first, other = compared.first.steps[compared.step].grad, compared.run.steps[compared.step].grad
    norm = total(first)
    if not norm or first.keys() != other.keys():
        return None
    factor = total(other) / norm
    apart = [abs(other[name].along - factor * digest.along) for name, digest in first.items()]
    return factor if math.isfinite(factor) and max(apart) <= _SAME * factor * norm else None


def _rows_differ(compared: Compared, name: str) -> bool:
    """Whether the models' inputs (`rows`) or outputs (`out`) differ; False unless they have a row for each sample."""
    mine, theirs = (_rows(run, compared.step, name) for run in (compared.first, compared.run))
    return mine is not None and theirs is not None and not alike(mine, theirs)


def _rows(run: Run, step: int, name: str) -> list[float] | None:
    found = list[float]()
    for part in shares(run.parts(step)):
        for rows in (forward.get(name, ()) for forward in part["forwards"]):
            if len(rows) != len(part.get("samples", ())):
                return None
            found += rows
    return sorted(found)


def _is_of_the_loop(compared: Compared) -> bool:
    """Whether the loaders returned the same rows, so that the loop made the inputs differ."""
    has_rows = bool(compared.first.batch("given", compared.step))
    return has_rows and are_given_alike(compared.first, compared.run, compared.step)
