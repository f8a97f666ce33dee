"""Three numbers stand for a tensor: how long it is, where it points, and a sum that any changed bit changes."""

from collections.abc import Sequence
from functools import cache

import torch

Digest = list[float]
_PIECE = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digests(tensors: Sequence[torch.Tensor]) -> list[Digest]:
    """For each tensor its norm and its projection on a fixed direction, in float64, and the sum of its bits.

    Two tensors that are close have close norms and projections; where the bit sums are equal so are the bits,
    as far as accidents go.
    """
    made = [_digest(one) for one in tensors]
    if not made:
        return []
    numbers = torch.stack([pair for pair, _ in made]).tolist()
    bits = torch.stack([bits for _, bits in made]).tolist()
    return [[square**0.5, along, one] for (square, along), one in zip(numbers, bits, strict=True)]


@torch.no_grad()
def _digest(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    plain = tensor.detach().cpu() if tensor.device.type == "mps" else tensor.detach()
    flat = (torch.view_as_real(plain) if plain.is_complex() else plain).contiguous().reshape(-1)
    numbers = torch.zeros(2, dtype=torch.float64, device=flat.device)
    bits = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _PIECE):
        piece = flat[start : start + _PIECE]
        wide = piece.double()
        numbers += torch.stack([wide.square().sum(), (wide * _direction(flat.device)[: len(wide)]).sum()])
        bits += piece.view(_INTEGERS[piece.element_size()]).sum(dtype=torch.int64)
    return numbers, bits


@cache
def _direction(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(0, 2, (_PIECE,), generator=generator).double() * 2 - 1).to(device)
