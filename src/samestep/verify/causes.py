"""Names the cause of a difference from what was recorded, or none where the records show none."""

import math
from collections.abc import Callable, Iterator

from samestep.verify.read import Digest, Run
from samestep.verify.trajectory import Difference, total

_SAME = 1e-4
_APART = 1e-2
_MICROBATCHES = "use steps, whose microbatches are the same at any number of processes"
_OWN_DRAWS = (
    "each rank draws its own random numbers between backward and the step; draw them from a torch.Generator with the "
    "same seed on every rank"
)
_STANDARD_ORDERS = {"RandomSampler", "SequentialSampler"}


def explain(first: Run, other: Run, difference: Difference, again: Callable[[], Run]) -> str | None:
    """The cause of a difference beyond rounding; `again` repeats the first run, where that decides."""
    step = difference.step or 0
    match difference.kind:
        case "weights" if step == 0:
            return _first_weights(first, again)
        case "apart":
            return _ranks_apart(other, difference)
        case "batch" | "samples":
            return _samples(first, other, step)
        case "printed":
            return "a metric of one rank alone; use samestep.sum or samestep.mean, which include every rank's share"
        case "mode":
            return (
                f"rank {difference.rank} is in another mode (training or evaluation) than rank 0; call model.train() "
                "on every rank before the epoch"
            )
        case "hyper":
            return _hyper(first, other, difference)
        case "uneven" if not other.length:
            return "each rank trains with its own share of every batch; run the training loop on all ranks"
        case "uneven":
            return (
                "each rank has a share of every step; decide whether to step, and when to stop, from a value that is "
                "equal on all ranks, such as samestep.mean(loss)"
            )
        case "steps" if not first.is_untouched:
            return (
                f"{first.length} steps {first.at} and {other.length} at {other.size}: the number of steps "
                "is computed from the number of processes; use len() of samestep.loader, without world.size"
            )
    return next(_arithmetic(first, other, difference, again), None)


def explain_rounding(run: Run) -> str | None:
    """The remaining reasons for other bits where all models are exact."""
    if not run.roots or not all(root["exact"] for root in run.roots):
        return None
    return (
        "exact=True does not cover values that the script computes from a rank's share, from the rank or the time, "
        "or with samestep.sum or mean of floats, nor nondeterministic kernels; add floats in the order of "
        "microbatches, from samestep.gather"
    )


def _first_weights(first: Run, again: Callable[[], Run]) -> str:
    if first.is_untouched:
        return (
            "the first weights are not those of the untouched script; set the same seed, and draw nothing else before "
            "the model is built"
        )
    other = again()
    if first.length and other.length and first.steps[0].param == other.steps[0].param:
        return (
            "the first weights depend on the number of processes; build the model from the same seed on every rank, "
            "before code that differs between ranks draws random numbers"
        )
    return (
        f"no seed is set: two runs {first.at} start from different weights too; call "
        "torch.manual_seed before the model is built"
    )


def _ranks_apart(run: Run, difference: Difference) -> str:
    if unreplicated := _unreplicated(run):
        return unreplicated
    if difference.name.startswith("optimizer"):
        return (
            f"{difference.name} belongs to no replicated model, so each rank trains its own; make it a parameter "
            "of the model"
        )
    step = (difference.step or 0) - 1  # weights are recorded before the step
    if step >= 0 and all(rank[step].drew_after for rank in run.ranks):
        return _OWN_DRAWS
    return f"code that only some ranks run changes {difference.name}; run it on every rank"


def _unreplicated(run: Run) -> str | None:
    alone = [root["kind"] for root in run.roots if not root["replicated"]]
    step = min(1, run.length - 1)
    if run.size == 1 or not alone or all(rank[step].grad == run.steps[step].grad for rank in run.ranks):
        return None
    return (
        f"{alone[0]} is not replicated, so each rank trains its own; write model = samestep.replicate(model)"
    )


def _samples(first: Run, other: Run, step: int) -> str:
    """Why a step has other samples, or another number of them."""
    if not other.steps[step].is_ours:
        return _foreign(other)
    mine, theirs = first.num_samples(step), other.num_samples(step)
    said = f"a step has {mine} samples {first.at} and {theirs} at {other.size}; " * (mine != theirs)
    if sampler := other.fact("sampler"):
        return (
            f"{said}the script's own sampler ({sampler}) chooses samples by the number of ranks; leave it out: "
            "samestep.loader shares each batch among the ranks"
        )
    if first.is_untouched:
        return (
            f"{said}give samestep.loader what the script's DataLoader had: dataset, batch_size, shuffle, sampler and "
            "drop_last, and no seed"
        )
    if not said:
        return (
            "the order of samples depends on the number of processes; give samestep.loader the same dataset, "
            "seed and batch_size at any number of them"
        )
    if theirs * first.size == mine * other.size:
        return f"{said}batch_size is that of the whole step: do not multiply it by the number of processes"
    return f"{said}give samestep.loader the same dataset and batch_size at any number of processes"


def _foreign(run: Run) -> str:
    foreign = run.fact("foreign")
    if not foreign:
        return "batches do not come from samestep.loader; use it, so that the ranks share each batch"
    sampler, line = foreign[0]["sampler"], foreign[0]["line"]
    if sampler in _STANDARD_ORDERS:
        return (
            f"the batches come from a plain DataLoader ({line}), so every rank takes all samples; use "
            "samestep.loader"
        )
    return f"a {sampler} ({line}) chooses each rank's samples; use samestep.loader, which shares each batch"


def _hyper(first: Run, other: Run, difference: Difference) -> str:
    name, step, rank = difference.name, difference.step or 0, difference.rank
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


def _arithmetic(first: Run, other: Run, difference: Difference, again: Callable[[], Run]) -> Iterator[str]:
    """Causes of another loss, gradient or buffer from the same samples and weights, the surest first."""
    step = difference.step or 0
    if difference.kind == "end":
        yield from _careless(other)
        return
    if _inputs_differ(first, other, step):
        yield _inputs(first, other, step, again)
    if unreplicated := _unreplicated(other):
        yield unreplicated
    yield from _scaled(first, other, step)
    yield from _counted(first, other, step)
    if difference.kind == "grad" and first.steps[step].drew_after:
        yield _OWN_DRAWS
    # What every step does shows in the first step.
    is_new = not any(one.drew or one.training for one in other.steps[:step])
    exact = any(root["exact"] for root in other.roots)
    drew = is_new and not exact and (first.steps[step].drew or other.steps[step].drew)
    norms = is_new and [name for root in other.roots for name in root["batchnorm"] if not root["exact"]]
    if norms and drew:
        yield (
            "BatchNorm statistics and random draws (dropout or the like) are per rank, use steps and "
            "replicate(exact=True)"
        )
    if norms:
        yield "BatchNorm statistics are per rank, use sync_batchnorm=True or steps"
    if drew:
        what = "dropout masks" if any(root["dropout"] for root in other.roots) else "the model's random draws"
        yield f"{what} are per rank, use steps and replicate(exact=True)"
    yield from _careless(other)


def _careless(run: Run) -> Iterator[str]:
    if line := run.fact("careless"):
        yield (
            f"an evaluation in training mode ({line}) changes BatchNorm statistics; call model.eval() before it "
            "and model.train() after it"
        )


def _inputs_differ(first: Run, other: Run, step: int) -> bool:
    """Whether the same samples had different content, where each row of the input is a sample."""
    runs = (first, other)
    if not all(len(rank[step].each("rows")) == len(rank[step].samples) for run in runs for rank in run.ranks):
        return False
    mine, theirs = (run.each("rows", step) for run in runs)
    return len(mine) == len(theirs) and mine != theirs


def _inputs(first: Run, other: Run, step: int, again: Callable[[], Run]) -> str:
    once_more = again()
    if once_more.length > step and _inputs_differ(first, once_more, step):
        return (
            f"no seed is set: two runs {first.at} get different inputs for the same samples; seed the "
            "random numbers that the data are made with"
        )
    mine, theirs = (run.each("given", step) for run in (first, other))
    if mine and mine == theirs:
        if any(part.get("loop_drew") for part in other.steps[step].parts):
            return (
                "the loop changes the inputs by random numbers that each rank draws for its own share; draw them in "
                f"the dataset, for each sample, or {_MICROBATCHES}, with replicate(exact=True)"
            )
        return (
            "the loop changes the inputs by a value of the rank's share, such as its mean, or by the rank; use "
            f"values of the whole data set, or {_MICROBATCHES}"
        )
    return (
        "the same samples have different inputs; make and augment each sample from the sample alone, in the dataset, "
        "not from the rank"
    )


def _scaled(first: Run, other: Run, step: int) -> Iterator[str]:
    """A common factor in loss and gradients, or in the gradients alone."""
    mine, theirs = first.steps[step], other.steps[step]
    if not first.losses[step]:
        return
    loss = other.losses[step] / first.losses[step]
    if (
        not _near(loss, 1)
        and all(part["reduction"] == "sum" for part in theirs.parts)
        and _near(other.raw_loss(step), first.raw_loss(step))
    ):
        yield (
            "the loss is a sum over each rank's samples, but gradients are averaged over the ranks; use "
            'reduction="mean", or divide by len(y)'
        )
    gradients = _common_factor(mine.grad, theirs.grad)
    if gradients is None or abs(gradients - 1) < _APART:
        return
    if _near(loss, 1):
        yield (
            f"gradients are {gradients:.3g} times those {first.at} and the loss is the same; samestep "
            "averages gradients over the ranks: do not divide, multiply or all-reduce them"
        )
    elif _near(loss, gradients):
        yield (
            f"the loss is {loss:.3g} times that {first.at}: one of its factors depends on the number of "
            "processes (world.size, the length of a share); leave that factor out"
        )


def _counted(first: Run, other: Run, step: int) -> Iterator[str]:
    """A loss over chosen terms of a share, or divided by a count in it, is not the batch's loss."""
    mine, theirs = (
        [
            (rank, part)
            for rank, steps in enumerate(run.ranks)
            for part in steps[step].parts
            if part.get("mine") and "samples" in part
        ]
        for run in (first, other)
    )
    if [part["samples"] for _, part in mine] == [part["samples"] for _, part in theirs]:
        return  # the same microbatches
    if all(part.get("picked") for _, part in mine + theirs):
        yield (
            "the loss chooses terms by comparing them within one rank's share, not within the batch; choose each "
            f"term by itself, or {_MICROBATCHES}"
        )
    if not mine or not all(part.get("count") for _, part in mine + theirs):
        return
    one = mine[0][1]
    for rank, part in theirs:
        if not _near(part["count"] / part["mine"], one["count"] / one["mine"]):
            yield (
                f"the loss is divided by a count in each rank's share ({one['count']:g} for {one['mine']} samples "
                f"{first.at}, {part['count']:g} for {part['mine']} on rank {rank} of {other.size}); "
                "divide the sum of its terms by len(y) and by samestep.mean(count / len(y)), or "
                f"{_MICROBATCHES}"
            )
            return


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


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_SAME)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
