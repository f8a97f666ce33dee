"""Where in the script a random draw is made, and whether its size is written out there."""

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
_SIZED_CALLS = {"rand", "randn", "randint", "normal", "empty", "zeros", "ones", "full", "randperm"}
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


def has_fixed_size() -> bool:
    """Whether the script's line draws with a size that is written out, such as torch.rand(1)."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_SCRIPTS):
        frame = frame.f_back
    return frame is not None and _is_written_out(frame.f_code, frame.f_lasti)


@functools.cache
def _is_written_out(code: CodeType, instruction: int) -> bool:
    lines = linecache.getlines(code.co_filename)
    first, last, begin, end = next(itertools.islice(code.co_positions(), instruction // 2, None))
    if not lines or first is None or last is None or last > len(lines):
        return False
    encoded = [line.encode() for line in lines[first - 1 : last]]
    encoded[-1] = encoded[-1][:end]
    try:
        call: ast.AST = ast.parse(b"".join([encoded[0][begin:], *encoded[1:]]).decode(), mode="eval").body
    except (SyntaxError, UnicodeDecodeError):
        return False
    # in torch.empty(3).normal_() the size stands in the first call
    while isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        if not isinstance(call.func.value, ast.Call):
            break
        call = call.func.value
    if not isinstance(call, ast.Call) or not (call.args or call.keywords):
        return False
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    sizes = (*call.args, *(word.value for word in call.keywords if word.arg == "size"))
    fixed = (ast.Constant, ast.Tuple, ast.List, ast.Load, ast.UnaryOp, ast.USub)
    return name in _SIZED_CALLS and all(isinstance(node, fixed) for one in sizes for node in ast.walk(one))
