"""Every rank says what it does: the same phases in the same order on all ranks, each wait with its call and line."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep
from samestep.rundir import PHASES, WAITS
from samestep.train.group.world import joined
from samestep.train.step import spine
from samestep.train.subscriber import Subscriber

ROWS = torch.rand(12, 3)


class Heard(Subscriber):
    def __init__(self):
        self.entered = []
        spine().subscribe(self)

    def phase_begins(self, phase, call):
        self.entered.append((phase, call))

    def phases(self):
        """Each phase once where it follows itself."""
        names = [phase for phase, _ in self.entered]
        return [name for at, name in enumerate(names) if names[at - 1 : at] != [name]]


def test_a_step_is_data_forward_backward_exchange_and_optimizer(world):
    model = samestep.replicate(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    heard = Heard()
    steps = []
    for (rows,) in samestep.loader(TensorDataset(ROWS), 4):
        heard.entered.clear()
        model(rows).sum().backward()
        optimizer.step()
        steps.append([phase for phase in heard.phases() if phase != "call"])
    alone = ["backward", "user", "optimizer", "user"]
    inside = ["forward", "user", "backward", "exchange", "backward", "user", "optimizer", "user"]
    assert steps[-1] == (inside if world.size > 1 else alone)
    assert {phase for phase, _ in heard.entered} <= set(PHASES)


def test_a_hook_on_a_parameter_is_a_part_of_backward_and_of_no_wait(world):
    model, phases = samestep.replicate(nn.Linear(3, 1)), set()
    model.weight.register_hook(lambda _: phases.add(joined().phase[0]))
    model.bias.register_post_accumulate_grad_hook(lambda _: phases.add(joined().phase[0]))
    for (rows,) in samestep.loader(TensorDataset(ROWS), 4):
        model(rows).sum().backward()
    assert phases == {"backward"}


def test_the_waits_are_as_many_on_every_rank_and_a_call_has_its_line(world):
    model = samestep.replicate(nn.Linear(3, 1))
    heard = Heard()
    for (rows,) in samestep.loader(TensorDataset(ROWS), 5):
        model(rows).sum().backward()
    samestep.sum(1)
    waits = sum(phase in WAITS for phase, _ in heard.entered)
    assert (waits > 0) == (world.size > 1)
    assert samestep.gather([waits]) == [waits] * world.size
    if world.size > 1:
        call = next(call for _, call in heard.entered if call.startswith("samestep.sum"))
        assert call.startswith("samestep.sum (test_phases.py:")


def test_a_gradient_that_only_one_rank_looks_at_is_no_wait(world):
    model = samestep.replicate(nn.Linear(3, 1))
    heard = Heard()
    for (rows,) in samestep.loader(TensorDataset(ROWS), 6):
        loss = model(rows).sum()
        if world.rank == 0:
            torch.autograd.grad(loss, model.weight, retain_graph=True)
        loss.backward()
    waits = sum(phase in WAITS for phase, _ in heard.entered)
    assert samestep.gather([waits]) == [waits] * world.size


def test_evaluation_is_told_from_training(world):
    model = samestep.replicate(nn.Linear(3, 1)).eval()
    heard = Heard()
    with torch.no_grad():
        for (rows,) in samestep.loader(TensorDataset(ROWS), 4):
            assert heard.entered[-1][0] == "evaluation"
            model(rows)
    assert "exchange" not in heard.phases()
    assert joined().phase[0] == "user"
