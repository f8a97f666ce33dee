"""A failed run in few lines: which worker failed first, the user's own line, the exception, what became of the rest."""

import os
import re
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_GROUP_BAR = re.compile(r"^[ |+]*\| ?")
_HEADER = re.compile(r"^\s*(?:Original |Exception Group )?Traceback \(most recent call last\):$")
_CRASH = re.compile(r"^Fatal Python error: (.+)$")
_FRAME = re.compile(r'^ *File "(?P<file>[^"]*)", line (?P<line>\d+)(?:,? in (?P<name>.+))?$')
_EXCEPTION = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?::.*)?$")
_NOISE = re.compile(
    r"^(?:\[[WEI]\d|\[rank\d+\]:\[|Exception ignored|terminate called|The above exc|During handling)"
)
_MOST_LINES = 4
_MOST_COLUMNS = 400

# What a rank says when the trouble is another rank's.
_ECHO = re.compile(
    r"closed by peer|reset by peer|[Bb]roken pipe|remote process exited|Connection refused"
    r"|failed to recv, got 0 bytes|DistNetworkError|DistBackendError|RankMissing"
    r"|[Tt]imed? ?out waiting|[Ss]ocket [Tt]imeout"
)


class Frame(NamedTuple):
    """One frame of a traceback, as printed."""

    file: str
    line: int
    name: str
    code: str


class Traceback(NamedTuple):
    """The last traceback a process printed: its innermost frame of the user's own, and the exception."""

    frame: Frame | None
    exception: tuple[str, ...]

    @property
    def is_echo(self) -> bool:
        """Whether it only tells of another rank's end."""
        return any(_ECHO.search(line) for line in self.exception)


def read_traceback(stderr: str) -> Traceback | None:
    """The last traceback in what a process wrote to its stderr."""
    lines = [_PREFIX.sub("", line) for line in stderr.splitlines()]
    start = _start(lines)
    if start is None:
        return None
    crash = _CRASH.match(lines[start])
    block = lines[start:] if crash else _first_of_group(lines[start:])
    frames = _frames(block)
    if crash:
        # The interpreter prints a crash with the most recent call first.
        return Traceback(_innermost(reversed(frames)), (f"{crash[1]} (the interpreter crashed)",))
    return Traceback(_innermost(frames), _exception(block))


def describe_end(status: int) -> str:
    """A worker's end in words: an exit code, or a signal by its name."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def exit_code(status: int) -> int:
    """A worker's status as a shell would have it."""
    return status if status >= 0 else 128 - status


def duration(seconds: float) -> str:
    """3 min 12 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def name_ranks(ranks: Sequence[int]) -> str:
    """rank 0; ranks 0, 2, 3; a long list as spans."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    short = len(ordered) <= 8
    parts = [str(rank) for rank in ordered] if short else [f"{a}-{b}" if a < b else str(a) for a, b in spans]
    return "ranks " + ", ".join(parts)


def shown_path(file: str) -> str:
    """A path as one would type it here."""
    path = Path(file)
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return file


def render(head: str, traceback: Traceback | None, words: Iterable[str], tail: str) -> str:
    """The lines a failed run ends with."""
    body: list[str] = []
    if traceback is not None:
        if traceback.frame is not None:
            frame = traceback.frame
            body.append(
                f"  {shown_path(frame.file)}:{frame.line}" + (f" in {frame.name}" if frame.name else "")
            )
            if frame.code:
                body.append(f"    {frame.code[:_MOST_COLUMNS]}")
        body.extend(traceback.exception)
    body.extend(words)
    return "\n".join([head, "", *body, "", tail])


def _start(lines: Sequence[str]) -> int | None:
    """Where the last traceback begins: a header, a crash, or the frame of a syntax error, which has no header."""
    for index in range(len(lines) - 1, -1, -1):
        bare = _GROUP_BAR.sub("", lines[index]) if "|" in lines[index] else lines[index]
        if _CRASH.match(bare):
            return index
        if _HEADER.match(re.sub(r"^[ +]*", "", bare)):
            return _group_start(lines, index)
        frame = _FRAME.match(lines[index])
        if frame and not frame["name"] and _lone_syntax_error(lines, index):
            return index
    return None


def _lone_syntax_error(lines: Sequence[str], index: int) -> bool:
    before = lines[:index]
    return any(re.match(r"(?:Syntax|Indentation|Tab)Error:", line) for line in lines[index:]) and not any(
        _HEADER.match(line) for line in before
    )


def _group_start(lines: Sequence[str], index: int) -> int:
    """Inside an exception group the last header is a part's; the whole begins at the group's own."""
    if not lines[index].lstrip().startswith(("|", "+")):
        return index
    for above in range(index, -1, -1):
        if lines[above].startswith("  + Exception Group Traceback"):
            return above
    return index


def _first_of_group(block: list[str]) -> list[str]:
    """An exception group as the traceback of its first part; anything else as it is."""
    if not block[0].startswith("  + Exception Group"):
        return block
    bare = [re.sub(r"^[ |+]*[|+] ?", "", line) if re.match(r"^\s*[|+]", line) else line for line in block]
    first = next((i for i, line in enumerate(bare) if re.fullmatch(r"-+ 1 -+", line.strip("+ "))), 0)
    rest = bare[first + 1 :]
    if rest and re.search(r"Traceback \(most", rest[0]) and "Exception Group" in rest[0]:
        inner = next((i for i, line in enumerate(rest) if re.fullmatch(r"-+ 1 -+", line.strip("+ "))), 0)
        rest = rest[inner + 1 :]
    end = next((i for i, line in enumerate(rest) if re.fullmatch(r"-{8,}.*", line.strip("+ "))), len(rest))
    return rest[:end]


def _frames(block: Sequence[str]) -> list[Frame]:
    found = []
    for index, line in enumerate(block):
        match = _FRAME.match(line)
        if match:
            below = block[index + 1] if index + 1 < len(block) else ""
            code = below.strip() if below.startswith("    ") and not _FRAME.match(below) else ""
            found.append(Frame(match["file"], int(match["line"]), match["name"] or "", code))
    return found


def _innermost(frames: Iterable[Frame]) -> Frame | None:
    ordered = list(frames)
    own = [frame for frame in ordered if _is_users(frame.file)]
    return next(reversed(own or ordered), None)


_STANDARD = os.path.dirname(os.__file__)
_OURS = os.path.dirname(os.path.dirname(__file__))


def _is_users(file: str) -> bool:
    if file.startswith("<") or "site-packages" in file or "dist-packages" in file:
        return False
    return not file.startswith((_STANDARD + os.sep, _OURS + os.sep))


def _exception(block: Sequence[str]) -> tuple[str, ...]:
    """The exception's own lines: from the first that is not indented below the last frame."""
    last_frame = max((i for i, line in enumerate(block) if _FRAME.match(line)), default=0)
    for index in range(last_frame, len(block)):
        if _EXCEPTION.match(block[index]):
            break
    else:
        return ()
    kept = [block[index]]
    for line in block[index + 1 :]:
        if _NOISE.match(line):
            break
        kept.append(line)
    while kept and not kept[-1].strip():
        kept.pop()
    hidden = len(kept) - _MOST_LINES
    shown = [line[:_MOST_COLUMNS] for line in kept if line.strip()][:_MOST_LINES]
    return (*shown, f"... ({hidden} more lines in the log)") if hidden > 0 else tuple(shown)
