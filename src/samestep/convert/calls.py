"""Follows the calls of a script: torch's functions by name, the project's own into their bodies."""

import ast
from dataclasses import dataclass, replace
from typing import Any

from samestep.convert.libraries import Libraries
from samestep.convert.source import Source
from samestep.convert.values import (
    BETWEEN_ROWS,
    LINEAR,
    MEANS,
    ROWS,
    SCALARS,
    STATISTICS,
    SUMS,
    Instance,
    Kind,
    Named,
    Value,
    Values,
    join,
    reduced,
)

_OF_TENSORS = {*ROWS, *SCALARS, Kind.ROW, Kind.OTHER, Kind.RATIO, Kind.SHAPE, "tuple", "list", "iter", "dict"}
_OF_LISTS = {"append", "extend", "add", "update", "scale", "items"}


@dataclass(frozen=True, eq=True)
class Site:
    """Where the parameters of a model are given to an optimizer: the model's name there, and its parts' roots."""

    names: tuple[tuple[str, Any], ...]
    statement: ast.stmt
    source: Source


class Calls(Libraries):
    """What a call gives."""

    def __init__(self) -> None:
        super().__init__()
        self.sites: dict[Site, None] = {}
        self.called: set[Any] = set()
        self.loaders: dict[ast.Call, Source] = {}
        self.saves: dict[ast.Call, Source] = {}
        self.eager: set[ast.expr] = set()  # what is totalled in the loop, as its sum is shown there

    def _call(self, node: ast.Call) -> Value:
        found = self._method_of_a_value(node, node.func) if isinstance(node.func, ast.Attribute) else None
        if found is not None:
            return found
        callee = self.value(node.func)
        if callee.kind == "external":
            return self.external(str(callee.of), node)
        arguments = [self.lazily(one.value if isinstance(one, ast.Starred) else one) for one in node.args]
        named = {one.arg or "**": self.lazily(one.value) for one in node.keywords}
        follow = getattr(self, f"_call_of_{callee.kind}", None)
        if follow is None:
            return self._opaque(node, [*arguments, *named.values()])
        result: Value = follow(callee, node, arguments, named)
        return result

    def _method_of_a_value(self, node: ast.Call, func: ast.Attribute) -> Value | None:
        base = self.value(func.value)
        if func.attr == "backward" and not self.is_model(base):
            return self.backward(node, base)
        if base.kind in _OF_TENSORS or (base.kind == Kind.ALIKE and func.attr in _OF_LISTS):
            return self._method(node, base, func.attr)
        return base if base.kind == "loss" else None

    def _call_of_function(self, callee: Value, node: ast.Call, arguments: Values, named: Named) -> Value:
        return self.run(callee.of, arguments, named, node)

    def _call_of_method(self, callee: Value, node: ast.Call, arguments: Values, named: Named) -> Value:
        base, method, _ = callee.of
        return self.run(method, arguments if method.is_static else [base, *arguments], named, node)

    def _call_of_loss(self, callee: Value, node: ast.Call, arguments: Values, named: Named) -> Value:
        return self._loss(callee.of[0], callee.of[1], [*arguments, *named.values()])

    def is_model(self, value: Value) -> bool:
        return value.kind == "model" or (
            value.kind == "instance" and value.of.of.descends_from("Module", "Model")
        )

    def _call_of_class(self, made: Value, node: ast.Call, arguments: Values, named: Named) -> Value:
        """An object of a class of the project."""
        instance = Instance(made.of, self.key(node))
        found = Value("instance", instance)
        if made.of.descends_from("DataLoader"):
            self.gap(node, f"{made.of.node.name} is a DataLoader of the project's own; use samestep.loader")
        if (init := made.of.find("__init__")) is not None:
            self.run(init, [found, *arguments], named, node)
        else:
            fields = [
                one.target.id
                for one in made.of.node.body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            ]
            instance.scope.names |= {**dict(zip(fields, arguments, strict=False)), **named}
        if made.of.descends_from("Optimizer"):
            self._optimizes([*arguments, *named.values()])
        return replace(found, models=join(*arguments, *named.values()).models)

    def _call_of_instance(self, callee: Value, node: ast.Call, arguments: Values, named: Named) -> Value:
        """An object that is called: the forward of a model, or __call__."""
        instance: Instance = callee.of
        forward = instance.of.find("forward") if self.is_model(callee) else None
        method = forward or instance.of.find("__call__")
        if method is None:
            return self._call_of_model(callee, node, arguments, named)
        if forward is not None and not self.in_forward:
            self.called.add(instance.made_at)
        self.in_forward += forward is not None
        try:
            return self.run(method, [callee, *arguments], named, node)
        finally:
            self.in_forward -= forward is not None

    def _call_of_model(self, callee: Value, node: ast.Call, arguments: Values, named: Named) -> Value:
        """A module whose forward is not in the project, or a method of one."""
        attribute = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if attribute in ("parameters", "named_parameters") or (attribute == "params" and not arguments):
            return self._parameters(node)
        if attribute in ("train", "eval"):
            self.in_eval = attribute == "eval" or ast.unparse(node).endswith(".train(False)")
        if attribute in (
            "to",
            "cuda",
            "cpu",
            "train",
            "eval",
            "apply",
            "float",
            "double",
            "half",
            "requires_grad_",
        ):
            return self.value(node.func.value)  # type: ignore[attr-defined]
        if not self.in_forward and not attribute:
            self.called.add(callee.of if callee.kind == "model" else callee.of.made_at)
        is_shared = any(one.is_shared for one in (*arguments, *named.values()))
        return Value(Kind.ROWS) if is_shared else Value()

    def _call_of_unknown(self, callee: Value, node: ast.Call, arguments: Values, named: Named) -> Value:
        """A method that no class of the project defines."""
        base, _ = callee.of
        if self.is_model(base):
            return self._call_of_model(base, node, arguments, {})
        return self._opaque(node, arguments)

    def _parameters(self, node: ast.Call) -> Value:
        """The parameters of a model, of a part of it, or of the model whose method this is."""
        receiver: ast.expr = node.func.value  # type: ignore[attr-defined]
        frame, at = self.frame, receiver
        names: list[tuple[str, Any]] = []
        while isinstance(at, ast.Attribute | ast.Subscript | ast.Name):
            found = self.value(at)
            if self.is_model(found):
                names.append((ast.unparse(at), found.of if found.kind == "model" else found.of.made_at))
            if isinstance(at, ast.Name):
                break
            at = at.value
        while names and names[-1][0] == "self" and frame.call is not None and frame.caller is not None:
            func = frame.call.func
            if not isinstance(func, ast.Attribute):
                break
            frame, names = frame.caller, [(ast.unparse(func.value), names[-1][1])]
        names = names or [(ast.unparse(receiver), None)]
        statement = frame.statement if frame is not self.frame else self.frame.source.statement_of(node)
        assert statement is not None
        return Value(models=frozenset({Site(tuple(names), statement, frame.source)}))

    def _optimizes(self, given: Values) -> Value:
        for site in join(*given).models:
            if not self.silent:
                self.sites.setdefault(site)
        return Value("optimizer", models=join(*given).models)

    def _method(self, node: ast.Call, base: Value, name: str) -> Value:
        """A method of a tensor, a list, or a dict."""
        arguments = [self.value(one) for one in (*node.args, *(one.value for one in node.keywords))]
        if base.kind in (Kind.ALIKE, Kind.OTHER, "tuple", "list", "iter", "dict", Kind.BATCH, *SCALARS):
            found = self._of_container(node, base, name, arguments)
            if found is not None:
                return found
        if name in ("size", "__len__"):
            return self._size(node, base)
        if name in STATISTICS or name in SUMS or name in MEANS:
            return reduced(name, base, self._over_rows(node, node.args), self.batches)
        if base.kind in ROWS or base.kind == Kind.ROW:
            return self._of_rows(node, base, name, arguments)
        reason = base.of if base.kind == Kind.OTHER else f"is {name} of a share's value"
        return base if name in LINEAR else Value(Kind.OTHER, reason)

    def _of_container(self, node: ast.Call, base: Value, name: str, arguments: Values) -> Value | None:
        if name in ("append", "extend", "add", "update", "insert") and base.kind not in (
            Kind.BATCH,
            Kind.PART,
        ):
            return self.put(node, base, arguments)
        if name == "scale":
            return join(*arguments)
        if name == "items" and base.kind == "dict":
            return Value("items", join(*base.of.values()))
        if name == "items":
            return (
                Value("items", Value(Kind.ROWS) if base.kind == Kind.BATCH else base)
                if base.is_shared
                else Value()
            )
        if name in ("values", "get", "copy") and base.kind in SCALARS:
            return base
        if base.kind == "dict" and name in ("get", "pop") and node.args:
            element: Value = base.of.get(getattr(node.args[0], "value", None), Value())
            return element
        if base.kind == "dict" and name == "values":
            return Value("tuple", tuple(base.of.values()))
        if base.kind not in ("tuple", "list", "iter", "dict"):
            return None
        if name in ("get", "pop", "values", "setdefault"):
            return join(*base.of) if name != "values" else base
        return self._opaque(node, [base, *arguments])

    def _of_rows(self, node: ast.Call, base: Value, name: str, arguments: Values) -> Value:
        """A method of a tensor with a sample in each row."""
        if name in ("view", "reshape", "expand"):
            self.sized(node, node.func.value)  # type: ignore[attr-defined]
        if name in ("split", "chunk", "unbind") and base.kind != Kind.ROW:
            over_rows = len(node.args) < 2 and self._over_rows(node, node.args[1:])
            return Value(Kind.OTHER, "is a part of a share") if over_rows else Value(Kind.BATCH)
        if name == "squeeze" and not arguments:
            self.note(
                node,
                "squeeze() drops the samples' dimension where a process has one sample; name the dimension",
            )
        if name == "t":
            return Value(Kind.COLUMNS)
        if name in ("matmul", "mm") or name in BETWEEN_ROWS:
            return self.combined(ast.MatMult(), base, join(*arguments))
        return Value(Kind.ROWS if base.kind == Kind.BATCH else base.kind)

    def _size(self, node: ast.Call, base: Value) -> Value:
        if not node.args or base.kind not in ROWS:
            return Value(Kind.SHAPE) if base.kind in ROWS else Value()
        first = node.args[0]
        is_rows = isinstance(first, ast.Constant) and first.value == 0
        return (
            Value(Kind.PART if base.kind == Kind.SOME else Kind.COUNT, self.batches) if is_rows else Value()
        )

    def _opaque(self, node: ast.Call, arguments: Values) -> Value:
        """A call whose body is not in the project: it is given the values of all ranks, if nothing is done with it."""
        functions = [one.of for one in arguments if one.kind == "function"]
        for function in functions:
            self.run(function, [], {}, node)
        models = join(*arguments).models
        if not any(one.is_shared for one in arguments):
            return Value(models=models)
        if isinstance(self.frame.source.parents.get(node), ast.Expr):
            for one in (*node.args, *(one.value for one in node.keywords)):
                self.total(one.value if isinstance(one, ast.Starred) else one)
            return Value()
        called = ast.unparse(node.func)
        return Value(Kind.OTHER, f"is what {called} makes of this rank's values", models)
