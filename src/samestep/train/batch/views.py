"""How a tensor lies in memory, and in which dimension its samples are after a view."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch


def key_of(tensor: torch.Tensor) -> Any:
    """A key that is the same for the same memory seen in the same way, and differs for tensors alive at once."""
    if tensor.layout != torch.strided:
        return id(tensor)
    # not the id: autograd may pass a view on as another object
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def meta_of(tensor: torch.Tensor, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """A tensor without values, laid out in memory like this one."""
    sizes = tuple(tensor.shape if sizes is None else sizes)
    return torch.empty_permuted(sizes, layout_of(tensor), dtype=tensor.dtype, device="meta")


def layout_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor in the order of memory."""
    strides = tensor.stride() if tensor.layout == torch.strided else range(tensor.dim(), 0, -1)
    if 0 in strides:  # an expanded dimension has no place in memory: take torch's layout for a new tensor
        strides = torch.empty_like(tensor, device="meta").stride()
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))


def has_gaps(tensor: torch.Tensor, dim: int) -> bool:
    """Whether a batch that is cut along `dim` has gaps in memory, as x[:, 0]; of one sample the stride tells it."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    step = tensor.stride(dim)
    is_wide = step > math.prod(size for size, by in sizes if by < step)
    return is_wide if tensor.shape[dim] == 1 else not torch.ops.aten.is_non_overlapping_and_dense(tensor)


def dim_after_view(
    old: Sequence[int], new: Sequence[int], dim: int, before: int, mine: int
) -> tuple[int, int]:
    """The dimension of `mine` samples after a view, and the size merged before them there; LookupError if none."""
    # A view keeps the order of elements, so the product of the sizes before the samples stays. Example: 8 samples are
    # in dimension 1 of (5, 8, 3). In a view of (40, 3) they are in dimension 0, behind a merged size of 5.
    ahead, behind = old[:dim], old[dim + 1 :]
    before *= math.prod(ahead)
    passed = 1
    places = []
    for place, size in enumerate(new):
        merged, rest = divmod(before, passed)
        if not rest and size % (merged * mine) == 0:
            places.append((place, merged))
        passed *= size
    if not places:
        raise LookupError
    if mine > 1 or len(places) == 1:
        return places[0]
    # a share of one sample fits several dimensions
    alone = [(place, merged) for place, merged in places if merged == 1 and new[place] == 1]
    split = new[: len(ahead)] == ahead and len(new) > len(ahead) + len(behind)
    return alone[0] if alone else places[-1] if split else places[0]


def dim_in_view(view: torch.Tensor, base: torch.Tensor, dim: int, mine: int) -> int | None:
    """The dimension of a view that has the samples of `dim` of `base`, or several rows of each, by its stride."""
    step = base.stride(dim) if base.dim() else 0
    sizes = list(zip(view.shape, view.stride(), strict=True))
    exact = (at for at, size in enumerate(sizes) if size == (mine, step))
    merged = (at for at, (size, by) in enumerate(sizes) if by and (size, step % by) == (step // by * mine, 0))
    return next(itertools.chain(exact, merged), None)
