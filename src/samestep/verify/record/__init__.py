"""Records a run inside its workers: what each step was made of, what was printed, and with which causes removed."""

from collections.abc import Callable
from typing import Any


def wrap(owner: Any, name: str, around: Callable[..., Any], *others: Any) -> None:
    """Have `around` called instead of a function, with the function itself as its first argument; `others` have the
    same function."""
    original = getattr(owner, name)
    for each in (owner, *others):
        setattr(each, name, lambda *args, **kwargs: around(original, *args, **kwargs))
