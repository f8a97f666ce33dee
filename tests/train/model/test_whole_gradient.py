"""Gradients are the serial script's on whatever way a loss comes from the parameters, also with unequal shares."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep

pytestmark = pytest.mark.sizes(1, 2, 3, 5)


class Net(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(3, 5), *([nn.BatchNorm1d(5)] if norm else []), nn.Tanh())
        self.head = nn.Linear(5, 2)
        self.double()

    def forward(self, x):
        return self.head(self.body(x))


def rows(count):
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    return torch.rand(count, 3, generator=generator, dtype=torch.float64)


def meta_learned(model, x):
    """Two inner steps on copies of the weights, as MAML takes them."""
    fast = dict(model.named_parameters())
    for scale in (1.0, 2.0):
        loss = functional_call(model, fast, (x,)).square().mean() * scale
        slopes = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
        fast = {
            name: weight - 0.3 * slope for (name, weight), slope in zip(fast.items(), slopes, strict=True)
        }
    functional_call(model, fast, (x.flip(1),)).square().mean().backward()


def penalized_by_its_slope(model, x):
    loss = model(x).square().mean()
    slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + 3 * sum(slope.norm() for slope in slopes)).backward()


def penalized_by_its_weights(model, x):
    (model(x).square().mean() + sum(parameter.square().sum() for parameter in model.parameters())).backward()


def beside_its_jacobian(model, x):
    if not any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules()):
        vmap(jacrev(lambda row: model(row[None])))(x)
    model(x).square().mean().backward()


def through_a_part(model, x):
    (model(x).square().mean() + model.body(2 * x).square().mean()).backward()


def through_a_weight(model, x):
    (model(x).square().mean() + F.linear(x, model.body[0].weight).cos().mean()).backward()


def by_torch_autograd(model, x):
    torch.autograd.backward([model(x).square().mean(), model(x).cos().mean()])


def alike_at_any_scale(model, x):
    """IRM's penalty."""
    for scale in (torch.ones((), dtype=torch.float64), nn.Parameter(torch.ones(1, dtype=torch.float64))):
        loss = (model(x) * scale.requires_grad_()).square().mean()
        (slope,) = torch.autograd.grad(loss, scale, create_graph=True)
        (loss + 3 * slope.square().sum()).backward()


def held_smooth(model, x):
    mixed = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
    (model(x).mean() + (slope.norm(2, dim=1) - 1).square().mean()).backward()


def held_smooth_by_the_slope_of_the_mean(model, x):
    mixed = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(mixed).square().mean(), mixed, create_graph=True)
    (model(x).mean() + slope.square().sum(1).mean()).backward()


WAYS = [
    meta_learned,
    penalized_by_its_slope,
    penalized_by_its_weights,
    alike_at_any_scale,
    through_a_part,
    through_a_weight,
    beside_its_jacobian,
    by_torch_autograd,
    held_smooth,
    held_smooth_by_the_slope_of_the_mean,
]


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "BatchNorm"])
@pytest.mark.parametrize("count", [13, 11, 4], ids=lambda count: f"{count} rows")
@pytest.mark.parametrize("way", WAYS, ids=[way.__name__ for way in WAYS])
def test_gradients_are_those_of_the_whole_batch(world, way, count, norm):
    plain = Net(norm)
    model = samestep.replicate(copy.deepcopy(plain), sync_batchnorm=norm)
    way(plain, rows(count))
    for (x,) in samestep.loader(TensorDataset(rows(count)), 13):
        way(model, x)
    for (name, mine), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            mine.grad, wanted.grad, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("count", [12, 13], ids=lambda count: f"{count} rows")
@pytest.mark.parametrize("moved", [False, True], ids=["input", "added to the input"])
def test_the_gradient_of_what_is_added_to_the_input_divides_by_the_whole_batch(world, moved, count):
    def slope(model, x):
        found = torch.zeros_like(x) if moved else x.clone()
        found.requires_grad_()
        model(x + found if moved else found).square().mean().backward()
        return found.grad

    plain = Net()
    wanted = slope(plain, rows(count))
    model = samestep.replicate(copy.deepcopy(plain))
    for (x,) in samestep.loader(TensorDataset(rows(count)), 13):
        torch.testing.assert_close(samestep.gather(slope(model, x)), wanted)


def test_hooks_on_parameters_are_called_in_the_order_in_which_the_serial_script_calls_them(world):
    def hooked(model):
        called = []
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
        return model, called

    (plain, wanted), (model, called) = hooked(Net()), hooked(samestep.replicate(Net()))
    plain(rows(13)).square().mean().backward()
    for (x,) in samestep.loader(TensorDataset(rows(13)), 13):
        model(x).square().mean().backward()
    assert len(called) == 4
    assert called == wanted


@pytest.mark.parametrize("steps_in_hook", [False, True])
def test_hooks_on_parameters_get_the_gradient_of_the_whole_batch(world, steps_in_hook):
    def hooked(model):
        def step(parameter):
            with torch.no_grad():
                parameter -= 0.5 * parameter.grad
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
            if steps_in_hook:
                parameter.register_post_accumulate_grad_hook(step)
        return model

    plain, model = hooked(Net()), hooked(samestep.replicate(Net()))
    for _ in range(2):
        for (x,) in samestep.loader(TensorDataset(rows(18)), 13):
            model(x).square().mean().backward()
        for x in rows(18).split(13):
            plain(x).square().mean().backward()
    for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted)
        if not steps_in_hook:
            torch.testing.assert_close(mine.grad, wanted.grad)


class Clipped(Net):
    def forward(self, x):
        hidden = self.body(x)
        self.seen = []
        with torch.device(x.device):  # a function mode, as set_default_device() sets one
            hidden.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        hidden.register_hook(lambda gradient: self.seen.append(gradient))
        return self.head(hidden)


@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_hooks_on_activations_get_the_serial_scripts_gradients(world, loss):
    plain, model = Clipped(), samestep.replicate(Clipped(), loss=loss)
    for (x,) in samestep.loader(TensorDataset(rows(18)), 13):
        getattr(model(x).square(), loss)().backward()
    for x in rows(18).split(13):
        getattr(plain(x).square(), loss)().backward()
    torch.testing.assert_close(samestep.gather(torch.cat(model.seen)), torch.cat(plain.seen))
    for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad)


class Watched(Net):
    def __init__(self):
        super().__init__()
        self.seen, self.kept, self.whole = [], [], []
        self.body.register_full_backward_hook(self.clip)

    def clip(self, module, of_inputs, of_outputs):
        self.seen.append(of_outputs[0])
        return tuple(None if gradient is None else gradient.clamp(-0.01, 0.01) for gradient in of_inputs)

    def forward(self, x):
        self.kept.append(self.body(x))
        self.kept[-1].retain_grad()
        return self.head(self.kept[-1])


@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_hooks_on_modules_and_kept_gradients_are_those_of_the_serial_script(world, loss):
    plain, model = Watched(), samestep.replicate(Watched(), loss=loss)
    for net in (plain, model):
        net.register_full_backward_hook(lambda net, of_inputs, of_outputs: net.whole.append(of_outputs[0]))
    for (x,) in samestep.loader(TensorDataset(rows(18)), 13):
        out = getattr(model(x.requires_grad_()).square(), loss)()
        out.backward(retain_graph=True)
        out.backward()
    for x in rows(18).split(13):
        out = getattr(plain(x.requires_grad_()).square(), loss)()
        out.backward(retain_graph=True)
        out.backward()
    for mine, wanted in ((model.seen, plain.seen), (model.whole, plain.whole)):
        torch.testing.assert_close(samestep.gather(torch.cat(mine[::2])), torch.cat(wanted[::2]))
    mine, wanted = (torch.cat([hidden.grad for hidden in net.kept]) for net in (model, plain))
    torch.testing.assert_close(samestep.gather(mine), wanted)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


@pytest.mark.sizes(1, 2, 3)
@pytest.mark.parametrize("exact", [False, True])
def test_what_is_derived_again_in_a_microbatch_is_that_microbatchs(world, exact):
    """Also where the ranks have unlike numbers of them: 3 of 4 samples each."""
    plain = Net()
    model = samestep.replicate(copy.deepcopy(plain), exact=exact)
    for part in rows(12).split(4):
        loss = plain(part).square().mean()
        slopes = torch.autograd.grad(loss, list(plain.parameters()), create_graph=True)
        ((loss + sum(slope.square().sum() for slope in slopes)) / 3).backward()
    for step in samestep.steps(TensorDataset(rows(12)), 12, microbatch=4):
        for (x,) in step:
            loss = model(x).square().mean()
            slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            (loss + sum(slope.square().sum() for slope in slopes)).backward()
    for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad)


@pytest.mark.slow
@pytest.mark.sizes(2)
def test_a_compiled_model_that_returns_its_loss_is_weighed_once(world):
    class WithLoss(Net):
        def forward(self, x):
            return super().forward(x).square().mean()

    plain = WithLoss()
    model = samestep.replicate(copy.deepcopy(plain))
    model.compile(backend="aot_eager")
    plain(rows(11)).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo hides its own, where they are no errors
        for (x,) in samestep.loader(TensorDataset(rows(11)), 11):
            model(x).backward()
        torch._dynamo.reset()
    for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad)


@pytest.mark.sizes(1, 2, 3)
@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_what_is_not_derived_again_is_the_gradient_of_the_ranks_own_loss(world, loss):
    """Also where ranks have unlike shares, and one has none: 5 and 2 samples."""
    plain = Net()
    model = samestep.replicate(copy.deepcopy(plain), loss=loss)
    total = samestep.mean if loss == "mean" else samestep.sum
    wanted, found = [], []
    for x in rows(7).split(5):
        wanted += torch.autograd.grad(getattr(plain(x).square(), loss)(), list(plain.parameters()))
    for (x,) in samestep.loader(TensorDataset(rows(7)), 5):
        own = torch.autograd.grad(getattr(model(x).square(), loss)(), list(model.parameters()))
        found += [total(gradient) for gradient in own]
    torch.testing.assert_close(found, wanted)


def test_a_model_behind_another_counts_once_beside_a_batch_of_unlike_share(world):
    torch.manual_seed(0)
    rows = torch.rand(5, 2), torch.rand(6, 2)
    encoder, head, other = plain = [nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(2, 1)]
    (head(encoder(rows[0])).mean() + other(rows[1]).mean()).backward()
    expected = [model.weight.grad.clone() for model in plain]
    encoder, head, other = (samestep.replicate(copy.deepcopy(model)) for model in plain)
    for model in (encoder, head, other):
        model.zero_grad()
    first, second = (iter(samestep.loader(TensorDataset(part), len(part))) for part in rows)
    found = head(encoder(*next(first))).mean()
    (found + other(*next(second)).mean()).backward()
    for model, gradient in zip((encoder, head, other), expected, strict=True):
        torch.testing.assert_close(model.weight.grad, gradient)
