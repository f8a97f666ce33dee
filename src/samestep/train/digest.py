"""Short sums of tensors, for comparing tensors without sending or storing them."""

from collections.abc import Iterable, Iterator
from functools import cache

import torch

from samestep.train.group.device import on_host, widest

_PIECE = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_sums(tensors: Iterable[torch.Tensor]) -> bytes:
    """For each tensor eight bytes: the sum of its bits read as integers, which one flipped bit always changes."""
    sums = on_host(_bit_sum(_flat(tensor)) for tensor in tensors)
    return torch.stack(sums).numpy().tobytes() if sums else b""


@torch.no_grad()
def digests(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[float, float, int]]:
    """For each tensor its norm, its projection on a fixed direction (both in float64) and its bit sum."""
    # Tensors that are close have close norms and projections.
    for tensor in tensors:
        flat = _flat(tensor if widest(tensor.device) == torch.float64 else tensor.cpu())
        square, along = torch.zeros(2, dtype=torch.float64, device=flat.device)
        bits = torch.zeros((), dtype=torch.int64, device=flat.device)
        for start in range(0, flat.numel(), _PIECE):
            piece = flat[start : start + _PIECE]
            wide = piece.double()
            square += wide.square().sum()
            along += (wide * _direction(flat.device)[: len(wide)]).sum()
            bits += _bit_sum(piece)
        yield float(square) ** 0.5, float(along), int(bits)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    return plain.contiguous().reshape(-1)


def _bit_sum(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64)


@cache
def _direction(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(0, 2, (_PIECE,), generator=generator, device="cpu").double() * 2 - 1).to(device)
