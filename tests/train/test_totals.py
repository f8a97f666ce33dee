"""Totals are everyone's: the same value on all ranks, exact whatever each rank brought."""

import math
from collections import OrderedDict, defaultdict
from contextlib import redirect_stderr
from copy import deepcopy
from functools import partial
from io import StringIO

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import samestep
from samestep import RanksDiffer, UsageError
from samestep.train.group.world import joined

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


@pytest.mark.sizes(1)
def test_one_process_gets_the_very_object_it_gave(world):
    for value in (torch.ones(3), {"a": torch.ones(1), "b": {}}):
        assert samestep.sum(value) is samestep.mean(value) is samestep.gather(value) is value
    assert (samestep.sum(5), samestep.mean(True), samestep.gather([1, "text"])) == (5, True, [1, "text"])


def test_integers_are_added_without_a_limit(world):
    total = samestep.sum(2**70 + world.rank)
    assert total == world.size * 2**70 + sum(range(world.size))
    assert type(total) is int


def test_numbers_that_cancel_are_added_exactly(world):
    ones = [1e16, 1.0, -1e16]
    mine = math.fsum(ones[world.rank :: world.size]) if world.size < 3 else ones[world.rank]
    assert samestep.sum(mine) == 1.0


@pytest.mark.sizes(2, 3)
def test_an_integer_of_one_rank_and_a_float_of_another_are_added(world):
    """A rank that had no samples still holds the 0 it began with."""
    total = samestep.sum(0 if world.rank else 0.5)
    assert total == 0.5
    assert samestep.mean(0 if world.rank else 1.0, weight=1.0) == pytest.approx(1 / world.size)


@pytest.mark.sizes(2, 3)
def test_what_is_not_finite_comes_out_as_in_a_serial_sum(world):
    assert samestep.sum(math.inf) == math.inf
    assert math.isnan(samestep.sum(math.inf if world.rank else -math.inf))
    assert math.isnan(samestep.sum(math.nan))
    assert samestep.sum(1.7e308) == math.inf
    assert samestep.mean(math.inf) == math.inf
    assert math.isnan(samestep.mean(torch.tensor(math.nan)).item())


def test_every_type_of_tensor_is_added_and_stays_what_it_was(world):
    for dtype in [*FLOATS, *INTEGERS, torch.complex64, torch.complex128]:
        for shape in [(), (3,), (0,), (2, 0), (2, 3)]:
            value = torch.full(shape, world.rank + 1, dtype=dtype)
            total = samestep.sum(value)
            assert total.dtype == dtype
            assert total.shape == value.shape
            assert torch.equal(total, torch.full(shape, sum(range(world.size + 1)), dtype=dtype))


def test_large_tensors_are_added_like_small_ones(world):
    for dtype in [*FLOATS, *INTEGERS, torch.complex64]:
        value = torch.full((70_000, 2), world.rank + 1, dtype=dtype)
        before = value.clone()
        total = samestep.sum(value)
        assert total.dtype == dtype
        assert torch.equal(total, torch.full_like(value, sum(range(world.size + 1))))
        assert torch.equal(value, before)


def test_totals_of_tensors_with_any_strides_have_the_values_they_show(world):
    for height in (3, 300):
        value = torch.arange(height * 400.0).reshape(height, 400).t()
        assert torch.equal(samestep.sum(value), value * world.size)
        wide = torch.arange(400.0).expand(height, 400)
        assert torch.equal(samestep.sum(wide), wide * world.size)
        assert samestep.gather(value).shape == (400 * world.size, height)
    twisted = torch.tensor([1 + 2j, 3j]).conj()
    assert torch.equal(samestep.sum(twisted), twisted * world.size)


@pytest.mark.sizes(2, 3)
def test_a_sum_that_does_not_fit_its_type_is_an_error_and_no_wrong_number(world):
    for shape in [(3,), (200_000,)]:
        with pytest.raises(UsageError, match=r"^the total of samestep.sum does not fit into uint8\[\d+\];"):
            samestep.sum(torch.full(shape, 200, dtype=torch.uint8))
        with pytest.raises(UsageError, match="does not fit into bool"):
            samestep.sum(torch.ones(shape, dtype=torch.bool))


def test_half_precision_is_added_in_higher_precision(world):
    for shape in [(4,), (70_000,)]:
        for dtype in (torch.float16, torch.bfloat16):
            value = torch.full(shape, 256.0 if world.rank == 0 else 1.0, dtype=dtype)
            expected = torch.tensor(256.0 + world.size - 1).to(dtype)
            assert torch.equal(samestep.sum(value), expected.expand(shape))


def test_what_needs_no_gradient_gets_none(world):
    ones = torch.ones(3, requires_grad=True)
    for call in (samestep.sum, samestep.mean, samestep.gather):
        assert not call(ones.detach()).requires_grad
        assert call({"a": ones})["a"].requires_grad
        if world.size > 1:
            with torch.no_grad():
                assert not call(ones).requires_grad


@pytest.mark.parametrize("length", [3, 70_000])
def test_a_gradient_comes_back_from_all_ranks(world, length):
    """Of a loss that every rank has: outside of a loop its own counts as much as any other."""
    own = torch.full((length,), 2.0 + world.rank, requires_grad=True)
    mean = partial(samestep.mean, weight=1)
    for call, part in ((samestep.sum, 1.0), (mean, 1.0 / world.size), (samestep.gather, 1.0)):
        (found,) = torch.autograd.grad(call(own).square().sum(), own)
        made = call(own).detach()
        rows = (
            slice(world.rank * length, (world.rank + 1) * length) if call is samestep.gather else slice(None)
        )
        assert torch.allclose(found, world.size * part * 2 * made[rows])


def test_gradients_that_autograd_returns_become_those_of_the_whole_batch(world):
    torch.manual_seed(0)
    plain = torch.nn.Linear(2, 1)
    model = samestep.replicate(deepcopy(plain))
    whole = torch.arange(10.0).reshape(5, 2)
    (expected,) = torch.autograd.grad(plain(whole).square().mean(), [plain.weight])
    for (x,) in samestep.loader(TensorDataset(whole), 5):
        (own,) = torch.autograd.grad(model(x).square().mean(), [model.weight])
        assert torch.allclose(samestep.mean(own), expected)
        assert world.size == 1 or not torch.allclose(own, expected)


def test_dicts_are_added_key_by_key_and_keep_their_type(world):
    value = {"loss": 1.5, "counts": torch.tensor([1, 2]), "more": {"seen": 3}, "large": torch.ones(70_000)}
    total = samestep.sum(value)
    assert list(total) == list(value)
    assert total["loss"] == 1.5 * world.size
    assert total["counts"].tolist() == [world.size, 2 * world.size]
    assert total["more"] == {"seen": 3 * world.size}
    assert torch.equal(total["large"], torch.full((70_000,), float(world.size)))
    assert type(samestep.sum(OrderedDict(a=1))) is OrderedDict
    missing = samestep.sum(defaultdict(int, a=1))
    assert type(missing) is defaultdict
    assert missing["b"] == 0
    assert samestep.sum({}) == {}


@pytest.mark.sizes(2, 3)
def test_other_kinds_and_shapes_are_named_on_all_ranks(world):
    cases = [
        (torch.ones(3), torch.ones(4), r"float32\[3\]", r"float32\[4\]"),
        (torch.ones(3), torch.ones(3).double(), r"float32\[3\]", r"float64\[3\]"),
        (torch.ones(1), 1.0, r"float32\[1\]", "a number"),
        (torch.ones(70_000), torch.ones(70_001), r"float32\[70000\]", r"float32\[70001\]"),
        (torch.ones(70_000), torch.ones(3), r"float32\[70000\]", r"float32\[3\]"),
        (torch.ones(70_000), torch.ones(70_000).double(), r"float32\[70000\]", r"float64\[70000\]"),
    ]
    for first, second, kind, other_kind in cases:
        for call in (samestep.sum, samestep.mean):
            with pytest.raises(
                RanksDiffer, match=rf"{kind} on rank 0 and {other_kind} on rank 1; bring the same kind"
            ):
                call(second if world.rank == 1 else first)
    with pytest.raises(
        RanksDiffer, match=r"gather .*float32\[n, 2\] on rank 0 and float32\[n, 3\] on rank 1"
    ):
        samestep.gather(torch.ones(2, 3 if world.rank == 1 else 2))
    assert samestep.sum(1) == world.size


def test_a_mean_counts_samples_as_it_is_told(world):
    weight = world.rank + 1
    whole = sum(range(world.size + 1))
    expected = sum(rank * (rank + 1) for rank in range(world.size)) / whole
    assert samestep.mean(float(world.rank), weight=weight) == pytest.approx(expected, rel=1e-15)
    for length in (2, 70_000):
        for dtype, precision in ((torch.float64, 1e-15), (torch.float32, 1e-6), (torch.bfloat16, 4e-3)):
            value = torch.full((length,), float(world.rank), dtype=dtype)
            mean = samestep.mean(value, weight=weight)
            assert mean.dtype == dtype
            assert (mean.double() - expected).abs().max() <= precision * expected


@pytest.mark.sizes(2, 3)
def test_a_rank_with_no_samples_does_not_spoil_a_mean(world):
    value = math.nan if world.rank else 2.0
    weight = 0 if world.rank else 5
    assert samestep.mean(value, weight=weight) == 2.0
    for length in (1, 70_000):
        assert torch.equal(
            samestep.mean(torch.full((length,), value), weight=weight), torch.full((length,), 2.0)
        )


@pytest.mark.sizes(2, 3)
def test_a_mean_over_nothing_is_nan(world):
    assert math.isnan(samestep.mean(1.0, weight=0))
    for length in (1, 70_000):
        assert samestep.mean(torch.ones(length), weight=0).isnan().all()


def test_a_mean_of_whole_numbers_is_refused(world):
    with pytest.raises(UsageError, match=r"samestep.mean cannot return int64\[2\], which holds integers"):
        samestep.mean(torch.tensor([1, 2]))


def test_a_mean_in_a_loop_counts_the_batch_and_after_it_the_pass(world):
    data = TensorDataset(torch.arange(11.0, dtype=torch.float64))
    sums = []
    for (x,) in samestep.loader(data, 4):
        mean = samestep.mean(x.mean())
        sums.append(mean.item())
        total = samestep.sum(x.sum())
        assert total.item() in (6.0, 22.0, 27.0, 12.0, 15.0)
    mine = [x for (x,) in samestep.loader(data, 4)]
    own = torch.cat(mine).mean() if mine else torch.tensor(math.nan).double()
    assert samestep.mean(own).item() == pytest.approx(5.0, rel=1e-15)
    assert sums[0] == pytest.approx(1.5)


def test_gather_joins_rows_and_lists_in_the_order_of_ranks(world):
    rows = torch.full((world.rank, 2), world.rank)
    joined = samestep.gather(rows)
    assert joined[:, 0].tolist() == [rank for rank in range(world.size) for _ in range(rank)]
    for _ in samestep.loader(TensorDataset(torch.empty(0)), 3):
        pass
    assert samestep.gather(torch.empty(0, 2)).shape == (0, 2)
    assert samestep.gather([world.rank] * 2) == [rank for rank in range(world.size) for _ in range(2)]
    assert samestep.gather({"name": [f"r{world.rank}"], "x": torch.tensor([world.rank])})[
        "x"
    ].tolist() == list(range(world.size))
    assert samestep.gather(torch.ones(70_000, 2)).shape == (70_000 * world.size, 2)
    for dtype in [*FLOATS, *INTEGERS, torch.bool, torch.complex64]:
        assert samestep.gather(torch.ones(2, dtype=dtype)).dtype == dtype


def test_gather_joins_lists_of_arrays(world):
    mine = [np.full((2, world.rank), 0.5, np.float32), np.array(["of", "rank"])]
    found = samestep.gather(mine)
    assert len(found) == 2 * world.size
    for rank in range(world.size):
        numbers, words = found[2 * rank : 2 * rank + 2]
        assert (numbers.shape, numbers.dtype) == ((2, rank), np.float32)
        assert (numbers == 0.5).all()
        assert words.tolist() == ["of", "rank"]
    found[0][:] = 1  # as one's own


@pytest.mark.sizes(2, 3)
def test_an_evaluation_in_a_step_of_fewer_samples_than_ranks_counts_every_sample(world):
    model = samestep.replicate(torch.nn.Linear(1, 1))
    train = samestep.loader(TensorDataset(torch.ones(5, 1)), 4)
    test = samestep.loader(TensorDataset(torch.ones(7, 1)), 7)
    lengths, counts = [], []
    for (x,) in train:
        model(x).sum().backward()
        lengths.append(samestep.sum(len(x)))
        with torch.no_grad():
            counts.append(samestep.sum(sum(len(y) for (y,) in test)))
    assert lengths == [4, 1]
    assert counts == [7, 7]


def test_gather_keeps_what_is_in_a_list_as_it_is(world):
    pairs = [(f"image-{world.rank}", 0.5), None, {1: (2, 3)}, b"raw", math.inf, 2**80]
    assert samestep.gather(pairs)[: len(pairs)] == [
        ("image-0", 0.5),
        None,
        {1: (2, 3)},
        b"raw",
        math.inf,
        2**80,
    ]
    assert samestep.gather((world.rank,)) == tuple(range(world.size))


def test_numpy_arrays_are_totalled_as_tensors_are(world):
    scores = np.full((world.rank + 1, 2), world.rank, dtype=np.float32)
    joined, counts = samestep.gather(scores), samestep.sum({"seen": np.array([1, world.rank])})
    assert isinstance(joined, np.ndarray)
    assert joined.dtype == np.float32
    assert joined[:, 1].tolist() == [rank for rank in range(world.size) for _ in range(rank + 1)]
    assert counts["seen"].tolist() == [world.size, sum(range(world.size))]


def test_what_cannot_be_gathered_or_added_says_what_can_also_to_one_process(world):
    with pytest.raises(
        UsageError, match=r"gather joins tensors with a first dimension and lists, not a number;"
    ):
        samestep.gather(1.0)
    with pytest.raises(UsageError, match=r"not float32\[\]; use x\[None\]"):
        samestep.gather(torch.tensor(1.0))
    with pytest.raises(UsageError, match="not Normal; gather the tensors that it holds"):
        samestep.gather(torch.distributions.Normal(torch.zeros(2), torch.ones(2)))
    with pytest.raises(
        UsageError, match=r"samestep.sum adds tensors and numbers, not list; gather collects lists"
    ):
        samestep.sum([1, 2])
    for unsendable, why in (
        ([lambda: None], "cannot send this"),
        ([torch.ones(1)], "got a list of tensors; join"),
    ):
        if world.size > 1:
            with pytest.raises(UsageError, match=f"samestep.gather {why}"):
                samestep.gather(unsendable)
    assert samestep.sum(1) == world.size


def test_all_ranks_get_the_same_bits(world):
    torch.manual_seed(world.rank)
    for length in (10, 70_000):
        for call in (samestep.sum, samestep.mean):
            total = call(torch.rand(length))
            every = samestep.gather(total[None])
            assert all(torch.equal(value, every[0]) for value in every)


@pytest.mark.sizes(2, 3)
def test_another_call_is_named_at_once_with_its_lines(world):
    with pytest.raises(
        RanksDiffer, match=r"ranks are at different calls: rank \d.* at samestep\.\w+ \(test_totals"
    ):
        samestep.sum(1) if world.rank == 0 else samestep.gather([1])
    assert samestep.sum(1) == world.size


def test_what_was_collected_over_a_pass_is_gathered_in_the_order_of_samples(world):
    """Also inside of a training loop, and with a last batch that has fewer samples than ranks."""
    test = samestep.loader(TensorDataset(torch.arange(10.0)), 3)
    train = samestep.loader(TensorDataset(torch.arange(12.0)), 6)
    for loop in ([None], train):
        for _ in loop:
            with torch.no_grad():
                seen = [rows for (rows,) in test]
            collected = torch.cat(seen).requires_grad_() if seen else torch.empty(0, requires_grad=True)
            whole = samestep.gather(collected)
            assert whole.tolist() == samestep.gather(collected.tolist()) == list(range(10))
            of_batches = samestep.gather([rows.numpy() for rows in seen])  # a rank without a sample has none
            assert np.concatenate(of_batches).tolist() == list(range(10))
            if loop is not train:  # a loss that every rank has
                (gradient,) = torch.autograd.grad((whole * torch.arange(10.0)).sum(), collected)
                assert torch.equal(gradient, world.size * collected)
    for _ in samestep.loader(TensorDataset(torch.empty(0)), 3):
        pass
    assert samestep.gather(torch.empty(0, 2)).shape == (0, 2)
    assert samestep.gather([world.rank] * 2) == [rank for rank in range(world.size) for _ in range(2)]


@pytest.mark.sizes(2, 3)
def test_what_is_of_the_batch_at_hand_stays_in_its_order_after_an_evaluation(world):
    test = samestep.loader(TensorDataset(torch.arange(6.0)), 3)
    for (rows,) in samestep.loader(TensorDataset(torch.arange(6.0)), 6):
        with torch.no_grad():
            list(test)
        assert samestep.gather(rows).tolist() == list(range(6))


@pytest.mark.sizes(2)
@pytest.mark.parametrize(("length", "said"), [(5, True), (7, False)])
def test_a_mean_that_may_be_of_another_loader_is_said_once_with_the_line_to_write(world, length, said):
    joined()._said.clear()
    test = samestep.loader(TensorDataset(torch.arange(float(length))), length)
    line = "if the value comes from that loader, write samestep.mean(value, weight=n)"
    model, counts = samestep.replicate(torch.nn.Linear(1, 1)), []
    with redirect_stderr(StringIO()) as complained:
        for (rows,) in samestep.loader(TensorDataset(torch.arange(14.0)), 7):
            samestep.mean(rows.mean())
            (held,) = next(iter(test))
            samestep.mean(rows.mean().requires_grad_())
            loss = model(rows[:, None]).mean()
            loss.backward()
            samestep.mean({"loss": loss.item()})
            counts.append(complained.getvalue().count(line))
            samestep.mean(held.mean())
    assert counts[0] == 0
    assert complained.getvalue().count(line) == (said and world.rank == 0)
