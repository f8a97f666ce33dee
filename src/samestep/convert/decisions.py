"""Finds what is known of a script's values before it runs: which tests hold, and what is a list."""

import ast

from samestep.convert.names import Names
from samestep.convert.project import Scope
from samestep.convert.source import is_only_given
from samestep.convert.values import Kind, Value

_CLASSES = {"Optimizer": "optimizer", "Module": "model"}  # of torch, and the kinds of values that they are


class Decisions(Names):
    """Whether a test holds, for None, a constant or a class of torch, and whether a value is one of a kind."""

    def is_model(self, value: Value) -> bool:
        is_instance = value.kind == "instance" and value.of.of.descends_from("Module", "Model", "Sequential")
        return value.kind == "model" or is_instance

    def keep_normalizing(self, node: ast.Call, name: str) -> None:
        """Note a BatchNorm, and a model with one that is no part of another model."""
        if "BatchNorm" in name:
            self.normalizing.append(self.key(node))
        is_part = any(self.is_model(frame.scope.names.get("self", Value())) for frame in self.frames)
        if not is_part and self.normalizes(node):
            self.keep_copy(node)

    def decided(self, test: ast.expr) -> bool | None:
        """Whether a test holds, if that is known: one for None, for a constant string or bool, or for a class."""
        if (is_one := self._is_one(test)) is not None:
            return is_one
        if isinstance(test, ast.Constant):
            return bool(test.value)
        if (tested := _tested_constant(test)) is None:
            return None
        node, constant, holds = tested
        if self.loops[self.frame.loops_before :] and not is_only_given(self.frame.function, node):
            return None
        value, is_own = self.value(node), isinstance(node, ast.Name) and node.id in self.frame.scope.names
        if value.since and not is_own:
            return None
        if constant is None:
            is_known = (
                value.kind in ("none", "optimizer") or value.is_shared or self.constant(node) is not node
            )
            return (value.kind == "none") == holds if is_known else None
        is_alike = value.text is not None and isinstance(constant, bool) == (value.text in ("True", "False"))
        return (value.text == str(constant)) == holds if is_alike else None

    def _is_one(self, test: ast.expr) -> bool | None:
        """Whether a value is an optimizer or a model, as `isinstance` asks, is callable, or a dict has a key."""
        match test:
            case ast.Call(func=ast.Name(id="isinstance"), args=[node, class_]):
                value, name = self.value(node), ast.unparse(class_).rpartition(".")[2]
                kind = "model" if self.is_model(value) else value.kind
                is_known = name in _CLASSES and kind in ("optimizer", "model", "function")
                return kind == _CLASSES[name] if is_known else None
            case ast.Compare(
                left=ast.Constant(value=key), ops=[ast.In() | ast.NotIn() as asks], comparators=[held]
            ):
                value = self.value(held)
                has_key = value.kind == "dict" and key in value.of and self.is_of_turn(value)
                return isinstance(asks, ast.In) if has_key else None
            case ast.Call(func=ast.Name(id="callable"), args=[node]):
                return True if self.value(node).kind in ("function", "class", "partial") else None
        return None

    def constant(self, node: ast.expr) -> ast.expr:
        """The number that a name stands for, or the expression itself."""
        made = self.value(node).origin if isinstance(node, ast.Name) else None
        return made[0] if made and isinstance(made[0], ast.Constant) and made[0].value is not None else node

    def is_of_batch(self, node: ast.expr, value: Value) -> bool:
        """Whether this is an element of a batch as its loader gives it, and so a list where the script joins it."""
        made = value.origin[0] if value.origin else None
        is_taken = isinstance(made, ast.Subscript) and self.known[made.value].kind == Kind.BATCH
        is_named = isinstance(node, ast.Name | ast.Subscript | ast.Attribute)
        return value.kind == Kind.ROWS and is_named and value.of is None and (made is None or is_taken)

    def found_none(self, test: ast.expr) -> tuple[Scope, str] | None:
        """The place that a test such as `state is not None` finds to be None now: what it guards does not run."""
        place, constant, holds = _tested_constant(test) or (test, True, True)
        if constant is not None or holds or self.known.get(place, Value()).kind != "none":
            return None
        return self.place_of(place)


def _tested_constant(test: ast.expr) -> tuple[ast.expr, object, bool] | None:
    """The expression that a test compares, the constant, and whether it tests for equality."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            inner_test = _tested_constant(inner)
            return inner_test and (*inner_test[:2], not inner_test[2])
        case ast.Compare(left=left, ops=[op], comparators=[ast.Constant(value=constant)]):
            is_known = isinstance(op, ast.Is | ast.Eq | ast.IsNot | ast.NotEq)
            return (left, constant, isinstance(op, ast.Is | ast.Eq)) if is_known else None
        case ast.Name() | ast.Attribute():
            return test, True, True
    return None
