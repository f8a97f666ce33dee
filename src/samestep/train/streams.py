"""Seeds, captures and restores torch's, Python's, NumPy's and the device's random streams together."""

import hashlib
import json
import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from samestep.train.group.device import set_stream_of_device, stream_of_device

OF_HOST = ("torch", "python", "numpy")


def seed_of(*facts: int | str) -> int:
    """A 63-bit seed that is a function of the facts alone, alike on every machine."""
    digest = hashlib.blake2b("/".join(map(str, facts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def draw_seed() -> int:
    """Local. A number of 63 bits from torch's stream, as DataLoader and RandomSampler draw their seeds."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


def draw_as(*facts: int | str) -> None:
    """Local. Seed all streams by these facts."""
    seed = seed_of("draw", *facts)
    torch.manual_seed(seed)
    seed_host(seed)


def seed_host(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def capture() -> bytes:
    """Local. The states of this process's streams, as bytes for `restore`."""
    name, words, *rest = np.random.get_state(legacy=True)
    kept: dict[str, Any] = {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "python": random.getstate(),
        "numpy": [name, np.asarray(words).tolist(), *rest],
    }
    kind, state = stream_of_device(in_use=False)
    if state is not None:
        kept[kind] = state.numpy().tobytes().hex()
    return json.dumps(kept).encode()


@contextmanager
def streams_kept() -> Iterator[None]:
    """Local. Context manager that restores the host's streams at its end."""
    before = of_host()
    try:
        yield
    finally:
        set_host(before)


def of_host() -> dict[str, Any]:
    """The states of the host's streams, which can be compared and kept in a file."""
    version, numbers, gauss = random.getstate()
    name, words, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": (version, np.array(numbers, np.uint32).tobytes(), gauss),
        "numpy": (name, np.asarray(words).tobytes(), *rest),
    }


def set_host(states: dict[str, Any]) -> None:
    if "torch" in states:
        torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))
    if "python" in states:
        version, numbers, gauss = states["python"]
        random.setstate((version, tuple(np.frombuffer(numbers, np.uint32).tolist()), gauss))
    if "numpy" in states:
        name, words, *rest = states["numpy"]
        np.random.set_state((name, np.frombuffer(words, np.uint32), *rest))


def restore(kept: bytes, names: Collection[str] | None = None) -> None:
    """Local. Set all streams, or those named, to the states that `capture` returned."""
    streams = {name: state for name, state in json.loads(kept).items() if names is None or name in names}
    if "torch" in streams:
        torch.set_rng_state(_tensor(streams["torch"]))
    if "python" in streams:
        version, words, gauss = streams["python"]
        random.setstate((version, tuple(words), gauss))
    if "numpy" in streams:
        np.random.set_state(tuple(streams["numpy"]))
    for kind in streams.keys() - set(OF_HOST):
        set_stream_of_device(kind, _tensor(streams[kind]))


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def digest() -> bytes:
    """8 bytes that identify the states of this process's streams."""
    state = hashlib.blake2b(torch.get_rng_state().numpy().data, digest_size=8)
    _, numbers, gauss = random.getstate()
    _, words, *rest = np.random.get_state(legacy=True)
    state.update(np.asarray(numbers, np.uint64).tobytes() + np.asarray(words).tobytes())
    state.update(repr((gauss, rest)).encode())
    _, of_device = stream_of_device(in_use=True)
    if of_device is not None:
        state.update(of_device.numpy().tobytes())
    return state.digest()


def different(first: bytes, second: bytes) -> list[str]:
    states = json.loads(first), json.loads(second)
    return [name for name in states[0] if states[0][name] != states[1].get(name)]
