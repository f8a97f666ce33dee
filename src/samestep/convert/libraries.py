"""What the functions of Python, torch and other libraries make of values."""

import ast
from dataclasses import replace
from typing import Any

from samestep.convert.expressions import Expressions
from samestep.convert.values import (
    BETWEEN_ROWS,
    MEANS,
    NUMBERED,
    ROWS,
    SCALARS,
    STATISTICS,
    SUMS,
    Kind,
    Value,
    Values,
    is_loss,
    join,
    of_loss,
    reduced,
)

LOADERS = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
_FUNCTIONAL = ("torch.nn.functional.", "torch.special.", "torch.linalg.", "torch.fft.")
_KEPT = {"iter", "list", "tuple", "reversed", "islice", "tqdm", "trange", "float", "int", "abs"}
_MADE = {"ones", "zeros", "full", "rand", "randn", "empty", "randint", "normal"}
MEANS_OF_LISTS = ("numpy.mean", "statistics.mean", "statistics.fmean", "numpy.average")


class Libraries(Expressions):
    """Calls whose body is not in the project; what samestep has to do with is left to be rewritten."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[str] = set()  # how the script names the batch size of a loader

    def _over_rows(self, node: ast.Call, dims: list[ast.expr]) -> bool:
        """Whether a reduction goes along the samples: it names no dimension, or the first one."""
        named = [one.value for one in node.keywords if one.arg in ("dim", "axis")]
        given = next(iter((*named, *dims)), None)
        if given is None:
            return True
        parts = given.elts if isinstance(given, ast.Tuple | ast.List) else [given]
        return not self.in_forward and any(
            isinstance(one, ast.Constant) and one.value in (0, None) for one in parts
        )

    def external(self, name: str, node: ast.Call) -> Value:
        """A function or class that is not in the project."""
        arguments = [self.value(one.value if isinstance(one, ast.Starred) else one) for one in node.args]
        arguments += [self.value(one.value) for one in node.keywords]
        last = name.rpartition(".")[2]
        if name in LOADERS:
            return self.made_loader(node)
        if name == "torch.save":
            return self.saved(node)
        if name in MEANS_OF_LISTS and arguments and arguments[0].kind == "list":
            return Value(Kind.OTHER, "is a mean over the batches that this process had")
        if name.startswith(("builtins.", "itertools.", "tqdm", "copy.", "functools.")):
            follow = getattr(self, f"_builtin_{last}", self._builtin)
            result: Value = follow(last, node, arguments)
            return result
        return self._of_torch(name, last, node, arguments)

    def _of_torch(self, name: str, last: str, node: ast.Call, arguments: Values) -> Value:
        if name.startswith("torch.autograd."):
            return Value(Kind.BATCH) if any(one.is_shared for one in arguments) else Value()
        if name.startswith(("torch.nn.parallel.", "torch.nn.DataParallel")):
            return self.unwrapped(node, arguments)
        if self._is_optimizer(name, last, arguments):
            return self._optimizes(arguments)
        if name.startswith(_FUNCTIONAL) or (name.startswith("torch.") and name.count(".") == 1):
            return self._function_of_torch(last, node, arguments)
        if last[:1].isupper() and name.startswith("torch.nn.") and is_loss(last):
            return Value("loss", (last, _given(node, 0, last)))
        is_class = last[:1].isupper() and (name.startswith("torch.nn.") or "models" in name)
        if is_class or name.startswith(("torchvision.models.", "timm.create", "transformers.")):
            return Value("model", self.key(node), join(*arguments).models)
        return Value("model", self.key(node)) if last == "from_pretrained" else self._opaque(node, arguments)

    def _loss(self, name: str, given: dict[str, Any], arguments: Values) -> Value:
        """What a loss of torch makes of its arguments: of rows it is a mean or a sum over them."""
        kinds = {one.kind for one in arguments if one.is_shared}
        found = of_loss(name, given) if kinds else Value()
        if kinds <= {Kind.ROWS, Kind.BATCH, Kind.ROW}:
            return replace(found, of=self.batches) if found.kind in (Kind.MEAN, Kind.PART) else found
        if kinds <= {Kind.ROWS, Kind.BATCH, Kind.SOME}:
            return (
                found
                if found.kind == Kind.PART
                else Value("ratio", "is a mean over chosen samples of a share")
            )
        reasons = [one.of for one in arguments if isinstance(one.of, str) and one.is_shared]
        return Value(Kind.OTHER, (*reasons, "is computed from values of this rank's share")[0])

    def _is_optimizer(self, name: str, last: str, arguments: Values) -> bool:
        if (
            name.startswith(("torch.optim.lr_scheduler", "torch.optim.swa_utils"))
            or not join(*arguments).models
        ):
            return False
        averages = any(word in last.lower() for word in ("ema", "average"))
        return "optim" in name.lower() or (last[:1].isupper() and not averages)

    def _builtin(self, name: str, node: ast.Call, arguments: Values) -> Value:
        if name in _KEPT and arguments:
            self.shown_once(name, node)
            first = arguments[0]
            return Value("iter", first.of) if first.kind == "loader" else first
        return self._opaque(node, arguments)

    def _builtin_len(self, name: str, node: ast.Call, arguments: Values) -> Value:
        first = join(*arguments[:1])
        if first.kind in ROWS:
            return Value(Kind.PART if first.kind == Kind.SOME else Kind.COUNT, self.batches)
        return Value(Kind.PASSES) if first.kind == "list" and first.is_shared else Value()

    def _builtin_enumerate(self, name: str, node: ast.Call, arguments: Values) -> Value:
        return Value("enumerate", arguments[0])

    def _builtin_zip(self, name: str, node: ast.Call, arguments: Values) -> Value:
        return Value("zip", tuple(arguments))

    def _builtin_next(self, name: str, node: ast.Call, arguments: Values) -> Value:
        return self.next_batch(arguments[0])

    def _builtin_range(self, name: str, node: ast.Call, arguments: Values) -> Value:
        return next((Value(Kind.COUNT) for one in arguments if one.kind in (Kind.COUNT, Kind.PART)), Value())

    def _builtin_sum(self, name: str, node: ast.Call, arguments: Values) -> Value:
        first = arguments[0]
        return (
            join(*first.of) if first.kind in ("list", "tuple") else reduced("sum", first, True, self.batches)
        )

    def _builtin_deepcopy(self, name: str, node: ast.Call, arguments: Values) -> Value:
        return Value("model", self.key(node)) if self.is_model(arguments[0]) else arguments[0]

    def _builtin_cycle(self, name: str, node: ast.Call, arguments: Values) -> Value:
        if arguments[0].kind == "loader":
            self.gap(
                node, "itertools.cycle repeats the batches of the first pass; call iter() of the loader again"
            )
        return arguments[0]

    def _builtin_chain(self, name: str, node: ast.Call, arguments: Values) -> Value:
        return join(*arguments)

    _builtin_filter = _builtin_map = _builtin_chain

    def _builtin_partial(self, name: str, node: ast.Call, arguments: Values) -> Value:
        if arguments[0].of in LOADERS:
            self.gap(node, "functools.partial of DataLoader; call DataLoader itself")
        return arguments[0]

    def next_batch(self, value: Value) -> Value:
        """What next() takes from an iterator over a loader: the loop around it is a loop over batches."""
        if value.kind not in ("loader", "batches", "iter"):
            return value
        loop = self.loops[-1] if self.loops else None
        if loop is not None and loop.kind == "plain":
            loop.kind, loop.text, loop.frame = "batches", value.of, self.frame
        return Value(Kind.BATCH)

    def _function_of_torch(self, name: str, node: ast.Call, arguments: Values) -> Value:
        """A function of torch or torch.nn.functional: rows in, rows out, except reductions and losses."""
        shared = [one for one in arguments if one.is_shared]
        if name in _MADE and not shared and self.sized(node, None):
            return Value(Kind.ROWS)
        if name == "compile" or not shared:
            return arguments[0] if name == "compile" else Value(models=join(*arguments).models)
        if is_loss(name):
            return self._loss(name, _given(node, 2, name), arguments)
        if name in STATISTICS or name in SUMS or name in MEANS:
            elementwise = name in ("max", "min") and len(arguments) > 1 and arguments[1].is_shared
            found = reduced(name, arguments[0], self._over_rows(node, node.args[1:]), self.batches)
            return Value(Kind.ROWS) if elementwise else found
        if name in ("mm", "matmul"):
            return self.combined(ast.MatMult(), arguments[0], arguments[-1])
        if name in BETWEEN_ROWS and not self.in_forward:
            return Value(
                Kind.OTHER, f"compares samples of a share with each other ({name}); see docs/losses.md"
            )
        return self._by_rows(name, shared)

    def _by_rows(self, name: str, shared: Values) -> Value:
        kinds = {one.kind for one in shared}
        if name in NUMBERED and kinds <= {Kind.COUNT, Kind.PART} and not self.in_forward:
            return Value(Kind.OTHER, "numbers the samples of a share")
        lists = {join(*one.of).kind for one in shared if one.kind in ("list", "tuple")}
        if not lists <= {Kind.ROWS, Kind.BATCH, Kind.ALIKE, Kind.COUNT}:
            return Value(Kind.OTHER, f"is {name} of values of this process's batches")
        if kinds <= {*ROWS, Kind.COUNT, Kind.SHAPE, "tuple", "list", Kind.ROW}:
            return Value(Kind.SOME if Kind.SOME in kinds else Kind.ROWS)
        if kinds <= SCALARS and name in ("tensor", "as_tensor", "stack"):
            return shared[0]
        return Value(Kind.OTHER, f"is {name} of this process's values")

    def sized(self, node: ast.Call, receiver: ast.expr | None) -> bool:
        """Whether a shape begins with the batch size, of which this process has a share: its rows are counted."""
        loop, shape = self.batches, node.args[0] if node.args else None
        shape = shape.elts[0] if isinstance(shape, ast.Tuple | ast.List) and shape.elts else shape
        if loop is None or shape is None or ast.unparse(shape) not in self.sizes:
            return False
        loop.is_full |= receiver is not None
        rows = receiver.id if isinstance(receiver, ast.Name) else loop.rows
        if not loop.is_full or rows is None or loop.frame is not self.frame:
            return False
        if not self.silent:
            self.frame.source.replace(shape, f"len({rows})")
        return True

    def key(self, node: ast.AST) -> Any:
        return str(self.frame.source.path), node.lineno, node.col_offset  # type: ignore[attr-defined]

    def backward(self, node: ast.Call, loss: Value) -> Value:
        raise NotImplementedError

    def put(self, node: ast.Call, base: Value, arguments: Values) -> Value:
        raise NotImplementedError

    def made_loader(self, node: ast.Call) -> Value:
        raise NotImplementedError

    def saved(self, node: ast.Call) -> Value:
        raise NotImplementedError

    def unwrapped(self, node: ast.Call, arguments: Values) -> Value:
        raise NotImplementedError

    def shown_once(self, name: str, node: ast.Call) -> None:
        raise NotImplementedError

    def total(self, node: ast.expr) -> Value:
        raise NotImplementedError

    def lazily(self, node: ast.expr) -> Value:
        raise NotImplementedError

    def is_model(self, value: Value) -> bool:
        raise NotImplementedError

    def _optimizes(self, given: Values) -> Value:
        raise NotImplementedError

    def _opaque(self, node: ast.Call, arguments: Values) -> Value:
        raise NotImplementedError


def _given(node: ast.Call, at: int, name: str) -> dict[str, Any]:
    """The arguments of a loss that say how it is reduced; of some losses class weights may come by position."""
    given = {one.arg or "": getattr(one.value, "value", one.value) for one in node.keywords}
    by_weight = name in ("cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss") and len(node.args) > at
    return {"weight": node.args[at], **given} if by_weight else given
