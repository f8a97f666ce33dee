"""Follows the functions and classes of the project, each time with the values it is called with."""

import ast
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from samestep.convert.frames import Frame
from samestep.convert.rewrites import Rewrites
from samestep.convert.values import Class, Function, Kind, Named, Scope, Value, Values, join

_DEEPEST = 25
MOST_STATEMENTS = 100_000
WITHOUT_GRADIENTS = re.compile("no_grad|inference_mode|set_grad_enabled")


class Functions(Rewrites):
    """A function is followed into its body at each call; what it returns is known from there."""

    def __init__(self) -> None:
        super().__init__()
        self.reached: set[ast.AST] = set()

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

    def _return(self, node: ast.Return) -> None:
        """A function that is called outside all loops over batches returns what every rank has."""
        if node.value is None:
            return
        value = self.value(node.value)
        is_whole_pass = self.frame.had_batches or not self.batches_around_call()
        if value.is_shared and is_whole_pass and not self.by_form:
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

    def run(self, function: Function, arguments: Values, named: Named, call: ast.Call | None) -> Value:
        node = function.node
        if self.followed > MOST_STATEMENTS:
            self.gaps.setdefault(
                (str(function.source.path), node.lineno), "the script is too long to be followed"
            )
            return join(*arguments)
        if len(self.frames) > _DEEPEST or any(frame.function is node for frame in self.frames):
            return join(*arguments)
        self.reached.add(node)
        frame = Frame(Scope(function.scope), function.source, call=call, caller=self.frame, function=node)
        frame.loops_before, frame.depth = len(self.loops), self.depth
        self._bind_arguments(frame.scope, node.args, arguments, named)
        depth, self.depth = self.depth, self.depth
        quiet = any(WITHOUT_GRADIENTS.search(ast.unparse(one)) for one in getattr(node, "decorator_list", ()))
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
            value = value or (self.value(default) if default is not None else Value())
            # what the caller calls the loader is no name here
            scope.names[parameter.arg] = replace(value, of=None) if value.kind == "iter" else value
        if "**" in named and named["**"].kind in (Kind.ROWS, Kind.BATCH):
            for parameter in parameters:
                if (
                    parameter.arg not in named
                    and scope.names[parameter.arg].kind in (Kind.ALIKE, "none")
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

    def statements(self, body: Sequence[ast.stmt]) -> None:
        raise NotImplementedError
