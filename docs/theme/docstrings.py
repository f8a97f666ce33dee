"""Gives the docstrings of samestep the sections that the site's generator knows."""

import re
from typing import Any

import griffe

_ARGUMENT = re.compile(r"(?P<names>\*{0,2}\w+(?:, \w+)*): ")
_RAISES = re.compile(r"(?<=\. )Raises |^Raises ")


class Sections(griffe.Extension):
    """Paragraphs of `name: meaning` become Args; `Returns` and `Raises` begin paragraphs; the code is an example."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = _sections(obj.docstring.value)


def _sections(text: str) -> str:
    return "\n\n".join(_section(paragraph) for paragraph in re.split(r"\n\n+", text))


def _section(paragraph: str) -> str:
    lines = paragraph.splitlines()
    if lines[0].startswith("    "):
        return "**Example**\n\n```python\n" + "\n".join(line[4:] for line in lines) + "\n```"
    if _ARGUMENT.match(lines[0]):
        return "\n".join(_items(lines))
    return re.sub(r"(^|(?<=\. ))(Returns|Raises)\b", r"\n\n**\2**", " ".join(lines)).lstrip()


def _items(lines: list[str]) -> list[str]:
    """A list of Markdown; a line that continues an argument is indented in the docstring."""
    items: list[str] = []
    for line in lines:
        if match := _ARGUMENT.match(line):
            names = ", ".join(f"`{name}`" for name in match["names"].split(", "))
            items.append(f"- {names}: {line[match.end() :]}")
        elif line.startswith("    ") and items:
            items[-1] += " " + line.strip()
        else:
            items += ["", line]
    return ["**Arguments**", "", *items]
