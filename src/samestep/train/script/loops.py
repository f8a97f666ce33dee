"""Finds the script's loop that asks for a batch: whether it trains, and whether the script has left it."""

import ast
import re
import sys
from collections.abc import Collection
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from samestep.train.script.lines import scripts_call, scripts_frame, tree_of, value_of


class LoopOfNext(NamedTuple):
    """The lines of a loop that calls next(), and the frame that runs it."""

    frame: int
    code: CodeType
    lines: range

    @property
    def is_left(self) -> bool:
        """Whether its frame still runs, and is at a line behind the loop."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (id(frame), frame.f_code) != self[:2]:
            frame = frame.f_back
        return frame is not None and frame.f_lineno not in self.lines


def loop_of_next() -> LoopOfNext | None:
    """The innermost loop around the script's call of next() that has led here; None if it is another call."""
    frame, call = scripts_call()
    is_next = isinstance(call, ast.Call) and re.search(r"\b(next|__next__)$", ast.unparse(call.func))
    loop = _loop_around(frame) if frame is not None and is_next else None
    return LoopOfNext(id(frame), frame.f_code, _lines_of(loop)) if frame is not None and loop else None


def steps_optimizer_of(parameters: Collection[int]) -> bool:
    """Whether the `for` loop that asks for a batch, or a function that it calls, steps one of these parameters."""
    frame = scripts_frame(sys._getframe(1))
    while frame is not None:
        loop = _loop_around(frame)
        if isinstance(loop, ast.For) and frame.f_lineno < loop.body[0].lineno:
            optimizers = _optimizers_stepped(loop, frame)
            groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
            if any(id(parameter) in parameters for group in groups for parameter in group):
                return True
        frame = scripts_frame(frame.f_back)
    return False


def _optimizers_stepped(loop: ast.For, frame: FrameType) -> list[torch.optim.Optimizer]:
    names = {node.id for node in ast.walk(loop) if isinstance(node, ast.Name)}
    file = ast.walk(tree_of(frame.f_code.co_filename))
    called = [node for node in file if isinstance(node, ast.FunctionDef) and node.name in names]
    steppers = [
        value_of(part, frame)
        for block in (loop, *called)
        for node in ast.walk(block)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step"
        for part in (node.func.value, *node.args)  # a GradScaler gets its optimizer
    ]
    return [stepper for stepper in steppers if isinstance(stepper, torch.optim.Optimizer)]


def _loop_around(frame: FrameType) -> ast.For | ast.While | None:
    """The innermost loop of the script around the line that a frame is at."""
    nodes = ast.walk(tree_of(frame.f_code.co_filename))
    loops = [node for node in nodes if isinstance(node, ast.For | ast.While)]
    around = [loop for loop in loops if frame.f_lineno in _lines_of(loop)]
    return min(around, key=lambda loop: len(_lines_of(loop)), default=None)


def _lines_of(loop: ast.For | ast.While) -> range:
    return range(loop.lineno, (loop.end_lineno or loop.lineno) + 1)
