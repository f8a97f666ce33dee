"""Converts a serial script: a patch of its files, and a list of what it could not convert.

Covered: DataLoader, device, models and their optimizers, totals, losses that are sums, saved files, over all files of
the project. Not covered, and listed: batches that no DataLoader makes, totals inside an evaluation loop, other writers.
"""

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from typing import Any

from samestep.convert.files import finish
from samestep.convert.follow import Follower, follow
from samestep.convert.moves import leave_on_host
from samestep.convert.project import Findings, Site
from samestep.convert.source import Edit, Source
from samestep.convert.totals import MADE_OF_SHARE, TOTALS
from samestep.convert.values import Value, key_of
from samestep.errors import UsageError
from samestep.start.scan import JOINS, imported

_OF_COPY = (
    "this copy of a model is not replicated; if it has BatchNorm and is called in train mode, its statistics are those "
    "of each process's share: then write samestep.replicate(...) around the copy"
)
_TWO_LOSSES = "one loss is a sum over samples and another a mean; make both means"
_NO_MODEL = "no optimizer gets the parameters of a torch.nn.Module, so there is no model to replicate"
_NO_LOADER = "there is no DataLoader to share, so each process would train on all samples"
_ALONE = (
    "{0} is in no model, so nothing exchanges its gradient; after backward() write "
    "`{0}.grad = samestep.mean({0}.grad)`, or samestep.sum(...) for a sum over samples; see docs/losses.md"
)
_ALONE_AFTER = (
    "{0} is in no model, and its loss is of what a pass collected, of which each process has a part; compute the loss "
    "from samestep.gather(...) of that"
)
_GATHERED = "call it with samestep.gather(...) of these values"
_BESIDE = {"transformers", "xformers"}  # also used by scripts with a loop of their own


@dataclass(frozen=True)
class Conversion:
    """The files before and after, the gaps to change by hand, and remarks."""

    files: dict[Path, tuple[bytes, bytes]]
    gaps: tuple[str, ...]
    notes: tuple[str, ...]

    def patch(self, context: int = 3) -> str:
        """A unified diff for `patch -p0`."""
        lines = list[str]()
        for path, pair in self.files.items():
            old, new = (text.decode("utf-8", "surrogateescape").splitlines(keepends=True) for text in pair)
            lines += unified_diff(old, new, str(path), str(path), n=context)
        missing = "\n\\ No newline at end of file\n"
        return "".join(line if line.endswith("\n") else line + missing for line in lines)


def convert(script: Path, is_written: bool = False, is_module: bool = False) -> Conversion:
    """Convert a serial script and the files of its project that it imports to run on any number of processes."""
    sources: dict[Path, Source] = {}

    def read(path: Path) -> Source:
        if path not in sources:
            sources[path] = Source(path)
            _check_serial(sources[path], script)
        return sources[path]

    def find(module: str, level: int, by: Path) -> Source | None:
        # nothing is above the first part of a path that is written without its folders
        for base in by.parents[level - 1 : level] if level else roots:
            place = base.joinpath(*module.split("."))
            files = [place.with_suffix(".py")] if module else []
            for path in (*files, place / "__init__.py"):
                if path.is_file():
                    is_ours = re.search(rb"^\s*(?:from|import) samestep\b", path.read_bytes(), re.M)
                    return None if is_ours or path == script else read(path)
        return None

    # in a package, the folder that holds it may be on Python's path too
    package = (folder for folder in script.parents if not (folder / "__init__.py").is_file())
    roots = [Path()] if is_module else [script.parent, next(package, script.parent)]
    followed = follow(read(script), find)
    _replicate(followed, sources[script])
    _check_alone(followed)
    findings = followed.findings
    leave_on_host(findings, sources.values())
    for source in sources.values():
        _leave_alone(findings, source)
        finish(followed, source, is_script=source.path == script)
    gaps = [(source.path, line, reason) for (source, line), reason in findings.gaps.items()]
    # a value that is made of what another line could not total comes last
    gaps.sort(key=lambda gap: (gap[2].endswith(MADE_OF_SHARE), *gap))
    files = {}
    for path, source in sources.items():
        before, after = (source.edited(edits).encode(source.encoding) for edits in ((), findings.edits))
        if any(edit.source is source for edit in findings.edits):
            check_parses(path, after)
            files[path] = (before, after)
    texts = [f"{path.name}:{line}: {reason}" for path, line, reason in gaps], findings.notes
    edits = findings.edits if is_written else ()
    return Conversion(files, *(_after(edits, part, sources) for part in texts))


def _after(edits: Iterable[Edit], texts: Iterable[str], sources: dict[Path, Source]) -> tuple[str, ...]:
    """The texts with the numbers that lines have after these edits."""
    named = {path.name: source for path, source in sources.items()}
    places = re.compile(rf"\b({'|'.join(map(re.escape, named))}):(\d+)")

    def placed(at: re.Match[str]) -> str:
        return f"{at[1]}:{named[at[1]].line_after(int(at[2]), edits)}"

    return tuple(places.sub(placed, text) for text in texts)


def check_parses(path: Path, after: bytes) -> None:
    """Raise UsageError if the edited file is no valid Python: edits of a line may conflict."""
    try:
        ast.parse(after)
    except SyntaxError as error:
        line = after.splitlines()[(error.lineno or 1) - 1].decode(errors="replace").strip()
        raise UsageError(
            f"{path.name} could not be converted: its edits gave `{line}`, which is no Python; write that line more "
            "simply, as in two statements, and convert the file again"
        ) from error


def _check_serial(source: Source, script: Path) -> None:
    names = set(imported(source.tree))
    others = {name.partition(".")[0] for name in names} & JOINS - _BESIDE
    others |= {name for name in names if re.match(r"torch\.distributed|transformers\.Trainer$", name)}
    if others:
        uses = min(others, key=len)
        remedy = f"run it as it is (samestep run {script.name}), or change it as docs/migration.md shows"
        remedy = "it needs no conversion" if uses == "samestep" else remedy
        raise UsageError(f"{source.path.name} uses {uses}, so it is not a serial script; {remedy}")


def conversion(script: Path) -> str:
    """The changed lines and the gaps of a conversion, for a report of `samestep verify`."""
    try:
        converted = convert(script)
    except UsageError as error:
        return str(error)
    lines = [line for line in converted.patch(0).splitlines() if not line.startswith(("--- ", "+++ ", "@@"))]
    gaps = [f"left to change by hand: {gap}" for gap in converted.gaps]
    return "\n".join([*lines, *[""] * bool(lines and gaps), *gaps])


def _leave_alone(findings: Findings, source: Source) -> None:
    """Take back the totals in a function of collected values that has a gap: half of them would not fit the rest."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        start, end = source.start(node), source.end(node)
        edits = [edit for edit in findings.edits if edit.source is source and start <= edit.start <= end]
        gaps = [place for place in findings.gaps if place[0] is source and start <= source.at(place[1]) < end]
        over = {kind for (file, at, _), kind in findings.over.items() if file is source and start <= at < end}
        if gaps and edits and "batches" not in over and all(TOTALS.fullmatch(edit.text) for edit in edits):
            first = min(gaps, key=lambda place: place[1])
            findings.gaps[first] += f"; {node.name} stays as it is: {_GATHERED}"
            for unused in edits:
                del findings.edits[unused]
            for follows in {*gaps} - {first}:
                del findings.gaps[follows]


def _replicate(followed: Follower, script: Source) -> None:
    findings, adds = followed.findings, "sum" in followed.findings.losses
    if not followed.backwards:
        followed.called |= followed.called_quietly
    if adds and "mean" in findings.losses:
        findings.gap(*findings.losses["sum"], _TWO_LOSSES)
    if not findings.sites:
        findings.gap(script, script.tree, _NO_MODEL)
    if not any(edit.text.startswith("samestep.loader") for edit in findings.edits):
        findings.gap(script, script.tree, _NO_LOADER)
    done = set()
    for site in findings.sites:
        calls = [pair for pair in reversed(site.names) if pair[1] in followed.called]
        parts = [] if calls else _called_parts(followed, *site.names[-1])
        if not calls and not parts and site.names[-1][1] not in {*followed.called_inside, None}:
            reason = (
                f"no line calls {site.names[-1][0]}(...), and replicate exchanges the gradients of such calls"
            )
            findings.gap(site.source, site.statement, f"{reason} alone; move what uses it into its forward")
        for name, key in calls[:1] or parts or site.names[-1:]:
            if key is None or key not in done:
                done.add(key)
                _place(followed, site, name, key, ', loss="sum"' if adds else "")
    if any(b"BatchNorm" in source.data for source in followed.modules):
        _replicate_copies(followed, done)


def _check_alone(followed: Follower) -> None:
    """Note a tensor that is trained and in no model: nothing exchanges its gradient."""
    findings = followed.findings
    for made, source in followed.parameters_alone:
        reasons: dict[ast.AST, str] = {}
        for node in ast.walk(source.tree):
            if isinstance(node, ast.For | ast.While) and findings.over.get(source.span(node)) == "batches":
                reasons[node] = _ALONE
        reasons |= {node: _ALONE_AFTER for node, file in followed.trained_alike.items() if file is source}
        for node, reason in reasons.items():
            used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            for name in map(ast.unparse, getattr(source.parents[made], "targets", ())):
                if name in used:
                    findings.gap(source, made, reason.format(name))


def _replicate_copies(followed: Follower, done: set[object]) -> None:
    """Replicate copies of models that are called in train mode: BatchNorm takes its statistics as in the model."""
    for key, calls in followed.copies.items():
        if key in followed.called_to_train and key not in done:
            source, node = calls[0]
            for (
                caller,
                call,
            ) in calls:  # of a function that makes several models, the outermost call makes this one
                value = followed.known.get(call, Value())
                if followed.is_model(value) and key_of(value) == key:
                    source, node = caller, call
            if any(isinstance(around, ast.For | ast.While) for around in source.around(node)):
                followed.findings.note(source, node, _OF_COPY)
            else:
                followed.findings.edit(*source.wrapped(node, "samestep.replicate(", ")"))


def _called_parts(followed: Follower, name: str, key: object) -> list[tuple[str, object]]:
    """The parts of a model that the script calls instead of the model itself."""
    if (model := followed.made.get(key)) is None:
        return []
    parts = [(part, value) for part, value in model.scope.names.items() if followed.is_model(value)]
    called = [(f"{name}.{part}", value) for part, value in parts if key_of(value) in followed.called]
    # not a ModuleList is called, but the layers in it
    lists = [part for part, value in called if value.origin and "ModuleList(" in ast.unparse(value.origin[0])]
    return [("*" * (part in lists) + part, key_of(value)) for part, value in called]


def _place(followed: Follower, site: Site, name: str, key: object, options: str) -> None:
    source, statement = site.source, site.statement
    model = _in_comprehension(statement, name) or _made_before(source, statement, name)
    if model is not None:
        followed.findings.edit(*source.wrapped(model, "samestep.replicate(", f"{options})"))
        return
    outer: ast.AST = statement
    while not isinstance(outer := source.parents[outer], ast.Module | ast.FunctionDef | ast.ClassDef):
        # replicate before a loop or a branch if the model was made before it
        is_block = isinstance(outer, ast.For | ast.While | ast.If) and isinstance(key, tuple)
        targets = map(ast.unparse, ast.walk(getattr(outer, "target", ast.Constant(0))))
        if is_block and name not in targets and not _makes(outer, key):
            statement = outer  # type: ignore[assignment]
    call = f"samestep.replicate({name}{options})"
    if name.startswith("*"):
        call = f"for layer in {name[1:]}: samestep.replicate(layer{options})"
    functions = (node for node in source.around(statement) if isinstance(node, ast.FunctionDef))
    names = [node for node in ast.walk(next(functions, source.tree)) if isinstance(node, ast.Name)]
    is_local = any(node.id == name and isinstance(node.ctx, ast.Store) for node in names)
    followed.findings.edit(source.line_before(statement, f"{name} = {call}" if is_local else call))


def _makes(block: Any, key: Any) -> bool:
    """Whether a model is made in a block of statements, or in a function that is called there."""
    _, line, _, calls = key
    return any(block.lineno <= at <= block.end_lineno for at in (line, *(call[0] for call in calls)))


def _in_comprehension(statement: ast.stmt, name: str) -> ast.expr | None:
    """The model in `model.parameters() for model in models`: its name exists only there."""
    for part in ast.walk(statement):
        if name in [ast.unparse(node.target) for node in getattr(part, "generators", ())]:
            receivers = (node.value for node in ast.walk(part) if isinstance(node, ast.Attribute))
            return next((node for node in receivers if ast.unparse(node) == name), None)
    return None


def _made_before(source: Source, statement: ast.stmt, name: str) -> ast.expr | None:
    """The value assigned to a name in the same block, if until the statement it is not used."""
    fields = (part for _, part in ast.iter_fields(source.parents[statement]))
    block = next((part for part in fields if isinstance(part, list) and statement in part), [statement])
    for earlier in reversed(block[: block.index(statement)]):
        if isinstance(earlier, ast.Assign) and [ast.unparse(node) for node in earlier.targets] == [name]:
            return earlier.value if isinstance(earlier.targets[0], ast.Name) else None
        used = {ast.unparse(node) for node in ast.walk(earlier) if isinstance(node, ast.Name | ast.Attribute)}
        if name in used and not ast.unparse(earlier).startswith("print("):
            return None
    return None
