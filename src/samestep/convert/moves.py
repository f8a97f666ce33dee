"""Finds loops that use a batch on the host before they move it, or without moving it.

Example: `for rows, lengths in train: packed = pack_padded_sequence(rows.to(device), lengths)` needs the lengths on the
CPU. samestep.loader would bring them to the device, so such a script gets `on_device=False` and moves as it did.
"""

import ast
from collections.abc import Iterable

from samestep.convert.project import Findings
from samestep.convert.source import Source

_MOVES = {"to", "cuda"}
_ANYWHERE = _MOVES | {"size", "shape", "dim", "ndim", "dtype", "keys", "items", "values"}


def leave_on_host(findings: Findings, sources: Iterable[Source]) -> None:
    """Let the loaders leave batches where they are, if some loop moves its batches and some loop uses one unmoved."""
    nodes = [(source, node) for source in sources for node in ast.walk(source.tree)]
    loops = [
        _Moves(node)
        for source, node in nodes
        if isinstance(node, ast.For) and findings.over.get(source.span(node)) == "batches"
    ]
    if any(loop.moves for loop in loops) and any(loop.uses for loop in loops):
        for source, node in nodes:
            if isinstance(node, ast.Call) and source.replaced(node.func, "samestep.loader") in findings.edits:
                findings.edit(source.with_option(node, "on_device=False"))


class _Moves(ast.NodeVisitor):
    """Whether a loop over batches moves them, and whether it uses one that is on the host."""

    def __init__(self, loop: ast.For) -> None:
        self.moves = self.uses = False
        target = loop.target
        if "enumerate(" in ast.unparse(loop.iter) and isinstance(target, ast.Tuple):
            target = target.elts[-1]
        self._on_host = _names(target)
        for statement in loop.body:
            self.visit(statement)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = {name for target in node.targets for name in _names(target)}
        if self._is_batch(node.value):
            self._on_host |= names
            return
        self.generic_visit(node)
        if any(getattr(part, "attr", "") in _MOVES for part in ast.walk(node.value)):
            self._on_host -= names

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if self._is_batch(node.value) and node.attr in _ANYWHERE:
            self.moves |= node.attr in _MOVES
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        match node:
            case ast.Call(func=ast.Name(id="len"), args=[value]) if self._is_batch(value):
                return
        self.generic_visit(node)

    def visit_ListComp(self, node: ast.ListComp | ast.GeneratorExp | ast.DictComp) -> None:
        generator, inner = node.generators[0], _names(node.generators[0].target)
        if not _names(generator.iter) & self._on_host:
            self.generic_visit(node)
            return
        self._on_host |= inner
        self.visit(node.value if isinstance(node, ast.DictComp) else node.elt)
        self._on_host -= inner

    visit_GeneratorExp = visit_DictComp = visit_ListComp

    def visit_Name(self, node: ast.Name) -> None:
        self.uses |= isinstance(node.ctx, ast.Load) and self._is_batch(node)

    def _is_batch(self, node: ast.AST) -> bool:
        """Whether it is a batch, or a part of one such as `batch["image"]`."""
        while isinstance(node, ast.Subscript):
            node = node.value
        return isinstance(node, ast.Name) and node.id in self._on_host


def _names(target: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
