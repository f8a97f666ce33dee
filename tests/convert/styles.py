"""Other styles of writing the same script: each is a function of a syntax tree that changes no value."""

import ast
from collections.abc import Callable

IMPORTS = (ast.Import, ast.ImportFrom)
DEFINITIONS = (*IMPORTS, ast.FunctionDef, ast.ClassDef)


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def _lines_of(tree: ast.Module) -> list[ast.stmt]:
    """The script's lines without its imports and definitions, and without the test for __main__."""
    lines = [line for node in tree.body for line in (node.body if _is_main(node) else [node])]
    return [line for line in lines if not isinstance(line, DEFINITIONS)]


def _with_lines(tree: ast.Module, text: str, lines: list[ast.stmt]) -> ast.Module:
    """The imports and definitions, and behind them a block that holds these lines."""
    block = ast.parse(text).body
    block[0].body = lines
    return ast.Module([*(node for node in tree.body if isinstance(node, DEFINITIONS)), *block], [])


class _Changed(ast.NodeTransformer):
    """Changes each node of a type, from the inside out."""

    def __init__(self, kind: type, change: Callable) -> None:
        self._kind, self._change = kind, change

    def visit(self, node):
        node = self.generic_visit(node)
        return self._change(node) if isinstance(node, self._kind) else node


def _each(kind: type, change: Callable) -> Callable:
    return lambda tree: _Changed(kind, change).visit(tree)


def in_main(tree):
    """Everything but the imports in a function, with functions and classes inside of it."""
    main = ast.parse("def main():\n    pass\nmain()").body
    lines = [line for node in tree.body for line in (node.body if _is_main(node) else [node])]
    main[0].body = [line for line in lines if not isinstance(line, IMPORTS)]
    tree = ast.Module([*(line for line in lines if isinstance(line, IMPORTS)), *main], [])
    return _each(ast.Global, lambda node: ast.Nonlocal(node.names))(tree)


def under_if_main(tree):
    return _with_lines(tree, "if __name__ == '__main__':\n    pass", _lines_of(tree))


def in_try(tree):
    return _with_lines(
        tree, "try:\n    pass\nexcept KeyboardInterrupt:\n    print('stopped')", _lines_of(tree)
    )


def renamed_imports(tree):
    names = {}
    for alias in (alias for node in ast.walk(tree) if isinstance(node, IMPORTS) for alias in node.names):
        if alias.asname or "." not in alias.name:
            old = alias.asname or alias.name
            names[old] = alias.asname = f"{old}_"
    return _each(ast.Name, lambda node: ast.Name(names.get(node.id, node.id), node.ctx))(tree)


def _typed(node):
    is_plain = len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)
    return ast.AnnAssign(node.targets[0], ast.Name("object"), node.value, 1) if is_plain else node


def _long(node):
    """`a = a + b` for `a += b`."""
    old = ast.parse(ast.unparse(node.target)).body[0].value
    return ast.Assign([node.target], ast.BinOp(old, node.op, node.value), lineno=0)


def _by_format(node):
    """`'{:.4f}'.format(x)` for an f-string; a field's own format is an f-string too, and stays."""
    text, fields = "", []
    for part in node.values:
        if isinstance(part, ast.Constant):
            text += part.value.replace("{", "{{").replace("}", "}}")
            continue
        fields.append(part.value)
        text += "{%s}" % ("" if part.format_spec is None else f":{ast.unparse(part.format_spec)[2:-1]}")
    return ast.Call(ast.Attribute(ast.Constant(text), "format"), fields, []) if fields else node


def by_own_function(tree):
    """Lines that are printed by a function of the script."""
    log = ast.parse("def log_line(*items, **options):\n    print(*items, **options)").body
    tree = _each(ast.Name, lambda node: ast.Name("log_line") if node.id == "print" else node)(tree)
    last = max(index for index, node in enumerate(tree.body) if isinstance(node, IMPORTS))
    return ast.Module([*tree.body[: last + 1], *log, *tree.body[last + 1 :]], [])


def _unpacked(node):
    """`for batch in loader: x, y = batch` for `for x, y in loader:`, also under enumerate."""
    target, name = node.target, ast.Name("batch_", ast.Store())
    if isinstance(target, ast.Tuple) and isinstance(node.iter, ast.Name | ast.Attribute):
        node.target = name
    elif "enumerate(" in ast.unparse(node.iter)[:10] and isinstance(target.elts[-1], ast.Tuple):
        target.elts[-1], target = name, target.elts[-1]
    else:
        return node
    node.body.insert(0, ast.Assign([target], ast.Name("batch_"), lineno=0))
    return node


def _by_float(node):
    is_item = isinstance(node.func, ast.Attribute) and node.func.attr == "item"
    return ast.Call(ast.Name("float"), [node.func.value], []) if is_item else node


def _by_len(node):
    is_size = isinstance(node.func, ast.Attribute) and node.func.attr == "size"
    is_first = is_size and [*map(ast.unparse, node.args)] == ["0"]
    return ast.Call(ast.Name("len"), [node.func.value], []) if is_first else node


def _guarded(node):
    node.body = [ast.If(ast.Constant(True), node.body, [])]
    return node


STYLES = {
    "in main": in_main,
    "under if main": under_if_main,
    "in try": in_try,
    "renamed imports": renamed_imports,
    "types": _each(ast.Assign, _typed),
    "a = a + b": _each(ast.AugAssign, _long),
    "format": _each(ast.JoinedStr, _by_format),
    "own function": by_own_function,
    "unpacked in a line": _each(ast.For, _unpacked),
    "float": _each(ast.Call, _by_float),
    "len": _each(ast.Call, _by_len),
    "if True": _each(ast.For, _guarded),
}


def in_style(text: str, style: str) -> str:
    return ast.unparse(ast.fix_missing_locations(STYLES[style](ast.parse(text))))
