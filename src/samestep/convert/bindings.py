"""Gives names, attributes and elements their values."""

import ast

from samestep.convert.frames import Frames
from samestep.convert.values import ROWS, Kind, Scope, Value, join


class Bindings(Frames):
    """What assignments, loops and calls bind."""

    def value(self, node: ast.AST | None) -> Value:
        raise NotImplementedError

    def bind(self, target: ast.AST, value: Value) -> None:
        """Let a target have this value."""
        if isinstance(target, ast.Starred):
            target = target.value
        if isinstance(target, ast.Tuple | ast.List):
            for at, part in enumerate(target.elts):
                self.bind(part, self._part_of(value, at, len(target.elts)))
            return
        self._bind_key(target, value)
        scope, name = self.place_of(target)
        is_element = isinstance(target, ast.Subscript) and not isinstance(target.slice, ast.Constant)
        if is_element:
            scope, held = self.place_of(target.value)  # type: ignore[attr-defined]
            old = scope.find(held) or Value()
            if value.kind == "function":
                value = Value("list", (value, *(old.of if old.kind == "list" else ())))
            if value.kind in ROWS:
                value = Value(Kind.OTHER, "is filled by this process's samples")
            scope.names[held] = value if value.kind == "list" else join(old, value)
            return
        for known in [known for known in scope.names if known.startswith((f"{name}.", f"{name}["))]:
            del scope.names[known]
        scope.names[name] = value
        scope.since[name] = tuple(loop.number for loop in self.loops)

    def _bind_key(self, target: ast.AST, value: Value) -> None:
        """A dict of a share's values, to which a key is added."""
        if not isinstance(target, ast.Subscript) or not isinstance(target.slice, ast.Constant):
            return
        scope, name = self.place_of(target.value)
        held = scope.names.get(name, Value())
        if held.kind in ("dict", Kind.BATCH):
            known = held.of if held.kind == "dict" else {None: Value(Kind.ROWS)}
            scope.names[name] = Value("dict", {**known, target.slice.value: value})

    def place_of(self, target: ast.AST) -> tuple[Scope, str]:
        """The scope that keeps a target's value, and its name there."""
        if isinstance(target, ast.Attribute):
            base = self.value(target.value)
            if base.kind == "instance":
                return base.of.scope, target.attr
        name = ast.unparse(target)
        if name in self.frame.scope.elsewhere:
            return self.frame.scope.elsewhere[name], name
        scope: Scope | None = self.frame.scope
        while scope is not None and name not in scope.names and not isinstance(target, ast.Name):
            scope = scope.parent
        return scope or self.frame.scope, name

    def _part_of(self, value: Value, at: int, count: int) -> Value:
        if value.kind == "tuple":
            return value.of[at] if len(value.of) == count else join(*value.of)
        if value.kind == Kind.SHAPE:
            return Value(Kind.COUNT, self.batches) if at == 0 else Value()
        if value.kind == Kind.BATCH:
            return Value(Kind.ROWS)
        if value.kind == "zip" and value.is_shared:
            return Value(Kind.OTHER, "is taken apart by zip")
        return join(*value.of) if value.kind == "list" else value
