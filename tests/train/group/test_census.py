"""Totals are the same bits however ranks are spread over a tree, and what all bring alike travels once."""

import random
import struct
from fractions import Fraction

import pytest

from samestep.rendezvous.position import positions
from samestep.train import sums
from samestep.train.group.census import Item, added, by_rank, merged, packed, unpacked


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
    totals = {
        through(positions(layout(kind, size), ""), values, lambda a, b: b"(%s+%s)" % (a, b))
        for kind in LAYOUTS
    }
    assert len(totals) == 1
    (total,) = totals
    assert total.replace(b"(", b"").replace(b")", b"").split(b"+") == values
    depth = max(total[:at].count(b"(") - total[:at].count(b")") for at in range(len(total)))
    assert depth == (size - 1).bit_length()


@pytest.mark.parametrize("size", SIZES)
def test_each_process_has_few_links_and_all_are_reached(size):
    for kind in LAYOUTS:
        tree = positions(layout(kind, size), "")
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


def test_a_sum_of_numbers_is_exact_in_any_order():
    numbers = [1e308, 1e308, -1e308, 1e-300, 0.1, -0.1, 3, 1 << 70, -1e308, 5e-324]
    exact = sum(map(Fraction, numbers))
    for seed in range(20):
        terms = random.Random(seed).sample(numbers, len(numbers))
        packs = [sums.pack(sums.Sums([sums.number(term)], [])) for term in terms]
        total = packs[0]
        for one in packs[1:]:
            total = sums.add(total, one)
        assert sums.value_of(sums.unpack(total).numbers[0]) == float(exact)


def test_what_is_not_finite_stays_so():
    def total(*terms: float) -> float:
        packs = [sums.pack(sums.Sums([sums.number(term)], [])) for term in terms]
        return sums.value_of(sums.unpack(sums.add(*packs)).numbers[0])

    inf = float("inf")
    assert (total(inf, 1), total(1e308, 1e308), total(-1e308, -1e308)) == (inf, inf, -inf)
    assert total(inf, -inf) != total(inf, -inf)
    assert (total(1, 2), type(total(1, 2)), total(1, 0.5)) == (3, int, 1.5)


def test_what_all_bring_alike_is_one_item_and_what_differs_is_each_ranks():
    alike = merged(Item("p", [[rank, rank]], b"same") for rank in (3, 0, 1, 2, 5))
    assert alike == [Item("p", [[0, 3], [5, 5]], b"same")]
    odd = merged([*alike, Item("p", [[4, 4]], b"odd"), Item("m", [[0, 0]], b"same")])
    assert by_rank([item for item in odd if item.kind == "p"], 6) == [b"same"] * 4 + [b"odd", b"same"]
    assert unpacked(packed(odd)) == odd
    size = 10_000
    whole = packed(merged(Item("p", [[rank, rank]], bytes(100)) for rank in range(size)))
    assert len(whole) < 200


def test_arrays_are_added_in_pairs_and_a_rank_that_does_not_count_adds_nothing():
    def packed_of(*values: float) -> bytes:
        return sums.pack(sums.Sums([], [("f8", struct.pack(f"<{len(values)}d", *values))]))

    nothing = sums.pack(sums.Sums([], [("f8", b"")]))
    both = sums.add(sums.add(packed_of(1.5, float("nan")), nothing), packed_of(2.0, 1.0))
    ((kind, data),) = sums.unpack(both).arrays
    assert (kind, struct.unpack("<2d", data)[0]) == ("f8", 3.5)
    assert sums.unpack(sums.add(nothing, nothing)).arrays == [("f8", b"")]
