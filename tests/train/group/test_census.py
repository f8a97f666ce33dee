"""Totals are the same bits however ranks are spread over a tree, and what all bring alike travels once."""

import pytest

from samestep.rendezvous.position import Position, positions
from samestep.train.group.census import Item, added, by_rank, items_of, merged, message_of


def placed(kind: str, size: int) -> list[Position]:
    hellos = layout(kind, size)
    found = positions(dict(enumerate(hellos)), {hello["machine"]: {} for hello in hellos}, "")
    return [found[rank] for rank in range(size)]


def layout(kind: str, size: int) -> list[dict[str, object]]:
    machine = {
        "one machine": lambda rank: 0,
        "a rank each": lambda rank: rank,
        "blocks of 8": lambda rank: rank // 8,
        "blocks of 6": lambda rank: rank // 6,
        "uneven": lambda rank: (rank > 2) + (rank > 3) + (rank > 9),
        "cyclic": lambda rank: rank % 4,
    }[kind]
    return [{"machine": machine(rank), "places": [], "facts": {}} for rank in range(size)]


LAYOUTS = ["one machine", "a rank each", "blocks of 8", "blocks of 6", "uneven", "cyclic"]
SIZES = [*range(2, 20), 31, 32, 33, 64, 100, 127, 128]


def through(tree: list, values: list[bytes], add) -> bytes:
    """What the root of a tree makes of all values, each process adding its own and its children's."""

    def part(rank: int) -> dict[tuple[int, int], bytes]:
        blocks = {(0, rank): values[rank]}
        for child in tree[rank].children:
            blocks |= part(child)
        return added(blocks, len(values), add)

    (total,) = part(0).values()
    return total


@pytest.mark.parametrize("size", SIZES)
def test_every_layout_adds_in_the_same_order(size):
    values = [b"%d" % rank for rank in range(size)]
    totals = {through(placed(kind, size), values, lambda a, b: b"(%s+%s)" % (a, b)) for kind in LAYOUTS}
    assert len(totals) == 1
    (total,) = totals
    assert total.replace(b"(", b"").replace(b")", b"").split(b"+") == values
    depth = max(total[:at].count(b"(") - total[:at].count(b")") for at in range(len(total)))
    assert depth == (size - 1).bit_length()


@pytest.mark.parametrize("size", SIZES)
def test_each_process_has_few_links_and_all_are_reached(size):
    for kind in LAYOUTS:
        tree = placed(kind, size)
        bits = (size - 1).bit_length()
        for rank, position in enumerate(tree):
            assert (
                len(position.children)
                <= (position.local_size - 1).bit_length() + (position.nodes - 1).bit_length()
            )
            assert len(position.children) <= 2 * bits
            at, steps = rank, 0
            while at:
                at, steps = tree[at].path[0], steps + 1
            assert steps <= 2 * bits


def test_what_all_bring_alike_is_one_item_and_what_differs_is_each_ranks():
    alike = merged(Item("p", [[rank, rank]], b"same") for rank in (3, 0, 1, 2, 5))
    assert alike == [Item("p", [[0, 3], [5, 5]], b"same")]
    odd = merged([*alike, Item("p", [[4, 4]], b"odd"), Item("m", [[0, 0]], b"same")])
    assert by_rank([item for item in odd if item.kind == "p"], 6) == [b"same"] * 4 + [b"odd", b"same"]
    assert items_of(message_of(odd)) == odd
    size = 10_000
    whole = message_of(merged(Item("p", [[rank, rank]], bytes(100)) for rank in range(size)))
    assert len(whole) < 200
