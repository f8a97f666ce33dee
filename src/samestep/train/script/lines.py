"""Finds the script's line that makes a random draw, and the variables that its call names."""

import ast
import contextlib
import functools
import itertools
import linecache
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.utils.checkpoint

_LAYERS = str(Path(torch.nn.__file__).parent)
_NOT_THE_MODELS = (
    *(str(path) for path in Path(torch.__file__).parent.iterdir() if path.name != "nn"),
    *(str(Path(__file__).parents[2]), contextlib.__file__),
)
_CHECKPOINT = torch.utils.checkpoint.__file__
_LINES = (
    2  # a function of the script may draw for the samples, and for other things where another line calls it
)


@functools.cache
def _owner_of(file: str) -> str | None:
    """Whose code a file has: the "script"'s, or torch's "layers"; None where neither draws."""
    if file.startswith(_NOT_THE_MODELS):
        return None
    return "layers" if file.startswith(_LAYERS) else "script"


def line_of_draw() -> tuple[Any, ...]:
    """A key of the draw: the calls from the script's line and its caller's, or from a checkpointed segment, to it."""
    frame: FrameType | None = sys._getframe(1)
    calls: list[Any] = []
    num_lines = 0
    while frame is not None and num_lines < _LINES:
        file = frame.f_code.co_filename
        if file == _CHECKPOINT:
            break
        if (owner := _owner_of(file)) is not None:
            calls += (frame.f_code, frame.f_lasti)
            num_lines += owner == "script"
        frame = frame.f_back
    return tuple(calls)


def named_in_call() -> list[Any]:
    """The values of the variables in the script's call, such as p and p.grad in randn_like(p.grad)."""
    frame, call = scripts_call()
    return [value_of(node, frame) for node in ast.walk(call)] if call and frame else []


def value_of(node: ast.AST, frame: FrameType) -> Any:
    """The value of an expression, if it can be looked up without running code of the script; else None."""
    match node:
        case ast.Name(id=name):
            return frame.f_locals.get(name, frame.f_globals.get(name))
        case ast.Attribute(value=inner, attr=name):
            holder = value_of(inner, frame)
            if isinstance(holder, torch.Tensor):
                return getattr(holder, name) if name in ("data", "grad", "shape") else None
            attributes = getattr(holder, "__dict__", {})
            modules = [attributes.get(kind, {}) for kind in ("_parameters", "_buffers", "_modules")]
            return next((named[name] for named in (attributes, *modules) if name in named), None)
        case (
            ast.Subscript(value=inner, slice=index)
            | ast.Call(func=ast.Attribute(value=inner, attr="size"), args=[index])
        ):
            holder = value_of(inner, frame)
            if isinstance(node, ast.Call) and isinstance(holder, torch.Tensor):
                holder = holder.shape
            key: Any = index.value if isinstance(index, ast.Constant) else value_of(index, frame)
            with contextlib.suppress(LookupError, TypeError):
                return holder[key] if type(holder) in (list, tuple, dict, torch.Size) else None
        case ast.Call(func=ast.Name(id="len"), args=[inner]):
            holder = value_of(inner, frame)
            return len(holder) if isinstance(holder, torch.Tensor) and holder.dim() else None
    return None


def scripts_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and _owner_of(frame.f_code.co_filename) != "script":
        frame = frame.f_back
    return frame


def scripts_call() -> tuple[FrameType | None, ast.AST | None]:
    """The script's frame that has led here, and the expression that it evaluates now."""
    frame = scripts_frame(sys._getframe(1))
    return frame, call_in(frame)


def only_counts() -> bool:
    """Whether the script's line only counts the batches of a loader, as len(list(loader)) does."""
    frame = scripts_frame(sys._getframe(1))
    return frame is not None and "len(list(" in linecache.getline(frame.f_code.co_filename, frame.f_lineno)


def call_in(frame: FrameType | None) -> ast.AST | None:
    """The expression that this frame evaluates now."""
    return _call_at(frame.f_code, frame.f_lasti) if frame else None


@functools.cache
def _call_at(code: CodeType, instruction: int) -> ast.AST | None:
    """The expression that this instruction evaluates; for `loss /= 2` the statement."""
    lines = linecache.getlines(code.co_filename)
    first, last, begin, end = next(itertools.islice(code.co_positions(), instruction // 2, None))
    if not lines or first is None or last is None or last > len(lines):
        return None
    encoded = [line.encode() for line in lines[first - 1 : last]]
    encoded[-1] = encoded[-1][:end]
    try:
        (statement,) = ast.parse(b"".join([encoded[0][begin:], *encoded[1:]]).decode()).body
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return None
    # the header of a loop evaluates what it iterates
    return getattr(statement, "iter", statement.value if isinstance(statement, ast.Expr) else statement)


@functools.cache
def tree_of(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])
