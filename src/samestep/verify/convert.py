"""Converts the lines of a serial script that it recognises to run on any number of processes."""

import ast
import re
from difflib import unified_diff

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
_MEAN = re.compile(r"\b(\w+)(\s*/\s*len\()")
_DEVICE = re.compile(r"^(\s*)(\w+)\s*=\s*torch\.device\(.*\)\s*$")
_IMPORT = re.compile(r"^(\s*)from torch\.utils\.data import DataLoader\s*$")
_PARAMETERS = re.compile(r"\b(\w+)\.parameters\(")


def conversion(source: str) -> str:
    """A diff of a serial script's own lines, or of a usual script where it recognises none of them."""
    changed = converted(source)
    if "samestep.loader" not in changed and "samestep.replicate" not in changed:
        return SEVEN_LINES
    diff = unified_diff(source.splitlines(), changed.splitlines(), n=0, lineterm="")
    return "\n".join(line for line in list(diff)[2:] if not line.startswith("@@"))


def converted(source: str) -> str:
    """The script with its lines changed; statements over several lines are left as they are."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:
        return source
    lines = source.splitlines()
    new = list(lines)
    for node in nodes:
        if isinstance(node, ast.Call) and node.lineno == node.end_lineno:
            at = node.lineno - 1
            new[at] = _call(new[at], ast.get_source_segment(source, node) or "", node)
    for name, line in _models(source, nodes).items():
        head, equals, made = new[line - 1].partition("=")
        if head.strip() == name:
            new[line - 1] = f"{head}{equals} samestep.replicate({made.strip()})"
    return "\n".join(_begun(lines, new)) + "\n"


def _call(line: str, old: str, node: ast.Call) -> str:
    """The line with this call replaced by samestep's."""
    name = ast.unparse(node.func)
    if name in ("DataLoader", "data.DataLoader", "torch.utils.data.DataLoader"):
        return line.replace(old, f"samestep.loader{old[len(name) :]}")
    if name == "torch.save" and len(node.args) >= 2:
        state, path = (ast.unparse(argument) for argument in node.args[:2])
        path = f'"{path[1:-1]}"' if path.startswith("'") and '"' not in path else path
        return line.replace(old, f"samestep.save({path}, {state})")
    return _MEAN.sub(r"samestep.sum(\1)\2", line) if name == "print" else line


def _models(source: str, nodes: list[ast.AST]) -> dict[str, int]:
    """The names whose parameters() are used, which are trained, and the line where each is last assigned."""
    trained = set(_PARAMETERS.findall(source))
    assigned = [
        (node.lineno, ast.unparse(node.targets[0]))
        for node in nodes
        if isinstance(node, ast.Assign) and node.lineno == node.end_lineno and len(node.targets) == 1
    ]
    return {name: line for line, name in sorted(assigned) if name in trained}


def _begun(lines: list[str], new: list[str]) -> list[str]:
    """With the import and init(), in place of lines that they replace or before the lines that need them."""
    imported = begun = False
    for at, line in enumerate(lines):
        if match := _IMPORT.match(line):
            new[at], imported = f"{match[1]}import samestep", True
        elif match := _DEVICE.match(line):
            new[at], begun = f"{match[1]}{match[2]} = samestep.init().device", True
    if not imported:
        first = next((at for at, line in enumerate(lines) if line.startswith(("import ", "from "))), 0)
        new[first] = f"import samestep\n{new[first]}"
    shared = next((at for at, line in enumerate(new) if "samestep.loader" in line), None)
    if not begun and shared is not None:
        indent = new[shared][: len(new[shared]) - len(new[shared].lstrip())]
        new[shared] = f"{indent}device = samestep.init().device\n{new[shared]}"
    return new
