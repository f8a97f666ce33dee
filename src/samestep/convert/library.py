"""Rules for calls outside the project: torch's functions by name, and those of other libraries."""

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from samestep.convert.python import Python
from samestep.convert.rewrites import LOADERS, arguments, asks_for_file
from samestep.convert.signatures import (
    CHOSEN,
    DIMENSIONS,
    NAMED,
    STACKS,
    averages,
    counted,
    dims_of,
    given_to_loss,
    is_loss,
    makes_rows,
    of_einsum,
    of_loss,
    of_tensors,
    over_rows,
    places_found,
    reduced,
    turned,
    turns,
)
from samestep.convert.source import Edit, is_unpacked, values_given
from samestep.convert.totals import MEANS_OF_LISTS
from samestep.convert.values import (
    NUMBERS,
    ROWS,
    TURNED,
    Kind,
    Loop,
    Value,
    Values,
    constants_in,
    join,
    key_of,
    models_of,
    other,
)

_FUNCTIONAL = re.compile(r"torch\.(nn\.functional|special|linalg|fft|distributions)\.")
# the numbers of the graphs that nodes belong to: their maximum is only a size
_GRAPHS = re.compile(r"(batch|graph)\w*$")
_SIZED_FIRST = {"zeros", "ones", "empty", "full", "rand", "randn", "random"}  # of NumPy
_MODELS = ("torchvision.models.", "timm.create", "transformers.")
_OF_PYTHON = ("builtins.", "itertools.", "tqdm", "copy.", "functools.", "dataclasses.")
_GROUPS = (
    "BatchNorm normalizes groups of this process's samples here, and the serial script groups of the whole batch; "
    "without --same they are the same if each process's share is a multiple of the group"
)


class Library(Python):
    """The value of a call whose body is not followed."""

    optimizes: Callable[..., Value]
    note_alone: Callable[[str, ast.Call], None]

    def fields(self, node: ast.Call, text: ast.Constant) -> None:
        """Total the attributes that a format string reads: `"{top1.avg}".format(top1=top1)`."""
        for given in node.keywords:
            for name in dict.fromkeys(re.findall(rf"\{{{given.arg}\.(\w+)", str(text.value))):
                attribute = ast.copy_location(ast.Attribute(given.value, name), given.value)
                if any(isinstance(edit, Edit) for edit in self.value(attribute).edits or ()):
                    # the text has no place for a total
                    shown = f"{name} of `{ast.unparse(given.value)}`"
                    self.gap(node, f"the format shows {shown}, which is of a share")
                else:
                    self.total(attribute)

    def method(self, node: ast.Call, base: Value, name: str) -> Value:
        """The value of a method of a tensor, number, list or dict; a container may have been joined to one value."""
        if name in ("__iter__", "__next__") and base.kind in ("each", "loader"):
            of_python = self._python_next if name == "__next__" else self._python_iter
            return of_python(node, [base], base)
        node = self._unpacked(node) if any(map(is_unpacked, (*node.args, *node.keywords))) else node
        values = [base, *map(self.value, values_given(node))]
        is_tensor = base.kind in (Kind.ROWS, Kind.SOME) and name not in ("append", "extend")
        if name in NAMED["list"] and not is_tensor:
            return self._of_list(node, base, name, values)
        if base.kind in ("list", "dict", "each"):
            return self.opaque(node, values)
        if name == "size" and base.kind == Kind.ROW:
            return base
        if name == "size" and base.kind in ROWS:
            at = getattr(node.args[0], "value", None) if node.args else None
            shape = self.shape(base)
            return self.part_of(shape, at) if node.args else shape
        if name in ("view", "reshape", "expand") and base.kind in ROWS:
            is_sized, first = self.sized(node, node.func.value), (*node.args, None)[0]  # type: ignore[attr-defined]
            is_laid_out = name != "expand" and base.kind == Kind.ROWS and len(node.args) > 1 and not is_sized
            if is_laid_out and self.batches and not self.in_forward and self._is_fixed(first):
                return Value(Kind.OTHER, "is laid out for a whole batch")
            values = [value for value in values if value.kind != Kind.PART]  # view(batch * length, -1)
        values = self.together([node.func.value, *node.args], values)  # type: ignore[attr-defined]
        return self._of_tensors(name, node, values, node.args)

    def _unpacked(self, node: ast.Call) -> ast.Call:
        """The call, with the constants for which its `*args` and `**options` stand, if these are known."""
        args, options = list[ast.expr](), list[ast.keyword]()
        for part in node.args:
            given = self.value(part.value) if isinstance(part, ast.Starred) else Value()
            args += constants_in(given, part) if given.kind == "list" else [part]
        for option in node.keywords:
            given = self.value(option.value) if option.arg is None else Value()
            made = map(ast.keyword, given.of or (), constants_in(given, option.value))
            options += made if given.kind == "dict" else [option]
        unpacked = ast.copy_location(ast.Call(node.func, args, options), node)
        self.source.parents[unpacked] = self.source.parents[node]
        return unpacked

    def _is_fixed(self, size: ast.expr | None) -> bool:
        """Whether a size in a shape is not the rest of the shape, and the same on all ranks."""
        is_rest = isinstance(size, ast.UnaryOp | ast.Starred) or getattr(size, "value", 0) == 1
        return not is_rest and self.value(size).kind == Kind.ALIKE

    def _of_tensors(self, name: str, node: ast.Call, values: Values, dims: list[ast.expr]) -> Value:
        if name in NAMED["fact"]:
            return Value()
        special = self._of_graphs(name, node, dims) or places_found(name, node)
        if (special := special or self._over_second(name, node, values[0], dims)) is not None:
            return special
        if name == "squeeze" and values[0].kind in ROWS and not (dims or node.keywords):
            self.squeezed(node, values[0], (*node.args, getattr(node.func, "value", node.func))[0])
        if name in NAMED["count"] and values[0].kind in ROWS:
            return counted(values[0], self.batches)
        if name in NAMED["joined"] and self.is_of_batch(node.args[0], values[0]):
            values = [Value("list", {0: values[0], 1: values[0]}), *values[1:]]  # the views that it holds
        filled = values[0].of.get(None, Value()) if values[0].kind == "list" else Value()
        if name in NAMED["stacked"] and filled.kind in ROWS and isinstance(filled.of, Loop):
            return Value(Kind.OTHER, STACKS)
        shape = [*map(ast.unparse, dims)]
        if not self.in_forward and values[0].kind in ROWS and turns(name, shape):
            return turned(values[0])
        if name == "einsum" and not self.in_forward and "->" in str(values[0].text):
            return of_einsum(str(values[0].text), values[1:], self.batches)
        named = [self.constant(option.value) for option in node.keywords if option.arg in DIMENSIONS]
        dims = [*map(self.constant, dims)]
        is_reduction = name in NAMED["sum"] | NAMED["mean"]
        are_chosen = any(isinstance(part, ast.Name | ast.Starred) for part in (named or dims))
        if is_reduction and are_chosen and values[0].kind in ROWS and not self.in_forward:
            return other(CHOSEN)
        # the first dimension of what is stacked is that of the list, in forward too
        is_stacked = values[0].kind in TURNED and is_reduction
        is_over_rows = over_rows([*named, *dims_of(name, dims)], 0 if is_stacked else self.in_forward)
        self._note_groups(name, node, values[0], (*named, *dims[1:]))
        return of_tensors(name, values, is_over_rows, self.batches, self.in_forward)

    def _note_groups(self, name: str, node: ast.Call, base: Value, dims: Sequence[ast.expr]) -> None:
        """Note groups of a share's samples that a layer with a BatchNorm makes in forward."""
        if not self.in_forward or name not in ("chunk", "split") or base.kind != Kind.ROWS:
            return
        layer = next((part for part in self.source.around(node) if isinstance(part, ast.ClassDef)), None)
        is_over_samples = all(getattr(dimension, "value", None) == 0 for dimension in dims[:1])
        if layer is not None and is_over_samples and "BatchNorm" in ast.unparse(layer):
            self.gap(node, _GROUPS)

    def _over_second(self, name: str, node: ast.Call, base: Value, dims: list[ast.expr]) -> Value | None:
        """The sum or mean over the second dimension, if the samples are there."""
        named = [option.value for option in node.keywords if option.arg in DIMENSIONS]
        is_second = [getattr(dimension, "value", None) for dimension in named or dims] == [1]
        is_reduction = name in NAMED["sum"] | NAMED["mean"] and base.kind in TURNED and not self.in_forward
        rows = Value(Kind.ROWS)
        return reduced(name, rows, True, True, self.batches) if is_reduction and is_second else None

    def _of_graphs(self, name: str, node: ast.Call, dims: list[ast.expr]) -> Value | None:
        """The number of graphs, or of each graph's nodes, from the numbers of graphs that a model gets."""
        of = node.args[0] if len(dims) < len(node.args) else getattr(node.func, "value", node.func)
        if not self.in_forward or not _GRAPHS.search(ast.unparse(of)):
            return None
        if name in ("max", "amax") and not (dims or node.keywords):
            return Value()
        return Value(Kind.ROWS) if name == "bincount" else None

    def _of_list(self, node: ast.Call, base: Value, name: str, values: Values) -> Value:
        if name in ("append", "extend") and base.kind not in (Kind.BATCH, Kind.PART) and len(node.args) == 1:
            return self.put(node, node.func.value, values[1])  # type: ignore[attr-defined]
        if name == "update" and self.merged(node, node.func.value):  # type: ignore[attr-defined]
            return Value()
        if name == "scale":
            return join(*values[1:])
        if name == "items" and (base.parts or base.is_shared):
            loop = self.each(replace(base, kind="list") if base.kind == "dict" else base)
            return Value("each", loop.mapped(lambda element: Value("list", {0: Value(), 1: element})))
        if name == "keys" and (base.kind == Kind.BATCH or (base.kind == "dict" and None not in base.of)):
            return Value()
        if base.parts or base.kind in (*NUMBERS, Kind.BATCH):
            if name in ("values", "copy"):
                return replace(base, kind="list") if base.kind == "dict" and name == "values" else base
            if name in ("get", "pop", "setdefault"):
                return self.part_of(base, getattr(node.args[0], "value", None) if node.args else None)
        return self.opaque(node, values)

    def external(self, name: str, node: ast.Call) -> Value:
        """The value of a call of a function or class outside the project."""
        values = [*map(self.value, values_given(node))]
        last, first = name.rpartition(".")[2], (*values, Value())[0]
        if value := self._file_or_dict(name, node, values):
            return value
        if last.endswith("DataLoader"):
            return self.made_loader(node, name in LOADERS)
        if name == "torch.set_grad_enabled" and isinstance(self.source.parents.get(node), ast.Expr):
            text = ast.unparse(node.args[0]) if node.args else ""
            self.without_gradients = {"True": 0, "False": 2}.get(text, 1)
        if name == "torch.save":
            return self.saved(node)
        if name in MEANS_OF_LISTS and first.kind == "list":
            return Value(Kind.OTHER, "is a mean over the batches that this process had")
        is_sum = name == "numpy.sum" and join(*first.parts).kind in NUMBERS
        if is_sum or name.startswith(_OF_PYTHON):
            return self.of_python(last, node, values, first)
        if name.startswith("torch.nn.") and last == "DataParallel" and node.args:
            return self.unwrapped(node, first)
        self.note_alone(name, node)
        if self._is_optimizer(name, last, values):
            return self.optimizes(*values)
        of_rows = first.kind == "list" and {part.kind for part in first.parts} <= ROWS
        is_array = name.startswith("numpy.") and (
            first.kind in (*ROWS, *NUMBERS) or of_rows or self._is_made_by_sample(last, node)
        )
        is_of_torch = name.startswith("torch.") and (name.count(".") == 1 or last.endswith("Tensor"))
        if is_array or is_of_torch or _FUNCTIONAL.match(name):
            return self._of_torch(last, node, values, first)
        return self._of_library(name, last, node, values)

    def _is_made_by_sample(self, name: str, node: ast.Call) -> bool:
        """Whether the first size of what NumPy makes or draws is the number of this rank's samples."""
        sizes = [option.value for option in node.keywords if option.arg in ("size", "shape")]
        sizes += node.args[:1] if name in _SIZED_FIRST else node.args[2:]
        return any(self.part_of(self.known[size], 0).kind == Kind.COUNT for size in sizes)

    def file_opened(self, node: ast.Call) -> Value:
        around = [(frame.caller.source, frame.call) for frame in self.frames if frame.call and frame.caller]
        is_cached = any(asks_for_file(*place) for place in ((self.source, node), *around))
        self.opened[node] = self.opened.get(node, True) and self.may_total() and not is_cached
        return Value("file")

    def _file_or_dict(self, name: str, node: ast.Call, values: Values) -> Value | None:
        """The value of a call that opens a file or makes a dict; None for other calls."""
        last, keys = name.rpartition(".")[2], [keyword.arg for keyword in node.keywords]
        if name.startswith("tempfile."):
            return Value("own")
        if name in ("builtins.open", "io.BytesIO"):
            return self.file_opened(node)
        if name == "collections.namedtuple":
            return Value("tuple class", re.findall(r"\w+", ast.unparse(node.args[1])))
        is_dict = last in ("dict", "OrderedDict") and bool(keys) and not node.args
        return Value("dict", dict(zip(keys, values, strict=True)), models_of(*values)) if is_dict else None

    def _is_optimizer(self, name: str, last: str, values: Values) -> bool:
        no_optimizer = name.startswith(("torch.optim.lr_scheduler", "torch.optim.swa_utils", "torch.nn."))
        is_named = "optim" in name.lower() or (last[:1].isupper() and not averages(last))
        return bool(models_of(*values)) and is_named and not no_optimizer

    def _of_library(self, name: str, last: str, node: ast.Call, values: Values) -> Value:
        if name.startswith("torchmetrics.") and last[:1].isupper():
            return Value("metric")
        if name == "torch.autograd.grad":
            return self._gradients(node)
        if name in ("torch.autograd.Variable", "weakref.proxy"):
            return values[0]
        if name.startswith("torch.autograd."):
            return Value(Kind.BATCH if any(value.is_shared for value in values) else Kind.ALIKE)
        if name.startswith("torch.nn.") and is_loss(last):
            return Value("loss", given_to_loss(node, 0, last))
        is_class = last[:1].isupper() and (name.startswith("torch.nn.") or "models" in name)
        # of torch, timm or ema_pytorch
        if averages(last) and values and self.is_model(values[0]):
            is_class = True
            self.keep_copy(node)
        if last == "update_bn":  # calls the model in train mode
            self.called_to_train |= {key_of(value) for value in values if self.is_model(value)}
        if last == "get_peft_model":
            return values[0]
        is_class |= name.startswith(_MODELS) and not last.endswith("Config")
        if is_class or last == "from_pretrained":
            held = values if name.startswith("torch.nn.") else []
            layers = [part for value in held for part in value.opened if self.is_model(part)]
            self.layers[self.key(node)] = (last == "Sequential", layers)
            self.keep_normalizing(node, last)
            return Value("model", self.key(node), models_of(*values))
        return self.opaque(node, values)

    def _gradients(self, node: ast.Call) -> Value:
        """The value of torch.autograd.grad, of samples or parameters; with create_graph it is the whole batch's."""
        by_name = arguments(node, ["outputs", "inputs"])
        inputs = self.value(by_name.get("inputs"))
        if inputs.is_shared:
            return inputs.bare if inputs.kind in ("list", Kind.BATCH) else Value("list", {0: inputs.bare})
        is_differentiable = getattr(by_name.get("create_graph"), "value", False) is True
        if not self.value(by_name.get("outputs")).is_shared or (is_differentiable and inputs.models):
            return Value()
        return other("is a gradient of this rank's share; average it with samestep.mean(gradient)")

    def _of_torch(self, name: str, node: ast.Call, values: Values, first: Value) -> Value:
        values = self.together(node.args, values)
        first = (*values, first)[0]
        is_shared = any(value.is_shared for value in values)
        if makes_rows(name) and not is_shared and self.sized(node, None):
            return Value(Kind.ROWS)
        if name == "compile" or not is_shared:
            return first if name == "compile" else Value(models=models_of(*values))
        if is_loss(name):
            return of_loss(given_to_loss(node, 2, name), values, self.batches)
        return self._of_tensors(name, node, values, node.args[1:])
