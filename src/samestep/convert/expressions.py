"""Follows the expressions of a script: what is known of each value."""

import ast
import builtins
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from samestep.convert.bindings import Bindings
from samestep.convert.values import (
    ROWS,
    SCALARS,
    Form,
    Function,
    Instance,
    Kind,
    Loop,
    Named,
    Scope,
    Sum,
    Value,
    Values,
    join,
)

_FACTS = {"dtype", "device", "ndim", "requires_grad", "is_cuda", "names", "layout", "grad_fn"}


class Expressions(Bindings):
    """What is known of an expression, by its form."""

    def value(self, node: ast.AST | None) -> Value:
        if node is None:
            return Value()
        name = f"_{type(node).__name__.lower()}"
        found: Value = getattr(self, name, self._any)(node)
        if found.kind == "turn":
            return Value()
        if found.kind == "loader" and isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            return replace(found, of=ast.unparse(node))
        return found

    def _constant(self, node: ast.Constant) -> Value:
        return Value("none") if node.value is None else Value()

    def _any(self, node: ast.AST) -> Value:
        """Of an expression without a rule of its own: it depends on a share where a part of it does."""
        parts = [self.value(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        models = frozenset[Any]().union(*(part.models for part in parts))
        if any(part.is_shared for part in parts):
            return Value(Kind.OTHER, "depends on this rank's share", models)
        return Value(models=models)

    def _name(self, node: ast.Name) -> Value:
        found = self.frame.scope.find(node.id)
        if found is not None:
            return self._with_parts(node.id, found)
        if hasattr(builtins, node.id):
            return Value("external", f"builtins.{node.id}")
        scope: Scope | None = self.frame.scope
        while scope is not None and not scope.stars:
            scope = scope.parent
        return Value("external", f"{scope.stars[0]}.{node.id}") if scope else Value()

    def _with_parts(self, name: str, value: Value) -> Value:
        """A dict or an object, of which elements were set one by one."""
        names = self.frame.scope.names
        parts = [part for known, part in names.items() if known.startswith((f"{name}[", f"{name}."))]
        if any(part.is_shared for part in parts) and not value.is_shared:
            return Value(Kind.OTHER, f"holds values of this process's share ({name})", value.models)
        return value

    def _attribute(self, node: ast.Attribute) -> Value:
        base, attribute = self.value(node.value), node.attr
        if base.kind in ("instance", "model", "module", "external", "class"):
            found: Value = getattr(self, f"_of_{base.kind}")(base, attribute, node)
            return found
        if (known := self.frame.scope.find(ast.unparse(node))) is not None:
            return known
        if base.kind in (Kind.ROWS, Kind.BATCH, Kind.ROW, Kind.SOME, Kind.COLUMNS):
            if attribute in ("T", "mT", "H"):
                return Value(Kind.COLUMNS)
            return (
                Value(Kind.SHAPE)
                if attribute == "shape"
                else Value()
                if attribute in _FACTS
                else replace(base)
            )
        if base.kind in (Kind.PART, Kind.COUNT, Kind.MEAN):
            return Value() if attribute in (*_FACTS, "shape") else base
        return Value(Kind.OTHER, base.of) if base.is_shared else Value(models=base.models)

    def _of_instance(self, base: Value, attribute: str, node: ast.Attribute) -> Value:
        instance: Instance = base.of
        if (found := instance.scope.names.get(attribute)) is not None:
            return found
        method = instance.of.find(attribute)
        if method is not None and method.is_property:
            self.by_form += 1
            found = self.run(method, [base], {}, None)
            self.by_form -= 1
            body = [one for one in method.node.body if not isinstance(one, ast.Expr)]
            is_single = len(body) == 1 and isinstance(body[0], ast.Return)
            return (
                replace(found, of=Form(body[0].value, str(found.of)))
                if found.is_shared and is_single
                else found
            )
        if method is not None:
            return Value("method", (base, method, node))
        found = instance.of.scope.names.get(attribute)
        return found if found is not None else Value("unknown", (base, attribute))

    def _of_model(self, base: Value, attribute: str, node: ast.Attribute) -> Value:
        known = self.frame.scope.find(ast.unparse(node))
        return known or (Value() if attribute == "training" else Value("model", base.of))

    def _of_module(self, base: Value, attribute: str, node: ast.Attribute) -> Value:
        return base.of.names.get(attribute) or Value()

    def _of_external(self, base: Value, attribute: str, node: ast.Attribute) -> Value:
        return Value("external", f"{base.of}.{attribute}")

    def _of_class(self, base: Value, attribute: str, node: ast.Attribute) -> Value:
        method = base.of.find(attribute)
        return Value("function", method) if method else base.of.scope.names.get(attribute) or Value()

    def _subscript(self, node: ast.Subscript) -> Value:
        if (known := self.frame.scope.find(ast.unparse(node))) is not None:
            return known
        base, index = self.value(node.value), self.value(node.slice)
        at = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if base.kind == "dict":
            return base.of.get(at, base.of.get(None, Value())) if at is not None else join(*base.of.values())
        if base.kind == "tuple":
            is_in = isinstance(at, int) and -len(base.of) <= at < len(base.of)
            return base.of[at] if is_in else join(*base.of)
        if base.kind == Kind.SHAPE:
            starts_at_rows = isinstance(node.slice, ast.Slice) and node.slice.lower is None
            return Value(Kind.COUNT, self.batches) if at == 0 else base if starts_at_rows else Value()
        if base.kind in (Kind.ROWS, Kind.SOME):
            return self._rows_at(node, base, index)
        if base.kind == "list":
            return join(*base.of)
        if base.kind == Kind.ALIKE and index.is_shared:
            return Value(Kind.ROW if index.kind == Kind.ROW else Kind.ROWS)
        if base.kind in ("loader", "model", Kind.PART, Kind.MEAN, Kind.ROW, Kind.OTHER, Kind.ALIKE):
            return base
        return Value(Kind.ROWS) if base.kind == Kind.BATCH else self._any(node)

    def _rows_at(self, node: ast.Subscript, base: Value, index: Value) -> Value:
        first = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) and node.slice.elts else node.slice
        if isinstance(first, ast.Slice) and first.lower is first.upper is None:
            return base
        if self.value(first).kind == Kind.ROW:
            return Value(Kind.ROW)
        is_whole = isinstance(first, ast.Constant) and (
            first.value in (None, Ellipsis) or isinstance(first.value, str)
        )
        if self.in_forward or is_whole:
            return base
        if index.is_shared:
            # the first index goes along the rows: a mask chooses some; beside an index for each row it chooses within
            return Value(Kind.SOME) if first is node.slice else Value(Kind.ROWS)
        return Value(Kind.OTHER, "is of some samples of a share")

    def _binop(self, node: ast.BinOp) -> Value:
        left, right = self.value(node.left), self.value(node.right)
        models = left.models | right.models
        if not (left.is_shared or right.is_shared):
            return replace(join(left, right), models=models)
        return self.combined(node.op, left, right)

    def combined(self, op: ast.operator, left: Value, right: Value) -> Value:
        """What two values give, of which a part at least depends on this rank's share."""
        kinds = {left.kind, right.kind}
        if isinstance(op, ast.MatMult) and Kind.COLUMNS in kinds:
            return Value(Kind.OTHER, "compares samples of a share with each other; see docs/losses.md")
        if kinds & ROWS and kinds <= {*ROWS, Kind.ALIKE, Kind.COUNT, "model"}:
            return Value(Kind.SOME if Kind.SOME in kinds else Kind.ROWS)
        if Kind.ROW in kinds and kinds <= {Kind.ROW, Kind.ALIKE}:
            return Value(Kind.ROW)
        found = None
        if isinstance(op, ast.Mult | ast.MatMult):
            found = self._product(kinds, left, right)
        elif isinstance(op, ast.Div):
            found = self._quotient(left, right)
        elif isinstance(op, ast.Add | ast.Sub):
            found = self._sum(kinds, left, right)
        reasons = [one.of for one in (left, right) if one.is_shared and isinstance(one.of, str)]
        return found or Value(Kind.OTHER, (*reasons, "is computed from values of this process's share")[0])

    def _product(self, kinds: set[str], left: Value, right: Value) -> Value | None:
        shared = left if left.is_shared else right
        if kinds == {Kind.MEAN, Kind.COUNT}:
            return Value(Kind.PART, left.of if left.kind == Kind.MEAN else right.of)
        if Kind.ALIKE in kinds and shared.kind in SCALARS:
            return Value(Kind.MEAN if shared.kind == Kind.MEAN else Kind.PART, shared.of)
        return None

    def _quotient(self, left: Value, right: Value) -> Value | None:
        if right.kind == Kind.ALIKE and left.kind in SCALARS:
            return Value(Kind.MEAN if left.kind == Kind.MEAN else Kind.PART, left.of)
        if right.kind == Kind.COUNT and left.kind in (Kind.PART, Kind.COUNT) and not isinstance(left.of, Sum):
            return Value(Kind.MEAN, self.batches)
        if {left.kind, right.kind} <= {Kind.PART, Kind.COUNT, Kind.PASSES, Kind.ALIKE}:
            return Value(Kind.RATIO, "is divided by a count in a share; see docs/losses.md")
        return None

    def _sum(self, kinds: set[str], left: Value, right: Value) -> Value | None:
        if kinds <= {Kind.PART, Kind.COUNT}:
            return Value(Kind.PART, left.of)
        if kinds <= {Kind.MEAN, Kind.ALIKE}:
            return Value(Kind.MEAN, left.of if left.kind == Kind.MEAN else right.of)
        return (
            (left if left.kind == Kind.RATIO else right)
            if kinds <= {Kind.RATIO, Kind.ALIKE, Kind.MEAN}
            else None
        )

    def _unaryop(self, node: ast.UnaryOp) -> Value:
        return self.value(node.operand)

    def _compare(self, node: ast.Compare) -> Value:
        values = [self.value(one) for one in (node.left, *node.comparators)]
        kinds = {one.kind for one in values if one.is_shared}
        if not kinds:
            return Value()
        if kinds <= {Kind.ROWS, Kind.BATCH}:
            return Value(Kind.ROWS)
        return (
            Value(Kind.ROW)
            if kinds == {Kind.ROW}
            else Value(Kind.OTHER, "is a comparison of this rank's values")
        )

    def _ifexp(self, node: ast.IfExp) -> Value:
        test, found = self.value(node.test), join(self.value(node.body), self.value(node.orelse))
        return (
            Value(Kind.OTHER, "is chosen by this rank's values")
            if test.is_shared and test.kind != Kind.ROW
            else found
        )

    def _tuple(self, node: ast.Tuple | ast.List | ast.Set) -> Value:
        values = [self.value(one) for one in node.elts]
        models = frozenset[Any]().union(*(one.models for one in values))
        if all(one.kind == Kind.ALIKE for one in values) and (values or isinstance(node, ast.List)):
            return Value(models=models)
        return Value("tuple", tuple(values), models)

    _list = _set = _tuple

    def _dict(self, node: ast.Dict) -> Value:
        values = [self.value(one) for one in node.values]
        found = join(*values)
        holds = found.is_shared or any(one.kind == "instance" for one in values)
        if holds and all(isinstance(key, ast.Constant) for key in node.keys):
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            found = Value("dict", dict(zip(keys, values, strict=True)), found.models)
        return (
            Value(Kind.BATCH, models=found.models) if {one.kind for one in values} == {Kind.ROWS} else found
        )

    def _starred(self, node: ast.Starred) -> Value:
        return self.value(node.value)

    _await = _starred

    def _namedexpr(self, node: ast.NamedExpr) -> Value:
        found = self.value(node.value)
        self.bind(node.target, found)
        return found

    def _lambda(self, node: ast.Lambda) -> Value:
        return Value("function", Function(node, self.frame.scope, self.frame.source))

    def _comprehension_of(self, node: Any, element: Callable[[], Value]) -> Value:
        """The values that a comprehension makes, followed as a loop."""
        scope, loops = self.frame.scope, len(self.loops)
        self.frame.scope = Scope(scope)
        made = False
        for part in node.generators:
            over, kind, text = self.iterated(self.value(part.iter), part.iter)
            self.bind(part.target, over)
            made = made or kind != "plain"
            self.enter(Loop(kind, text, frame=self.frame))
            for test in part.ifs:
                if self.value(test).is_shared:
                    self.loops[-1].kind, made = "rows", True
        found = element()
        kinds = {loop.kind for loop in self.loops[loops:]}
        if "batches" in kinds:
            found = self.added(getattr(node, "elt", node), found)
        elif "rows" in kinds:
            found = Value(Kind.ROWS)
        del self.loops[loops:]
        self.frame.scope = scope
        if found.kind in (Kind.ALIKE, "loader", "model", Kind.ROWS) or (not made and found.kind == Kind.PART):
            return found
        return Value("list", (found,), found.models)

    def _listcomp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> Value:
        return self._comprehension_of(node, lambda: self.value(node.elt))

    _setcomp = _generatorexp = _listcomp

    def _dictcomp(self, node: ast.DictComp) -> Value:
        found = self._comprehension_of(node, lambda: self.value(node.value))
        return Value(Kind.BATCH) if found.kind == Kind.ROWS else found

    def iterated(self, over: Value, node: ast.expr) -> tuple[Value, str, str | None]:
        """What a loop over this gives at each turn, the kind of loop, and the loader's name."""
        if over.kind in ("loader", "batches", "iter"):
            return Value(Kind.BATCH), "batches", over.of
        if over.kind == "enumerate":
            inner, kind, text = self.iterated(over.of, node)
            return Value("tuple", (Value("turn") if kind == "batches" else Value(), inner)), kind, text
        if over.kind == "zip":
            parts = [self.iterated(one, node) for one in over.of]
            kind = next(
                (name for name in ("batches", "rows") if name in {part[1] for part in parts}), "plain"
            )
            texts = [part[2] for part in parts if part[1] == "batches"]
            return Value("tuple", tuple(part[0] for part in parts)), kind, (*texts, None)[0]
        if over.kind == Kind.BATCH:
            return Value(Kind.ROWS), "plain", None
        if over.kind in (Kind.ROWS, Kind.ROW, Kind.SOME, Kind.COUNT):
            return Value(Kind.ROW), "rows", None
        if over.kind == "items":
            return Value("tuple", (Value(), over.of)), "plain", None
        if over.kind in ("tuple", "list"):
            return join(*over.of), "plain", None
        return (Value(Kind.OTHER, over.of) if over.kind == Kind.OTHER else over), "plain", None

    def run(self, function: Function, arguments: Values, named: Named, call: ast.Call | None) -> Value:
        """Follow a function's body with these arguments."""
        raise NotImplementedError

    def added(self, node: ast.AST, value: Value) -> Value:
        """What the values of all batches add up to, with the edits that make it exact."""
        raise NotImplementedError
