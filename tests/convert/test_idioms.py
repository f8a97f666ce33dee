"""`samestep convert` follows how training code hands losses, groups of samples and callbacks on."""

import pytest
from convert.test_convert import BEGIN, EVALUATE, STEP, _after, _of, _place  # noqa: F401

GROUPS = (
    "for x, y in train:\n    map = (y == {ids}).double()\n"
    "    losses = F.cross_entropy(model(x), y, reduction='none')\n"
)
IDS = ["torch.arange(3).unsqueeze(1)", "torch.arange(3)[:, None].long()", "torch.arange(3).view(-1, 1)"]
LAMBDAS = (
    "argmax = lambda x, *args, **kwargs: x.argmax(*args, **kwargs)\n"
    "reduced = lambda x, *args, **kwargs: x.sum(*args, **kwargs)\n"
)
NAMED = (
    "def named(out, y):\n    found = {}\n    found['ce'] = F.cross_entropy(out, y)\n    return found\n"
    "def small(out):\n    return {'l2': out.pow(2).mean()}\n"
)
CALLBACKS = """\
class Step:
    def after(self, trainer):
        trainer.found['loss'].backward()
        optimizer.step()
class Show:
    def after(self, trainer):
        print(trainer.found['loss'].item())
class Trainer:
    def __init__(self):
        self.callbacks = []
    def register_hook(self, callback):
        self.callbacks.append(callback)
    def call_hook(self, name):
        for callback in self.callbacks:
            getattr(callback, name)(self)
    def fit(self):
        for x, y in train:
            self.found = {'loss': F.cross_entropy(model(x), y)}
            if 'loss' in self.found:
                self.call_hook('after')
trainer = Trainer()
trainer.register_hook(Step())
trainer.register_hook(Show())
trainer.fit()
"""
LOGGED = """\
def logged(batches):
    i = 0
    for batch in batches:
        yield batch
        if i % 2 == 0 or i == len(batches) - 1:
            print(i, meter.total)
        i += 1
"""
FLOW = """\
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(4, 4)
    def forward(self, x):
        return x * self.scale(x), self.scale(x)
class Flow(nn.Sequential):
    def forward(self, x):
        total = 0
        for block in self:
            x, logs = block(x)
            total = total + logs
        return x, total
blocks = []
for _ in range(2):
    blocks += [Block()]
flow = Flow(*blocks)
optimizer = torch.optim.SGD(flow.parameters(), 0.1)
for x, y in train:
    out, logs = flow(x)
    loss = (out - logs).sum(1).mean()
    loss.backward()
    print(loss.item())
"""


@pytest.mark.parametrize("ids", IDS)
def test_samples_beside_a_column_of_numbers_are_in_the_second_dimension(ids):
    lines = (
        GROUPS.format(ids=ids)
        + "    loss = (map @ losses / map.sum(1).clamp(min=1)).mean()\n    loss.backward()\n"
    )
    made = _after(f"{BEGIN}{lines}")
    assert f"map = (samestep.gather(y) == {ids}).double()" in made
    assert "loss = (map @ samestep.gather(losses) / map.sum(1).clamp(min=1)).mean()" in made


def test_sums_of_groups_of_samples_are_added_up():
    lines = EVALUATE + (
        "        map = (y == torch.arange(3)[:, None]).double()\n        right += map @ (out.argmax(1) == y).double()\n"
        "        count += map.sum(1)\nprint(right / count)\n"
    )
    text = f"{BEGIN}right, count = torch.zeros(3), torch.zeros(3)\n{lines}"
    assert "print(samestep.sum(right) / samestep.sum(count))" in _after(text)
    assert not _of(text).gaps


@pytest.mark.parametrize(
    ("dims", "becomes"), [("", "samestep.sum("), (", 0", "samestep.sum("), (", axis=0", "samestep.sum(")]
)
def test_dimensions_that_a_function_hands_on_are_those_that_it_was_given(dims, becomes):
    right = f"reduced(argmax(model(x), axis=1) == y{dims})"
    text = f"{BEGIN}{LAMBDAS}for x, y in train:\n{STEP}    print({right})\n"
    assert f"    print({becomes}{right}))\n" in _after(text)
    assert not _of(text).gaps


def test_a_tensor_that_is_reduced_over_dimensions_that_are_not_known_is_gathered_first():
    lines = "import sys\ndims = [int(word) for word in sys.argv[1:]]\nfor x, y in train:\n"
    made = _after(f"{BEGIN}{lines}{STEP}    print(model(x).sum(*dims))\n")
    assert "    print(samestep.gather(model(x)).sum(*dims))\n" in made


def test_a_mean_over_the_batches_stays_the_call_that_it_was():
    text = f"{BEGIN}import numpy as np\nlosses = []\n{EVALUATE}        losses.append(F.cross_entropy(out, y).item())\n"
    made = _after(f"{text}print(np.mean(losses))\n")
    mean = "np.mean(losses or [0.0]) * (len(losses) / max(samestep.gather([len(losses)])))"
    assert f"print(samestep.sum({mean}))\n" in made


def test_a_sum_that_is_divided_by_the_samples_in_its_place_is_a_mean():
    lines = "    loss = F.cross_entropy(model(x), y, reduction='sum')\n    loss /= len(x)\n"
    evaluated = f"with torch.no_grad():\n  total = 0\n  for x, y in test:\n{lines}    total += loss.item()\n"
    text = f"{BEGIN}for x, y in train:\n{lines}    loss.backward()\n    optimizer.step()\n{evaluated}print(total)\n"
    assert "    total += loss.item() * test.share\nprint(samestep.sum(total))" in _after(text)
    assert not _of(text).gaps


@pytest.mark.parametrize(
    "made", ["found = {}", "found = dict()", "found = {'zero': 0 * F.mse_loss(out, out)}"]
)
def test_losses_that_a_dict_gets_by_update_are_known(made):
    lines = f"    out = model(x)\n    {made}\n    found.update(named(out, y))\n    found.update(small(out))\n"
    text = f"{BEGIN}{NAMED}for x, y in train:\n{lines}    loss = sum(found.values())\n    loss.backward()\n"
    assert "print(samestep.mean(loss.item()))" in _after(f"{text}    print(loss.item())\n")
    assert not _of(text).gaps


def test_an_element_is_what_an_augmented_assignment_made_it():
    lines = "    found = {'a': F.cross_entropy(model(x), y, reduction='sum')}\n    found['a'] /= len(x)\n"
    text = f"{BEGIN}for x, y in train:\n{lines}    loss = sum(found.values())\n    loss.backward()\n"
    assert 'loss="sum"' not in _after(text)
    assert not _of(text).gaps


def test_every_function_from_which_a_key_chooses_is_followed():
    rules = "rules = {'a': lambda out, y: F.cross_entropy(out, y), 'b': lambda out, y: (out - y[:, None]).max()}\n"
    lines = (
        "for name in rules:\n  for x, y in train:\n    loss = rules[name](model(x), y)\n    loss.backward()\n"
    )
    assert _of(f"{BEGIN}{rules}{lines}").gaps
    assert not _of(f"{BEGIN}{rules.replace('.max()', '.mean()')}{lines}").gaps


def test_callbacks_that_are_registered_are_followed():
    assert "print(samestep.mean(trainer.found['loss'].item()))" in _after(f"{BEGIN}{CALLBACKS}")
    assert not _of(f"{BEGIN}{CALLBACKS}").gaps


def test_a_generator_that_hands_on_batches_of_a_training_prints_as_often_on_all_ranks():
    lines = f"for x, y in logged(train):\n{STEP}    meter.total += loss.item()\n"
    text = f"{BEGIN}class Meter:\n    total = 0\nmeter = Meter()\n{LOGGED}{lines}"
    assert "meter.total += samestep.mean(loss.item())" in _after(text)
    assert not _of(text).gaps


def test_the_layers_of_a_sequential_of_the_project_are_followed():
    assert "print(samestep.mean(loss.item()))" in _after(f"{BEGIN}{FLOW}")
    assert [gap for gap in _of(f"{BEGIN}{FLOW}").gaps if "no line calls model" not in gap] == []


def test_parameters_at_the_samples_numbers_are_rows():
    net = (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.begin, self.next = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3, 3))\n"
        "    def forward(self, x, y):\n        y = y.t()\n        score = self.begin[y[0]]\n"
        "        for i in range(1, y.size(0)):\n            score = score + self.next[y[i - 1], y[i]]\n"
        "        return -score.mean()\n"
    )
    text = f"{BEGIN}{net}net = Net()\noptimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
    lines = "for x, y in train:\n    loss = net(x, y)\n    loss.backward()\n    print(loss.item())\n"
    assert "print(samestep.mean(loss.item()))" in _after(f"{text}{lines}")


def test_a_name_of_the_last_batch_of_an_evaluation_is_of_a_share():
    text = f"{BEGIN}{EVALUATE}        pass\nprint(x.shape[0])\n"
    assert "print(x.shape[0])" in _after(text)
    assert any("is of the last batch" in note for note in _of(text).notes)


SORTED = CALLBACKS.replace(
    "in self.callbacks:", "in sorted(self.callbacks, key=lambda callback: callback.order):"
)
STATS = (
    "class Stats:\n    total = 0.0\n    def add(self, loss):\n        self.total += loss\nstats = Stats()\n"
)


def test_callbacks_that_are_sorted_first_are_followed():
    assert "print(samestep.mean(trainer.found['loss'].item()))" in _after(f"{BEGIN}{SORTED}")


def test_a_method_that_adds_up_and_that_no_line_is_seen_to_call_is_listed():
    lines = f"{STATS}for x, y in train:\n{STEP}    methodcaller('add', loss)(stats)\nprint(stats.total)\n"
    (gap,) = _of(f"from operator import methodcaller\n{BEGIN}{lines}").gaps
    assert "nothing that was followed leads to add" in gap


def test_a_pass_without_gradients_trains_nothing():
    lines = (
        f"{STATS}quiet = False\ndef follow(batches):\n    for x, y in batches:\n"
        "        loss = F.cross_entropy(model(x), y)\n        stats.add(loss)\n"
        "        if quiet:\n            continue\n        loss.backward()\n    print(stats.total)\nfollow(train)\n"
    )
    assert not _of(f"{BEGIN}{lines}").gaps
    (note,) = _of(f"{BEGIN}{lines}quiet = True\nwith torch.no_grad():\n    follow(test)\n").notes
    assert "train.py:7: this DataLoader is of an evaluation with numbers that have no total" in note


def test_a_method_of_an_unknown_object_gets_totals_so_that_what_it_adds_up_is_not_listed():
    meters = "from collections import defaultdict\nmeters = defaultdict(Stats)\n"
    lines = f"{STATS}{meters}for x, y in train:\n{STEP}    meters['loss'].add(loss)\nprint(meters['loss'].total)\n"
    assert "meters['loss'].add(samestep.mean(loss))" in _after(f"{BEGIN}{lines}")
    assert not _of(f"{BEGIN}{lines}").gaps


def test_tensors_that_numpy_joins_are_gathered_after_that():
    text = f"{BEGIN}import numpy as np\ngot = []\n{EVALUATE}        got.append(y)\nprint(np.concatenate(got)[:3])\n"
    assert "print(samestep.gather(np.concatenate(got))[:3])" in _after(text)


def test_batches_that_a_generator_expression_wraps_are_those_of_its_loader():
    lines = f"for x, y in ((x * 2, y) for x, y in train):\n{STEP}    print(loss.item())\n"
    wrapped = f"def follow(batches):\n    for x, y in batches:\n{STEP.replace('    ', ' ' * 8)}"
    wrapped += "        print(loss.item())\n"
    for text in (lines, f"{wrapped}follow((x * 2, y) for x, y in train)\n"):
        assert "print(samestep.mean(loss.item()))" in _after(f"{BEGIN}{text}")
        assert not _of(f"{BEGIN}{text}").gaps


def test_a_parameter_is_added_to_rows_again_and_again():
    net = (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.a, self.bias = nn.Linear(4, 3), nn.Parameter(torch.zeros(3))\n    def forward(self, x):\n"
        "        out = self.a(x)\n        out = out + self.bias\n        return out\nnet = Net()\n"
    )
    lines = f"optimizer = torch.optim.SGD(net.parameters(), 0.1)\nfor x, y in train:\n{STEP.replace('model', 'net')}"
    assert not [gap for gap in _of(f"{BEGIN}{net}{lines}").gaps if "the loss" in gap]


@pytest.mark.parametrize(
    ("lines", "becomes"),
    [
        (
            "    counts = torch.bincount(y, minlength=3)\n    losses = F.cross_entropy(model(x), y, reduction='none')\n"
            "    loss = (losses / counts[y]).sum() / 3\n",
            "    loss = (losses / samestep.sum(counts)[y]).sum() / 3\n",
        ),
        (
            "    out = model(x)\n    middle = out.mean(0)\n    loss = (x[:, 0] - middle[y]).abs().mean()\n",
            "    loss = (x[:, 0] - samestep.mean(middle)[y]).abs().mean()\n",
        ),
        (
            "    out, ones = model(x), F.one_hot(y, 3).double()\n"
            "    centers = ones.t() @ out / ones.sum(0)[:, None].clamp(1)\n"
            "    loss = (out - centers[y]).pow(2).mean()\n",
            "    loss = (samestep.gather(out) - centers[samestep.gather(y)]).pow(2).mean()\n",
        ),
    ],
)
def test_each_sample_gets_the_number_of_its_class_that_the_whole_batch_has(lines, becomes):
    text = f"{BEGIN}for x, y in train:\n{lines}    loss.backward()\n"
    assert becomes in _after(text)
    assert not _of(text).gaps


def test_a_model_is_replicated_before_the_branch_that_chooses_its_optimizer():
    begin = f"import sys\n{BEGIN}net = nn.Linear(4, 3)\nprint(net)\n"
    chosen = "if len(sys.argv) > 1:\n    best = torch.optim.SGD(net.parameters(), 0.1)\n"
    chosen += "else:\n    best = torch.optim.Adam(net.parameters(), 0.1)\n"
    assert "print(net)\nnet = samestep.replicate(net)\nif len(sys.argv) > 1:\n" in _after(f"{begin}{chosen}")


LOSSES = "    losses = F.cross_entropy(model(x), y, reduction='none')\n"
UPDATE = "    optimizer.zero_grad()\n    loss.backward()\n    optimizer.step()\n"


@pytest.mark.parametrize(
    ("weights", "becomes", "loss"),
    [
        ("x[:, 0] / x[:, 0].sum()", "x[:, 0] / samestep.sum(x[:, 0].sum())", "(w * losses).sum()"),
        (
            "torch.softmax(-losses.detach(), 0)",
            "torch.softmax(-samestep.gather(losses).detach(), 0)",
            "(w * samestep.gather(losses)).sum()",
        ),
        (
            "torch.argsort(losses.detach())",
            "torch.argsort(samestep.gather(losses).detach())",
            "(w * samestep.gather(losses)).sum()",
        ),
    ],
)
def test_weights_of_samples_that_compare_them_meet_as_many_losses(weights, becomes, loss):
    text = f"{BEGIN}for x, y in train:\n{LOSSES}    w = {weights}\n    loss = (w * losses).sum()\n{UPDATE}"
    assert f"    w = {becomes}\n    loss = {loss}\n" in _after(text)
    assert not _of(text).gaps


def test_an_index_of_the_whole_batch_takes_its_rows_from_there_though_they_are_not_used():
    lines = (
        "    order = torch.argsort(losses)\n    unused = losses[order]\n    loss = losses[order[:5]].mean()\n"
    )
    made = _after(f"{BEGIN}for x, y in train:\n{LOSSES}{lines}{UPDATE}")
    assert "    unused = samestep.gather(losses)[order]\n" in made


@pytest.mark.parametrize(
    "pieces", ["x.split(2), y.split(2)", "torch.chunk(x, 4), y.chunk(4)", "x.split(2, 0), y.split(2, dim=0)"]
)
def test_parts_of_a_batch_that_are_trained_one_after_another_are_listed(pieces):
    step = STEP.replace("(x), y", "(part), target").replace("    ", "        ")
    text = f"{BEGIN}for x, y in train:\n    for part, target in zip({pieces}):\n{step}"
    assert [gap for gap in _of(text).gaps if "train.py:14" in gap]


def test_a_part_of_a_model_that_is_called_by_its_place_is_no_call_of_the_model():
    begin = BEGIN.replace("nn.Linear(4, 3)", "nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))")
    text = f"{begin}for x, y in train:\n{STEP.replace('model(x)', 'model[1](model[0](x))')}"
    (gap,) = _of(text).gaps
    assert "no line calls model(...)" in gap


@pytest.mark.parametrize("option", ["lr", "weight_decay"])
def test_an_optimizer_gets_options_that_are_computed_from_the_whole_batch(option):
    lines = f"    for group in optimizer.param_groups:\n        group['{option}'] = 0.1 * len(x) / 8\n"
    made = _after(f"{BEGIN}for x, y in train:\n{lines}{STEP}")
    assert f"        group['{option}'] = 0.1 * samestep.sum(len(x)) / 8\n" in made


def test_a_format_that_reads_a_field_of_a_number_is_followed():
    assert not _of(f"{BEGIN}for x, y in train:\n{STEP}print('{{n.real}}'.format(n=len(data)))\n").gaps


COLLECT = (
    "xs, ys = [], []\nwith torch.no_grad():\n    for x, y in test:\n"
    "        xs.append(x); ys.append(model(x).argmax(1))\n"
)


def test_a_loader_of_samples_that_a_pass_has_labelled_gets_those_of_all_processes():
    lines = "more = DataLoader(TensorDataset(torch.cat(xs), torch.cat(ys)), batch_size=8)\n"
    made = _after(f"{BEGIN}{COLLECT}{lines}for x, y in more:\n{STEP}")
    assert "TensorDataset(samestep.gather(torch.cat(xs)), samestep.gather(torch.cat(ys)))" in made


@pytest.mark.parametrize(
    "ends", ["    l.backward()\n    best.step()\n", "    l.backward()\n    return l\nbest.step(part)\n"]
)
def test_a_parameter_alone_that_learns_from_what_a_pass_collected_is_listed(ends):
    begin = "for _ in range(3):\n" if "return" not in ends else "def part():\n"
    lines = "heat = nn.Parameter(torch.ones(1))\nbest = torch.optim.SGD([heat], 0.1)\n"
    lines += (
        f"outs, ys = torch.cat(xs), torch.cat(ys)\n{begin}    l = F.cross_entropy(outs / heat, ys)\n{ends}"
    )
    (gap,) = _of(f"{BEGIN}for x, y in train:\n{STEP}{COLLECT}{lines}").gaps
    assert "heat is in no model, and its loss is of what a pass collected" in gap


def test_rows_that_are_mixed_with_rows_in_another_order_are_listed():
    lines = f"    x = 0.7 * x + 0.3 * x.flip(0)\n{STEP}"
    (gap,) = _of(f"{BEGIN}for x, y in train:\n{lines}").gaps
    assert "compares samples of a share with each other (flip, which belongs into the collate_fn" in gap


@pytest.mark.parametrize("use", ["print(w.sum())", "order = torch.utils.data.WeightedRandomSampler(w, 20)"])
def test_what_a_pass_collects_is_listed_where_the_first_turn_of_a_loop_has_it_whole(use):
    lines = (
        f"    {use}\n" + "".join(f"    {line}\n" for line in COLLECT.splitlines()) + "    w = torch.cat(ys)\n"
    )
    found = _of(f"{BEGIN}for x, y in train:\n{STEP}w = torch.ones(20)\nfor epoch in range(2):\n{lines}")
    said = [text for text in (*found.gaps, *found.notes) if "numbers that all processes have" in text]
    assert "train.py:17" in said[0]
    made = f"{BEGIN}for x, y in train:\n{STEP}w = torch.ones(20)\nfor epoch in range(2):\n"
    assert not _of(made + lines.replace(f"    {use}\n", "") + "    print(w.sum())\n").gaps
