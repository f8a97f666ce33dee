"""Reads from the script's text whether a size of a random draw is the batch's or is written out.

A number of features may equal this rank's number of samples by chance. Examples: in `randn(len(x), 8)` the second size
is fixed, and so it is in `randn(len(x), n)` where the script sets n = 8. Where the text does not tell, a size counts as
one that may be the batch's.
"""

import ast
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch

from samestep.train.script.lines import call_in, scripts_call, scripts_frame, tree_of, value_of

_SAMPLED = {"sample", "rsample"}
_SIZED_CALLS = {
    *("rand", "randn", "randint", "normal", "empty", "zeros", "ones", "full"),
    *("Tensor", "FloatTensor", "DoubleTensor", "new", "new_empty", "new_zeros", "new_ones"),
}
# for each of NumPy's draws the position of `size`, read from the signature in the first line of its docstring
SIZE_AT = {"ranf": 0, "sample": 0} | {
    name: names.index("size")
    for name in np.random.__all__
    if "size" in (names := re.findall(r"[(,] ?(\w+)", str(getattr(np.random, name).__doc__).split(")")[0]))
}
_MEASURES = {"shape", "size", "len"}
_DEEPEST = 8
_Sizes = ast.Tuple | ast.List
_Value = tuple[ast.AST, FrameType | None]  # an expression, and the frame in which it is evaluated


def fixed_sizes(count: int) -> list[bool]:
    """For each of `count` sizes of the script's draw, whether it is fixed, and not the batch's."""
    # The list may be longer, where other arguments stand before the sizes. A distribution's event dimensions are fixed.
    event_dims = len(getattr(distribution_drawn(), "event_shape", ()))
    frame, call = _scripts_draw()
    if not isinstance(call, ast.Call) or not (size_args := _sizes_in(call)):
        return [index >= count - event_dims for index in range(count)]
    sizes = list(next((size.elts for size in size_args if isinstance(size, _Sizes)), size_args))
    are_fixed, missing = [_is_fixed(size, frame, 0) for size in sizes], count - len(sizes)
    if _name_of(call.func) in _SAMPLED:  # sample_shape is followed by the distribution's own sizes
        return are_fixed + [False] * missing
    # *x.shape stands for several sizes
    at = next((at for at, size in enumerate(sizes) if isinstance(size, ast.Starred)), len(sizes) - 1)
    return are_fixed[:at] + are_fixed[at : at + 1] * (missing + 1) + are_fixed[at + 1 :]


def _scripts_draw() -> tuple[FrameType | None, ast.AST | None]:
    """The script's call that has the sizes of a draw, and its frame: of torch.empty(3).normal_() the first call."""
    frame, call = scripts_call()
    while isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        if not isinstance(call.func.value, ast.Call) or _sizes_in(call):
            break
        call = call.func.value
    return frame, call


def _sizes_in(call: ast.Call) -> list[ast.expr]:
    """The arguments that are a draw's size or sizes; none for other calls."""
    name, is_numpys = _name_of(call.func), _name_of(getattr(call.func, "value", None)) == "random"
    by_keyword = [keyword.value for keyword in call.keywords if keyword.arg in ("size", "sample_shape")]
    if name == "normal" or (is_numpys and name in SIZE_AT):
        return by_keyword or call.args[SIZE_AT[name] :][:1]
    if name not in _SIZED_CALLS | _SAMPLED:
        return []
    if name == "randint":
        return by_keyword or call.args[-1:]
    return by_keyword or call.args[: 1 if name == "full" else None]


def is_written_out(*keys: int | str) -> bool:
    """Whether an argument of the script's call, given by its names or positions, is fixed, and not the batch's."""
    frame, call = scripts_call()
    if not isinstance(call, ast.Call):
        return False
    by_key: dict[int | str | None, ast.expr] = dict(enumerate(call.args))
    by_key |= {keyword.arg: keyword.value for keyword in call.keywords}
    arguments = [by_key[key] for key in keys if key in by_key]
    return bool(arguments) and _is_fixed(arguments[0], frame, 0)


def _is_fixed(node: ast.AST, frame: FrameType | None, depth: int) -> bool:
    """Whether an expression is a constant, or is made of variables and attributes that are only set to such."""
    if frame is None or depth == _DEEPEST:
        return False

    def are_fixed(nodes: Iterable[ast.AST]) -> bool:
        return all(_is_fixed(part, frame, depth + 1) for part in nodes)

    match node:
        case ast.Constant():
            return True
        case (
            ast.Tuple(elts=parts)
            | ast.List(elts=parts)
            | ast.Call(func=ast.Name(id="int" | "range" | "list"), args=parts)
        ):
            return are_fixed(parts)
        case ast.Starred(value=part) | ast.UnaryOp(operand=part):
            return are_fixed([part])
        case ast.BinOp(left=left, right=right) | ast.IfExp(body=left, orelse=right):
            return are_fixed([left, right])
        case ast.Attribute(value=holder, attr=name) if name not in _MEASURES:
            # args.n, or self.n where no assignment to an n measures a tensor
            is_tensor = isinstance(value_of(holder, frame), torch.Tensor)
            set_to = assigned_to(frame.f_code.co_filename, name, ast.Attribute)
            used = {_name_of(part) for value in set_to or () for part in ast.walk(value)}
            return not is_tensor and used.isdisjoint(_MEASURES)
        case ast.Name(id=name):
            given, is_all = _set_to(name, frame)
            return is_all and bool(given) and all(_is_fixed(value, at, depth + 1) for value, at in given)
    return False


def is_over_samples(
    frame: FrameType | None, count: int, may_be_samples: Callable[[Any], bool] = lambda rows: True
) -> bool:
    """Whether this frame, or a caller of it in the script, is in a loop over `count` samples."""
    while frame is not None:
        line = frame.f_lineno
        for lines, iterable in _loops_in(frame.f_code.co_filename):
            rows = _source_of_length(iterable, frame, 0) if line in lines else None
            if _rows(rows) == count and may_be_samples(rows):
                return True
        frame = scripts_frame(frame.f_back)
    return False


def distribution_drawn() -> Any:
    """The torch distribution whose method makes the draw, None where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not scripts_frame(frame):
        if isinstance(found := frame.f_locals.get("self"), torch.distributions.Distribution):
            return found
        frame = frame.f_back
    return None


def measured() -> Any:
    """The tensor that the first size of the script's draw measures, as x in randn(len(x), 3); None if not known."""
    frame, call = _scripts_draw()
    sizes = _sizes_in(call) if isinstance(call, ast.Call) else []
    return _source_of_length(sizes[0], frame, 0) if sizes else None


def copied() -> Any:
    """The tensor whose sizes or number of elements the script's draw has: x in randn(x.shape) or rand(x.numel())."""
    frame, call = _scripts_draw()
    match _sizes_in(call) if isinstance(call, ast.Call) else []:
        case [
            ast.Attribute(attr="shape", value=tensor)
            | ast.Call(func=ast.Attribute(attr="size" | "numel", value=tensor), args=[])
        ]:
            return _source_of_length(tensor, frame, 0)
    return None


def number_in_line(mine: int) -> tuple[bool, int]:
    """Of the script's product or quotient: whether a side is a constant, and the power of `mine` in its number."""
    # `mine` is the number of this rank's samples. The power is 1 for len(x), -1 for 1 / len(x), and 0 where the number
    # does not depend on it or is not known.
    frame, node = scripts_call()
    given = (getattr(node, side, None) for side in ("right", "value", "left"))
    sides = [side for side in given if side is not None]
    power = _first_power([(side, frame) for side in sides], mine, 0)
    return any(isinstance(side, ast.Constant) for side in sides), power


def _first_power(values: Iterable[_Value], mine: int, depth: int) -> int:
    """The first power of `mine` in these expressions that is not 0."""
    for node, frame in values:
        with suppress(LookupError):
            if power := _power(node, frame, mine, depth + 1):
                return power
    return 0


def _power(node: ast.AST, frame: FrameType | None, mine: int, depth: int) -> int:
    """The power of `mine` in an expression; LookupError if it is no number, or depends on the number of ranks."""
    if frame is None or depth == _DEEPEST:
        return 0
    match node:
        case ast.BinOp(left=left, op=op, right=right):
            first, second = (_power(side, frame, mine, depth + 1) for side in (left, right))
            sign = {ast.Mult: 1, ast.Div: -1}.get(type(op))
            return first + sign * second if sign else first or second
        case ast.Call(func=ast.Name(id="float" | "int" | "max" | "min"), args=parts):
            return _first_power([(part, frame) for part in parts], mine, depth)
        case (
            ast.Call(func=ast.Name(id="len" | "sum") | ast.Attribute(attr="size" | "numel"))
            | ast.Subscript(value=ast.Attribute(attr="shape"))
        ):
            source = _source_of_length(node, frame, depth)
            return int(_rows(source) == mine and not _has_all_samples(source, mine))
        case ast.Name(id=name) if name != "world_size" and isinstance(value_of(node, frame), int | float):
            return _first_power(_set_to(name, frame)[0], mine, depth)
        case ast.Attribute(attr=name) if name != "size" and isinstance(value_of(node, frame), int | float):
            return 0
        case ast.Constant():
            return 0
    raise LookupError


def length_of(node: ast.AST, frame: FrameType | None) -> int:
    """The number of rows of what an expression measures or iterates, -1 where that is not known."""
    return _rows(_source_of_length(node, frame, 0))


def _source_of_length(node: ast.AST, frame: FrameType | None, depth: int) -> Any:
    """The tensor, array or list of them whose length an expression is, or whose items it yields."""
    if frame is None or depth == _DEEPEST:
        return None

    def first(values: Iterable[_Value]) -> Any:
        sources = (_source_of_length(value, at, depth + 1) for value, at in values)
        return next((source for source in sources if source is not None), None)

    caller, value = scripts_frame(frame.f_back), value_of(node, frame)
    if value is None and caller is not None and frame.f_code.co_name.startswith("<"):
        value = value_of(node, caller)  # a comprehension's first iterable belongs to the frame around it
    if _rows(value) >= 0:
        return value
    match node:
        case ast.Call(
            func=ast.Name(id="range" | "zip" | "enumerate" | "reversed" | "list" | "len"), args=parts
        ):
            return first((part, frame) for part in parts)
        case (
            ast.Subscript(value=ast.Attribute(value=part, attr="shape"), slice=ast.Constant(0))
            | ast.Call(func=ast.Attribute(value=part, attr="size" | "numel"), args=[] | [ast.Constant(0)])
            | ast.Attribute(value=part, attr="shape")
            | ast.Call(args=[part], keywords=[])
            | ast.GeneratorExp(generators=[ast.comprehension(iter=part), *_])
            | ast.Tuple(elts=[part, *_])
        ):
            return first([(part, frame)])
        case ast.Starred(value=part):
            source = first([(part, frame)])
            return source[0] if type(source) in (list, tuple) else source  # zip(*batch) iterates the items
        case ast.BinOp(left=left, right=right):
            return first([(left, frame), (right, frame)])
        case ast.Name(id=name) if type(value) in (int, tuple, torch.Size):
            return first(_set_to(name, frame)[0])
    return None


def _rows(value: Any) -> int:
    """The length of a tensor, an array, or a list of them or of dicts of them; -1 for anything else."""
    is_listed = type(value) in (list, tuple)
    item = next(iter(value), None) if is_listed else value
    item = next(iter(item.values()), None) if is_listed and type(item) is dict else item
    if not isinstance(item, torch.Tensor | np.ndarray) or isinstance(item, torch.nn.Parameter):
        return -1
    return len(value) if is_listed or value.ndim else -1


def _has_all_samples(value: Any, mine: int) -> bool:
    """Whether this is a list of tensors that each have all samples, such as the outputs of several heads."""
    is_list = isinstance(value, list | tuple)
    return is_list and all(isinstance(part, torch.Tensor) and part.shape[:1] == (mine,) for part in value)


def _set_to(name: str, frame: FrameType) -> tuple[list[_Value], bool]:
    """What the script sets a variable to, by assignments and then by calls, and whether that is all."""
    code, caller = frame.f_code, scripts_frame(frame.f_back)
    scope = _function_of(code) if name in code.co_varnames + code.co_cellvars else None
    values, arguments = assigned_to(code.co_filename, name, ast.Name, scope), _arguments_for(frame, name)
    given: list[_Value] = [
        *((value, frame) for value in values or ()),
        *((arg, caller) for arg in arguments or ()),
    ]
    return given, values is not None and arguments is not None


def _arguments_for(frame: FrameType, name: str) -> list[ast.expr] | None:
    """What the caller passes for the parameter `name`; nothing for other variables, None where that is not known."""
    code = frame.f_code
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if name not in parameters:
        return []
    call = call_in(scripts_frame(frame.f_back))
    if not isinstance(call, ast.Call) or any(isinstance(arg, ast.Starred) for arg in call.args):
        return None
    called = _name_of(call.func)
    if called != code.co_name and code.co_name not in ("forward", "__call__", "__init__", "<lambda>"):
        return None
    is_method = code.co_name != "<lambda>" and (called != code.co_name or code.co_varnames[0] == "self")
    at = parameters.index(name) - is_method
    by_keyword = [keyword.value for keyword in call.keywords if keyword.arg in (name, None)]
    return by_keyword or call.args[at : at + 1] or [ast.Constant(None)]  # a default counts as written out


@functools.cache
def _loops_in(file: str) -> list[tuple[range, ast.expr]]:
    """The lines of each loop and comprehension in a file, and what it iterates."""
    nodes: Any = ast.walk(tree_of(file))
    return [
        (range(node.lineno, node.end_lineno + 1), iterable)
        for node in nodes
        for iterable in _iterables_of(node)
    ]


def _iterables_of(loop: ast.AST) -> list[ast.expr]:
    match loop:
        case ast.For(iter=iterable):
            return [iterable]
        case ast.While(test=ast.Compare(comparators=some)) | ast.Call(func=ast.Name("map"), args=[_, *some]):
            return some
    return [generator.iter for generator in getattr(loop, "generators", [])]


@functools.cache
def _function_of(code: CodeType) -> ast.AST | None:
    """The function in its file's text; None for a module, a class and a comprehension."""
    for node in ast.walk(tree_of(code.co_filename)):
        if (
            isinstance(node, ast.FunctionDef | ast.Lambda)
            and getattr(node, "name", "<lambda>") == code.co_name
        ):
            marks = getattr(node, "decorator_list", [])
            if min(part.lineno for part in (node, *marks)) == code.co_firstlineno:
                return node
    return None


@functools.cache
def assigned_to(
    file: str, name: str, kind: type[ast.Name] | type[ast.Attribute], scope: ast.AST | None = None
) -> list[ast.expr] | None:
    """All values that a file, or this function in it, assigns to variables, or attributes, of this name."""
    # None where some are not known
    nodes = list(ast.walk(scope or tree_of(file)))
    values = [
        value
        for node in nodes
        for target, value in _assignments(node)
        if isinstance(target, kind) and _name_of(target) == name
    ]
    stores = (node for node in nodes if isinstance(node, kind) and isinstance(node.ctx, ast.Store))
    is_all = len(values) == sum(_name_of(store) == name for store in stores)
    return [value for value in values if value is not None] if is_all else None


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """The targets of a statement with their values; each target of an unpacking with its part of the value."""
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
