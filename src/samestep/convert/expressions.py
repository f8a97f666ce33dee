"""Follows the expressions of a script, and what they are bound to."""

import ast
import builtins
from dataclasses import replace
from typing import Any

from samestep.convert.names import Names
from samestep.convert.project import Function, Scope
from samestep.convert.signatures import NUMBERED, counted
from samestep.convert.values import NUMBERS, ROWS, Kind, Loop, Sum, Value, combined, join, models_of, other

_FACTS = {"dtype", "device", "ndim", "requires_grad", "is_cuda", "names", "layout", "grad_fn", "training"}
_TEXTS = ("__format__", "__str__", "__repr__")
_HOLDS = "holds values of this process's share"


class Expressions(Names):
    """What is known of an expression, by its form."""

    def value(self, node: ast.AST | None) -> Value:
        if node is None:
            return Value()
        found: Value = getattr(self, f"_{type(node).__name__.lower()}", self._any)(node)
        if found.kind == "loader" and isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            found = replace(found, of=ast.unparse(node))
        self.known[node] = found
        if found.is_shared and not self.may_total():
            self.found.alone[self.source, self.source.start(node)] = None
        if found.is_shared and found.edits is None:
            self.known[node] = found = replace(found, edits=self.edits_of(node, found))
        return found

    def text_of(self, value: Value) -> Value:
        """What is shown where a value is: of an object what its class makes of it, or the fields of a dataclass."""
        if value.kind in ("list", "dict") and any(part.kind == "instance" for part in value.parts):
            return join(*map(self.text_of, value.parts))
        if value.kind != "instance":
            return value
        made = value.of.of
        methods = [found for name in _TEXTS if (found := made.find(name))]
        if methods:
            return self.run(replace(methods[0].of, bound=value), [value, Value()], {}, None)
        is_shown = any("dataclass" in ast.unparse(one) for one in made.node.decorator_list)
        return self.of_instance(value, "__dict__") if is_shown else value

    def shown(self, node: ast.expr) -> Value:
        """The value of an expression whose text is used."""
        self.known[node] = found = self.text_of(self.value(node))
        return found

    def _formattedvalue(self, node: ast.FormattedValue) -> Value:
        return self.shown(node.value).bare

    def is_model(self, value: Value) -> bool:
        is_ours = value.kind == "instance" and value.of.of.descends_from("Module", "Model")
        return value.kind == "model" or is_ours

    def _any(self, node: ast.AST) -> Value:
        """Of an expression without a rule of its own: it depends on a share where a part of it does."""
        parts = [self.value(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        is_shared = any(part.is_shared for part in parts)
        found = other("depends on this process's share", *parts) if is_shared else Value()
        return replace(found, models=models_of(*parts))

    def _constant(self, node: ast.Constant) -> Value:
        text = str(node.value) if isinstance(node.value, str | bool) else None
        return Value("none") if node.value is None else Value(text=text)

    def _name(self, node: ast.Name) -> Value:
        scope: Scope | None = self.frame.scope
        if (found := self.frame.scope.find(node.id)) is not None:
            while scope is not None and node.id not in scope.names:
                scope = scope.parent
            # a dict or an object, of which elements were set one by one
            prefixes = (f"{node.id}[", f"{node.id}.")
            fields = scope.names if scope else {}
            parts = [part for name, part in fields.items() if name.startswith(prefixes) and part.is_shared]
            if found.is_shared or not parts:
                return found
            named = {key: fields.get(f"{node.id}[{key!r}]", Value()) for key in _keys(found)}
            if all(part.is_shared for part in named.values()) and len(named) == len(parts):
                return Value("dict", named, since=found.since)
            return self._holding(parts, all(isinstance(part.of, Sum) for part in parts))
        if hasattr(builtins, node.id):
            return Value("external", f"builtins.{node.id}")
        while scope is not None and not scope.stars:
            scope = scope.parent
        return Value("external", f"{scope.stars[0]}.{node.id}") if scope else Value()

    def _holding(self, held: list[Value], are_sums: bool = True) -> Value:
        """What holds numbers that were added up over batches: in training they are totalled where they are added."""
        sums = [value.of for value in held if isinstance(value.of, Sum) and value.of.loop.trains]
        nodes = tuple(node for found in sums for node in found.nodes) if are_sums else ()
        return other(_HOLDS, *held, edits=nodes or None)

    def _attribute(self, node: ast.Attribute) -> Value:
        base, name = self.value(node.value), node.attr
        if base.kind == "instance":
            return self.of_instance(base, name)
        if base.kind in ("module", "class", "super"):
            return self._of_class(base, name)
        if base.kind == "external":
            return Value("external", f"{base.of}.{name}")
        if (known := self._set_before(node)) is not None:
            return known
        if name in _FACTS or (name == "shape" and base.kind in NUMBERS):
            return Value()
        if name == "shape" and base.kind in ROWS:
            return self.shape(base)
        if name in ("T", "mT", "H") and base.kind in ROWS:
            return Value(Kind.ROWS if base.kind == Kind.COLUMNS else Kind.COLUMNS)
        if base.kind in (*ROWS, *NUMBERS, Kind.ROW, "model"):
            return base if name == "module" else Value(base.kind, base.of)
        return other(base.of, base) if base.is_shared else Value(models=base.models)

    def _of_class(self, base: Value, name: str) -> Value:
        if base.kind == "super":
            own, of = base.of
            inherited = own.of.of.above(of, name)
            return Value("function", replace(inherited.of, bound=own)) if inherited else Value()
        if base.kind == "class" and name == "apply" and base.of.descends_from("Function"):
            # of an autograd.Function, of which the first argument is torch's
            return Value("function", replace(base.of.find("forward").of, bound=Value()))
        return base.of.find(name) or Value()

    def shape(self, of: Value) -> Value:
        return Value("list", {0: counted(of, self.batches), None: Value()})

    def of_instance(self, base: Value, name: str) -> Value:
        if name == "__dict__":
            held = [value for value in base.of.scope.names.values() if value.is_shared]
            return self._holding(held) if held else Value()
        found = base.of.scope.names.get(name) or base.of.of.find(name)
        if found is None and self.is_model(base):
            return base if name == "module" else Value("model", base.of.key)
        if found is None or found.kind != "function" or found.of.bound or "staticmethod" in found.of.marks:
            return found or Value()
        function = replace(found.of, bound=base)
        if "property" not in function.marks:
            return Value("function", function)
        made = self.run(function, [base], {}, None)
        body = [one for one in function.node.body if not isinstance(one, ast.Expr)]
        form = body[0].value if len(body) == 1 and isinstance(body[0], ast.Return) else None
        by_form = (form, function.source, ()) if made.is_shared and form is not None else made.made
        return replace(made, edits=None, made=by_form)

    def _subscript(self, node: ast.Subscript) -> Value:
        base, index = self.value(node.value), self.value(node.slice)
        if (known := self._set_before(node)) is not None:
            return known
        at = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if base.kind in ("list", "dict"):
            if isinstance(base.of.get(None, Value()).of, Sum):
                return Value(Kind.OTHER, "is of single batches")
            if isinstance(node.slice, ast.Slice) and node.slice.lower is not None:
                return join(*(part for key, part in base.of.items() if key != 0))
            return base if isinstance(node.slice, ast.Slice) else self.part_of(base, at)
        if base.kind in (Kind.ROWS, Kind.SOME, Kind.VIEWS):
            return self._rows_at(node, base, index)
        if base.kind == Kind.ALIKE and index.of == NUMBERED:
            return other(NUMBERED)
        if base.kind == Kind.ALIKE and index.is_shared:
            if isinstance(index.made and index.made[0], ast.Compare):
                edits = index.edits or self.edits_of(node.slice, index)
                return replace(other("is chosen by a mask of a share"), edits=edits)
            return Value(Kind.ROW if index.kind == Kind.ROW else Kind.ROWS)
        if base.kind in (Kind.BATCH, Kind.COLUMNS):
            is_row = not isinstance(node.slice, ast.Slice) or base.kind == Kind.BATCH
            return Value(Kind.ROWS if is_row else Kind.COLUMNS)
        return base.bare

    def _rows_at(self, node: ast.Subscript, base: Value, index: Value) -> Value:
        first = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) and node.slice.elts else node.slice
        is_all = isinstance(first, ast.Slice) and first.lower is first.upper is None
        if isinstance(first, ast.Constant):
            is_all = first.value in (None, Ellipsis) or isinstance(first.value, str)
        along = Value() if is_all else self.value(first)
        if along.kind in (Kind.ROW, Kind.OTHER):
            return along.bare if along.kind == Kind.ROW else other(along.of, along)
        if is_all or self.in_forward:
            return Value(base.kind)
        if index.is_shared:
            # the first index goes along the rows: a mask chooses some; beside an index for each row it chooses within
            return Value(Kind.SOME if first is node.slice else Kind.ROWS)
        return Value(Kind.OTHER, "is of some samples of a share")

    def _binop(self, node: ast.BinOp) -> Value:
        nodes = (node.left, node.right)
        left, right = self.together(nodes, [self.value(one) for one in nodes])
        if isinstance(node.op, ast.Mod) and left.text is not None:
            right = self.shown(node.right)
        is_shared = left.is_shared or right.is_shared
        found = combined(node.op, left, right) if is_shared else Value()
        return replace(found, models=models_of(left, right))

    def _unaryop(self, node: ast.UnaryOp) -> Value:
        return self.value(node.operand).bare

    def _boolop(self, node: ast.BoolOp) -> Value:
        values = [self.value(one) for one in node.values]
        found = join(*values)
        return found if found.kind in (*ROWS, "list") or not found.is_shared else self._any(node)

    def _compare(self, node: ast.Compare) -> Value:
        nodes = (node.left, *node.comparators)
        values = self.together(nodes, [self.value(one) for one in nodes])
        if (holds := self.decided(node)) is not None:
            return Value(text=str(holds))
        if any(one.kind == "none" for one in values):
            return Value()
        kinds = {one.kind for one in values if one.is_shared}
        if kinds <= {Kind.ROWS, Kind.BATCH} or kinds == {Kind.ROW}:
            return Value(Kind.ALIKE if not kinds else Kind.ROW if Kind.ROW in kinds else Kind.ROWS)
        return other("is a comparison of this rank's values", *values)

    def decided(self, test: ast.expr) -> bool | None:
        """Whether a test for None, or of a string or a truth that the script gives, holds, where that is known."""
        if (asked := _asked(test)) is None or self.loops[self.frame.loops_before :]:
            return None
        node, sought, holds = asked
        value, is_own = self.value(node), isinstance(node, ast.Name) and node.id in self.frame.scope.names
        if value.since and not is_own:
            return None
        if sought is None:
            is_known = value.kind in ("none", "optimizer") or value.is_shared
            return (value.kind == "none") == holds if is_known else None
        is_alike = value.text is not None and isinstance(sought, bool) == (value.text in ("True", "False"))
        return (value.text == str(sought)) == holds if is_alike else None

    def _ifexp(self, node: ast.IfExp) -> Value:
        if (known := self.decided(node.test)) is not None:
            return self.value(node.body if known else node.orelse)
        test, found = self.value(node.test), join(self.value(node.body), self.value(node.orelse))
        is_chosen = test.is_shared and test.kind != Kind.ROW
        return other("is chosen by this rank's values", test) if is_chosen else found.bare

    def _list(self, node: ast.Tuple | ast.List | ast.Set) -> Value:
        values = [self.kept(self.value(one)) for one in node.elts]
        if all(one.kind == Kind.ALIKE for one in values) and (values or isinstance(node, ast.List)):
            return Value(models=models_of(*values))
        return Value("list", dict(enumerate(values)), models_of(*values))

    _tuple = _set = _list

    def _dict(self, node: ast.Dict) -> Value:
        values = [self.named(one, self.value(one), {*NUMBERS, Kind.OTHER}) for one in node.values]
        keys = [getattr(key, "value", None) for key in node.keys]
        if {one.kind for one in values} == {Kind.ROWS}:
            return Value(Kind.BATCH)
        kinds = {one.kind for one in values} & {"instance", "loader", "list", "function"}
        is_known = bool(kinds) or any(one.is_shared for one in values)
        return Value("dict", dict(zip(keys, values, strict=True))) if is_known else join(*values).bare

    def _starred(self, node: ast.Starred | ast.NamedExpr) -> Value:
        found = self.value(node.value)
        if isinstance(node, ast.NamedExpr):
            self.bind(node.target, self.kept(found))
        return found

    _namedexpr = _starred

    def _lambda(self, node: ast.Lambda) -> Value:
        return Value("function", Function(node, self.frame.scope, self.source))

    def _listcomp(self, node: Any) -> Value:
        """The values that a comprehension makes, followed as a loop."""
        element = node.value if isinstance(node, ast.DictComp) else node.elt
        scope, loops = self.frame.scope, len(self.loops)
        self.frame.scope = Scope(scope)
        for part in node.generators:
            each = self.each(self.over(part.iter))
            self.bind(part.target, (*each.objects, each.element)[0])
            tests = [self.value(test).is_shared for test in part.ifs]
            self.enter(replace(each, kind="rows" if any(tests) else each.kind), node)
        found = self.kept(self.value(element))
        for one in each.objects[1:] if len(node.generators) == 1 else ():
            self.bind(part.target, one)
            found = join(found, self.kept(self.value(element)))
            self.known[element] = join(self.known[element], found)
        kinds = {loop.kind for loop in self.loops[loops:]}
        batches = self.batches
        are_rows = batches and found.kind == Kind.ROWS and not (batches.trains or batches.lends)
        if are_rows:
            found = found if "batches" in kinds else Value("list", {None: found})
        elif "batches" in kinds and batches is not None:
            found = self.per_batch(batches, element, found)
        elif "rows" in kinds:
            found = Value(Kind.OTHER, found.of) if isinstance(found.of, str) else Value(Kind.ROWS)
        del self.loops[loops:]
        self.frame.scope = scope
        if found.kind == Kind.ROWS and isinstance(node, ast.DictComp):
            return Value(Kind.BATCH)
        is_element = found.kind in (Kind.ALIKE, "loader", "model", Kind.ROWS) and not are_rows
        if is_element or (kinds == {"plain"} and found.kind == Kind.PART):
            return found
        return Value("list", {None: found}, found.models)

    _setcomp = _generatorexp = _dictcomp = _listcomp

    def over(self, node: ast.expr) -> Value:
        """What a loop goes through: outside of all batches the samples of all ranks."""
        value = self.value(node)
        is_even = value.kind != "each" or value.of.kind == "batches"
        element = value if is_even else value.of.element
        kinds = {value.kind} if is_even else {element.kind, *(part.kind for part in element.parts)}
        is_rows = value.kind in ROWS or (not is_even and value.of.kind == "rows" and element.kind != Kind.ROW)
        is_unknown = Kind.OTHER in kinds and not self.in_forward
        return self.total(node) if (is_rows and self.is_outside) or is_unknown else value

    def each(self, over: Value) -> Loop:
        """What a loop over this gets at each turn."""
        if over.kind == "each":
            found: Loop = over.of
            return found
        if over.kind == "instance" and (method := over.of.of.find("__iter__")) is not None:
            return self.each(self.run(replace(method.of, bound=over), [over], {}, None))
        if over.kind in ("loader", Kind.BATCH):
            is_loader = over.kind == "loader"
            call = over.made[0] if is_loader and over.made else None
            if not is_loader:
                return Loop(Value(Kind.ROWS))
            return Loop(Value(Kind.BATCH), "batches", over.of, call, size=over.text)
        if over.kind in (Kind.ROWS, Kind.ROW, Kind.SOME, Kind.COUNT):
            return Loop(Value(Kind.ROW), "rows")
        if over.kind in ("list", "dict"):
            objects = tuple(part for part in over.parts if part.kind in ("instance", "function"))
            return Loop(join(*over.parts), objects=objects) if over.kind == "list" else Loop(Value())
        return Loop(over.bare)


def _keys(held: Value) -> list[object]:
    """The keys of the dict that the script wrote."""
    made = held.made[0] if held.made else None
    if isinstance(made, ast.Dict):
        return [getattr(key, "value", None) for key in made.keys]
    is_dict = isinstance(made, ast.Call) and ast.unparse(made.func) == "dict"
    return [keyword.arg for keyword in made.keywords] if is_dict else []  # type: ignore[union-attr]


def _asked(test: ast.expr) -> tuple[ast.expr, object, bool] | None:
    """What a test compares, with which constant, and whether it asks for that or for another."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            found = _asked(inner)
            return found and (*found[:2], not found[2])
        case ast.Compare(left=left, ops=[ast.Is() | ast.Eq()], comparators=[ast.Constant(value=sought)]):
            return left, sought, True
        case ast.Compare(
            left=left, ops=[ast.IsNot() | ast.NotEq()], comparators=[ast.Constant(value=sought)]
        ):
            return left, sought, False
        case ast.Name() | ast.Attribute():
            return test, True, True
    return None
