"""Finds the value of an element: of a list, a dict or a batch, or of some samples of a tensor."""

import ast
from dataclasses import replace

from samestep.convert.decisions import Decisions
from samestep.convert.signatures import NUMBERED, counted
from samestep.convert.values import NUMBERS, ROWS, TURNED, Kind, Sum, Value, join, other

_CUT = (
    "each process cuts this to a number of its own samples, with --same too; a mean over what is left is another than "
    "the serial script's, so mask it, or cut to a size of the whole batch, as x.size(1)"
)


class Elements(Decisions):
    """What an index or a key takes from a value."""

    def _subscript(self, node: ast.Subscript) -> Value:
        base, index = self.value(node.value), self.value(node.slice)
        if (known := self._set_before(node)) is not None:
            return known
        if base.kind == "instance" and (method := base.of.of.find("__getitem__")):
            element = self.run(replace(method.of, bound=base), [base, index], {}, None)
            return element if element.is_shared else base.bare
        key = node.slice.value if isinstance(node.slice, ast.Constant) else None
        if base.kind in ("list", "dict"):
            if isinstance(base.of.get(None, Value()).of, Sum):
                return Value(Kind.OTHER, "is of single batches")
            if isinstance(node.slice, ast.Slice) and node.slice.lower is not None:
                return join(*(part for key, part in base.of.items() if key != 0))
            return base if isinstance(node.slice, ast.Slice) else self.part_of(base, key)
        if base.kind == Kind.ROWS and key == "loss":
            return self.loss_of_model(node)
        is_tensor = isinstance(node.slice, ast.Tuple)
        if base.kind in (Kind.ROWS, Kind.SOME, Kind.VIEWS) or (base.kind == Kind.BATCH and is_tensor):
            self._note_cut(node)
            return self.rows_at(node, base, index)
        if index.is_shared and (chosen := self._chosen(node, base, index)) is not None:
            return chosen
        if base.kind in (Kind.BATCH, *TURNED):
            is_row = not isinstance(node.slice, ast.Slice) or base.kind == Kind.BATCH
            return Value(Kind.ROWS if is_row else base.kind)
        # the index may need a total of its own
        return other(base.of, base) if base.kind == Kind.OTHER and index.is_shared else base.bare

    def _chosen(self, node: ast.Subscript, base: Value, index: Value) -> Value | None:
        """What the samples' numbers choose from what has an element for each class; None for another value."""
        # a parameter, and not a layer of a list
        is_parameter = base.kind == "model" and any(part.kind in ROWS for part in index.opened)
        if base.kind == Kind.ALIKE or is_parameter:
            return self._chosen_by(node.slice, index)
        if base.kind not in NUMBERS or index.kind not in ROWS or not isinstance(node.ctx, ast.Load):
            return None
        if not self.may_total():
            return other("is chosen from numbers of a share")
        self.total(node.value)
        return Value(Kind.ROWS)

    def _chosen_by(self, node: ast.expr, index: Value) -> Value:
        """What an index that depends on a share chooses from a value that is equal on all ranks."""
        if index.of == NUMBERED:
            return other(NUMBERED)
        if isinstance(node, ast.Tuple) and not any(isinstance(part, ast.Slice) for part in node.elts):
            index = join(*index.parts)  # as in steps[before, after]
        if isinstance(index.origin and index.origin[0], ast.Compare):
            edits = index.edits or self.edits_of(node, index)
            return replace(other("is chosen by a mask of a share"), edits=edits)
        if index.kind not in (*ROWS, Kind.ROW):
            return other("is chosen by a number of a share", index)
        return Value(Kind.ROW if index.kind == Kind.ROW else Kind.ROWS)

    def rows_at(self, node: ast.Subscript, base: Value, index: Value) -> Value:
        first = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) and node.slice.elts else node.slice
        is_all = isinstance(first, ast.Slice) and first.lower is first.upper is None
        if isinstance(first, ast.Constant):
            is_all = first.value in (None, Ellipsis) or isinstance(first.value, str)
            if first.value is None and base.kind == Kind.ROWS and not self.in_forward:
                return Value(Kind.COLUMNS)
        if isinstance(first, ast.Slice) and base.kind == Kind.VIEWS:
            bounds = [self.value(at).kind for at in (first.lower, first.upper) if at]
            if bounds and {*bounds} <= {Kind.COUNT, Kind.PART}:
                is_first = bounds == [Kind.COUNT] and first.lower is None
                return Value(Kind.ROWS if is_first else Kind.VIEWS)
        is_cut = isinstance(first, ast.Slice) and (first is not node.slice or _is_without_ends(first))
        if is_cut and self._has_time_first():
            is_all = not index.is_shared  # tgt[:-1, :] and out[1:] cut time
        along = Value() if is_all else self.value(first)
        if along.kind == Kind.OTHER and along.of == NUMBERED and first is not node.slice:
            return Value(Kind.ROWS)  # an element of each row, as in x[np.arange(len(x)), y]
        if along.kind in (Kind.ROW, Kind.OTHER):
            return along.bare if along.kind == Kind.ROW else self._at_places(node, along)
        if is_all or self.in_forward:
            return Value(Kind.ROWS if base.kind == Kind.BATCH else base.kind)
        if index.is_shared:
            # an index along the rows chooses some of them; another one chooses within each row
            return Value(Kind.SOME if first is node.slice or along.kind in ROWS else Kind.ROWS)
        return Value(Kind.OTHER, "is of some samples of a share")

    def _note_cut(self, node: ast.Subscript) -> None:
        """Note a dimension that forward cuts to a number of its share, as in `h[:, :lengths.max()]`."""
        cuts = [part for part in getattr(node.slice, "elts", ()) if isinstance(part, ast.Slice)]
        bounds = [bound for cut in cuts for bound in (cut.lower, cut.upper) if bound]
        if self.in_forward and any(self.value(bound).kind == Kind.OTHER for bound in bounds):
            self.findings.note(self.source, node, _CUT)

    def _at_places(self, node: ast.Subscript, places: Value) -> Value:
        if self.may_total():
            self.indexed[node] = places.edits or ()
        return other(places.of, places)

    def shape(self, rows: Value) -> Value:
        count, is_second = counted(rows, self.batches), rows.kind in TURNED
        is_either = self._has_time_first()
        return Value("list", {**dict.fromkeys([int(is_second), 1][: 1 + is_either], count), None: Value()})

    def _has_time_first(self) -> bool:
        return self.batches is not None and not self.batches.sizes.isdisjoint(self.time_first)


def _is_without_ends(cut: ast.Slice) -> bool:
    """Whether it leaves out the first element or the last one, as `[1:]` and `[:-1]`."""
    lower, upper = (bound and ast.unparse(bound) for bound in (cut.lower, cut.upper))
    return lower in (None, "1") and upper in (None, "-1") and lower is not upper
