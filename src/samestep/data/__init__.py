"""The dataset of the package: 1,797 handwritten digits, read without a download."""

import gzip
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_COUNT, _SIDE = 1797, 8


def digits() -> tuple["torch.Tensor", "torch.Tensor"]:
    """Local. The images, uint8 (1797, 8, 8) from 0 to 16, and their labels, uint8 (1797,) from 0 to 9."""
    import torch

    raw = bytearray(gzip.decompress((files(__name__) / "digits.gz").read_bytes()))
    pixels = torch.frombuffer(raw, dtype=torch.uint8)
    return pixels[:-_COUNT].view(_COUNT, _SIDE, _SIDE), pixels[-_COUNT:]
