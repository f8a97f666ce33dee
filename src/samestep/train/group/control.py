"""Exchanges small messages between all ranks; the error names a rank that makes another call or does not come.

Every collective of samestep passes through here first, over the run's own tree of connections, so its messages cannot
be mixed up with exchanges of gradients. Each message carries the call and its line. Equal values are sent once.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from opcode import opname
from types import FrameType

from samestep.errors import RankMissing, RanksDiffer
from samestep.failure import Frame, stack_of, users_frame
from samestep.rendezvous.tree import Late, Tree
from samestep.text import name_ranks
from samestep.train.group.census import Item, by_rank, items_of, merged, message_of, of_kind

LEFT = "left the script at"
_LONGEST_PLACE = 160
Join = Callable[[Sequence[Item]], list[Item]]


def exchange(tree: Tree, place: str, mine: Sequence[Item], join: Join, limit_s: float) -> list[Item]:
    """Collective. The items that rank 0 joined from all ranks' items; raises if ranks are at different calls."""
    own = [Item("place", [[tree.number, tree.number]], place.encode()), *mine]

    def joined(parts: Sequence[list[Item]]) -> bytes:
        items = [*own, *(item for part in parts for item in part)]
        places = merged(of_kind("place", items))
        # items of different calls cannot be joined, and an error follows anyway
        rest = [item for item in items if item.kind != "place"] if len(places) == 1 else []
        return message_of([*places, *(join(rest) if rest else [])])

    try:
        answer: list[Item] = tree.round(items_of, joined, limit_s)
    except Late as error:
        waiting = sorted(set(range(tree.size)) - set(error.ranks))
        raise RankMissing(
            f"{name_ranks(error.ranks)} did not reach {place} within {limit_s:g} s; "
            f"{name_ranks(waiting)} {'is' if len(waiting) == 1 else 'are'} waiting. "
            "Is the call inside `if rank == 0`?",
            ranks=error.ranks,
            call=place,
        ) from None
    except RankMissing as error:
        if tree.lost is None and tree.left:
            raise _at_different_calls(
                {tree.number: place} | {rank: at for rank, (_, at) in tree.left.items()}
            ) from error
        raise RankMissing(f"{error}, while this rank was in {place}", call=place) from None
    places = of_kind("place", answer)
    if len(places) > 1:
        raise _at_different_calls(dict(enumerate(at.decode() for at in by_rank(places, tree.size))))
    return answer


def place_of(call: str) -> str:
    """The call with the user's line that makes it."""
    line = users_line()
    return (f"{call} ({line})" if line else call)[:_LONGEST_PLACE]


def script_frame() -> FrameType | None:
    """The frame of the script's module that this is called from; None where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame and not (
        frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__"
    ):
        frame = frame.f_back
    return frame


def left_at(script: FrameType | None) -> str:
    """Where `raise SystemExit` ended this frame; "" if the frame ended with its last line."""
    if script is None or opname[script.f_code.co_code[script.f_lasti]].startswith("RETURN"):
        return ""
    return f"{LEFT} {Frame(script.f_code.co_filename, script.f_lineno, '').place}"


def users_line() -> str:
    """File and line of the nearest frame of the user's code, empty where the script has ended."""
    frame = users_frame(stack_of(sys._getframe(1)))
    return frame.place if frame else ""


def _at_different_calls(places: Mapping[int, str]) -> RanksDiffer:
    ranks_at: dict[str, list[int]] = {}
    for rank, place in places.items():
        ranks_at.setdefault(place, []).append(rank)
    groups = sorted(ranks_at.items(), key=lambda item: len(item[1]))
    parts = [f"{name_ranks(ranks)} at {place}" for place, ranks in groups]
    fewest = len(groups[0][1])
    return RanksDiffer(
        f"ranks are at different calls: {', '.join(parts)}; "
        "every rank has to make the same calls in the same order",
        ranks=[rank for _, ranks in groups if len(ranks) == fewest for rank in ranks],
    )
