"""Small messages that all ranks exchange; a rank that brings another call, or never comes, is named.

Every collective of samestep passes through here first, on a Gloo group of its own. Its messages cannot be mistaken
for an exchange of gradients, and each carries the call and the line that made it.
"""

import contextlib
import ctypes
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import IO, Protocol

import torch
import torch.distributed as dist

from samestep.errors import RankMissing, RanksDiffer
from samestep.text import name_ranks

_NOT_THE_USERS = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent), contextlib.__file__)
_SLOT = 1024
_PLACE = 160
_MARKS = 16
_FIXED = 8 + _MARKS
_HEAD = _FIXED + _PLACE
_PIECE = 1 << 26
_SLICE = timedelta(seconds=1)
_NOTICE_SECONDS = 10.0
_LINGER = timedelta(seconds=4)


class Store(Protocol):
    """The part of torch's key-value store that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def check(self, keys: list[str]) -> bool: ...


class Control:
    """The channel for small messages between all ranks of a group."""

    def __init__(
        self, group: dist.ProcessGroup, store: Store | None, rank: int, size: int, timeout: timedelta
    ) -> None:
        self.rank, self.size = rank, size
        self._group = group
        self._store = store
        self._timeout = timeout
        self._calls = 0
        self._pending: dist.Work | None = None

    def all_gather(
        self, call: str, payload: bytes, patience: timedelta | None, marks: bytes = b""
    ) -> tuple[list[bytes], list[bytes]]:
        """Collective. Every rank's payload and marks, by rank; an error on all where they are at different calls."""
        self._calls += 1
        line = users_line()
        place = (f"{call} ({line})" if line else call).encode()[:_PLACE]
        inline = payload[: _SLOT - _HEAD]
        slot = bytearray(_SLOT)
        slot[0:4] = len(payload).to_bytes(4, "little")
        slot[8 : 8 + len(marks)] = marks
        slot[_FIXED : _FIXED + len(place)] = place
        slot[_HEAD : _HEAD + len(inline)] = inline
        slots = self._gather(slot, place.decode(errors="replace"), patience)
        places = [slot[_FIXED:_HEAD].rstrip(b"\0").decode(errors="replace") for slot in slots]
        if len(set(places)) > 1:
            raise _different_places(places)
        lengths = [int.from_bytes(slot[0:4], "little") for slot in slots]
        longest = max(lengths)
        if longest <= _SLOT - _HEAD:
            parts = [slot[_HEAD:] for slot in slots]
        else:
            parts = self._gather(bytearray(payload.ljust(longest, b"\0")), places[0], patience)
        marks_of_ranks = [slot[8:_FIXED] for slot in slots]
        return [part[:length] for part, length in zip(parts, lengths, strict=True)], marks_of_ranks

    def hand_out(self, file: IO[bytes], size: int) -> None:
        """Collective. Copy rank 0's open file to an open file of every other rank."""
        for start in range(0, size, _PIECE):
            piece = torch.empty(min(_PIECE, size - start), dtype=torch.uint8)
            if self.rank == 0:
                file.readinto(piece.numpy().data)  # type: ignore[attr-defined]
            dist.broadcast(piece, src=0, group=self._group)
            if self.rank:
                file.write(piece.numpy().data)

    def close(self) -> None:
        """Leave the group, or leave it to the end of the process where a rank has not come to a pending call.

        Gloo does not let go of a group before its pending call is done. A rank that still comes to it, with another
        call, names the difference; a rank that waits elsewhere, in DDP say, has to see this process end.
        """
        if self._pending:
            with contextlib.suppress(RuntimeError):
                self._pending.wait(_LINGER)
                self._pending = None
        if self._pending:
            for kept in (self._group, self._pending):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        else:
            dist.destroy_process_group(self._group)

    def _gather(self, mine: bytearray, place: str, patience: timedelta | None) -> list[bytes]:
        sent = torch.frombuffer(mine, dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self.size)]
        work = dist.all_gather(received, sent, group=self._group, async_op=True)
        assert work is not None
        self._wait(work, place, patience or self._timeout)
        return [part.numpy().tobytes() for part in received]

    def _wait(self, work: dist.Work, place: str, limit: timedelta) -> None:
        """Wait in slices of a second, so that signals are heard and a long wait is reported."""
        since = time.monotonic()
        reported = False
        while not work.is_completed():
            try:
                work.wait(min(_SLICE, limit))
            except RuntimeError as error:
                if "timed out" not in str(error).lower():
                    raise _ended(place) from error
                waited = time.monotonic() - since
                self._pending = work
                self._publish(place)
                if waited >= limit.total_seconds():
                    raise self._not_reached(place, limit.total_seconds()) from error
                if waited > _NOTICE_SECONDS and not reported:
                    reported = True
                    self._report(place, waited, limit)
        try:
            work.wait()
        except RuntimeError as error:  # the group's own limit may pass between two slices
            late = "timed out" in str(error).lower()
            raise (self._not_reached(place, limit.total_seconds()) if late else _ended(place)) from error

    def _publish(self, place: str) -> None:
        if self._store is not None:
            try:
                self._store.set(f"at/{self.rank}/{self._calls}", place)
            except RuntimeError:
                self._store = None  # the store's process ended; the pending collective reports it

    def _waiting(self) -> list[int] | None:
        """The ranks known to wait in this call, None where that cannot be known."""
        if self._store is None:
            return None
        try:
            return [rank for rank in range(self.size) if self._store.check([f"at/{rank}/{self._calls}"])]
        except RuntimeError:
            return None

    def _missing(self, waiting: Sequence[int]) -> list[int]:
        return [rank for rank in range(self.size) if rank not in waiting]

    def _not_reached(self, place: str, seconds: float) -> RankMissing:
        waiting = self._waiting()
        if waiting is None:
            return RankMissing(
                f"a rank did not reach {place} within {seconds:g} s; is the call inside `if rank == 0`?",
                call=place,
            )
        missing = self._missing(waiting)
        return RankMissing(
            f"{name_ranks(missing)} did not reach {place} within {seconds:g} s; "
            f"{name_ranks(waiting)} {'is' if len(waiting) == 1 else 'are'} waiting. "
            "Is the call inside `if rank == 0`?",
            ranks=missing,
            call=place,
        )

    def _report(self, place: str, waited: float, limit: timedelta) -> None:
        waiting = self._waiting()
        if waiting and waiting[0] == self.rank:
            print(
                f"samestep: {name_ranks(self._missing(waiting))} did not reach {place} yet, "
                f"{name_ranks(waiting)} waited {waited:.0f} s and will wait {limit.total_seconds():.0f} s",
                file=sys.stderr,
            )


def users_line() -> str:
    """File and line of the nearest frame of the user's code, empty where the script has ended."""
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else ""


def _ended(place: str) -> RankMissing:
    return RankMissing(
        f"a rank ended while this one was in {place}; that rank's own error says why", call=place
    )


def _different_places(places: Sequence[str]) -> RanksDiffer:
    at: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        at.setdefault(place, []).append(rank)
    groups = sorted(at.items(), key=lambda item: len(item[1]))
    parts = [f"{name_ranks(ranks)} at {place}" for place, ranks in groups]
    return RanksDiffer(
        f"ranks are at different calls: {', '.join(parts)}; "
        "every rank has to make the same calls in the same order",
        ranks=groups[0][1],
    )
