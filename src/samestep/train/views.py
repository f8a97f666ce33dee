"""How a tensor lies in memory, and where its samples are after a view."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch


def key_of(tensor: torch.Tensor) -> Any:
    """What tells tensors apart that are there at once."""
    if tensor.layout != torch.strided:
        return id(tensor)
    # autograd may hand on a view as another object with the same memory
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def meta_of(tensor: torch.Tensor, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """A tensor without values, laid out in memory like this one."""
    sizes = tuple(tensor.shape if sizes is None else sizes)
    return torch.empty_permuted(sizes, layout_of(tensor), dtype=tensor.dtype, device="meta")


def layout_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its dimensions in the order of memory."""
    strides = tensor.stride() if tensor.layout == torch.strided else range(tensor.dim(), 0, -1)
    if 0 in strides:  # what was expanded lies as torch would lay out another tensor like it
        strides = torch.empty_like(tensor, device="meta").stride()
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))


def moved(given: Sequence[int], made: Sequence[int], dim: int, before: int, mine: int) -> tuple[int, int]:
    """Where `mine` samples are after a view, and how much is merged before them there; LookupError if nowhere.

    Elements keep their order, so as many elements are before one step of the batch, and after it, as there were.
    """
    ahead, behind = given[:dim], given[dim + 1 :]
    before *= math.prod(ahead)
    passed = 1
    found = []
    for at, size in enumerate(made):
        here, rest = divmod(before, passed)
        if not rest and size % (here * mine) == 0:
            found.append((at, here))
        passed *= size
    if not found:
        raise LookupError
    if mine > 1 or len(found) == 1:
        return found[0]
    # of a share of one sample the batch may be in several places
    alone = next(((at, here) for at, here in found if here == 1 and made[at] == 1), None)
    split = made[: len(ahead)] == ahead and len(made) > len(ahead) + len(behind)
    return alone or (found[-1] if split else found[0])


def dim_in_view(view: torch.Tensor, of: torch.Tensor, dim: int, mine: int) -> int | None:
    """Where the samples that are in `dim` of a tensor are in a view of it, or several rows of each: by their stride."""
    step = of.stride(dim) if of.dim() else 0
    sizes = list(enumerate(zip(view.shape, view.stride(), strict=True)))
    exact = (at for at, found in sizes if found == (mine, step))
    merged = (at for at, (size, by) in sizes if by and step % by == 0 and size == step // by * mine)
    return next(itertools.chain(exact, merged), None)
