"""Finds loops that use a batch on the host before they move it, or without moving it.

Example: `for rows, lengths in train: packed = pack_padded_sequence(rows.to(device), lengths)` needs the lengths on the
CPU. samestep.loader would bring them to the device, so such a script gets `on_device=False` and moves as it did.
"""

import ast
import re
from collections.abc import Iterable

from samestep.convert.project import Findings
from samestep.convert.source import Edit, Source

_MOVES = {"to", "cuda"}
_ANYWHERE = _MOVES | {"size", "shape", "dim", "ndim", "dtype", "keys", "items", "values"}


def leave_on_host(findings: Findings, sources: Iterable[Source]) -> None:
    """Let the loaders leave batches where they are, if some loop moves its batches and some loop uses one unmoved."""
    loops = [_Moves(node) for source in sources for node in _loops(findings, source)]
    if not (any(loop.moves for loop in loops) and any(loop.uses for loop in loops)):
        return
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and source.replaced(node.func, "samestep.loader") in findings.edits:
                findings.edit(_option(source, node))


def _loops(findings: Findings, source: Source) -> list[ast.For]:
    loops = (node for node in ast.walk(source.tree) if isinstance(node, ast.For))
    return [loop for loop in loops if findings.over.get(source.span(loop)) == "batches"]


def _option(source: Source, node: ast.Call) -> Edit:
    end = source.end(node) - 1
    last = max(map(source.end, (*node.args, *(option.value for option in node.keywords))))
    behind = re.sub(r"#.*", "", source.data[last:end].decode())
    return Edit(source, end, end, "on_device=False" if "," in behind else ", on_device=False")


class _Moves:
    """Whether a loop over batches moves them, and whether it uses one that is on the host."""

    def __init__(self, loop: ast.For) -> None:
        self.moves = self.uses = False
        target = loop.target
        if "enumerate(" in ast.unparse(loop.iter) and isinstance(target, ast.Tuple):
            target = target.elts[-1]
        self._on_host = _names(target)
        self._statements(loop.body)

    def _statements(self, body: Iterable[ast.stmt]) -> None:
        for statement in body:
            inner = [
                part for name in ("body", "orelse", "finalbody") for part in getattr(statement, name, ())
            ]
            self._uses_in(statement, {id(part) for part in inner})
            self._statements(inner)

    def _uses_in(self, statement: ast.stmt, skipped: set[int]) -> None:
        """Look at a statement without its body."""
        if isinstance(statement, ast.Assign) and self._is_batch(statement.value):
            self._on_host |= {name for target in statement.targets for name in _names(target)}
            return
        self._look(statement, skipped)
        if not isinstance(statement, ast.Assign):
            return
        if any(getattr(part, "attr", "") in _MOVES for part in ast.walk(statement.value)):
            self._on_host -= {name for target in statement.targets for name in _names(target)}

    def _look(self, node: ast.AST, skipped: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        match node:
            case ast.Attribute(value=value, attr=attr) if self._is_batch(value) and attr in _ANYWHERE:
                self.moves |= attr in _MOVES
                return
            case ast.Call(func=ast.Name(id="len"), args=[value]) if self._is_batch(value):
                return
            case ast.ListComp(elt=element) | ast.GeneratorExp(elt=element) | ast.DictComp(value=element):
                generator = node.generators[0]
                if _names(generator.iter) & self._on_host:
                    inner = _names(generator.target)
                    self._on_host |= inner
                    self._look(element)
                    self._on_host -= inner
                    return
            case ast.Name(ctx=ast.Load()) if self._is_batch(node):
                self.uses = True
        for child in ast.iter_child_nodes(node):
            if id(child) not in skipped:
                self._look(child)

    def _is_batch(self, node: ast.AST | None) -> bool:
        """Whether it is a batch, or a part of one such as `batch["image"]`."""
        while isinstance(node, ast.Subscript):
            node = node.value
        return isinstance(node, ast.Name) and node.id in self._on_host


def _names(target: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
