"""Mistakes that would train wrong numbers in silence are made right or said."""

import os
import re
import sys
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset, random_split

import samestep
from samestep import RanksDiffer, UsageError
from samestep.train.backward import Backward
from samestep.train.draws.draws import Draws
from samestep.train.forgotten import Begun, Evaluations
from samestep.train.group.world import joined
from samestep.train.step import Spine

GENERATOR = torch.Generator().manual_seed(0)
X = torch.rand(23, 4, dtype=torch.float64, generator=GENERATOR)
Y = torch.rand(23, 1, dtype=torch.float64, generator=GENERATOR)
DATA = TensorDataset(X, Y)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def batches(size):
    return [(X[start : start + size], Y[start : start + size]) for start in range(0, 23, size)]


def look_again():
    group = joined()
    group._said.clear()
    group.the(Evaluations)._text = ""
    first_losses = group.the(Backward)._first_losses
    group.the(Draws).watching._watched_kinds.clear()
    first_losses._terms.clear()
    first_losses._losses_to_look_at, first_losses._unreplicated = 3, {}
    first_losses._num_weights, first_losses._weight_digests, first_losses._is_followed = -1, [0, 0], False


@pytest.mark.sizes(2, 3)
def test_a_rank_that_left_an_epoch_early_is_found_at_the_next_message(world, monkeypatch):
    monkeypatch.setenv("SAMESTEP_CHECK_EVERY", "0")  # the comparison of replicas would find it first
    model = samestep.replicate(network())
    train = samestep.loader(DATA, 6, seed=1)
    taken = {0: 2, 1: 3} if world.rank == world.size - 1 else {0: 4, 1: 1}
    for epoch in range(2):
        for number, (x, y) in enumerate(train, 1):
            F.mse_loss(model(x), y).backward()
            if number == taken[epoch]:
                break
    # every rank took five steps, on other samples
    with pytest.raises(
        RanksDiffer,
        match=r"rank 0 came to samestep.sum \(test_mistakes.py:\d+\) at epoch 2, sample 6 of its training and "
        r"rank \d at epoch 2, sample 18; every rank has to take the same steps",
    ):
        samestep.sum(1)
    joined().the(Spine)._position = (0, 0, 0)


@pytest.mark.sizes(2, 3)
def test_a_model_that_was_never_replicated_is_named(world):
    look_again()
    samestep.replicate(nn.Linear(1, 1))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = iter(samestep.loader(DATA, 6))
    x, y = next(batches)
    F.mse_loss(model(x), y).backward()
    with pytest.raises(UsageError, match=r"^SGD steps 0.weight of Sequential, which belongs to no replica"):
        optimizer.step()


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("is_divided", [False, True])
def test_gradients_of_the_whole_batch_that_the_script_adds_again_are_said(world, is_divided):
    look_again()
    model = samestep.replicate(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with redirect_stderr(StringIO()) as said:
        for x, y in samestep.loader(DATA, 6):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world.size if is_divided else 1
            optimizer.step()
    words = f"are the whole batch's on every rank already, so the step is taken with {world.size} times"
    assert said.getvalue().count(words) == (not is_divided and world.rank == 0)


@pytest.mark.sizes(2, 3)
def test_a_model_whose_gradients_the_script_makes_equal_itself_raises_no_alarm(world):
    look_again()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in samestep.loader(DATA, 6):
        F.mse_loss(model(x), y).backward()
        for parameter in model.parameters():
            parameter.grad = samestep.mean(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize(
    "shared_by", ["nobody", "subset", "rows", "files", "sampler", "the whole as one batch"]
)
def test_a_torch_dataloader_that_gives_every_rank_all_samples_is_said(world, shared_by, monkeypatch):
    monkeypatch.setattr(joined().the(Spine).origins, "_passes", [])
    look_again()
    rank, size = world.rank, world.size
    mine = range(rank, 23, size)
    loaders = {
        "nobody": lambda: DataLoader(
            random_split(DATA, [20, 3], torch.Generator().manual_seed(0))[0], 6, True
        ),
        "subset": lambda: DataLoader(Subset(DATA, mine), 6, shuffle=True),
        "rows": lambda: DataLoader(TensorDataset(X[:21][rank::size], Y[:21][rank::size]), 6),
        "files": lambda: DataLoader(Files([f"{index}.bin" for index in mine][:7]), 6, shuffle=True),
        "sampler": lambda: DataLoader(DATA, 6, sampler=DistributedSampler(DATA)),
        "the whole as one batch": lambda: [(X, Y)],
    }
    model = samestep.replicate(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with redirect_stderr(StringIO()) as said:
        for x, y in loaders[shared_by]():
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    text = "trains on batches of a torch DataLoader: every rank goes through all 20 samples"
    assert said.getvalue().count(text) == (shared_by == "nobody" and rank == 0)
    assert said.getvalue().count("\n") == said.getvalue().count(text)


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize(
    "total",
    [None, "barrier", samestep.sum, samestep.gather, samestep.mean, torch.distributed.all_reduce],
    ids=lambda total: getattr(total, "__name__", str(total)),
)
def test_an_evaluation_without_a_total_is_said(world, total):
    look_again()
    model, train, test = samestep.replicate(network()), samestep.loader(DATA, 6), samestep.loader(DATA, 7)
    with redirect_stderr(StringIO()) as said:
        for _ in range(2):
            for x, y in train:
                F.mse_loss(model(x), y).backward()
            model.eval()
            with torch.no_grad():
                error = torch.stack([F.mse_loss(model(x), y) for x, y in test])
            model.train()
            if total == "barrier":
                torch.distributed.barrier()
            elif total:
                total(error)
    text = r"was not followed by samestep.sum, mean or gather: what it counted is of this rank's (9|13) of its 23"
    assert len(re.findall(text, said.getvalue())) == (total in (None, "barrier") and world.rank == 0)


def counted(train, model):
    for x, _ in train:
        x.sum(0)


def totalled(train, model):
    samestep.sum(sum(x.sum(0) for x, _ in train))


def kept(train, model):
    for x, y in list(train):
        F.mse_loss(model(x), y).backward()


def evaluated_within(train, model):
    for at, (x, y) in enumerate(train, 1):
        F.mse_loss(model(x), y).backward()
        if at == len(train):
            samestep.mean(sum(F.mse_loss(model(x), y).item() for x, y in samestep.loader(DATA, 7)))


def stepped_by_function(train, model):
    optimizer, parameters = torch.optim.SGD(model.parameters(), 0.1), list(model.parameters())
    for x, y in train:
        slopes = torch.autograd.grad(F.mse_loss(model(x), y), parameters)
        for parameter, slope in zip(parameters, slopes, strict=True):
            parameter.grad = samestep.mean(slope)
        optimizer.step()


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize(
    "loop", [counted, totalled, kept, evaluated_within, stepped_by_function, lambda of, _: len(list(of))]
)
def test_a_loop_in_training_mode_without_backward_and_total_is_said(world, loop):
    look_again()
    model, train = samestep.replicate(network()), samestep.loader(DATA, 6)
    with redirect_stderr(StringIO()) as said:
        loop(train, model)
        for x, y in train:
            F.mse_loss(model(x), y).backward()
    text = r"called no backward\(\) and was not followed by samestep.sum, .* rank's (8|12) of its 23 samples"
    assert len(re.findall(text, said.getvalue())) == (loop is counted and world.rank == 0)


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("trains", [False, True])
def test_a_last_batch_with_fewer_samples_than_ranks_is_said_where_a_loop_does_not_train(world, trains):
    look_again()
    model = samestep.replicate(network())
    with redirect_stderr(StringIO()) as said:
        for x, y in samestep.loader(DATA, 11):
            loss = F.mse_loss(model(x), y)
            if trains:
                loss.backward()
    text = f"loop at test_mistakes.py:{line_of('in samestep.loader(DATA, 11)')} has 1 sample for {world.size} ranks"
    assert (text in said.getvalue()) == (not trains and world.rank == 0)


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("is_totalled", [False, True])
def test_statistics_that_are_counted_before_replicate_are_said(world, is_totalled):
    look_again()
    train = samestep.loader(DATA, 6)
    with redirect_stderr(StringIO()) as said:
        total = sum(x.sum(0) for x, _ in train)
        model = samestep.replicate(network())
        if is_totalled:
            samestep.sum(total)
        for x, y in train:
            F.mse_loss(model(x), y).backward()
    is_said = not is_totalled and world.rank == 0
    assert said.getvalue().count("was not followed by samestep.sum, mean or gather") == is_said


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("samples", [1, 23])
@pytest.mark.parametrize("on_all", [False, True])
def test_an_evaluation_on_one_rank_alone_is_said(world, samples, on_all):
    look_again()
    model, test = samestep.replicate(network()), samestep.loader(TensorDataset(X[:samples], Y[:samples]), 7)
    with redirect_stderr(StringIO()) as said, torch.no_grad():
        error = 0.0
        for x, y in test if on_all or world.rank == 0 else ():
            error += F.mse_loss(model(x), y, reduction="sum").item()
        samestep.sum(error)
        samestep.sum(error)
    text = f"rank 0 evaluated over a samestep.loader (test_mistakes.py:{line_of('in test if on_all')}) and the other"
    assert said.getvalue().count(text) == (not on_all and world.rank == 0)


def line_of(words):
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if words in line)


class Files(Dataset):
    def __init__(self, names):
        self.names = names

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        at = int(self.names[index].removesuffix(".bin"))
        return X[at], Y[at]


@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("equal_steps", [2, 3])
def test_a_model_that_was_never_replicated_is_looked_at_in_its_first_three_steps(world, equal_steps):
    look_again()
    samestep.replicate(nn.Linear(1, 1))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = iter(samestep.loader(DATA, 3))
    for x, y in [next(batches) for _ in range(equal_steps)]:
        F.mse_loss(model(x), y).backward()
        for parameter in model.parameters():
            parameter.grad = samestep.mean(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    F.mse_loss(model(x + world.rank), y).backward()
    if equal_steps == 2:
        with pytest.raises(UsageError, match="which belongs to no replica"):
            optimizer.step()
    else:
        optimizer.step()


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_takes_the_serial_steps(world, search):
    look_again()

    def train(model, batches):
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6, line_search_fn=search)
        for x, y in batches:

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
        return model

    serial = train(network(), batches(8))
    model = train(samestep.replicate(network()), samestep.loader(DATA, 8))
    for mine, theirs in zip(model.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


def test_what_replicate_cannot_take_is_said(world):
    parallel = nn.DataParallel(network())
    for given, where in ((parallel, ""), (nn.Sequential(nn.Identity(), parallel), " as 1")):
        with pytest.raises(
            UsageError, match=f"nn.DataParallel{where}, which splits batches itself; write its .module"
        ):
            samestep.replicate(given)
    with pytest.raises(UsageError, match="loss='total', which is not a reduction; use 'mean' or 'sum'"):
        samestep.replicate(network(), loss="total")


class Remembering(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1).double()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))
        self.register_buffer("fixed", torch.ones(4, dtype=torch.float64))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.layer(x - self.mean)


def test_a_buffer_that_each_rank_changes_from_its_own_share_is_named_once(world):
    model = samestep.replicate(Remembering())
    joined()._said.clear()
    with redirect_stderr(StringIO()) as said:
        for _ in range(2):
            for x, y in samestep.loader(DATA, 6):
                F.mse_loss(model(x), y).backward()
    text = "forward computes the buffer mean of Remembering from each rank's own share"
    assert said.getvalue().count(text) == (world.size > 1 and world.rank == 0)


def test_a_loader_made_anew_in_every_epoch_is_said_to_repeat_its_order(world):
    model = samestep.replicate(network())
    data = TensorDataset(X, Y)

    def repeated(*seeds):
        joined()._members.pop(Begun, None)
        with redirect_stderr(StringIO()) as said:
            for seed in seeds:
                for x, y in samestep.loader(data, 6, shuffle=True, seed=seed):
                    F.mse_loss(model(x), y).backward()
        return said.getvalue().count("a second loader over the same data begins at epoch 1 with seed=3")

    assert repeated(1, 2, 3) == 0
    assert repeated(3, 3, 3) == (world.rank == 0)
    assert repeated(None, None, None) == 0
    once = samestep.loader(data, 6, shuffle=True, seed=3)
    joined()._members.pop(Begun, None)
    with redirect_stderr(StringIO()) as said:
        for _ in range(3):
            for x, y in once:
                F.mse_loss(model(x), y).backward()
    assert "begins at epoch 1" not in said.getvalue()


@pytest.mark.sizes(2)
def test_a_collective_in_a_forked_child_is_named(world):
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            samestep.sum(1)
        except UsageError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert (
        f"was called in a child process of rank {world.rank}, which is not a rank"
        in os.read(read, 999).decode()
    )
    os.close(read)
    os.close(write)
    sys.stdout.flush()
