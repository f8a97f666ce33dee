"""`samestep convert` follows what training scripts of public repositories do to batches and models."""

import pytest
from convert.test_convert import BEGIN, STEP, _after, _of, _place  # noqa: F401

NET = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.unused = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(1, 1)
    def logits(self, x):
        return self.head(self.body(x))
net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
"""
MIXED = (
    "this loop takes batches of two loaders, of which a process may have unlike parts; give both one batch_size and "
    "drop_last=True, or add up samestep.mean(loss, weight=len(batch)) of each loader's loss"
)
ENDLESS = "def endless(loader):\n    while True:\n        yield from loader\n"


@pytest.mark.parametrize("call", ["net.logits(x)", "net.head(net.body(x))"])
def test_the_parts_of_a_model_that_are_called_in_its_place_are_replicated(call):
    made = _after(f"{BEGIN}{NET}for x, y in train:\n{STEP.replace('model(x)', call)}")
    assert "samestep.replicate(net.body)\nsamestep.replicate(net.head)\noptimizer = " in made
    assert "unused)" not in made


def test_a_model_that_no_line_calls_is_listed():
    net = NET.replace("self.head(self.body(x))", "x @ self.body.weight")
    gaps = _of(f"{BEGIN}{net}for x, y in train:\n{STEP.replace('model(x)', 'net.logits(x)')}").gaps
    said = "no line calls net(...), and replicate exchanges the gradients of such calls alone"
    assert [gap for gap in gaps if said in gap]


def test_a_method_of_a_model_from_a_library_is_no_call_of_it():
    text = f"{BEGIN}{NET}for x, y in train:\n{STEP.replace('model(x)', 'net.body(x)')}"
    assert "samestep.replicate(net.body)\noptimizer" in _after(text)


@pytest.mark.parametrize(("drops", "is_gap"), [(", drop_last=True", False), ("", True)])
def test_endless_batches_of_two_loaders_are_followed_through_a_generator(drops, is_gap):
    begin = BEGIN.replace("batch_size=8, shuffle=True", f"batch_size=size{drops}").replace(
        "batch_size=8", f"batch_size=size{drops}"
    )
    lines = f"size = 8\n{ENDLESS}pairs = zip(endless(train), endless(test))\nfor _ in range(4):\n"
    lines += f"    (x, y), (far, _) = next(pairs)\n{STEP.replace('(x), y)', '(x), y) + model(far).mean()')}"
    gaps = _of(begin + lines).gaps
    assert [("two loaders" in gap) for gap in gaps] == [True] * is_gap
    assert not _of(f"{BEGIN}{ENDLESS}for x, y in endless(train):\n{STEP}").gaps


def test_a_function_of_autograd_notes_indices_in_its_context():
    function = (
        "class Code(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n"
        "        at = x.argmax(1)\n        ctx.mark_non_differentiable(at)\n        return at\ncode = Code.apply\n"
    )
    net = "class Coded(nn.Module):\n    def forward(self, x):\n        return x + code(x)[:, None]\n"
    text = f"{BEGIN}{function}{net}coded = Coded()\nfor x, y in train:\n{STEP.replace('(x)', '(coded(x))')}"
    assert not _of(text).gaps


@pytest.mark.parametrize(
    ("place", "is_gap"),
    [
        ("..., 2:4", False),
        (":, 1:2", False),
        (":4", True),
        (":4, 1", True),
        ("torch.randperm(len(x)), 1", True),
    ],
)
def test_columns_that_are_set_in_a_batch_leave_its_samples_in_place(place, is_gap):
    for value in (f"out[{place}] * 2", "0"):
        lines = f"for x, y in train:\n    out = model(x)\n    out[{place}] = {value}\n"
        lines += "    F.cross_entropy(out, y).backward()\n    optimizer.step()\n"
        assert bool(_of(BEGIN + lines).gaps) == is_gap


def test_a_stack_of_the_batches_of_a_pass_is_listed_and_a_stack_of_steps_is_not():
    lines = "got = []\nwith torch.no_grad():\n    for x, y in train:\n        got.append(model(x))\n"
    lines += "print(torch.stack(got).std())\n"
    (gap,) = _of(f"{BEGIN}for x, y in train:\n{STEP}{lines}").gaps
    assert "stacks batches, of which processes have unlike parts; join them by concatenate or cat" in gap
    steps = "    outs = []\n    for _ in range(3):\n        outs.append(model(x))\n"
    steps += "    F.cross_entropy(torch.stack(outs).mean(0), y).backward()\n"
    assert not _of(f"{BEGIN}for x, y in train:\n{steps}").gaps


def test_a_stack_of_the_losses_of_a_batch_is_a_number_of_the_batch():
    lines = "losses = torch.stack([F.cross_entropy(out, y) for out in (model(x), model(x))])\n    total += losses\n"
    text = f"{BEGIN}total = 0\nfor x, y in train:\n    {lines}    losses.sum().backward()\nprint(total)\n"
    assert not _of(text).gaps
    assert "total += losses * train.share" in _after(text)
    assert "print(samestep.sum(total))" in _after(text)


def test_the_order_that_a_rank_draws_is_not_taken_for_the_whole_batch():
    lines = "for x, y in train:\n    out = model(x)\n    both = torch.cat([out, out])\n"
    lines += "    at = torch.randperm(both.size(0))\n    loss = (both - both[at]).pow(2).mean()\n    loss.backward()\n"
    assert [gap for gap in _of(BEGIN + lines).gaps if "(randperm, " in gap]


def test_a_norm_over_the_samples_of_stacked_gradients_is_listed():
    lines = "for x, y in train:\n    at = torch.stack([x, x * 2]).requires_grad_()\n    out = model(at)\n"
    lines += "    slope = torch.autograd.grad(out, at, torch.ones_like(out), create_graph=True)[0]\n"
    lines += "    ((slope.norm(2, dim=DIM) - 1) ** 2).mean().backward()\n    optimizer.step()\n"
    assert [gap for gap in _of(BEGIN + lines.replace("DIM", "1")).gaps if "compares samples" in gap]
    assert not _of(BEGIN + lines.replace("torch.stack([x, x * 2])", "x").replace("DIM", "1")).gaps


def test_the_cause_of_a_value_that_is_made_in_two_ways_is_named():
    lines = "for x, y in train:\n    if wide:\n        loss = model(x[torch.randperm(len(x))]).mean()\n"
    lines += "    else:\n        loss = model(x).mean()\n    loss.backward()\n    optimizer.step()\n"
    assert [gap for gap in _of(BEGIN + lines).gaps if "(randperm, " in gap]


def test_a_loop_that_only_shows_gradients_updates_no_model():
    lines = f"for x, y in train:\n{STEP}    last = list(model.children())[-1]\n"
    shown = "    for name, p in last.named_parameters():\n        log(name, p.grad.norm())\n"
    assert not _of(f"{BEGIN}{lines}{shown}").gaps
    changed = shown.replace("log(name, p.grad.norm())", "p.data.add_(p.grad)")
    assert [gap for gap in _of(f"{BEGIN}{lines}{changed}").gaps if "no line calls last(...)" in gap]


@pytest.mark.parametrize(("after", "is_gap"), [(True, False), (False, True)])
def test_a_batch_of_another_loader_counts_only_before_the_backward(after, is_gap):
    other = "    far, _ = next(iter(test))\n"
    lines = f"{STEP}{other}" if after else f"{other}{STEP}"
    assert [gap for gap in _of(f"{BEGIN}for x, y in train:\n{lines}").gaps if "two loaders" in gap] == [
        f"train.py:14: {MIXED}"
    ] * is_gap


def test_a_mean_of_a_batch_of_another_loader_is_listed():
    shown = "    far, near = next(iter(test))\n    print(F.cross_entropy(model(far), near).item())\n"
    (gap,) = _of(f"{BEGIN}for x, y in train:\n{STEP}{shown}").gaps
    assert "may be of another batch than the latest; write samestep.mean(value, weight=len(batch))" in gap


def test_two_loaders_that_a_function_evaluates_are_left_together():
    begin = BEGIN.replace("model =", "last = DataLoader(data, batch_size=8)\nmodel =")
    function = "def worst(loader):\n    got = 0\n    with torch.no_grad():\n        for x, y in loader:\n"
    function += (
        "            got = max(got, model(x).max().item())\n    return got\nprint(worst(test), worst(last))\n"
    )
    found = _of(f"{begin}for x, y in train:\n{STEP}{function}")
    assert not found.gaps
    assert [note.partition(": this DataLoader")[0] for note in found.notes] == ["train.py:7", "train.py:8"]


def test_a_method_that_picks_parameters_names_the_model():
    picks = "    def some_params(self):\n        for part in [self.head]:\n            for p in part.parameters():\n"
    picks += "                yield p\nnet = Net()\n"
    net = NET.replace("net = Net()\n", picks).replace("net.parameters()", "[{'params': net.some_params()}]")
    net = net.replace("def logits", "def forward")
    made = _after(f"{BEGIN}{net}for x, y in train:\n{STEP.replace('model(', 'net(')}")
    assert "samestep.replicate(Net())" in made or "net = samestep.replicate(net)" in made


def test_an_average_that_begins_with_the_first_loss_is_of_the_whole_batch():
    lines = "    if mean is None:\n        mean = loss.item()\n"
    lines += "    else:\n        mean = 0.9 * mean + 0.1 * loss.item()\n"
    text = f"{BEGIN}mean = None\nfor x, y in train:\n{STEP}{lines}    print(mean)\n"
    assert "mean = samestep.mean(loss.item())\n" in _after(text)
    assert "0.9 * mean + 0.1 * samestep.mean(loss.item())" in _after(text)
    assert not _of(text).gaps


@pytest.mark.parametrize("call", ["fit(model)", "fit(net=model)"])
def test_a_model_whose_optimizer_is_made_in_each_epoch_is_replicated_once(call):
    begin = BEGIN.partition("optimizer =")[0]
    fit = f"def fit(net):\n    optimizer = torch.optim.SGD(net.parameters(), 0.1)\n    for x, y in train:\n{STEP}"
    fit = fit.replace("\n    ", "\n        ").replace("\n        optimizer = t", "\n    optimizer = t")
    fit = fit.replace("        for x", "    for x").replace("model(", "net(")
    made = _after(f"{begin}{fit}for epoch in range(3):\n    {call}\n")
    assert "model = samestep.replicate(model)\nfor epoch in range(3):" in made
    assert made.count("replicate") == 1


def test_a_sum_over_dimensions_that_only_the_run_knows_is_of_the_whole_batch():
    lines = (
        "    loss = (model(x).flatten() * 2).sum(dim=DIM).mean()\n    loss.backward()\n    optimizer.step()\n"
    )
    text = f"{BEGIN}dims = (-1, -2) if wide else (-1, -2, -3)\nfor x, y in train:\n{lines}"
    assert "(samestep.gather(model(x)).flatten() * 2).sum(dim=dims)" in _after(text.replace("DIM", "dims"))
    assert "gather" not in _after(text.replace("DIM", "-1"))


@pytest.mark.parametrize(
    ("shape", "is_gap"), [("1, self.size, 4", True), ("(self.size, 4)", True), ("1, x.size(0), 4", False)]
)
def test_the_size_of_the_whole_batch_in_forward_is_listed(shape, is_gap):
    net = "class Net(nn.Module):\n    def __init__(self, size):\n        super().__init__()\n"
    net += "        self.out, self.size = nn.Linear(4, 3), size\n    def forward(self, x):\n"
    net += f"        return self.out(x + torch.zeros({shape}))\nsize = 8\n"
    begin = BEGIN.replace("batch_size=8", "batch_size=size").replace("nn.Linear(4, 3)", "Net(size)")
    gaps = _of(begin.replace("data =", f"{net}data =") + f"for x, y in train:\n{STEP}").gaps
    assert [gap for gap in gaps if "`self.size` is the size of the whole batch" in gap] == [*gaps]
    assert bool(gaps) == is_gap


@pytest.mark.parametrize(
    ("parts", "is_count"), [("x, y = batch", False), ("x, y = batch[0], batch[1]", False), ("", True)]
)
def test_the_length_of_a_batch_that_is_taken_apart_counts_its_parts(parts, is_count):
    lines = f"for batch in train:\n    {parts or 'x, y = take(batch)'}\n{STEP}    print(len(batch))\n"
    assert ("print(samestep.sum(len(batch)))" in _after(f"{BEGIN}{lines}")) == is_count


def test_a_loader_that_a_library_derives_from_torchs_is_taken_over_with_the_count_of_its_batches():
    loader = "from torch_geometric.loader import DataLoader\nloader = DataLoader(data, 8, True)\n"
    text = f"{BEGIN}{loader}total = 0\nfor batch in loader:\n    batch = batch.to('cpu')\n"
    text += "    loss = F.cross_entropy(model(batch.x), batch.y)\n"
    text += "    loss.backward()\n    optimizer.step()\n    total += loss.item() * batch.num_graphs\nprint(total)\n"
    assert not _of(text).gaps
    made = _after(text)
    assert "loader = samestep.loader(DataLoader(data, 8, True))" in made
    assert "if loader.share: total += loss.item() * batch.num_graphs\nprint(samestep.sum(total))" in made


METRIC = "import torchmetrics\nmetric = torchmetrics.Accuracy(task='multiclass', num_classes=3).to('cpu')\n"


def test_a_metric_that_adds_up_its_values_over_processes_by_itself_gets_those_of_a_share():
    lines = "model.eval()\nwith torch.no_grad():\n    for x, y in test:\n        metric.update(model(x), y)\n"
    begin = f"{METRIC}{BEGIN}for x, y in train:\n    out = model(x)\n{STEP}"
    text = f"{begin}    metric(out, y)\n{lines}print(metric.compute())\n"
    assert not _of(text).gaps
    made = _after(text)
    assert "if train.share: metric(out, y)\n" in made
    assert "        metric.update(model(x), y)\nprint(metric.compute())" in made
    (gap,) = _of(f"{begin}    print(metric(out, y))\n").gaps
    assert "the metric's value of this process's share; print metric.compute() after the loop" in gap
    (gap,) = _of(text.replace("metric(out, y)", "metric(model(x), y)")).gaps
    assert "counts samples twice" in gap


OF_LIBRARY = (
    "from transformers import BertConfig, BertForSequenceClassification as Bert\nfrom peft import get_peft_model\n"
    "model = Bert(BertConfig(num_labels=3))\n{}optimizer = torch.optim.SGD([p for p in model.parameters()], 0.1)\n"
    "total = 0\nfor batch in train:\n    batch = {{k: v.to('cpu') for k, v in batch.items()}}\n    {}\n"
    "    loss.backward()\n    optimizer.step()\n    total += loss.item()\nprint(total)\n"
)


@pytest.mark.parametrize("wrapped", ["", "model = get_peft_model(model, settings)\n"])
@pytest.mark.parametrize(
    "taken",
    [
        "outputs = model(**batch)\n    loss = outputs.loss",
        "loss = model(**batch)['loss']",
        "loss, logits = model(**batch)[:2]",
        "loss = model(**batch)[0]",
        "loss = model(batch['x'])",
    ],
)
def test_the_loss_that_a_model_of_a_library_computes_itself_is_taken_for_a_mean_and_noted(wrapped, taken):
    text = BEGIN[: BEGIN.index("model =")] + OF_LIBRARY.format(wrapped, taken)
    assert not _of(text).gaps
    (note,) = [note for note in _of(text).notes if "the model computes this loss itself" in note]
    assert "docs/losses.md" in note
    made = _after(text)
    assert "total += loss.item() * train.share\nprint(samestep.sum(total))" in made
    assert 'loss="sum"' not in made


def test_a_loader_that_next_trains_through_a_generator_is_shared_also_where_numbers_have_no_total():
    loaders = "batches = endless(DataLoader(data, 8, drop_last=True))\nheld = endless(DataLoader(data, 8))\n"
    step = "    for _ in range(2):\n        val = model(next(batches))\n        (val / 2).backward()\n"
    step += "    print(f'{val.item()}')\n    if step % 2 == 0:\n        with torch.no_grad():\n"
    step += "            val = model(next(held))\n            print(f'{val.item()}')\n"
    begin = BEGIN.replace("model = nn.Linear(4, 3)", "from library import Net\nmodel = Net()")
    endless = ENDLESS.replace("yield from loader", "for batch in loader:\n            yield batch")
    made = _after(f"{begin}{endless}{loaders}for step in range(9):\n{step}")
    assert "endless(samestep.loader(data, 8, drop_last=True))" in made


@pytest.mark.parametrize(("layer", "is_replicated"), [("nn.BatchNorm1d(3)", True), ("nn.ReLU()", False)])
def test_a_second_model_that_is_called_in_train_mode_is_replicated_if_it_has_batchnorm(layer, is_replicated):
    models = (
        f"def block():\n    return nn.Sequential(nn.Linear(4, 3), {layer})\n"
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.body = block()\n"
        "    def forward(self, x):\n        return self.body(x)\n"
        "def create():\n    net = Net()\n    return net\nmodel = create()\nteacher = create()\n"
        "other = nn.BatchNorm1d(3).eval()\n"
    )
    begin = BEGIN.replace("model = nn.Linear(4, 3)\n", models)
    loop = "for x, y in train:\n    with torch.no_grad():\n        teacher(x)\n" + STEP
    made = _after(begin + loop)
    assert ("teacher = samestep.replicate(create())\n" in made) == is_replicated
    assert "net = Net()\n" in made


def test_a_momentum_that_is_computed_from_a_share_is_listed():
    begin = BEGIN.replace("nn.Linear(4, 3)", "nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))")
    loop = (
        "seen = 0\nmodel.train()\nfor x, y in train:\n    pace = len(x) / (seen + len(x))\n"
        "    for layer in model.modules():\n        layer.momentum = pace\n    model(x)\n    seen += len(x)\n"
    )
    trained = f"for x, y in train:\n{STEP}"
    (gap,) = _of(begin + trained + loop).gaps
    assert "`len(x) / (seen + len(x))` is divided by a count in a share" in gap


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("assert (y > 0).sum() > 0", "assert samestep.sum((y > 0).sum()) > 0"),
        ("assert len(x) == 8, 'full'", "assert samestep.sum(len(x)) == 8, 'full'"),
        ("assert x.shape[1] == 4", "assert x.shape[1] == 4"),
        ("assert len(x) == len(y)", "assert len(x) == len(y)"),
    ],
)
def test_a_count_that_is_asserted_is_the_whole_batchs(line, becomes):
    assert f"    {becomes}\n" in _after(f"{BEGIN}for x, y in train:\n    {line}\n{STEP}")
