"""What a Checkpoint consists of, and how often it is committed: checked before anything is done."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

from samestep.errors import UsageError

OWN = "samestep"
ACCEPTED_AS = {
    "length": "dataset",
    "fingerprint": "dataset",
    "batch_size": "batch_size",
    "microbatch": "batch_size",
    "seed": "seed",
    "shuffle": "order",
    "drop_last": "order",
}


class Part(Protocol):
    """Anything that can say where it is, and go on from there."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


def checked_every(every: int | timedelta) -> int | timedelta:
    whole = isinstance(every, int) and not isinstance(every, bool) and every > 0
    if not whole and not (isinstance(every, timedelta) and every > timedelta(0)):
        raise UsageError(
            f"every={every!r} is neither a number of steps nor a timedelta; use every=100 or a timedelta"
        )
    return every


def checked_parts(parts: Mapping[str, Any]) -> dict[str, Part]:
    if not parts:
        raise UsageError(
            "Checkpoint got no parts to keep; pass model=model, optimizer=optimizer, train=train"
        )
    if OWN in parts:
        raise UsageError(f"Checkpoint keeps its own state as {OWN}; give your part another name")
    for name, part in parts.items():
        if not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict"):
            raise UsageError(
                f"Checkpoint cannot keep {name}, a {type(part).__name__} without state_dict and load_state_dict; "
                "leave it out, or give it both"
            )
    return dict(parts)
