"""Rewrites calls that samestep replaces: DataLoader, torch.save, DataParallel, progress bars, and shapes of batches."""

import ast
import re

from samestep.convert.source import Edit, Source
from samestep.convert.totals import Totals
from samestep.convert.values import Kind, Value

LOADERS = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
# what collates the samples along the second dimension
_TIME_FIRST = re.compile(r"pad_sequence\((?![^\n]*batch_first=True)|stack\([^\n]*, (dim=)?1\)")
_PADS = re.compile(r"pad_sequence\(|\.pad\(|\bmax\(")
_PADS_SHARE = (
    "its batches are padded: without --same each process pads its share to its own longest sample, and the numbers "
    "are the serial script's if the model and the loss mask the padding"
)
_OF_LOADER = ["dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn"]
_OF_LOADER += ["pin_memory", "drop_last", "timeout", "worker_init_fn", "multiprocessing_context", "generator"]


class Rewrites(Totals):
    """Edits calls; the same edit counts once, however often its line is followed."""

    def made_loader(self, node: ast.Call, is_torchs: bool) -> Value:
        source, by_name = self.source, arguments(node, _OF_LOADER)
        self.reached.add(node)
        # samples that a pass has chosen or labelled, and the weights by which they are drawn
        for name in sorted(by_name.keys() & {"dataset", "sampler", "batch_sampler"}):
            self.total(by_name[name])
        if reason := self.learnt.serial.get(node) or _unshared(node, by_name):
            text = f"this DataLoader {reason}; it stays as it is, and every process takes all of it"
            self.findings.note(source, node, text)
            return Value()
        size = by_name.get("batch_size", node)
        if isinstance(size, ast.Name | ast.Attribute | ast.Subscript):
            self.sizes.add(ast.unparse(size))
        if is_torchs:
            self.findings.edit(source.replaced(node.func, "samestep.loader"))
            for name, argument in list(zip(_OF_LOADER, node.args, strict=False))[2:]:
                self.findings.edit(Edit(source, source.start(argument), source.start(argument), f"{name}="))
        else:  # a subclass, whose collate_fn and workers are taken over
            self.findings.edit(*source.wrapped(node, "samestep.loader(", ")"))
        shuffles = getattr(by_name.get("shuffle"), "value", False)
        has_own_order = bool(shuffles) or not by_name.keys().isdisjoint({"sampler", "batch_sampler"})
        origin = None if has_own_order else (node, source, ())
        # batches of two loaders have the same sizes only if both drop the last batch
        drops = getattr(by_name.get("drop_last"), "value", False) is True
        text = ast.unparse(size) if drops else str(self.key(node))
        self.full_batches |= {text} if drops else set()
        collate = self.value(by_name.get("collate_fn"))
        if collate.kind == "instance":
            collate = collate.of.of.find("__call__") or Value()
        collated = ast.unparse(collate.of.node) if collate.kind == "function" else ""
        if _TIME_FIRST.search(collated):
            self.time_first.add(text)
        if _PADS.search(collated):
            self.findings.note(source, node, _PADS_SHARE)
        return Value("loader", origin=origin, text=text)

    def saved(self, node: ast.Call) -> Value:
        source, by_name = self.source, arguments(node, ["obj", "f"])
        self.reached.add(node)
        if "f" in by_name and self.value(by_name["f"]).kind == "file":
            self.total(by_name["obj"])
            return Value()
        is_plain = by_name.keys() == {"obj", "f"} and len(node.args) + len(node.keywords) == 2
        is_for_all = self.may_total() and not asks_for_file(self.source, node)
        if not (is_plain and is_for_all) or self.value(by_name["f"]).is_shared:
            reason = "write samestep.save(path, state) for all processes, with no other argument and no test for a file"
            self.gap(node, f"this torch.save is not converted; {reason}")
            return Value()
        state, path = by_name["obj"], source.text(by_name["f"])
        self.total(state)
        self.findings.edit(*source.kept(node, state, f"samestep.save({path}, ", ")"))
        return Value()

    def unwrapped(self, node: ast.Call, model: Value) -> Value:
        self.findings.edit(*self.source.kept(node, node.args[0]))
        self.unwraps = True
        return model

    def shown_once(self, name: str, node: ast.Call) -> None:
        """Let only rank 0 draw a progress bar."""
        is_set = any(option.arg in ("disable", None) for option in node.keywords)
        # the only argument may be a generator without parentheses of its own
        has_room = bool(node.args) and self.source.end(node.args[-1]) < self.source.end(node)
        if name in ("tqdm", "trange") and has_room and not is_set:
            self.findings.edit(self.source.with_option(node, "disable=samestep.init().rank > 0"))

    def squeezed(self, node: ast.Call, value: Value, rows: ast.expr) -> None:
        """Keep the samples' dimension, which squeeze() would drop if a process has a single sample."""
        source, around = self.source, [*self.source.around(node)]
        # the rows of what forward returns are the samples; of other tensors in it, the first dimension is not known
        is_known = not self.in_forward or isinstance(around[0], ast.Return)
        is_inner = any(isinstance(part, ast.comprehension | ast.Lambda) for part in around)
        if value.kind != Kind.ROWS or not is_known or (is_inner and not isinstance(rows, ast.Name)):
            text = "squeeze() drops the samples' dimension where a process has one sample; write squeeze(-1)"
            self.gap(node, text)
            return
        start, end = source.start(rows), source.end(rows)
        if rows not in node.args:  # there may be parentheses around it
            start, end = source.start(node), source.end(node.func) - len(".squeeze")
        name, opens, closes = "_rows", "(_rows := ", ")"
        if isinstance(rows, ast.Name):
            name, opens, closes = rows.id, "", ""
        self.findings.edit(Edit(source, source.start(node), start, opens))
        text = f"{closes}.squeeze(tuple(range(1, {name}.ndim)))"
        self.findings.edit(Edit(source, end, source.end(node), text))

    def sized(self, node: ast.Call, receiver: ast.expr | None) -> bool:
        """Replace the batch size at the beginning of a shape by the number of this rank's rows; whether it was done."""
        if self.in_forward:
            self._unsized(node)
            return False
        loop, shape = self.batches, node.args[0] if node.args else None
        shape = shape.elts[0] if isinstance(shape, ast.Tuple | ast.List) and shape.elts else shape
        if loop is None or shape is None or ast.unparse(shape) not in self.sizes:
            return False
        loop.is_full |= receiver is not None
        rows = receiver.id if isinstance(receiver, ast.Name) else loop.rows
        if not loop.is_full or rows is None or loop.frame is not self.frame:
            return False
        self.findings.edit(self.source.replaced(shape, f"len({rows})"))
        return True

    def _unsized(self, node: ast.Call) -> None:
        """Note a shape in forward that has the whole batch's size, as `self.batch_size`."""
        shape = [part for argument in node.args for part in getattr(argument, "elts", (argument,))]
        sizes = {size.rpartition(".")[2] for size in self.sizes}
        for part in shape:
            text, is_alike = ast.unparse(part), not self.known.get(part, Value()).is_shared
            if is_alike and text.rpartition(".")[2] in sizes:
                self.gap(part, f"`{text}` is the size of the whole batch; write the input's, as x.size(0)")


def arguments(node: ast.Call, names: list[str]) -> dict[str, ast.expr]:
    by_position = dict(zip(names, node.args, strict=False))
    return {**by_position, **{keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}}


def _unshared(node: ast.Call, given: dict[str, ast.expr]) -> str | None:
    """Why a loader stays torch's own, with all batches on every process; None if it can be shared."""
    is_open = any(keyword.arg is None for keyword in node.keywords)
    is_open |= any(isinstance(argument, ast.Starred) for argument in node.args)
    size = given.get("batch_size", given.get("batch_sampler"))
    if (size is None and not is_open) or (isinstance(size, ast.Constant) and size.value in (1, None)):
        return "has batches of one sample, which processes cannot share"
    return None


def asks_for_file(source: Source, node: ast.AST) -> bool:
    """Whether a test for a file is around: some ranks may test after another rank wrote the file."""
    return any(_tests_for_file(part) for part in source.around(node)) or is_kept_file(source, node)


def is_kept_file(source: Source, node: ast.AST) -> bool:
    """Whether the function returned before this line if a file, or directory, was there."""
    function = next((part for part in source.around(node) if isinstance(part, ast.FunctionDef)), None)
    before = [part for part in function.body if part.lineno < node.lineno] if function else []  # type: ignore[attr-defined]
    return any(_tests_for_file(part) and isinstance(part.body[-1], ast.Return) for part in before)  # type: ignore[attr-defined]


def _tests_for_file(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and bool(
        re.search(r"exists\(|is_?file\(|is_?dir\(", ast.unparse(node.test))
    )
