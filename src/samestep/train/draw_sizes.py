"""Whether the sizes of a random draw are of the batch, or are set to numbers that the script writes out.

A number of samples to show, of particles or of features may be as large as this rank's share by chance. Read from the
script's text; where that does not tell, a size may be of the batch.
"""

import ast
import functools
import linecache
import sys
from collections.abc import Iterable
from types import FrameType

import torch

from samestep.train.draw_lines import call_in, scripts_frame, value_of

_SAMPLED = {"sample", "rsample"}
_SIZED_CALLS = {"rand", "randn", "randint", "normal", "empty", "zeros", "ones", "full", "randperm"}
_MEASURES = {"shape", "size", "len"}
_DEEPEST = 8
_Sizes = ast.Tuple | ast.List


def fixed_sizes(count: int) -> list[bool]:
    """Of each of `count` sizes that the script's line draws with, whether it is none of the batch, as in rand(1, n).

    There may be more where other arguments stand before the sizes.
    """
    frame = scripts_frame(sys._getframe(1))
    call = call_in(frame)
    # in torch.empty(3).normal_() the size stands in the first call
    while isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
        if not isinstance(call.func.value, ast.Call):
            break
        call = call.func.value
    if not isinstance(call, ast.Call) or _name_of(call.func) not in _SIZED_CALLS | _SAMPLED:
        return [False] * count
    given = [*call.args, *(word.value for word in call.keywords if word.arg in ("size", "sample_shape"))]
    sizes = list(next((one.elts for one in given if isinstance(one, _Sizes)), given))
    # *x.shape stands for several sizes, and behind the shape of samples are those of their distribution
    found, lacking = [_is_fixed(one, frame, 0) for one in sizes], count - len(sizes)
    if _name_of(call.func) in _SAMPLED:
        return found + [False] * lacking
    at = next((at for at, one in enumerate(sizes) if isinstance(one, ast.Starred)), len(sizes) - 1)
    return found[:at] + found[at : at + 1] * (lacking + 1) + found[at + 1 :]


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
            | ast.Call(func=ast.Name(id="int" | "range"), args=parts)
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
def _set_to(file: str, name: str, kind: type[ast.Name] | type[ast.Attribute]) -> list[ast.expr] | None:
    """What variables, or attributes, of this name are set to in this file; None where that is not known of each."""
    nodes = list(ast.walk(_tree(file)))
    values = [
        one.iter if isinstance(one, ast.For) else one.value
        for one in nodes
        if isinstance(one, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr | ast.For)
        for target in getattr(one, "targets", [getattr(one, "target", None)])
        if isinstance(target, kind) and _name_of(target) == name
    ]
    stores = (one for one in nodes if isinstance(one, kind) and isinstance(one.ctx, ast.Store))
    is_all = len(values) == sum(_name_of(one) == name for one in stores)
    return [one for one in values if one is not None] if is_all else None


def _name_of(node: ast.AST | None) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


@functools.cache
def _tree(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])
