"""Every small edit of a Python file that its tests ought to notice: one node changed, the rest as written."""

import ast
import copy
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_COMPARISONS: dict[type[ast.cmpop], list[type[ast.cmpop]]] = {
    ast.Lt: [ast.LtE, ast.GtE],
    ast.LtE: [ast.Lt, ast.Gt],
    ast.Gt: [ast.GtE, ast.LtE],
    ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
    ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
# Positions inside an f-string are wrong before Python 3.12; a type is not run.
_SKIPPED = ast.JoinedStr


@dataclass(frozen=True)
class Edit:
    """A file with one node changed; `removed` and `added` are its first lines that differ, stripped."""

    path: Path
    line: int
    source: str
    removed: str
    added: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}\n- {self.removed}\n+ {self.added}"


def edits(path: Path, source: str) -> Iterator[Edit]:
    """All edits of a file, in the order of its nodes."""
    seen = {source}
    for node in _executed(ast.parse(source)):
        for other in _changed(node):
            changed = _replaced(source, node, other)
            if changed not in seen:
                seen.add(changed)
                yield _described(path, source, changed)


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run, without types, f-strings, type-checking imports and module docstrings."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "type_params"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or isinstance(node, _SKIPPED):
                continue
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                continue
            if hasattr(node, "lineno"):
                yield node
            yield from _executed(node)


def _changed(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of a node."""
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _OPERATORS:
        yield _with(node, op=_OPERATORS[type(node.op)]())
    elif isinstance(node, ast.If | ast.IfExp):
        yield _with(node, test=ast.Constant(False))
        yield _with(node, test=ast.Constant(True))
    else:
        yield from _changed_expression(node) if isinstance(node, ast.expr) else _changed_statement(node)


def _changed_expression(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.Compare(ops=[operator]):
            for kind in _COMPARISONS[type(operator)]:
                yield _with(node, ops=[kind()])
        case ast.BoolOp(op=operator):
            yield _with(node, op=ast.Or() if isinstance(operator, ast.And) else ast.And())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)


def _changed_statement(node: ast.AST) -> Iterator[ast.stmt]:
    match node:
        case ast.Expr(value=ast.Call()) | ast.Raise():
            yield ast.Pass()
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield ast.Return(ast.Constant(None))
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()


def _with(node: Any, **fields: object) -> Any:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _replaced(source: str, node: ast.AST, other: ast.AST) -> str:
    """The source with another node's text in the place of a node's."""
    if isinstance(node, ast.If) and isinstance(other, ast.If):
        # Only the condition: the branches stay as written.
        node, other = node.test, other.test
    lines = source.splitlines(keepends=True)
    begin, end = (
        sum(len(line) for line in lines[: number - 1]) + len(lines[number - 1].encode()[:column].decode())
        for number, column in ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
    )
    text = ast.unparse(other)
    whole = isinstance(other, ast.stmt | ast.Constant | ast.Name)
    return source[:begin] + (text if whole else f"({text})") + source[end:]


def _described(path: Path, source: str, changed: str) -> Edit:
    before, after = source.splitlines(), changed.splitlines()
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    _, first, last, other_first, other_last = next(block for block in blocks if block[0] != "equal")
    removed = " ".join(line.strip() for line in before[first:last])
    added = " ".join(line.strip() for line in after[other_first:other_last])
    return Edit(path, first + 1, changed, removed, added)
