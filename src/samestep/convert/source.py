"""One file of a script: its bytes, its tree with the place of every node, and the edits to make to it."""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from samestep.errors import UsageError


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
        ends = [found.end() for found in re.finditer(rb"\r\n|\r|\n", self.data)]
        self._lines = [0, *ends]
        self.line_end = "\r\n" if b"\r\n" in self.data else "\n"
        self.edits: dict[tuple[int, int, str], int] = {}
        self.parents = {
            child: parent for parent in ast.walk(self.tree) for child in ast.iter_child_nodes(parent)
        }
        if sys.version_info < (3, 12):
            self._place_fields()

    def start(self, node: ast.AST) -> int:
        return self._lines[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined, no-any-return]

    def end(self, node: ast.AST) -> int:
        return self._lines[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined, no-any-return]

    def text(self, node: ast.AST) -> str:
        return self.data[self.start(node) : self.end(node)].decode()

    def edit(self, start: int, end: int, text: str) -> None:
        self.edits.setdefault((start, end, text), len(self.edits))

    def wrap(self, node: ast.AST, before: str, after: str) -> None:
        self.edit(self.start(node), self.start(node), before)
        self.edit(self.end(node), self.end(node), after)

    def replace(self, node: ast.AST, text: str) -> None:
        self.edit(self.start(node), self.end(node), text)

    def begins_line(self, node: ast.AST) -> str | None:
        """The indentation of a statement that is the first on its line."""
        line = self._lines[node.lineno - 1]  # type: ignore[attr-defined]
        indent = self.data[line : self.start(node)].decode()
        return indent if not indent.strip() else None

    def insert_before(self, statement: ast.stmt, line: str) -> bool:
        """Put a line of its own before a statement, if the statement begins its line."""
        indent = self.begins_line(statement)
        if indent is not None:
            self.edit(self.start(statement), self.start(statement), f"{line}{self.line_end}{indent}")
        return indent is not None

    def statement_of(self, node: ast.AST) -> ast.stmt:
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def edited(self) -> bytes:
        """The file after all edits."""
        parts, at = [], 0
        for start, end, text in sorted(self.edits, key=lambda edit: (*edit[:2], self.edits[edit])):
            parts += [self.data[at:start], text.encode()]
            at = max(at, end)
        return b"".join([*parts, self.data[at:]]).decode().encode(self.encoding)

    def _place_fields(self) -> None:
        """Before Python 3.12 the nodes inside an f-string do not say where they are: parse each field in its place."""
        for node in [node for node in ast.walk(self.tree) if isinstance(node, ast.JoinedStr)]:
            if isinstance(self.parents.get(node), ast.FormattedValue):
                continue
            values = [one for one in _in_order(node) if isinstance(one, ast.FormattedValue)]
            fields = list(_fields_in(self.text(node), self.start(node)))
            for value, (text, start) in zip(values, fields, strict=False):
                value.value = self._parsed_at(text, start)
                for inner in ast.walk(value):
                    self.parents.update(dict.fromkeys(ast.iter_child_nodes(inner), inner))

    def _parsed_at(self, text: str, start: int) -> ast.expr:
        line = max(at for at, begin in enumerate(self._lines) if begin <= start)
        parsed = ast.parse(f"({text}\n)", mode="eval").body
        for node in ast.walk(parsed):
            if hasattr(node, "lineno"):
                for end in ("", "end_"):
                    number = getattr(node, f"{end}lineno")
                    if number == 1:
                        column = getattr(node, f"{end}col_offset") - 1 + start - self._lines[line]
                        setattr(node, f"{end}col_offset", column)
                    setattr(node, f"{end}lineno", number + line)
        return parsed


def _unreadable(path: Path, error: Exception) -> str:
    text, line = str(getattr(error, "text", "") or "").strip(), getattr(error, "lineno", None) or 1
    if text.startswith(("%", "!", "?")):
        return f"{path.name}:{line} is a line of IPython ({text}); remove it, then convert the file"
    if "Missing parentheses in call to" in str(error) or text.startswith(("except", "raise")):
        return f"{path.name}:{line} is Python 2 ({text}); bring it to Python 3 first"
    return f"{path.name}:{line} cannot be parsed ({getattr(error, 'msg', error)}); mend it first"


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of an f-string in the order of its text; strings inside its fields are no part of it."""
    for child in node.values if isinstance(node, ast.JoinedStr) else []:
        yield child
        if isinstance(child, ast.FormattedValue) and child.format_spec is not None:
            yield from _in_order(child.format_spec)


def _fields_in(text: str, start: int) -> Iterator[tuple[str, int]]:
    """The text and place of every replacement field of the f-strings in a text."""
    lines = [0, *(found.end() for found in re.finditer(r"\r\n|\r|\n", text))]
    for token in tokenize.generate_tokens(io.StringIO(f"({text})", newline="").readline):
        prefix = re.match(r"\w*", token.string)
        if token.type == tokenize.STRING and prefix and "f" in prefix[0].lower():
            # the parenthesis that is put before the text moves only its first line
            at = lines[token.start[0] - 1] + token.start[1] - (token.start[0] == 1)
            for field, begin in _fields(text, at + prefix.end(), at + len(token.string)):
                yield field, start + len(text[:begin].encode())


def _fields(text: str, at: int, end: int) -> Iterator[tuple[str, int]]:
    while at < end:
        if text.startswith(("{{", "}}"), at):
            at += 2
        elif text[at] == "{":
            stop = _end_of_field(text, at + 1)
            field = text[at + 1 : stop].rstrip()
            yield field.removesuffix("=") if not field.endswith("==") else field, at + 1
            at = stop
            if text[at] == "!":
                at += 2
            if text[at] == ":":
                close = _end_of_spec(text, at + 1)
                yield from _fields(text, at + 1, close)
                at = close
            at += 1
        else:
            at += 1


def _end_of_field(text: str, at: int) -> int:
    depth = 0
    while depth or not (text[at] in "}:" or (text[at] == "!" and text[at + 1] != "=")):
        if text[at] in "'\"":
            at = text.index(text[at], at + 1)
        depth += (text[at] in "([{") - (text[at] in ")]}")
        at += 1
    return at


def _end_of_spec(text: str, at: int) -> int:
    depth = 0
    while depth or text[at] != "}":
        depth += (text[at] == "{") - (text[at] == "}")
        at += 1
    return at
