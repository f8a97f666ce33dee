"""A replicated model is the same object: its class, attributes, keys, copies and hooks are what they were."""

import copy
import gc
import io
import os
import pickle
import sys
import types
import warnings
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from samestep import UsageError

Pair = namedtuple("Pair", "y extra")


@dataclass
class Output:
    y: torch.Tensor
    note: str = ""

    def to(self, device):
        return Output(self.y.to(device), self.note)


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.body = nn.Linear(3, width)
        self.head = nn.Linear(width, 2)
        self.label = "mine"

    def forward(self, x, *, scale=1.0):
        return self.head(torch.relu(self.body(x))) * scale

    def describe(self):
        return f"{self.label}: {self.head.out_features}"


class Normed(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        return self.norm(super().forward(x))


def made(seed=0, kind=Net):
    torch.manual_seed(seed)
    return kind().double()


def inputs(length=7):
    draw = torch.Generator(torch.get_default_device()).manual_seed(1)
    return torch.rand(length, 3, generator=draw, dtype=torch.float64)


def gradient(model, call=lambda model, x: model(x), length=7, loader=None):
    """Of one step over `length` samples, of which two or three ranks have unequal shares."""
    model.zero_grad()
    steps = 0
    for (x,) in loader or samestep.loader(TensorDataset(inputs(length)), length):
        call(model, x).square().sum(1).mean().backward()
        steps += 1
    assert steps == 1
    return torch.cat(
        [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    )


def serial_gradient(call=lambda model, x: model(x), length=7, kind=Net):
    plain = made(kind=kind)
    call(plain, inputs(length)).square().sum(1).mean().backward()
    return torch.cat(
        [parameter.grad.flatten() for parameter in plain.parameters() if parameter.grad is not None]
    )


def is_plain(model):
    return "forward" not in model.__dict__ and "__getstate__" not in model.__dict__


def test_a_replica_keeps_its_class_attributes_methods_and_keys(world):
    model = made()
    plain = made()
    replicated = samestep.replicate(model)
    assert replicated is model
    assert type(model) is Net
    assert model.describe() == "mine: 2"
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert repr(model) == repr(plain)
    model.label = "changed"
    assert model.describe() == "changed: 2"
    model.load_state_dict(plain.state_dict())
    assert torch.allclose(gradient(model), serial_gradient(), rtol=1e-12)


def test_parameters_that_differ_at_the_start_become_rank_0s(world):
    for trainable in (True, False):
        model = made(seed=world.rank).requires_grad_(trainable)
        samestep.replicate(model)
        for parameter, expected in zip(model.parameters(), made().parameters(), strict=True):
            assert torch.equal(parameter, expected)


def test_a_model_without_anything_to_train_is_made_equal_whatever_its_strides(world):
    torch.manual_seed(world.rank)
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last).requires_grad_(False)
    model.register_buffer("position", torch.arange(6.0).add(world.rank).reshape(2, 3).t())
    samestep.replicate(model)
    model(torch.rand(1, 3, 5, 5))
    torch.manual_seed(0)
    assert torch.equal(model.weight, nn.Conv2d(3, 4, 3).weight)
    assert model.position[0, 0] == 0


def test_copies_and_pickles_are_plain_models(world, tmp_path):
    model = samestep.replicate(made())
    expected = serial_gradient()
    home = types.ModuleType("home_of_net")
    home.Net, Net.__module__ = Net, "home_of_net"
    sys.modules["home_of_net"] = home
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    copies = [
        copy.deepcopy(model),
        copy.copy(model),
        *(pickle.loads(pickle.dumps(model, protocol)) for protocol in range(6)),
        torch.load(stream, weights_only=False),
        copy.deepcopy({"model": model})["model"],
    ]
    for copied in copies:
        assert type(copied) is Net
        assert is_plain(copied)
        assert copied.describe() == "mine: 2"
        copied.zero_grad()
        copied(inputs()).square().sum(1).mean().backward()
        own = torch.cat([parameter.grad.flatten() for parameter in copied.parameters()])
        assert torch.allclose(own, expected, rtol=1e-12)
    again = samestep.replicate(copies[0])
    assert torch.allclose(gradient(again), expected, rtol=1e-12)
    assert torch.allclose(gradient(model), expected, rtol=1e-12)


class CopiesItself(Net):
    def __deepcopy__(self, memo):
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        for name, value in self.__dict__.items():
            new.__dict__[name] = copy.deepcopy(value, memo)
        return new

    def __getstate__(self):
        return {**self.__dict__, "label": "from its state"}


def test_a_class_that_copies_itself_still_makes_independent_copies(world):
    model = samestep.replicate(made(kind=CopiesItself))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.head.weight.zero_()
        copied.head.bias.zero_()
    assert copied(inputs()).abs().sum() == 0
    assert model(inputs()).abs().sum() > 0
    assert copy.copy(model).describe() == "from its state: 2"
    assert copy.copy(copied).describe() == "from its state: 2"
    assert is_plain(copy.copy(model))


def test_a_forward_of_the_models_own_is_called_and_survives(world):
    model = made()
    model.forward = types.MethodType(lambda self, x: self.head(torch.tanh(self.body(x))), model)
    plain = copy.deepcopy(model)
    expected = plain(inputs()).detach()
    samestep.replicate(model)
    assert torch.equal(model(inputs()).detach(), expected)
    assert torch.equal(copy.deepcopy(model)(inputs()).detach(), expected)


@pytest.mark.slow
@pytest.mark.sizes(2)
def test_compiled_before_or_after_replicate_or_in_place_a_model_has_the_serial_gradient(world):
    expected = serial_gradient()

    def compiled(model):
        return torch.compile(model, backend="aot_eager")

    def compiled_in_place(model):
        model.compile(backend="aot_eager")
        return model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo hides its own, where they are no errors
        for compile_it in (compiled, compiled_in_place):
            assert torch.allclose(gradient(compile_it(samestep.replicate(made()))), expected, rtol=1e-9)
            assert torch.allclose(gradient(samestep.replicate(compile_it(made()))), expected, rtol=1e-9)
        torch._dynamo.reset()


def test_hooks_run_once_for_each_call(world):
    calls = []
    model = made()
    model.register_forward_pre_hook(lambda *_: calls.append("before"))
    model.register_forward_hook(lambda *_: calls.append("after"))
    samestep.replicate(model)
    model.register_forward_hook(lambda *_: calls.append("later"))
    gradient(model)
    assert calls == ["before", "after", "later"]


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda y: (y, 1), lambda out: out[0]),
        (lambda y: [y.detach(), y], lambda out: out[1]),
        (lambda y: {"y": y, "more": {"none": None}}, lambda out: out["y"]),
        (lambda y: Pair(y, "text"), lambda out: out.y),
        (lambda y: Output(y), lambda out: out.y),
        (lambda y: nn.utils.rnn.pack_padded_sequence(y[:, None], [len(y)]), lambda out: out.data),
    ],
    ids=["tuple", "list", "dict", "namedtuple", "dataclass", "packed"],
)
def test_outputs_of_any_structure_carry_the_right_gradient(world, wrap, unwrap):
    class Wrapped(Net):
        def forward(self, x):
            return wrap(super().forward(x))

    def call(model, x):
        out = model(x)
        assert type(out) is type(wrap(x))
        return unwrap(out)

    expected = serial_gradient(call, kind=Wrapped)
    assert torch.allclose(gradient(samestep.replicate(made(kind=Wrapped)), call), expected, rtol=1e-12)


@pytest.mark.sizes(2, 3)
def test_an_output_in_which_no_tensor_is_found_is_an_error_and_no_wrong_gradient(world):

    class Choice(Net):
        def forward(self, x):
            return torch.distributions.Categorical(logits=super().forward(x))

    model = samestep.replicate(made(kind=Choice))
    with pytest.raises(UsageError, match=r"forward returned a Categorical.* return tensors"):
        model(inputs())


def test_keyword_arguments_and_changes_in_place_work(world):
    def call(model, x):
        out = model(x=x, scale=3.0)
        out += 1.0
        return out.mul_(2.0)

    model = samestep.replicate(made())
    assert torch.allclose(gradient(model, call), serial_gradient(call), rtol=1e-12)


def test_the_gradient_of_the_inputs_is_that_of_this_ranks_own_loss(world):
    model = samestep.replicate(made())
    plain = made()
    for (x,) in samestep.loader(TensorDataset(inputs()), 7):
        x.requires_grad_()
        twin = x.detach().clone().requires_grad_()
        model(x).sum().backward()
        plain(twin).sum().backward()
        assert torch.allclose(x.grad, twin.grad, rtol=1e-12)


def test_eval_gives_the_plain_outputs_and_train_the_whole_gradient_again(world):
    model = samestep.replicate(made())
    before = model(inputs()).detach()
    model.eval()
    assert torch.equal(model(inputs()).detach(), before)
    with torch.inference_mode():
        assert torch.equal(model(inputs()), before)
    model.train()
    assert torch.allclose(gradient(model), serial_gradient(), rtol=1e-12)


def test_one_rank_may_evaluate_alone(world):
    model = made(kind=Normed)
    model.register_buffer("other", torch.ones(3))
    samestep.replicate(model)
    loader = samestep.loader(TensorDataset(inputs(8)), 8)
    for (x,) in loader:
        model(x).sum().backward()
    if world.rank == 0:
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                model(inputs())
        model.train()
    assert samestep.sum(1) == world.size


def test_a_parameter_of_two_replicas_is_an_error_on_several_ranks(world):
    encoder = nn.Linear(4, 4)
    first, second = (nn.Sequential(encoder, nn.Linear(4, size)) for size in (2, 3))
    samestep.replicate(first)
    if world.size > 1:
        with pytest.raises(
            UsageError, match=r"whose parameter 0.weight is also of a Sequential .* or del the Seq"
        ):
            samestep.replicate(second)
    del first
    samestep.replicate(second)


def test_an_encoder_that_was_trained_is_tuned_in_another_model(world):
    encoder, heads = nn.Linear(3, 4).double(), [nn.Linear(4, size).double() for size in (2, 3)]
    models = [nn.Sequential(encoder, head) for head in heads]
    loader = samestep.loader(TensorDataset(inputs(5)), 5)
    for model in models:
        samestep.replicate(model)
        for (x,) in loader:
            model.zero_grad()
            model(x).square().mean().backward()
            whole = samestep.gather(x)
    plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)).double()
    plain.load_state_dict(models[1].state_dict())
    plain(whole).square().mean().backward()
    assert torch.allclose(encoder.weight.grad, plain[0].weight.grad)
    if world.size > 1:
        batches = iter(loader)
        (x,) = next(batches)
        loss = models[0](x).square().mean()
        with pytest.raises(UsageError, match="reached Sequential, which was not called in this batch"):
            loss.backward()


def test_replicating_a_model_again_does_nothing_and_with_other_options_is_an_error(world):
    model = samestep.replicate(made())
    assert samestep.replicate(model) is model
    compiled = torch.compile(model, backend="eager")
    assert samestep.replicate(compiled) is compiled
    with pytest.raises(UsageError, match="this model is replicated already, with other options"):
        samestep.replicate(model, loss="sum")
    with pytest.raises(UsageError, match=r"replicate got a list; pass the torch.nn.Module itself"):
        samestep.replicate(list(model.parameters()))


@pytest.mark.sizes(2, 3)
def test_no_sync_wants_a_replicated_model(world):
    with (
        pytest.raises(UsageError, match="no_sync got a model that is not replicated"),
        samestep.no_sync(made()),
    ):
        pass


def test_dropout_differs_between_ranks_and_rank_0_keeps_the_scripts_stream(world):
    torch.manual_seed(3)
    model = samestep.replicate(made())
    # data are often made between replicate and the first batch
    assert len({tuple(row) for row in samestep.gather(torch.rand(1, 8)).tolist()}) == 1
    with torch.no_grad():
        model(torch.rand_like(next(model.parameters())[:1]))
    torch.manual_seed(3) if world.rank == 0 else None
    mask = nn.functional.dropout(torch.ones(64), 0.5)
    masks = {tuple(row) for row in samestep.gather(mask[None]).tolist()}
    assert len(masks) == world.size


def test_models_that_are_gone_on_some_ranks_only_hold_up_nobody(world):
    os.environ["SAMESTEP_CHECK_EVERY"] = "1"
    gc.disable()
    try:
        for _ in range(2):
            model = samestep.replicate(made(kind=Normed))
            for (x,) in samestep.loader(TensorDataset(inputs(16)), 8):
                model(x).sum().backward()
                break
            del model
            if world.rank == 0:
                gc.collect()
            gradient(samestep.replicate(made()))
        assert samestep.sum(1) == world.size
    finally:
        gc.enable()
        del os.environ["SAMESTEP_CHECK_EVERY"]
