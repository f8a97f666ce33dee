"""Sums by which tensors are compared: any flipped bit changes one, and close tensors have close ones."""

import struct

import pytest
import torch

from samestep.train.digest import bit_sums, digests

DTYPES = [torch.bool, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.float64]
PIECE = 1 << 20


def sums(*tensors):
    found = bit_sums(tensors)
    return list(struct.unpack(f"<{len(found) // 8}q", found))


def test_a_sum_is_that_of_the_bits_as_integers():
    assert sums(torch.tensor([1, 2, -5])) == [-2]
    assert sums(torch.tensor([200, 100], dtype=torch.uint8)) == [300]
    assert sums(torch.tensor([1.0, 2.0])) == [0x3F800000 + 0x40000000]
    assert sums(torch.tensor([True, True, False]), torch.tensor(1.0, dtype=torch.float16)) == [2, 0x3C00]
    assert sums(torch.tensor([1.0 + 2.0j])) == [0x3F800000 + 0x40000000]
    assert (bit_sums([]), sums(torch.empty(0))) == (b"", [0])


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype is not torch.bool], ids=str)
def test_any_flipped_bit_changes_the_sum(dtype):
    tensor = torch.arange(1, 9).to(dtype)
    raw = tensor.clone().view(torch.uint8)
    for at in range(0, len(raw), 3):
        raw[at] ^= 1 << at % 8
        assert sums(raw.view(dtype)) != sums(tensor)
        raw[at] ^= 1 << at % 8
    assert sums(raw.view(dtype)) == sums(tensor)


def test_views_and_tensors_with_a_gradient_are_summed_by_what_they_hold():
    rows = torch.arange(12.0).reshape(3, 4).requires_grad_()
    assert sums(rows.t()) == sums(rows) == sums(rows.detach().clone())
    assert sums(rows[:, ::2]) == sums(rows[:, ::2].contiguous())
    assert next(digests([rows.t()]))[2] == sums(rows)[0]


def test_a_norm_is_that_of_the_whole_tensor_also_over_several_pieces():
    tensor = torch.full((2 * PIECE + 3,), 2.0)
    tensor[0], tensor[-1] = 3.0, 5.0
    ((norm, along, bits),) = digests([tensor])
    assert norm == pytest.approx(float(tensor.double().norm()), rel=1e-12)
    assert bits == sums(tensor)[0]
    parts = [next(digests([part])) for part in tensor.split(PIECE)]
    assert along == pytest.approx(sum(part[1] for part in parts))
    assert bits == sum(part[2] for part in parts)


def test_a_projection_is_linear_and_its_direction_is_fixed():
    def along(tensor):
        return next(digests([tensor]))[1]

    signs = [along(torch.eye(64)[at]) for at in range(64)]
    assert {*signs} == {-1.0, 1.0}
    assert 16 < signs.count(1.0) < 48
    x = torch.randn(64)
    assert along(x) == pytest.approx(sum(float(a) * sign for a, sign in zip(x, signs, strict=True)), abs=1e-5)
    assert along(3 * x) == pytest.approx(3 * along(x), abs=1e-5)
    # the direction begins anew with each piece
    late = torch.zeros(PIECE + 64)
    late[PIECE + 7] = 1.0
    assert along(late) == signs[7]


def test_digests_are_also_those_of_empty_and_of_complex_tensors():
    assert list(digests([torch.empty(0)])) == [(0.0, 0.0, 0)]
    assert next(digests([torch.tensor([3.0 + 4.0j])]))[0] == 5.0
