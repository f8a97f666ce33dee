"""Follows what a script adds up over batches and samples, and what a loop leaves for its next turn."""

import ast
from dataclasses import replace

from samestep.convert.project import Scope
from samestep.convert.source import Edit, kept_for_the_next_turn, makes_list
from samestep.convert.totals import ALSO_ALIKE, MADE_OF_SHARE, Totals
from samestep.convert.values import (
    LENGTH,
    NUMBERS,
    ROWS,
    Kind,
    Loop,
    Named,
    Sum,
    Value,
    combined,
    join,
    models_of,
)

_LOOSE = (ast.IfExp, ast.Compare, ast.BoolOp, ast.Lambda, ast.UnaryOp)  # bind less tightly than *
_EARLIER = "is of an earlier batch"
FILLED = "is filled by this process's samples"


class Adding(Totals):
    """A sum of numbers of a share, or a list of them, has a total where the script uses it."""

    def around(self, value: Value) -> tuple[Loop | None, bool]:
        """The outermost loop over batches since a value was set, and whether a loop over samples is around."""
        outer = [loop for loop in self.loops if loop.number not in value.since]
        batches = [loop for loop in outer if loop.kind == "batches"]
        return (batches[0] if batches else None), any(loop.kind == "rows" for loop in outer)

    def is_of_turn(self, value: Value) -> bool:
        """Whether no loop over batches or samples began since a value was set."""
        return self.around(value) == (None, False)

    def added_at(self, target: ast.expr, place: tuple[Scope, str], node: ast.expr, value: Value) -> Value:
        """As `accumulated`; rows of a share choose no elements of what all processes have."""
        is_chosen = isinstance(target, ast.Subscript) and self.value(target.slice).kind in ROWS
        if is_chosen and not (place[0].find(place[1]) or Value()).is_shared and not self.in_forward:
            return Value(Kind.OTHER, FILLED)
        return self.accumulated(place, node, value)

    def accumulated(self, place: tuple[Scope, str], node: ast.expr, value: Value) -> Value:
        """The value of a place after this value is added to it, with the edits that keep its total exact."""
        old = place[0].find(place[1]) or Value()
        value = Value() if value.kind == "model" else value  # a parameter
        if isinstance(node, ast.List) and len(node.elts) == 1:  # as append
            item = node.elts[0]
            return self.extended(old, self.around(old), item, self.known[item], is_flat=False)
        if makes_list(value.origin[0] if value.origin and isinstance(node, ast.Name) else node):
            return self.extended(old, self.around(old), node, value, is_flat=True)
        batch, over_samples = self.around(old)
        if over_samples and not (self.in_forward and old.kind in ROWS):
            adds = value.kind in (Kind.ALIKE, Kind.ROW, Kind.PART, Kind.COUNT)
            value = Value(Kind.PART) if adds else Value(Kind.OTHER, "is added up by sample")
        added = value if batch is None else self.per_batch(batch, node, value)
        mixes = old.kind in NUMBERS and added.kind == Kind.ALIKE  # a share's value and an equal value
        mixes |= batch is None and not over_samples and old.is_shared and added.is_shared
        mixes &= old.kind != added.kind
        result = combined(ast.Add(), old, added) if mixes else join(old, added)
        origin = result.origin if result.is_shared else None  # it is no constant any more
        return replace(self.kept(result), since=old.since, origin=origin)

    def per_batch(self, batch: Loop, node: ast.expr, value: Value) -> Value:
        """The sum of a value over all batches of a loop."""
        if value.kind == Kind.ALIKE and self.uneven:
            return Value(Kind.OTHER, "is added up where this process's values say so")
        if value.kind == Kind.ALIKE:
            return Value(Kind.PASSES) if not batch.trains and batch.kind == "batches" else value
        if node in self.learnt.eager:
            return self.total(node)
        origin = self._origin_in(batch, node)
        is_late = value.kind == Kind.OTHER and value.edits and self.may_total()
        if (value.kind == Kind.MEAN or is_late) and origin is not node:
            self.learnt.eager.add(origin)
            return Value()
        if value.kind in (Kind.PART, Kind.COUNT) and self.guard(batch):
            # what is added for single samples can only be totalled where the sum is used
            nodes = frozenset({origin} if self.may_total() else ())
            return Value(Kind.PART, Sum(batch, nodes))
        if value.kind == Kind.MEAN and not self.uneven and self._scale(batch, node):
            return Value(Kind.PART, Sum(batch, frozenset({node})))
        if self.may_total() and value.kind != Kind.BATCH:
            return self.total(node)
        reason = value.of if isinstance(value.of, str) else None
        return Value(
            Kind.OTHER,
            reason or "is added up over batches in a way that has no total; total it where it is computed",
        )

    def by_element(self, given: Value, node: ast.expr) -> Value:
        """What `node` gets of each of the values that a function was given, to add it to a number of its own."""
        batch, kinds = self.batches, {part.kind for part in given.parts}
        if kinds <= {Kind.PART, Kind.COUNT} or not given.is_shared:
            return join(*given.parts)
        origin = self._origin_in(batch, node) if batch and self.may_total() else node
        if origin is node:
            return Value(Kind.OTHER, MADE_OF_SHARE)
        self.learnt.eager.add(origin)
        return Value()

    def _scale(self, loop: Loop, node: ast.expr) -> bool:
        """Multiply a mean by this rank's fraction of the batch; False if the loader has no name here."""
        if loop.text is None or loop.frame is not self.frame:
            return False
        is_sum = isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Mult | ast.Div)
        share = f" * {loop.text}.share"
        edits = self.source.wrapped(node, "(", f"){share}") if is_sum or isinstance(node, _LOOSE) else ()
        self.findings.edit(*(edits or self.source.wrapped(node, "", share)))
        return True

    def extended(
        self, base: Value, around: tuple[Loop | None, bool], node: ast.expr, value: Value, *, is_flat: bool
    ) -> Value:
        """A list after a value, or with `is_flat` its elements, are added to it."""
        batch, over_samples = around
        if over_samples and value.kind in (Kind.ROW, Kind.ALIKE):
            value = Value(Kind.OTHER, value.of) if value.of else Value(Kind.ROWS)
        rows = join(*value.parts) if value.kind == "list" else value
        is_late = value.is_shared and self.may_total() and not (self.batches and rows.kind in ROWS)
        is_late &= value.kind not in (NUMBERS - {Kind.MEAN} if batch else NUMBERS)
        if batch is not None and rows.kind in ROWS:
            is_whole = rows.kind in (Kind.ROWS, Kind.BATCH) and self.guard(batch)
            value = Value(Kind.ROWS, batch) if is_whole else Value(Kind.OTHER, "is a list")
        elif is_late or (value.is_shared and self.may_total() and not self.batches):
            value = self.total(node)
        elif value.is_shared and batch is not None:
            value = self.per_batch(batch, node, value)
        if not value.is_shared:
            return _with_object(base, value)
        items = join(*base.parts, self.kept(value))
        if items.kind == Kind.ROWS and (over_samples or is_flat):
            return replace(items, since=base.since)
        is_total = batch is None or (over_samples and self.guard(batch))
        length = Value(Kind.PART if is_total else Kind.OTHER, None if is_total else "is a length in a share")
        return Value("list", {None: items} | ({LENGTH: length} if over_samples else {}), since=base.since)

    def divided(self, node: ast.AugAssign, old: Value, value: Value) -> Value:
        """Follow `total /= count`, both of this rank's share: total them first."""
        result, source = combined(node.op, old, value), self.source
        is_ratio = isinstance(node.op, ast.Div) and old.kind in (Kind.PART, Kind.COUNT) and value.is_shared
        if not is_ratio or result.kind == Kind.MEAN or not self.may_total():
            return result
        at = source.data.index(b"/=", source.end(node.target))
        self.findings.edit(Edit(source, at, at + 2, f"= samestep.sum({source.text(node.target)}) /"))
        return self.total(node.value)

    def _assert(self, node: ast.Assert) -> None:
        """A count that may not be zero, say, is the whole batch's: a share may have none."""
        self.value(node.test)
        self.value(node.msg)
        match node.test:
            case ast.Compare(left=left, comparators=[ast.Constant()]) if self.may_total():
                if self.known[left].kind in (Kind.PART, Kind.COUNT):
                    self.total(left)

    def mark_earlier(self, node: ast.For | ast.While, loop: Loop) -> None:
        """Mark what the last turn of a loop over batches has left: in the next turn it is of an earlier batch."""
        if loop.kind != "batches":
            return
        kept = kept_for_the_next_turn(node)
        for names, name, value in self.frame.scope.reached_values():
            is_number = value.kind in (*NUMBERS, Kind.OTHER) and not isinstance(value.of, Sum)
            if is_number and value.origin and loop.number in value.origin[2]:
                # it must be totalled where it was made
                names[name] = Value(Kind.OTHER, _EARLIER, edits=(value.origin[0],))
            elif name in kept and value.is_shared:
                names[name] = Value(Kind.OTHER, f"{_EARLIER}, of which this process may have another part")

    def check_first_turn(self, loop: ast.For | ast.While, before: Named) -> None:
        """Note a value that all ranks have when a loop begins, and of which each has a part when it comes again."""
        for name, old in before.items() if self.batches is None else ():
            is_made = (
                old.kind == Kind.ALIKE and old.origin and isinstance(old.origin[0], ast.Call | ast.BinOp)
            )
            if is_made and self.frame.scope.names.get(name, old).kind in ROWS:
                uses = [part for part in ast.walk(loop) if isinstance(part, ast.Name) and part.id == name]
                first = min(uses, key=lambda part: (part.lineno, part.col_offset), default=None)
                if first is not None and isinstance(first.ctx, ast.Load):
                    self.gap(first, ALSO_ALIKE)


def _with_object(base: Value, value: Value) -> Value:
    """A list after a value that is equal on all ranks is added; of objects, it knows each."""
    held = base.of if base.kind == "list" else {}
    made = ast.unparse(base.origin[0]) if base.origin else ""
    is_made = base.kind == "list" or made in ("[]", "list()")
    known = [part.of.key for part in held.values() if part.kind == "instance"]
    if value.kind == "instance" and is_made and len(known) == len(held) and value.of.key not in known:
        base = replace(base, kind="list", of={**held, len(held): value})
    return replace(base, models=models_of(base, value))
