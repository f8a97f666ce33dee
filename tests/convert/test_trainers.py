"""`samestep convert` follows what the trainers of public repositories do with loaders, models and their layers."""

import time

import pytest
from convert.test_convert import BEGIN, STEP, _after, _of, _place  # noqa: F401

ENDS = "in an evaluation a process may have fewer batches than the loader, and next() fails there"
EVALUATION = """\
right, batches = 0, iter(test)
model.eval()
for _ in range(len(test)):
    x, y = next(batches)
    right += (model(x).argmax(1) == y).sum()
print(right)
"""
DATA = "".join(BEGIN.splitlines(keepends=True)[:-2])
CYCLE = """\
class Cycle:
    def __init__(self, loader):
        self.loader = loader
    def __iter__(self):
        while True:
            for batch in self.loader:
                yield batch
batches = iter(Cycle(train))
for _ in range(5):
    x, y = next(batches)
"""
DIFFUSION = """\
def default(value, made):
    return value if value is not None else made() if callable(made) else made
class Noised(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.size = nn.Linear(4, 4), 4
    def forward(self, x, noise=None):
        b, c, device, size = *x.shape, x.device, self.size
        step = torch.randint(0, 10, (b,), device=device)
        noise = default(noise, lambda: torch.randn_like(x))
        return ((self.net(x + noise * step[:, None]) - noise) ** 2).flatten(1).mean(1).mean()
noised = Noised()
optimizer = torch.optim.SGD(noised.parameters(), 0.1)
for x, _ in train:
    loss = noised(x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_model_is_replicated_in_the_branch_in_which_a_function_makes_it():
    make = "def made():\n    return nn.Linear(4, 3)\nis_trained = bool(len(data))\n"
    lines = f"{make}if is_trained:\n    net = made()\n    print(net)\n"
    lines += "    steps = torch.optim.SGD(net.parameters(), 0.1)\n"
    assert "\nif is_trained:\n    net = samestep.replicate(made())\n" in _after(
        f"{BEGIN}{lines}for x, y in train:\n{STEP.replace('model(x)', 'net(x)')}"
    )


@pytest.mark.parametrize(("shuffles", "count"), [("", 0), (", shuffle=True", 1), (", drop_last=True", 0)])
def test_an_evaluation_by_next_is_of_all_samples_or_is_listed(shuffles, count):
    begin = BEGIN.replace(
        "test = DataLoader(data, batch_size=8", f"test = DataLoader(data, batch_size=8{shuffles}"
    )
    found = _of(f"{begin}for x, y in train:\n{STEP}{EVALUATION}")
    assert [ENDS in gap for gap in found.gaps] == [True] * count
    assert any(ENDS in note for note in found.notes) == (not shuffles)


@pytest.mark.parametrize(
    "taken",
    [
        "    x, y = next(batches, (None, None))\n    if x is None:\n        break\n",
        "    try:\n        x, y = next(batches)\n    except StopIteration:\n        break\n",
    ],
)
def test_the_end_of_batches_that_is_caught_is_no_gap(taken):
    lines = EVALUATION.replace("    x, y = next(batches)\n", taken)
    found = _of(f"{BEGIN}for x, y in train:\n{STEP}{lines}")
    assert not any(ENDS in text for text in (*found.gaps, *found.notes))


def test_batches_of_an_object_that_goes_over_a_loader_are_followed():
    assert not _of(f"{BEGIN}{CYCLE}{STEP}").gaps


def test_a_weak_reference_to_a_trainer_is_the_trainer():
    lines = "class Trainer:\n    def __init__(self):\n        self.total = 0.0\ntrainer = Trainer()\n"
    lines = f"import weakref\n{lines}held = weakref.proxy(trainer)\nfor x, y in train:\n{STEP}"
    assert "print(samestep.sum(trainer.total))" in _after(
        f"{BEGIN}{lines}    held.total += loss.item()\nprint(trainer.total)\n"
    )


def test_shapes_that_are_opened_in_a_tuple_and_defaults_that_are_functions_are_known():
    assert not _of(f"{DATA}{DIFFUSION}").gaps


def test_an_optimizer_gets_the_weights_of_the_layers_that_a_loop_has_picked():
    picked = (
        "weights, biases = [], []\nfor layer in model.modules():\n    if hasattr(layer, 'bias'):\n"
        "        biases.append(layer.bias)\n        weights.append(layer.weight)\n"
        "optimizer = torch.optim.SGD(biases, 0.1)\noptimizer.add_param_group({'params': weights})\n"
    )
    begin = BEGIN.replace("optimizer = torch.optim.SGD(model.parameters(), 0.1)\n", picked)
    found = _of(f"{begin}for x, y in train:\n{STEP}")
    assert not found.gaps
    assert "model = samestep.replicate(nn.Linear(4, 3))\n" in _after(f"{begin}for x, y in train:\n{STEP}")


def test_a_list_of_parameters_in_a_model_is_no_optimizer():
    net = (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.held = []\n"
        "        block = nn.Linear(4, 3)\n        self.held.extend(block.parameters())\n        self.blocks = [block]\n"
        "        self.held = nn.ParameterList(self.held)\n"
        "    def forward(self, x):\n        return self.blocks[0](x)\nnet = Net()\n"
    )
    lines = f"{net}optimizer = torch.optim.SGD(net.parameters(), 0.1)\nfor x, y in train:\n"
    lines += STEP.replace("model(x)", "net(x)")
    assert "replicate(block)" not in _after(f"{DATA}{lines}")
    assert not _of(f"{DATA}{lines}").gaps


def test_layers_in_layers_are_followed_in_seconds():
    inner, lines = "nn.Linear(4, 4)", ""
    for depth in range(6):
        lines += (
            f"class Stack{depth}(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            f"        self.layers = nn.ModuleList([{inner} for _ in range(2)])\n    def forward(self, x):\n"
            f"        for layer in self.layers:\n            x = x + layer(x) + layer(x)\n        return x\n"
        )
        inner = f"Stack{depth}()"
    text = f"{DATA}{lines}net = {inner}\noptimizer = torch.optim.SGD(net.parameters(), 0.1)\nfor _ in range(2):\n"
    text += "    for x, y in train:\n" + STEP.replace("model(x)", "net(x)").replace("    ", " " * 8)
    begins = time.process_time()
    assert not _of(text).gaps
    assert time.process_time() - begins < 20


@pytest.mark.parametrize("size", ["len(x)", "x.size(0)"])
def test_a_batch_that_is_too_small_to_train_is_the_whole_batch(size):
    step = STEP.replace("    ", " " * 8)
    made = _after(f"{BEGIN}for x, y in train:\n    if {size} > 1:\n{step}        print(loss.item())\n")
    assert f"    if samestep.sum({size}) > 1:\n" in made
    assert "print(samestep.mean(loss.item()))" in made


BACKWARD = """\
def run_epoch(loader, steps):
    total = 0.0
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if steps is not None:
            steps.step()
            steps.zero_grad()
        total += loss.item() * len(x)
        print(total)
model.train()
run_epoch(train, optimizer)
model.eval()
run_epoch(test, None)
"""


def test_an_evaluation_that_computes_gradients_has_no_totals_of_single_batches():
    assert any("no total can be taken in an evaluation" in gap for gap in _of(f"{BEGIN}{BACKWARD}").gaps)
    assert not _of(f"{BEGIN}{BACKWARD.replace('(test, None)', '(test, optimizer)')}").gaps


def test_an_optimizer_that_is_none_makes_no_steps():
    trainer = "class Trainer:\n    def __init__(self, steps):\n        self.steps = steps\n"
    trainer += "    def train(self, loss):\n        loss.backward()\n        if self.steps is not None:\n"
    trainer += "            self.steps.step()\n            self.steps.zero_grad()\n"
    lines = BACKWARD.replace("        loss.backward()\n", "        steps.train(loss)\n")
    start, _, end = lines.partition("        if steps is not None:\n")
    lines = start + end.partition("steps.zero_grad()\n")[2]
    lines = lines.replace("(train, optimizer)", "(train, Trainer(optimizer))").replace(
        "None", "Trainer(None)"
    )
    assert any(
        "no total can be taken in an evaluation" in gap for gap in _of(f"{BEGIN}{trainer}{lines}").gaps
    )


def test_a_loss_that_is_a_module_and_a_part_of_a_model_are_not_left_in_train_mode():
    loss = "class Loss(nn.Module):\n    def forward(self, x, y):\n        return F.cross_entropy(x, y)\n"
    net = "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    net += "        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)\n"
    net += "    def forward(self, x):\n        return self.body(x)\n"
    made = "model = nn.Linear(4, 3)"
    begin = BEGIN.replace(made, f"{loss}{net}model, criterion = Net(), Loss()")
    lines = BACKWARD.replace("F.cross_entropy(model(x), y)", "criterion(model.head(model(x)), y)")
    assert any("no total can be taken in an evaluation" in gap for gap in _of(f"{begin}{lines}").gaps)


def test_batches_that_a_generator_wraps_in_objects_are_followed():
    batch = "class Batch:\n    def __init__(self, x, y):\n        self.x, self.y = x, y\n"
    batch += "        self.mask = torch.ones(4).type_as(x)\n"
    wrapped = "def wrapped(loader):\n    for x, y in loader:\n        yield Batch(x, y)\n"
    step = STEP.replace("model(x), y", "model(b.x * b.mask), b.y")
    found = _of(f"{BEGIN}{batch}{wrapped}for b in wrapped(train):\n{step}    print(loss.item())\n")
    assert not found.gaps


_GROUPED = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.{norm}(4), nn.Linear(4, 3)
    def forward(self, x):
        return self.out(torch.cat([self.norm(part) for part in {parts}]))
model = Net()
"""


@pytest.mark.parametrize(
    ("norm", "parts", "is_gap"),
    [
        ("BatchNorm1d", "x.chunk(math.ceil(x.shape[0] / 4), 0)", True),
        ("BatchNorm1d", "torch.split(x, 4)", True),
        ("LayerNorm", "x.chunk(2)", False),
        ("BatchNorm1d", "x.chunk(1, 1)", False),
    ],
)
def test_groups_of_samples_that_a_batchnorm_normalizes_are_listed(norm, parts, is_gap):
    begin = BEGIN.replace("model = nn.Linear(4, 3)\n", _GROUPED.format(norm=norm, parts=parts))
    gaps = _of(f"import math\n{begin}for x, y in train:\n{STEP}").gaps
    assert any("BatchNorm normalizes groups of this process's samples" in gap for gap in gaps) == is_gap


@pytest.mark.parametrize(
    ("until", "is_cut"), [("lengths.max()", True), ("2", False), ("x.shape[1] - 1", False)]
)
def test_what_forward_cuts_to_a_number_of_the_share_is_noted(until, is_cut):
    net = "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    net += "        self.net = nn.Linear(4, 3)\n    def forward(self, x, lengths):\n"
    net += f"        return self.net(x)[:, :{until}]\nmodel = Net()\n"
    lines = f"for x, y in train:\n{STEP}".replace("model(x)", "model(x, y)")
    notes = _of(BEGIN.replace("model = nn.Linear(4, 3)\n", net) + lines).notes
    assert any("each process cuts this to a number of its own samples" in note for note in notes) == is_cut
