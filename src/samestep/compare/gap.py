"""Measures the difference of two tensors in bits and in values, with little memory for any size."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 1 << 20
_ONES = torch.tensor([byte.bit_count() for byte in range(256)])


@dataclass(frozen=True, kw_only=True)
class Gap:
    """The difference of two tensors of the same shape; NaN equals NaN."""

    elements: int = 1  # elements whose bits differ, or, with different dtypes, whose values differ
    bits: int = 0
    absolute: float = math.inf
    relative: float = math.inf  # `absolute` divided by the largest finite value of both
    nans: int = 0  # elements that are NaN in only one tensor


def numbers(value: object) -> Tensor | None:
    """A tensor, number or list of numbers as a dense CPU tensor; None for anything else."""
    if isinstance(value, Tensor):
        dense = value.detach().cpu()
        dense = dense.dequantize() if dense.is_quantized else dense
        dense = dense if dense.layout == torch.strided else dense.to_dense()
        dense = dense.resolve_conj().resolve_neg()
        try:
            torch.empty(1, dtype=dense.dtype).to(torch.complex128)
        except NotImplementedError:  # packed dtypes such as float4 have bits but no arithmetic
            return dense.contiguous().view(torch.uint8)
        return dense
    items = value if isinstance(value, (list, tuple)) else [value]
    kinds_of = {torch.bool: bool, torch.int64: int, torch.float64: int | float}
    kinds_of[torch.complex128] = int | float | complex
    for dtype, kinds in kinds_of.items():
        if all(isinstance(item, kinds) for item in items):
            try:
                return torch.tensor(value, dtype=dtype)
            except (RuntimeError, ValueError, OverflowError):  # beyond 64 bits
                return None
    return None


def measure(a: Tensor, b: Tensor) -> Gap:
    """Compare two tensors of the same shape; with different dtypes, compare their values in float64."""
    a, b = a.contiguous().reshape(-1), b.contiguous().reshape(-1)
    elements = bits = nans = 0
    absolute = 0.0
    for x, y in zip(_pieces(a), _pieces(b), strict=True):
        is_same_dtype = x.dtype == y.dtype
        if is_same_dtype and torch.equal(_bytes(x), _bytes(y)):
            continue
        wide_x, wide_y = _wide(x), _wide(y)
        nan_x, nan_y = wide_x.isnan(), wide_y.isnan()
        unlike = (_bytes(x) != _bytes(y)).any(1) if is_same_dtype else wide_x != wide_y
        unlike &= ~(nan_x & nan_y)
        if not unlike.any():
            continue
        elements += int(unlike.sum())
        nans += int((nan_x ^ nan_y).sum())
        bits += int(_ONES[(_bytes(x) ^ _bytes(y))[unlike].long()].sum()) if is_same_dtype else 0
        apart = (wide_x - wide_y)[unlike].abs().nan_to_num(nan=math.inf, posinf=math.inf)
        if not (inexact(x) or inexact(y)):
            apart = apart.clamp(min=1)  # float64 rounds large integers, but they differ by at least 1
        absolute = max(absolute, float(apart.max()))
    relative = absolute / max(_largest(a), _largest(b)) if 0 < absolute < math.inf else absolute
    return Gap(elements=elements, bits=bits, absolute=absolute, relative=relative, nans=nans)


def inexact(tensor: Tensor) -> bool:
    """Whether its numbers are rounded, so that a tolerance makes sense."""
    return tensor.is_floating_point() or tensor.is_complex()


def _pieces(flat: Tensor) -> Iterator[Tensor]:
    for start in range(0, flat.numel(), _CHUNK):
        yield flat[start : start + _CHUNK]


def _bytes(piece: Tensor) -> Tensor:
    return piece.view(torch.uint8).reshape(piece.numel(), piece.element_size())


def _wide(piece: Tensor) -> Tensor:
    return piece.to(torch.complex128 if piece.is_complex() else torch.float64)


def _largest(flat: Tensor) -> float:
    pieces = (_wide(piece).abs() for piece in _pieces(flat))
    return max((float(piece.nan_to_num(0, 0, 0).max()) for piece in pieces), default=0.0)
