"""What a worker's end says: its traceback's lines that matter, its signal or code, whose fault it was."""

import linecache
import os
import re
import signal
from collections.abc import Iterable
from typing import NamedTuple

_RANK = re.compile(r"^\[rank\d+\]: ?")
_BAR = re.compile(r"^ *\| ?")
_GROUP = re.compile(r"^ *\+ Exception Group Traceback \(most recent call last\):$")
_PART = re.compile(r"^[ |+]*\+-[-+]* \d+ -+$")
_END_OF_GROUP = re.compile(r"^ *\+-{8,}$")
_HEADER = re.compile(r"^(?:Original |Exception Group )?Traceback \(most recent call last\):$")
_CRASH = re.compile(r"^Fatal Python error: (.+)$")
_THREAD = re.compile(r"^(Current thread|Thread) 0x\w+.* \(most recent call first\):$")
_FRAME = re.compile(r'^ *File "(?P<file>[^"]*)", line (?P<line>\d+)(?:,? in (?P<name>.+))?$')
_TYPE = re.compile(r"^[A-Za-z_][\w.]*(?::|$)")
_NOISE = re.compile(r"^(?:\[[WEIF]\d|Exception ignored|terminate called|The above exception|During handling)")
_WORKER = "DataLoader worker (pid"
_MOST_LINES = 4
_MOST_COLUMNS = 400

# What a rank says when the trouble is another rank's.
_ECHO = re.compile(
    r"closed by peer|reset by peer|[Bb]roken pipe|remote process exited|Connection refused"
    r"|failed to recv, got 0 bytes|DistNetworkError|DistBackendError|RankMissing"
    r"|[Tt]imed? ?out waiting|[Ss]ocket [Tt]imeout|RanksDiffer.* at the end of the script"
)
_STANDARD = os.path.dirname(os.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep


class Frame(NamedTuple):
    """One frame of a traceback."""

    file: str
    line: int
    name: str
    code: str


class Traceback(NamedTuple):
    """The last traceback a process printed: the user's own innermost frame, and the exception's lines."""

    frame: Frame | None
    exception: tuple[str, ...]

    @property
    def is_echo(self) -> bool:
        """Whether it only tells of another rank's end."""
        return any(_ECHO.search(line) for line in self.exception)


class _Block:
    """One traceback while it is read: frames, then the exception."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.exception: list[str] = []
        self.ended = False

    def take(self, line: str) -> None:
        frame = _FRAME.match(line)
        if self.ended:
            return
        if frame and not self.exception:
            self.frames.append(Frame(frame["file"], int(frame["line"]), frame["name"] or "", ""))
        elif self.exception:
            self.ended = bool(_NOISE.match(line))
            if not self.ended:
                self.exception.append(line)
        elif _TYPE.match(line):
            self.exception.append(line)
        elif self.frames and not self.frames[-1].code and line.startswith("    "):
            self.frames[-1] = self.frames[-1]._replace(code=line.strip())


def read_traceback(stderr: str) -> Traceback | None:
    """The last traceback in what a process wrote to its stderr."""
    crash = None
    in_group = False
    read = [[_Block()]]
    for raw in stderr.splitlines():
        line = _RANK.sub("", raw)
        last = read[-1][-1]
        if crash is not None:
            crash.append(line)
        elif _CRASH.match(line):
            crash = [line]
        elif _GROUP.match(line) and not in_group:
            in_group = True
            read.append([_Block()])
        elif in_group and _END_OF_GROUP.match(line):
            in_group = False
            last.ended = True
        elif in_group and (_PART.match(line) or _HEADER.match(_BAR.sub("", line))):
            read[-1].append(_Block())
        elif in_group:
            last.take(_BAR.sub("", line))
        elif _HEADER.match(line) or (_is_syntax_error(line) and (last.exception or last.ended)):
            read.append([_Block()])
            read[-1][-1].take(line)
        else:
            last.take(line)
    if crash is not None:
        return _crash(crash)
    # A message may quote a traceback's first lines, and a printed stack has no exception: neither is the last.
    found = [traceback for blocks in read if (traceback := _traceback(blocks))]
    if not found:
        return None
    cause = found[-2].exception if len(found) > 1 else ()
    # torch tells how a loader's worker ended only in the cause of this.
    if cause and _WORKER in cause[0] and f"{_WORKER}(s)" in found[-1].exception[0]:
        return found[-1]._replace(exception=cause)
    return found[-1]


def last_words(stderr: str) -> tuple[str, ...]:
    """The end of what a process wrote that printed no traceback."""
    lines = [_RANK.sub("", line).rstrip()[:_MOST_COLUMNS] for line in stderr.splitlines() if line.strip()]
    return tuple(lines[-2:])


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


def _crash(lines: Iterable[str]) -> Traceback:
    """A crash of the interpreter, which prints every thread, the most recent call first."""
    what, frames, current = "", list[Frame](), True
    for line in lines:
        if found := _CRASH.match(line):
            what = found[1]
        elif thread := _THREAD.match(line):
            current = thread[1] == "Current thread"
        elif current and (frame := _FRAME.match(line)):
            code = linecache.getline(frame["file"], int(frame["line"])).strip()
            frames.append(Frame(frame["file"], int(frame["line"]), frame["name"] or "", code))
    return Traceback(_innermost(reversed(frames)), (f"Fatal Python error: {what}",))


def _traceback(blocks: list[_Block]) -> Traceback | None:
    """One traceback, or the first part of an exception group that is none itself, and the group's name."""
    whole = blocks[0]
    parts = [block for block in blocks[1:] if block.exception and "sub-exception" not in block.exception[0]]
    if parts:
        exception = (*_shortened(parts[0].exception), *(f"in {line}" for line in whole.exception[:1]))
        return Traceback(_innermost(parts[0].frames or whole.frames), exception)
    if whole.frames and whole.exception:
        return Traceback(_innermost(whole.frames), _shortened(whole.exception))
    return None


def _is_syntax_error(line: str) -> bool:
    """Whether a traceback without a header begins here; a stack that a message shows names its functions."""
    frame = _FRAME.match(line)
    return frame is not None and not frame["name"]


def _innermost(frames: Iterable[Frame]) -> Frame | None:
    ordered = list(frames)
    return next(reversed([frame for frame in ordered if _is_users(frame.file)] or ordered), None)


def _is_users(file: str) -> bool:
    if file.startswith("<") or "site-packages" in file or "dist-packages" in file:
        return False
    return not file.startswith((_STANDARD, _OURS))


def _shortened(lines: list[str]) -> tuple[str, ...]:
    full = [line.rstrip()[:_MOST_COLUMNS] for line in lines if line.strip()]
    if len(full) <= _MOST_LINES:
        return tuple(full)
    return (*full[: _MOST_LINES - 1], f"... ({len(full) - _MOST_LINES + 1} more lines in the log)")
