"""Passes on what workers write: each rank's output to a file, and the shown ranks' output to the console too.

Covered: partial lines, progress bars, binary output, endless lines, and a slow console: the buffer for it is bounded,
and when it is full the workers wait. A traceback on a shown rank's stderr is held back until the rank ends or
continues, because the run's last lines may contain it.
"""

import os
import re
import select
import time
from collections.abc import Callable
from io import FileIO
from math import inf
from pathlib import Path
from typing import Protocol

from samestep.text import reason_of

OUT, ERR = 1, 2
_CHUNK = 1 << 16
_PATIENCE_S = 0.1  # for the rest of a line
# After a traceback: a rank that still writes after this time goes on; a silent rank may take this long to end.
_GOES_ON_S, _HELD_S = 0.75, 10.0
# A pipe that is ready for writing takes this many bytes without blocking.
_PIPE_BUF = 4096
_MOST_WAITING = 1 << 20  # unwritten bytes above which workers must wait
_DRAWN_S = 0.5  # between two progress lines
_TAIL = 1 << 16  # the last bytes of stderr, for a traceback
_TRACEBACK = re.compile(
    rb"^(?:\[rank\d+\]: ?)?"
    rb"(?:Traceback \(most recent|Exception ignored |  \+ Exception Group Traceback|Fatal Python error: "
    rb"|  File (?:\x1b\[[0-9;]*m)?\"[^\"\n]*\"(?:\x1b\[[0-9;]*m)?, line (?:\x1b\[[0-9;]*m)?\d+(?:\x1b\[[0-9;]*m)?$)",
    re.MULTILINE,
)


class Console(Protocol):
    """Where the output of shown ranks goes."""

    def show(self, kind: int, data: bytes, owner: object, prefix: bytes = b"") -> None:
        """Show bytes on stdout (OUT) or stderr (ERR), with a prefix before every line."""

    @property
    def crowded(self) -> bool:
        """Whether it cannot take more for now."""


class Terminal:
    """This process's stdout and stderr, written without blocking the loop that watches the workers."""

    def __init__(self) -> None:
        self._waiting = {OUT: bytearray(), ERR: bytearray()}
        self._gone: set[int] = set()
        self.lost = ""  # why output could not be shown
        self._unfinished: dict[int, object] = {}
        self._is_one_file = os.path.sameopenfile(OUT, ERR)
        self.progress: Callable[[], str] = str  # what `tick` draws
        self._line, self._drawn_at = b"", 0.0

    def show(self, kind: int, data: bytes, owner: object, prefix: bytes = b"") -> None:
        """Show bytes; first end a line that another owner left unfinished, but continue a line of the same owner."""
        if not data or kind in self._gone:
            return
        line = OUT if self._is_one_file else kind
        self._erase_progress(kind)
        if self._unfinished.get(line, owner) is not owner:
            self._waiting[kind] += b"\n"
        marked = b"".join(prefix + text for text in data.splitlines(keepends=True)) if prefix else data
        self._waiting[kind] += marked[len(prefix) if self._unfinished.get(line) is owner else 0 :]
        if data.endswith((b"\n", b"\r")):
            self._unfinished.pop(line, None)
        else:
            self._unfinished[line] = owner

    def say(self, text: str) -> None:
        self.show(ERR, text.encode(errors="backslashreplace") + b"\n", "the launcher")

    @property
    def is_live(self) -> bool:
        """Whether a progress line can be drawn and erased."""
        return self._is_one_file and os.isatty(ERR) and os.environ.get("TERM", "dumb") != "dumb"

    def tick(self, now: float) -> None:
        """Draw the progress line below all output; the next output replaces it."""
        if now - self._drawn_at < _DRAWN_S or self._unfinished or not (text := self.progress()):
            return
        self._erase_progress(ERR)
        self._drawn_at = now
        columns = os.get_terminal_size(ERR).columns or 80  # 0 where nobody has set it
        text = text if len(text) < columns else text[:columns].rpartition(", ")[0]
        self._line = text.encode(errors="backslashreplace")
        self._waiting[ERR] += self._line

    def _erase_progress(self, kind: int) -> None:
        if self._line:
            self._line = b""
            self._waiting[kind] += b"\r\x1b[K"

    @property
    def crowded(self) -> bool:
        """Whether too much output waits to be written."""
        return any(len(waiting) > _MOST_WAITING for waiting in self._waiting.values())

    def waiting(self) -> list[int]:
        """The descriptors that have something to write."""
        return [kind for kind, waiting in self._waiting.items() if waiting]

    def write(self, kind: int) -> None:
        """Write a piece to a descriptor that poll called ready."""
        waiting = self._waiting[kind]
        try:
            del waiting[: os.write(kind, waiting[:_PIPE_BUF])]
        except BlockingIOError:
            return
        except OSError as error:
            # The run goes on, and its logs are complete. A reader that has gone, as `head -1`, has what it needs.
            self._gone.add(kind)
            if not isinstance(error, BrokenPipeError):
                self.lost = f"what was to be shown is lost ({reason_of(error)})"
            waiting.clear()

    def flush(self, seconds: float = 1.0) -> None:
        self._erase_progress(ERR)
        until = time.monotonic() + seconds
        while self.waiting() and time.monotonic() < until:
            poll = select.poll()
            for kind in self.waiting():
                poll.register(kind, select.POLLOUT)
            for kind, _ in poll.poll(100):
                self.write(kind)


class Log:
    def __init__(self, path: Path, lost: Callable[[str], None]) -> None:
        self._lost = lost
        self._file: int | None = None
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            lost(reason_of(error))

    def write(self, data: bytes) -> None:
        """Append all of it; a full disk ends the log, not the run."""
        view = memoryview(data)
        while view and self._file is not None:
            try:
                view = view[os.write(self._file, view) :]
            except OSError as error:
                self.close()
                self._lost(reason_of(error))

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Stream:
    """The reading end of one worker's stdout or stderr."""

    def __init__(
        self,
        pipe: FileIO,
        kind: int,
        log: Log | None,
        console: Console | None,
        prefix: bytes | None,
        beside: "Stream | None" = None,
    ) -> None:
        """`prefix` goes before every shown line; None shows bytes as they come. `beside` is the worker's stdout."""
        self._beside = beside
        self.pipe, self.console, self.tail = pipe, console, bytearray()
        self.hides, self.traceback_at = False, inf
        self._kind, self._log, self._prefix = kind, log, prefix
        self._partial, self._partial_since = b"", 0.0
        self._held, self._held_since, self.written_at = b"", 0.0, 0.0
        os.set_blocking(pipe.fileno(), False)

    def read(self) -> bool:
        """Pass on what has arrived; False if nothing had, or if the other end is closed."""
        if self.pipe.closed:
            return False
        data: bytes | None = self.pipe.read(_CHUNK)
        if data:
            self._take(data)
        elif data is not None:
            self.finish()
        return bool(data)

    def drain(self) -> None:
        """Pass on what an ended worker left in the pipe."""
        for _ in range(64):
            if not self.read():
                break
        self.finish()

    def finish(self) -> None:
        """Close the pipe, and pass on an unfinished line."""
        if not self.pipe.closed:
            self.pipe.close()
            self._pass_on(self._partial)

    def tick(self, now: float) -> None:
        """Pass on a partial line or a held traceback that has waited long enough."""
        if self._partial and now - self._partial_since > _PATIENCE_S:
            self._pass_on(self._partial)
        goes_on = self._beside and self._beside.written_at - self._held_since > _GOES_ON_S
        if self._held and (goes_on or now - self._held_since > _HELD_S):
            self.release()

    def release(self) -> None:
        """Show what was held back."""
        held, self._held = self._held, b""
        self._show(held)

    def forget(self) -> None:
        """Never show what is held back, nor later output."""
        self.hides = bool(self._held)
        self._held, self.console = b"", None

    def _take(self, data: bytes) -> None:
        self.written_at = now = time.monotonic()
        if self._kind == ERR:
            self.tail += data
            del self.tail[:-_TAIL]
            if b"Traceback (most recent" in data:
                self.traceback_at = now
        if self._prefix is None:
            self._show_or_hold(data, now)
        data = self._partial + data
        end = data.rfind(b"\n") + 1
        if len(data) - end > _CHUNK:
            end = len(data)
        if end or not self._partial:
            self._partial_since = now
        self._pass_on(data[:end], data[end:])

    def _pass_on(self, lines: bytes, partial: bytes = b"") -> None:
        self._partial = partial
        if self._log is not None:
            self._log.write(lines)
        if self._prefix is not None:
            self._show_or_hold(lines, time.monotonic())

    def _show_or_hold(self, data: bytes, now: float) -> None:
        if self._held:
            self._held += data
            if len(self._held) > _CHUNK:
                self.release()
        elif self._kind == ERR and self.console is not None and (begin := _TRACEBACK.search(data)):
            self._show(data[: begin.start()])
            self._held, self._held_since = data[begin.start() :], now
        else:
            self._show(data)

    def _show(self, data: bytes) -> None:
        if self.console is not None:
            owner = self.console if self._prefix is None else self
            self.console.show(self._kind, data, owner, self._prefix or b"")
