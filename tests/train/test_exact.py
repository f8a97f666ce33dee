"""The same bits at any number of processes, with all in the network that usually prevents it."""

import hashlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep
from samestep import UsageError

SIZES = (2, 3, 4, 6, 8)


def digest(model, optimizer, metrics):
    found = hashlib.sha256(repr(metrics).encode())
    tensors = [*model.state_dict().values()]
    for state in optimizer.state_dict()["state"].values():
        tensors += [one for one in state.values() if isinstance(one, torch.Tensor)]
    for one in tensors:
        found.update(one.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2))
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(288, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 5)
        )

    def forward(self, x):
        return self.head(self.features(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.out = nn.Linear(32, 20)

    def forward(self, x):
        return self.out(self.layer(self.embedding(x)))


def train_convolutional():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(100, 1, 8, 8, generator=generator), torch.randint(0, 5, (100,), generator=generator)
    )
    train = samestep.steps(data, 32, microbatch=4, shuffle=True)
    model = samestep.replicate(Convolutional(), exact=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    metrics = []
    for _ in train.epochs(3):
        for step in train:
            losses = []
            for x, y in step:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                losses.append(loss.item())
            metrics.append(
                (samestep.gather(losses), nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
            )
            optimizer.step()
            optimizer.zero_grad()
    return digest(model, optimizer, metrics)


def train_transformer():
    torch.manual_seed(0)
    data = TensorDataset(torch.randint(0, 20, (44, 12), generator=torch.Generator().manual_seed(2)))
    train = samestep.steps(data, 16, microbatch=2, shuffle=True, seed=5)
    model = samestep.replicate(Transformer(), exact=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    metrics = []
    for _ in train.epochs(2):
        for step in train:
            losses = []
            for (x,) in step:
                with torch.autocast("cpu", torch.bfloat16):
                    logits = model(x[:, :-1])
                loss = F.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten())
                scaler.scale(loss).backward()
                losses.append(loss.item())
            metrics.append(samestep.gather(losses))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return digest(model, optimizer, metrics)


def train_both():
    return train_convolutional(), train_transformer()


@pytest.fixture(scope="module")
def alone():
    return samestep.launch(train_both, 1)[0]


@pytest.mark.parametrize("size", SIZES)
def test_parameters_buffers_optimizer_and_metrics_have_the_bits_of_one_process(size, alone):
    assert samestep.launch(train_both, size) == [alone] * size


def test_another_microbatch_is_another_computation(world):
    """So the test above would see it."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,)))
    found = set()
    for microbatch in (1, 2, 4):
        torch.manual_seed(0)
        model = samestep.replicate(
            nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)), exact=True
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in samestep.steps(data, 16, microbatch=microbatch):
            for x, y in step:
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
        found.add(digest(model, optimizer, None))
    assert len(found) == 3


def test_batches_of_a_loader_are_refused(world):
    model = samestep.replicate(nn.Linear(4, 2), exact=True)
    for (x,) in samestep.loader(TensorDataset(torch.randn(6, 4)), 6):
        with pytest.raises(UsageError, match=r"take the training batches from samestep\.steps"):
            model(x)
    with torch.no_grad():
        model.eval()(torch.randn(2, 4))


def test_sync_batchnorm_and_exact_exclude_each_other(world):
    with pytest.raises(UsageError, match="drop sync_batchnorm"):
        samestep.replicate(nn.BatchNorm1d(3), exact=True, sync_batchnorm=True)


def test_an_operation_without_a_deterministic_kernel_is_named(world):
    samestep.replicate(nn.Linear(1, 1), exact=True)
    with pytest.raises(RuntimeError, match="put_"):
        torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]), accumulate=False)


@pytest.mark.sizes(2)
def test_two_backward_passes_through_the_last_microbatch_are_a_sentence(world):
    model = samestep.replicate(nn.Linear(4, 2), exact=True)
    for step in samestep.steps(TensorDataset(torch.randn(4, 4)), 4, microbatch=2):
        for (x,) in step:
            model(x).sum().backward()
            with pytest.raises(UsageError, match="add the losses and call backward once"):
                model(x).sum().backward()


def test_unused_parameters_count_as_zero(world):
    model = nn.ModuleDict({"used": nn.Linear(4, 2), "idle": nn.Linear(4, 2)})
    model.forward = lambda x: model["used"](x)
    model = samestep.replicate(
        model, exact=True, **({"find_unused_parameters": True} if world.size > 1 else {})
    )
    for step in samestep.steps(TensorDataset(torch.randn(6, 4)), 6, microbatch=2):
        for (x,) in step:
            model(x).sum().backward()
    assert model["used"].weight.grad.abs().sum() > 0
    assert model["idle"].weight.grad is None or not model["idle"].weight.grad.any()
