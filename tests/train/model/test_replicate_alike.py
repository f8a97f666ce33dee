"""Ranks that built different models are told so before the first step, all of them."""

import pytest
import torch
from torch import nn

import samestep
from samestep import RanksDiffer


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


def other_name(model):
    model.tail = model.head
    del model.head


def one_more(model):
    model.extra = nn.Linear(1, 1).double()


def other_order(model):
    model.body, model.head = model._modules.pop("body"), model._modules.pop("head")
    model._modules["head"], model._modules["body"] = model._modules.pop("head"), model._modules.pop("body")


def other_shape(model):
    model.head.bias = nn.Parameter(torch.zeros(5).double())


def other_type(model):
    model.head.float()


def frozen(model):
    model.head.bias.requires_grad_(False)


def one_more_buffer(model):
    model.register_buffer("count", torch.zeros(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            one_more,
            "replicate found 4 parameters on rank 0 and 6 on rank 1 (first difference: extra.weight); ",
        ),
        (
            other_name,
            "replicate found head.weight float64[2, 4] on rank 0 and tail.weight float64[2, 4] on rank 1; ",
        ),
        (
            other_order,
            "replicate found body.weight float64[4, 3] on rank 0 and head.weight float64[2, 4] on rank 1; ",
        ),
        (other_shape, "replicate found head.bias float64[2] on rank 0 and head.bias float64[5] on rank 1; "),
        (
            other_type,
            "replicate found head.weight float64[2, 4] on rank 0 and head.weight float32[2, 4] on rank 1; ",
        ),
        (
            frozen,
            "replicate found head.bias float64[2] on rank 0 and head.bias float64[2] (frozen) on rank 1; ",
        ),
        (one_more_buffer, "replicate found 0 buffers on rank 0 and 1 on rank 1 (first difference: count); "),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.sizes(2, 3)
def test_ranks_whose_models_differ_say_where_on_all_ranks(world, change, message):
    torch.manual_seed(0)
    model = Net().double()
    if world.rank == 1:
        change(model)
    with pytest.raises(RanksDiffer) as raised:
        samestep.replicate(model)
    assert str(raised.value) == message + "build the same model on every rank"
    assert "forward" not in vars(model)
