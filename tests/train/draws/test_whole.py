"""Kernels that draw by themselves, called on the whole batch's size; these stand for CUDA's, which no CPU has."""

from contextlib import nullcontext

import pytest
import torch

from samestep.train.batch.parts import Packed, Part
from samestep.train.batch.views import has_gaps
from samestep.train.draws.whole import WholeCalls
from samestep.train.passes import Rows

GAPS = {
    "rows": (lambda x: x, 0, False),
    "a token of each": (lambda x: x[:, 0], 0, True),
    "a token of each, time first": (lambda x: x.transpose(0, 1)[0], 0, True),
    "channels last": (lambda x: x.permute(0, 2, 1), 0, False),
    "time first": (lambda x: x.transpose(0, 1).contiguous(), 1, False),
    "half of the channels": (lambda x: x[..., :2], 0, True),
}
ATTENTION, RECURRENT = "_scaled_dot_product_efficient_attention", "_cudnn_rnn"
ROWS = Rows(3, 2, 8)
MINE = slice(2, 5)


def attended(query, key, value, bias, seed):
    """Attention whose dropout depends on the places of the samples, as the fused kernels' does."""
    kept = torch.rand(query.shape[0], 4, 5, 5, generator=torch.Generator().manual_seed(seed)) > 0.3
    scores = query @ key.transpose(-1, -2) + (0 if bias is None else bias)
    return (scores.softmax(-1) * kept / 0.7) @ value, scores.logsumexp(-1)


def attention(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None
):
    assert attn_bias is None or attn_bias.stride(-2) % 16 == 0
    return *attended(query, key, value, attn_bias, 7), torch.tensor(7), torch.tensor(0)


def attention_backward(grad_out_, query, key, value, attn_bias, out, logsumexp, seed, *rest, scale=None):
    assert logsumexp.shape[0] == out.shape[0] == query.shape[0]
    inputs = [item.detach().requires_grad_() for item in (query, key, value)]
    bias = None if attn_bias is None else attn_bias.detach().requires_grad_()
    with torch.enable_grad():
        result = attended(*inputs, bias, int(seed))[0]
    asked = [item for item in (*inputs, bias) if item is not None]
    gradients = iter(torch.autograd.grad(result, asked, grad_out_))
    return tuple(None if item is None else next(gradients) for item in (*inputs, bias))


def calls(part, packed=None, said=None):
    return WholeCalls(lambda *_: part, lambda: packed, nullcontext, lambda *words: said.append(words))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("times", [1, 2], ids=["a row for each sample", "two windows for each sample"])
def test_attention_and_its_backward_have_the_whole_batchs_mask(with_bias, times):
    torch.manual_seed(0)
    query, key, value, slope = torch.randn(4, 8 * times, 5, 4, 3).transpose(2, 3).unbind()
    bias = torch.nn.functional.pad(torch.randn(8 * times, 4, 5, 5), (0, 11))[..., :5] if with_bias else None
    rest = (None, 0.3, (True,) * 4)
    whole = attention(query, key, value, bias, True, 0.3)
    expected = attention_backward(slope, query, key, value, bias, *whole, *rest[1:])
    mine = slice(2 * times, 5 * times)
    own = [item if item is None else item[mine] for item in (query, key, value, bias)]
    if with_bias:  # its rows begin where the whole's do, and a kernel takes no others
        own[3] = own[3].contiguous()
    tested = calls(Part(0, ROWS, times))
    output, logsumexp, *drawn = tested.forward(ATTENTION, attention, *own, True, 0.3)
    torch.testing.assert_close(output, whole[0][mine])
    torch.testing.assert_close(logsumexp, whole[1][mine])
    found = tested.backward(
        ATTENTION, attention_backward, slope[mine], *own, output, logsumexp, *drawn, *rest[1:]
    )
    for gradient, of_whole in zip(found, expected, strict=True):
        assert (gradient is None) == (of_whole is None)
        if gradient is not None:
            torch.testing.assert_close(gradient, of_whole[mine])


def test_saved_tensors_that_were_copied_are_said_and_calls_without_dropout_stay_as_they_are():
    said: list[tuple[str, str]] = []
    tested = calls(Part(0, ROWS), said=said)
    own = torch.randn(3, 3, 4, 5, 3).unbind()
    output, logsumexp, *drawn = tested.forward(ATTENTION, attention, *own, None, True, 0.3)
    backward = (ATTENTION, attention_backward, output, *own, None, output)
    tested.backward(*backward, logsumexp.clone(), *drawn, 0.3, (True,) * 4)
    assert [name for name, why in said if "copied" in why] == [ATTENTION]
    kept = tested.forward(ATTENTION, attention, *own, None, True, 0.0)
    torch.testing.assert_close(kept[0], attention(*own, None, True)[0])
    tested.backward(*backward, kept[1], *drawn, 0.0, (True,) * 4)
    assert len(said) == 1


def recurrent(
    input, weight, weight_stride0, weight_buf, hx, cx, mode, hidden, proj, layers, batch_first, *rest
):
    _, _, _, batch_sizes, _ = rest
    assert not batch_sizes or sum(batch_sizes) == len(input)
    mask = torch.rand(input.shape, generator=torch.Generator().manual_seed(7)).round()
    return input * mask, hx * 2, torch.empty(0), torch.zeros(9), torch.zeros(0)


def recurrent_backward(input, weight, stride, buffer, hx, cx, output, grad_output, grad_hy, grad_cy, *rest):
    mask = torch.rand(input.shape, generator=torch.Generator().manual_seed(7)).round()
    assert output.shape == grad_output.shape == input.shape
    return grad_output * mask, grad_hy * 2, torch.empty(0), [torch.ones(2)]


def options(batch_first=False, batch_sizes=()):
    return (2, 3, 0, 2, batch_first, 0.3, True, False, list(batch_sizes), torch.zeros(0))


@pytest.mark.parametrize("batch_first", [False, True])
def test_recurrent_layers_have_the_whole_batchs_masks(batch_first):
    input, state = torch.randn(8, 8, 3), torch.randn(2, 8, 3)
    at = (MINE,) if batch_first else (slice(None), MINE)
    whole = recurrent(input, [], 4, None, state, None, *options(batch_first))
    # the samples' dimension is the kernel's, also where another has as many rows
    tested = calls(Part(int(batch_first), ROWS))
    own, of_state = input[at], state[:, MINE]
    output, last, *others = tested.forward(
        RECURRENT, recurrent, own, [], 4, None, of_state, None, *options(batch_first)
    )
    torch.testing.assert_close(output, whole[0][at])
    torch.testing.assert_close(last, whole[1][:, MINE])
    gradients = tested.backward(
        *(RECURRENT, recurrent_backward, own, [], 4, None, of_state, None, output, own, of_state, None),
        *options(batch_first),
        others[1],
        [True] * 4,
    )
    torch.testing.assert_close(gradients[0], output)
    torch.testing.assert_close(gradients[1], last)


def test_packed_sequences_have_their_rows_and_states_at_their_places_in_the_whole():
    chosen, own = torch.tensor([1, 3, 4]), torch.tensor([1, 0])
    packed = Packed(Part(0, Rows(3, 0, 6), chosen=chosen), Part(1, Rows(2, 0, 3), chosen=own), [3, 2, 1])
    input, state = torch.randn(6, 3), torch.randn(2, 3, 3)
    whole = recurrent(input, [], 4, None, state, None, *options(batch_sizes=[3, 2, 1]))
    tested = calls(packed.rows, packed)
    given = (input[chosen], [], 4, None, state[:, own], None, *options(batch_sizes=[2, 1]))
    output, last, *_ = tested.forward(RECURRENT, recurrent, *given)
    torch.testing.assert_close(output, whole[0][chosen])
    torch.testing.assert_close(last, whole[1][:, own])
    said: list[tuple[str, str]] = []
    calls(packed.rows, None, said).forward(RECURRENT, recurrent, *given)
    assert "secret" in said[0][1]


@pytest.mark.parametrize("mine", [1, 3], ids=["one sample", "three samples"])
@pytest.mark.parametrize("case", GAPS)
def test_gaps_in_a_whole_batchs_memory_are_seen_in_a_share(case, mine):
    view, dim, expected = GAPS[case]
    whole, share = view(torch.zeros(8, 5, 4)), view(torch.zeros(mine, 5, 4))
    assert expected is not torch.ops.aten.is_non_overlapping_and_dense(whole)
    assert has_gaps(share, dim) == expected
