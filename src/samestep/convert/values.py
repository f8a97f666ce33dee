"""What is known of a value of the script: equal on all ranks, or made of this rank's share of a batch, and how."""

import ast
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import reduce
from typing import Any

from samestep.convert.source import Edit, Source


class Kind(StrEnum):
    """How a value is made of the ranks' values; other kinds (loader, model, function, …) are equal on all ranks."""

    ALIKE = "alike"  # equal on all ranks
    BATCH = "batch"  # what a loader gives: a container of rows
    ROWS = "rows"  # this rank's samples, along the first dimension
    SOME = "some"  # some of them
    VIEWS = "views"  # several tensors of this rank's samples, one after another
    COLUMNS = "columns"  # this rank's samples, along the last dimension
    ROW = "row"  # a single one of them
    PART = "part"  # the ranks' values add up to the value of the serial script
    COUNT = "count"  # the number of this rank's samples in the batch, which is a part too
    MEAN = "mean"  # the mean over this rank's samples of the batch
    PER = "per"  # a number that all ranks have, divided by the number of this rank's samples in the batch
    PASSES = "passes"  # the number of batches that this rank had
    OTHER = "other"  # depends on this rank's share in another way, which `of` says


ROWS = {Kind.BATCH, Kind.ROWS, Kind.SOME, Kind.VIEWS, Kind.COLUMNS}
BETWEEN = "compares samples of a share with each other"
NUMBERS = {Kind.PART, Kind.COUNT, Kind.MEAN}
_SHARED = set(Kind) - {Kind.ALIKE}
_A, _P, _C, _M = Kind.ALIKE, Kind.PART, Kind.COUNT, Kind.MEAN
_PAIRS = dict[tuple[str, str], Kind]
_ADDED: _PAIRS = {
    (_P, _P): _P,
    (_P, _C): _P,
    (_C, _P): _P,
    (_C, _C): _P,
    (_M, _M): _M,
    (_M, _A): _M,
    (_A, _M): _M,
}
_TIMES: _PAIRS = {
    (_P, _A): _P,
    (_C, _A): _P,
    (_M, _A): _M,
    (_M, _C): _P,
    (_P, Kind.PER): _M,
}  # or the other way round
_DIVIDED: _PAIRS = {(_P, _A): _P, (_C, _A): _P, (_M, _A): _M, (_A, _C): Kind.PER, (_P, _C): _M, (_C, _C): _M}


@dataclass(frozen=True)
class Value:
    """`of` belongs to the kind: the loop of a number, a function, the elements of a list by key, a reason."""

    kind: str = Kind.ALIKE
    of: Any = None
    # the sites at which an optimizer gets the parameters that are inside
    models: frozenset[Any] = frozenset()
    # what makes the expression that gives it one of the whole batch; a node stands for "total it where it is added up"
    edits: tuple[Edit | ast.expr, ...] | None = None
    since: tuple[int, ...] = ()  # the loops that it was set in
    # the expression that gave it, and the loops around
    made: tuple[ast.expr, Source, tuple[int, ...]] | None = None
    # a string or truth that the script gives; of a loader, what its batches' sizes depend on
    text: str | None = None

    @property
    def parts(self) -> "Values":
        """The elements of a list or dict; what a loop gets of an iterator."""
        if self.kind in ("list", "dict"):
            return list(self.of.values())
        return [self.of.element] if self.kind == "each" else []

    @property
    def is_shared(self) -> bool:
        """Whether it depends on which share of a batch this rank has."""
        return self.kind in _SHARED or any(part.is_shared for part in self.parts)

    @property
    def bare(self) -> "Value":
        """The value of an expression that is computed from it: what combines is combined there."""
        return self if self.kind == Kind.OTHER else replace(self, edits=None)


Values = list[Value]
Named = dict[str, Value]


@dataclass(eq=False)
class Loop:
    """A loop over the batches of a loader, over single samples of a share ("rows"), or over anything else."""

    element: Value = Value()  # what it gets in each turn
    kind: str = "plain"
    text: str | None = None  # the loader, as the script names it in this frame
    call: ast.expr | None = None  # the call that made the loader
    objects: tuple[Value, ...] = ()  # the elements one by one, where they are objects or functions
    frame: Any = None
    rows: str | None = None  # a tensor of the batch
    size: str | None = None  # what the batches' sizes depend on
    is_mixed: bool = False  # whether they are batches of several loaders, of several sizes
    is_full: bool = False  # whether no batch is smaller, as the script reshapes each to the batch size
    lends: bool = False  # whether ranks without a share get another rank's batch
    depth: int = 0
    number: int = 0
    trains: int = 0  # 1 where some turns train, 2 where all do
    found_training: int = 0
    together: set[Any] = field(default_factory=set)  # its statements in which a model is called or trained

    def mapped(self, change: Callable[[Value], Value]) -> "Loop":
        return replace(self, element=change(self.element), objects=tuple(map(change, self.objects)))


@dataclass(frozen=True)
class Sum:
    """What was added up over the batches of a loop, and the expressions that were added."""

    loop: Loop
    nodes: frozenset[ast.expr]


def other(reason: object, *values: Value, edits: tuple[ast.expr, ...] | None = None) -> Value:
    """A value that depends on the share in a way that has no name; what is known of its parts says more."""
    ordered = sorted(values, key=lambda value: value.edits is not None)
    said = [value.of for value in ordered if value.is_shared and isinstance(value.of, str)]
    return Value(Kind.OTHER, str((*said, reason)[0]), edits=edits)


def models_of(*values: Value) -> frozenset[Any]:
    return frozenset().union(*(value.models for value in values))


def nameless(value: Value) -> Value:
    """A value that leaves its function: what is called the loader there is no name elsewhere."""
    if value.kind == "each":
        return replace(value, of=replace(value.of, text=None))
    return replace(value, of=None) if value.kind == "loader" else value


def join(*values: Value) -> Value:
    """What is known where a value is one of these."""
    is_shared = any(value.is_shared for value in values)
    # beside a share's value an external one is a number, such as math.inf
    found = reduce(_either, (one for one in values if not (is_shared and one.kind == "external")), Value())
    known = [value.edits for value in values if value.is_shared]
    edits = None if None in known else tuple(dict.fromkeys(edit for edits in known for edit in edits or ()))
    common = tuple(sorted(set.intersection(*(set(value.since) for value in values)))) if values else ()
    text = found.text if len({value.text for value in values}) == 1 else None
    return replace(found, models=models_of(*values), since=common, edits=edits, text=text)


def _either(one: Value, other: Value) -> Value:
    kinds = {one.kind, other.kind}
    if isinstance(one.of, Sum) and isinstance(other.of, Sum):
        return replace(other, kind=Kind.PART, of=Sum(other.of.loop, one.of.nodes | other.of.nodes))
    if one.kind == other.kind in ("list", "dict"):
        both = {key: [of[key] for of in (one.of, other.of) if key in of] for key in (*one.of, *other.of)}
        return replace(other, of={key: join(*parts) for key, parts in both.items()})
    if kinds & {Kind.ALIKE, "none"} or len(kinds) == 1:
        return other if one.kind in (Kind.ALIKE, "none", other.kind) else one
    if kinds == {Kind.BATCH, "list"} and join(*one.parts, *other.parts).kind in ROWS:
        return Value(Kind.BATCH)  # a batch, or a tuple of what is in it
    if kinds <= {Kind.PART, Kind.COUNT}:
        return Value(Kind.PART, one.of)
    if kinds <= {Kind.BATCH, Kind.ROWS}:
        return Value(Kind.ROWS)
    return Value(Kind.OTHER, "is of several kinds") if one.is_shared or other.is_shared else one


def combined(op: ast.operator, left: Value, right: Value) -> Value:
    """What two values give, of which a part at least depends on this rank's share."""
    # a parameter of a model is equal on all ranks
    left, right = (Value() if value.kind == "model" else value for value in (left, right))
    kinds = {left.kind, right.kind}
    if isinstance(op, ast.MatMult) and Kind.COLUMNS in kinds:
        return Value(Kind.OTHER, f"{BETWEEN}; see docs/losses.md")
    if kinds & ROWS and kinds <= {*ROWS, Kind.ALIKE, Kind.COUNT, Kind.PER}:
        return rows_of(kinds)
    if kinds <= {Kind.ROW, Kind.ALIKE}:
        return Value(Kind.ROW, left.of if left.kind == Kind.ROW else right.of)
    if kind := _number(op, left, right):
        loop = (left if left.is_shared else right).of
        return Value(kind, loop if isinstance(loop, Sum | Loop) else None)
    is_ratio = isinstance(op, ast.Div) and kinds <= {*NUMBERS, Kind.PASSES, Kind.ALIKE}
    reason = "divided by a count in a share; see docs/losses.md" if is_ratio else "computed from a share"
    return other(f"is {reason}", left, right)


def rows_of(kinds: set[str]) -> Value:
    """What is computed sample by sample of these kinds."""
    return Value(next((kind for kind in (Kind.SOME, Kind.VIEWS, Kind.COLUMNS) if kind in kinds), Kind.ROWS))


def _number(op: ast.operator, left: Value, right: Value) -> Kind | None:
    """The kind of a sum, product or quotient of numbers, if it is one that can be combined."""
    pair = (left.kind, right.kind)
    is_of_batch = left.of is right.of or Kind.ALIKE in pair
    if isinstance(op, ast.Add | ast.Sub):
        return _ADDED.get(pair)
    if isinstance(op, ast.Div):
        is_by_count = right.kind == Kind.COUNT and isinstance(right.of, Loop) and is_of_batch
        return _DIVIDED.get(pair) if is_by_count or right.kind == Kind.ALIKE else None
    if not isinstance(op, ast.Mult | ast.MatMult) or (Kind.PER in pair and not is_of_batch):
        return None
    return _TIMES.get(pair) or _TIMES.get(pair[::-1])
