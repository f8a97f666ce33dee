"""Values as bytes: numbers come back exactly, whatever their kind, and are added without rounding on the way."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch

import samestep
from samestep import RanksDiffer, UsageError
from samestep.train import sums
from samestep.train.group.census import pack, unpack

NUMBERS = [
    0,
    1,
    -3,
    2**80,
    True,
    0.5,
    -0.1,
    5e-324,
    1.7976931348623157e308,
    1e16,
    np.float32(0.1),
    np.int64(7),
]


def total(*terms):
    added = pack([[sums.number(terms[0])], []], [])
    for term in terms[1:]:
        added = sums.add(added, pack([[sums.number(term)], []], []))
    ((found,), _), _ = unpack(added)
    return sums.value_of(found)


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
def test_a_number_is_its_own_sum(value):
    assert total(value) == value
    assert total(value, None) == value
    assert isinstance(total(value), int) == isinstance(value, int | np.integer)


def test_a_sum_is_the_float_nearest_to_the_exact_one():
    terms = [0.1, 1e16, -1e16, 0.2, 5e-324, 3]
    assert total(*terms) == float(sum(map(Fraction, terms)))
    assert isinstance(total(1.0, 1), float)
    assert total(2**70, 1) == 2**70 + 1


def test_a_sum_that_no_float_holds_is_infinite_by_its_sign():
    assert total(1.7e308, 1.7e308) == math.inf
    assert total(-1.7e308, -1.7e308) == -math.inf
    assert total(1.0, math.inf) == math.inf
    assert math.isnan(total(math.inf, -math.inf))
    assert math.isnan(total(math.nan, 1))


def test_arrays_are_added_by_their_kind_and_one_without_bytes_is_no_term():
    def packed(*arrays):
        return pack([[], ["f8", "i8"]], arrays)

    term = np.array([0.5, 2.0]).tobytes(), np.array([2**60, 1]).tobytes()
    _, (floats, integers) = unpack(sums.add(packed(*term), packed(*term)))
    assert np.frombuffer(floats).tolist() == [1.0, 4.0]
    assert np.frombuffer(integers, "i8").tolist() == [2**61, 2]
    for left, right in ((term, (b"", b"")), ((b"", b""), term)):
        assert tuple(unpack(sums.add(packed(*left), packed(*right)))[1]) == term
    assert unpack(sums.add(packed(b"", b""), packed(b"", b"")))[1] == [b"", b""]


def test_a_message_keeps_what_looks_like_its_own_marks():
    arrays = [b"\n[1]\n", b"", b"x" * 70_000]
    assert unpack(pack({"a\n": [1]}, arrays)) == ({"a\n": [1]}, arrays)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -2.5, math.inf, "text", b"raw\n", 1 + 2j, [], (), [1, (2, "x")], {1, 2}, {"a": {(1, 2): b""}},
        [["list", 1], ["bytes", "00"]],
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_in_a_list_comes_back_as_it_was(value):
    found = sums.read(sums.written(value))
    assert (found, type(found)) == (value, type(value))


def test_a_value_that_cannot_be_sent_is_named_by_its_type():
    assert sums.written([np.float64(0.5), np.bool_(True)]) == ["list", 0.5, True]
    with pytest.raises(
        TypeError, match=r"^a function; use numbers, text, arrays and lists, tuples or dicts of them$"
    ):
        sums.written([lambda: None])


@pytest.mark.sizes(2, 3)
def test_dicts_of_numbers_are_added_by_key_and_others_and_means_are_named(world):
    cases = (
        [{"a": 1, "b": 2}, {"b": 2, "a": 1}],
        [{"a": 1}, {"b": 2.5}],
        [Counter(), Counter(b=1)],
        [{}, {3: 1}],
    )
    for value in cases:
        total, others = samestep.sum(value[min(world.rank, 1)]), world.size - 1
        expected = {key: value[0].get(key, 0) + others * value[1].get(key, 0) for key in value[0] | value[1]}
        assert (list(total.items()), type(total)) == (list(expected.items()), type(value[0]))
        with pytest.raises(RanksDiffer, match=r"on rank 0 and .* on rank 1"):
            samestep.mean(dict.fromkeys(value[min(world.rank, 1)], 1.0))
    with pytest.raises(RanksDiffer, match=r"got 1 value on rank 0 and 2 values on rank 1"):
        samestep.sum({"a": torch.ones(1)} if world.rank == 0 else {"a": torch.ones(1), "b": torch.ones(1)})
    with pytest.raises(UsageError, match=r"samestep.sum cannot send this key to other ranks: an object"):
        samestep.sum({object(): 1} if world.rank == 0 else {2: 1})
