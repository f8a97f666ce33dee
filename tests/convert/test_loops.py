"""`samestep convert` follows what branches, parameters and earlier batches leave in a loop, and what makes pairs."""

import pytest
from convert.test_convert import BEGIN, METER, STEP, _after, _of, _place  # noqa: F401

LOSS = "    loss.backward()\n    optimizer.step()\n"


def test_a_loss_that_an_object_keeps_from_an_earlier_batch_is_totalled_when_it_is_kept():
    finder = (
        "class Finder:\n    def __init__(self):\n        self.best = None\n"
        "    def run(self, loader):\n        for step, (x, y) in enumerate(loader):\n"
        "            loss = F.cross_entropy(model(x), y)\n            loss.backward()\n            optimizer.step()\n"
        "            loss = loss.item()\n            if step == 0:\n                self.best = loss\n"
        "            elif loss < self.best:\n                self.best = loss\n        print(self.best)\n"
    )
    found = _of(text := f"{BEGIN}{finder}Finder().run(train)\n")
    assert not found.gaps
    assert _after(text).count("self.best = samestep.mean(loss)\n") == 2
    assert "samestep.mean(loss) < self.best:" in _after(text)


def test_a_parameter_that_its_function_never_sets_is_known_in_the_loop_too():
    epoch = (
        "def epoch(model, teacher=None):\n    for x, y in train:\n        out = model(x)\n"
        "        if teacher is not None:\n            loss = F.mse_loss(out, teacher(x))\n"
        "        else:\n            loss = F.cross_entropy(out, y)\n    " + LOSS.replace("\n", "\n    ")
    )
    text = f"{BEGIN}{epoch.rstrip()}\nepoch(model)\nepoch(model, nn.Linear(4, 3))\n"
    assert not _of(text).gaps
    assert "samestep.gather" not in _after(text)


def test_a_batch_beside_itself_turned_makes_pairs_of_the_whole_batch():
    for turned in (
        "y.unsqueeze(0) == y.unsqueeze(1)",
        "torch.eq(y.unsqueeze(0), y.unsqueeze(1))",
        "y[None] == y[:, None]",
    ):
        lines = f"    same = {turned}\n    loss = (torch.cdist(model(x), model(x)) * same).mean()\n{LOSS}"
        assert turned.replace("y", "samestep.gather(y)") in _after(f"{BEGIN}for x, y in train:\n{lines}")


def test_the_targets_beside_the_best_classes_of_each_sample_are_no_pairs():
    lines = (
        "    best = model(x).topk(2, 1)[1].t()\n    hits = best.eq(y.view(1, -1).expand_as(best))\n"
        "    print(hits[:1].reshape(-1).float().sum())\n"
    )
    found = _of(text := f"{BEGIN}for x, y in train:\n{STEP}{lines}")
    assert not found.gaps
    assert "best.eq(samestep.gather(y).view(1, -1).expand_as(best))" in _after(text)


def test_a_meter_of_a_loss_over_pairs_gets_the_whole_batch_on_every_rank():
    lines = (
        f"    z = model(x)\n    loss = (z @ z.T).exp().mean()\n{LOSS}    meter.update(loss.item(), len(y))\n"
    )
    made = _after(f"{BEGIN}{METER}for x, y in train:\n{lines}print(meter.sum / meter.count)\n")
    assert "    meter.update(loss.item(), samestep.sum(len(y)))\nprint(meter.sum / meter.count)\n" in made


def test_a_divergence_of_what_the_model_returns_from_a_prior_is_one_of_each_sample():
    model = (
        "from torch.distributions import Normal, kl_divergence\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.layer = nn.Linear(4, 3)\n"
        "    def forward(self, x):\n        return Normal(self.layer(x), 1.0)\n"
        "prior = Normal(torch.zeros(3), torch.ones(3))\nmodel = Net()\n"
    )
    begin = BEGIN.replace("model = nn.Linear(4, 3)\n", model)
    lines = "    q = model(x)\n    loss = kl_divergence(q, prior).sum(-1).mean() - prior.log_prob(q.rsample()).mean()\n"
    found = _of(text := f"{begin}for x, y in train:\n{lines}{LOSS}")
    assert not found.gaps
    assert lines in _after(text)


@pytest.mark.parametrize(
    "evaluated", ["", "with torch.no_grad():\n    for x, y in test:\n        model(x)\n"]
)
def test_each_layer_of_a_list_that_a_method_calls_is_replicated(evaluated):
    model = (
        "class Flow(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])\n"
        "    def log_prob(self, x):\n        for layer in self.layers:\n            x = layer(x)\n"
        "        return -x.square().sum(1)\n    def forward(self, x):\n        return self.log_prob(x)\n"
        "model = Flow()\n"
    )
    begin = BEGIN.replace("model = nn.Linear(4, 3)\n", model)
    found = _of(text := f"{begin}for x, y in train:\n    loss = -model.log_prob(x).mean()\n{LOSS}{evaluated}")
    assert not found.gaps
    assert "for layer in model.layers: samestep.replicate(layer)\n" in _after(text)


def test_a_name_that_is_not_used_any_more_is_left_out_of_its_import():
    assert "from torch.utils.data import TensorDataset\n" in _after(f"{BEGIN}for x, y in train:\n{STEP}")
    used = f"{BEGIN}assert isinstance(train, DataLoader)\nfor x, y in train:\n{STEP}"
    assert "from torch.utils.data import DataLoader, TensorDataset\n" in _after(used)


MOVED = "    x = x.to(device)\n    loss = F.cross_entropy(model(x), y.to(device))\n" + LOSS


@pytest.mark.parametrize(
    ("before", "stays"),
    [
        ("", False),
        ("    count = len(x) + y.size(0)\n", False),
        ("    x = x + torch.randn_like(x)\n", True),
        ("    seen.append(y.numpy())\n", True),
    ],
    ids=["moved-first", "only-its-size", "noise-on-the-host", "to-numpy"],
)
def test_a_batch_that_the_script_uses_before_it_moves_it_stays_on_the_host(before, stays):
    text = f"{BEGIN}device = torch.device('cuda')\nseen = []\nfor x, y in train:\n{before}{MOVED}"
    assert ("on_device=False)" in _after(text)) == stays
    assert "on_device" not in _after(text.replace("x.to(device)", "x").replace("y.to(device)", "y"))


RECURRENT = (
    "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.rnn = nn.GRU(4, 3, batch_first=True)\n"
    "    def begin(self, size):\n        return next(self.parameters()).new_zeros(1, size, 3)\n"
    "    def forward(self, x, hidden):\n        batch, length = x.shape[:2]\n"
    "        out, hidden = self.rnn(x, hidden)\n        return out.reshape(batch * length, -1), hidden\n"
    "model = Net()\n"
)
CARRIES = "    out, hidden = model(x, hidden.detach())\n    loss = F.cross_entropy(out, y.flatten())\n" + LOSS


@pytest.mark.parametrize("size", ["16", "size"])
def test_a_state_that_batches_carry_and_that_has_the_whole_batchs_size_is_a_gap(size):
    begin = BEGIN.replace("model = nn.Linear(4, 3)\n", RECURRENT)
    found = _of(
        f"{begin}size = 16\nfor epoch in range(2):\n    hidden = model.begin({size})\n{_loop(CARRIES)}"
    )
    assert len(found.gaps) == 1
    assert "make it for x.size(0) samples" in found.gaps[0]
    made = "    if hidden is None: hidden = model.begin(x.size(0))\n"
    assert not _of(f"{begin}for epoch in range(2):\n    hidden = None\n{_loop(made + CARRIES)}").gaps


def test_a_state_that_begins_with_none_and_is_detached_where_there_is_one_is_no_gap():
    begin = BEGIN.replace("model = nn.Linear(4, 3)\n", RECURRENT)
    detach = "def detach(state):\n    return tuple(part.detach() for part in state)\n"
    guarded = "    if hidden is not None:\n        hidden = detach(hidden)\n"
    carries = CARRIES.replace("hidden.detach()", "hidden")
    text = f"{begin}{detach}for epoch in range(2):\n    hidden = None\n{_loop(guarded + carries)}"
    assert not _of(text).gaps


def test_a_cycle_of_a_loader_becomes_the_loaders_own():
    for line, called in (("import itertools", "itertools.cycle"), ("from itertools import cycle", "cycle")):
        text = (
            f"{line}\n{BEGIN}batches = {called}(train)\nfor _ in range(9):\n    x, y = next(batches)\n{STEP}"
        )
        assert not _of(f"{text}    print(loss.item())\n").gaps
        assert "batches = train.cycle()\n" in _after(text)


INNER = (
    "def forever(loader):\n    while True:\n        yield from loader\nbatches, held = forever(train), forever(test)\n"
    "for step in range(9):\n    for _ in range(2):\n        x, y = next(batches)\n"
    "        loss = F.cross_entropy(model(x), y)\n        loss.backward()\n    optimizer.step()\n"
)


def test_the_last_mean_of_an_inner_loop_of_next_is_shown_until_another_batch_is_taken():
    assert "print(samestep.mean(loss.item()))" in _after(f"{BEGIN}{INNER}    print(loss.item())\n")
    (gap,) = _of(f"{BEGIN}{INNER}    z, _ = next(held)\n    print(loss.item())\n").gaps
    assert "`loss.item()` is made of this process's share" in gap


def test_what_a_loop_over_an_unknown_sequence_counts_is_no_number_of_batches():
    count = "    for a, b in zip(find(model(x)), y):\n        if a == b:\n            n += 1\n"
    counts = f"model.eval()\nn = 0\nfor x, y in train:\n{count}print(n)\n"
    text = f"from found import find\n{BEGIN}for x, y in train:\n{STEP}{counts}"
    assert _of(text).gaps
    assert "max(samestep.gather([n]))" not in _after(text)


def test_a_class_of_torch_decides_a_branch():
    branch = "l.mean().backward()\n    else:\n        l.sum().backward()\n"
    lines = f"    if isinstance(optimizer, torch.optim.Optimizer):\n        {branch}"
    text = f"{BEGIN}for x, y in train:\n    l = F.cross_entropy(model(x), y, reduction='none')\n{lines}"
    assert not _of(text).gaps
    assert 'loss="sum"' not in _after(text)


def test_a_backward_for_each_sample_is_a_gap():
    lines = (
        "    for a, b in zip(x, y):\n        F.cross_entropy(model(a), b).backward()\n    optimizer.step()\n"
    )
    (gap,) = _of(f"{BEGIN}for x, y in train:\n{lines}").gaps
    assert "for each sample" in gap


def test_samples_that_are_packed_after_they_are_gathered_are_noted():
    lines = (
        "    packed = pack_padded_sequence(model(x), y, batch_first=True).data\n    loss = packed.mean()\n"
    )
    imports = "from torch.nn.utils.rnn import pack_padded_sequence\n"
    (note,) = _of(f"{imports}{BEGIN}for x, y in train:\n{lines}{LOSS}").notes
    assert "--same" in note


def _loop(lines):
    return "    for x, y in train:\n" + "".join(f"    {line}\n" for line in lines.splitlines())


def test_outputs_that_are_collected_over_time_steps_stay_this_processs_rows():
    lines = "    outs = []\n    for t in range(4):\n        outs.append(model(x * t))\n"
    lines += f"    loss = F.mse_loss(torch.stack(outs, 1).mean(1), y)\n{LOSS}    total += loss.item()\n"
    text = f"{BEGIN}total = 0\nfor x, y in train:\n{lines}print(total)\n"
    assert not _of(text).gaps
    assert "samestep.gather" not in _after(text)


@pytest.mark.parametrize(
    ("turns", "labels"),
    [
        ("[x * k for k in range(4)]", "torch.arange(4).repeat_interleave(len(x))"),
        ("[x * k for k in range(4)]", "torch.cat([y] * 4)"),
        ("[x, x * 2]", "torch.cat([y, y])"),
    ],
)
def test_a_batch_that_is_turned_several_times_is_not_gathered_in_another_order(turns, labels):
    """Processes have their samples once for each turn, one after another; a sum over them is exact."""
    lines = f"    both, labels = torch.cat({turns}), {labels}\n    out = model(both)\n"
    lines += f"    loss = F.cross_entropy(out, labels)\n{LOSS}    total += loss.item() * both.size(0)\n"
    lines += "    right += (out.argmax(1) == labels).sum().item()\n"
    text = f"{BEGIN}total = right = 0\nfor x, y in train:\n{lines}print(total, right)\n"
    assert not _of(text).gaps
    made = _after(text)
    assert "samestep.gather" not in made
    assert "if train.share: total += loss.item() * both.size(0)" in made
    assert "if train.share: right +=" in made


def test_the_halves_of_a_batch_that_was_joined_with_another_view_are_its_rows():
    halves = "first, second = model(torch.cat([x, -x])).chunk(2)"
    lines = f"    {halves}\n    loss = F.mse_loss(first, second)\n{LOSS}"
    slices = "out = model(torch.cat([x, -x]))\n    first, second = out[:len(x)], out[len(x):]"
    assert not _of(f"{BEGIN}for x, y in train:\n{lines.replace(halves, slices)}    print(loss.item())\n").gaps
    text = f"{BEGIN}for x, y in train:\n{lines}    print(loss.item())\n"
    assert not _of(text).gaps
    assert "print(samestep.mean(loss.item()))" in _after(text)


@pytest.mark.parametrize("taken", ["for views, y in train:\n", "for batch in train:\n    views = batch[0]\n"])
def test_a_list_of_views_that_the_loader_gives_is_not_gathered_as_one_of_samples(taken):
    """samestep.gather would put each process's first views before its second ones."""
    lines = f"    out = model(torch.cat(views, dim=0))\n    loss = (out @ out.t()).mean()\n{LOSS}"
    (gap, *_) = _of(f"{BEGIN}{taken}{lines}").gaps
    assert "compares samples of a share with each other" in gap


def test_the_mean_over_the_pieces_of_a_batch_that_was_turned_is_of_each_sample():
    lines = f"    out = torch.stack(model(torch.cat([x, -x])).chunk(2)).mean(0)\n    loss = F.mse_loss(out, y)\n{LOSS}"
    assert "samestep.mean" not in _after(f"{BEGIN}for x, y in train:\n{lines}")


def test_a_batch_that_is_laid_out_by_constants_is_that_of_all_processes():
    """As the classes of an episode; a size of this process's samples, or of the rest, is none."""
    lines = "    z = model(x).view(4, 2, -1)\n    loss = F.cross_entropy(-torch.cdist(z[:, 0], z[:, 1]), labels)\n"
    made = _after(f"{BEGIN}labels = torch.arange(4)\nfor x, y in train:\n{lines}{LOSS}")
    assert (
        "z = samestep.gather(model(x)).view(4, 2, -1)\n    loss = F.cross_entropy(-torch.cdist(z[:, 0]"
        in made
    )
    for shape in ("-1, 3", "len(x), -1", "x.size(0), 3"):
        lines = f"    loss = F.cross_entropy(model(x).view({shape}), y)\n{LOSS}"
        assert "samestep.gather" not in _after(f"{BEGIN}for x, y in train:\n{lines}")


_NET = (
    "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.layer = nn.Linear(1, 3)\n"
    "    def forward(self, x, y=None):\n        steps, size = x.shape\n"
)


def test_a_loop_over_the_steps_of_time_in_a_model_is_not_one_over_samples():
    lines = (
        "        outs, score = torch.zeros(steps, size, 3), self.layer(x[0][:, None])\n"
        "        for t in range(steps):\n            score = score + self.layer(x[t][:, None])\n"
        "            outs[t] = score\n            if t:\n                outs[t] += outs[t - 1].softmax(1)\n"
        "        return outs\nmodel = Net()\n"
    )
    text = BEGIN.replace("model = nn.Linear(4, 3)\n", _NET + lines)
    step = STEP.replace("model(x), y)", "model(x).view(-1, 3), y.view(-1))")
    assert not _of(f"{text}for x, y in train:\n{step}").gaps


def test_losses_that_a_model_adds_up_by_sample_are_listed():
    lines = (
        "        loss = 0.0\n        for i in range(steps):\n"
        "            loss = loss + F.mse_loss(self.layer(x[i][:, None]), y[i])\n        return loss\nmodel = Net()\n"
    )
    text = BEGIN.replace("model = nn.Linear(4, 3)\n", _NET + lines)
    step = STEP.replace("F.cross_entropy(model(x), y)", "model(x, y)")
    (gap,) = _of(f"{text}for x, y in train:\n{step}").gaps
    assert "the loss is added up by sample" in gap


@pytest.mark.parametrize(
    "pairs",
    [
        "a @ b.transpose(0, 1)",
        "torch.mm(a, torch.transpose(b, 0, 1))",
        "a @ b.permute(1, 0)",
        "torch.einsum('id,jd->ij', [a, b])",
        "F.cosine_similarity(a.unsqueeze(1), b.unsqueeze(0), dim=2)",
        "F.linear(a, b)",
    ],
)
def test_pairs_of_samples_are_those_of_the_whole_batch(pairs):
    lines = "    a, b = model(x), model(x * 2)\n    loss = F.cross_entropy(PAIRS, y)\n"
    made = _after(f"{BEGIN}for x, y in train:\n{lines.replace('PAIRS', pairs)}{LOSS}")
    assert made.count("samestep.gather(") == 3
    by_sample = [
        "torch.einsum('id,id->i', [a, b])[:, None] * a",
        "F.linear(a, torch.eye(3)).transpose(0, 1).t()",
    ]
    for rows in by_sample:
        text = f"{BEGIN}for x, y in train:\n{lines.replace('PAIRS', rows)}{LOSS}"
        assert not _of(text).gaps
        assert "samestep.gather" not in _after(text)


def test_what_a_model_stacks_has_the_samples_second():
    model = (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = nn.Linear(4, 4)\n    def forward(self, x):\n"
        "        return torch.stack([self.layer(x), x])\nmodel = Net()\n"
    )
    begin = BEGIN.replace("model = nn.Linear(4, 3)\n", model)
    for beside in "x", "torch.stack([x, y], 1).transpose(0, 1)":
        lines = f"    out = model(x)\n    loss = (out - {beside}).abs().mean()\n{LOSS}"
        text = f"{begin}total = 0.0\nfor x, y in train:\n{lines}    total += loss.item() * out.shape[1]\nprint(total)\n"
        assert not _of(text).gaps
        assert "if train.share: total += loss.item() * out.shape[1]" in _after(text)


@pytest.mark.parametrize(
    ("collates", "is_second"),
    [
        ("lambda rows: nn.utils.rnn.pad_sequence(rows)", True),
        ("lambda rows: torch.stack(rows, 1)", True),
        ("lambda rows: torch.stack(rows, dim=1)", True),
        ("lambda rows: nn.utils.rnn.pad_sequence(rows, batch_first=True)", False),
        ("torch.stack", False),
    ],
)
def test_a_batch_that_is_collated_along_the_second_dimension_is_counted_there(collates, is_second):
    begin = BEGIN.replace("batch_size=8, shuffle=True)", f"batch_size=8, collate_fn={collates})")
    lines = f"    loss = model(x).mean()\n{LOSS}    total += loss.item() * x.size(1)\n"
    made = _after(f"{begin}total = 0.0\nfor x in train:\n{lines}print(total)\n")
    assert ("if train.share: total += loss.item() * x.size(1)" in made) == is_second
    cut = f"{begin}for x in train:\n    loss = model(x[:-1, :]).mean()\n{LOSS}"
    assert bool(_of(cut).gaps) != is_second
    assert ("gather(" in _after(cut.replace("x[:-1, :])", "x)[1:]"))) != is_second


@pytest.mark.parametrize(
    ("hardest", "becomes"),
    [
        ("loss[loss.argsort()[:size]]", "samestep.gather(loss)[samestep.gather(loss).argsort()[:size]]"),
        ("torch.topk(loss, size)[0]", "torch.topk(samestep.gather(loss), size)[0]"),
    ],
)
def test_the_hardest_samples_are_as_many_as_of_the_whole_batch(hardest, becomes):
    lines = "    loss = F.cross_entropy(model(x), y, reduction='none')\n    size = int(0.7 * len(loss))\n"
    made = _after(f"{BEGIN}for x, y in train:\n{lines}    loss = {hardest}.mean()\n{LOSS}")
    assert "size = int(0.7 * samestep.sum(len(loss)))" in made
    assert f"loss = {becomes}.mean()" in made


def test_a_model_whose_parts_an_optimizer_gets_by_their_names_is_replicated():
    optimizer = "[{'params': getattr(model, part).parameters()} for part in ('weight', 'bias')]"
    begin = BEGIN.replace("model.parameters()", optimizer)
    assert "samestep.replicate(nn.Linear(4, 3))" in _after(f"{begin}for x, y in train:\n{STEP}")


def test_a_loss_that_is_also_read_after_the_loop_is_totalled_before_its_backward():
    step = "    (model(x) ** 2).mean().backward()\n    if step % 2 == 0:\n"
    step += "        loss = F.cross_entropy(model(x), y)\n        loss.backward()\n"
    text = f"{BEGIN}for step, (x, y) in enumerate(train):\n{step}print(loss.item())\n"
    assert not _of(text).gaps
    assert "loss = samestep.mean(F.cross_entropy(model(x), y))" in _after(text)


def test_a_number_of_the_batch_beside_its_rows_is_totalled_alone():
    lines = "    noise = np.random.random(size=x.shape)\n    a = x + x.std() * torch.Tensor(noise)\n"
    step = STEP.replace("model(x)", "model(a)")
    text = f"import numpy as np\n{BEGIN}for x, y in train:\n{lines}{step}"
    assert not _of(text).gaps
    assert "size=x.shape" in _after(text)
    assert "a = x + samestep.gather(x).std() * torch.Tensor(noise)" in _after(text)
