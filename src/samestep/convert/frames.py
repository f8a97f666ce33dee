"""Where following a script is: in which functions and loops; and what was found."""

import ast
from dataclasses import dataclass, field
from typing import Any

from samestep.convert.source import Source
from samestep.convert.values import Loop, Scope, Values


@dataclass(eq=False)
class Frame:
    """A function that is being followed, or a module."""

    scope: Scope
    source: Source
    statement: ast.stmt | None = None
    call: ast.Call | None = None
    caller: "Frame | None" = None
    returned: Values = field(default_factory=list)
    yielded: Values = field(default_factory=list)
    function: Any = None
    loops_before: int = 0
    depth: int = 0
    has_ended: bool = False
    had_batches: bool = False  # whether it has gone through a loader


class Frames:
    """What all of following shares: frames, loops, and what was found."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.loops: list[Loop] = []
        self.gaps: dict[tuple[str, int], str] = {}
        self.notes: dict[str, None] = {}
        self.silent = self.uneven = self.depth = self.in_forward = 0
        self.loops_made = self.backwards = self.by_form = self.without_gradients = 0
        self.in_eval, self.followed = False, 0
        self.unwraps = False

    @property
    def frame(self) -> Frame:
        return self.frames[-1]

    @property
    def batches(self) -> Loop | None:
        """The innermost loop over batches."""
        return next((loop for loop in reversed(self.loops) if loop.kind == "batches"), None)

    def gap(self, node: ast.AST, reason: str) -> None:
        """Note what cannot be converted."""
        if not self.silent:
            self.gaps.setdefault((str(self.frame.source.path), node.lineno), reason)  # type: ignore[attr-defined]

    def note(self, node: ast.AST, text: str) -> None:
        """Note what is worth knowing, and leaves nothing to do."""
        if not self.silent:
            self.notes[f"{self.frame.source.path.name}:{node.lineno}: {text}"] = None  # type: ignore[attr-defined]

    def enter(self, loop: Loop) -> Loop:
        self.loops_made += 1
        loop.number, loop.depth = self.loops_made, self.depth
        self.loops.append(loop)
        return loop

    def snapshot(self) -> list[tuple[Scope, Scope]]:
        """All scopes that can be reached from here, each with a copy."""
        waiting, found = [frame.scope for frame in self.frames], dict[int, Scope]()
        while waiting:
            scope = waiting.pop()
            if id(scope) in found:
                continue
            found[id(scope)] = scope
            waiting += [scope.parent] if scope.parent is not None else []
            waiting += [value.of.scope for value in scope.names.values() if value.kind == "instance"]
        return [(scope, scope.copy()) for scope in found.values()]

    def restore(self, snapshot: list[tuple[Scope, Scope]]) -> None:
        for scope, copy in snapshot:
            scope.names, scope.since, scope.made = copy.names.copy(), copy.since.copy(), copy.made.copy()
