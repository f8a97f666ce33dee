"""Follows a script from its first statement on, through the functions and files of its project."""

import ast
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from samestep.convert.frames import Frame
from samestep.convert.functions import MOST_STATEMENTS, WITHOUT_GRADIENTS, Functions
from samestep.convert.source import Source
from samestep.convert.values import (
    SCALARS,
    Form,
    Function,
    Kind,
    Loop,
    Scope,
    Sum,
    Value,
    join,
)

_MOST_TURNS = 6
_NOT_SHARED = (
    "this loss is computed from data that no samestep.loader shares, so each process trains on all of it; take the "
    "batches from a DataLoader"
)


class Follower(Functions):
    """Knows the files of the project by their modules' names."""

    def __init__(self, script: Source, find: Callable[[str, int, Path], Source | None]) -> None:
        super().__init__()
        self.find = find
        self.modules: dict[Path, Scope] = {}
        self.sources: dict[Path, Source] = {}
        self.losses: dict[str, ast.AST] = {}
        self.unwraps = False
        self.follow_module(script)

    def follow_module(self, source: Source) -> Scope:
        if source.path in self.modules:
            return self.modules[source.path]
        scope = self.modules[source.path] = Scope()
        self.sources[source.path] = source
        outside, self.loops = self.loops, []
        self.frames.append(Frame(scope, source))
        self.statements(source.tree.body)
        self._unreached(source)
        self.frames.pop()
        self.loops = outside
        return scope

    def _unreached(self, source: Source) -> None:
        """Functions of the script that nothing calls, such as those a decorator registers."""
        if len(self.modules) > 1:
            return
        for node in source.tree.body:
            if isinstance(node, ast.FunctionDef) and node not in self.reached:
                self.run(Function(node, self.frame.scope, source), [], {}, None)

    def statements(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self.frame.statement = statement
            self.followed += 1
            name = f"_{type(statement).__name__.lower()}"
            getattr(self, name, self._other_statement)(statement)
            if self.frame.has_ended:
                break

    def _other_statement(self, node: ast.stmt) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child)

    def _expr(self, node: ast.Expr) -> None:
        self.value(node.value)
        if isinstance(node.value, ast.Yield | ast.YieldFrom) and node.value.value is not None:
            self.frame.yielded.append(self.value(node.value.value))

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            found = self.find(alias.name, 0, self.frame.source.path)
            value = Value("module", self.follow_module(found)) if found else Value("external", name)
            self.frame.scope.names[alias.asname or name] = value

    def _importfrom(self, node: ast.ImportFrom) -> None:
        found = self.find(node.module or "", node.level, self.frame.source.path)
        scope = self.follow_module(found) if found else None
        for alias in node.names:
            if alias.name == "*" and scope is not None:
                self.frame.scope.names.update(scope.names)
            elif alias.name == "*":
                self.frame.scope.stars.append(str(node.module))
            else:
                self.frame.scope.names[alias.asname or alias.name] = self._imported(node, alias.name, scope)

    def _imported(self, node: ast.ImportFrom, name: str, scope: Scope | None) -> Value:
        if scope is not None and name in scope.names:
            return scope.names[name]
        inner = self.find(
            f"{node.module}.{name}" if node.module else name, node.level, self.frame.source.path
        )
        if inner is not None:
            return Value("module", self.follow_module(inner))
        return Value() if scope is not None else Value("external", f"{node.module}.{name}")

    def _assign(self, node: ast.Assign) -> None:
        first, made = node.targets[0], node.value
        if isinstance(first, ast.Tuple) and isinstance(made, ast.Tuple) and len(first.elts) == len(made.elts):
            values = [self._made(*pair) for pair in zip(first.elts, made.elts, strict=True)]
            for target, value in zip(first.elts, values, strict=True):
                self._bind_made(target, value)
            return
        value = self._made(first, made)
        for target in node.targets:
            self._bind_made(target, value)

    def _bind_made(self, target: ast.expr, value: Value | None) -> None:
        if value is not None:
            self.bind(target, value)

    def _made(self, target: ast.expr, made: ast.expr) -> Value | None:
        """What a target is given; None where something is added to it, which has its value then."""
        if isinstance(target, ast.Name):
            self.frame.scope.made[target.id] = (made, [loop.number for loop in self.loops])
        adds = isinstance(made, ast.BinOp) and isinstance(made.op, ast.Add)
        if adds and ast.unparse(made.left) == ast.unparse(target):  # type: ignore[attr-defined]
            self._add(target, made.right)  # type: ignore[attr-defined]
            return None
        value = self.total(made) if made in self.eager else self.with_late(made, self.value(made))
        value = self._kept(target, made, value)
        if isinstance(target, ast.Attribute) and value.kind in (Kind.RATIO, Kind.OTHER) and not value.late:
            value = replace(value, of=Form(made, str(value.of)))
        return value

    def _kept(self, target: ast.expr, made: ast.expr, value: Value) -> Value:
        """A number that is put into a list, dict or object outside of all batches is everyone's from there on."""
        if not isinstance(target, ast.Attribute | ast.Subscript) or value.kind not in (
            *SCALARS,
            Kind.RATIO,
            Kind.OTHER,
        ):
            return value
        is_element = isinstance(target, ast.Subscript) and not isinstance(target.slice, ast.Constant)
        if is_element and self.batches is not None:
            return self.accumulated(self._place(target), made, value)
        return self.total(made) if self.may_total() and not self.loops_of_batches() else value

    def loops_of_batches(self) -> bool:
        return any(loop.kind != "plain" for loop in self.loops)

    def _annassign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.bind(node.target, self.value(node.value))

    def _add(self, target: ast.expr, added: ast.expr) -> None:
        scope, name = self._place(target)
        value = self.accumulated((scope, name), added, self.value(added))
        scope.names[name] = value

    def _place(self, target: ast.expr) -> tuple[Scope, str]:
        """Of an element whose index is no constant, all of what holds it."""
        is_element = isinstance(target, ast.Subscript) and not isinstance(target.slice, ast.Constant)
        return self.place_of(target.value if is_element else target)  # type: ignore[attr-defined]

    def _global(self, node: ast.Global | ast.Nonlocal) -> None:
        """Names of an outer function or of the module."""
        for name in node.names:
            scope = self.frame.scope
            while scope.parent is not None and (
                isinstance(node, ast.Global) or name not in scope.parent.names
            ):
                scope = scope.parent
            outer = scope.parent if scope.parent is not None else scope
            self.frame.scope.elsewhere[name] = outer

    _nonlocal = _global

    def _augassign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, ast.Add | ast.Sub):
            self._add(node.target, node.value)
            return
        scope, name = self._place(node.target)
        old, value = scope.find(name) or Value(), self.value(node.value)
        if old.is_shared or value.is_shared:
            scope.names[name] = self.divided(node, old, value)

    def _if(self, node: ast.If) -> None:
        test = self.value(node.test)
        was_uneven = test.is_shared
        if was_uneven and self.may_total():
            was_uneven = self.total(node.test).is_shared
        if ast.unparse(node.test) in ("__name__ == '__main__'", "TYPE_CHECKING"):
            self.statements(node.body)
            return
        if (known := self._is_none(node.test)) is not None:
            self.statements(node.body if known else node.orelse)
            return
        self.uneven += was_uneven
        self.depth += 1
        scope = self.frame.scope
        before, since = dict(scope.names), dict(scope.since)
        trained = self._branch(node.body)
        first, first_since = scope.names, scope.since
        scope.names, scope.since = dict(before), dict(since)
        trained_too = self._branch(node.orelse)
        for name, value in first.items():
            other = scope.names.get(name)
            scope.names[name] = value if other is None or other is value else join(other, value)
            pair = (
                first_since.get(name, ()),
                scope.since.get(name, since.get(name, first_since.get(name, ()))),
            )
            scope.since[name] = tuple(one for one in pair[0] if one in pair[1])
        self.depth -= 1
        self.uneven -= was_uneven
        if trained and trained_too:
            self.trained()

    def _is_none(self, test: ast.expr) -> bool | None:
        """Whether a test for None holds, where that is known."""
        if not isinstance(test, ast.Compare) or ast.unparse(test.comparators[0]) != "None":
            return None
        value = self.value(test.left)
        if (value.kind != "none" and not value.is_shared) or self.loops[self.frame.loops_before :]:
            return None
        return (value.kind == "none") == isinstance(test.ops[0], ast.Is)

    def _branch(self, body: list[ast.stmt]) -> bool:
        """Follow a branch; whether something in it trained."""
        before = self.backwards
        self.statements(body)
        return self.backwards > before

    def trained(self) -> None:
        for loop in self.loops:
            loop.found_training = max(loop.found_training, 1 + (loop.depth >= self.depth))

    def _for(self, node: ast.For) -> None:
        over = self.value(node.iter)
        if over.models and ".grad" in ast.unparse(node):
            self._optimizes([over])
        element, kind, text = self.iterated(over, node.iter)
        if over.kind == "range" or (over.kind == Kind.COUNT):
            kind = "rows"
        loop = Loop(kind, text, self._rows_of(node.target, element), frame=self.frame)
        self._repeated(loop, node.body, lambda: self.bind(node.target, element))
        self.statements(node.orelse)

    _asyncfor = _for

    def _rows_of(self, target: ast.expr, value: Value) -> str | None:
        """The first name in a loop's target that has a sample in each row."""
        if isinstance(target, ast.Name):
            return target.id if value.kind in (Kind.ROWS, Kind.BATCH) else None
        parts = target.elts if isinstance(target, ast.Tuple | ast.List) else []
        found = (self._rows_of(part, self._part_of(value, at, len(parts))) for at, part in enumerate(parts))
        return next((name for name in found if name and name != "_"), None)

    def _while(self, node: ast.While) -> None:
        value = self.value(node.test)
        if value.is_shared:
            self.total(node.test)
        self._repeated(Loop("plain", frame=self.frame), node.body, lambda: None)

    def _repeated(self, loop: Loop, body: list[ast.stmt], begin: Callable[[], None]) -> None:
        """Follow a loop's body again and again: what its end says of a value holds at its beginning.

        Only after the first time it is known whether the loop trains; until then it counts as if it did.
        """
        turns, least = 0, 1 if loop.kind == "plain" and isinstance(self.frame.statement, ast.For) else 2
        before = self.snapshot()
        while turns < least:
            known, turns = len(self.eager), turns + 1
            self.silent += 1
            self._turn(loop, body, begin)
            self.silent -= 1
            if self.followed > MOST_STATEMENTS:
                break
            if len(self.eager) > known and turns < _MOST_TURNS:
                # what is now totalled where it is added up was of a share in this turn: forget the turn
                self.restore(before)
                least = turns + 1
        self._turn(loop, body, begin)
        self.frame.had_batches |= loop.kind == "batches"
        for name, value in self.frame.scope.names.items():
            if value.kind == "turn":
                self.frame.scope.names[name] = Value(Kind.ALIKE if loop.trains else Kind.PASSES)

    def _turn(self, loop: Loop, body: list[ast.stmt], begin: Callable[[], None]) -> None:
        is_first = loop.number == 0
        loop.trains, loop.always_trains = (
            is_first or loop.found_training > 0,
            is_first or loop.found_training > 1,
        )
        self._leave_batch(loop)
        loop.lends = not (self.without_gradients or self.in_eval)
        self.enter(loop)
        begin()
        self.statements(body)
        self.loops.remove(loop)

    def _leave_batch(self, loop: Loop) -> None:
        """What a turn of a loop left belongs to an earlier batch in the next: it is totalled where it was made."""
        scope = self.frame.scope
        for name, (made, loops) in scope.made.items() if loop.kind == "batches" else ():
            value = scope.names.get(name, Value())
            is_number = value.kind in (*SCALARS, Kind.OTHER, Kind.RATIO) and not isinstance(value.of, Sum)
            if loop.number in loops and is_number:
                late = ((self.frame.source, -1, -1, frozenset({made})),)
                scope.names[name] = Value(Kind.OTHER, "is of an earlier batch", late=late)

    def _with(self, node: ast.With) -> None:
        quiet = any(WITHOUT_GRADIENTS.search(ast.unparse(item.context_expr)) for item in node.items)
        for item in node.items:
            found = self.value(item.context_expr)
            if item.optional_vars is not None:
                self.bind(item.optional_vars, found)
        self.without_gradients += quiet
        self.statements(node.body)
        self.without_gradients -= quiet

    _asyncwith = _with

    def _try(self, node: ast.Try) -> None:
        self.statements(node.body)
        for handler in node.handlers:
            self.statements(handler.body)
        self.statements([*node.orelse, *node.finalbody])

    def _match(self, node: ast.Match) -> None:
        for case in node.cases:
            self.statements(case.body)

    def _leave(self, node: ast.stmt) -> None:
        if self.uneven and self.batches is not None and self.loops[-1].kind == "batches":
            self.gap(
                node,
                "this process's values decide when the loop ends, and the others go on; decide by a total",
            )

    _break = _continue = _leave

    def backward(self, node: ast.Call, loss: Value) -> Value:
        """A loss is trained on: whether the gradients of the ranks are averaged, added, or unclear."""
        self.backwards += 1
        self.trained()
        if loss.kind in (Kind.RATIO, Kind.OTHER) and loss.late and self.may_total():
            self._apply(list(loss.late))
        elif loss.kind in (Kind.PART, Kind.COUNT) and self.batches is not None:
            self.losses.setdefault("sum", node)
        elif loss.kind == Kind.MEAN:
            self.losses.setdefault("mean", node)
        elif loss.is_shared:
            self.gap(
                node, f"the loss {loss.of}" if isinstance(loss.of, str) else "no total of this loss is known"
            )
        elif self.batches is None:
            self.gap(node, _NOT_SHARED)
        elif not loss.late:
            self.gap(
                node,
                "this loss could not be followed to the batch; see whether it is a mean over its samples",
            )
        return Value()
