"""Shows how a serial script becomes one for any number of processes, in its own lines where it knows them."""

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
_FIRST_IMPORT = re.compile(r"^(?:import|from) ")


def conversion(source: str) -> str:
    """What to change in a serial script, as a diff of its own lines; the usual one where it knows none."""
    changed = converted(source)
    if "samestep.loader" not in changed and "samestep.replicate" not in changed:
        return SEVEN_LINES
    diff = unified_diff(source.splitlines(), changed.splitlines(), n=0, lineterm="")
    return "\n".join(line for line in list(diff)[2:] if not line.startswith("@@"))


def converted(source: str) -> str:
    """The script with its lines changed; a statement over several lines is left to the reader."""
    lines = source.splitlines()
    new = list(lines)
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.lineno == node.end_lineno:
            at = node.lineno - 1
            new[at] = _call(new[at], ast.get_source_segment(source, node) or "", node)
    for line, name in _made(tree, _models(tree)).items():
        head, equals, made = new[line - 1].partition("=")
        if head.strip() == name:
            new[line - 1] = f"{head}{equals} samestep.replicate({made.strip()})"
    return "\n".join(_begun(lines, new)) + "\n"


def _call(line: str, old: str, node: ast.Call) -> str:
    """The line with this call of the serial world replaced."""
    name = ast.unparse(node.func)
    if name in ("DataLoader", "data.DataLoader", "torch.utils.data.DataLoader"):
        return line.replace(old, f"samestep.loader{old[len(name) :]}")
    if name == "torch.save" and len(node.args) >= 2:
        state, path = (ast.unparse(one) for one in node.args[:2])
        return line.replace(old, f"samestep.save({_quoted(path)}, {state})")
    return _MEAN.sub(r"samestep.sum(\1)\2", line) if name == "print" else line


def _quoted(path: str) -> str:
    return f'"{path[1:-1]}"' if path.startswith("'") and '"' not in path else path


def _models(tree: ast.AST) -> set[str]:
    """The names whose parameters() are asked for: what is trained."""
    return {
        node.func.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "parameters"
        and isinstance(node.func.value, ast.Name)
    }


def _made(tree: ast.AST, models: set[str]) -> dict[int, str]:
    """The line in which each of these models is last assigned."""
    last: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and node.lineno == node.end_lineno and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name) and target.id in models:
                last[target.id] = max(node.lineno, last.get(target.id, 0))
    return {line: name for name, line in last.items()}


def _begun(lines: list[str], new: list[str]) -> list[str]:
    """With the import and init(), on the lines that they replace or before which they fit."""
    imported = begun = False
    for at, line in enumerate(lines):
        if match := _IMPORT.match(line):
            new[at], imported = f"{match[1]}import samestep", True
        elif match := _DEVICE.match(line):
            new[at], begun = f"{match[1]}{match[2]} = samestep.init().device", True
    if not imported:
        first = next((at for at, line in enumerate(lines) if _FIRST_IMPORT.match(line)), 0)
        new[first] = f"import samestep\n{new[first]}"
    shared = next((at for at, line in enumerate(new) if "samestep.loader" in line), None)
    if not begun and shared is not None:
        indent = new[shared][: len(new[shared]) - len(new[shared].lstrip())]
        new[shared] = f"{indent}device = samestep.init().device\n{new[shared]}"
    return new
