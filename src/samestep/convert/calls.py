"""Follows the calls of a script into the functions, classes and objects of the project."""

import ast
import re
from dataclasses import replace
from typing import Any

from samestep.convert.library import Library
from samestep.convert.project import Class, Frame, Function, Instance, Scope, Site
from samestep.convert.rewrites import arguments
from samestep.convert.signatures import NAMED, of_loss
from samestep.convert.source import Edit, Source, name_of, values_given
from samestep.convert.values import (
    NUMBERS,
    ROWS,
    Kind,
    Loop,
    Named,
    Value,
    Values,
    join,
    key_of,
    models_of,
    nameless,
    other,
    rows_of,
)

_WITHOUT_GRADIENTS = re.compile("no_grad|inference_mode")
_PARAMETER = re.compile(r"[\w.]*\bParameter\(")
_TRAINED = re.compile(rf"{_PARAMETER.pattern}|.*(requires_grad=True|\.requires_grad_\((True)?\))")
MOST_STATEMENTS = 100_000  # to follow; a longer script is not followed to its end
_DEEPEST = 25  # calls inside each other
_CARRIED = "is made for a whole batch; begin with None, and in the loop make it for x.size(0) samples"
_BORROWED = (
    "in a last batch with fewer samples than processes this counts samples twice; call the model in a line before it, "
    "and this as a statement in the loop over the loader"
)
_OF_BATCH = "is the metric's value of this process's share; print metric.compute() after the loop"
_NAMESPACES = ("types.SimpleNamespace", "argparse.Namespace")
_NAMESPACE = Class(ast.ClassDef("Namespace", [], [], [], []), [], Scope())
_DATA = {*ROWS, *NUMBERS, Kind.ROW, Kind.OTHER, "list", "each", "dict"}


class Calls(Library):
    """The value of a call: from the body of the function if it is in the project, otherwise by a rule."""

    def _call(self, node: ast.Call) -> Value:
        if name_of(node) == "step" and self.value(node.func.value).kind != "none":  # type: ignore[attr-defined]
            self.steps()
        return self._called(node)

    def _called(self, node: ast.Call) -> Value:
        name = name_of(node)
        base = self.value(node.func.value) if isinstance(node.func, ast.Attribute) else Value("external")
        if name == "backward" and not self.is_model(base):
            return self.backward(node, base)
        if name == "forward" and self.is_model(base) and not self.in_forward:
            receiver = node.func.value  # type: ignore[attr-defined]
            self.findings.edit(Edit(self.source, self.source.end(receiver), self.source.end(node.func), ""))
            return self._call_of_object(base, node, *self._arguments(node))
        if base.kind == "loss" or (name, base.kind) == ("type_as", Kind.ALIKE):
            return base
        if base.kind == "metric":
            return self._of_metric(base, node, name)
        if name == "format" and isinstance(text := node.func.value, ast.Constant):  # type: ignore[attr-defined]
            self.fields(node, text)
        is_iterated = base.kind == "loader" and name == "__iter__"
        if (
            base.kind in _DATA
            or is_iterated
            or (base.kind == Kind.ALIKE and name in NAMED["list"] | NAMED["looked"])
        ):
            return self.method(node, base, name).bare
        callee = self.value(node.func)
        if callee.kind == "metric":
            return self._of_metric(callee, node, "forward")
        if (made := self._object_made(callee, node)) is not None:
            return made
        if callee.kind == "external":
            return self.external(str(callee.of), node).bare
        positional, named = self._arguments(node)
        return join(
            *(self._of_ours(choice, node, positional, named) for choice in self._choices(node.func, callee))
        )

    def _choices(self, node: ast.expr, callee: Value) -> Values:
        """The functions of a dict or list, from which an index that is not known chooses one; else the callee."""
        held = self.known.get(node.value, Value()) if isinstance(node, ast.Subscript) else Value()
        is_known = isinstance(getattr(node, "slice", None), ast.Constant) or held.kind not in ("dict", "list")
        functions = [part for part in held.parts if part.kind == callee.kind == "function"]
        return [callee] if is_known else functions or [callee]

    def _object_made(self, callee: Value, node: ast.Call) -> Value | None:
        """A namespace, or a function of the project with some of its arguments; None for other calls."""
        if callee.of in _NAMESPACES:
            return self._new(_NAMESPACE, node, *self._arguments(node))
        is_partial = callee.of == "functools.partial" and bool(node.args)
        if not is_partial or self.value(node.args[0]).kind not in ("function", "class"):
            return None
        (function, *given), named = self._arguments(node)
        return Value("partial", (function, given, named))

    def _of_metric(self, metric: Value, node: ast.Call, name: str) -> Value:
        """What a metric of torchmetrics gives for a share; it adds up its own values over the processes at the end."""
        if name not in ("update", "forward"):
            return Value() if name in ("compute", "reset") else metric
        values = [self.value(given) for given in values_given(node)]
        is_unused = name == "update" or isinstance(self.source.parents.get(node), ast.Expr)
        is_given = self.batches is not None and any(value.is_shared for value in values)
        if is_unused and is_given and not self.guard(self.batches):  # type: ignore[arg-type]
            self.gap(node, _BORROWED)
        return Value() if is_unused else other(_OF_BATCH, *(value for value in values if value.is_shared))

    def _of_ours(self, callee: Value, node: ast.Call, arguments: Values, named: Named) -> Value:
        if callee.kind == "function":
            bound = [] if callee.of.bound is None else [callee.of.bound]
            result = self.run(callee.of, [*bound, *arguments], named, node)
            is_of_model = bool(bound) and self.is_model(bound[0]) and "param" in name_of(node)
            if is_of_model and result.kind == Kind.ALIKE and not result.models:
                return self.parameters(node)  # a method that picks some parameters, as by `yield`
            return result
        if callee.kind == "loss":
            return of_loss(callee.of, [*self.together(node.args, arguments), *named.values()], self.batches)
        if callee.kind == "class":
            return self._new(callee.of, node, arguments, named)
        if callee.kind == "partial":
            function, given, bound = callee.of
            return self._of_ours(function, node, [*given, *arguments], {**bound, **named})
        if callee.kind == "tuple class":
            by_name = {**dict(zip(callee.of, arguments, strict=False)), **named}
            return Value("list", {**dict(enumerate(by_name.values())), **by_name})
        if callee.kind in ("instance", "model"):
            return self._call_of_object(callee, node, arguments, named)
        return self.opaque(node, [*arguments, *named.values()])

    def _arguments(self, node: ast.Call) -> tuple[Values, Named]:
        """The values of a call's arguments; "*" is a batch that is unpacked into arguments."""
        positional: Values = []
        named: Named = {}
        for option in node.keywords:
            value = self.passed(option.value)
            is_unpacked = option.arg is None and value.kind == "dict" and {*map(type, value.of)} == {str}
            named |= value.of if is_unpacked else {option.arg or "**": value}
        for argument in node.args:
            value = self.passed(argument.value if isinstance(argument, ast.Starred) else argument)
            if isinstance(argument, ast.Starred) and value.kind == Kind.BATCH:
                named["*"] = value
            elif isinstance(argument, ast.Starred) and value.kind == "list" and None not in value.of:
                positional += value.parts
            else:
                positional.append(value)
        return positional, named

    def _new(self, class_: Class, node: ast.Call, arguments: Values, named: Named) -> Value:
        instance = self.made[self.key(node)] = Instance(class_, self.key(node))
        value = Value("instance", instance, models_of(*arguments, *named.values()))
        if class_.descends_from("DataLoader"):
            self.gap(node, f"{class_.node.name} is a DataLoader of the project's own; use samestep.loader")
        if (init := class_.find("__init__")) is not None:
            self.run(init.of, [value, *arguments], named, node)
        else:
            layers = [part for given in arguments for part in given.opened if self.is_model(part)]
            self.layers[self.key(node)] = (class_.descends_from("Sequential"), layers)
            fields = [member.target for member in class_.node.body if isinstance(member, ast.AnnAssign)]
            instance.scope.names |= {**dict(zip(map(ast.unparse, fields), arguments, strict=False)), **named}
        if class_.descends_from("Optimizer"):
            self.optimizes(value)
        if self.is_model(value):
            self.keep_normalizing(node, class_.node.name)
        return value

    def _call_of_object(self, callee: Value, node: ast.Call, arguments: Values, named: Named) -> Value:
        """The call of an object (a model's forward, or __call__), or of a method of torch's Module."""
        name, method, forward = name_of(node), None, None
        if callee.kind == "instance":
            forward = callee.of.of.find("forward") if self.is_model(callee) else None
            method = forward or callee.of.of.find("__call__")
        elif name in ("parameters", "named_parameters") or (name == "params" and not arguments):
            return self.parameters(node)
        elif name in ("modules", "children") and isinstance(node.func, ast.Attribute) and not self.in_forward:
            return self.parameters(node)  # `layer.weight` of each
        elif name in NAMED["model"]:
            return self._in_mode(self.value(node.func.value), node)  # type: ignore[attr-defined]
        is_part = isinstance(node.func, ast.Attribute) or self._is_layer(node.func)
        holder = self.known[node.func.value] if is_part else Value()  # type: ignore[attr-defined]
        is_method = self.is_model(holder) and key_of(holder) == key_of(callee) and name != "forward"
        if not is_method:
            called = self.called_inside if self.in_forward else self.called
            (self.called_quietly if self.without_gradients > 1 else called).add(key_of(callee))
        if not is_method and not self.in_forward and self.is_model(callee):
            self.comes_together()
            self.called_to_train |= {key_of(callee)} - self.evaluated if _has_weights(callee) else set()
            self._carried(node, arguments)
        if method is None:
            shared = [argument for argument in (*arguments, *named.values()) if argument.is_shared]
            if any(argument.kind == Kind.OTHER for argument in shared):
                return other("is computed from values of this rank's share", *shared)
            result = rows_of({argument.kind for argument in shared}) if shared else Value()
            return result if is_method else self._through_layers(callee, node, arguments, result)
        # a loss written as a Module without weights gets values of the loop, as a function does
        has_weights = forward is not None and any(map(self.is_model, callee.of.scope.names.values()))
        self.in_forward += has_weights
        value = self.run(method.of, [callee, *arguments], named, node)
        self.in_forward -= has_weights
        class_ = value.of.of if forward is not None and value.kind == "instance" else None
        if class_ and not (class_.bases or class_.node.decorator_list):
            reason = f"forward returns a {class_.node.name}, in which replicate sees no tensors"
            self.gap(node, f"{reason}; make it a dataclass")
        return value

    def _is_layer(self, node: ast.expr) -> bool:
        """Whether this is a layer as `net[0]`, whose call is none of the net; the layers of a list are replicated."""
        return isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and not self.in_forward

    def _through_layers(self, model: Value, node: ast.Call, given: Values, result: Value) -> Value:
        """What a model of torch makes of its inputs: another value than `result` where a layer is of the project."""
        is_sequential, layers = self.layers.get(key_of(model), (False, []))
        self.in_forward += 1
        for layer in layers:
            made = self._call_of_object(layer, node, given, {})
            given, result = ([made], made) if is_sequential else (given, made)
        self.in_forward -= 1
        return result

    def _carried(self, node: ast.Call, arguments: Values) -> None:
        """Note an argument that is made before the loop, and is of this rank's samples from the second batch on."""
        for part, value in zip(node.args if self.batches else (), arguments, strict=False):
            if value.kind == Kind.ALIKE:
                self.carried.add(self.key(part))
            elif self.key(part) in self.carried and {inner.kind for inner in value.opened} <= ROWS:
                self.gap(node, f"`{ast.unparse(part)}` {_CARRIED}")

    def _in_mode(self, model: Value, node: ast.Call) -> Value:
        """The model itself, after a method such as `eval`."""
        if name_of(node) in ("train", "eval"):
            self.in_eval = name_of(node) == "eval" or ast.unparse(node).endswith(".train(False)")
            (self.evaluated.update if self.in_eval else self.evaluated.difference_update)(
                self._keys_in(model)
            )
        return model

    def _keys_in(self, model: Value) -> set[Any]:
        """The keys of a model and of the models in it."""
        models = [model]
        for each in models:
            inner = each.of.scope.names.values() if each.kind == "instance" else ()
            inner = (*inner, *self.layers.get(key_of(each), (False, []))[1])
            models += [part for part in inner if self.is_model(part) and part not in models]
        return {*map(key_of, models)}

    def parameters(self, node: ast.Call) -> Value:
        """The parameters of a model, of a part of it, or, inside a method, of the model itself."""
        receiver: ast.expr = node.func.value  # type: ignore[attr-defined]
        frame, part = self.frame, receiver
        if isinstance(part, ast.Call) and ast.unparse(part.func) == "getattr" and part.args:
            part = part.args[0]  # any part of the model
        names: list[tuple[str, Any]] = []
        while isinstance(part, ast.Attribute | ast.Subscript | ast.Name):
            value = self.value(part)
            if self.is_model(value):
                names.append((ast.unparse(part), key_of(value)))
            part = getattr(part, "value", ast.Constant(None))
        while names and names[-1][0] == "self" and frame.call is not None and frame.caller is not None:
            if not isinstance(func := frame.call.func, ast.Attribute):
                break
            frame, names = frame.caller, [(ast.unparse(func.value), names[-1][1])]
        # replicate once, before the loop or the lines that call this function again and again
        while len(names) == 1 and frame.call is not None and frame.caller is not None:
            given = _given(frame, names[0][0])
            if given is None or not (frame.loops_before or _is_called_again(frame.caller.source, frame.call)):
                break
            frame, names = frame.caller, [(given, names[0][1])]
        names = names or [(ast.unparse(receiver), None)]
        statement = frame.statement if frame is not self.frame else self.source.statement_of(node)
        assert statement is not None
        return Value(models=frozenset({Site(tuple(names), statement, frame.source)}))

    def note_alone(self, name: str, node: ast.Call) -> None:
        """Note the parameters and tensors among an optimizer's arguments that are in no model."""
        if not name.startswith("torch.optim."):
            return
        for part in ast.walk(node):
            value = self.known.get(part, Value())
            begins = _PARAMETER if value.models or self.is_model(value) else _TRAINED
            if value.origin and begins.match(ast.unparse(value.origin[0])):
                self.parameters_alone.add(value.origin[:2])

    def optimizes(self, *values: Value) -> Value:
        self.steps()
        sites = sorted(models_of(*values), key=lambda site: (site.statement.lineno, site.names[0][0]))
        self.findings.sites.update(dict.fromkeys(sites))
        return Value("optimizer", models=models_of(*values))

    def run(self, function: Function, arguments: Values, named: Named, call: ast.Call | None) -> Value:
        """The return value of a function, whose body is followed with these arguments."""
        node = function.node
        if self.followed > MOST_STATEMENTS:
            self.findings.gap(function.source, node, "the script is too long to be followed")
        is_recursive = any(frame.function is node for frame in self.frames)
        if is_recursive or len(self.frames) > _DEEPEST or self.followed > MOST_STATEMENTS:
            return join(*arguments)
        self.reached.add(node)
        self.called_by_line |= {node} if call is not None else set()
        place = len(self.loops), self.depth
        frame = Frame(Scope(function.scope), function.source, call, self.frame, node, *place)
        self._bind_arguments(frame.scope, node.args, arguments, named)
        no_gradients = max(map(without_gradients, function.marks), default=0)
        self.without_gradients += no_gradients
        self.frames.append(frame)
        if isinstance(node, ast.Lambda):
            frame.returned.append(self.kept(self.value(node.body)))
        else:
            self.statements(node.body)
        self.frames.pop()
        self.without_gradients = max(0, self.without_gradients - no_gradients)
        self.depth = frame.depth
        if frame.yielded:
            element = join(*(loop.element for loop in frame.yielded))
            sizes = frozenset[str | None]().union(*(loop.sizes for loop in frame.yielded))
            fed_by = tuple(place for loop in frame.yielded for place in loop.fed_by)
            loop = Loop(element, "batches", sizes=sizes, fed_by=fed_by)
            is_of_batches = element.is_shared or (element.kind == "instance" and frame.had_batches)
            return Value("each", loop) if is_of_batches else Value()
        return nameless(join(*frame.returned))

    def _bind_arguments(self, scope: Scope, params: ast.arguments, arguments: Values, named: Named) -> None:
        parameters = [*params.posonlyargs, *params.args]
        names = [param.arg for param in (*parameters, *params.kwonlyargs)]
        defaults = dict(zip(reversed(names[: len(parameters)]), reversed(params.defaults), strict=False))
        by_keyword = zip(params.kwonlyargs, params.kw_defaults, strict=True)
        defaults |= {param.arg: node for param, node in by_keyword if node}
        values = {name: self.value(node) for name, node in defaults.items()}
        values |= {**dict(zip(names, arguments[: len(parameters)], strict=False)), **named}
        for name in names:
            value = values.get(name, Value(Kind.ROWS) if "*" in named else Value())
            if named.get("**", Value()).kind in ROWS and value.kind in (Kind.ALIKE, "none"):
                value = Value(Kind.ROWS)
            scope.names[name] = replace(nameless(value), since=self.since)
        rest = dict(enumerate(arguments[len(parameters) :]))
        if params.vararg is not None:
            given = replace(Value("list", rest), edits=join(*rest.values()).edits)
            scope.names[params.vararg.arg] = given if rest else named.get("*", given)
        if params.kwarg is not None:
            others = {name: value for name, value in named.items() if name not in names}
            is_known = not others.keys() & {"*", "**"}
            scope.names[params.kwarg.arg] = Value("dict", others) if is_known else join(*others.values())


def without_gradients(text: str) -> int:
    """2 for a mark or a context without gradients, 1 where that is decided while the script runs, 0 for others."""
    return 2 if _WITHOUT_GRADIENTS.search(text) else int("set_grad_enabled" in text)


def _has_weights(model: Value) -> bool:
    """Whether a model has layers or parameters, which a loss that is written as a Module has not."""
    held = model.of.scope.names.values() if model.kind == "instance" else ()
    made = [ast.unparse(value.origin[0]) for value in held if value.origin]
    is_layer = any(value.kind in ("model", "instance") for value in held)
    return model.kind == "model" or is_layer or any(map(_PARAMETER.match, made))


def _is_called_again(source: Source, call: ast.Call) -> bool:
    """Whether another line calls the same function."""
    calls = (node for node in ast.walk(source.tree) if isinstance(node, ast.Call) and node is not call)
    return ast.unparse(call.func) in {ast.unparse(other_call.func) for other_call in calls}


def _given(frame: Frame, name: str) -> str | None:
    """The caller's name for what a function gets as this parameter; None if it is no plain name."""
    if frame.call is None or isinstance(frame.call.func, ast.Attribute):
        return None
    given = arguments(frame.call, [param.arg for param in frame.function.args.args]).get(name)
    return given.id if isinstance(given, ast.Name) else None
