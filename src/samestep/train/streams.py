"""Where random numbers come from: torch's, Python's and NumPy's streams, set, kept and brought back together."""

import hashlib
import json
import random
from typing import Any

import numpy as np
import torch


def seed_of(*facts: int | str) -> int:
    """A 63-bit seed that is a function of the facts alone, alike on every machine."""
    digest = hashlib.blake2b("/".join(map(str, facts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def draw_as(*facts: int | str) -> None:
    """Local. From here on random numbers are a function of these facts."""
    seed = seed_of("draw", *facts)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def capture() -> bytes:
    """Local. Where this process's streams are."""
    name, words, *rest = np.random.get_state(legacy=True)
    kept: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "python": random.getstate(),
        "numpy": [name, np.asarray(words).tolist(), *rest],
    }
    if torch.cuda.is_available():
        kept["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return json.dumps(kept).encode()


def restore(kept: bytes) -> None:
    """Local. Go on drawing where `capture` was called."""
    streams = json.loads(kept)
    torch.set_rng_state(_tensor(streams["torch"]))
    version, words, gauss = streams["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(tuple(streams["numpy"]))
    if "cuda" in streams and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(streams["cuda"]))


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
