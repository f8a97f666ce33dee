"""Whether the sizes of a random draw are of the batch, or are set to numbers that the script writes out.

A number of samples to show, of particles or of features may be as large as this rank's share by chance. Read from the
script's text; where that does not tell, a size may be of the batch.
"""

import ast
import functools
import linecache
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any

import numpy as np
import torch

from samestep.train.draw_lines import call_in, scripts_frame, value_of

_SAMPLED = {"sample", "rsample"}
_SIZED_CALLS = {"rand", "randn", "randint", "normal", "empty", "zeros", "ones", "full"}
# NumPy's functions by the number of arguments ahead of the size, as the first line of their texts has them
SIZE_AT = {"ranf": 0, "sample": 0} | {
    name: names.index("size")
    for name in np.random.__all__
    if "size" in (names := re.findall(r"[(,] ?(\w+)", str(getattr(np.random, name).__doc__).split(")")[0]))
}
_MEASURES = {"shape", "size", "len"}
_DEEPEST = 8
_Sizes = ast.Tuple | ast.List


def fixed_sizes(count: int) -> list[bool]:
    """Of each of `count` sizes that the script's line draws with, whether it is none of the batch, as in rand(1, n).

    There may be more where other arguments stand before the sizes. Those of a distribution's event are none.
    """
    of_event = len(getattr(distribution_drawn(), "event_shape", ()))
    frame = scripts_frame(sys._getframe(1))
    call = call_in(frame)
    # in torch.empty(3).normal_() the size stands in the first call
    while isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        if not isinstance(call.func.value, ast.Call):
            break
        call = call.func.value
    if not isinstance(call, ast.Call) or not (given := _sizes_in(call)):
        return [at >= count - of_event for at in range(count)]
    sizes = list(next((one.elts for one in given if isinstance(one, _Sizes)), given))
    # *x.shape stands for several sizes, and behind the shape of samples are those of their distribution
    found, lacking = [_is_fixed(one, frame, 0) for one in sizes], count - len(sizes)
    if _name_of(call.func) in _SAMPLED:
        return found + [False] * lacking
    at = next((at for at, one in enumerate(sizes) if isinstance(one, ast.Starred)), len(sizes) - 1)
    return found[:at] + found[at : at + 1] * (lacking + 1) + found[at + 1 :]


def _sizes_in(call: ast.Call) -> list[ast.expr]:
    """What a call draws with as its size or sizes; nothing where it is no such call or has none."""
    name, is_numpys = _name_of(call.func), _name_of(getattr(call.func, "value", None)) == "random"
    named = [word.value for word in call.keywords if word.arg in ("size", "sample_shape")]
    if name == "normal" or (is_numpys and name in SIZE_AT):
        return named or call.args[SIZE_AT[name] :][:1]
    if name not in _SIZED_CALLS | _SAMPLED:
        return []
    if name == "randint":
        return named or call.args[-1:]
    return named or call.args[: 1 if name == "full" else None]


def is_written_out(*ats: int | str) -> bool:
    """Whether this argument of the script's call, by one of its names or places, is none of the batch."""
    frame = scripts_frame(sys._getframe(1))
    call = call_in(frame)
    if not isinstance(call, ast.Call):
        return False
    given: dict[int | str | None, ast.expr] = dict(enumerate(call.args))
    given |= {word.arg: word.value for word in call.keywords}
    found = [given[at] for at in ats if at in given]
    return bool(found) and _is_fixed(found[0], frame, 0)


def _is_fixed(node: ast.AST, frame: FrameType | None, depth: int) -> bool:
    """Whether this is written out, or made of variables and attributes that are set to such sizes alone."""
    if frame is None or depth == _DEEPEST:
        return False

    def are(nodes: Iterable[ast.AST]) -> bool:
        return all(_is_fixed(one, frame, depth + 1) for one in nodes)

    match node:
        case ast.Constant():
            return True
        case (
            ast.Tuple(elts=parts)
            | ast.List(elts=parts)
            | ast.Call(func=ast.Name(id="int" | "range" | "list"), args=parts)
        ):
            return are(parts)
        case ast.Starred(value=part) | ast.UnaryOp(operand=part):
            return are([part])
        case ast.BinOp(left=one, right=other) | ast.IfExp(body=one, orelse=other):
            return are([one, other])
        case ast.Attribute(value=held_by, attr=name) if name not in _MEASURES:
            # as in args.n, or self.n where it is not set to a size of something
            is_tensor = isinstance(value_of(held_by, frame), torch.Tensor)
            set_to = _set_to(frame.f_code.co_filename, name, ast.Attribute)
            used = {_name_of(one) for value in set_to or () for one in ast.walk(value)}
            return not is_tensor and used.isdisjoint(_MEASURES)
        case ast.Name(id=name):
            set_to, given = _set_to(frame.f_code.co_filename, name, ast.Name), _given(frame, name)
            caller = scripts_frame(frame.f_back)
            is_known = set_to is not None and given is not None and bool(set_to or given)
            return (
                is_known
                and are(set_to or ())
                and all(_is_fixed(one, caller, depth + 1) for one in given or ())
            )
    return False


def is_over_samples(frame: FrameType | None, count: int) -> bool:
    """Whether a line of the script that runs is in a loop over so many samples."""
    while frame is not None:
        line = frame.f_lineno
        for lines, through in _loops_in(frame.f_code.co_filename):
            if line in lines and _rows(_measured(through, frame, 0)) == count:
                return True
        frame = scripts_frame(frame.f_back)
    return False


def distribution_drawn() -> Any:
    """The distribution of torch's that makes the draw; None if none does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not scripts_frame(frame):
        if isinstance(found := frame.f_locals.get("self"), torch.distributions.Distribution):
            return found
        frame = frame.f_back
    return None


def measured() -> Any:
    """Of which the script's draw has the length, or a size made of it, as x in randn(len(x), 3); None if not known."""
    frame = scripts_frame(sys._getframe(1))
    call = call_in(frame)
    sizes = _sizes_in(call) if isinstance(call, ast.Call) else []
    return _measured(sizes[0], frame, 0) if sizes else None


def number_in_line(mine: int) -> tuple[bool, int]:
    """Of a product or quotient in the script: whether one side is written out, and how the number of this rank's
    samples, `mine`, goes into its number: 1 as in len(x), -1 as in 1 / len(x), 0 where it does not or is not known."""
    frame = scripts_frame(sys._getframe(1))
    node = call_in(frame)
    found = (getattr(node, side, None) for side in ("right", "value", "left"))
    sides = [one for one in found if one is not None]
    return any(isinstance(one, ast.Constant) for one in sides), _first_power(sides, frame, mine, 0)


def _first_power(nodes: Iterable[ast.AST], frame: FrameType | None, mine: int, depth: int) -> int:
    """The first that is not 0."""
    for one in nodes:
        with suppress(LookupError):
            if power := _power(one, frame, mine, depth + 1):
                return power
    return 0


def _power(node: ast.AST, frame: FrameType | None, mine: int, depth: int) -> int:
    """The same of an expression of numbers; LookupError of others, and of those with the number of ranks."""
    if frame is None or depth == _DEEPEST:
        return 0
    match node:
        case ast.BinOp(left=one, op=op, right=other):
            before, behind = (_power(side, frame, mine, depth + 1) for side in (one, other))
            sign = {ast.Mult: 1, ast.Div: -1}.get(type(op))
            return before + sign * behind if sign else before or behind
        case ast.Call(func=ast.Name(id="float" | "int" | "max" | "min"), args=parts):
            return _first_power(parts, frame, mine, depth)
        case (
            ast.Call(func=ast.Name(id="len" | "sum") | ast.Attribute(attr="size" | "numel"))
            | ast.Subscript(value=ast.Attribute(attr="shape"))
        ):
            return int(_rows(_measured(node, frame, depth)) == mine)
        case ast.Name(id=name) if name != "world_size" and isinstance(value_of(node, frame), int | float):
            found = _first_power(_set_to(frame.f_code.co_filename, name, ast.Name) or (), frame, mine, depth)
            return found or _first_power(_given(frame, name) or (), scripts_frame(frame.f_back), mine, depth)
        case ast.Attribute(attr=name) if name != "size" and isinstance(value_of(node, frame), int | float):
            return 0
        case ast.Constant():
            return 0
    raise LookupError


def _measured(node: ast.AST, frame: FrameType | None, depth: int) -> Any:
    """The tensor, array or list of such that this has the length of, or goes through."""
    if frame is None or depth == _DEEPEST:
        return None

    def first(nodes: Iterable[ast.AST], at: FrameType | None = frame) -> Any:
        found = (_measured(one, at, depth + 1) for one in nodes)
        return next((one for one in found if one is not None), None)

    caller, value = scripts_frame(frame.f_back), value_of(node, frame)
    if value is None and caller is not None and frame.f_code.co_name.startswith("<"):
        value = value_of(node, caller)  # what a comprehension goes through is looked up around it
    if _rows(value) >= 0:
        return value
    match node:
        case ast.Call(
            func=ast.Name(id="range" | "zip" | "enumerate" | "reversed" | "list" | "len"), args=parts
        ):
            return first(parts)
        case (
            ast.Subscript(value=ast.Attribute(value=part, attr="shape"), slice=ast.Constant(0))
            | ast.Call(func=ast.Attribute(value=part, attr="size" | "numel"), args=[] | [ast.Constant(0)])
            | ast.Attribute(value=part, attr="shape")
            | ast.Call(args=[part], keywords=[])
            | ast.GeneratorExp(generators=[ast.comprehension(iter=part), *_])
            | ast.Tuple(elts=[part, *_])
        ):
            return first([part])
        case ast.Starred(value=part):
            of = first([part])
            return of[0] if type(of) in (list, tuple) else of  # as in zip(*batch)
        case ast.BinOp(left=one, right=other):
            return first([one, other])
        case ast.Name(id=name) if type(value) in (int, tuple, torch.Size):
            found = first(_set_to(frame.f_code.co_filename, name, ast.Name) or ())
            return first(_given(frame, name) or (), caller) if found is None else found
    return None


def _rows(value: Any) -> int:
    """The rows of a tensor, array or list of such or of dicts of them; -1 of anything else."""
    is_listed = type(value) in (list, tuple)
    one = next(iter(value), None) if is_listed else value
    one = next(iter(one.values()), None) if is_listed and type(one) is dict else one
    if not isinstance(one, torch.Tensor | np.ndarray) or isinstance(one, torch.nn.Parameter):
        return -1
    return len(value) if is_listed or value.ndim else -1


def _given(frame: FrameType, name: str) -> list[ast.expr] | None:
    """What the call of this function gives for a parameter; nothing for other variables, None where not known."""
    code = frame.f_code
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if name not in parameters:
        return []
    call = call_in(scripts_frame(frame.f_back))
    if not isinstance(call, ast.Call) or any(isinstance(one, ast.Starred) for one in call.args):
        return None
    called = _name_of(call.func)
    if called != code.co_name and code.co_name not in ("forward", "__call__", "__init__"):
        return None
    is_method = called != code.co_name or code.co_varnames[0] == "self"
    at = parameters.index(name) - is_method
    given = [word.value for word in call.keywords if word.arg in (name, None)] or call.args[at : at + 1]
    return given or [ast.Constant(None)]  # a default is written out


@functools.cache
def _loops_in(file: str) -> list[tuple[range, ast.expr]]:
    """The lines of each loop and comprehension, and what it goes through."""
    tree: Any = ast.walk(_tree(file))
    return [(range(loop.lineno, loop.end_lineno + 1), one) for loop in tree for one in _gone_through(loop)]


def _gone_through(loop: ast.AST) -> list[ast.expr]:
    match loop:
        case ast.For(iter=one):
            return [one]
        case ast.While(test=ast.Compare(comparators=of)) | ast.Call(func=ast.Name(id="map"), args=[_, *of]):
            return of
    return [one.iter for one in getattr(loop, "generators", [])]


@functools.cache
def _set_to(file: str, name: str, kind: type[ast.Name] | type[ast.Attribute]) -> list[ast.expr] | None:
    """What variables, or attributes, of this name are set to in this file; None where that is not known of each."""
    nodes = list(ast.walk(_tree(file)))
    values = [
        value
        for one in nodes
        for target, value in _settings(one)
        if isinstance(target, kind) and _name_of(target) == name
    ]
    stores = (one for one in nodes if isinstance(one, kind) and isinstance(one.ctx, ast.Store))
    is_all = len(values) == sum(_name_of(one) == name for one in stores)
    return [one for one in values if one is not None] if is_all else None


def _settings(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """What a statement sets, and to what; of what it unpacks, each to its part."""
    if isinstance(node, ast.For):
        yield node.target, node.iter
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
        yield node.target, node.value
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield target, node.value
            parts = target.elts if isinstance(target, _Sizes) else []
            values = node.value.elts if isinstance(node.value, _Sizes) else []
            for at, part in enumerate(parts if ast.Starred not in map(type, [*parts, *values]) else ()):
                yield part, values[at] if values else ast.Subscript(node.value, ast.Constant(at))


def _name_of(node: ast.AST | None) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


@functools.cache
def _tree(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])
