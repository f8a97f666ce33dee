"""Finds the value of each expression of a script."""

import ast
import builtins
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from samestep.convert.elements import Elements
from samestep.convert.project import Function, Scope
from samestep.convert.signatures import NAMED, counted, turned
from samestep.convert.source import Edit, makes_column
from samestep.convert.values import (
    LENGTH,
    NUMBERS,
    PAIRS,
    ROWS,
    TURNED,
    Kind,
    Loop,
    Value,
    Values,
    combined,
    join,
    makes_pairs,
    models_of,
    other,
    rows_of,
)

_COPIED = (
    "a copy gets a model's buffers here, and in the default level each process has BatchNorm's statistics of its own; "
    "with BatchNorm write replicate(model, sync_batchnorm=True), or run it with --same"
)
_FACTS = {"dtype", "device", "ndim", "requires_grad", "is_cuda", "names", "layout", "grad_fn", "training"}
_OF_PATHS = (ast.Call, ast.BinOp, ast.JoinedStr, ast.FormattedValue, ast.Attribute)
_OBJECTS = {"instance", "loader", "list", "function", "model", "metric"}
_BATCHES = {"instance", "list", "dict", Kind.BATCH}
_TEXTS = ("__format__", "__str__", "__repr__")


class Expressions(Elements):
    """The value of an expression by its syntax; a method for each type of node."""

    def value(self, node: ast.AST | None) -> Value:
        if node is None:
            return Value()
        value: Value = getattr(self, f"_{type(node).__name__.lower()}", self._any)(node)
        if value.kind == "loader" and isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            value = replace(value, of=ast.unparse(node))
        parts = ast.iter_child_nodes(node) if value.kind == Kind.ALIKE and isinstance(node, _OF_PATHS) else ()
        if any(self.known.get(part, value).kind == "own" for part in parts):
            value = replace(value, kind="own")
        self.known[node] = value
        self.note_use(node, value)
        if value.is_shared and value.edits is None:
            self.known[node] = value = replace(value, edits=self.edits_of(node, value))
        return value

    def text_of(self, value: Value) -> Value:
        """The value of a value's text: for an object the result of __str__, or the fields of a dataclass."""
        if value.kind in ("list", "dict") and any(part.kind == "instance" for part in value.parts):
            return join(*map(self.text_of, value.parts))
        if value.kind != "instance":
            return value
        class_ = value.of.of
        own_methods = [method for name in _TEXTS if (method := class_.find(name))]
        if own_methods:
            return self.run(replace(own_methods[0].of, bound=value), [value, Value()], {}, None)
        is_shown = any("dataclass" in ast.unparse(decorator) for decorator in class_.node.decorator_list)
        return self.of_instance(value, "__dict__") if is_shown else value

    def shown(self, node: ast.expr) -> Value:
        """The value of an expression whose text is used."""
        self.known[node] = value = self.text_of(self.value(node))
        return value

    def _formattedvalue(self, node: ast.FormattedValue) -> Value:
        return self.shown(node.value).bare

    def _any(self, node: ast.AST) -> Value:
        """An expression without a rule of its own: it depends on a share if a part of it does."""
        parts = [self.value(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        is_shared = any(part.is_shared for part in parts)
        value = other("depends on this process's share", *parts) if is_shared else Value()
        return replace(value, models=models_of(*parts))

    def _constant(self, node: ast.Constant) -> Value:
        text = str(node.value) if isinstance(node.value, str | bool) else None
        return Value("none") if node.value is None else Value(text=text, origin=(node, self.source, ()))

    def _name(self, node: ast.Name) -> Value:
        if (holder := self.frame.scope.holder(node.id)) is not None:
            place = self.frame.scope.aliases.get(node.id) or (holder, node.id)
            return self.held(*place, holder.names[node.id])
        if hasattr(builtins, node.id):
            return Value("external", f"builtins.{node.id}")
        scope: Scope | None = self.frame.scope
        while scope is not None and not scope.stars:
            scope = scope.parent
        return Value("external", f"{scope.stars[0]}.{node.id}") if scope else Value()

    def _attribute(self, node: ast.Attribute) -> Value:
        base, name = self.value(node.value), node.attr
        if base.kind == "instance":
            return self.of_instance(base, name)
        if base.kind in ("module", "class", "super"):
            return self._of_class(base, name)
        if base.kind == "external":
            return Value("external", f"{base.of}.{name}")
        known = base.of.get(name) if base.kind == "list" else self._set_before(node)  # of a named tuple
        if known is not None:
            return known
        if name in _FACTS or (name == "shape" and base.kind in NUMBERS):
            return Value()
        if name == "shape" and base.kind in ROWS:
            return self.shape(base)
        is_method = getattr(self.source.parents.get(node), "func", None) is node
        if base.kind in ROWS and name in NAMED["field"] and not is_method:
            return self.loss_of_model(node) if name == "loss" else counted(base, self.batches)
        if name in ("T", "mT", "H") and base.kind in ROWS:
            return turned(base)
        if base.kind in (*ROWS, *NUMBERS, Kind.ROW, "model"):
            return base if name == "module" else Value(base.kind, base.of)
        return other(base.of, base) if base.is_shared else Value(models=base.models)

    def _of_class(self, base: Value, name: str) -> Value:
        if base.kind == "super":
            instance, class_node = base.of
            inherited = instance.of.of.above(class_node, name)
            return Value("function", replace(inherited.of, bound=instance)) if inherited else Value()
        if base.kind == "class" and name == "apply" and base.of.descends_from("Function"):
            # `apply` of an autograd.Function calls `forward` with a first argument of torch
            context = Value("external", "torch.autograd.ctx")
            return Value("function", replace(base.of.find("forward").of, bound=context))
        return base.of.find(name) or Value()

    def of_instance(self, base: Value, name: str) -> Value:
        if name == "__dict__":
            fields = [value for value in base.of.scope.names.values() if value.is_shared]
            return self.holding(fields) if fields else Value()
        own: Value | None = base.of.scope.names.get(name)
        if own is not None:
            return own  # also a function: kept in an object it is no method
        entry = base.of.of.find(name)
        if entry is None and self.is_model(base):
            return base if name == "module" else Value("model", base.of.key)
        if entry is None or entry.kind != "function" or entry.of.bound or "staticmethod" in entry.of.marks:
            return entry or Value()
        function = replace(entry.of, bound=base)
        if "property" not in function.marks:
            return Value("function", function)
        result = self.run(function, [base], {}, None)
        body = [statement for statement in function.node.body if not isinstance(statement, ast.Expr)]
        returned = body[0].value if len(body) == 1 and isinstance(body[0], ast.Return) else None
        if result.is_shared and returned is not None:
            result = replace(result, origin=(returned, function.source, ()))
        return replace(result, edits=None)

    def _binop(self, node: ast.BinOp) -> Value:
        nodes = (node.left, node.right)
        operands = self.together(nodes, [self.value(operand) for operand in nodes])
        left, right = self.beside_rows(nodes, operands)
        if isinstance(node.op, ast.Mod) and left.text is not None:
            right = self.shown(node.right)
        if isinstance(node.left, ast.List) and right.kind == Kind.COUNT:
            return Value(Kind.ROWS)  # [length] * len(x)
        if left.kind == "list" and right.kind == Kind.ALIKE:  # [x] * 4, (len(x),) + (1,) * 3
            kept = {None: join(*left.parts)} if isinstance(node.op, ast.Mult) else {None: Value()} | left.of
            return Value("list", kept, models_of(left))
        if left.kind == right.kind == "list" and isinstance(node.op, ast.Add):
            are_known = {None, LENGTH}.isdisjoint(left.of.keys() | right.of.keys())
            parts = [*left.parts, *right.parts]
            of = dict(enumerate(parts)) if are_known else {None: join(*parts)}
            return Value("list", of, models_of(left, right))
        if (
            self.in_forward
            and {left.kind, right.kind} == {"list", Kind.ROWS}
            and isinstance(node.op, ast.Add)
        ):
            left, right = (join(*value.opened) for value in (left, right))  # lists of features
        are_shared = left.is_shared or right.is_shared
        result = combined(node.op, left, right, self.batches) if are_shared else Value()
        if not isinstance(node.op, ast.MatMult):
            result = self._pairs({left.kind, right.kind}) or result
        return replace(result, models=models_of(left, right))

    def _pairs(self, kinds: set[str]) -> Value | None:
        return Value(Kind.OTHER, PAIRS) if makes_pairs(kinds) and not self.in_forward else None

    def _unaryop(self, node: ast.UnaryOp) -> Value:
        return replace(self.value(node.operand).bare, origin=(node, self.source, ()))

    def _boolop(self, node: ast.BoolOp) -> Value:
        values = [self.value(operand) for operand in node.values]
        joined = join(*values)
        return joined if joined.kind in (*ROWS, "list") or not joined.is_shared else self._any(node)

    def _compare(self, node: ast.Compare) -> Value:
        nodes = (node.left, *node.comparators)
        values = self.together(nodes, [self.value(operand) for operand in nodes])
        if (holds := self.decided(node)) is not None:
            return Value(text=str(holds))
        if any(operand.kind == "none" for operand in values):
            return Value()
        are_keys = values[-1].kind == Kind.BATCH or (values[-1].kind == "dict" and None not in values[-1].of)
        if isinstance(node.ops[0], ast.In | ast.NotIn) and are_keys and not values[0].is_shared:
            return Value()
        kinds = {operand.kind for operand in values if operand.is_shared}
        is_zero = isinstance(nodes[-1], ast.Constant) and nodes[-1].value == 0
        if kinds == {Kind.ROW} or (kinds == {Kind.COUNT} and is_zero):
            # every process has at least one sample
            return Value(Kind.ROW if Kind.ROW in kinds else Kind.ALIKE)
        if kinds == {Kind.ROWS} and isinstance(node.ops[0], ast.Eq) and self._are_across(nodes, values):
            return turned(Value(Kind.ROWS))
        if kinds <= ROWS:
            return self._pairs(kinds) or (rows_of(kinds) if kinds else Value())
        return other("is a comparison of this rank's values", *values)

    def _are_across(self, nodes: Sequence[ast.expr], values: Values) -> bool:
        """Whether samples come along the second dimension, as in `y == ids[:, None]`, where all ranks have `ids`."""
        made = [value.origin[0] if value.origin else node for node, value in zip(nodes, values, strict=True)]
        columns = [value.kind for node, value in zip(made, values, strict=True) if makes_column(node)]
        return columns == [Kind.ALIKE] and not self.in_forward

    def _ifexp(self, node: ast.IfExp) -> Value:
        if (known := self.decided(node.test)) is not None:
            return self.value(node.body if known else node.orelse)
        test, value = self.value(node.test), join(self.value(node.body), self.value(node.orelse))
        depends_on_share = test.is_shared and test.kind != Kind.ROW
        return other("is chosen by this rank's values", test) if depends_on_share else value.bare

    def _list(self, node: ast.Tuple | ast.List | ast.Set) -> Value:
        values: list[Value] = []
        for element in node.elts:
            value = self.kept(self.value(element))
            is_opened = isinstance(element, ast.Starred) and value.kind == "list" and None not in value.of
            values += value.parts if is_opened else [value]
        if all(element.kind == Kind.ALIKE for element in values) and (values or isinstance(node, ast.List)):
            return Value(models=models_of(*values))
        return Value("list", dict(enumerate(values)), models_of(*values))

    _tuple = _set = _list

    def _dict(self, node: ast.Dict) -> Value:
        values = [self.named(value, self.value(value), {*NUMBERS, Kind.OTHER}) for value in node.values]
        keys = [getattr(key, "value", None) for key in node.keys]
        if {value.kind for value in values} == {Kind.ROWS}:
            return Value(Kind.BATCH)
        is_known = any(value.kind in _OBJECTS or value.is_shared for value in values)
        models = models_of(*values)
        return Value("dict", dict(zip(keys, values, strict=True)), models) if is_known else join(*values).bare

    def _starred(self, node: ast.Starred | ast.NamedExpr) -> Value:
        value = self.value(node.value)
        if isinstance(node, ast.NamedExpr):
            self.bind(node.target, self.kept(value))
        return value

    _namedexpr = _starred

    def _lambda(self, node: ast.Lambda) -> Value:
        return Value("function", Function(node, self.frame.scope, self.source))

    def _listcomp(self, node: Any) -> Value:
        """The values of a comprehension, which is followed as a loop."""
        whole = self.value(node.generators[0].iter)
        gathers = any(isinstance(edit, Edit) and "gather(" in edit.text for edit in whole.edits or ())
        if gathers and whole.kind == Kind.OTHER and self.batches is not None:
            return replace(whole, edits=None)  # all samples here would not fit the rest of the step
        element = node.value if isinstance(node, ast.DictComp) else node.elt
        scope, loops = self.frame.scope, len(self.loops)
        self.frame.scope = Scope(scope)
        for part in node.generators:
            loop_over = self.each(over := self.over(part.iter))
            self.bind(part.target, (*loop_over.objects, loop_over.element)[0])
            tests = [self.value(test).is_shared for test in part.ifs]
            self.enter(replace(loop_over, kind="rows" if any(tests) else loop_over.kind), node)
        value = self.kept(self.value(element))
        for other_element in loop_over.objects[1:] if len(node.generators) == 1 else ():
            self.bind(part.target, other_element)
            value = join(value, self.kept(self.value(element)))
            self.known[element] = join(self.known[element], value)
        kinds = {loop.kind for loop in self.loops[loops:]}
        if isinstance(node, ast.GeneratorExp) and kinds == {"batches"} and value.kind in _BATCHES:
            del self.loops[loops:]
            self.frame.scope = scope
            return Value("each", replace(loop_over, element=value))  # another loop goes over it
        batches = self.batches
        are_rows = value.kind == Kind.ROWS and batches and not (batches.trains or batches.lends)
        are_rows = are_rows and "batches" in kinds
        if "batches" in kinds and batches is not None and not are_rows:
            value = self.per_batch(batches, element, value)
        elif "rows" in kinds:
            value = Value(Kind.OTHER, value.of) if isinstance(value.of, str) else Value(Kind.ROWS)
        del self.loops[loops:]
        self.frame.scope = scope
        if value.kind == Kind.ROWS and (isinstance(node, ast.DictComp) or over.kind == Kind.BATCH):
            return Value(Kind.BATCH)
        is_element = value.kind in (Kind.ALIKE, "loader", "model", Kind.ROWS) and not are_rows
        # not the parts of a batch, but the batch again and again
        is_element &= value.kind != Kind.ROWS or loop_over.element.is_shared or kinds != {"plain"}
        if is_element or (kinds == {"plain"} and value.kind == Kind.PART):
            return value
        return Value("list", {None: replace(value, of=batches) if are_rows else value}, value.models)

    _setcomp = _generatorexp = _dictcomp = _listcomp

    def over(self, node: ast.expr) -> Value:
        """The value that a loop iterates over; outside of all batches these are the samples of all ranks."""
        value = self.value(node)
        is_of_buffers = self.batches is not None and ".buffers()" in ast.unparse(node)
        if is_of_buffers and "copy_(" in ast.unparse(self.source.parents[node]):
            self.findings.note(self.source, node, _COPIED)
        is_even = value.kind != "each" or value.of.kind == "batches"
        element = value if is_even else value.of.element
        kinds = {value.kind} if is_even else {element.kind, *(part.kind for part in element.parts)}
        is_rows = value.kind in ROWS or (not is_even and value.of.kind == "rows" and element.kind != Kind.ROW)
        is_unknown = Kind.OTHER in kinds and not self.in_forward
        total = self.total(node) if (is_rows and self.is_outside) or is_unknown else value
        has_no_total = is_unknown and (value.edits is None or not self.may_total())
        return Value(Kind.ROWS) if has_no_total and kinds & {Kind.ROW, *ROWS} else total

    def each(self, over: Value) -> Loop:
        if over.kind == "each":
            loop: Loop = over.of
            return loop
        if over.kind == "instance" and (method := over.of.of.find("__iter__")) is not None:
            inner = self.run(replace(method.of, bound=over), [over], {}, None)
            return self._each_next(over) if inner.of is over.of else self.each(inner)
        if over.kind == "instance" and self.is_model(over):
            return Loop(Value("model", over.of.key))  # the layers of a Sequential, or of a ModuleList
        if over.kind in (Kind.BATCH, *TURNED):
            return Loop(Value(Kind.ROWS))
        if over.kind == "loader":
            call = over.origin[0] if over.origin else None
            return Loop(Value(Kind.BATCH), "batches", over.of, call, sizes=frozenset({over.text}))
        if over.kind in (Kind.ROWS, Kind.ROW, Kind.SOME, Kind.COUNT):
            return Loop(Value(Kind.ROW), "rows")
        if over.kind in ("list", "dict"):
            objects = tuple(part for part in over.parts if part.kind in ("instance", "function"))
            return Loop(join(*over.parts), objects=objects) if over.kind == "list" else Loop(Value())
        return Loop(over.bare)

    def _each_next(self, iterator: Value) -> Loop:
        """The loop over an object with `__next__`."""
        self.loops.append(loop := Loop())
        loop.element = self.next_of(iterator)
        self.loops.remove(loop)
        return replace(loop, text=None, sizes=frozenset(loop.taken))

    def next_of(self, iterator: Value) -> Value:
        method = iterator.of.of.find("__next__")
        return self.run(replace(method.of, bound=iterator), [iterator], {}, None) if method else Value()
