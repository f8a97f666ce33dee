"""What is known of a value of the script: equal on all ranks, or made of this rank's share of a batch, and how."""

import ast
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """How a value is made of the ranks' values; other kinds (loader, model, function, …) are equal on all ranks."""

    ALIKE = "alike"  # equal on all ranks
    BATCH = "batch"  # what a loader gives: a container of rows
    ROWS = "rows"  # this rank's samples, along the first dimension
    SOME = "some"  # some of them
    COLUMNS = "columns"  # rows, transposed
    ROW = "row"  # a single one of them
    PART = "part"  # the ranks' values add up to the value of the serial script
    COUNT = "count"  # the number of this rank's samples in the batch, which is a part too
    MEAN = "mean"  # the mean over this rank's samples of the batch
    RATIO = "ratio"  # divided by something that is a part
    PASSES = "passes"  # the number of batches that this rank had
    SHAPE = "shape"
    OTHER = "other"  # depends on this rank's share in another way


_SHARED = set(Kind) - {Kind.ALIKE}
ROWS = {Kind.ROWS, Kind.BATCH, Kind.SOME, Kind.COLUMNS}
SCALARS = {Kind.PART, Kind.COUNT, Kind.MEAN}
_NUMBERS = {Kind.PART, Kind.COUNT}


@dataclass(frozen=True)
class Value:
    """`of` belongs to the kind: a loop, a function, the elements; `models` are those whose parameters are inside."""

    kind: str = Kind.ALIKE
    of: Any = None
    models: frozenset[Any] = frozenset()
    late: tuple[Any, ...] = ()  # the edits that make it a value of the whole batch, where it was set

    @property
    def is_shared(self) -> bool:
        """Whether it depends on which share of a batch this rank has."""
        if self.kind in ("tuple", "list", "zip"):
            return any(one.is_shared for one in self.of)
        if self.kind in ("enumerate", "items"):
            return bool(self.of.is_shared)
        if self.kind == "dict":
            return any(one.is_shared for one in self.of.values())
        return self.kind in _SHARED


Values = list[Value]
Named = dict[str, Value]


def join(*values: Value) -> Value:
    """What is known where a value is one of these."""
    found = Value()
    for value in values:
        models = found.models | value.models
        if found.kind in (Kind.ALIKE, "none") or found.kind == value.kind:
            both = isinstance(found.of, Sum) and isinstance(value.of, Sum)
            found = replace(value, of=Sum(value.of.loop, found.of.nodes | value.of.nodes)) if both else value
        elif value.kind in (Kind.ALIKE, "none"):
            pass
        elif {found.kind, value.kind} <= _NUMBERS:
            found = Value(Kind.PART, found.of)
        elif {found.kind, value.kind} <= {Kind.BATCH, Kind.ROWS}:
            found = Value(Kind.ROWS)
        elif found.is_shared or value.is_shared:
            found = Value(Kind.OTHER, "is of several kinds")
        found = replace(found, models=models)
    return found


@dataclass(eq=False)
class Scope:
    """Names and their values; `since` says in which loops each was set."""

    parent: "Scope | None" = None
    names: Named = field(default_factory=dict)
    since: dict[str, tuple[int, ...]] = field(default_factory=dict)
    made: dict[str, Any] = field(
        default_factory=dict
    )  # the expression that gave a value, and the loops around it
    stars: list[str] = field(default_factory=list)
    elsewhere: dict[str, "Scope"] = field(default_factory=dict)  # of names declared global or nonlocal

    def copy(self) -> "Scope":
        return replace(self, names=self.names.copy(), since=self.since.copy(), made=self.made.copy())

    def find(self, name: str) -> Value | None:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        return None


@dataclass(eq=False)
class Loop:
    """A loop over the batches of a loader, over single samples of a share, or over anything else."""

    kind: str
    text: str | None = None  # the loader, as the script names it in this frame
    rows: str | None = None  # a tensor of the batch
    is_full: bool = False  # whether no batch is smaller, as the script reshapes each to the batch size
    frame: Any = None
    depth: int = 0
    lends: bool = False  # whether ranks without a share get another rank's batch
    trains: bool = False
    always_trains: bool = False
    found_training: int = 0  # 1 where some turns train, 2 where all do
    number: int = 0


@dataclass(frozen=True)
class Sum:
    """What was added up over the batches of a loop, and the expressions that were added."""

    loop: Loop
    nodes: frozenset[Any]


@dataclass(frozen=True)
class Form:
    """How an attribute of an object is computed from its others, for a value that only all ranks' parts make."""

    node: ast.expr
    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(eq=False)
class Function:
    """A function of the project, and where its body is."""

    node: Any
    scope: Scope
    source: Any
    is_property: bool = False
    is_static: bool = False


@dataclass(eq=False)
class Class:
    """A class of the project."""

    node: ast.ClassDef
    bases: list[Value]
    methods: dict[str, Function]
    scope: Scope

    def find(self, name: str) -> Function | None:
        inherited = (base.of.find(name) for base in self.bases if base.kind == "class")
        return self.methods.get(name) or next((found for found in inherited if found), None)

    def descends_from(self, *names: str) -> bool:
        """Whether a base, or a base of a base, ends in one of these names."""
        return any(
            base.of.descends_from(*names)
            if base.kind == "class"
            else base.kind == "external" and base.of.endswith(names)
            for base in self.bases
        )


@dataclass(eq=False)
class Instance:
    """An object of a class of the project; `made_at` is the same for the object however often the line is followed."""

    of: Class
    made_at: Any
    scope: Scope = field(default_factory=Scope)


_LINEAR = {
    "mean",
    "sum",
    "item",
    "detach",
    "cpu",
    "cuda",
    "float",
    "double",
    "long",
    "int",
    "to",
    "numpy",
    "tolist",
}
_LINEAR |= {
    "type",
    "clone",
    "squeeze",
    "unsqueeze",
    "view",
    "reshape",
    "half",
    "contiguous",
    "requires_grad_",
}
LINEAR = _LINEAR | {"scale", "backward", "data", "nanmean"}
MEANS = {"mean", "nanmean", "average"}
SUMS = {"sum", "nansum", "count_nonzero", "bincount", "histc", "nelement", "numel"}
_STATISTICS = {
    "max",
    "min",
    "amax",
    "amin",
    "std",
    "var",
    "median",
    "norm",
    "prod",
    "argmax",
    "argmin",
    "any",
    "all",
}
STATISTICS = _STATISTICS | {
    "topk",
    "sort",
    "kthvalue",
    "unique",
    "quantile",
    "cov",
    "corrcoef",
    "logsumexp",
    "std_mean",
}
_PAIRS = {"max", "min", "topk", "sort", "median", "kthvalue", "mode", "std_mean"}
BETWEEN_ROWS = {"cdist", "pdist", "cov", "corrcoef", "unique", "randperm", "flip", "roll"}
NUMBERED = {"arange", "linspace", "eye", "tril_indices", "triu_indices", "randperm"}
_LOSSES = {"cross_entropy", "binary_cross_entropy", "binary_cross_entropy_with_logits", "kl_div"}


def is_loss(name: str) -> bool:
    """Whether this name of torch.nn or torch.nn.functional is a loss."""
    return name in _LOSSES or name.endswith(("_loss", "Loss"))


def of_loss(name: str, given: dict[str, Any]) -> Value:
    """What a loss of torch gives, by its arguments: constants as they are, others as an ast node."""
    if given.get("reduce") is False:
        return Value(Kind.ROWS)
    if isinstance(given.get("reduction"), ast.AST):
        return Value(Kind.OTHER, "has a reduction that is chosen while the script runs")
    reduction = given.get("reduction", "sum" if given.get("size_average") is False else "mean")
    if reduction == "none":
        return Value(Kind.ROWS)
    by_weight = name.lower().replace("_", "") in ("crossentropy", "crossentropyloss", "nllloss")
    if reduction != "sum" and by_weight and (given.get("weight") or given.get("ignore_index") is not None):
        return Value(
            Kind.RATIO, "is divided by the weights, or the number of targets not ignored, of a share"
        )
    return Value(Kind.PART if reduction == "sum" else Kind.MEAN)


def reduced(name: str, value: Value, over_rows: bool, loop: Loop | None) -> Value:
    """What a reduction gives; `over_rows` where it goes along the first dimension."""
    if value.kind == Kind.SOME:
        return (
            Value(Kind.PART, loop)
            if name in SUMS
            else Value(Kind.RATIO, "is a mean over chosen samples of a share")
        )
    if value.kind in (Kind.PART, Kind.COUNT, Kind.MEAN):
        return value if name in LINEAR else Value(Kind.OTHER, f"is {name} of a value of a share")
    if value.kind not in (Kind.ROWS, Kind.BATCH):
        return value if value.kind != Kind.COLUMNS else Value(Kind.OTHER, "compares samples of a share")
    if not over_rows:
        return Value(Kind.BATCH if name in _PAIRS else Kind.ROWS)
    if name in MEANS:
        return Value(Kind.MEAN, loop)
    return (
        Value(Kind.PART, loop)
        if name in SUMS
        else Value(Kind.OTHER, f"is {name} over the samples of a share")
    )
