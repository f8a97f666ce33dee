"""Rules for calls of functions that are neither in the project nor known by their names."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace

from samestep.convert.expressions import Expressions
from samestep.convert.rewrites import Rewrites
from samestep.convert.signatures import NAMED
from samestep.convert.source import name_of, values_given
from samestep.convert.totals import MADE_OF_SHARE
from samestep.convert.values import ROWS, Kind, Value, Values, models_of, other, rows_of


class Unknown(Rewrites, Expressions):
    """The value of a call of which only the arguments are known."""

    parameters: Callable[[ast.Call], Value]
    file_opened: Callable[[ast.Call], Value]

    def _uses(self, values: Values, node: ast.Call) -> Iterator[Value]:
        """The results of lambdas among the arguments that depend on a share, as they capture values."""
        functions = [value.of for value in values if value.kind == "function"]
        if not functions:
            return
        findings, called = self.findings, set(self.called_by_line)
        known, given = set(findings.alike), set(findings.given)
        for function in functions:
            result = self.run(function, [function.bound] if function.bound else [], {}, node)
            if isinstance(function.node, ast.Lambda) and result.is_shared:
                self.known[function.node] = replace(result, edits=None)
                yield result
        findings.alike, findings.given, self.called_by_line = known, given, called

    def opaque(self, node: ast.Call, values: Values) -> Value:
        """The value of an unknown function; a call whose result is unused gets totals as its arguments."""
        if name_of(node) in ("parameters", "named_parameters"):
            # the object is a model, whatever made it
            self._is_now_a_model(node.func.value, node)  # type: ignore[attr-defined]
            return self.parameters(node)
        self.names_called.add(name_of(node))
        if name_of(node) == "open":
            return self.file_opened(node)
        shape = [part for value in values for part in value.opened]
        is_tiled = name_of(node) == "tile" and [part.kind for part in shape][1:2] == [Kind.COUNT]
        if is_tiled or (name_of(node) in NAMED["spread"] and Kind.COUNT in {part.kind for part in shape}):
            return Value(Kind.VIEWS if name_of(node) == "repeat_interleave" else Kind.ROWS)
        values = [*values, *self._uses(values, node)]
        is_statement = isinstance(self.source.parents.get(node), ast.Expr)
        given = values_given(node)
        expressions = [value.value if isinstance(value, ast.Starred) else value for value in given]
        if is_statement or name_of(node) == "format":
            values = [*values, *map(self.shown, expressions)]
        if not any(value.is_shared for value in values):
            self.seen_alike(node)
            return Value(models=models_of(*values))
        if name_of(node) in NAMED["bar"] and not self.may_total():
            self.findings.note(self.source, node, "the progress bar shows numbers of rank 0's share")
            return Value()
        if is_statement:
            for value in expressions:
                self.total(value)
            return Value()
        kinds = {value.kind for value in values if value.is_shared}
        if self.in_forward and kinds <= {*ROWS, Kind.COUNT}:
            return rows_of(kinds)
        name = ast.unparse(node.func)
        reason = f"is {name}(...) of this process's values; after the loop take {name}(...) of samestep.gather(...)"
        lost = [value for value in values if value.kind == Kind.OTHER and value.edits is None]
        reason = other(MADE_OF_SHARE if name_of(node) == "format" else reason, *lost).of
        return Value(Kind.OTHER, reason, models_of(*values))

    def _is_now_a_model(self, node: ast.expr, call: ast.Call) -> None:
        model = Value("model", self.key(call))
        if isinstance(node, ast.Name) and (holder := self.frame.scope.holder(node.id)) is not None:
            holder.names[node.id] = model  # also where a comprehension asks for its parameters
        else:
            self.bind(node, model)
