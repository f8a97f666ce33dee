"""A model that is compiled is compiled on several ranks too, and with same=True has the numbers of one process."""

import pytest

SCRIPT = """
import torch, samestep
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.drop(self.first(x).relu()))

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
world = samestep.init()
train = samestep.loader(TensorDataset(torch.rand(22, 4)), batch_size=8, shuffle=True)
model = Net()
if "{when}" == "before":
    model.compile(backend="aot_eager")
model = samestep.replicate(model, same={same})
if "{when}" == "in place":
    model.compile(backend="aot_eager")
if "{when}" == "after":
    model = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for (x,) in train:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(round(samestep.mean(loss.item()), 9))
names, node = [], loss.grad_fn
while node is not None:
    names.append(node.name())
    node = next((child for child, _ in node.next_functions if child is not None), None)
assert "CompiledFunctionBackward" in names, names
assert not torch._dynamo.utils.counters["graph_break"], torch._dynamo.utils.counters
"""


def ran(nest, home, size, when, same):
    script = home / "train.py"
    script.write_text(SCRIPT.format(when=when, same=same))
    ranks = nest.start(script, size, cwd=home, apart=True)
    assert nest.wait(ranks) == [0] * size, ranks[0].complained
    assert ranks[0].complained.count("a compiled model may draw by itself") == (same and size > 1)
    return ranks[0].said


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "in place", "after"])
def test_a_compiled_model_is_compiled_in_one_piece_and_draws_the_serial_numbers(when, nest, tmp_path):
    assert ran(nest, tmp_path, 1, when, same=True) == ran(nest, tmp_path, 2, when, same=True)


@pytest.mark.slow
def test_a_compiled_model_is_compiled_by_default_too(nest, tmp_path):
    ran(nest, tmp_path, 3, "after", same=False)
