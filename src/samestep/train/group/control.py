"""Small messages that all ranks exchange; a rank that brings another call, or never comes, is named.

Every collective of samestep passes through here first, in a tree of the run's own connections. Its messages cannot be
mistaken for an exchange of gradients, and each carries the call and the line that made it. What all bring alike goes
through the tree once.
"""

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import IO

import torch

from samestep.errors import RankMissing, RanksDiffer
from samestep.rendezvous.tree import Tree
from samestep.text import name_ranks
from samestep.train.group.census import Add, Item, added, by_rank, merged, of_kind, packed, unpacked
from samestep.train.group.store import TreeStore

_NOT_THE_USERS = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent), contextlib.__file__)
_LONGEST_PLACE = 160
_PIECE = 1 << 24
_NOTICE_SECONDS = 10.0
_SIGNS = ("place", "marks")


class Control:
    """The channel for small messages between all ranks of a group."""

    def __init__(self, tree: Tree, timeout: timedelta) -> None:
        self.rank, self.size = tree.number, tree.size
        self._tree = tree
        self.store = TreeStore(tree, timeout)  # torch keeps what is below Python alone
        self._timeout = timeout
        self._place, self._reported = "", False

    def all_gather(
        self, call: str, payload: bytes, patience: timedelta | None, marks: bytes = b""
    ) -> tuple[list[bytes], list[bytes]]:
        """Collective. Every rank's payload and marks, by rank; an error on all where they are at different calls."""
        mine = [Item("payload", [[self.rank, self.rank]], payload)]
        answer, marks_of_ranks = self._round(call, mine, merged, patience, marks)
        return by_rank(of_kind("payload", answer), self.size), marks_of_ranks

    def broadcast(self, call: str, payload: bytes, marks: bytes = b"") -> tuple[bytes, list[bytes]]:
        """Collective. Rank 0's payload."""
        mine = [] if self.rank else [Item("payload", [[0, 0]], payload)]
        answer, marks_of_ranks = self._round(call, mine, merged, None, marks)
        return b"".join(item.value for item in of_kind("payload", answer)), marks_of_ranks

    def total(
        self, call: str, alike: bytes, payload: bytes, add: Add, marks: bytes = b""
    ) -> tuple[bytes, list[bytes], list[bytes]]:
        """Collective. All payloads added in a fixed binary tree over ranks, where all brought the same in `alike`.

        Where they did not, the total is empty, and the second value is what each rank brought.
        """
        mine = [Item("alike", [[self.rank, self.rank]], alike), Item("block", [0, self.rank], payload)]

        def join(items: Sequence[Item]) -> list[Item]:
            alike = merged(of_kind("alike", items))
            blocks = {(item.ranks[0], item.ranks[1]): item.value for item in of_kind("block", items)}
            if len(alike) > 1:
                return alike
            return [
                *alike,
                *(Item("block", at, value) for at, value in added(blocks, self.size, add).items()),
            ]

        answer, marks_of_ranks = self._round(call, mine, join, None, marks)
        total = b"".join(item.value for item in of_kind("block", answer))
        return total, by_rank(of_kind("alike", answer), self.size), marks_of_ranks

    def hand_out(self, call: str, file: IO[bytes], size: int) -> None:
        """Collective. Copy rank 0's open file to an open file of every other rank."""
        for _ in range(0, size, _PIECE):
            piece, _ = self.broadcast(call, b"" if self.rank else file.read(_PIECE))
            if self.rank:
                file.write(piece)

    def close(self) -> None:
        """Leave; a rank that comes to another call later hears where this one was last."""
        self._tree.leave(self._place)

    def _round(
        self,
        call: str,
        mine: Sequence[Item],
        join: Callable[[Sequence[Item]], list[Item]],
        patience: timedelta | None,
        marks: bytes,
    ) -> tuple[list[Item], list[bytes]]:
        """What rank 0 made of all ranks' items, and every rank's marks, after all were found at one call."""
        line = users_line()
        self._reported = False
        self._place = place = (f"{call} ({line})" if line else call)[:_LONGEST_PLACE]
        limit_s = (patience or self._timeout).total_seconds()
        here = [[self.rank, self.rank]]
        own = [Item("place", here, place.encode()), Item("marks", here, marks), *mine]

        def joined(parts: Mapping[int, bytes]) -> bytes:
            items = [*own, *(item for part in parts.values() for item in unpacked(part))]
            signs = merged(item for item in items if item.kind in _SIGNS)
            # Where ranks are at different calls, what they bring cannot be put together, and is not needed.
            is_one_call = len(of_kind("place", signs)) == 1
            return packed(
                [*signs, *(join([item for item in items if item.kind not in _SIGNS]) if is_one_call else [])]
            )

        try:
            answer = unpacked(self._tree.round(joined, limit_s, lambda waited: self._look(waited, limit_s)))
        except RankMissing as error:
            if error.call:
                raise
            raise self._ended() from error
        places = by_rank(of_kind("place", answer), self.size)
        if len(set(places)) > 1:
            raise _different_places(dict(enumerate(place.decode(errors="replace") for place in places)))
        return answer, by_rank(of_kind("marks", answer), self.size)

    def _look(self, waited: float, limit_s: float) -> None:
        """Called about once a second while this rank waits."""
        if waited >= limit_s:
            raise self._not_reached(self._place, limit_s)
        if waited > _NOTICE_SECONDS and not self._reported:
            self._reported = True
            self._report(self._place, waited, limit_s)

    def _ended(self) -> RankMissing | RanksDiffer:
        """Why no answer comes: a rank has ended, or left at another call."""
        if self._tree.lost is not None or not self._tree.left:
            return RankMissing(
                f"a rank ended while this one was in {self._place}; that rank's own error says why",
                call=self._place,
            )
        return _different_places(
            {self.rank: self._place} | {rank: at for rank, (_, at) in self._tree.left.items()}
        )

    def _missing(self, waiting: Sequence[int]) -> list[int]:
        return [rank for rank in range(self.size) if rank not in set(waiting)]

    def _not_reached(self, place: str, seconds: float) -> RankMissing:
        waiting = self._tree.waiting_in(self._tree.rounds)
        if not waiting:
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

    def _report(self, place: str, waited: float, limit_s: float) -> None:
        waiting = self._tree.waiting_in(self._tree.rounds)
        if waiting and waiting[0] == self.rank:
            print(
                f"samestep: {name_ranks(self._missing(waiting))} did not reach {place} yet, "
                f"{name_ranks(waiting)} waited {waited:.0f} s and will wait {limit_s:.0f} s",
                file=sys.stderr,
            )


def users_line() -> str:
    """File and line of the nearest frame of the user's code, empty where the script has ended."""
    frame: FrameType | None = sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else ""


def _different_places(places: Mapping[int, str]) -> RanksDiffer:
    at: dict[str, list[int]] = {}
    for rank, place in places.items():
        at.setdefault(place, []).append(rank)
    groups = sorted(at.items(), key=lambda item: len(item[1]))
    parts = [f"{name_ranks(ranks)} at {place}" for place, ranks in groups]
    return RanksDiffer(
        f"ranks are at different calls: {', '.join(parts)}; "
        "every rank has to make the same calls in the same order",
        ranks=groups[0][1],
    )
