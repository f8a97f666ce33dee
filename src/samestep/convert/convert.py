"""Converts a serial script: a patch of its files, and a list of what it could not convert.

Covered: DataLoader, device, models and their optimizers, totals, losses that are sums, saved files, over all files of
the project. Not covered, and listed: batches that no DataLoader makes, totals inside an evaluation loop, other writers.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path

from samestep.convert.calls import Site
from samestep.convert.follow import Follower
from samestep.convert.libraries import LOADERS
from samestep.convert.source import Source
from samestep.errors import UsageError
from samestep.start.scan import JOINS, imported

SEVEN_LINES = """\
-from torch.utils.data import DataLoader
+import samestep
-device = torch.device("cuda")
-train = DataLoader(dataset, batch_size=64, shuffle=True)
-model = Net().to(device)
+device = samestep.init().device
+train = samestep.loader(dataset, batch_size=64, shuffle=True)
+model = samestep.replicate(Net().to(device))
-    print(f"epoch {epoch}: {correct / len(test.dataset):.2%}")
+    print(f"epoch {epoch}: {samestep.sum(correct) / len(test.dataset):.2%}")
-torch.save(model.state_dict(), "model.pt")
+samestep.save("model.pt", model.state_dict())"""
_BESIDE = {"transformers", "xformers"}  # used by scripts that keep their own loop
_DEVICES = ("cuda", "mps", "xpu")
_WRITERS = {
    "SummaryWriter": "make it on rank 0 only, and call it there only",
    "wandb.init": 'pass mode="disabled" on other ranks',
}


@dataclass(frozen=True)
class Gap:
    """What is not converted, and why."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}: {self.reason}"


@dataclass(frozen=True)
class Conversion:
    """The files before and after, what is left to do, and what is worth knowing."""

    files: dict[Path, tuple[bytes, bytes]]
    gaps: tuple[Gap, ...]
    notes: tuple[str, ...]

    def patch(self, context: int = 3) -> str:
        """A unified diff, as `patch -p0` takes it."""
        return "".join(_diff(path, *pair, context) for path, pair in self.files.items())


def convert(script: Path) -> Conversion:
    """What makes a serial script, and the files beside it that it imports, run on any number of processes."""
    sources: dict[Path, Source] = {}

    def read(path: Path) -> Source:
        if path not in sources:
            sources[path] = Source(path)
            _check_serial(sources[path], script)
        return sources[path]

    def find(module: str, level: int, by: Path) -> Source | None:
        base = by.parent if level else script.parent
        for _ in range(level - 1):
            base = base.parent
        place = base.joinpath(*module.split(".")) if module else base
        files = (place.with_name(f"{place.name}.py"), place / "__init__.py")
        found = next((path for path in files if path.is_file()), None)
        is_ours = (
            found is not None
            and found != script
            and re.search(rb"^\s*(?:from|import) samestep\b", found.read_bytes(), re.M)
        )
        return read(found) if found and not is_ours else None

    follower = Follower(read(script), find)
    made = _Edits(follower)
    made.replicate()
    for source in sources.values():
        made.finish(source)
    gaps = [Gap(Path(path), line, reason) for (path, line), reason in sorted(follower.gaps.items())]
    files = {
        path: (source.data.decode().encode(source.encoding), source.edited())
        for path, source in sources.items()
        if source.edits
    }
    return Conversion(files, tuple(gaps), tuple(follower.notes))


def _check_serial(source: Source, script: Path) -> None:
    names = set(imported(source.tree))
    found = {name.partition(".")[0] for name in names} & JOINS - _BESIDE
    found |= {
        name for name in names if name.startswith("torch.distributed") or name == "transformers.Trainer"
    }
    if found:
        uses = min(found, key=len)
        raise UsageError(
            f"{source.path.name} uses {uses}, so it is no serial script; "
            + (
                "it needs no conversion"
                if uses == "samestep"
                else f"run it as it is: samestep run {script.name}"
            )
        )


def conversion(script: Path) -> str:
    """The lines of a serial script to change, for `samestep verify`; those of a usual script where none is known."""
    try:
        found = convert(script)
    except UsageError as error:
        return f"{SEVEN_LINES}\n\n{error}"
    changed = any(
        b"samestep.loader" in after or b"samestep.replicate" in after for _, after in found.files.values()
    )
    lines = found.patch(0).splitlines() if changed else SEVEN_LINES.splitlines()
    shown = [line for line in lines if not line.startswith(("--- ", "+++ ", "@@"))]
    return "\n".join(
        [*shown, *[""] * bool(found.gaps), *(f"left to change by hand: {gap}" for gap in found.gaps)]
    )


class _Edits:
    """The edits that need to know all of the script."""

    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self.gaps = follower.gaps
        self.script = next(iter(follower.sources.values()))

    def gap(self, source: Source, node: ast.AST, reason: str) -> None:
        self.gaps.setdefault((str(source.path), getattr(node, "lineno", 1)), reason)

    def replicate(self) -> None:
        follower = self.follower
        losses, done = follower.losses, set()
        adds = "sum" in losses
        script = self.script
        if adds and "mean" in losses:
            self.gap(
                script, losses["sum"], "one loss is a sum over samples and another a mean; make both means"
            )
        if not follower.sites:
            reason = (
                "no optimizer gets the parameters of a torch.nn.Module, so there is no model to replicate"
            )
            self.gap(script, script.tree, reason)
        if not any(
            text.startswith("samestep.loader") for one in follower.sources.values() for *_, text in one.edits
        ):
            self.gap(
                script,
                script.tree,
                "there is no DataLoader to share, so each process would train on all samples",
            )
        for site in follower.sites:
            name, key = next(
                (one for one in reversed(site.names) if one[1] in follower.called), site.names[-1]
            )
            if key is None or key not in done:
                done.add(key)
                self._place(site, name, key, ', loss="sum"' if adds else "")

    def _place(self, site: Site, name: str, key: object, options: str) -> None:
        source, statement = site.source, site.statement
        if (made := _made_before(source, statement, name)) is not None:
            source.wrap(made, "samestep.replicate(", f"{options})")
            return
        at: ast.AST = statement
        while (at := source.parents[at]) is not source.tree and not isinstance(
            at, ast.FunctionDef | ast.ClassDef
        ):
            is_outside = isinstance(key, tuple) and not (at.lineno <= key[1] <= at.end_lineno)  # type: ignore[attr-defined]
            if isinstance(at, ast.For | ast.While) and is_outside:
                statement = at
        if not source.insert_before(statement, f"samestep.replicate({name}{options})"):
            self.gap(source, statement, f"samestep.replicate({name}{options}) belongs before this statement")

    def finish(self, source: Source) -> None:
        """Devices, writers, loaders that were not reached, and the import."""
        names, chosen = _names_of(source, LOADERS), 0
        self._unreached(source)
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Assign):
                chosen += self._device(source, node)
            elif isinstance(node, ast.Call):
                self._one_writer(source, node)
                if ast.unparse(node.func) in names and node not in self.follower.loaders:
                    self.gap(
                        source, node, "no line of the script leads to this DataLoader; change it by hand"
                    )
            elif isinstance(node, ast.Constant):
                self._numbered_device(source, node)
        if b"cuda" in source.data and not chosen and source.edits and source.path == self.script.path:
            _begin(source)
        if any("samestep." in text for *_, text in source.edits):
            _import(source, names)

    def _unreached(self, source: Source) -> None:
        """Functions that are used somewhere, but by a way that was not followed; and draws for each sample."""
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and _draws(node):
                self.follower.notes[
                    f"{source.path.name}:{node.lineno}: what a sample draws at random is seeded by sample, and differs "
                    "from what the untouched script draws"
                ] = None
            if isinstance(node, ast.FunctionDef) and node not in self.follower.reached and _shows(node):
                uses = (one.data.count(node.name.encode()) for one in self.follower.sources.values())
                if sum(uses) > 1:
                    self.gap(
                        source,
                        node,
                        f"nothing that was followed leads to {node.name}; look at it by hand",
                    )

    def _device(self, source: Source, node: ast.Assign) -> bool:
        """The device that the script chooses is the one of this process."""
        made = _device_of(node.value)
        if made is not None:
            source.replace(node.value, made)
        return made is not None

    def _numbered_device(self, source: Source, node: ast.Constant) -> None:
        """After init(), "cuda" is this process's device, and "cuda:0" that of one process."""
        if node.value == "CUDA_VISIBLE_DEVICES":
            self.gap(source, node, "CUDA_VISIBLE_DEVICES gives all processes the same device; leave it out")
        if isinstance(node.value, str) and re.fullmatch(r"cuda:\d+", node.value):
            assigned = source.statement_of(node)
            if not (isinstance(assigned, ast.Assign) and _device_of(assigned.value)):
                source.replace(node, re.sub(r":\d+", "", source.text(node)))

    def _one_writer(self, source: Source, node: ast.Call) -> None:
        name = ast.unparse(node.func)
        for writer, remedy in _WRITERS.items():
            if name == writer or name.endswith(f".{writer}"):
                self.gap(source, node, f"every process would write here ({name}); {remedy}")
        modes = [*node.args[1:2], *(one.value for one in node.keywords if one.arg == "mode")]
        writes = any(isinstance(one, ast.Constant) and set(str(one.value)) & set("wax") for one in modes)
        if name == "open" and writes and node.args:
            source.wrap(node.args[0], "(", ') if samestep.init().rank == 0 else "/dev/null"')


def _draws(node: ast.ClassDef | ast.FunctionDef) -> bool:
    """Whether this is the method that reads a sample, and draws random numbers for it."""
    return (
        node.name == "__getitem__"
        and re.search(r"\brandom\.|torch\.rand|normal\(", ast.unparse(node)) is not None
    )


def _shows(node: ast.FunctionDef) -> bool:
    calls = (one for one in ast.walk(node) if isinstance(one, ast.Call))
    return any(ast.unparse(one.func).endswith((".item", ".backward")) for one in calls)


def _device_of(value: ast.expr) -> str | None:
    """What to write for an expression that chooses an accelerator."""
    text = ast.unparse(value)
    constants = [
        one.value for one in ast.walk(value) if isinstance(one, ast.Constant) and isinstance(one.value, str)
    ]
    names_one = any(one.startswith(_DEVICES) for one in constants)
    if isinstance(value, ast.Call) and text.startswith("torch.device(") and names_one:
        return "samestep.init().device"
    if isinstance(value, ast.IfExp) and (names_one or "current_accelerator" in text):
        is_text = "torch.device(" not in text and ("current_accelerator" not in text or ".type" in text)
        return "samestep.init().device" + ".type" * is_text
    return None


def _made_before(source: Source, statement: ast.stmt, name: str) -> ast.expr | None:
    """The value that a name is given in the same block, where nothing is done with it until the statement."""
    fields = (part for _, part in ast.iter_fields(source.parents[statement]))
    block = next((part for part in fields if isinstance(part, list) and statement in part), [])
    for before in reversed(block[: block.index(statement)] if block else []):
        if isinstance(before, ast.Assign) and [ast.unparse(one) for one in before.targets] == [name]:
            return before.value if isinstance(before.targets[0], ast.Name) else None
        used = {ast.unparse(one) for one in ast.walk(before) if isinstance(one, ast.Name | ast.Attribute)}
        if name in used and not ast.unparse(before).startswith("print("):
            return None
    return None


def _names_of(source: Source, wanted: tuple[str, ...]) -> set[str]:
    """How a file calls something by its imports."""
    names = set(wanted)
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom):
            names |= {one.asname or one.name for one in node.names if f"{node.module}.{one.name}" in wanted}
            parents = {f"{node.module}.{one.name}": one.asname or one.name for one in node.names}
        elif isinstance(node, ast.Import):
            parents = {one.name: one.asname for one in node.names if one.asname}
        else:
            continue
        names |= {
            f"{parents[head]}.{last}"
            for head, _, last in (one.rpartition(".") for one in wanted)
            if head in parents
        }
    return names


def _import(source: Source, loaders: set[str]) -> None:
    """`import samestep`, in the place of the import of DataLoader where nothing else uses it."""
    left = sum(isinstance(node, ast.Name) and node.id in loaders for node in ast.walk(source.tree))
    left -= sum(text == "samestep.loader" for *_, text in source.edits)
    body = source.tree.body
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in imports if left <= 0 else []:
        if ast.unparse(node) == "from torch.utils.data import DataLoader":
            source.replace(node, "import samestep")
            return
    after = [
        node for node in imports or body if getattr(node, "module", "") != "__future__" and not _is_text(node)
    ]
    if after:
        source.insert_before(after[0], "import samestep")


def _begin(source: Source) -> None:
    """Take the device before the script does, in its first statement that is not a definition."""
    definitions = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    first = next(
        (node for node in source.tree.body if not isinstance(node, definitions) and not _is_text(node)), None
    )
    if isinstance(first, ast.If) and "__name__" in ast.unparse(first.test):
        first = first.body[0]
    if first is not None:
        source.insert_before(first, "samestep.init()")


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _diff(path: Path, before: bytes, after: bytes, context: int) -> str:
    old, new = (list(_lines(one)) for one in (before, after))
    found = unified_diff(old, new, str(path), str(path), n=context)
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in found
    )


def _lines(text: bytes) -> Iterator[str]:
    return iter(text.decode("utf-8", "surrogateescape").splitlines(keepends=True))
