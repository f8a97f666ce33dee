"""The kinds of values in a script: equal on all ranks, or computed from this rank's share of a batch, and how.

A share is a rank's part of a batch. A total is the value of the whole batch, from samestep.sum, mean or gather.
"""

import ast
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import reduce
from typing import Any

from samestep.convert.source import Edit, Source


class Kind(StrEnum):
    """How a value depends on a rank's share; all other kinds (loader, model, function, …) are equal on all ranks."""

    # But "own", which is the path of a temporary file or directory: each rank has one.

    ALIKE = "alike"  # equal on all ranks
    BATCH = "batch"  # a batch of a loader: a container of rows
    ROWS = "rows"  # this rank's samples, along the first dimension
    SOME = "some"  # some of this rank's samples
    VIEWS = "views"  # several tensors of this rank's samples, one after another
    COLUMNS = "columns"  # this rank's samples, along the last dimension
    STACKED = "stacked"  # this rank's samples, along the second dimension, behind the elements of a list
    ROW = "row"  # a single sample of this rank
    PART = "part"  # a term: the sum over the ranks is the serial script's value
    COUNT = "count"  # the number of this rank's samples in the batch; also a term
    MEAN = "mean"  # the mean over this rank's samples of the batch
    PER = "per"  # a number that is equal on all ranks, divided by this rank's COUNT
    PASSES = "passes"  # how many batches this rank had
    OTHER = "other"  # depends on this rank's share in another way; `of` says how


TURNED = {Kind.COLUMNS, Kind.STACKED}
ROWS = {Kind.BATCH, Kind.ROWS, Kind.SOME, Kind.VIEWS, *TURNED}
BETWEEN = "compares samples of a share with each other"
PAIRS = f"{BETWEEN}; see docs/losses.md"
NUMBERS = {Kind.PART, Kind.COUNT, Kind.MEAN}
LENGTH = "its length"  # the key of the length of a list that is filled sample by sample
_SHARED = set(Kind) - {Kind.ALIKE}
_HOLDERS = {"list", "dict", "each"}
_A, _P, _C, _M = Kind.ALIKE, Kind.PART, Kind.COUNT, Kind.MEAN
_TIMES: dict[tuple[str, str], Kind]
_TIMES = {(_P, _A): _P, (_C, _A): _P, (_M, _A): _M, (_M, _C): _P, (_P, Kind.PER): _M}  # in either order
_BY_COUNT: dict[tuple[str, str], Kind] = {(_A, _C): Kind.PER, (_P, _C): _M, (_C, _C): _M}


@dataclass(frozen=True)
class Value:
    """A value; `of` depends on the kind: a number's loop, a function, a list's elements by key, a reason."""

    kind: str = Kind.ALIKE
    of: Any = None
    # where an optimizer gets the parameters that the value contains
    models: frozenset[Any] = frozenset()
    # edits that turn its expression into the whole batch's; a node means "take its total where it is added up"
    edits: tuple[Edit | ast.expr, ...] | None = None
    since: tuple[int, ...] = ()  # the numbers of the loops in which it was set
    # the expression that made it, and the loops around
    origin: tuple[ast.expr, Source, tuple[int, ...]] | None = None
    # the value of a constant string or bool; of a loader, what the sizes of its batches depend on
    text: str | None = None

    @property
    def parts(self) -> "Values":
        """The elements of a list or dict, or the element that a loop gets from an iterator."""
        if self.kind in ("list", "dict"):
            return [part for key, part in self.of.items() if key != LENGTH]
        return [self.of.element] if self.kind == "each" else []

    @property
    def by_key(self) -> "dict[Any, Value]":
        """The elements of a list, a dict or a batch; None is the key of elements whose keys are not known."""
        return {None: Value(Kind.ROWS)} if self.kind == Kind.BATCH else self.of

    @property
    def opened(self) -> "Values":
        """Its parts, or the value itself where it has none."""
        return self.parts or [self]

    @property
    def is_shared(self) -> bool:
        """Whether it depends on this rank's share of a batch."""
        if self.kind in _HOLDERS:
            return any(part.is_shared for part in self.parts)
        return self.kind in _SHARED

    @property
    def path(self) -> str:
        """The name of a library's function or class, as `torch.nn.Linear`; empty for one of the script's own."""
        return self.of if isinstance(self.of, str) else ""

    @property
    def bare(self) -> "Value":
        """The same without edits, for an expression computed from it, which gets edits of its own."""
        return self if self.edits is None or self.kind == Kind.OTHER else replace(self, edits=None)


Values = list[Value]
Named = dict[str, Value]


@dataclass(eq=False)
class Loop:
    """A loop over the batches of a loader, over single samples of a share ("rows"), or over anything else."""

    element: Value = Value()  # the value in each turn
    kind: str = "plain"
    text: str | None = None  # the loader, as the script names it in this frame
    call: ast.expr | None = None  # the call that made the loader
    objects: tuple[Value, ...] = ()  # the single elements, if they are objects or functions
    frame: Any = None
    rows: str | None = None  # a tensor of the batch
    sizes: frozenset[str | None] = frozenset()  # what its batches' sizes depend on
    # the sizes of the batches taken in this turn, and whether gradients may come of them
    taken: dict[str | None, bool] = field(default_factory=dict)
    is_full: bool = False  # whether all batches have the full size: the script reshapes each to it
    lends: bool = False  # whether ranks without a share get another rank's batch
    depth: int = 0
    number: int = 0
    trains: int = 0  # 1: some turns train; 2: all do
    found_training: int = 0
    steps: bool = True  # whether some turns change the weights
    found_steps: bool = False
    place: Any = None  # what stays the same when the loop is followed again
    fed_by: tuple[Any, ...] = ()  # the places of the loops in a generator that gives the batches
    together: set[Any] = field(default_factory=set)  # the statements in it that call or train a model

    @property
    def is_even(self) -> bool:
        """Whether ranks have equally many turns, with the serial script's batches.

        A pass of eval() that computes gradients and changes no weights is cut as an evaluation.
        """
        return self.trains == 2 and (self.lends or self.steps)

    def mapped(self, change: Callable[[Value], Value]) -> "Loop":
        return replace(self, element=change(self.element), objects=tuple(map(change, self.objects)))


@dataclass(frozen=True)
class Sum:
    """A sum over the batches of a loop, and the expressions that were added."""

    loop: Loop
    nodes: frozenset[ast.expr]


def other(reason: object, *values: Value, edits: tuple[ast.expr, ...] | None = None) -> Value:
    """A value of kind OTHER; the reason of one of its parts, if there is one, comes first."""
    ordered = sorted(values, key=lambda value: value.edits is not None)
    opened = [part for value in ordered for part in value.opened]
    reasons = [part.of for part in opened if part.is_shared and isinstance(part.of, str)]
    return Value(Kind.OTHER, str((*reasons, reason)[0]), edits=edits)


def made_at(value: Value) -> tuple[Any, ...] | None:
    """What totals a value where it is made; None if nothing does."""
    is_number = value.kind in NUMBERS and not isinstance(value.of, Sum)
    return value.edits or ((value.origin[0],) if is_number and value.origin else None)


def constants_in(values: Value, place: ast.expr) -> list[ast.expr]:
    """The constants in a list or dict that stands at this place, and a name for what is none."""
    made = [part.origin[0] if part.origin else None for part in values.parts]
    unknown = ast.copy_location(ast.Name("_"), place)
    return [node if isinstance(node, ast.Constant | ast.UnaryOp) else unknown for node in made]


def models_of(*values: Value) -> frozenset[Any]:
    return frozenset().union(*(value.models for value in values))


def key_of(model: Value) -> Any:
    return model.of if model.kind == "model" else model.of.key


def nameless(value: Value) -> Value:
    """A value that leaves its function, without the loader's local name."""
    if value.kind == "each":
        return replace(value, of=replace(value.of, text=None))
    return replace(value, of=None) if value.kind == "loader" else value


def join(*values: Value) -> Value:
    """The value of an expression that may have any of these values."""
    is_shared = any(value.is_shared for value in values)
    # next to a value of a share, an external value is a number such as math.inf
    whole = reduce(_either, (part for part in values if not (is_shared and part.kind == "external")), Value())
    known = [value.edits for value in values if value.is_shared]
    edits = None if None in known else tuple(dict.fromkeys(edit for edits in known for edit in edits or ()))
    common = tuple(sorted(set.intersection(*(set(value.since) for value in values)))) if values else ()
    text = whole.text if len({value.text for value in values}) == 1 else None
    is_one = whole.kind != Kind.ALIKE or all(value.origin == whole.origin for value in values)
    origin = whole.origin if is_one else None
    return replace(whole, models=models_of(*values), since=common, edits=edits, text=text, origin=origin)


def _either(left: Value, right: Value) -> Value:
    kinds = {left.kind, right.kind}
    if isinstance(left.of, Sum) and isinstance(right.of, Sum):
        return replace(right, kind=Kind.PART, of=Sum(right.of.loop, left.of.nodes | right.of.nodes))
    if left.kind == right.kind in ("list", "dict"):
        sides = (left.of, right.of)
        both = {key: [parts[key] for parts in sides if key in parts] for parts in sides for key in parts}
        return replace(right, of={key: join(*parts) for key, parts in both.items()})
    if kinds & {Kind.ALIKE, "none"} or len(kinds) == 1:
        return right if left.kind in (Kind.ALIKE, "none", right.kind) else left
    if "list" in kinds and kinds & {Kind.BATCH, Kind.ROWS} and join(*left.parts, *right.parts).kind in ROWS:
        return Value(Kind.BATCH)  # a batch, or a tuple of what is in it
    if kinds <= {Kind.PART, Kind.COUNT}:
        return Value(Kind.PART, left.of)
    if kinds <= {Kind.BATCH, Kind.ROWS}:
        return Value(Kind.ROWS)
    return (
        other("is not made alike in all branches and calls", left, right)
        if left.is_shared or right.is_shared
        else left
    )


def combined(op: ast.operator, left: Value, right: Value, batch: Loop | None = None) -> Value:
    """The result of an operator on two values, of which at least one depends on this rank's share."""
    # a model stands for its parameters, which are equal on all ranks
    left, right = (Value() if value.kind == "model" else value for value in (left, right))
    kinds = {left.kind, right.kind}
    if isinstance(op, ast.MatMult) and left.kind in TURNED and right.kind in ROWS - TURNED:
        return Value(Kind.PART, batch)  # a sum over the samples
    if isinstance(op, ast.MatMult) and Kind.COLUMNS in kinds and Kind.ALIKE not in kinds:
        return Value(Kind.OTHER, PAIRS)
    if kinds & ROWS and kinds <= {*ROWS, Kind.ALIKE, Kind.COUNT, Kind.PER}:
        return rows_of(kinds)
    if kinds <= {Kind.ROW, Kind.ALIKE}:
        return Value(Kind.ROW, left.of if left.kind == Kind.ROW else right.of)
    if kind := _number(op, left, right):
        loop = (left if left.is_shared else right).of
        return Value(kind, loop if isinstance(loop, Sum | Loop) else None)
    if isinstance(op, ast.Div) and kinds <= {*NUMBERS, Kind.PASSES, Kind.ALIKE}:
        return other("is divided by a count in a share; see docs/losses.md", left, right)
    return other("is computed from this process's share of the batch", left, right)


def makes_pairs(kinds: set[str]) -> bool:
    """Whether operands broadcast to pairs of samples, as `labels.unsqueeze(0) == labels.unsqueeze(1)`."""
    return Kind.COLUMNS in kinds and bool(kinds & {Kind.ROWS, Kind.VIEWS})


def rows_of(kinds: set[str]) -> Value:
    """The result of a computation sample by sample."""
    return Value(
        next((kind for kind in (Kind.SOME, Kind.VIEWS, *sorted(TURNED)) if kind in kinds), Kind.ROWS)
    )


def _number(op: ast.operator, left: Value, right: Value) -> Kind | None:
    """The kind of a sum, product or quotient of numbers; None if it has no total."""
    pair = (left.kind, right.kind)
    is_of_batch = left.of is right.of or Kind.ALIKE in pair
    if isinstance(op, ast.Add | ast.Sub):
        return _P if {*pair} <= {_P, _C} else _M if {*pair} <= {_M, _A} else None
    if isinstance(op, ast.Div) and right.kind == Kind.ALIKE:
        return _TIMES.get(pair)
    if isinstance(op, ast.Div):
        return _BY_COUNT.get(pair) if isinstance(right.of, Loop) and is_of_batch else None
    if not isinstance(op, ast.Mult | ast.MatMult) or (Kind.PER in pair and not is_of_batch):
        return None
    return _TIMES.get(pair) or _TIMES.get(pair[::-1])
