"""Lists what may have caused a difference, the surest first, each with what to remove from a run to find out.

A sentence says what differs, from the records, and then what to write, from the tables.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from samestep.verify.read import Digests, Run, alike, record_path, shares
from samestep.verify.trajectory import Difference, total

_SAME = 1e-4
_APART = 1e-2
_CLOSE = 1e-5
_MOST_LINES = 3
_EXCEPTION = re.compile(r"^(?:\[rank\d+\]: )?(?:\w+\.)*(?!Logs)([A-Z]\w+): (\S.*)", re.MULTILINE)
_NOTE = re.compile(r"^(?:\[rank\d+\]: )?samestep: (.*\breplicate\b.*)", re.MULTILINE)
_WAITED = re.compile(r"^RuntimeError: .*\b[Tt]imed out waiting", re.MULTILINE)
_OF_RANKS = {"RanksDiffer", "RankMissing"}
_STEPS = "use steps, whose microbatches are the same at any number of processes"

# Where the records show it.
_SHOWN = {
    "foreign": "use samestep.loader, so that the ranks share each batch",
    "sampler": "leave it out: samestep.loader shares each batch among the ranks",
    "multiplied": "batch_size is that of the whole step: do not multiply it by the number of processes",
    "divided": "batch_size is that of the whole step: do not divide it by the number of processes",
    "samples": "give samestep.loader the same dataset, seed and batch_size at any number of processes",
    "mode": "call model.train() on every rank before the epoch",
    "rate": "every step has the whole batch, so do not scale it by the number of processes",
    "schedule": "its schedule uses a length or count that depends on the number of processes",
    "rate of a rank": "build the optimizer and its schedule, and step both, in the same way on every rank",
    "no steps": "each rank trains with its own share of every batch; run the training loop on all ranks",
    "uneven": "each rank has a share of every step; decide whether to step, and when to stop, from a value that is "
    "equal on all ranks, such as samestep.mean(loss)",
    "own": "make it a parameter of the model",
}
_AGAINST_THE_UNTOUCHED = {
    "samples": "give samestep.loader what the script's DataLoader had: dataset, batch_size, shuffle, sampler and "
    "drop_last, and no seed",
    "rate": "give the optimizer and its schedule the numbers that the untouched script gives them",
    "weights": "set the same seed, and draw nothing else before the model is built",
}
# Where the rank, or the number of ranks, decides it.
_OF_WORLD = _SHOWN | {
    "failed": "the rank or the number of ranks decides what the script does",
    "steps": "take the number of steps from len() of samestep.loader, without the number of processes",
    "weights": "build the model from the same seed on every rank, before code that differs between ranks draws random "
    "numbers",
    "apart": "code that only some ranks run changes it; run it on every rank",
    "inputs": "the same samples have different inputs; seed alike on every rank where data are made, and augment each "
    "sample in the dataset from the sample alone, not from the rank",
    "numbers": "what is trained depends on the rank or the number of ranks; leave them out: every step has the whole "
    "batch, and its gradient is averaged by samestep",
}
# Where it is computed from a rank's share.
_DECIDED = (
    "it is decided by a value of each rank's own share, such as its loss or accuracy; decide by a value that is equal "
    "on all ranks: samestep.mean(loss), samestep.sum(correct)"
)
_OF_THE_SHARE = {
    "failed": "with the whole batch on every rank it does not fail: a value of one rank's share decides it (its loss, "
    "its accuracy, the number of its samples); decide by samestep.mean(loss) or samestep.sum(correct)",
    "loop drew": "the loop changes the inputs by random numbers that each rank draws for its own share; draw them in "
    f"the dataset, for each sample, or {_STEPS}, with replicate(exact=True)",
    "loop": "the loop changes the inputs by values of the rank's share, such as its mean or other samples of it, or by "
    f"the rank; use values of the whole data set, or {_STEPS}",
    "given": "the same samples are other numbers: the dataset or its collate_fn draws from a generator of its own, or "
    "computes from the other samples of a batch; draw from torch's, Python's or NumPy's own stream, which is seeded "
    "for each sample, and compute on each sample alone",
    "outputs": "the model computes over all samples of its input together (a mean, a normalization, a maximum), and "
    f"each rank has only its share; compute on each sample, or use samestep.gather or mean inside, or {_STEPS}",
    "picked": "the loss chooses terms by comparing them within one rank's share, not within the batch; choose each "
    f"term by itself, or {_STEPS}",
    "numbers": "the loss is not a mean over samples: it is computed from all samples of a rank's share together "
    "(pairs, statistics, a maximum, a count); compute it from samestep.gather(model(x)), or from samestep.sum and mean",
    "gradients": "the loss is the same and its gradient is not: each rank clips or scales its own, or they are "
    "averaged by hand with equal weights for unequal shares, or the loss takes other ranks' values without their "
    "gradient, as dist.all_gather does; leave the average to samestep.replicate, and use samestep.gather",
    "buffer": "take samestep.mean(...) or gather(...) there of what it is made of",
}
# Where an experiment of its own shows it.
_UNSTABLE = {
    "seeds": "no seed is set: two runs {} differ too; call torch.manual_seed, and seed NumPy's and Python's random "
    "numbers where they are used, before data and model are made",
    "clock": "the time or the process's number decides what is trained ({}): two runs {} differ too; "
    "count steps or samples instead, and seed with a number",
    "hashes": "the order of a set of strings is another in each process: two runs {} differ too; sort it, as in "
    "sorted(set(labels))",
}
STILL_UNSTABLE = (
    "two runs {} differ, also with seeds set and the clock and hashes fixed; make them equal first: look for data from "
    "elsewhere, threads, and nondeterministic kernels"
)
_SUM = (
    "the loss is a sum over each rank's samples, but gradients are averaged over the ranks; write replicate(model, "
    'loss="sum"), or divide the loss by len(y)'
)
_COUNT = (
    'the loss is divided by a count in each rank\'s share{}; write replicate(model, loss="sum") and divide the sum of '
    "its terms by samestep.sum(count)"
)
_NO_SYNC = (
    "gradients are read or changed inside no_sync ({}), where each rank has its own; clip or scale them after the last "
    "backward, which is outside no_sync"
)
CARELESS = (
    "an evaluation in training mode ({}) changes BatchNorm statistics; call model.eval() before it and model.train() "
    "after it"
)
OWN_WEIGHTS = (
    "the first weights are drawn after replicate, where each rank draws its own random numbers; initialise the model "
    "before replicate"
)
_OWN_SEED = (
    "each rank has a seed of its own for what it draws; with --same too its draws are then not those of the serial "
    "script, unless all ranks have the same seed"
)
OWN_DRAWS = (
    "each rank draws its own random numbers between backward and the step; draw them from a torch.Generator with the "
    "same seed on every rank"
)
NOT_EXACT = (
    "exact=True does not cover values that the script computes from a rank's share, from the rank or the time, or with "
    "samestep.sum or mean of floats, nor nondeterministic kernels; add floats in the order of microbatches, from "
    "samestep.gather"
)


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
        Cause(said.format(*facts.get(removed, (first.at,))), removed) for removed, said in _UNSTABLE.items()
    ]


def suspects(first: Run, other: Run, found: Difference) -> Iterator[Cause]:
    """Possible causes of a difference."""
    if foreign := other.fact("foreign"):
        yield Cause(f"{_foreign(foreign)[1]}; {_SHOWN['foreign']}", "loaders")
    if any(facts.get("seeded") != first.fact("seeded") for facts in other.facts) and _is_drawn(
        first, other, found
    ):
        yield Cause(_OWN_SEED, f"reseeded={record_path(first.directory, 0)}", not first.is_untouched)
    lines: dict[str, list[str]] = {}
    for facts in other.facts:
        lines = facts.get("told", {}) | lines
    of_world = _of_world(first, other, found)
    for line, asked in lines.items():
        yield Cause(f"{of_world} ({line} reads {' and '.join(asked)})", f"world={line}")
    if _is_in_a_step(first, other, found):
        yield from _of_the_gradient(first, other, found.step or 0)
    for removed, sentence, line in (
        ("no_sync", _NO_SYNC, other.fact("no_sync")),
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
        return failure_of(other)[1]
    instead = (first.is_untouched and _AGAINST_THE_UNTOUCHED.get(kind)) or _SHOWN.get(kind)
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
    if kind in _OF_WORLD:
        return f"{said}; {_OF_WORLD[kind]}"
    if not _is_in_a_step(first, other, found):
        return _OF_WORLD["numbers"]
    step = found.step or 0
    if _rows_differ(first, other, step, "rows") and not _changed_in_the_loop(first, other, step):
        return _OF_WORLD["inputs"]
    return _scaled(first, other, step) or _OF_WORLD["numbers"]


def _of_the_share(first: Run, other: Run, found: Difference) -> str:
    """What is computed from a rank's share."""
    kind, said = _shown(first, other, found)
    if kind in ("", "buffer") and _is_in_a_step(first, other, found) and (drawn := other.fact("apart")):
        return f"{drawn}; without that draw verify can tell what else differs"
    if kind in _OF_THE_SHARE:
        return f"{said}; {_OF_THE_SHARE[kind]}"
    if kind:
        return f"{said}; {_DECIDED}"
    if not _is_in_a_step(first, other, found):
        return _DECIDED
    step = found.step or 0
    parts = shares(other.parts(step))
    if _rows_differ(first, other, step, "rows"):
        if _changed_in_the_loop(first, other, step):
            return _OF_THE_SHARE["loop drew" if any(part.get("loop_drew") for part in parts) else "loop"]
        if first.batch("given", step):
            return _OF_THE_SHARE["given"]
    elif _rows_differ(first, other, step, "out"):
        return _OF_THE_SHARE["outputs"]
    if step < len(first.losses) and math.isclose(first.losses[step], other.losses[step], rel_tol=_CLOSE):
        return _OF_THE_SHARE["gradients"]
    is_picked = bool(parts) and all(part.get("picked") for part in parts)
    return _OF_THE_SHARE["picked" if is_picked else "numbers"]


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
        "steps": f"{first.length} steps {first.at} and {other.length} at {other.size}",
        "uneven": name,
        "no steps": name,
        "apart": f"{name} of rank {found.rank} is not that of rank 0",
        "weights": f"the first weights are not those {first.at}",
        "buffer": f"forward changes the buffer {name} from each rank's share",
    }
    if kind == "uneven" and not other.length:
        kind = "no steps"
    return (kind, words[kind]) if kind in words and (kind != "weights" or not found.step) else ("", "")


def _samples(first: Run, other: Run, step: int) -> tuple[str, str]:
    """Why a step has other samples, or another number of them."""
    if not other.steps[step].is_ours:
        return _foreign(other.fact("foreign"))
    mine, theirs = first.num_samples(step), other.num_samples(step)
    said = f"a step has {mine} samples {first.at} and {theirs} at {other.size}"
    if mine == theirs:
        said = "the order of samples depends on the number of processes"
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
        pair, places = (first.steps[step], other.steps[step]), (first.at, f"at {other.size}")
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
        yield Cause(_SUM, "sum")
    if any(part.get("count") for part in parts):
        mine, theirs = " and ".join(_counts(first, step)[:1]), " and ".join(_counts(other, step)[:2])
        shown = f" ({mine} samples {first.at}, {theirs} at {other.size})" if mine and theirs else ""
        yield Cause(_COUNT.format(shown), "counts")
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
