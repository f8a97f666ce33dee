"""Records a run inside its workers: steps and printed lines, with suspected causes removed."""

from collections.abc import Callable
from typing import Any


def wrap(owner: Any, name: str, around: Callable[..., Any], *others: Any) -> None:
    """Replace a function by `around`, which gets the original as its first argument; `others` are further owners of the
    same function."""
    original = getattr(owner, name)
    for place in (owner, *others):
        setattr(place, name, lambda *args, **kwargs: around(original, *args, **kwargs))
