"""What names, attributes and elements are bound to, and where that is kept."""

import ast
from dataclasses import replace

from samestep.convert.project import Scope
from samestep.convert.totals import Totals
from samestep.convert.values import ROWS, Kind, Value, join, other


class Names(Totals):
    """A place is a scope and a name in it; `a.b` and `a[0]` are names of the scope that has `a`."""

    def bind(self, target: ast.AST, value: Value, made: ast.expr | None = None) -> None:
        """Let a target have this value."""
        target = target.value if isinstance(target, ast.Starred) else target
        if isinstance(target, ast.Tuple | ast.List):
            for at, part in enumerate(target.elts):
                self.bind(part, self.part_of(value, at, len(target.elts)))
            return
        scope, name = self.place_of(target)
        if isinstance(target, ast.Subscript):
            holder, held = self.place_of(target.value)
            old = holder.find(held) or Value()
            if not isinstance(target.slice, ast.Constant):
                filled = self._filled(old, value, self.value(target.slice))
                holder.names[held] = replace(filled, since=old.since)
                return
            if old.kind in ("dict", Kind.BATCH):
                known = old.of if old.kind == "dict" else {None: Value(Kind.ROWS)}
                holder.names[held] = Value("dict", {**known, target.slice.value: value}, since=old.since)
        for known in [known for known in scope.names if known.startswith((f"{name}.", f"{name}["))]:
            del scope.names[known]
        if value.kind == Kind.ROWS and self.batches and name != "_":
            self.batches.rows = self.batches.rows or name
        is_alias = made is None or isinstance(made, ast.Name | ast.Attribute | ast.Subscript)
        (scope.aliases.add if is_alias else scope.aliases.discard)(name)
        given = value.made if made is None or value.kind == "loader" else (made, self.source, self.since)
        scope.names[name] = replace(value, since=self.since, made=given)

    def _filled(self, old: Value, value: Value, at: Value) -> Value:
        """A list or tensor of which an element is set, whose index is no constant."""
        is_mixed = at.kind == Kind.OTHER or (at.is_shared and not old.is_shared)
        if value.kind in ROWS or (is_mixed and not self.in_forward):
            return Value(Kind.OTHER, "is filled by this process's samples")
        return value if value.kind == "list" else join(old, value)

    def place_of(self, target: ast.AST) -> tuple[Scope, str]:
        """The scope that keeps a target's value, and its name there."""
        if isinstance(target, ast.Attribute) and (base := self.value(target.value)).kind == "instance":
            return base.of.scope, target.attr
        root, own = target, self.frame.scope
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        called = ast.unparse(root)
        scope: Scope | None = own.elsewhere.get(called, own)
        while scope is not None and called not in scope.names and root is not target:
            scope = scope.parent
        return scope or own, ast.unparse(target)

    def _set_before(self, node: ast.expr) -> Value | None:
        """What an attribute or element was set to by a line of the script."""
        scope, name = self.place_of(node)
        return scope.names.get(name)

    def is_lost(self, target: ast.expr, is_changed: bool = False) -> bool:
        """Whether a value put there is not found again: it is inside an object that is not this function's own."""
        root, function = target, self.frame.function
        while isinstance(root, ast.Attribute | ast.Subscript):
            if isinstance(root, ast.Attribute) and self.value(root.value).kind == "instance":
                return root is not target
            root = root.value
        if not isinstance(root, ast.Name) or (root is target and not is_changed):
            return False
        given = [one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)] if function else []
        is_local = root.id in self.frame.scope.names or root.id in self.frame.scope.elsewhere
        return not is_local or root.id in given or (is_changed and root.id in self.frame.scope.aliases)

    def part_of(self, value: Value, at: object, count: int | None = None) -> Value:
        """The element of a value with this key, where a tuple of names takes so many."""
        if value.kind in ("list", "dict"):
            keys: dict[object, Value] = value.of
            at = at + len(keys) if isinstance(at, int) and at < 0 and None not in keys else at
            if at in keys and (count in (None, len(keys)) or None in keys):
                return keys[at]
            return keys[None] if None in keys and at is not None else join(*value.parts)
        if value.kind == "each":
            return other("is taken apart by zip", value) if value.is_shared else Value()
        return Value(Kind.ROWS) if value.kind == Kind.BATCH else value
