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


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Local. A number of 63 bits from torch's stream or `generator`, as DataLoader and RandomSampler draw seeds."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())


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
    states = of_host()
    kind, state = stream_of_device(in_use=False)
    if state is not None:
        states[kind] = state.numpy().tobytes()
    return json.dumps(states, default=bytes.hex).encode()


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
    """Set the streams that have a state here; in a state from JSON, bytes are hexadecimal."""
    if "torch" in states:
        torch.set_rng_state(_tensor(states["torch"]))
    if "python" in states:
        version, numbers, gauss = states["python"]
        random.setstate((version, tuple(_numbers(numbers).tolist()), gauss))
    if "numpy" in states:
        name, words, *rest = states["numpy"]
        np.random.set_state((name, _numbers(words), *rest))


def restore(kept: bytes, names: Collection[str] | None = None) -> None:
    """Local. Set all streams, or those named, to the states that `capture` returned."""
    states = {name: state for name, state in json.loads(kept).items() if names is None or name in names}
    set_host(states)
    for kind in states.keys() - set(OF_HOST):
        set_stream_of_device(kind, _tensor(states[kind]))


def _bytes(state: str | bytes) -> bytearray:
    return bytearray.fromhex(state) if isinstance(state, str) else bytearray(state)


def _tensor(state: str | bytes) -> torch.Tensor:
    return torch.frombuffer(_bytes(state), dtype=torch.uint8)


def _numbers(state: str | bytes) -> Any:
    return np.frombuffer(_bytes(state), np.uint32)


def digest() -> bytes:
    """8 bytes that identify the states of this process's streams."""
    states, (_, of_device) = of_host(), stream_of_device(in_use=True)
    (_, numbers, gauss), (_, words, *rest) = states["python"], states["numpy"]
    parts = [states["torch"], numbers, words, repr((gauss, rest)).encode()]
    parts += [] if of_device is None else [of_device.numpy().tobytes()]
    return hashlib.blake2b(b"".join(parts), digest_size=8).digest()


def different(first: bytes, second: bytes) -> list[str]:
    states = json.loads(first), json.loads(second)
    return [name for name in states[0] if states[0][name] != states[1].get(name)]
