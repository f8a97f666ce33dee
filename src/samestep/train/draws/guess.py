"""Guesses from a draw's shape, and from the script's line, which part of the whole batch's draw it is.

It is asked where no followed call has shown the place of the batch. Where a draw may be for weights, or has several
numbers for each sample in an unknown order, it prints a remark.
"""

from collections.abc import Callable
from typing import Any

import torch

from samestep.train.batch.parts import FOR_ALL, Line, Part
from samestep.train.batch.watching import Watching
from samestep.train.draws.whole import ATTENTION, RECURRENT
from samestep.train.nested import memory_of
from samestep.train.passes import Rows, Share
from samestep.train.script.lines import named_in_call
from samestep.train.script.sizes import copied, fixed_sizes, measured
from samestep.train.step import Spine

# operations of which the number of draws depends on their input
DEPENDENT = (
    "poisson",
    "binomial",
    "_standard_gamma",
    "_sample_dirichlet",
    "rrelu_with_noise",
    "rrelu_with_noise_",
)
# operations that draw for activations, and never to initialise or disturb weights
_OF_ACTIVATIONS = ("bernoulli_.float", "native_dropout", "multinomial", *ATTENTION)


class Guess:
    """Remembers the draws that it has found to be the same on all ranks."""

    def __init__(self, spine: Spine, watching: Watching, say_other: Callable[..., str]) -> None:
        self._spine, self._watching, self._say_other = spine, watching, say_other
        self._of_all: set[tuple[Any, ...]] = set()

    def part(self, line: Line, shape: torch.Size, share: Share) -> Part:
        """The part by the shape alone, where no watched call has shown the place of the batch."""
        if all(sizes := fixed_sizes(len(shape))):
            return FOR_ALL
        fits = (fit for fit in self._spine.origins.open_shares if fit.mine in shape[:2])
        rows, name, known = next(fits, share).rows, line[0], (tuple(shape), line)
        in_model, is_beside = self._watching.in_model, not self._watching.is_in_call
        ragged = {laid.rows for laid in share.of.ragged.values() if laid.rows.mine == shape[0] != rows.mine}
        if len(ragged) == 1:
            return Part(0, ragged.pop())
        is_unknown = sizes[:2] != [True, False] and name not in (*DEPENDENT, *ATTENTION, RECURRENT)
        # one number for each channel, as Dropout2d draws them, is of samples in front
        is_unknown &= len(shape) < 3 or shape[2:].numel() > 1
        if in_model and shape[:2] == (rows.mine, rows.mine) and is_unknown:
            why = "its first two dimensions have the size of this rank's share, and which is the batch's is not known"
            self._say_other(name, why, "may not")
        # (24, 8) may be 3 rows for each of 8 samples
        if part := _by_sizes(shape, sizes, rows):
            return part
        several = in_model and name in _OF_ACTIVATIONS and rows.mine > 1 and shape[0] % rows.mine == 0
        is_in_front = shape[0] == rows.mine
        if (is_in_front or (shape[1:2] == (rows.mine,) and not several)) and known not in self._of_all:
            if is_beside and self.is_of_weights(name, shape, share):
                return FOR_ALL
            return Part(int(not is_in_front or _is_second(shape, rows, sizes, share)), rows)
        if is_beside:
            self.look_for_multiple(name, shape, rows)
        elif name in _OF_ACTIVATIONS:
            why = (
                f"where among those of all ranks its {shape[0]} rows are is not known, as where a mask chooses them or "
                "a model is called with several for each sample; give the samples a dimension of their own"
            )
            self._say_other(name, why, "may not")
        self._of_all.add(known)
        return FOR_ALL

    def is_of_weights(self, name: str, shape: torch.Size, share: Share) -> bool:
        """Whether the variables in a call show that its draw is for weights; prints a remark where they do not tell."""
        values = named_in_call()
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        batch = [tensor for _, tensor in share.of.tensors()]
        is_sized = len(shape) == 1 and shape[0] in [value for value in values if type(value) is int]
        if is_sized or any(tensor is given for tensor in tensors for given in batch):
            return False
        weights = list(self._spine.models.parameters())
        memory = {memory_of(held) for weight in weights for held in (weight, weight.grad) if held is not None}
        others = [tensor for tensor in tensors if memory_of(tensor) not in memory]
        if tensors and not others:
            return True
        is_computed = any(other.grad_fn is not None for other in others)
        is_sized = isinstance(sized := measured(), torch.Tensor) and memory_of(sized) not in memory
        if is_computed or is_sized or shape not in {weight.shape for weight in weights}:
            return False
        is_of_weights = bool(others) and not any(given.shape == shape for given in batch)
        self._say_other(
            name,
            f"its shape is a parameter's and may be that of this rank's samples, and it is taken for "
            f"{'a draw for weights' if is_of_weights else 'one for samples'}; name the parameter or the batch in the "
            "call, as in torch.randn_like(parameter)",
            "may not",
        )
        return is_of_weights

    def look_for_multiple(self, name: str, shape: torch.Size, rows: Rows) -> None:
        """Print a remark where a draw has several numbers for each sample in unknown order, or counts samples."""
        if rows.mine < 2 or shape[0] == rows.mine:
            return
        weights = {memory_of(weight) for weight in self._spine.models.parameters()}
        if shape[0] < rows.mine or shape[0] % rows.mine:
            source = measured()
            is_counted = isinstance(source, torch.Tensor) and source.shape[:1] == (rows.mine,)
            if is_counted and memory_of(source) not in weights:
                why = f"its {shape[0]} numbers are counted by this rank's samples, and are not one for each; draw as"
                self._say_other(name, f"{why} many as there are samples, as in torch.rand(len(x))")
            return
        values = named_in_call()
        is_sized = rows.mine in [value for value in values if type(value) is int]
        alike = [value for value in values if isinstance(value, torch.Tensor) and value.shape == shape]
        if is_sized or any(memory_of(value) not in weights for value in alike):
            times = shape[0] // rows.mine
            remedy = f"the samples a dimension of their own, as in ({rows.mine}, {times})"
            if name == "multinomial":
                remedy = (
                    f"each sample a row of weights, as in multinomial(weights.expand(len(x), -1), {times})"
                )
            why = f"{shape[0]} numbers are {times} for each of this rank's {rows.mine} samples, in an order that is not"
            self._say_other(name, f"{why} known; give {remedy}", "does not" if is_sized else "may not")


def _by_sizes(shape: torch.Size, sizes: list[bool], rows: Rows) -> Part | None:
    """The part where the script's line tells it: rand(3, 2, len(x)), or the sample after sample of rand(x.numel())."""
    behind = [dim for dim, is_fixed in enumerate(sizes) if not is_fixed]
    if len(sizes) == len(shape) and len(behind) == 1 and behind[0] > 1 and shape[behind[0]] == rows.mine:
        return Part(behind[0], rows)
    like = copied()
    if not isinstance(like, torch.Tensor) or like.shape[:1] != (rows.mine,) or shape != (like.numel(),):
        return None
    return Part(0, rows, like[0].numel())


def _is_second(shape: torch.Size, rows: Rows, sizes: list[bool], share: Share) -> bool:
    """Whether the batch is in the second of two equal dimensions, as where the batch itself has time first."""
    if shape[1:2] != shape[:1]:
        return False
    has_time = any(ragged.dim == 1 and ragged.rows == rows for ragged in share.of.ragged.values())
    return has_time or (sizes[:2] == [True, False] and len(sizes) == len(shape))
