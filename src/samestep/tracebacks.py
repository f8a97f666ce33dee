"""Finds the exception that ended a worker: from its failure record, or else from its stderr."""

import linecache
import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from samestep.failure import Failure, Frame, is_echo, is_users, typed
from samestep.text import printable

_RANK = re.compile(r"^\[rank\d+\]: ?")
_BAR = re.compile(r"^ +[|+] ?")  # before each line of an exception group
_HEADER = re.compile(r"^(?:Original |Exception Group )?Traceback \(most recent call last\):$")
_CRASH = re.compile(r"^Fatal Python error: (.+)$")
_THROWN = re.compile(r"^ +what\(\): +(.+)$")  # of C++, before the crash
# of C, or of a device's kernel
_ASSERTED = re.compile(r"^(?:.*[/ ])?([\w.+-]+:\d+): .*Assertion [`'](.+)['`] failed\.?$")
_THREAD = re.compile(r"^((?:Current thread|Thread) 0x\w+).* \(most recent call first\):$")
_FRAME = re.compile(r'^ *File "(?P<file>[^"]*)", line (?P<line>\d+)(?:,? in (?P<name>.+))?$')
_TYPE = re.compile(r"^[A-Za-z_][\w.]*(?::|$)")
_NOISE = re.compile(
    r"^(?:-[-+]{7}|\[[WEIF]\d|Exception ignored|terminate called|The above exception|During handling)"
)
# an exception that ended nothing, as in `__del__`
_IGNORED = re.compile(r"^Exception ignored .*\nTraceback .*\n(?: .*\n)*.*\n?", re.MULTILINE)
_WORKER = "DataLoader worker (pid"
_OF_POOL = "RemoteTraceback:"  # what a process of multiprocessing's or concurrent.futures' pool raised
_UNLIKE = "Received data size doesn't match expected size"
_TAKE_ALIKE = (
    "two ranks brought unlike data to one exchange; on every rank call backward() of the same models, and the same "
    "collectives, in the same order"
)
_LATE = "device-side assert"
_SHOW_AT_ONCE = (
    "a GPU reports this late, so the line may be another; CUDA_LAUNCH_BLOCKING=1 samestep run ... shows it"
)
# a script may exit with 120 by itself too
_NOT_FLUSHED = " (perhaps: at its end, Python could not write out what was printed)"
_MOST_LINES = 4
_MOST_COLUMNS = 400

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ORIGINAL = "Original Traceback (most recent call last):"


class Traceback(NamedTuple):
    """The exception that ended a worker: the user's own innermost frame, and the exception's lines."""

    frame: Frame | None
    exception: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        if (frame := self.frame) is None:
            return [*self.exception]
        where = f"  {printable(typed(Path(frame.file)), _MOST_COLUMNS)}:{frame.line}"
        where += f" in {frame.name}" if frame.name else ""
        return [where, *([f"    {frame.code[:200]}"] if frame.code else []), *self.exception]

    @property
    def is_echo(self) -> bool:
        """Whether the exception only says that another rank has ended."""
        return is_echo(self.exception)


def read_traceback(stderr: str) -> Traceback | None:
    """The last traceback in what a process wrote to its stderr."""
    lines = _plain_lines(stderr)
    for number, line in enumerate(lines):
        if crash := _CRASH.match(line):
            # the interpreter prints every thread, the latest call first
            threads = lines[number + 1 :]
            stack = _stack(threads, "Current thread") or _stack(threads, "")  # none in a thread of torch's
            thrown = [_printed(match[1]) for match in map(_THROWN.match, lines[:number]) if match][-1:]
            remedy = [_TAKE_ALIKE for line in thrown if _UNLIKE in line]
            error = f"Fatal Python error: {crash[1]}"
            return Traceback(_innermost(reversed(stack)), (error, *thrown, *remedy))
    # Skip what is no traceback: quoted first lines in a message, and a printed stack without an exception.
    complete = [(frames, exception) for frames, exception in _blocks(lines) if frames and exception]
    if not complete:
        return None
    exceptions = [_shortened(exception) for _, exception in complete]
    traceback = Traceback(_innermost(complete[-1][0]), exceptions[-1])
    return _with_loaders_cause(traceback, exceptions[-2] if len(complete) > 1 else ())


def recorded_traceback(failure: Failure) -> Traceback:
    """The exception in a worker's record."""
    if _ORIGINAL in failure.exception and (original := read_traceback(failure.exception)):
        return original  # torch puts the traceback of a loader worker into the message
    exception, frame = _shortened(failure.exception.splitlines()), next(reversed(failure.frames), None)
    if failure.group:
        exception += (f"in {printable(failure.group.splitlines()[0], _MOST_COLUMNS)}",)
    if failure.handled and (is_echo(exception) or "RanksDiffer" in exception[0]):
        exception += (f"while it handled {_printed(failure.handled)}",)
    if _OF_POOL in failure.cause and (remote := read_traceback(failure.cause)):
        frame = remote.frame
    return _with_loaders_cause(Traceback(frame, exception), _shortened(failure.cause.splitlines()))


def with_assertion(traceback: Traceback, stderr: str) -> Traceback:
    """Add the assertion of C or of a device's kernel that ended a process; the first is the cause of others."""
    exception, is_late = traceback.exception, any(_LATE in line for line in traceback.exception)
    if not is_late and not exception[0].endswith("Aborted"):
        return traceback
    failed = next(filter(None, map(_ASSERTED.match, _plain_lines(stderr))), None)
    asserted = (f"{failed[1]}: assertion `{_printed(failed[2])}` failed",) if failed else ()
    if is_late:
        exception = next((line,) for line in exception if _LATE in line)
    is_of_device = is_late or (failed is not None and failed[1].partition(":")[0].endswith((".cu", ".cuh")))
    return traceback._replace(exception=(*exception, *asserted, *[_SHOW_AT_ONCE] * is_of_device))


def last_words(stderr: str) -> tuple[str, ...]:
    return tuple(_printed(line) for line in [line for line in _plain_lines(stderr) if line.strip()][-2:])


def describe_end(status: int) -> str:
    """A worker's end in words: an exit code, or a signal by its name."""
    if status >= 0:
        return f"exit code {status}" + (_NOT_FLUSHED if status == 120 else "")
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def exit_code(status: int) -> int:
    """The exit code of a shell for a worker's status."""
    return status if status >= 0 else 128 - status


def _plain_lines(stderr: str) -> list[str]:
    lines = [_BAR.sub("", _RANK.sub("", _COLOUR.sub("", line))) for line in stderr.splitlines()]
    return _IGNORED.sub("", "\n".join(lines)).splitlines()


def stack_in(text: str, thread: int = 0) -> list[Frame]:
    """The frames of this thread, if it is there, or of the main thread, which faulthandler prints last."""
    lines = text.splitlines()
    return (_stack(lines, f"0x{thread:016x}") if thread else []) or _stack(lines, "")


def _stack(lines: Iterable[str], thread: str) -> list[Frame]:
    """The frames of the last thread whose header has `thread` in it."""
    frames, is_wanted = list[Frame](), True
    for line in lines:
        if header := _THREAD.match(line):
            is_wanted = thread in header[1]
            frames = [] if is_wanted else frames
        elif is_wanted and (frame := _FRAME.match(line)):
            code = linecache.getline(frame["file"], int(frame["line"])).strip()
            frames.append(Frame(frame["file"], int(frame["line"]), frame["name"] or "", code))
    return frames


def _blocks(lines: Iterable[str]) -> Iterator[tuple[list[Frame], list[str]]]:
    frames, exception, is_over = list[Frame](), list[str](), False
    for line in lines:
        frame = _FRAME.match(line)
        # a syntax error's traceback may have no header; its frame, unlike one quoted in a message, names no function
        if _HEADER.match(line) or (exception and frame and not frame["name"]):
            yield frames, exception
            frames, exception, is_over = [], [], False
        if exception:
            is_over = is_over or bool(_NOISE.match(line))
            exception += [] if is_over else [line]
        elif frame:
            frames.append(Frame(frame["file"], int(frame["line"]), frame["name"] or ""))
        elif _TYPE.match(line):
            exception.append(line)
        elif frames and not frames[-1].code and line.startswith("    "):
            frames[-1] = frames[-1]._replace(code=line.strip())
    yield frames, exception


def _innermost(frames: Iterable[Frame]) -> Frame | None:
    ordered = list(frames)
    return next(reversed([frame for frame in ordered if is_users(frame.file)] or ordered), None)


def _with_loaders_cause(traceback: Traceback, cause: Sequence[str]) -> Traceback:
    """Replace torch's exception about a loader worker by its cause: only that says how the worker ended."""
    if cause and _WORKER in cause[0] and f"{_WORKER}(s)" in traceback.exception[0]:
        return traceback._replace(exception=tuple(cause))
    return traceback


def _shortened(lines: Iterable[str]) -> tuple[str, ...]:
    full = [_printed(line) for line in lines if line.strip()]
    if len(full) <= _MOST_LINES:
        return tuple(full)
    return (*full[: _MOST_LINES - 1], "... (more lines in the log)")  # a record has not all of a long message


def _printed(line: str) -> str:
    return printable(line.expandtabs().rstrip(), _MOST_COLUMNS)
