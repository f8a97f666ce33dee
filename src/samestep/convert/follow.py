"""Follows a script from its first statement on, through the functions and files of its project."""

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from samestep.convert.frames import Frame
from samestep.convert.rewrites import Rewrites
from samestep.convert.source import Source
from samestep.convert.values import (
    SCALARS,
    Class,
    Form,
    Function,
    Kind,
    Loop,
    Named,
    Scope,
    Sum,
    Value,
    Values,
    join,
)

_DEEPEST = 25
_WITHOUT_GRADIENTS = re.compile("no_grad|inference_mode|set_grad_enabled")
_NOT_SHARED = (
    "this loss is computed from data that no samestep.loader shares, so each process trains on all of it; take the "
    "batches from a DataLoader"
)


class Follower(Rewrites):
    """Knows the files of the project by their modules' names."""

    def __init__(self, script: Source, find: Callable[[str, int, Path], Source | None]) -> None:
        super().__init__()
        self.find = find
        self.modules: dict[Path, Scope] = {}
        self.sources: dict[Path, Source] = {}
        self.losses: dict[str, ast.AST] = {}
        self.unwraps = False
        self.reached: set[ast.AST] = set()
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

    def _functiondef(self, node: ast.FunctionDef) -> None:
        function = self._function(node)
        self.frame.scope.names[node.name] = Value("function", function)
        if any(
            not isinstance(one, ast.Name | ast.Attribute) or "." in ast.unparse(one)
            for one in node.decorator_list
        ):
            for one in node.decorator_list:
                self.value(one)

    _asyncfunctiondef = _functiondef

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> Function:
        marks = {ast.unparse(one) for one in node.decorator_list}
        return Function(
            node, self.frame.scope, self.frame.source, "property" in marks, bool(marks & {"staticmethod"})
        )

    def _classdef(self, node: ast.ClassDef) -> None:
        scope = Scope(self.frame.scope)
        methods = {
            one.name: self._function(one)
            for one in node.body
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        made = Class(node, [self.value(base) for base in node.bases], methods, scope)
        self.frame.scope.names[node.name] = Value("class", made)
        outer, self.frame.scope = self.frame.scope, scope
        self.statements([one for one in node.body if isinstance(one, ast.Assign | ast.AnnAssign)])
        self.frame.scope = outer

    def _assign(self, node: ast.Assign) -> None:
        first, made = node.targets[0], node.value
        if isinstance(first, ast.Name):
            self.frame.scope.made[first.id] = (made, [loop.number for loop in self.loops])
        if (
            isinstance(made, ast.BinOp)
            and isinstance(made.op, ast.Add)
            and ast.unparse(made.left) == ast.unparse(first)
        ):
            self._add(first, made.right)
            return
        value = self.total(made) if made in self.eager else self.with_late(made, self.value(made))
        if isinstance(first, ast.Attribute) and value.kind in (Kind.RATIO, Kind.OTHER) and not value.late:
            value = replace(value, of=Form(made, str(value.of)))
        for target in node.targets:
            is_pair = (
                isinstance(target, ast.Tuple)
                and isinstance(made, ast.Tuple)
                and len(target.elts) == len(made.elts)
            )
            if is_pair:
                values = [self.with_late(one, self.value(one)) for one in made.elts]  # type: ignore[attr-defined]
                for part, found in zip(target.elts, values, strict=True):  # type: ignore[attr-defined]
                    self.bind(part, found)
            else:
                self.bind(target, value)

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

    def _augassign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, ast.Add | ast.Sub):
            self._add(node.target, node.value)
            return
        scope, name = self._place(node.target)
        old, value = scope.find(name) or Value(), self.value(node.value)
        if old.is_shared or value.is_shared:
            scope.names[name] = self.divided(node, old, value)

    def _return(self, node: ast.Return) -> None:
        """A function that is called outside all loops over batches returns what every rank has."""
        if node.value is None:
            return
        value = self.value(node.value)
        if value.is_shared and not self.batches_around_call() and not self.by_form:
            parts = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            found = [self.total(part) for part in parts]
            value = Value("tuple", tuple(found)) if len(found) > 1 else found[0]
        self.frame.returned.append(value)
        is_certain = self.depth == self.frame.depth and len(self.loops) == self.frame.loops_before
        self.frame.has_ended = is_certain

    def batches_around_call(self) -> bool:
        return self.in_forward > 0 or any(
            loop.kind != "plain" for loop in self.loops[: self.frame.loops_before]
        )

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
        quiet_turns = 1 if loop.kind == "plain" and isinstance(self.frame.statement, ast.For) else 2
        for turn in range(quiet_turns + 1):
            quiet = turn < quiet_turns
            loop.trains, loop.always_trains = (
                not turn or loop.found_training > 0,
                not turn or loop.found_training > 1,
            )
            self.silent += quiet
            self._leave_batch(loop)
            loop.lends = not (self.without_gradients or self.in_eval)
            self.enter(loop)
            begin()
            self.statements(body)
            self.loops.remove(loop)
            self.silent -= quiet
        for name, value in self.frame.scope.names.items():
            if value.kind == "turn":
                self.frame.scope.names[name] = Value(Kind.ALIKE if loop.trains else Kind.PASSES)

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
        quiet = any(_WITHOUT_GRADIENTS.search(ast.unparse(item.context_expr)) for item in node.items)
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
        return Value()

    def run(self, function: Function, arguments: Values, named: Named, call: ast.Call | None) -> Value:
        node = function.node
        if len(self.frames) > _DEEPEST or any(frame.function is node for frame in self.frames):
            return join(*arguments)
        self.reached.add(node)
        frame = Frame(Scope(function.scope), function.source, call=call, caller=self.frame, function=node)
        frame.loops_before, frame.depth = len(self.loops), self.depth
        self._bind_arguments(frame.scope, node.args, arguments, named)
        depth, self.depth = self.depth, self.depth
        quiet = any(
            _WITHOUT_GRADIENTS.search(ast.unparse(one)) for one in getattr(node, "decorator_list", ())
        )
        self.without_gradients += quiet
        self.frames.append(frame)
        if isinstance(node, ast.Lambda):
            frame.returned.append(self.value(node.body))
        else:
            self.statements(node.body)
        self.frames.pop()
        self.without_gradients -= quiet
        self.depth = depth
        if frame.yielded:
            inner = join(*frame.yielded)
            return Value("batches") if inner.is_shared else Value()
        return join(*frame.returned)

    def _bind_arguments(self, scope: Scope, given: ast.arguments, arguments: Values, named: Named) -> None:
        parameters = [*given.posonlyargs, *given.args]
        defaults: list[Any] = [None] * (len(parameters) - len(given.defaults)) + list(given.defaults)
        for at, (parameter, default) in enumerate(zip(parameters, defaults, strict=True)):
            value = named.get(parameter.arg) or (arguments[at] if at < len(arguments) else None)
            scope.names[parameter.arg] = value or (self.value(default) if default is not None else Value())
        if "**" in named and named["**"].kind in (Kind.ROWS, Kind.BATCH):
            for parameter in parameters:
                if (
                    parameter.arg not in named
                    and scope.names[parameter.arg].kind == Kind.ALIKE
                    and parameter.arg != "self"
                ):
                    scope.names[parameter.arg] = Value(Kind.ROWS)
        for parameter, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
            scope.names[parameter.arg] = named.get(parameter.arg) or self.value(default)
        if given.vararg is not None:
            rest = arguments[len(parameters) :]
            scope.names[given.vararg.arg] = Value("tuple", tuple(rest)) if rest else Value()
        if given.kwarg is not None:
            known = {one.arg for one in (*parameters, *given.kwonlyargs)}
            rest = [value for name, value in named.items() if name not in known]
            scope.names[given.kwarg.arg] = replace(join(*rest))
