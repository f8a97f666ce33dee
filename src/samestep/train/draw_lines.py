"""Where in the script a random draw is made, and what its call names there."""

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
    *(str(Path(__file__).parents[1]), contextlib.__file__),
)
_NOT_THE_SCRIPTS = (_LAYERS, *_NOT_THE_MODELS)
_CHECKPOINT = torch.utils.checkpoint.__file__


def line_of_draw() -> tuple[Any, ...]:
    """Where the script draws: the calls from its own line, or from a checkpointed segment, down to the draw."""
    frame: FrameType | None = sys._getframe(1)
    found: list[Any] = []
    while frame is not None:
        file = frame.f_code.co_filename
        if file == _CHECKPOINT:
            break
        if not file.startswith(_NOT_THE_MODELS):
            found += (frame.f_code, frame.f_lasti)
            if not file.startswith(_LAYERS):
                break
        frame = frame.f_back
    return tuple(found)


def named_in_call() -> list[Any]:
    """The values of variables that the script's line names in its draw, such as p and p.grad in randn_like(p.grad)."""
    frame = scripts_frame(sys._getframe(2))
    call = call_in(frame)
    return [value_of(node, frame) for node in ast.walk(call)] if call and frame else []


def value_of(node: ast.AST, frame: FrameType) -> Any:
    """What stands there, as far as looking it up runs no code of the script; else None."""
    match node:
        case ast.Name(id=name):
            return frame.f_locals.get(name, frame.f_globals.get(name))
        case ast.Attribute(value=inner, attr=name):
            of = value_of(inner, frame)
            if isinstance(of, torch.Tensor):
                return getattr(of, name) if name in ("data", "grad", "shape") else None
            held = getattr(of, "__dict__", {})
            kinds = (held, *(held.get(kind, {}) for kind in ("_parameters", "_buffers", "_modules")))
            return next((kind[name] for kind in kinds if name in kind), None)
        case (
            ast.Subscript(value=inner, slice=at)
            | ast.Call(func=ast.Attribute(value=inner, attr="size"), args=[at])
        ):
            of = value_of(inner, frame)
            of = of.shape if isinstance(node, ast.Call) and isinstance(of, torch.Tensor) else of
            key: Any = at.value if isinstance(at, ast.Constant) else value_of(at, frame)
            with contextlib.suppress(LookupError, TypeError):
                return of[key] if type(of) in (list, tuple, dict, torch.Size) else None
        case ast.Call(func=ast.Name(id="len"), args=[inner]):
            of = value_of(inner, frame)
            return len(of) if isinstance(of, torch.Tensor) and of.dim() else None
    return None


def scripts_frame(frame: FrameType | None) -> FrameType | None:
    """The nearest frame of the script."""
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_SCRIPTS):
        frame = frame.f_back
    return frame


def call_in(frame: FrameType | None) -> ast.AST | None:
    """What this frame evaluates now."""
    return _call_at(frame.f_code, frame.f_lasti) if frame else None


@functools.cache
def _call_at(code: CodeType, instruction: int) -> ast.AST | None:
    """The expression that this instruction evaluates, or the statement, as of `loss /= 2`."""
    lines = linecache.getlines(code.co_filename)
    first, last, begin, end = next(itertools.islice(code.co_positions(), instruction // 2, None))
    if not lines or first is None or last is None or last > len(lines):
        return None
    encoded = [line.encode() for line in lines[first - 1 : last]]
    encoded[-1] = encoded[-1][:end]
    try:
        (found,) = ast.parse(b"".join([encoded[0][begin:], *encoded[1:]]).decode()).body
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return None
    return found.value if isinstance(found, ast.Expr) else found
