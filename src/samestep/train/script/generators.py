"""Finds in the script's text what NumPy's and Python's generators of its own draw; no replaced function shows it."""

import ast
import random
from collections.abc import Iterator
from types import FrameType

import numpy as np

from samestep.train.script.lines import scripts_call, value_of
from samestep.train.script.sizes import assigned_to, length_of

_OWN = (np.random.Generator, np.random.RandomState, random.Random)


def own_draw(count: int) -> tuple[bool, str] | None:
    """The draw by a generator of its own that the script's expression uses: whether it is for `count` samples, and what
    draws, as "rng.normal"; None where there is none."""
    frame, call = scripts_call()
    draws = _draws_in(call, frame, count, set()) if frame else ()
    return max(draws, default=None)


def _draws_in(
    node: ast.AST | None, frame: FrameType, count: int, seen: set[str]
) -> Iterator[tuple[bool, str]]:
    """The draws in an expression, and in what this function of the script assigns to the names in it."""
    parts = list(ast.walk(node)) if node else []
    loops = [loop.iter for part in parts for loop in getattr(part, "generators", ())]
    is_in_loop = any(length_of(loop, frame) == count for loop in loops)
    for part in parts:
        if isinstance(part, ast.Call) and isinstance(_drawer(part.func, frame), _OWN):
            given = [*part.args, *(keyword.value for keyword in part.keywords)]
            is_for_samples = is_in_loop or any(length_of(value, frame) == count for value in given)
            yield is_for_samples, ast.unparse(part.func)
        elif isinstance(part, ast.Name) and part.id not in seen:
            seen.add(part.id)
            lines = {line for *_, line in frame.f_code.co_lines()}
            for value in assigned_to(frame.f_code.co_filename, part.id, ast.Name) or ():
                if getattr(value, "lineno", None) in lines:
                    yield from _draws_in(value, frame, count, seen)


def _drawer(function: ast.expr, frame: FrameType) -> object:
    """What draws where this function is called: rng in rng.normal(), NumPy's own in normal() that was imported."""
    if isinstance(function, ast.Attribute):
        return value_of(function.value, frame)
    return getattr(value_of(function, frame), "__self__", None)
