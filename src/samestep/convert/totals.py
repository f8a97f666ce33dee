"""Makes values of a share those of the whole batch: where they are shown, decided by, or added up."""

import ast
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from samestep.convert.calls import Calls
from samestep.convert.libraries import MEANS_OF_LISTS
from samestep.convert.source import Source
from samestep.convert.values import Form, Kind, Loop, Scope, Sum, Value, Values, join

# where in a file to put which text; or instead of a text, the expressions to total where they are added up
Edit = tuple[Source, int, int, str | frozenset[Any]]
_LOOSE = (ast.BinOp, ast.IfExp, ast.Compare, ast.BoolOp, ast.Lambda, ast.UnaryOp)


class Unclear(Exception):
    """No total of this value is known."""


class Totals(Calls):
    """Wraps the smallest expressions that samestep's functions can combine."""

    def may_total(self) -> bool:
        """Whether every rank comes here as often as the others."""
        even = all(
            loop.kind == "plain" or (loop.kind == "batches" and loop.always_trains) for loop in self.loops
        )
        return even and not self.uneven and not self.in_forward

    def total(self, node: ast.expr) -> Value:
        """Let this expression have the same value on all ranks, or say that it cannot."""
        value = self.value(node)
        if not value.is_shared:
            return value
        try:
            edits = list(self._edits(node))
        except Unclear as unclear:
            self.gap(node, f"`{ast.unparse(node)}` {unclear}")
            return Value(models=value.models)
        if not self.may_total():
            where = "in an evaluation, of which ranks may have unlike numbers of batches"
            reason = (
                "where only some ranks may come"
                if self.uneven
                else "in a model"
                if self.in_forward
                else where
            )
            self.gap(
                node, f"`{ast.unparse(node)}` is of this process's share, and no total can be taken {reason}"
            )
        else:
            self._apply(edits)
        return Value(models=value.models)

    def _apply(self, edits: list[Edit]) -> None:
        for source, start, end, text in edits:
            if not isinstance(text, str):
                self.eager |= text
            elif not self.silent:
                source.edit(start, end, text)

    def _edits(self, node: ast.expr) -> Iterator[Edit]:
        """What makes an expression one of the whole batch: its smallest parts of a kind that can be combined."""
        value = self.value(node)
        if not value.is_shared:
            return
        if value.late:
            yield from value.late
        elif isinstance(node, ast.Name):
            yield from self._wrapped(node, value)
        elif isinstance(node, ast.Attribute) and isinstance(value.of, Form):
            source = self.frame.source
            yield source, source.start(node), source.end(node), f"({self._by_form(node, value.of.node)})"
        elif isinstance(node, ast.Attribute | ast.Subscript):
            if (
                value.kind in (Kind.MEAN, Kind.PART, Kind.COUNT, Kind.PASSES)
                or not self.value(node.value).is_shared
            ):
                yield from self._wrapped(node, value)
            else:
                yield from self._edits(node.value)
        elif isinstance(node, ast.Call):
            yield from self._edits_of_call(node, value)
        elif isinstance(node, ast.ListComp | ast.DictComp):
            yield from self._edits_of_comprehension(node, value)
        elif isinstance(node, ast.GeneratorExp | ast.Lambda):
            raise Unclear(f"{value.of}" if value.kind == Kind.OTHER else "is made of this process's share")
        else:
            yield from self._inside(node, value)

    def _edits_of_comprehension(self, node: ast.ListComp | ast.DictComp, value: Value) -> Iterator[Edit]:
        """Of each element, where all ranks have as many."""
        outer = self.frame.scope
        self.frame.scope = Scope(outer)
        try:
            for part in node.generators:
                element, kind, _ = self.iterated(self.value(part.iter), part.iter)
                if kind != "plain" or part.ifs:
                    raise Unclear(
                        str(value.of) if value.kind == Kind.OTHER else "is made of this process's share"
                    )
                self.bind(part.target, element)
            yield from self._inside(node, value)
        finally:
            self.frame.scope = outer

    def _by_form(self, node: ast.Attribute, form: ast.expr) -> str:
        """An attribute of an object, computed from the totals of its other attributes."""
        scope: Scope = self.value(node.value).of.scope
        receiver = self.frame.source.text(node.value)

        class Totalled(ast.NodeTransformer):
            def visit_Attribute(self, part: ast.Attribute) -> ast.AST:
                value = scope.names.get(part.attr, Value())
                text = f"{receiver}.{part.attr}"
                if value.kind == Kind.PASSES:
                    return ast.Name(f"max(samestep.gather([{text}]))")
                if value.is_shared and (value.kind != Kind.PART or isinstance(value.of, Loop)):
                    raise Unclear(str(value.of))
                return ast.Name(f"samestep.sum({text})" if value.is_shared else text)

        for part in ast.walk(form):
            if isinstance(part, ast.Name) and part.id != "self" and self.value(part).kind != "external":
                raise Unclear("is computed from values that are not its object's")
        return ast.unparse(Totalled().visit(ast.parse(ast.unparse(form), mode="eval").body))

    def _inside(self, node: ast.AST, value: Value) -> Iterator[Edit]:
        found = [edit for child in _expressions(node) for edit in self._edits(child)]
        if not found:
            raise Unclear(str(value.of) if isinstance(value.of, str) else "depends on this process's share")
        yield from found

    def _edits_of_call(self, node: ast.Call, value: Value) -> Iterator[Edit]:
        source = self.frame.source
        callee = self.value(node.func)
        if (
            callee.kind == "external"
            and callee.of in MEANS_OF_LISTS
            and self.value(node.args[0]).kind == "list"
        ):
            text = source.text(node.args[0])
            whole = f"samestep.sum(sum({text})) / max(samestep.gather([len({text})]))"
            element = join(*self.value(node.args[0]).of)
            if element.kind != Kind.PART or not isinstance(node.args[0], ast.Name | ast.Attribute):
                raise Unclear("is a mean over this process's batches")
            yield source, source.start(node), source.end(node), whole
        elif (value.kind in (Kind.MEAN, Kind.PART, Kind.COUNT, Kind.PASSES) and not self._has_late(node)) or (
            callee.kind in ("model", "instance", "function", "method")
            and value.kind in (Kind.ROWS, Kind.BATCH)
        ):
            yield from self._wrapped(node, value)
        elif callee.kind in ("model", "instance", "function", "method"):
            raise Unclear(str(value.of))
        else:
            yield from self._inside(node, value)

    def _has_late(self, node: ast.Call) -> bool:
        return any(self.value(one).late for one in ast.walk(node) if isinstance(one, ast.Name))

    def _wrapped(self, node: ast.expr, value: Value) -> Iterator[Edit]:
        """The edits around an expression of a kind that can be combined."""
        loop = value.of if isinstance(value.of, Loop) else None
        if isinstance(value.of, Sum) and value.of.loop.trains and value.of.loop in self.loops:
            yield self.frame.source, -1, -1, value.of.nodes
        is_over = loop is not None and loop not in self.loops
        within = loop is not None and loop.text is not None and loop.frame is self.frame
        if is_over and not within and value.kind == Kind.MEAN:
            raise Unclear("is the mean of the last batch of a loop in another function")
        match value.kind:
            case "mean" if is_over and loop is not None:
                before, after = "samestep.sum(", f" * {loop.text}.share)"
            case "mean":
                before, after = "samestep.mean(", ")"
            case "part" | "count" if is_over and loop is not None and loop.trains:
                before, after = "samestep.sum(", f" * bool({loop.text}.share))"
            case "part" | "count":
                before, after = "samestep.sum(", ")"
            case "passes":
                before, after = "max(samestep.gather([", "]))"
            case "rows":
                before, after = "samestep.gather(", ")"
            case "list" if join(*value.of).kind == Kind.ROWS:
                before, after = "samestep.gather(", ")"
            case _:
                raise Unclear(
                    str(value.of) if isinstance(value.of, str) else "depends on this process's share"
                )
        source = self.frame.source
        yield source, source.start(node), source.start(node), before
        yield source, source.end(node), source.end(node), after

    def with_late(self, node: ast.expr, value: Value) -> Value:
        """A value that no function combines, with the edits that make its parts those of the whole batch."""
        if value.kind not in (Kind.RATIO, Kind.OTHER, "dict", "tuple") or value.late:
            return value
        if not value.is_shared or not self.may_total():
            return value
        try:
            return replace(value, late=tuple(self._edits(node)))
        except Unclear:
            return value

    def lazily(self, node: ast.expr) -> Value:
        """An argument of a function of the project, with the edits that make it one of the whole batch."""
        value = self.value(node)
        if self._call_around(node) in self.eager:
            loop = self.batches
            if self.may_total():
                return self.total(node)
            if value.kind == Kind.MEAN and loop is not None and loop.text and loop.frame is self.frame:
                self._scaled(node, f" * {loop.text}.share")
                return Value(Kind.PART, Sum(loop, frozenset()))
        if value.kind not in (Kind.MEAN, Kind.PART, Kind.COUNT, Kind.RATIO, Kind.OTHER) or value.late:
            return value
        try:
            return replace(value, late=tuple(self._edits(node)))
        except Unclear:
            return value

    def _call_around(self, node: ast.AST) -> ast.AST | None:
        around = self.frame.source.parents.get(node)
        return self.frame.source.parents.get(around) if isinstance(around, ast.keyword) else around

    def guard(self, loop: Loop) -> bool:
        """Count a batch only on ranks that have a share of it: in training others are lent a small last batch."""
        statement = loop.frame.statement
        if not (loop.trains or loop.lends):
            return True
        simple = isinstance(statement, ast.AugAssign | ast.Expr) or (
            isinstance(statement, ast.Assign) and isinstance(statement.value, ast.BinOp)
        )
        source: Source = loop.frame.source
        if loop.text is None or not simple or source.begins_line(statement) is None:
            return False
        if not self.silent:
            source.edit(source.start(statement), source.start(statement), f"if {loop.text}.share: ")
        return True

    def _outer(self, scope: Scope, name: str) -> tuple[Loop | None, bool]:
        """The loop over batches around a value that was set before it, and whether a loop over samples is."""
        since = scope.since.get(name, ())
        outer = [loop for loop in self.loops if loop.number not in since and loop.kind != "plain"]
        return next((loop for loop in outer if loop.kind == "batches"), None), any(
            loop.kind == "rows" for loop in outer
        )

    def accumulated(self, place: tuple[Scope, str], node: ast.expr, value: Value) -> Value:
        """What a value becomes to which this one is added, with the edits that keep the total exact."""
        scope, name = place
        old = scope.find(name) or Value()
        batch, over_samples = self._outer(scope, name)
        if over_samples:
            value = (
                Value(Kind.PART)
                if value.kind in (Kind.ALIKE, Kind.ROW, Kind.PART, Kind.COUNT)
                else Value(Kind.OTHER, "is added up by sample")
            )
        if batch is None:
            if old.is_shared and value.is_shared and old.kind != value.kind:
                return self.combined(ast.Add(), old, value)
            return join(old, replace(value, of=None)) if over_samples else join(old, value)
        return join(old, self._per_batch(batch, node, value))

    def _per_batch(self, batch: Loop, node: ast.expr, value: Value) -> Value:
        if value.kind == Kind.ALIKE:
            if self.uneven:
                return Value(Kind.OTHER, "is added up where this process's values say so")
            return Value(Kind.PASSES) if not batch.trains and batch.kind == "batches" else value
        if node in self.eager:
            return self.total(node)
        if value.kind == Kind.MEAN and (call := self._given_in(batch, node)) is not node:
            self.eager.add(call)
            return Value()
        if value.kind in (Kind.PART, Kind.COUNT) and self.guard(batch):
            return Value(Kind.PART, Sum(batch, frozenset({self._given_in(batch, node)})))
        if (
            value.kind == Kind.MEAN
            and batch.text is not None
            and batch.frame is self.frame
            and not self.uneven
        ):
            self._scaled(node, f" * {batch.text}.share")
            return Value(Kind.PART, Sum(batch, frozenset({node})))
        if self.may_total() and value.kind != Kind.BATCH:
            return self.total(node)
        return Value(Kind.OTHER, "is added up over batches in a way that has no total")

    def _given_in(self, batch: Loop, node: ast.expr) -> ast.expr:
        """The expression itself, or the call in the loop whose function adds it up."""
        frame, given = self.frame, node
        while frame is not batch.frame and frame.call is not None and frame.caller is not None:
            given, frame = frame.call, frame.caller
        return given

    def _scaled(self, node: ast.expr, factor: str) -> None:
        before, after = (
            ("(", f"){factor}") if isinstance(node, _LOOSE) and not _is_product(node) else ("", factor)
        )
        if not self.silent:
            self.frame.source.wrap(node, before, after)

    def added(self, node: ast.AST, value: Value) -> Value:
        """Of a comprehension over batches."""
        batch = self.batches
        if batch is None or not isinstance(node, ast.expr):
            return value
        batch.frame = self.frame
        return self._per_batch(batch, node, value)

    def put(self, node: ast.Call, base: Value, arguments: Values) -> Value:
        """A value is appended to a list that was made before the loop."""
        name = node.func.attr  # type: ignore[attr-defined]
        receiver: ast.expr = node.func.value  # type: ignore[attr-defined]
        if name in ("update", "add", "insert") or not arguments or len(node.args) != 1:
            return self._opaque(node, arguments)
        scope, key = self.place_of(receiver)
        batch, over_samples = self._outer(scope, key)
        value, element = arguments[0], node.args[0]
        if value.kind == "function":
            scope.names[key] = Value("list", (value, *(base.of if base.kind == "list" else ())))
            return Value()
        if over_samples and (value.kind == Kind.ROW or value.kind == Kind.ALIKE):
            value = Value(Kind.ROWS)
        if batch is not None and value.is_shared:
            value = self._appended(batch, element, value)
        elif value.is_shared and self.may_total() and not self.batches:
            value = self.total(element)
        if value.is_shared:
            scope.names[key] = Value("list", (join(*(base.of if base.kind == "list" else ()), value),))
        return Value()

    def _appended(self, batch: Loop, element: ast.expr, value: Value) -> Value:
        if value.kind in (Kind.ROWS, Kind.BATCH, "list", Kind.SOME):
            rows = value if value.kind != "list" else join(*value.of)
            return (
                Value(Kind.ROWS)
                if rows.kind in (Kind.ROWS, Kind.BATCH) and self.guard(batch)
                else Value(Kind.OTHER, "is a list")
            )
        if value.kind in (Kind.MEAN, Kind.RATIO, Kind.OTHER) and self.may_total():
            return self.total(element)
        return self._per_batch(batch, element, value)

    def divided(self, node: ast.AugAssign, old: Value, value: Value) -> Value:
        """`total /= count`, both of this rank's share."""
        source = self.frame.source
        found = self.combined(node.op, old, value)
        if old.kind not in (Kind.PART, Kind.COUNT) or not value.is_shared or not isinstance(node.op, ast.Div):
            return found
        if value.kind != Kind.PASSES and self.may_total():
            target = source.text(node.target)
            self._apply(
                [(source, source.end(node.target), source.start(node.value), f" = samestep.sum({target}) / ")]
            )
            self.total(node.value)
            return Value()
        return (
            replace(old, of=None)
            if value.kind == Kind.PASSES and not self.total(node.value).is_shared
            else found
        )


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield child
        elif isinstance(child, ast.keyword):
            yield child.value


def _is_product(node: ast.expr) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div)
