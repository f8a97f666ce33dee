"""A file of a project: its bytes, its syntax tree with the place of every node, and edits to it."""

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from samestep.errors import UsageError

_OTHER_QUOTES = {"'": {ord("'"): '"'}, '"': {ord('"'): "'"}}


@dataclass(frozen=True)
class Edit:
    """Replace the bytes from start to end of a file by a text."""

    source: "Source"
    start: int
    end: int
    text: str


class Source:
    """A file; places are offsets into its text as UTF-8. What no edit touches stays unchanged, line ends included."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            before = path.read_bytes()
            self.encoding, _ = tokenize.detect_encoding(io.BytesIO(before).readline)
            text = before.decode(self.encoding)
            self.tree = _without_types(ast.parse(text))
        except OSError as error:
            raise UsageError(f"{path} cannot be read ({(error.strerror or '').lower()})") from error
        except (SyntaxError, ValueError, RecursionError) as error:
            raise UsageError(_unreadable(path, error)) from error
        self.data = text.encode()
        self._lines = [0, *(line_end.end() for line_end in re.finditer(rb"\r\n|\r|\n", self.data))]
        self.line_end = "\r\n" if b"\r\n" in self.data else "\n"
        nodes = ast.walk(self.tree)
        self.parents = {child: parent for parent in nodes for child in ast.iter_child_nodes(parent)}

    def at(self, line: int) -> int:
        """Where a line begins."""
        return self._lines[line - 1]

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around a node, innermost first."""
        while (found := self.parents.get(node)) is not None:
            yield (node := found)

    def start(self, node: ast.AST) -> int:
        return self._lines[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined, no-any-return]

    def end(self, node: ast.AST) -> int:
        return self._lines[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined, no-any-return]

    def span(self, node: ast.AST) -> tuple["Source", int, int]:
        return self, self.start(node), self.end(node)

    def text(self, node: ast.AST) -> str:
        return self.data[self.start(node) : self.end(node)].decode()

    def replaced(self, node: ast.AST, text: str) -> Edit:
        return Edit(self, self.start(node), self.end(node), text)

    def wrapped(self, node: ast.AST, before: str, after: str) -> tuple[Edit, Edit]:
        start, end = self.start(node), self.end(node)
        return Edit(self, start, start, before), Edit(self, end, end, after)

    def kept(self, node: ast.AST, inner: ast.AST, before: str = "", after: str = "") -> tuple[Edit, Edit]:
        """Replace all of a node but this part of it."""
        start, end = self.start(inner), self.end(inner)
        return Edit(self, self.start(node), start, before), Edit(self, end, self.end(node), after)

    def with_option(self, node: ast.Call, option: str) -> Edit:
        """Add a keyword argument at the end of a call."""
        end, given = self.end(node) - 1, values_given(node)
        behind = self.data[max(map(self.end, given)) : end].decode() if given else ","
        return Edit(self, end, end, option if "," in re.sub(r"#.*", "", behind) else f", {option}")

    def indent(self, node: ast.AST) -> str | None:
        """The indentation of a statement; None if it is not the first on its line."""
        indent = self.data[self._lines[node.lineno - 1] : self.start(node)].decode()  # type: ignore[attr-defined]
        return indent if not indent.strip() else None

    def ends_line(self, node: ast.AST) -> bool:
        """Whether nothing but a comment follows on its line."""
        rest = self.data[self.end(node) :].partition(b"\n")[0].strip()
        return not rest or rest.startswith(b"#")

    def line_before(self, statement: ast.stmt, line: str) -> Edit:
        """Insert a line before a statement; inside a line, insert a statement with `;`."""
        indent, start = self.indent(statement), self.start(statement)
        return Edit(self, start, start, f"{line}; " if indent is None else f"{line}{self.line_end}{indent}")

    def statement_of(self, node: ast.AST) -> ast.stmt:
        return next(found for found in (node, *self.around(node)) if isinstance(found, ast.stmt))

    def line_after(self, line: int, edits: Iterable[Edit]) -> int:
        """The number of a line after all edits."""
        end = (*self._lines[line : line + 1], len(self.data) + 1)[0]
        return self.edited(edits, end=end - 1).count("\n") + 1

    def edited(self, edits: Iterable[Edit], start: int = 0, end: int | None = None) -> str:
        """The text after all edits, or the part of it from start to end."""
        parts, at, end = [], start, len(self.data) if end is None else end
        mine = [edit for edit in edits if edit.source is self and start <= edit.start and edit.end <= end]
        for edit in sorted(mine, key=lambda edit: (edit.start, edit.end)):
            parts += [self.data[at : edit.start], self._quoted(edit).encode()]
            at = max(at, edit.end)
        return b"".join([*parts, self.data[at:end]]).decode()

    @cached_property
    def _f_strings(self) -> list[tuple[int, int, str]]:
        """Where each f-string begins and ends, and its quote if that is a single character."""
        nodes = [node for node in self.parents if isinstance(node, ast.JoinedStr)]
        texts = [(self.start(node), self.end(node), self.text(node).lstrip("rRfF")) for node in nodes]
        single = [found for found in texts if found[2][:3] not in ('"""', "'''")]
        return [(start, end, text[0]) for start, end, text in single if text[:1] in _OTHER_QUOTES]

    def _quoted(self, edit: Edit) -> str:
        """An edit's text; inside an f-string, with quotes that do not end it."""
        for start, end, quote in self._f_strings if "'" in edit.text or '"' in edit.text else ():
            if start < edit.start and edit.end < end:
                return edit.text.translate(_OTHER_QUOTES[quote])
        return edit.text


def _without_types(tree: ast.Module) -> ast.Module:
    """The tree with `name: type = value` as a plain assignment; in a class, where that is a field, it stays."""
    for node in ast.walk(tree):
        for body in vars(node).values() if not isinstance(node, ast.ClassDef) else ():
            for index, item in enumerate(body) if isinstance(body, list) else ():
                if isinstance(item, ast.AnnAssign) and item.value is not None:
                    body[index] = ast.copy_location(ast.Assign([item.target], item.value), item)
    return tree


def _unreadable(path: Path, error: Exception) -> str:
    text, line = str(getattr(error, "text", "") or "").strip(), getattr(error, "lineno", None) or 1
    if text.startswith(("%", "!", "?")):
        return f"{path.name}:{line} is a line of IPython ({text}); remove it, then convert the file"
    if "Missing parentheses in call to" in str(error) or text.startswith(("except", "raise")):
        return f"{path.name}:{line} is Python 2 ({text}); bring it to Python 3 first"
    return f"{path.name}:{line} cannot be parsed ({getattr(error, 'msg', error)}); mend it first"


def is_option(target: ast.expr) -> bool:
    """Whether a BatchNorm uses a target in its next call, or an optimizer in its next step, as `group["lr"]`."""
    if isinstance(target, ast.Attribute):
        return target.attr == "momentum"
    key = target.slice if isinstance(target, ast.Subscript) else None
    return isinstance(key, ast.Constant) and key.value in ("lr", "momentum", "weight_decay")


def begins_from(old: ast.expr, target: ast.expr) -> bool:
    """Whether a sum begins with its target's value, or with `held.get(key, 0)` for the target `held[key]`."""
    match old, target:
        case ast.Call(func=ast.Attribute(value=held, attr="get"), args=[key, _]), ast.Subscript():
            return ast.dump(held) == ast.dump(target.value) and ast.dump(key) == ast.dump(target.slice)
    return ast.unparse(old) == ast.unparse(target)


def elements_added(node: ast.expr, target: ast.expr) -> tuple[ast.expr, ast.expr, ast.expr] | None:
    """Of `target = [a + float(b) for a, b in zip(target, values)]`: `values`, `b` and `float(b)`."""
    match node:
        case ast.ListComp(
            elt=ast.BinOp(left=ast.Name(id=old), op=ast.Add(), right=added),
            generators=[
                ast.comprehension(
                    target=ast.Tuple(elts=[ast.Name(id=first), each]),
                    iter=ast.Call(func=ast.Name(id="zip"), args=[held, values]),
                    ifs=[],
                )
            ],
        ) if old == first and ast.unparse(held) == ast.unparse(target):
            return values, each, added
    return None


def is_only_given(function: ast.AST | None, node: ast.expr) -> bool:
    """Whether this is a parameter that its function never sets, so that it is the same in each turn of a loop."""
    name = getattr(node, "id", None)
    nodes = ast.walk(function or node)
    parts = [part for part in nodes if name in (getattr(part, "arg", 0), getattr(part, "id", 0))]
    is_given = name is not None and any(isinstance(part, ast.arg) for part in parts)
    return is_given and not any(isinstance(getattr(part, "ctx", None), ast.Store) for part in parts)


def updates(node: ast.For) -> bool:
    """Whether a loop over parameters changes them by their gradients."""
    names = {part.id for part in ast.walk(node.target) if isinstance(part, ast.Name)}
    names = {name for name in names if f"{name}.grad" in ast.unparse(node)}
    changed: list[ast.expr] = []
    for part in ast.walk(node):
        match part:
            case ast.AugAssign(target=target):
                changed.append(target)
            case ast.Assign(targets=targets):
                changed += targets
            case ast.Call(func=ast.Attribute(value=value, attr=name)) if name.endswith("_"):
                changed.append(value)
            case ast.Call(args=given) if ".grad" in " ".join(map(ast.unparse, given)):
                changed += given
    texts = [text for text in map(ast.unparse, changed) if ".grad" not in text]
    return any(re.split(r"[.\[]", text)[0] in names for text in texts)


def kept_for_the_next_turn(loop: ast.For | ast.While) -> set[str]:
    """The names that a loop sets to what it iterates and reads, as `last` in `f(last); last = x, y`."""
    if not isinstance(loop, ast.For):
        return set()
    own = {part.id for part in ast.walk(loop.target) if isinstance(part, ast.Name)}
    kept: set[str] = set()
    read: set[str] = set()
    for part in ast.walk(loop):
        match part:
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.Name() | ast.Tuple() | ast.List() as value
            ):
                if {each.id for each in ast.walk(value) if isinstance(each, ast.Name)} <= own:
                    kept.add(name)
            case ast.Name(id=name, ctx=ast.Load()):
                read.add(name)
    return (kept & read) - own


def takes_apart(around: ast.AST, name: str) -> bool:
    """Whether a function unpacks this name, or takes a part of it by a constant: then it is a tuple or dict."""
    for node in ast.walk(around):
        match node:
            case ast.Assign(targets=[ast.Tuple() | ast.List()], value=value) if ast.unparse(value) == name:
                return True
            case ast.Subscript(value=value, slice=ast.Constant()) if ast.unparse(value) == name:
                return True
    return False


def is_unpacked(argument: ast.AST) -> bool:
    """Whether an argument of a call is `*args` or `**options`."""
    return isinstance(argument, ast.Starred) or getattr(argument, "arg", "") is None


def values_given(node: ast.Call) -> list[ast.expr]:
    """The arguments of a call, by position and by name."""
    return [*node.args, *(option.value for option in node.keywords)]


def name_of(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def is_flattened(node: ast.Call) -> bool:
    """Whether a method such as `view(-1)` or `reshape(-1, size)` lays the samples' rows end to end."""
    first = ast.unparse(node.args[0]) if node.args else "0"
    return (name_of(node), first) in {("view", "-1"), ("reshape", "-1"), ("flatten", "0")}


def makes_column(node: ast.AST) -> bool:
    """Whether a part of an expression makes a column of a vector, as `ids[:, None]` or `ids.unsqueeze(1)`."""
    ends = ("[:, None]", ".unsqueeze(1)", ".unsqueeze(-1)", ".view(-1, 1)", ".reshape(-1, 1)")
    return any(ast.unparse(part).endswith(ends) for part in ast.walk(node) if isinstance(part, ast.expr))


def parts_of(node: ast.AST) -> Iterator[ast.AST]:
    """The direct subexpressions; for a method call also the object."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Attribute) and isinstance(node, ast.Call) and child is node.func:
            yield child.value
        elif isinstance(child, ast.expr):
            yield child
        elif isinstance(child, ast.keyword):
            yield child.value


def makes_list(node: ast.expr) -> bool:
    """Whether an expression makes a list, so that adding it extends one."""
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return isinstance(node, ast.ListComp) or called == "list" or called.endswith(".tolist")


def shown_in(node: ast.expr) -> list[ast.expr]:
    """The expressions that a text shows: an f-string, `"%d" % (a, b)` or `"{}".format(a)`."""
    match node:
        case ast.JoinedStr():
            return [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
        case ast.BinOp(left=ast.Constant(value=str()), op=ast.Mod(), right=right):
            return right.elts if isinstance(right, ast.Tuple) else []
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str()), attr="format")):
            return values_given(node)
    return []
