"""Small messages that all ranks exchange, so that one which brings something else, or never comes, is named.

Every collective of samestep passes through here first, on a group of its own: it cannot be mistaken for an
exchange of gradients, and what each rank calls, and from which line, travels with it.
"""

import contextlib
import ctypes
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Protocol

import torch
import torch.distributed as dist

from samestep.errors import RankMissing, RanksDiffer

_NOT_THE_USERS = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent), contextlib.__file__)
_SLOT = 1024
_PLACE = 160
_PIECE = 1 << 26
_SLICE = timedelta(seconds=1)
_NOTICE_SECONDS = 10.0
_LINGER = timedelta(seconds=4)


class Store(Protocol):
    """As much of torch's key-value store as is used here."""

    def set(self, key: str, value: str) -> None: ...
    def check(self, keys: list[str]) -> bool: ...


@dataclass
class _Table:
    group: dist.ProcessGroup
    store: Store | None
    rank: int
    size: int
    timeout: timedelta
    turn: int = 0
    pending: dist.Work | None = None


_table: _Table | None = None


def sit_down(group: dist.ProcessGroup, store: Store | None, rank: int, size: int, timeout: timedelta) -> None:
    global _table
    _table = _Table(group, store, rank, size, timeout)


def stand_up() -> None:
    """Leave the group, or where a rank stays away, leave it to the end of the process.

    Gloo does not let go of a group before what it waits for has come. A rank that still comes, with another call,
    names the difference; one that waits for this process, in DDP say, never comes, and has to see it end.
    """
    global _table
    if _table and _table.pending:
        with contextlib.suppress(RuntimeError):
            _table.pending.wait(_LINGER)
            _table.pending = None
    if _table and _table.pending:
        for one in (_table.group, _table.pending):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
    elif _table:
        dist.destroy_process_group(_table.group)
    _table = None


def users_line() -> str:
    """File and line of the nearest frame that is the user's own, empty where the script has ended."""
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else ""


def meet(call: str, payload: bytes = b"", *, patience: timedelta | None = None) -> list[bytes]:
    """Collective. Every rank's payload, by rank; an error on all where they are at different calls."""
    if _table is None:
        return [payload]
    _table.turn += 1
    line = users_line()
    place = (f"{call} ({line})" if line else call).encode()[:_PLACE]
    inline = payload[: _SLOT - _PLACE - 8]
    slot = bytearray(_SLOT)
    slot[0:4] = len(payload).to_bytes(4, "little")
    slot[8 : 8 + len(place)] = place
    slot[8 + _PLACE : 8 + _PLACE + len(inline)] = inline
    slots = _gather(slot, place.decode(errors="replace"), patience)
    places = [one[8 : 8 + _PLACE].rstrip(b"\0").decode(errors="replace") for one in slots]
    if len(set(places)) > 1:
        raise RanksDiffer(_different_places(places))
    lengths = [int.from_bytes(one[0:4], "little") for one in slots]
    longest = max(lengths)
    if longest <= len(slot) - _PLACE - 8:
        parts = [one[8 + _PLACE :] for one in slots]
    else:
        parts = _gather(bytearray(payload.ljust(longest, b"\0")), places[0], patience)
    return [part[:length] for part, length in zip(parts, lengths, strict=True)]


def hand_out(file: Path) -> None:
    """Collective. Rank 0's file, copied to a new one on every other rank."""
    if _table is None:
        return
    giver = _table.rank == 0
    size = int(meet("samestep's handing out of a file", str(file.stat().st_size if giver else 0).encode())[0])
    with open(file, "rb" if giver else "xb") as opened:
        for start in range(0, size, _PIECE):
            piece = torch.empty(min(_PIECE, size - start), dtype=torch.uint8)
            if giver:
                opened.readinto(piece.numpy().data)  # type: ignore[attr-defined]
            dist.broadcast(piece, src=0, group=_table.group)
            if not giver:
                opened.write(piece.numpy().data)


def _gather(mine: bytearray, place: str, patience: timedelta | None) -> list[bytes]:
    assert _table is not None
    sent = torch.frombuffer(mine, dtype=torch.uint8)
    received = [torch.empty_like(sent) for _ in range(_table.size)]
    work = dist.all_gather(received, sent, group=_table.group, async_op=True)
    assert work is not None
    _wait(work, place, patience or _table.timeout)
    return [part.numpy().tobytes() for part in received]


def _wait(work: dist.Work, place: str, limit: timedelta) -> None:
    """In slices of a second, so that signals are heard and a rank that waits long can say so."""
    assert _table is not None
    since = time.monotonic()
    told = False
    while not work.is_completed():
        try:
            work.wait(min(_SLICE, limit))
        except RuntimeError as error:
            if "timed out" not in str(error).lower():
                raise RankMissing(_ended(place)) from error
            waited = time.monotonic() - since
            _table.pending = work
            _publish(place)
            if waited >= limit.total_seconds():
                raise RankMissing(_not_reached(place, limit.total_seconds())) from error
            if waited > _NOTICE_SECONDS and not told:
                told = True
                _notice(place, waited, limit)
    try:
        work.wait()
    except RuntimeError as error:  # the group's own limit may pass between two slices
        late = "timed out" in str(error).lower()
        raise RankMissing(_not_reached(place, limit.total_seconds()) if late else _ended(place)) from error


def _publish(place: str) -> None:
    assert _table is not None
    if _table.store is not None:
        try:
            _table.store.set(f"at/{_table.rank}/{_table.turn}", place)
        except RuntimeError:
            _table.store = None  # its host has left; what this rank waits for will say so itself


def _waiting() -> list[int] | None:
    """The ranks known to wait in this turn, None where there is no way to know."""
    assert _table is not None
    if _table.store is None:
        return None
    try:
        return [rank for rank in range(_table.size) if _table.store.check([f"at/{rank}/{_table.turn}"])]
    except RuntimeError:
        return None


def _not_reached(place: str, seconds: float) -> str:
    waiting = _waiting()
    assert _table is not None
    if waiting is None:
        return f"a rank did not reach {place} within {seconds:g} s; is the call inside `if rank == 0`?"
    missing = [rank for rank in range(_table.size) if rank not in waiting]
    return (
        f"{ranks_in_words(missing)} did not reach {place} within {seconds:g} s; {ranks_in_words(waiting)} "
        f"{'is' if len(waiting) == 1 else 'are'} waiting. Is the call inside `if rank == 0`?"
    )


def _notice(place: str, waited: float, limit: timedelta) -> None:
    waiting = _waiting()
    assert _table is not None
    if waiting and waiting[0] == _table.rank:
        missing = [rank for rank in range(_table.size) if rank not in waiting]
        print(
            f"samestep: {ranks_in_words(missing)} did not reach {place} yet, {ranks_in_words(waiting)} waited "
            f"{waited:.0f} s and will wait {limit.total_seconds():.0f} s",
            file=sys.stderr,
        )


def _ended(place: str) -> str:
    return f"a rank ended while this one was in {place}; that rank's own error says why"


def _different_places(places: Sequence[str]) -> str:
    at: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        at.setdefault(place, []).append(rank)
    parts = [
        f"{ranks_in_words(ranks)} at {place}"
        for place, ranks in sorted(at.items(), key=lambda item: len(item[1]))
    ]
    return (
        f"ranks are at different calls: {', '.join(parts)}; "
        "every rank has to make the same calls in the same order"
    )


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Local. `rank 2`, or `ranks 0, 1`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
