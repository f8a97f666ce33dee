"""Lists what may have caused a difference, the surest first, each with what to remove from a run to find out."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from samestep.verify.read import Digest, Run, alike
from samestep.verify.trajectory import Difference, total

_SAME = 1e-4
_APART = 1e-2
_MICROBATCHES = "use steps, whose microbatches are the same at any number of processes"
_EXCEPTION = re.compile(r"^(?:\[rank\d+\]: )?(?:\w+\.)*([A-Z]\w+): (\S.*)", re.MULTILINE)
_OF_RANKS = {"RanksDiffer", "RankMissing"}
_DECIDED = (
    "it is decided by a value of each rank's own share, such as its loss or accuracy; decide by a value that is equal "
    "on all ranks: samestep.mean(loss), samestep.sum(correct)"
)


@dataclass(frozen=True)
class Suspect:
    """A possible cause: what to remove from a run, and what to say where the difference goes away without it."""

    remove: str
    sentence: str


def suspects(first: Run, other: Run, found: Difference, again: Run) -> Iterator[Suspect]:
    """Possible causes of a difference; `again` is a second run like the first."""
    step = found.step or 0
    if is_unstable(first, again):
        yield Suspect("seeds", _unseeded(first))
    if other.fact("foreign"):
        yield Suspect("loaders", _foreign(other))
    lines: dict[str, list[str]] = {}
    for facts in other.facts:
        for line, asked in facts.get("told", {}).items():
            lines.setdefault(line, asked)
    for line, asked in lines.items():
        yield Suspect(
            f"world={line}", f"{_of_world(first, other, found)} ({line} reads {' and '.join(asked)})"
        )
    if step < min(first.length, other.length):
        yield from _of_the_gradient(first, other, step)
    if line := other.fact("no_sync"):
        yield Suspect(
            "no_sync",
            f"gradients are read or changed inside no_sync ({line}), where each rank has its own; clip or scale them "
            "after the last backward, which is outside no_sync",
        )
    if line := other.fact("careless"):
        yield Suspect("statistics", careless_evaluation(line))
    yield Suspect("shares", _of_the_share(first, other, found))


def stated(first: Run, other: Run, found: Difference) -> str | None:
    """What the records show without an experiment: a fact that differs, and what to write."""
    step = found.step or 0
    match found.kind:
        case "failed":
            return failure_of(other)[1]
        case "weights" if step == 0 and first.is_untouched:
            return (
                "the first weights are not those of the untouched script; set the same seed, and draw nothing else "
                "before the model is built"
            )
        case "batch" | "samples":
            return _samples(first, other, step)
        case "mode":
            return (
                f"rank {found.rank} is in another mode (training or evaluation) than rank 0; call model.train() "
                "on every rank before the epoch"
            )
        case "hyper":
            return _hyper(first, other, found)
        case "uneven" if not other.length:
            return "each rank trains with its own share of every batch; run the training loop on all ranks"
        case "uneven":
            return (
                "each rank has a share of every step; decide whether to step, and when to stop, from a value that is "
                "equal on all ranks, such as samestep.mean(loss)"
            )
        case "apart" if found.name.startswith("optimizer"):
            return (
                f"{found.name} belongs to no replicated model, so each rank trains its own; make it a parameter of the "
                "model"
            )
    return None


def explain_rounding(run: Run) -> str | None:
    """The remaining reasons for other bits where all models are exact."""
    if not run.roots or not all(root["exact"] for root in run.roots):
        return None
    return (
        "exact=True does not cover values that the script computes from a rank's share, from the rank or the time, "
        "or with samestep.sum or mean of floats, nor nondeterministic kernels; add floats in the order of "
        "microbatches, from samestep.gather"
    )


def careless_evaluation(line: str) -> str:
    return (
        f"an evaluation in training mode ({line}) changes BatchNorm statistics; call model.eval() before it and "
        "model.train() after it"
    )


def draws_of(run: Run) -> str:
    """What each rank has of its own by default, in words."""
    norms = any(root["batchnorm"] for root in run.roots)
    dropout = any(root["dropout"] for root in run.roots)
    draws = "dropout masks" if dropout else "random draws"
    return (
        f"{draws} and BatchNorm statistics"
        if norms and dropout
        else "BatchNorm statistics"
        if norms
        else draws
    )


def failure_of(run: Run) -> tuple[str, str]:
    """The kind and the words of the exception that ended a run."""
    text = run.failure or ""
    found = _EXCEPTION.findall(text)
    kind, said = found[-1] if found else ("", (text.strip().splitlines() or ["no message"])[-1])
    return kind, said


def says_its_cause(run: Run) -> bool:
    """Whether the error that ended a run is about the script's lines, and not about ranks that came apart."""
    kind, said = failure_of(run)
    return kind not in _OF_RANKS and ("replicate" in said or "samestep" in said)


def is_unstable(first: Run, again: Run) -> bool:
    """Whether two runs that should be equal are not."""
    if again.code or first.length != again.length:
        return True
    steps = zip(first.steps, again.steps, strict=True)
    return any((mine.param, mine.samples_key) != (theirs.param, theirs.samples_key) for mine, theirs in steps)


def _unseeded(first: Run) -> str:
    return (
        f"no seed is set: two runs {first.at} differ too; call torch.manual_seed, and seed NumPy's and Python's random "
        "numbers where they are used, before data and model are made"
    )


def _of_world(first: Run, other: Run, found: Difference) -> str:
    """What depends on the rank or the number of ranks, by what differs."""
    step = found.step or 0
    if found.kind in ("batch", "samples", "mode", "hyper", "uneven"):
        return str(stated(first, other, found))
    if found.kind == "failed":
        return f"the rank or the number of ranks decides what the script does, and it fails: {failure_of(other)[1]}"
    if found.kind == "steps":
        return (
            f"{first.length} steps {first.at} and {other.length} at {other.size}: the number of steps "
            "is computed from the number of processes; use len() of samestep.loader, without world.size"
        )
    if found.kind == "weights" and step == 0:
        return (
            "the first weights depend on the number of processes; build the model from the same seed on every rank, "
            "before code that differs between ranks draws random numbers"
        )
    if found.kind == "apart":
        return f"code that only some ranks run changes {found.name}; run it on every rank"
    if step < min(first.length, other.length):
        if _rows_differ(first, other, step, "rows") and not _changed_in_the_loop(first, other, step):
            return (
                "the same samples have different inputs; make and augment each sample from the sample alone, in the "
                "dataset, not from the rank"
            )
        if scaled := next(_scaled(first, other, step), None):
            return scaled
    return (
        "what is trained depends on the rank or the number of ranks; leave them out: every step has the whole batch, "
        "and its gradient is averaged by samestep"
    )


def _samples(first: Run, other: Run, step: int) -> str:
    """Why a step has other samples, or another number of them."""
    if not other.steps[step].is_ours:
        return _foreign(other)
    mine, theirs = first.num_samples(step), other.num_samples(step)
    said = f"a step has {mine} samples {first.at} and {theirs} at {other.size}; " * (mine != theirs)
    sampler = next((part["sampler"] for part in other.steps[step].parts if part.get("sampler")), None)
    if first.is_untouched:
        return (
            f"{said}give samestep.loader what the script's DataLoader had: dataset, batch_size, shuffle, sampler and "
            "drop_last, and no seed"
        )
    if sampler:
        return (
            f"{said}the script's own sampler ({sampler}) chooses samples by the number of ranks; leave it out: "
            "samestep.loader shares each batch among the ranks"
        )
    if not said:
        return (
            "the order of samples depends on the number of processes; give samestep.loader the same dataset, "
            "seed and batch_size at any number of them"
        )
    if theirs * first.size == mine * other.size:
        return f"{said}batch_size is that of the whole step: do not multiply it by the number of processes"
    if theirs * other.size == mine * first.size:
        return f"{said}batch_size is that of the whole step: do not divide it by the number of processes"
    return f"{said}give samestep.loader the same dataset and batch_size at any number of processes"


def _foreign(run: Run) -> str:
    foreign = run.fact("foreign")
    if not foreign:
        return "batches do not come from samestep.loader; use it, so that the ranks share each batch"
    sampler, line = foreign[0]["sampler"], foreign[0]["line"]
    if not sampler:
        return (
            f"the batches come from a plain DataLoader ({line}), so every rank takes all samples; use "
            "samestep.loader"
        )
    return f"a {sampler} ({line}) chooses each rank's samples; use samestep.loader, which shares each batch"


def _hyper(first: Run, other: Run, found: Difference) -> str:
    name, step, rank = found.name, found.step or 0, found.rank
    since = f", from step {step + 1} on" if step else ""
    if rank is None:
        pair, places = (first.steps[step], other.steps[step]), (first.at, f"at {other.size}")
        why = (
            "its schedule uses a length or count that depends on the number of processes"
            if step
            else "every step has the whole batch, so do not scale it by the number of processes"
        )
        if first.is_untouched:
            why = "give the optimizer and its schedule the numbers that the untouched script gives them"
    else:
        pair, places = (other.steps[step], other.ranks[rank][step]), ("on rank 0", f"on rank {rank}")
        why = "build the optimizer and its schedule, and step both, in the same way on every rank"
    groups = zip(*(one.hyper for one in pair), strict=False)
    mine, theirs = next(
        (a[name], b[name]) for a, b in groups if name in a and name in b and a[name] != b[name]
    )
    return f"{name} is {_short(mine)} {places[0]} and {_short(theirs)} {places[1]}{since}; {why}"


def _of_the_gradient(first: Run, other: Run, step: int) -> Iterator[Suspect]:
    """Causes of another loss or gradient from the same samples and weights."""
    factor = _common_factor(first.steps[step].grad, other.steps[step].grad)
    parts = other.parts(step)
    inverse = first.size / other.size
    adds = any(part.get("adds") for part in parts)
    is_small = factor is not None and math.isclose(factor, inverse, rel_tol=0.05)
    if not adds and (is_small or any(part.get("reduction") == "sum" for part in parts)):
        yield Suspect(
            "sum",
            "the loss is a sum over each rank's samples, but gradients are averaged over the ranks; write "
            'replicate(model, loss="sum"), or divide the loss by len(y)',
        )
    if any(part.get("count") for part in parts):
        yield Suspect("counts", _counted(first, other, step))
    if factor and abs(factor - 1) > _APART and first.size != other.size:
        sentence = next(_scaled(first, other, step), f"gradients are {factor:.3g} times those {first.at}")
        power = math.log(factor) / math.log(other.size / first.size)
        yield Suspect(f"scale={round(power, 1)}", sentence)


def _of_the_share(first: Run, other: Run, found: Difference) -> str:
    """What is computed over a rank's share, by what differs."""
    step = found.step or 0
    if found.kind == "failed":
        said = failure_of(other)[1]
        return f"a rank has only its share of each batch, and the script fails on that: {said}; {_DECIDED}"
    if found.kind == "hyper":
        return f"{_hyper(first, other, found).rpartition('; ')[0]}; {_DECIDED}"
    if found.kind in ("uneven", "steps", "apart", "end", "mode"):
        return f"{found} depends on the number of processes: {_DECIDED}"
    if found.kind == "buffer":
        return (
            f"forward changes the buffer {found.name} from each rank's share; take samestep.mean(...) there of what it "
            "is made of"
        )
    if step >= min(first.length, other.length):
        return _DECIDED
    if _rows_differ(first, other, step, "rows") and _changed_in_the_loop(first, other, step):
        return _in_the_loop(other, step)
    parts = [part for part in other.parts(step) if part.get("mine")]
    if parts and all(part.get("picked") for part in parts):
        return (
            "the loss chooses terms by comparing them within one rank's share, not within the batch; choose each "
            f"term by itself, or {_MICROBATCHES}"
        )
    if not _rows_differ(first, other, step, "rows") and _rows_differ(first, other, step, "out"):
        return (
            "the model computes over all samples of its input together (a mean, a normalization, a maximum), and each "
            "rank has only its share; compute on each sample, or use samestep.gather or mean inside, or "
            f"{_MICROBATCHES}"
        )
    return (
        "the loss is no mean over samples: it is computed from all samples of a rank's share together (pairs, "
        "statistics, a maximum, a count); compute it from samestep.gather(model(x)), or from samestep.sum and mean"
    )


def _forward_rows(run: Run, step: int, name: str, at: int) -> list[float] | None:
    """The rows of forward pass number `at` of a step, of all ranks; None where they are no rows of samples."""
    rows: list[float] = []
    for rank in run.ranks:
        found = rank[step].forwards(name)
        shares = [len(part.get("samples", ())) for part in rank[step].parts]
        if len(found) <= at or len(found[at] or ()) not in shares:
            return None
        rows += found[at]
    return rows


def _rows_differ(first: Run, other: Run, step: int, name: str) -> bool:
    for at in range(len(first.steps[step].forwards("rows"))):
        mine, theirs = (_forward_rows(run, step, name, at) for run in (first, other))
        if mine is not None and theirs is not None and not alike(mine, theirs):
            return True
    return False


def _changed_in_the_loop(first: Run, other: Run, step: int) -> bool:
    """Whether the loaders gave the same, and the loop made other inputs of it."""
    mine = first.each("given", step)[0]
    return bool(mine) and any(alike(mine, theirs) for theirs in other.each("given", step))


def _in_the_loop(other: Run, step: int) -> str:
    if any(part.get("loop_drew") for part in other.steps[step].parts):
        return (
            "the loop changes the inputs by random numbers that each rank draws for its own share; draw them in "
            f"the dataset, for each sample, or {_MICROBATCHES}, with replicate(exact=True)"
        )
    return (
        "the loop changes the inputs by a value of the rank's share, such as its mean, or by the rank; use "
        f"values of the whole data set, or {_MICROBATCHES}"
    )


def _scaled(first: Run, other: Run, step: int) -> Iterator[str]:
    """A common factor in loss and gradients, or in the gradients alone."""
    gradients = _common_factor(first.steps[step].grad, other.steps[step].grad)
    if not first.losses[step] or gradients is None or abs(gradients - 1) < _APART:
        return
    loss = other.losses[step] / first.losses[step]
    if math.isclose(loss, 1, rel_tol=_SAME):
        yield (
            f"gradients are {gradients:.3g} times those {first.at} and the loss is the same; samestep "
            "averages gradients over the ranks: do not divide, multiply or all-reduce them"
        )
    elif math.isclose(loss, gradients, rel_tol=_APART):
        yield (
            f"the loss is {loss:.3g} times that {first.at}: one of its factors depends on the number of "
            "processes (world.size, the length of a share); leave that factor out"
        )


def _counted(first: Run, other: Run, step: int) -> str:
    """A loss that is divided by a count in the rank's share."""
    counts = [
        [
            f"{part['count']:g} for {part['mine']}"
            for part in run.parts(step)
            if part.get("count") and part.get("mine")
        ]
        for run in (first, other)
    ]
    shown = ""
    if counts[0] and counts[1]:
        shown = f" ({counts[0][0]} samples {first.at}, {' and '.join(counts[1][:2])} at {other.size})"
    return (
        f'the loss is divided by a count in each rank\'s share{shown}; write replicate(model, loss="sum") and divide '
        "the sum of its terms by samestep.sum(count)"
    )


def _common_factor(first: dict[str, Digest], other: dict[str, Digest]) -> float | None:
    """The factor between the gradients of two steps, where all tensors have the same one."""
    whole = total(first)
    if not whole or first.keys() != other.keys():
        return None
    factor = total(other) / whole
    for name, digest in first.items():
        if not abs(other[name].along - factor * digest.along) <= _SAME * factor * whole:
            return None
    return factor if math.isfinite(factor) else None


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
