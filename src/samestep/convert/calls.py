"""Follows the calls of a script into the functions, classes and objects of the project."""

import ast
import re
from dataclasses import replace
from typing import Any

from samestep.convert.library import Library
from samestep.convert.project import Class, Frame, Function, Instance, Scope, Site
from samestep.convert.signatures import NAMED, of_loss
from samestep.convert.totals import name_of
from samestep.convert.values import (
    NUMBERS,
    ROWS,
    Kind,
    Loop,
    Named,
    Value,
    Values,
    join,
    models_of,
    nameless,
    other,
    rows_of,
)

WITHOUT_GRADIENTS = re.compile("no_grad|inference_mode|set_grad_enabled")
MOST_STATEMENTS = 100_000
_DEEPEST = 25
_DATA = {*ROWS, *NUMBERS, Kind.ROW, Kind.OTHER, "list", "each", "dict"}


class Calls(Library):
    """What a call gives whose body is followed, and which rule it has otherwise."""

    def _call(self, node: ast.Call) -> Value:
        name = name_of(node)
        base = self.value(node.func.value) if isinstance(node.func, ast.Attribute) else Value("external")
        if name == "backward" and not self.is_model(base):
            return self.backward(node, base)
        if base.kind == "loss":
            return base
        if name == "format" and isinstance(text := node.func.value, ast.Constant):  # type: ignore[attr-defined]
            self.fields(node, text)
        if base.kind in _DATA or (base.kind == Kind.ALIKE and name in NAMED["list"]):
            return self.method(node, base, name).bare
        callee = self.value(node.func)
        if callee.kind == "external":
            return self.external(str(callee.of), node).bare
        return self._of_ours(callee, node, *self._arguments(node))

    def _of_ours(self, callee: Value, node: ast.Call, given: Values, named: Named) -> Value:
        if callee.kind == "function":
            bound = [] if callee.of.bound is None else [callee.of.bound]
            return self.run(callee.of, [*bound, *given], named, node)
        if callee.kind == "loss":
            return of_loss(callee.of, [*self.together(node.args, given), *named.values()], self.batches)
        if callee.kind == "class":
            return self._new(callee.of, node, given, named)
        if callee.kind in ("instance", "model"):
            return self._call_of_object(callee, node, given, named)
        return self.opaque(node, [*given, *named.values()])

    def _arguments(self, node: ast.Call) -> tuple[Values, Named]:
        """The values of a call's arguments; "*" stands for a batch that is given as its parts."""
        given: Values = []
        named = {one.arg or "**": self.passed(one.value) for one in node.keywords}
        for one in node.args:
            value = self.passed(one.value if isinstance(one, ast.Starred) else one)
            if isinstance(one, ast.Starred) and value.kind == Kind.BATCH:
                named["*"] = value
            elif isinstance(one, ast.Starred) and value.kind == "list" and None not in value.of:
                given += value.parts
            else:
                given.append(value)
        return given, named

    def _new(self, made: Class, node: ast.Call, given: Values, named: Named) -> Value:
        """An object of a class of the project."""
        instance = Instance(made, self.key(node))
        found = Value("instance", instance, models_of(*given, *named.values()))
        if made.descends_from("DataLoader"):
            self.gap(node, f"{made.node.name} is a DataLoader of the project's own; use samestep.loader")
        if (init := made.find("__init__")) is not None:
            self.run(init.of, [found, *given], named, node)
        else:
            fields = [one.target for one in made.node.body if isinstance(one, ast.AnnAssign)]
            instance.scope.names |= {**dict(zip(map(ast.unparse, fields), given, strict=False)), **named}
        if made.descends_from("Optimizer"):
            self.optimizes(found)
        return found

    def _call_of_object(self, callee: Value, node: ast.Call, given: Values, named: Named) -> Value:
        """An object that is called: the forward of a model, or __call__; or a method of torch's Module."""
        name, method, forward = name_of(node), None, None
        if callee.kind == "instance":
            forward = callee.of.of.find("forward") if self.is_model(callee) else None
            method = forward or callee.of.of.find("__call__")
        elif name in ("parameters", "named_parameters") or (name == "params" and not given):
            return self.parameters(node)
        elif name in NAMED["model"]:
            if name in ("train", "eval"):
                self.in_eval = name == "eval" or ast.unparse(node).endswith(".train(False)")
            return self.value(node.func.value)  # type: ignore[attr-defined]
        if not self.in_forward and (not name or callee.kind == "instance"):
            self.called.add(callee.of if callee.kind == "model" else callee.of.key)
            if self.is_model(callee):
                self.comes_together()
        if method is None:
            shared = [one for one in (*given, *named.values()) if one.is_shared]
            if any(one.kind == Kind.OTHER for one in shared):
                return other("is computed from values of this rank's share", *shared)
            return rows_of({one.kind for one in shared}) if shared else Value()
        self.in_forward += forward is not None
        found = self.run(method.of, [callee, *given], named, node)
        self.in_forward -= forward is not None
        made = found.of.of if forward is not None and found.kind == "instance" else None
        if made and not (made.bases or made.node.decorator_list):
            reason = f"forward returns a {made.node.name}, in which replicate sees no tensors"
            self.gap(node, f"{reason}; make it a dataclass")
        return found

    def parameters(self, node: ast.Call) -> Value:
        """The parameters of a model, of a part of it, or of the model whose method this is."""
        receiver: ast.expr = node.func.value  # type: ignore[attr-defined]
        frame, at = self.frame, receiver
        names: list[tuple[str, Any]] = []
        while isinstance(at, ast.Attribute | ast.Subscript | ast.Name):
            found = self.value(at)
            if self.is_model(found):
                names.append((ast.unparse(at), found.of if found.kind == "model" else found.of.key))
            at = getattr(at, "value", ast.Constant(None))
        while names and names[-1][0] == "self" and frame.call is not None and frame.caller is not None:
            if not isinstance(func := frame.call.func, ast.Attribute):
                break
            frame, names = frame.caller, [(ast.unparse(func.value), names[-1][1])]
        names = names or [(ast.unparse(receiver), None)]
        statement = frame.statement if frame is not self.frame else self.source.statement_of(node)
        assert statement is not None
        return Value(models=frozenset({Site(tuple(names), statement, frame.source)}))

    def optimizes(self, *given: Value) -> Value:
        sites = sorted(models_of(*given), key=lambda site: (site.statement.lineno, site.names[0][0]))
        self.found.sites.update(dict.fromkeys(sites))
        return Value("optimizer", models=models_of(*given))

    def run(self, function: Function, given: Values, named: Named, call: ast.Call | None) -> Value:
        """Follow a function's body with these arguments."""
        node = function.node
        if self.followed > MOST_STATEMENTS:
            self.found.gap(function.source, node, "the script is too long to be followed")
        is_inside = any(frame.function is node for frame in self.frames)
        if is_inside or len(self.frames) > _DEEPEST or self.followed > MOST_STATEMENTS:
            return join(*given)
        self.reached.add(node)
        frame = Frame(
            Scope(function.scope), function.source, call, self.frame, node, len(self.loops), self.depth
        )
        self._bind_arguments(frame.scope, node.args, given, named)
        quiet = any(WITHOUT_GRADIENTS.search(ast.unparse(one)) for one in getattr(node, "decorator_list", ()))
        self.without_gradients += quiet
        self.frames.append(frame)
        if isinstance(node, ast.Lambda):
            frame.returned.append(self.kept(self.value(node.body)))
        else:
            self.statements(node.body)
        self.frames.pop()
        self.without_gradients -= quiet
        self.depth = frame.depth
        if frame.yielded:
            is_shared = join(*frame.yielded).is_shared
            return Value("each", Loop(Value(Kind.BATCH), "batches")) if is_shared else Value()
        return nameless(join(*frame.returned))

    def _bind_arguments(self, scope: Scope, wanted: ast.arguments, given: Values, named: Named) -> None:
        parameters = [*wanted.posonlyargs, *wanted.args]
        names = [one.arg for one in (*parameters, *wanted.kwonlyargs)]
        defaults = dict(zip(reversed(names[: len(parameters)]), reversed(wanted.defaults), strict=False))
        defaults |= {
            one.arg: node for one, node in zip(wanted.kwonlyargs, wanted.kw_defaults, strict=True) if node
        }
        found = {name: self.value(node) for name, node in defaults.items()}
        found |= {**dict(zip(names, given[: len(parameters)], strict=False)), **named}
        for name in names:
            value = found.get(name, Value(Kind.ROWS) if "*" in named else Value())
            if named.get("**", Value()).kind in ROWS and value.kind in (Kind.ALIKE, "none"):
                value = Value(Kind.ROWS)
            scope.names[name] = replace(nameless(value), since=self.since)
        rest = dict(enumerate(given[len(parameters) :]))
        if wanted.vararg is not None:
            scope.names[wanted.vararg.arg] = Value("list", rest) if rest else named.get("*", Value())
        if wanted.kwarg is not None:
            scope.names[wanted.kwarg.arg] = join(
                *(value for name, value in named.items() if name not in names)
            )
