"""Rules for Python's own functions, those of its modules, and tqdm."""

import ast
import re
from collections.abc import Callable
from dataclasses import replace

from samestep.convert.rewrites import LOADERS
from samestep.convert.signatures import NAMED, NUMBERED, of_tensors
from samestep.convert.source import Source, takes_apart
from samestep.convert.unknown import Unknown
from samestep.convert.values import LENGTH, NUMBERS, ROWS, Kind, Loop, Value, Values, join, other

_ENDS = (
    "in an evaluation a process may have fewer batches than the loader, and next() fails there; write a `for` loop "
    "over the loader, or give it drop_last=True"
)
_GROWING = ("dict", "OrderedDict", "defaultdict", "Counter")


class Python(Unknown):
    """The value of a call of a function that comes with Python."""

    external: Callable[[str, ast.Call], Value]

    def of_python(self, name: str, node: ast.Call, values: Values, first: Value) -> Value:
        """The value of a function of Python, or of one of its modules, or of tqdm."""
        rule: Callable[..., Value] | None = getattr(self, f"_python_{name}", None)
        if rule is not None:
            return rule(node, values, first)
        if name in NAMED["fact"] or name == "type":
            return Value()
        given = values[1] if len(values) == 2 else Value()
        if name == "map" and first.kind == "function" and given.kind in ("list", Kind.BATCH):
            made = {key: self.run(first.of, [part], {}, None) for key, part in given.by_key.items()}
            is_batch = given.kind == Kind.BATCH and made[None].kind == Kind.ROWS
            return Value(Kind.BATCH) if is_batch else Value("list", made)
        listed = getattr(node.args[-1], "elts", []) if name == "map" and len(node.args) == 2 else []
        if listed and first.kind == "external":
            calls = [ast.copy_location(ast.Call(node.args[0], [part], []), part) for part in listed]
            return Value("list", {key: self.external(str(first.of), call) for key, call in enumerate(calls)})
        if name in ("chain", "filter", "map"):
            return join(*values)
        if name == "cycle" and first.kind == "loader":
            self.findings.edit(*self.source.kept(node, node.args[0], after=".cycle()"))
        if name == "partial" and first.of in LOADERS:
            self.gap(node, "functools.partial of DataLoader; call DataLoader itself")
        if name not in NAMED["kept"] or not values or (name == "abs" and first.kind in NUMBERS):
            return self.opaque(node, values)
        self.shown_once(name, node)
        if name == "int" and isinstance(node.args[0], ast.BinOp) and first.kind in (Kind.PART, Kind.COUNT):
            return other("is rounded in a share")
        return Value("each", self.each(first)) if first.kind == "loader" else first

    def _python_len(self, node: ast.Call, values: Values, first: Value) -> Value:
        around = self.frame.function or self.source.tree
        if first.kind == Kind.BATCH and takes_apart(around, ast.unparse(node.args[0])):
            return Value()  # the parts of a batch, not its samples
        if first.kind in ROWS:
            return self.part_of(self.shape(first), 0)
        if first.kind == Kind.OTHER:
            return other("is a length of what a share makes", first)
        if first.kind == "list" and LENGTH in first.of:
            length: Value = first.of[LENGTH]
            return length
        if first.kind in NUMBERS and self._begins_empty(node.args[0]):
            return other("is the number of keys that a share has", first)
        is_filled = first.kind == "list" and first.is_shared and first.of.keys() == {None}
        return Value(Kind.PASSES if is_filled else Kind.ALIKE)

    def _begins_empty(self, node: ast.expr) -> bool:
        """Whether a name is first given an empty dict, which then gets its keys from the data."""
        around, name = self.frame.function or self.source.tree, ast.unparse(node)
        assigned = [part for part in ast.walk(around) if isinstance(part, ast.Assign)]
        made = [part.value for part in assigned if name in map(ast.unparse, part.targets)]
        calls = [value for value in made if isinstance(value, ast.Call) and not value.keywords]
        is_call = any(ast.unparse(call.func).rpartition(".")[2] in _GROWING for call in calls)
        return is_call or any(isinstance(value, ast.Dict) and not value.keys for value in made)

    def _python_enumerate(self, node: ast.Call, values: Values, first: Value) -> Value:
        loop = self.each(first)
        turn = {"batches": Value("turn"), "rows": Value(Kind.ROW, NUMBERED)}.get(loop.kind, Value())
        return Value("each", loop.mapped(lambda element: Value("list", {0: turn, 1: element})))

    def _python_zip(self, node: ast.Call, values: Values, first: Value) -> Value:
        loops = [self.each(value) for value in values]
        kinds = [kind for kind in ("batches", "rows") if kind in {part.kind for part in loops}]
        batches = [part for part in loops if part.kind == "batches"]
        elements = Value("list", dict(enumerate(part.element for part in loops)))
        sizes = frozenset[str | None]().union(*(part.sizes for part in batches))
        text = (*(part.text for part in batches), None)[0]
        return Value("each", Loop(elements, (*kinds, "plain")[0], text, sizes=sizes))

    def _python_next(self, node: ast.Call, values: Values, first: Value) -> Value:
        """The value of next(); on an iterator over a loader, the loop around becomes a loop over batches."""
        if first.kind == "instance":
            return self.next_of(first)
        over = self.each(first)
        if over.kind == "batches" and self.loops:
            loop = self.loops[-1]
            may_end = len(values) == 1 and not self.full_batches.issuperset(over.sizes)
            if may_end and self.is_quiet and not _ends_quietly(self.source, node):
                self.gap(node, _ENDS)
            if loop.kind == "plain":
                loop.kind, loop.text, loop.frame, loop.call = "batches", over.text, self.frame, over.call
                self.passes += [loop] if over.call else []
            loop.taken = {**dict.fromkeys(over.sizes, not self.is_quiet), **loop.taken}
            self.latest = loop
        elif over.kind == "batches":
            self.is_latest, self.latest = True, None
            self.held_batches.add(node)
        return replace(over.element, origin=(node, self.source, ())) if over.kind == "batches" else first

    def _python_iter(self, node: ast.Call, values: Values, first: Value) -> Value:
        is_of_batches = first.kind in ("loader", "instance") and (loop := self.each(first)).kind == "batches"
        return Value("each", loop) if is_of_batches else first

    def _python_range(self, node: ast.Call, values: Values, first: Value) -> Value:
        is_count = any(argument.kind in (Kind.COUNT, Kind.PART) for argument in values)
        if is_count and self.is_outside:
            for argument in node.args:
                self.total(argument)
            return Value()
        # in a model that has time first, these are the steps of time
        index = Value() if self.in_forward else Value(Kind.ROW, NUMBERED)
        return Value("each", Loop(index, "rows")) if is_count else Value()

    def _python_sum(self, node: ast.Call, values: Values, first: Value) -> Value:
        return join(*first.parts) if first.parts else of_tensors("sum", values, True, self.batches, 0)

    def _python_getattr(self, node: ast.Call, values: Values, first: Value) -> Value:
        if first.kind == "external":
            return Value("external", f"{first.of}.{values[1].text}")
        if first.kind != "instance":
            return self.opaque(node, values)
        if values[1].text:
            return self.of_instance(first, str(values[1].text))
        # "loss_" + name may be any of those that begin so
        begins = "".join(re.findall(r"^f?'(\w*)(?:' \+ |\{)", ast.unparse(node.args[1])))
        return join(*(value for name, value in first.of.scope.names.items() if name.startswith(begins)))

    def _python_super(self, node: ast.Call, values: Values, first: Value) -> Value:
        function = self.frame.function
        cls = self.source.parents.get(function)
        own = self.frame.scope.names.get(function.args.args[0].arg) if isinstance(cls, ast.ClassDef) else None
        is_known = own is not None and own.kind == "instance"
        return Value("super", (own, cls)) if is_known else self.opaque(node, values)

    def _python_sorted(self, node: ast.Call, values: Values, first: Value) -> Value:
        """Objects in another order are followed one after another too."""
        are_objects = bool(first.parts) and {part.kind for part in first.parts} <= {"instance", "function"}
        return first if are_objects else self.opaque(node, values)

    def _python_str(self, node: ast.Call, values: Values, first: Value) -> Value:
        return self.shown(node.args[0]) if node.args else Value()

    _python_repr = _python_str

    def _python_vars(self, node: ast.Call, values: Values, first: Value) -> Value:
        return self.of_instance(first, "__dict__") if first.kind == "instance" else self.opaque(node, values)

    _python_asdict = _python_astuple = _python_vars

    def _python_deepcopy(self, node: ast.Call, values: Values, first: Value) -> Value:
        if self.is_model(first):
            self.keep_copy(node)
        if first.kind == "instance":
            options = [option.arg for option in node.keywords]  # the fields that dataclasses.replace sets
            given = dict(zip(options, values[len(node.args) :], strict=True))
            scope = replace(first.of.scope, names={**first.of.scope.names, **given})
            return Value("instance", replace(first.of, key=self.key(node), scope=scope))
        return Value("model", self.key(node)) if self.is_model(first) else first

    _python_copy = _python_replace = _python_deepcopy


def _ends_quietly(source: Source, node: ast.AST) -> bool:
    """Whether the end of an iterator is caught here."""
    tries = [around for around in source.around(node) if isinstance(around, ast.Try)]
    handlers = [handler for around in tries for handler in around.handlers]
    return any(handler.type is None or "StopIteration" in ast.unparse(handler.type) for handler in handlers)
