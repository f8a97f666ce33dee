"""Edits that need no following: devices, written files, hooks, and the import of samestep."""

import ast
import builtins
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from samestep.convert.follow import Follower
from samestep.convert.rewrites import arguments, is_kept_file
from samestep.convert.source import Edit, Source, values_given
from samestep.convert.values import Value

_DEVICES = ("cuda", "mps", "xpu")
_ALL_WRITE = "every process would write here ({}); make it on rank 0 only, {}"
_BY_ONE = "write it in a line of its own, under `if samestep.init().rank == 0:`"
_HOOK = (
    "a hook ({}) gets this process's share, and gradients of it alone; take totals of what it keeps, "
    "and change gradients after backward()"
)
_FIRST = 'write it inside `with samestep.first(per="run"):`, and only where it is missing'
_NO_WRITER = """\
class NoWriter:
    def __getattr__(self, name):
        return lambda *args, **options: None

"""
# what a NoWriter has no answer for, or what calls the model on one rank alone
_ASKS_WRITER = re.compile(rb"\.(get_logdir|file_writer|add_graph)\b|(?i:writer|tb|board)\.log_?dir\b")
_LOGS = ("FileHandler", "basicConfig")
_RANDOM = ("torchvision.transforms.", "albumentations.", "kornia.augmentation.")
_PACKS = "each process has sorted and padded its part of what is gathered; use `samestep run --same`"
_DRAWN_BY_SAMPLE = (
    "what a sample draws at random is seeded by sample, and differs from what the untouched script draws"
)
_KEPT = "what this function gets is not known, as another function keeps it; look at it by hand"
_SHOWS = re.compile(r"print\(|append\(|\+=|\.(log|write|item)\w*\(")
_WRITES = re.compile(r"^(np|numpy)\.save|\.to_csv$")
_MODE = re.compile(r"[rbt+]*[wax][rbt+]*")
_READS = re.compile(r"^open$|read|load|exists|isfile|fromtxt")
_DRAWS = re.compile(r"\brandom\.|torch\.rand|normal\(")
_ADDS = re.compile(r"self\.[\w.]+(\[\w+\])? \+= [^\d\n]")  # another value than a number
_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


def finish(followed: Follower, source: Source, is_script: bool) -> None:
    """Edit devices, writers and the import, and note functions and loaders that were not reached."""
    findings, devices = followed.findings, []
    imports = [node for node in ast.walk(source.tree) if isinstance(node, ast.ImportFrom)]
    imported = (alias for node in imports for alias in node.names if alias.name == "DataLoader")
    loaders = {"DataLoader", *(alias.asname or alias.name for alias in imported)}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign) and (device := _device_of(node.value)):
            devices.append(source.replaced(node.value, device))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in loaders:
            if node not in followed.reached:
                reason = "no line of the script leads to this DataLoader; change it by hand"
                findings.gap(source, node, reason)
        elif rule := _RULES.get(type(node)):
            rule(followed, source, node)
    findings.edit(*devices)
    changed = [edit.text for edit in findings.edits if edit.source is source]
    begins = b"cuda" in source.data and not devices and bool(changed) and is_script
    if begins or any("samestep." in text for text in changed):
        _import(followed, source, loaders, begins)


def _without_module(followed: Follower, source: Source, node: ast.Attribute) -> None:
    """Remove `.module` of a model if its DataParallel is removed."""
    is_model = followed.is_model(followed.known.get(node.value, Value()))
    if node.attr == "module" and followed.unwraps and is_model:
        followed.findings.edit(Edit(source, source.end(node.value), source.end(node), ""))


def _function(followed: Follower, source: Source, node: ast.FunctionDef) -> None:
    """Note functions that are used but were not followed, and random draws for each sample."""
    text, cls = ast.unparse(node), source.parents[node]
    methods, called = [*getattr(cls, "body", ())], [node]
    for caller in called:
        body = ast.unparse(caller)
        used = [item for item in methods if f"self.{getattr(item, 'name', '')}(" in body]
        called += [item for item in used if item not in called]
    lines = [line for item in called for line in ast.unparse(item).splitlines() if _DRAWS.search(line)]
    # what a sample draws by a generator of its own is always the same
    is_fixed = "Generator(" in text and all("generator=" in line for line in lines)
    if node.name == "__getitem__" and lines and not is_fixed:
        followed.findings.note(source, node, _DRAWN_BY_SAMPLE)
    if _SHOWS.search(text) and _is_kept(followed, source, node):
        followed.findings.gap(source, node, _KEPT)
    name = getattr(cls, "name", "") if node.name.startswith("__") else node.name
    is_used = sum(item.data.count(name.encode()) for item in followed.modules) > 1
    # what a data set reads of its samples is no total
    is_of_data = any(re.search("Dataset|Sampler", ast.unparse(base)) for base in getattr(cls, "bases", ()))
    calls = r"torch\.save" if is_of_data else r"\.(item|backward)\(|torch\.save"
    adds = _ADDS.search(text) and not is_of_data and node.name not in followed.names_called
    if is_used and node not in followed.reached and (adds or re.search(calls, text)):
        reason = f"nothing that was followed leads to {node.name}; look at it by hand"
        followed.findings.gap(source, node, reason)


def _is_kept(followed: Follower, source: Source, node: ast.FunctionDef) -> bool:
    """Whether the project keeps a function that no line calls, as `@trainer.on("step")` or `trainer.on(step)` does."""
    statements = (part.value for part in ast.walk(source.tree) if isinstance(part, ast.Expr))
    calls = [value for value in statements if isinstance(value, ast.Call)]
    kept_by = [call.func for call in calls if node.name in map(ast.unparse, values_given(call))]
    marks = [*node.decorator_list, *kept_by]
    roots = {part.id for mark in marks for part in ast.walk(mark) if isinstance(part, ast.Name)}
    known, is_method = followed.modules[source].names, isinstance(source.parents[node], ast.ClassDef)
    is_ours = any(
        known.get(name, Value()).kind != "external" and not hasattr(builtins, name) for name in roots
    )
    return is_ours and not is_method and node not in followed.called_by_line


def _device_of(value: ast.expr) -> str | None:
    """The replacement of an expression that chooses an accelerator; None for other expressions."""
    text = ast.unparse(value)
    strings = [part.value for part in ast.walk(value) if isinstance(part, ast.Constant)]
    names_device = any(isinstance(part, str) and part.startswith(_DEVICES) for part in strings)
    if isinstance(value, ast.Call) and text.startswith("torch.device(") and names_device:
        return "samestep.init().device"
    if isinstance(value, ast.IfExp) and (names_device or "current_accelerator" in text):
        is_text = "torch.device(" not in text and ("current_accelerator" not in text or ".type" in text)
        return "samestep.init().device" + ".type" * is_text
    return None


def _numbered_device(followed: Follower, source: Source, node: ast.Constant) -> None:
    """Remove the number of "cuda:0": after init(), "cuda" is this process's device."""
    if node.value == "CUDA_VISIBLE_DEVICES":
        reason = "CUDA_VISIBLE_DEVICES gives all processes the same device"
        statement = source.statement_of(node)
        is_set = isinstance(statement, ast.Assign) and source.parents[source.parents[node]] is statement
        if is_set and source.indent(statement) is not None and source.ends_line(statement):
            text = "pass  # each process has a device of its own"
            followed.findings.edit(source.replaced(statement, text))
            text = f"{reason}, so it is left out; set it where you start the run"
            followed.findings.note(source, node, text)
        else:
            followed.findings.gap(source, node, f"{reason}; leave it out")
    if isinstance(node.value, str) and re.fullmatch(r"cuda:\d+", node.value):
        assigned = source.statement_of(node)
        if not (isinstance(assigned, ast.Assign) and _device_of(assigned.value)):
            followed.findings.edit(source.replaced(node, re.sub(r":\d+", "", source.text(node))))


def _called(followed: Follower, source: Source, node: ast.Call) -> None:
    """Edit or note a call that writes for every process, or that draws for each sample."""
    name, callee = ast.unparse(node.func), followed.known.get(node.func, Value()).path
    for ending, rule in _BY_NAME.items():
        if f".{name}".endswith((f".{ending}", f"_{ending}")):
            rule(followed, source, node)
    is_random = callee.startswith(_RANDOM) and "Random" in callee
    if is_random and not any(_DRAWN_BY_SAMPLE in note for note in followed.findings.notes):
        followed.findings.note(source, node, _DRAWN_BY_SAMPLE)
    if (path := _path_of(node)) is not None and (writes := _writes(followed, node)):
        _written(followed, source, node, path)
    elif path is not None and writes is None:
        reason = _ALL_WRITE.format(name, "where it is opened to be written")
        followed.findings.gap(source, node, reason)


def _hook(followed: Follower, source: Source, node: ast.Call) -> None:
    receiver = getattr(node.func, "value", node.func)
    is_of_weight = followed.known.get(receiver, Value()).models and not isinstance(receiver, ast.Subscript)
    name = ast.unparse(node.func)
    is_ours = "register" not in name or followed.known.get(node.func, Value()).kind == "function"
    # a weight's hook gets the whole gradient
    if not is_ours and not (is_of_weight and name.endswith(".register_hook")):
        followed.findings.gap(source, node, _HOOK.format(name))


def _packed(followed: Follower, source: Source, node: ast.Call) -> None:
    start, end = source.start(node), source.end(node)
    if any(edit.source is source and start < edit.start < end for edit in followed.findings.edits):
        followed.findings.note(source, node, _PACKS)


def _made(followed: Follower, source: Source, node: ast.Call) -> None:
    """Let another process make a directory after this process has tested for it."""
    given, is_of_os = {option.arg for option in node.keywords}, ast.unparse(node.func).startswith("os.")
    if is_of_os and len(node.args) == 1 and not given:
        makes = source.replaced(node.func, "os.makedirs")
        followed.findings.edit(makes, source.with_option(node, "exist_ok=True"))
    elif not is_of_os and not node.args and not given & {"exist_ok", None}:
        followed.findings.edit(source.with_option(node, "exist_ok=True"))


def _written(followed: Follower, source: Source, node: ast.Call, path: ast.expr) -> None:
    """Let only rank 0 write a file; where the script reads it, the other ranks wait for that."""
    if followed.known.get(path, Value()).kind == "own":
        return
    line = _read_at(followed, _paths(followed, source, path))
    if is_kept_file(source, node):
        reason = f"every process would write this file, which is kept for later runs; {_FIRST}"
        followed.findings.gap(source, node, reason)
    elif line is not None and not (waits := _waits_after(followed, source, node)):
        reason = f"every process would write this file, which {line} reads; {_FIRST}"
        followed.findings.gap(source, node, reason)
    elif _opens(ast.unparse(node.func)):
        opens, closes = "()" if isinstance(path, ast.IfExp) else ("", "")
        no_file = f'{closes} if samestep.init().rank == 0 else "/dev/null"'
        before, after = source.wrapped(path, opens, no_file)
        if path is getattr(node.func, "value", None):  # path.open("w")
            before = replace(before, start=source.start(node), text="open(")
            after = replace(after, end=source.start(node.args[0]), text=f"{no_file}, ")
        followed.findings.edit(before, after, *(waits if line is not None else ()))


def _by_one(followed: Follower, source: Source, node: ast.Call) -> None:
    """Let only rank 0 sync a file to the disk, move or remove it: no file can be moved twice, nor /dev/null synced."""
    statement, path = source.statement_of(node), (*node.args, getattr(node.func, "value", node))[0]
    if followed.known.get(path, Value()).kind == "own" or not isinstance(statement, ast.Expr):
        return
    if source.indent(statement) is None:
        followed.findings.gap(
            source, node, f"every process would do this ({ast.unparse(node.func)}); {_BY_ONE}"
        )
        return
    start = source.start(statement)
    followed.findings.edit(Edit(source, start, start, "if samestep.init().rank == 0: "))


def _waits_after(followed: Follower, source: Source, node: ast.Call) -> tuple[Edit, ...]:
    """A line after the statement that writes a file, at which the other ranks wait; () where there can be none."""
    statement = source.statement_of(node)
    made = source.parents[node]
    is_closed = isinstance(made, ast.withitem) or (isinstance(statement, ast.Expr) and made is not statement)
    indent, is_even = source.indent(statement), followed.opened.get(node)
    if not (is_closed and is_even) or indent is None or not source.ends_line(statement):
        return ()
    end = source.end(statement)
    end += len(re.match(rb"[^\r\n]*", source.data[end:])[0])  # type: ignore[index]
    line = f"{source.line_end}{indent}samestep.sum(0)  # the other processes wait until rank 0 has written the file"
    return (Edit(source, end, end, line),)


def _without_writer(followed: Follower, source: Source, node: ast.Call) -> None:
    """Make a SummaryWriter on rank 0 only; the others get an object whose methods do nothing."""
    around = source.parents[node]
    if isinstance(around, ast.withitem) or any(_ASKS_WRITER.search(file.data) for file in followed.modules):
        reason = _ALL_WRITE.format(ast.unparse(node.func), "and call it there only")
        followed.findings.gap(source, node, reason)
        return
    opens, closes = ("", "") if isinstance(around, ast.Assign | ast.Return) else "()"
    choice = " if samestep.init().rank == 0 else NoWriter()"
    followed.findings.edit(*source.wrapped(node, opens, choice + closes))
    kinds = ast.Assign | ast.FunctionDef | ast.ClassDef | ast.If
    plain = (item for item in source.tree.body if isinstance(item, kinds))
    first = next(item for item in plain if not getattr(item, "decorator_list", ()))
    followed.findings.edit(source.line_before(first, _NO_WRITER.replace("\n", source.line_end)))


def _without_wandb(followed: Follower, source: Source, node: ast.Call) -> None:
    """Disable W&B on all ranks but 0."""
    given = [keyword.arg for keyword in node.keywords]
    if "mode" in given or None in given:
        reason = _ALL_WRITE.format("wandb.init", 'with mode="disabled" on the others')
        followed.findings.gap(source, node, reason)
        return
    mode = 'mode="disabled" if samestep.init().rank else None'
    followed.findings.edit(source.with_option(node, mode))


def _writes(followed: Follower, node: ast.Call) -> bool | None:
    """Whether a call writes a file; None where a variable decides whether it reads or writes."""
    name = ast.unparse(node.func)
    if name.endswith(_LOGS):
        return True
    if not node.args or not _opens(name):
        return bool(node.args) and bool(_WRITES.search(name))
    modes = [*node.args[1:2], *(mode.value for mode in node.keywords if mode.arg == "mode")]
    modes = node.args[:1] if name.endswith(".open") else modes
    each = [
        part
        for mode in modes
        for part in ((mode.body, mode.orelse) if isinstance(mode, ast.IfExp) else (mode,))
    ]
    texts = [getattr(part, "value", followed.known.get(part, Value()).text) for part in each]
    writes = {bool(_MODE.fullmatch(text)) for text in texts if isinstance(text, str)}
    return None if len(writes) == 2 else True in writes


def _opens(name: str) -> bool:
    """Whether a call of this name opens a file; `os.popen` starts a command."""
    return name.rpartition(".")[2] in ("open", *_LOGS)


def _path_of(node: ast.Call) -> ast.expr | None:
    """The path in a call that opens a file, also in `path.open("w")`."""
    if isinstance(node.func, ast.Attribute) and node.func.attr == "open":
        return node.func.value
    names = [keyword.value for keyword in node.keywords if keyword.arg in ("filename", "file")]
    return (*node.args, *names, None)[0]


def _paths(followed: Follower, source: Source, path: ast.expr) -> set[str]:
    """The path; where it is a parameter of a function, also what the function's calls give for it."""
    found = {followed.path_of(path)}
    function = next((node for node in source.around(path) if isinstance(node, ast.FunctionDef)), None)
    names = [each.arg for each in function.args.args] if function else []
    for node in (node for module in followed.modules for node in ast.walk(module.tree)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == getattr(function, "name", ""):
            given = arguments(node, names).get(ast.unparse(path))
            found |= {followed.path_of(given)} if given is not None else set()
    return found


def _read_at(followed: Follower, paths: set[str]) -> str | None:
    """The line where the script reads this file, or tests for it; None if there is none."""
    for source in followed.modules:
        for node in ast.walk(source.tree):
            is_of_it = isinstance(node, ast.Call) and node.args and followed.path_of(node.args[0]) in paths
            if is_of_it and _READS.search(ast.unparse(node.func)) and not _writes(followed, node):  # type: ignore[attr-defined, arg-type]
                return f"{source.path.name}:{node.lineno}"  # type: ignore[attr-defined]
    return None


def _import(followed: Follower, source: Source, loaders: set[str], begins: bool) -> None:
    """Add `import samestep`, in the place of an import of DataLoader that is not used any more."""
    uses = sum(isinstance(node, ast.Name) and node.id in loaders for node in ast.walk(source.tree))
    texts = [edit.text for edit in followed.findings.edits if edit.source is source]
    converted = texts.count("samestep.loader")
    statements = source.tree.body[ast.get_docstring(source.tree) is not None :]
    imports = [node for node in statements if isinstance(node, ast.Import | ast.ImportFrom)]
    unused = [node for node in imports if ast.unparse(node) == "from torch.utils.data import DataLoader"]
    after = [node for node in imports or statements if getattr(node, "module", "") != "__future__"]
    if unused and uses <= converted:
        followed.findings.edit(source.replaced(unused[0], "import samestep"))
    elif after:
        followed.findings.edit(source.line_before(after[0], "import samestep"))
        for node in imports if converted >= max(uses, 1) else ():
            followed.findings.edit(_without_loader(source, node))
    first = next((node for node in statements if not isinstance(node, _DEFINITIONS)), None)
    if isinstance(first, ast.If) and "__name__" in ast.unparse(first.test):
        first = first.body[0]
    if begins and first is not None:
        # init() must set the device before the script uses one
        followed.findings.edit(source.line_before(first, "samestep.init()"))


def _without_loader(source: Source, node: ast.Import | ast.ImportFrom) -> Edit | None:
    """Leave DataLoader out of an import of several names."""
    names = [alias.name for alias in node.names]
    if "DataLoader" not in names[: len(names) * isinstance(node, ast.ImportFrom)] or len(names) == 1:
        return None
    at = names.index("DataLoader")
    if at + 1 < len(names):
        return Edit(source, source.start(node.names[at]), source.start(node.names[at + 1]), "")
    return Edit(source, source.end(node.names[at - 1]), source.end(node.names[at]), "")


_BY_NAME: dict[str, Callable[[Follower, Source, ast.Call], None]] = {
    "hook": _hook,
    "pack_padded_sequence": _packed,
    "SummaryWriter": _without_writer,
    "wandb.init": _without_wandb,
    "mkdir": _made,
    "makedirs": _made,
    "unlink": _by_one,
    **dict.fromkeys(("os.fsync", "os.remove", "os.rename", "os.replace", "shutil.move", "rmtree"), _by_one),
}
_RULES: dict[type, Callable[[Follower, Source, Any], None]] = {
    ast.Call: _called,
    ast.Constant: _numbered_device,
    ast.FunctionDef: _function,
    ast.Attribute: _without_module,
}
