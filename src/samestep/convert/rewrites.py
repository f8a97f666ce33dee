"""Rewrites the calls that samestep's functions replace: loaders, saved files, DataParallel, progress bars."""

import ast

from samestep.convert.totals import Totals
from samestep.convert.values import Value, Values

_OF_LOADER = [
    "dataset",
    "batch_size",
    "shuffle",
    "sampler",
    "batch_sampler",
    "num_workers",
    "collate_fn",
    "pin_memory",
]
_OF_LOADER += ["drop_last", "timeout", "worker_init_fn", "multiprocessing_context", "generator"]


class Rewrites(Totals):
    """Each is edited once, however often its line is followed."""

    def made_loader(self, node: ast.Call) -> Value:
        given: dict[str, ast.expr] = dict(zip(_OF_LOADER, node.args, strict=False))
        given |= {one.arg: one.value for one in node.keywords if one.arg}
        is_open = any(one.arg is None for one in node.keywords) or any(
            isinstance(one, ast.Starred) for one in node.args
        )
        values = [self.value(one) for one in given.values()]
        self.loaders.setdefault(node, self.frame.source)
        if reason := self._unshared(given, is_open, values):
            if not self.silent:
                self.notes[f"{self.frame.source.path.name}:{node.lineno}: {reason}"] = None
            return Value()
        if isinstance(size := given.get("batch_size"), ast.Name | ast.Attribute | ast.Subscript):
            self.sizes.add(ast.unparse(size))
        if not self.silent:
            source = self.frame.source
            source.replace(node.func, "samestep.loader")
            for name, argument in list(zip(_OF_LOADER, node.args, strict=False))[2:]:
                source.edit(source.start(argument), source.start(argument), f"{name}=")
        return Value("loader")

    def _unshared(self, given: dict[str, ast.expr], is_open: bool, values: Values) -> str | None:
        """Why a loader stays torch's own, of which every process takes all batches."""
        size = given.get("batch_size")
        if (size is None and not is_open) or (isinstance(size, ast.Constant) and size.value in (1, None)):
            why = "has batches of one sample, which processes cannot share"
        elif any(_is_given(given.get(name)) for name in ("batch_sampler", "generator")):
            why = "makes its batches by a batch_sampler or generator of its own, which samestep.loader does not take"
        elif values and values[0].kind == "instance" and values[0].of.of.descends_from("IterableDataset"):
            why = "reads a stream (IterableDataset), which has no order to share"
        else:
            return None
        return f"this DataLoader {why}; it stays as it is, and every process takes all of it"

    def saved(self, node: ast.Call) -> Value:
        given: dict[str, ast.expr] = dict(zip(("obj", "f"), node.args, strict=False))
        given |= {one.arg: one.value for one in node.keywords if one.arg}
        self.saves.setdefault(node, self.frame.source)
        if given.keys() != {"obj", "f"} or len(node.args) + len(node.keywords) != 2:
            self.gap(
                node,
                "torch.save has other arguments than a state and a path; write samestep.save(path, state)",
            )
            return Value()
        state, path = given["obj"], given["f"]
        if self.value(path).kind == "file" or self.value(path).is_shared:
            self.gap(
                node,
                "torch.save writes to an open file, or to a name of a share's value; give samestep.save a path",
            )
            return Value()
        if not self.may_total():
            self.gap(node, "torch.save is where only some ranks may come; save after the loop")
            return Value()
        self.total(state)
        if not self.silent:
            source = self.frame.source
            source.edit(
                source.start(node), source.start(state), f"samestep.save({_quoted(source.text(path))}, "
            )
            source.edit(source.end(state), source.end(node) - 1, "")
        return Value()

    def unwrapped(self, node: ast.Call, arguments: Values) -> Value:
        name = ast.unparse(node.func)
        if not name.endswith("DataParallel") or name.endswith("DistributedDataParallel") or not node.args:
            self.gap(node, f"{name} splits the work in another way; leave it out")
        elif not self.silent:
            source = self.frame.source
            source.edit(source.start(node), source.start(node.args[0]), "")
            source.edit(source.end(node.args[0]), source.end(node), "")
            self.unwraps = True
        return arguments[0] if arguments else Value()

    def _of_model(self, base: Value, attribute: str, node: ast.Attribute) -> Value:
        self._without_module(attribute, node)
        return base if attribute == "module" and self.unwraps else super()._of_model(base, attribute, node)

    def _of_instance(self, base: Value, attribute: str, node: ast.Attribute) -> Value:
        has_one = attribute in base.of.scope.names or not self.is_model(base)
        if attribute == "module" and self.unwraps and not has_one:
            self._without_module(attribute, node)
            return base
        return super()._of_instance(base, attribute, node)

    def _without_module(self, attribute: str, node: ast.Attribute) -> None:
        if attribute == "module" and self.unwraps and not self.silent:
            source = self.frame.source
            source.edit(source.end(node.value), source.end(node), "")

    def shown_once(self, name: str, node: ast.Call) -> None:
        """A progress bar is drawn by rank 0."""
        has = any(one.arg in ("disable", None) for one in node.keywords)
        if name in ("tqdm", "trange") and node.args and not has and not self.silent:
            source = self.frame.source
            last = max([*node.args, *(one.value for one in node.keywords)], key=source.end)
            if not (isinstance(last, ast.GeneratorExp) and source.end(last) == source.end(node)):
                source.edit(source.end(last), source.end(last), ", disable=samestep.init().rank > 0")


def _is_given(node: ast.expr | None) -> bool:
    return node is not None and not (isinstance(node, ast.Constant) and node.value is None)


def _quoted(text: str) -> str:
    """A plain string in double quotes, as the state's comes first no more."""
    return (
        f'"{text[1:-1]}"'
        if text[:1] == "'" and '"' not in text and "\\" not in text and text.count("'") == 2
        else text
    )
