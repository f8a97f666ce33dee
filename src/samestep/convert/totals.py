"""Turns values of a share into values of the whole batch where a script prints, tests or adds them up."""

import ast
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from samestep.convert.project import Following, Frame, Scope
from samestep.convert.signatures import (
    CHOSEN,
    DIVIDES,
    IN_MODEL,
    NAMED,
    NUMBERED,
    STACKS,
    keeps_rows,
    makes_rows,
)
from samestep.convert.source import Edit, Source, is_flattened, name_of, parts_of, shown_in
from samestep.convert.values import (
    NUMBERS,
    ROWS,
    TURNED,
    Kind,
    Loop,
    Sum,
    Value,
    Values,
    join,
)

MEANS_OF_LISTS = ("numpy.mean", "statistics.mean", "statistics.fmean", "numpy.average")
_SUMMED = {*NUMBERS, Kind.PASSES}
_OURS = ("model", "instance", "function")  # kinds of callees in the project
# inside these nodes an expression needs no parentheses
_APART = (ast.stmt, ast.Call, ast.keyword, ast.FormattedValue, ast.Dict, ast.DictComp)
TOTAL = "is a total"
MADE_OF_SHARE = "is made of this process's share of the batch"
TOTALS = re.compile(r"(max\()?samestep\.(sum|mean|gather)\(\[?|\]?\)+")  # the texts of edits that only total
Edits = tuple[Edit | ast.expr, ...]
ALSO_ALIKE = (
    "this line is reached with numbers of a share, and with numbers that all processes have, which a total would "
    "count once for each process; take the total before the call"
)
_ALSO_ALONE = (
    "this line runs in training, where its total is needed, and in an evaluation, where processes may have "
    "different numbers of batches; take the total in the loop that trains"
)
_OF_WHOLE_BATCH = (
    "is made for a whole batch; make it in the loop, for as many samples as the input has: x.size(0)"
)
_AT_A_STEP = (
    "this evaluation is totalled at a training step; where its batch has fewer samples than there are processes, "
    "a process's part is missed: evaluate between the epochs, or train with drop_last=True"
)


class Totals(Following):
    """A value has the edits that total it: they wrap the smallest expressions that can be combined over ranks."""

    text_of: Callable[[Value], Value]
    is_lost: Callable[..., bool]

    def total(self, node: ast.expr) -> Value:
        """Edit this expression so that it has the same value on all ranks, or note a gap."""
        value, text = self.text_of(self.value(node)), f"`{ast.unparse(node)}`"
        if not value.is_shared:
            self.seen_alike(node)
            return value
        if value.edits is None and (texts := shown_in(node)):
            for text_part in texts:  # one without a total leaves the others theirs
                if self.text_of(self.value(text_part)).is_shared:
                    self.total(text_part)
        elif value.edits is None:
            reason = value.of if isinstance(value.of, str) else MADE_OF_SHARE
            part, source = self.cause(node, reason, self.source)
            self.findings.gap(source, part, f"`{ast.unparse(part)}` {reason}")
        elif self.may_total() and not self._is_mixed(node, value.edits):
            self.apply(value.edits)
            names = [part for part in ast.walk(node) if isinstance(part, ast.Name)]
            totals = [name for name in names if self.known.get(name, value).of == TOTAL]
            self.findings.alike.update(map(self.source.span, totals))
        elif self.may_total():
            self.gap(
                node,
                f"{text} may be of another batch than the latest; write samestep.mean(value, weight=len(batch))",
            )
        elif self.uneven or self.in_forward or (batch := self.batches) is None:
            why = IN_MODEL if self.in_forward else "no total can be taken where only some processes may come"
            self.gap(node, f"{text} is of this process's share, and {why}")
        else:
            shown = self._origin_in(batch, node)
            text = text if shown is node else f"`{ast.unparse(shown.func)}` shows what"  # type: ignore[attr-defined]
            reason = (
                f"{text} is of this process's share, and no total can be taken in an evaluation: processes may have "
                "different numbers of batches there"
            )
            self.findings.gap(batch.frame.source, shown, reason)
        return Value(of=TOTAL, models=value.models)

    def _is_mixed(self, node: ast.AST, edits: Edits) -> bool:
        """Whether a mean may be over another batch than the latest, of which a process may have an unlike part."""
        are_means = any(isinstance(edit, Edit) and edit.text.startswith("samestep.mean(") for edit in edits)
        is_other = self.batches is not None and len(self.batches.taken) > 1
        return are_means and (is_other or (not self.is_latest and self._is_of_held(node)))

    def _is_of_held(self, node: ast.AST) -> bool:
        """Whether an expression is computed from a batch that next() took outside of all loops."""
        reached = [node]
        for expression in reached:
            values = (self.known.get(part) for part in ast.walk(expression))
            made = [value.origin[0] for value in values if value is not None and value.origin]
            reached += [part for part in made if part not in reached]
        return not self.held_batches.isdisjoint(reached)

    def cause(
        self, node: ast.AST, reason: str, source: Source, seen: tuple[ast.AST, ...] = ()
    ) -> tuple[ast.AST, Source]:
        """The part of an expression that has no total; for a name, the expression that made its value."""
        parts = [(part, source) for part in parts_of(node) if part in self.known]
        inner: list[Any] = [pair for pair in parts if self.known[pair[0]].of == reason]
        inner = [pair for pair in inner if self.known[pair[0]].edits is None]
        known = self.known.get(node, Value())
        if isinstance(node, ast.Name | ast.Subscript) and known.of == reason and known.origin:
            inner.append(known.origin[:2])
        part, place = (*inner, (node, source))[0]
        return self.cause(part, reason, place, (*seen, node)) if part not in (node, *seen) else (node, source)

    def together(self, nodes: Sequence[ast.expr], values: Values) -> Values:
        """The values of operands: next to an operand that all ranks have, such as the targets of a whole data set, the
        rows of a finished pass are totalled."""
        pairs = list(zip(nodes, values, strict=False))
        is_over = self.batches is None and not self.in_forward
        is_over &= any(part.kind == Kind.ALIKE and not isinstance(node, ast.Constant) for node, part in pairs)
        kind = "all" if is_over else "share"
        if self.batches is not None and any(value.kind in ROWS for value in values):
            self._check_sizes(values)
        for index, (node, value) in enumerate(pairs):
            if value.kind not in ROWS:
                continue
            values = [*values[:index], self.total(node) if is_over else value, *values[index + 1 :]]
            if self.findings.beside.setdefault(self.source.span(node), kind) != kind:
                self.gap(node, ALSO_ALIKE)
        return values

    def _check_sizes(self, values: Values) -> None:
        """Note an operand that was made before the loop, with as many rows as a whole batch has."""
        for made, source, _ in (
            value.origin for value in values if value.kind == Kind.ALIKE and value.origin
        ):
            calls = [part for part in ast.walk(made) if isinstance(part, ast.Call) and part.args]
            calls = [part for part in calls if makes_rows(ast.unparse(part.func).rpartition(".")[2])]
            shapes = [getattr(part.args[0], "elts", part.args)[:1] for part in calls]
            if any(ast.unparse(shape) in self.sizes for first in shapes for shape in first):
                self.findings.gap(source, made, f"`{ast.unparse(made)}` {_OF_WHOLE_BATCH}")

    def beside_rows(self, nodes: Sequence[ast.expr], values: Values) -> Values:
        """The values of operands: next to rows, a number of the batch is totalled, as in `x + noise * x.std()`."""
        kinds = {value.kind for value in values}
        # it may have, or has, a number for each row
        operands = list(zip(nodes, values, strict=True))
        is_chosen = any(
            value.of == CHOSEN or keeps_rows(value.of) or self._is_taken(node, value)
            for node, value in operands
        )
        is_number_beside = Kind.ROWS in kinds and kinds - {Kind.ROWS} in (
            {Kind.OTHER},
            {Kind.MEAN},
            {Kind.PART},
        )
        if not is_number_beside or is_chosen or self.in_forward or not self.may_total():
            return values
        if any(
            value.kind == Kind.MEAN and self._is_mixed(node, value.edits or ()) for node, value in operands
        ):
            return values
        return [value if value.kind == Kind.ROWS else self.total(node) for node, value in operands]

    def _is_taken(self, node: ast.expr, value: Value) -> bool:
        """Whether a value has an element for each row, as `centers[y]`."""
        made = value.origin[0] if value.origin and isinstance(node, ast.Name) else node
        return isinstance(made, ast.Subscript) and self.known.get(made.slice, Value()).kind in ROWS

    def check_totals(self) -> None:
        """Note a gap for each total that some ranks may not reach, or that may get values that all ranks have."""
        findings, kinds = self.findings, dict[tuple[Source, int], str]()
        for node, edits in self.indexed.items():
            # another use of the index made it one of the whole batch, and a share has no such rows
            if edits and findings.edits.keys() >= {*edits}:
                self.apply(self.known[node].edits or ())
        ends = {(edit.source, edit.start) for edit in findings.edits if edit.text.startswith(")")}
        starts = {(file, start) for file, start, end in findings.given if (file, end) in ends}
        for edit in findings.edits:
            source, kind = edit.source, edit.text.partition("(")[0]
            adds = kind in ("samestep.sum", "samestep.gather")
            is_total = adds or kind == "samestep.mean"
            spans = findings.alike if adds else findings.mixed if ".share" in edit.text else set()
            spans = spans | findings.guarded if is_total else spans
            is_alike = any(file is source and start <= edit.start < end for file, start, end in spans)
            is_alike |= adds and (source, edit.start) in starts
            is_alike |= is_total and kinds.setdefault((source, edit.start), kind) != kind
            is_alone = is_total and (source, edit.start) in findings.alone
            if is_alike or is_alone:
                line = source.data.count(b"\n", 0, edit.start) + 1
                findings.gaps.setdefault((source, line), _ALSO_ALONE if is_alone else ALSO_ALIKE)

    def apply(self, edits: Edits) -> None:
        self.findings.edit(*(edit for edit in edits if isinstance(edit, Edit)))
        self.learnt.eager.update(edit for edit in edits if not isinstance(edit, Edit))

    def kept(self, value: Value) -> Value:
        """A value that gets a name: if it can be combined, that is done where the name is used."""
        combines = value.kind in _SUMMED or value.kind in ROWS - TURNED - {Kind.VIEWS}
        combines |= value.kind == "list" and [part.of for part in value.parts] == [NUMBERED]
        return replace(value, edits=None) if combines or not self.may_total() else value

    def named(self, node: ast.expr, value: Value, kinds: Collection[str]) -> Value:
        """A value that gets a name; outside of all batches, a number is totalled first."""
        needs_total = self.is_outside and value.edits is not None and value.kind in kinds
        return self.total(node) if needs_total else self.kept(value)

    def edits_of(self, node: ast.AST, value: Value) -> Edits | None:
        """The edits that total an expression whose parts are known; None if there are none."""
        match node:
            case ast.Name():
                return self._wrapped(node, value)
            case ast.Attribute() | ast.Subscript():
                if value.kind == Kind.OTHER and value.origin and isinstance(node, ast.Attribute):
                    return self.by_form(node, *value.origin[:2])
                is_called = getattr(self.source.parents.get(node), "func", None) is node
                # the fields of an object, such as of a distribution, are gathered, and not the object
                is_field = isinstance(node, ast.Attribute) and value.kind == Kind.ROWS and not is_called
                is_wrappable = is_field or value.kind in _SUMMED or not self.known[node.value].is_shared
                # a method that is not called here
                is_method = isinstance(node, ast.Attribute) and node.attr in NAMED["list"]
                is_wrappable = is_wrappable and value.kind != Kind.OTHER and not is_method
                return self._wrapped(node, value) if is_wrappable else self._inside(node)
            case ast.Call():
                return self._edits_of_call(node, value)
            case ast.Lambda():
                return None
            case ast.GeneratorExp() if not isinstance(self.source.parents[node], ast.Call):
                return None
        iterated = [self.known[part.iter] for part in getattr(node, "generators", ()) if not part.ifs]
        is_even = len(iterated) == len(getattr(node, "generators", ()))
        return self._inside(node) if is_even and not any(self.splits(over) for over in iterated) else None

    def by_form(self, node: ast.Attribute, form: ast.expr, source: Source) -> Edits | None:
        """The edits for a property: its expression `form`, computed from totals of other attributes."""
        instance = self.known[node.value]
        # a running average is computed from itself
        if instance.kind != "instance" or any(frame.function is form for frame in self.frames):
            return None
        self.frames.append(Frame(Scope(instance.of.of.scope, {"self": instance}), source, function=form))
        edits = self.value(form).edits
        self.frames.pop()
        names = [part for part in ast.walk(form) if isinstance(part, ast.Name)]
        if edits is None or any(self.known[name].kind not in ("external", "instance") for name in names):
            return None
        if nodes := tuple(edit for edit in edits if not isinstance(edit, Edit)):
            return nodes
        receiver = self.source.text(node.value)
        inner_edits = [edit for edit in edits if isinstance(edit, Edit)]
        inner_edits += [source.replaced(name, receiver) for name in names if name.id == "self"]
        text = source.edited(inner_edits, source.start(form), source.end(form))
        is_apart = isinstance(self.source.parents.get(node), _APART)
        return (self.source.replaced(node, text if is_apart else f"({text})"),)

    def splits(self, over: Value) -> bool:
        """Whether the number of turns of a loop over this value depends on the rank's samples or batches."""
        is_split = over.kind in (Kind.ROWS, Kind.ROW, Kind.SOME, Kind.COUNT, "loader")
        return is_split or (over.kind == "each" and over.of.kind != "plain")

    def _inside(self, node: ast.AST, is_over_tokens: bool = False) -> Edits | None:
        """The edits of the parts of an expression. Of a loss over tokens, flattened parts are gathered flat: ranks may
        have padded their shares to different lengths."""
        all_edits: list[Edit | ast.expr] = []
        for part in (part for part in parts_of(node) if part in self.known and self.known[part].is_shared):
            edits = self.known[part].edits
            if edits and is_over_tokens and isinstance(part, ast.Call) and is_flattened(part):
                edits = self._wrapped(part, Value(Kind.ROWS))
            if edits is None:
                return None
            all_edits += edits
        return tuple(all_edits) or None

    def _edits_of_call(self, node: ast.Call, value: Value) -> Edits | None:
        callee = self.known.get(node.func, Value())
        # what ranks draw differs, and a metric would count what it is given once for each rank
        is_own = callee.of in ("torch.autograd.grad", "torch.randperm") or callee.kind == "metric"
        if is_own or value.of == STACKS:
            return None
        if callee.of in MEANS_OF_LISTS and self.known[node.args[0]].kind == "list":
            is_part = join(*self.known[node.args[0]].parts).kind == Kind.PART
            batches, is_name = node.args[0], isinstance(node.args[0], ast.Name | ast.Attribute)
            return self._mean_of_batches(node, batches) if is_part and is_name else None
        names = (part.id for part in ast.walk(node) if isinstance(part, ast.Name))
        used = filter(None, map(self.frame.scope.find, names))
        is_late = any(part.edits for part in used if part.kind != Kind.VIEWS)
        is_sum = value.kind in _SUMMED and not is_late and name_of(node) != "tolist"
        # a list of tensors or arrays is gathered after it has been joined
        is_joined = callee.path.startswith(("torch.", "numpy.")) and value.kind == Kind.ROWS
        is_joined = is_joined and bool(node.args) and self.known[node.args[0]].kind == "list"
        # a distribution cannot be gathered, and what it gives can
        is_given = name_of(node) in NAMED["of_spread"] or callee.path.endswith("kl_divergence")
        is_given |= callee.kind in _OURS
        if is_sum or is_joined or (is_given and value.kind in ROWS):
            return self._wrapped(node, value)
        is_over_tokens = value.of == DIVIDES
        if callee.kind in _OURS and not is_over_tokens:
            return None
        return self._inside(node, is_over_tokens)

    def _mean_of_batches(self, node: ast.Call, batches: ast.expr) -> Edits:
        """The edits for a mean over a list with a number for each batch, of which a rank may have fewer, or none."""
        source, text = self.source, self.source.text(batches)
        part = f" * (len({text}) / max(samestep.gather([len({text})]))))"
        return (*source.wrapped(node, "samestep.sum(", part), *source.wrapped(batches, "", " or [0.0]"))

    def _wrapped(self, node: ast.expr, value: Value) -> Edits | None:
        """The edits around an expression whose kind can be combined; None for other kinds."""
        loop = value.of if isinstance(value.of, Loop) else None
        is_finished = loop is not None and loop not in self.loops
        is_finished &= value.kind != Kind.MEAN or loop is not self.latest
        share = f"{loop.text}.share" if loop and loop.text and loop.frame is self.frame else ""
        is_filled = value.kind == "list" and None in value.of
        kind = Kind.ROWS if is_filled and join(*value.parts).kind == Kind.ROWS else value.kind
        if kind == "dict" and {part.kind for part in value.parts} <= {Kind.PART, Kind.COUNT}:
            kind = Kind.PART
        before, after = "samestep.sum(", ")"
        if kind == Kind.ROWS:
            before = "samestep.gather("
        elif kind == Kind.PASSES:
            before, after = "max(samestep.gather([", "]))"
        elif kind not in NUMBERS:
            return None
        elif loop and is_finished:
            if not (share and loop.trains):
                return None
            after = f" * {share})" if kind == Kind.MEAN else f" * bool({share}))"
        elif kind == Kind.MEAN:
            before = "samestep.mean("
        added = value.of.loop if isinstance(value.of, Sum) else None
        if added is not None and not added.trains and added not in self.loops and self.batches is not None:
            self.findings.note(self.source, node, _AT_A_STEP)
        added_nodes = value.of.nodes if added is not None and added.trains and added in self.loops else ()
        return (*self.source.wrapped(node, before, after), *added_nodes)

    def guard(self, loop: Loop) -> bool:
        """Let only ranks with a share of a batch add it to a sum: in training, the other ranks borrow a batch."""
        statement, source = loop.frame.statement, loop.frame.source
        if not (loop.trains or loop.lends) or statement is None:
            return not (loop.trains or loop.lends)
        is_sum = isinstance(statement, ast.Assign) and isinstance(statement.value, ast.BinOp)
        is_sum |= isinstance(statement, ast.AugAssign | ast.Expr)
        is_alone = not source.data[source.end(statement) :].lstrip(b" ").startswith(b";")
        is_alone &= source.indent(statement) is not None and statement not in loop.together
        if loop.text is None or not (is_sum and is_alone):
            return False
        start = source.start(statement)
        self.findings.edit(Edit(source, start, start, f"if {loop.text}.share: "))
        self.findings.guarded.add((source, start, source.end(statement)))
        return True

    def _origin_in(self, batch: Loop, node: ast.expr) -> ast.expr:
        """The expression itself, or the call inside the loop whose function contains it."""
        frame, given = self.frame, node
        while frame is not batch.frame and frame.call is not None and frame.caller is not None:
            given, frame = frame.call, frame.caller
        return given

    def passed(self, node: ast.expr) -> Value:
        """The value of an argument of a function of the project, with the edits that total it."""
        value = self.value(node)
        around = self.source.parents.get(node)
        around = self.source.parents.get(around) if isinstance(around, ast.keyword) else around
        if around in self.learnt.eager and self.may_total():
            return self.total(node)
        return value.bare if value.kind in ROWS else value
