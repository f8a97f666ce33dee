"""A file of a script: its bytes, its tree with the place of every node, and the edits to make to it."""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from samestep.errors import UsageError


@dataclass(frozen=True)
class Edit:
    """Put a text in the place of what stands from start to end in a file."""

    source: "Source"
    start: int
    end: int
    text: str


class Source:
    """Places count bytes of the text as UTF-8; what no edit touches stays as it is, line ends included."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            before = path.read_bytes()
            self.encoding, _ = tokenize.detect_encoding(io.BytesIO(before).readline)
            text = before.decode(self.encoding)
            self.tree = ast.parse(text)
        except OSError as error:
            raise UsageError(f"{path} cannot be read ({(error.strerror or '').lower()})") from error
        except (SyntaxError, ValueError, RecursionError) as error:
            raise UsageError(_unreadable(path, error)) from error
        self.data = text.encode()
        self._lines = [0, *(found.end() for found in re.finditer(rb"\r\n|\r|\n", self.data))]
        self.line_end = "\r\n" if b"\r\n" in self.data else "\n"
        if sys.version_info < (3, 12):
            inside = {
                id(part)
                for node in ast.walk(self.tree)
                if isinstance(node, ast.FormattedValue)
                for part in ast.walk(node)
            }
            for node in list(ast.walk(self.tree)):
                if isinstance(node, ast.JoinedStr) and id(node) not in inside:
                    self._place_fields(node)
        self.parents = {
            child: parent for parent in ast.walk(self.tree) for child in ast.iter_child_nodes(parent)
        }

    def start(self, node: ast.AST) -> int:
        return self._lines[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined, no-any-return]

    def end(self, node: ast.AST) -> int:
        return self._lines[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined, no-any-return]

    def text(self, node: ast.AST) -> str:
        return self.data[self.start(node) : self.end(node)].decode()

    def replaced(self, node: ast.AST, text: str) -> Edit:
        return Edit(self, self.start(node), self.end(node), text)

    def wrapped(self, node: ast.AST, before: str, after: str) -> tuple[Edit, Edit]:
        start, end = self.start(node), self.end(node)
        return Edit(self, start, start, before), Edit(self, end, end, after)

    def indent(self, node: ast.AST) -> str | None:
        """The indentation of a statement that is the first on its line."""
        indent = self.data[self._lines[node.lineno - 1] : self.start(node)].decode()  # type: ignore[attr-defined]
        return indent if not indent.strip() else None

    def line_before(self, statement: ast.stmt, line: str) -> Edit | None:
        """A line of its own before a statement, if the statement begins its line."""
        indent, start = self.indent(statement), self.start(statement)
        return None if indent is None else Edit(self, start, start, f"{line}{self.line_end}{indent}")

    def statement_of(self, node: ast.AST) -> ast.stmt:
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def edited(self, edits: Iterable[Edit], start: int = 0, end: int | None = None) -> str:
        """The text after all edits, or a part of it after those inside the part."""
        parts, at, end = [], start, len(self.data) if end is None else end
        mine = [edit for edit in edits if edit.source is self and start <= edit.start and edit.end <= end]
        for edit in sorted(mine, key=lambda edit: (edit.start, edit.end)):
            parts += [self.data[at : edit.start], edit.text.encode()]
            at = max(at, edit.end)
        return b"".join([*parts, self.data[at:end]]).decode()

    def _place_fields(self, node: ast.JoinedStr) -> None:
        """Before Python 3.12 the nodes inside an f-string do not say where they are: parse each field in its place."""
        text, start = self.text(node), self.start(node)
        opened = iter(list(_opened(text)))
        for field in _fields(node):
            wanted = ast.dump(field.value)
            found = (_parsed(text, at, wanted) for at in opened)
            parsed, at = next((pair for pair in found if pair), (None, 0))
            if parsed is not None:
                self._move(parsed, start + len(text[:at].encode()))
                field.value = parsed

    def _move(self, parsed: ast.expr, start: int) -> None:
        line = max(at for at, begin in enumerate(self._lines) if begin <= start)
        for node in (node for node in ast.walk(parsed) if hasattr(node, "lineno")):
            for end in ("", "end_"):
                number = getattr(node, f"{end}lineno")
                if number == 1:
                    column = getattr(node, f"{end}col_offset") - 1 + start - self._lines[line]
                    setattr(node, f"{end}col_offset", column)
                setattr(node, f"{end}lineno", number + line)


def _unreadable(path: Path, error: Exception) -> str:
    text, line = str(getattr(error, "text", "") or "").strip(), getattr(error, "lineno", None) or 1
    if text.startswith(("%", "!", "?")):
        return f"{path.name}:{line} is a line of IPython ({text}); remove it, then convert the file"
    if "Missing parentheses in call to" in str(error) or text.startswith(("except", "raise")):
        return f"{path.name}:{line} is Python 2 ({text}); bring it to Python 3 first"
    return f"{path.name}:{line} cannot be parsed ({getattr(error, 'msg', error)}); mend it first"


def _fields(node: ast.JoinedStr) -> Iterator[ast.FormattedValue]:
    """The fields of an f-string in the order of its text, those inside a format too."""
    for child in node.values:
        if isinstance(child, ast.FormattedValue):
            yield child
            if isinstance(child.format_spec, ast.JoinedStr):
                yield from _fields(child.format_spec)


def _opened(text: str) -> Iterator[int]:
    """Where a field may begin in a text that may join f-strings with other strings."""
    lines = [0, *(found.end() for found in re.finditer(r"\r\n|\r|\n", text))]
    for token in tokenize.generate_tokens(io.StringIO(f"({text})", newline="").readline):
        prefix = re.match(r"\w*", token.string)
        if token.type == tokenize.STRING and prefix and "f" in prefix[0].lower():
            # the parenthesis that is put before the text moves only its first line
            at = lines[token.start[0] - 1] + token.start[1] - (token.start[0] == 1)
            braces = re.finditer(r"\{\{|\{", token.string)
            yield from (at + found.end() for found in braces if found[0] == "{")


def _parsed(text: str, at: int, wanted: str) -> tuple[ast.expr, int] | None:
    """The expression that begins here, if it is the one that is looked for."""
    for end in re.finditer(r"[}:!=]", text[at:]):
        try:
            parsed = ast.parse(f"({text[at : at + end.start()]}\n)", mode="eval").body
        except SyntaxError:
            continue
        if ast.dump(parsed) == wanted:
            return parsed, at
    return None
