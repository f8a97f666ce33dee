"""Random streams that are set, kept and brought back: draws go on as if nothing had been between."""

import random

import numpy as np
import pytest
import torch

from samestep.train import streams


@pytest.fixture(autouse=True)
def _kept():
    before = streams.capture()
    yield
    streams.restore(before)


def draws():
    """Of each stream, also what it keeps of a pair of normal draws."""
    own = [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.standard_normal())]
    return [torch.rand(1).item(), *own]


def test_a_seed_is_a_function_of_the_facts_in_their_order():
    assert streams.seed_of("a", 1) == 6431086039603022688
    assert 0 <= streams.seed_of() < 1 << 63
    assert len({streams.seed_of(*facts) for facts in ((1, 2), (2, 1), (12,), (1, 2, 3))}) == 4


def test_a_seed_is_drawn_as_torchs_loader_draws_it():
    torch.manual_seed(5)
    expected = torch.empty((), dtype=torch.int64).random_().item()
    torch.manual_seed(5)
    assert streams.draw_seed() == expected


def test_draws_are_a_function_of_the_facts():
    found = []
    for facts in ((1, "x"), (1, "y"), (1, "x")):
        streams.draw_as(*facts)
        found.append(draws())
    assert found[0] == found[2]
    assert not any(value == other for value, other in zip(*found[:2], strict=True))


def test_what_was_captured_goes_on_where_it_was():
    draws()
    kept, expected = streams.capture(), [draws() for _ in range(3)]
    draws()
    streams.restore(kept)
    assert [draws() for _ in range(3)] == expected


@pytest.mark.parametrize("names", [["torch"], ["python"], ["numpy"], ["torch", "numpy"], []], ids=str)
def test_only_the_named_streams_are_brought_back(names):
    kept, expected, after = streams.capture(), draws(), draws()
    streams.restore(streams.capture(), names)
    streams.restore(kept, names)
    of = ["torch", "python", "python", "numpy", "numpy"]
    third = draws()
    assert [value == back for value, back in zip(third, expected, strict=True)] == [
        name in names for name in of
    ]
    assert not any(value == other for value, other in zip(third, after, strict=True))


def test_what_is_drawn_inside_does_not_count():
    kept, expected = streams.capture(), draws()
    streams.restore(kept)
    with streams.streams_kept():
        draws()
    assert draws() == expected


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(1),
        random.random,
        lambda: random.gauss(0, 1),
        np.random.rand,
        np.random.standard_normal,
    ],
)
def test_every_draw_moves_the_digest_and_is_named(draw):
    before, kept = streams.digest(), streams.capture()
    assert (streams.digest(), len(before)) == (before, 8)
    draw()
    once, later = streams.digest(), streams.capture()
    draw()
    assert len({before, once, streams.digest()}) == 3
    (name,) = streams.different(kept, later)
    assert name in ("torch", "python", "numpy")
    streams.restore(kept)
    assert streams.digest() == before
    assert streams.different(kept, streams.capture()) == []
