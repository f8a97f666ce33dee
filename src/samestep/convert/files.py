"""Edits that need no following: devices, written files, hooks, and the import of samestep."""

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from samestep.convert.follow import Follower
from samestep.convert.source import Edit, Source
from samestep.convert.values import Value

_DEVICES = ("cuda", "mps", "xpu")
_LISTED = {
    "SummaryWriter": "every process would write here ({}); make it on rank 0 only, and call it there only",
    "wandb.init": 'every process would write here ({}); pass mode="disabled" on other ranks',
    "hook": "a hook ({}) gets this process's share, and gradients of it alone; take totals of what it keeps, "
    "and change gradients after backward()",
}
_FIRST = 'write it inside `with samestep.first(per="run"):`, and only where it is missing'
_WRITES = re.compile(r"^(np|numpy)\.save|\.to_csv$")
_MODE = re.compile(r"[rbt+]*[wax][rbt+]*")
_READS = re.compile(r"^open$|read|load|exists|isfile|fromtxt")
_DRAWS = re.compile(r"\brandom\.|torch\.rand|normal\(")
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
        called += [
            item for item in methods if f"self.{getattr(item, 'name', '')}(" in body and item not in called
        ]
    if node.name == "__getitem__" and any(_DRAWS.search(ast.unparse(item)) for item in called):
        remark = "what a sample draws at random is seeded by sample, and differs from what the untouched script draws"
        followed.findings.note(source, node, remark)
    is_used = sum(item.data.count(node.name.encode()) for item in followed.modules) > 1
    if is_used and node not in followed.reached and re.search(r"\.(item|backward)\(|torch\.save", text):
        reason = f"nothing that was followed leads to {node.name}; look at it by hand"
        followed.findings.gap(source, node, reason)


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
        reason = "CUDA_VISIBLE_DEVICES gives all processes the same device; leave it out"
        followed.findings.gap(source, node, reason)
    if isinstance(node.value, str) and re.fullmatch(r"cuda:\d+", node.value):
        assigned = source.statement_of(node)
        if not (isinstance(assigned, ast.Assign) and _device_of(assigned.value)):
            followed.findings.edit(source.replaced(node, re.sub(r":\d+", "", source.text(node))))


def _written(followed: Follower, source: Source, node: ast.Call) -> None:
    """Edit or note what every process would write: a directory, a file, a log."""
    name = ast.unparse(node.func)
    for listed, reason in _LISTED.items():
        if f".{name}".endswith((f".{listed}", f"_{listed}")):
            followed.findings.gap(source, node, reason.format(name))
    if name in ("os.mkdir", "os.makedirs") and len(node.args) == 1 and not node.keywords:
        # another process may make it after this process has tested for it
        findings, end = followed.findings, source.end(node.args[0])
        findings.edit(source.replaced(node.func, "os.makedirs"), Edit(source, end, end, ", exist_ok=True"))
    if not _writes(node):
        return
    path = _path_of(node)
    if (line := _read_at(followed, followed.path_of(path))) is not None:
        reason = f"every process would write this file, which {line} reads; {_FIRST}"
        followed.findings.gap(source, node, reason)
    elif _opens(name):
        opens, closes = "()" if isinstance(path, ast.IfExp) else ("", "")
        no_file = f'{closes} if samestep.init().rank == 0 else "/dev/null"'
        before, after = source.wrapped(path, opens, no_file)
        if path not in node.args:  # path.open("w")
            before = replace(before, start=source.start(node), text="open(")
            after = replace(after, end=source.start(node.args[0]), text=f"{no_file}, ")
        followed.findings.edit(before, after)


def _writes(node: ast.Call) -> bool:
    name = ast.unparse(node.func)
    modes = [*node.args[1:2], *(mode.value for mode in node.keywords if mode.arg == "mode")]
    modes = node.args[:1] if name.endswith(".open") else modes
    chosen = (_MODE.fullmatch(str(mode.value)) for mode in modes if isinstance(mode, ast.Constant))
    return bool(node.args) and (any(chosen) if _opens(name) else bool(_WRITES.search(name)))


def _opens(name: str) -> bool:
    """Whether a call of this name opens a file; `os.popen` starts a command."""
    return name.rpartition(".")[2] == "open"


def _path_of(node: ast.Call) -> ast.expr:
    """The path in a call that opens a file, also in `path.open("w")`."""
    is_method = isinstance(node.func, ast.Attribute) and node.func.attr == "open"
    return node.func.value if is_method else node.args[0]  # type: ignore[attr-defined]


def _read_at(followed: Follower, path: str) -> str | None:
    """The line where the script reads this file, or tests for it; None if there is none."""
    for source in followed.modules:
        for node in ast.walk(source.tree):
            is_of_it = isinstance(node, ast.Call) and node.args and followed.path_of(node.args[0]) == path
            if is_of_it and _READS.search(ast.unparse(node.func)) and not _writes(node):  # type: ignore[attr-defined, arg-type]
                return f"{source.path.name}:{node.lineno}"  # type: ignore[attr-defined]
    return None


def _import(followed: Follower, source: Source, loaders: set[str], begins: bool) -> None:
    """Add `import samestep`, in the place of an import of DataLoader that is not used any more."""
    uses = sum(isinstance(node, ast.Name) and node.id in loaders for node in ast.walk(source.tree))
    uses -= sum(edit.source is source and edit.text == "samestep.loader" for edit in followed.findings.edits)
    statements = source.tree.body[ast.get_docstring(source.tree) is not None :]
    imports = [node for node in statements if isinstance(node, ast.Import | ast.ImportFrom)]
    unused = [node for node in imports if ast.unparse(node) == "from torch.utils.data import DataLoader"]
    after = [node for node in imports or statements if getattr(node, "module", "") != "__future__"]
    if unused and uses <= 0:
        followed.findings.edit(source.replaced(unused[0], "import samestep"))
    elif after:
        followed.findings.edit(source.line_before(after[0], "import samestep"))
    first = next((node for node in statements if not isinstance(node, _DEFINITIONS)), None)
    if isinstance(first, ast.If) and "__name__" in ast.unparse(first.test):
        first = first.body[0]
    if begins and first is not None:
        # init() must set the device before the script uses one
        followed.findings.edit(source.line_before(first, "samestep.init()"))


_RULES: dict[type, Callable[[Follower, Source, Any], None]] = {
    ast.Call: _written,
    ast.Constant: _numbered_device,
    ast.FunctionDef: _function,
    ast.Attribute: _without_module,
}
