"""The data of a followed project: scopes, functions, classes, objects, the state of following, and findings."""

import ast
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, TypeVar

from samestep.convert.source import Edit, Source
from samestep.convert.values import Kind, Loop, Named, Value, Values


@dataclass(eq=False)
class Scope:
    """Names and their values."""

    parent: "Scope | None" = None
    names: Named = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    # names that may share their object, and where it is, if that is known
    aliases: dict[str, tuple["Scope", str] | None] = field(default_factory=dict)
    elsewhere: dict[str, "Scope"] = field(default_factory=dict)  # for global and nonlocal names

    def holder(self, name: str) -> "Scope | None":
        """The innermost scope around that has this name."""
        if name in self.names:
            return self
        return self.parent.holder(name) if self.parent is not None else None

    def find(self, name: str) -> Value | None:
        holder = self.holder(name)
        return holder.names[name] if holder is not None else None

    def reached(self) -> "list[Scope]":
        """This scope, and those of the objects that its names lead to."""
        found = [self]
        for scope in found:
            objects = [value.of.scope for value in scope.names.values() if value.kind == "instance"]
            found += [inner for inner in objects if inner not in found]
        return found

    def reached_values(self) -> list[tuple[Named, str, Value]]:
        """The values that its names lead to, each with its name and the names beside it."""
        return [(scope.names, *pair) for scope in self.reached() for pair in scope.names.items()]


@dataclass(eq=False)
class Function:
    """A function of the project; `bound` is a method's object, `marks` are the decorators."""

    node: Any
    scope: Scope
    source: Source
    marks: frozenset[str] = frozenset()
    bound: Value | None = None


@dataclass(eq=False)
class Class:
    node: ast.ClassDef
    bases: Values
    scope: Scope

    def find(self, name: str) -> Value | None:
        inherited = (base.of.find(name) for base in self.bases if base.kind == "class")
        return self.scope.names.get(name) or next((value for value in inherited if value), None)

    def above(self, node: ast.ClassDef, name: str) -> Value | None:
        """A method of super() in the class `node`, which is this class or a base of it."""
        bases = [base.of for base in self.bases if base.kind == "class"]
        members = (base.find(name) if self.node is node else base.above(node, name) for base in bases)
        return next((member for member in members if member is not None), None)

    def descends_from(self, *names: str) -> bool:
        """Whether a base, or a base of a base, ends in one of these names."""
        classes = [base.of for base in self.bases if base.kind == "class"]
        is_base = any(base.path.endswith(names) for base in self.bases)
        return is_base or any(base.descends_from(*names) for base in classes)


@dataclass(eq=False)
class Instance:
    """An object of a class of the project; `key` stays the same when its line is followed again."""

    of: Class
    key: Any
    scope: Scope = field(default_factory=Scope)


@dataclass(frozen=True)
class Site:
    """A place where an optimizer gets a model's parameters, with the model's names, innermost first."""

    names: tuple[tuple[str, Any], ...]
    statement: ast.stmt
    source: Source


@dataclass(eq=False)
class Frame:
    """A function that is being followed, or a module."""

    scope: Scope
    source: Source
    call: ast.Call | None = None
    caller: "Frame | None" = None
    function: Any = None
    loops_before: int = 0
    depth: int = 0
    statement: ast.stmt | None = None
    returned: Values = field(default_factory=list)
    yielded: list[Loop] = field(default_factory=list)
    has_ended: bool = False
    had_batches: bool = False  # whether it has iterated over a loader


Span = tuple[Source, int, int]


@dataclass
class Learnt:
    """What only later lines show; the script is followed again from its beginning until this does not change."""

    eager: set[ast.expr] = field(default_factory=set)  # totalled in the loop, because their sum is used there
    trains: dict[Any, int] = field(default_factory=dict)
    # of loops in generators: whether the loops that get their batches train
    feeds: dict[Any, int] = field(default_factory=dict)
    serial: dict[ast.expr, str] = field(default_factory=dict)  # loaders that stay torch's own, and why


@dataclass
class Findings:
    """The result: edits, gaps (places to change by hand), remarks, and losses by "sum" or "mean"."""

    edits: dict[Edit, None] = field(default_factory=dict)
    gaps: dict[tuple[Source, int], str] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    losses: dict[str, tuple[Source, ast.AST]] = field(default_factory=dict)
    sites: dict[Site, None] = field(default_factory=dict)
    # places that some ranks may reach without the others
    alone: set[tuple[Source, int]] = field(default_factory=set)
    alike: set[Span] = field(default_factory=set)  # values equal on all ranks that are used
    # names in functions whose value was equal on all ranks
    given: set[Span] = field(default_factory=set)
    over: dict[Span, str] = field(default_factory=dict)  # what loops iterate over
    beside: dict[Span, str] = field(default_factory=dict)  # whether operands are beside values of all samples
    guarded: set[Span] = field(default_factory=set)  # statements for ranks with a share alone
    mixed: set[Span] = field(default_factory=set)  # loops over batches that also iterate over others

    def edit(self, *edits: Edit | None) -> None:
        self.edits.update({edit: None for edit in edits if edit is not None})

    def gap(self, source: Source, node: ast.AST, reason: str) -> None:
        self.gaps.setdefault((source, getattr(node, "lineno", 1)), reason)

    def note(self, source: Source, node: ast.AST, text: str) -> None:
        self.notes[f"{source.path.name}:{node.lineno}: {text}"] = None  # type: ignore[attr-defined]


Record = TypeVar("Record", Learnt, Findings)


def copied(record: Record) -> Record:
    """A copy of a record, which can be changed independently."""
    return type(record)(*(copy(part) for part in vars(record).values()))


class Following:
    """The current position in a script: functions and loops."""

    # defined by subclasses, whose rules use each other
    value: Callable[[ast.AST | None], Value]
    rows_at: Callable[[ast.Subscript, Value, Value], Value]
    place_of: Callable[[ast.AST], tuple[Scope, str]]
    run: Callable[[Function, Values, Named, ast.Call | None], Value]
    statements: Callable[[Sequence[ast.stmt]], None]
    backward: Callable[[ast.Call, Value], Value]

    def __init__(self, learnt: Learnt) -> None:
        self.learnt, self.findings = learnt, Findings()
        self.frames: list[Frame] = []
        self.loops: list[Loop] = []
        self.passes: list[Loop] = []  # loops over loaders without a sampler or shuffle
        self.known: dict[ast.AST, Value] = {}  # the latest value of each expression
        self.indexed: dict[
            ast.AST, tuple[Any, ...]
        ] = {}  # rows chosen by an index, with the edits that total it
        self.reached: set[ast.AST] = set()  # functions and loaders that were followed
        self.called_by_line: set[ast.AST] = set()  # functions that a line of the project calls
        self.names_called: set[str] = set()  # of methods of unknown objects, whose arguments are totalled
        self.opened: dict[ast.AST, bool] = {}  # calls of open: whether all ranks make them equally often
        self.called: set[Any] = set()  # models that were called
        self.called_quietly: set[Any] = set()  # without gradients
        self.called_inside: set[Any] = set()  # in the forward of another model
        self.evaluated: set[Any] = set()  # models whose latest mode is eval()
        self.called_to_train: set[Any] = set()
        self.made: dict[Any, Instance] = {}  # by key
        # the layers in a model of torch, by its key, and whether it calls one after another
        self.layers: dict[Any, tuple[bool, list[Value]]] = {}
        # copies of models, and models with BatchNorm, by key: the calls that make them, from the inside outwards
        self.copies: dict[Any, list[tuple[Source, ast.Call]]] = {}
        self.normalizing: list[Any] = []  # keys of the layers with statistics of the batch
        self.carried: set[Any] = set()  # arguments of models that were equal on all ranks, by key
        # parameters that an optimizer gets beside its models
        self.parameters_alone: set[tuple[ast.expr, Source]] = set()
        self.trained_alike: dict[ast.AST, Source] = {}  # where a total outside of all batches is derived
        self.sizes: set[str] = set()  # how the script names the batch size of a loader
        self.time_first: set[str | None] = set()  # what batches' sizes depend on that have samples second
        self.full_batches: set[str | None] = set()  # what they depend on where all batches are full
        self.depth = self.uneven = self.in_forward = self.without_gradients = 0
        # how many of the tests around, which `depth` counts, are the same on all ranks by a total
        self.by_total = 0
        self.loops_made = self.backwards = self.followed = 0
        self.in_eval = self.unwraps = False
        self.held_batches: set[ast.AST] = set()  # calls of next() that took a batch outside of all loops
        self.is_latest = True  # whether no loop over batches came after the last of them
        self.latest: Loop | None = None  # the loop in which next() took a batch, if none was taken since

    @property
    def frame(self) -> Frame:
        return self.frames[-1]

    @property
    def source(self) -> Source:
        return self.frame.source

    @property
    def since(self) -> tuple[int, ...]:
        return tuple(loop.number for loop in self.loops)

    @property
    def batches(self) -> Loop | None:
        """The innermost loop over batches."""
        return next((loop for loop in reversed(self.loops) if loop.kind == "batches"), None)

    def gap(self, node: ast.AST, reason: str) -> None:
        self.findings.gap(self.source, node, reason)

    def key(self, node: ast.AST) -> Any:
        """An identity of an object: the place of its call, and of the calls that lead there."""
        calls = tuple((call.lineno, call.col_offset) for frame in self.frames if (call := frame.call))
        return str(self.source.path), node.lineno, node.col_offset, calls  # type: ignore[attr-defined]

    def keep_copy(self, node: ast.Call) -> None:
        """Note a model that may have to be replicated even if no optimizer trains it."""
        calls = [(frame.caller.source, frame.call) for frame in self.frames if frame.caller and frame.call]
        self.copies[self.key(node)] = [(self.source, node), *reversed(calls)]

    def normalizes(self, node: ast.Call) -> bool:
        """Whether a BatchNorm was made in this call, or in the calls that it led to."""
        key = self.key(node)
        inside = (*key[3], key[1:3])
        return "BatchNorm" in ast.unparse(node) or any(
            made[3][: len(inside)] == inside for made in self.normalizing
        )

    def seen_alike(self, node: ast.AST) -> None:
        """Note that an expression is equal on all ranks, if no part of it depends on a share."""
        if not any(self.known[part].is_shared for part in ast.walk(node) if part in self.known):
            self.findings.alike.add(self.source.span(node))

    def note_use(self, node: ast.AST, value: Value) -> None:
        """Note where a function gets values that all ranks have, and where some ranks may come without the others."""
        if value.kind == Kind.ALIKE and isinstance(node, ast.Name) and self.frame.call is not None:
            self.findings.given.add(self.source.span(node))
        if value.is_shared and not self.may_total():
            self.findings.alone.add((self.source, self.source.start(node)))

    def comes_together(self) -> None:
        """Note that all ranks must reach this statement: it calls or trains a model."""
        for loop in self.loops:
            loop.together.add(loop.frame.statement)

    @property
    def is_quiet(self) -> bool:
        """Whether a loop that begins here is an evaluation at run time too, where no model is left in train mode."""
        are_in_eval = self.in_eval and self.called_to_train <= self.evaluated
        return bool(self.without_gradients) or are_in_eval

    def enter(self, loop: Loop, node: ast.AST) -> None:
        self.loops_made += 1
        loop.number, loop.depth, loop.frame = self.loops_made, self.depth - self.by_total, self.frame
        loop.lends = loop.kind == "batches" and not self.is_quiet
        self.loops.append(loop)
        if loop.kind == "batches":
            self.is_latest, self.latest = False, None
        if self.findings.over.setdefault(self.source.span(node), loop.kind) != loop.kind:
            self.findings.mixed.add(self.source.span(node))
        if loop.call is not None:
            self.passes.append(loop)

    @property
    def is_outside(self) -> bool:
        """Whether a total may be taken here, outside all loops over batches or samples."""
        return self.batches is None and self.may_total()

    def may_total(self) -> bool:
        """Whether a total may be taken here: every rank reaches this line equally often."""
        even = (loop.kind == "plain" or (loop.kind == "batches" and loop.is_even) for loop in self.loops)
        return all(even) and not self.uneven and not self.in_forward

    def steps(self) -> None:
        """Note that the weights are changed here."""
        for loop in self.loops:
            loop.found_steps = True
