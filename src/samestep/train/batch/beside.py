"""Finds what a loop computes with beside the batch that is not the serial script's.

Covered, in the first batch of a loop: tensors from before the loop that differ between ranks. Under same=True: what
NumPy's and Python's generators of the script's own draw, and rows that go to samples by their place in the share.
Not covered: draws inside a function that returns an array; integers, and what indices choose.
"""

from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import torch

from samestep.train.batch.sizes import Traced
from samestep.train.group.control import users_line
from samestep.train.group.group import Group
from samestep.train.script.generators import own_draw

_MOST_COMPARED = 1 << 16
_CLOSE = 1e-4  # ranks on unlike machines may round differently


class Beside:
    """Looks at tensors that are not the batch's, and remembers a digest of those from before the loop."""

    def __init__(self, group: Group, say_other: Callable[[str, str], str]) -> None:
        self._group, self._say_other = group, say_other
        # the lines that use tensors from before the loop, and the sums of their projections and norms
        self._lines, self._along, self._norm = 0, 0.0, 0.0
        self._is_filled = self.has_compared = False
        group.watch(lambda: (self._lines, self._along, self._norm), self._say_unlike)

    def note_new(self, tensor: torch.Tensor, mine: int) -> None:
        """Look at a tensor that came up in this batch and that no operation of torch made."""
        if (drawn := own_draw(mine)) is None:
            return
        is_for_samples, name = drawn
        if is_for_samples:
            why = "a generator of the script's own draws it, or a function that was imported by its name"
            self._say_other(name, f"{why}; call the module's, as in np.random.normal(size=len(x))")
        else:
            self._compare(tensor)

    def note(self, func: Any, operands: Sequence[Traced], mine: int, is_older: Callable[[Any], bool]) -> None:
        """Look at the operands of an operation; `mine` is 0 without same=True."""
        if func._schema.is_mutable:
            # batches may be copied into a tensor from before the loop, and what is made of it is theirs
            self._is_filled |= any(operand.has_batch for operand in operands)
            return
        has_batch = any(operand.has_batch and operand.tensor.is_floating_point() for operand in operands)
        is_elementwise = torch.Tag.pointwise in func.tags
        if self._is_filled or not (has_batch or (is_elementwise and mine)):
            return
        dims = {
            dim - tensor.dim()
            for tensor, probe, sure, *_ in operands
            if is_elementwise and sure and probe is not None and mine > 1
            for dim in range(tensor.dim())
            if tensor.shape[dim] != probe.shape[dim]
        }
        for tensor in [operand.tensor for operand in operands if operand.is_constant]:
            if not tensor.is_floating_point():
                continue
            # what is written to in place, as running statistics, may be each rank's own
            if (
                not tensor._version
                and is_older(tensor)
                and tensor.nbytes == tensor.untyped_storage().nbytes()
            ):
                self._compare(tensor)
            fits = [dim for dim in dims if -dim <= tensor.dim() and tensor.shape[dim] == mine]
            if any(bool((tensor != tensor.narrow(dim, 0, 1)).any()) for dim in fits):
                self._group.say(
                    f"rows of a tensor that is no batch's ({users_line()}) go to this rank's samples by their place in "
                    "its share, so they are not the serial script's: add them to the batch in the collate_fn, which "
                    "gets the whole batch",
                    what="rows by place",
                )

    def _compare(self, tensor: torch.Tensor) -> None:
        if tensor.is_floating_point() and not self.has_compared:
            flat = tensor.detach().flatten()
            flat = flat[:: 1 + len(flat) // _MOST_COMPARED].cpu().double()
            self._lines = crc32(users_line().encode(), self._lines)
            self._along += float(flat @ torch.arange(1.0, len(flat) + 1, dtype=flat.dtype).sin())
            self._norm += float(flat.norm())

    def _say_unlike(self, marks: list[Any], call: str) -> None:
        """Print that a tensor differs between the ranks, if these used the same tensors."""
        lines, along, norms = zip(*filter(any, marks), strict=True)
        if len(set(lines)) == 1 and max(along) - min(along) > _CLOSE * max(norms):
            self._group.say(
                "a tensor that the loop computes with, and that is no batch's, differs between ranks, so the training "
                "is not the serial script's: make it before the first batch, after which each rank draws its own "
                "numbers, from the same seed on every rank",
                what="unlike constants",
            )
