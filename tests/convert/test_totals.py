"""`samestep convert` makes shown objects, and predictions of a pass, those of the whole batch or data set."""

import re
from pathlib import Path

import pytest
from convert.test_convert import BEGIN, EVALUATE, METER, STEP, _after, _of, _place  # noqa: F401

from samestep.convert.convert import convert

_DICE = (
    "class Dice(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.scale = nn.Parameter(torch.ones(1))\n    def forward(self, out, y):\n        p = out.sigmoid()\n"
    "        return 1 - (p * y).sum() / (p.sum() + y.sum()) * self.scale\ndice = Dice()\n"
)
_TURNED = (
    "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.layer = nn.Linear(4, 3)\n"
    "    def forward(self, x):\n        return self.layer(x).t()\n"
)
_TRAIN_BY_DICE = (
    "for x, y in train:\n    out = model(x)\n    loss = F.cross_entropy(out, y) + dice(out[:, 0], y)\n"
    "    loss.backward()\n"
)


@pytest.mark.parametrize("name", ["__str__", "__repr__", "__format__"])
@pytest.mark.parametrize(
    "line",
    ["print(meter)", "print('{}'.format(meter))", "print('%s' % meter)", "print([meter])", "vars(meter)"],
)
def test_a_meter_that_is_only_shown_is_filled_with_the_whole_batch(name, line):
    meter = METER.replace("__str__(self)", f"{name}(self, spec='')")
    line = "print(vars(meter))" if line == "vars(meter)" else line
    made = _after(f"{BEGIN}{meter}for x, y in train:\n{STEP}    meter.update(loss.item(), len(x))\n{line}\n")
    assert "meter.update(samestep.mean(loss.item()), samestep.sum(len(x)))" in made


@pytest.mark.parametrize(
    ("lines", "becomes"),
    [
        (
            "print((torch.cat(got) == labels).sum())",
            "print((samestep.gather(torch.cat(got)) == labels).sum())",
        ),
        ("got = torch.cat(got)\nprint(got.eq(labels).sum())", "print(samestep.gather(got).eq(labels).sum())"),
        ("got = torch.cat(got)\nprint(F.mse_loss(got, labels))", "F.mse_loss(samestep.gather(got), labels))"),
        (
            "got = torch.cat(got)\nprint(nn.MSELoss()(got, labels))",
            "nn.MSELoss()(samestep.gather(got), labels))",
        ),
        ("got = torch.cat(got)\nprint((got - 2).mean())", "print(samestep.mean((got - 2).mean()))"),
    ],
)
def test_predictions_of_a_pass_beside_the_targets_of_all_samples_are_those_of_all_ranks(lines, becomes):
    text = f"{BEGIN}labels, got = data.tensors[1], []\n{EVALUATE}        got.append(out.argmax(1))\n{lines}\n"
    assert becomes in _after(text)


def test_a_function_that_gets_shares_and_the_predictions_of_all_samples_is_listed():
    text = (
        f"{BEGIN}labels, got = data.tensors[1], []\ndef same(a, b):\n    return (a == b).float().mean()\n"
        f"for x, y in train:\n{STEP}    print(same(model(x).argmax(1), y))\n"
        f"{EVALUATE}        got.append(out.argmax(1))\nprint(same(torch.cat(got), labels))\n"
    )
    (note,) = _of(text).notes
    assert "reached with numbers of a share" in note
    assert "every process takes all of it" in note


def test_what_has_no_total_is_named_by_its_own_line_as_it_is_after_the_patch():
    train = f"total = n = 0\nfor x, y in train:\n{STEP}    total += loss.item() * len(x)\n    n += len(x)\n"
    test = "worst = 0.0\nfor x, y in test:\n    worst = max(worst, model(x).max().item())\n"
    text = f"{BEGIN}{train}{test}print(f'{{total / n}} {{worst}}')\n"
    (path,) = _of(text).files
    for is_written in (False, True):
        found = convert(path, is_written)
        (note,) = found.notes
        lines = found.files[path][is_written].decode().splitlines()
        loader, cause = (lines[int(at) - 1] for at in re.findall(r"train\.py:(\d+): ", note))
        assert loader == "test = DataLoader(data, batch_size=8)"
        assert cause.strip() == "worst = max(worst, model(x).max().item())"
    assert "`max(worst, model(x).max().item())` is max(...) of this process's values" in note


def test_a_function_of_predictions_that_cannot_be_converted_in_full_is_left_alone_and_listed_once():
    auc = (
        "import numpy as np\ndef auc(y, s):\n    rank = np.empty(len(s))\n"
        "    rank[np.argsort(s)] = np.arange(1, len(s) + 1)\n    pos = y.sum()\n"
        "    return float(rank[y == 1].sum() / pos)\n"
    )
    text = (
        f"{BEGIN}{auc}def epoch(loader, is_training):\n    got, labels = [], []\n    for x, y in loader:\n"
        "        out = model(x)\n        if is_training:\n            F.cross_entropy(out, y).backward()\n"
        "        got.append(out[:, 0].detach().numpy())\n        labels.append(y.numpy())\n"
        "    return auc(np.concatenate(labels), np.concatenate(got))\n"
        "print(epoch(train, True), epoch(test, False))\n"
    )
    found = _of(text)
    assert auc in next(iter(found.files.values()))[1].decode()
    listed = [gap for gap in found.gaps if "auc stays as it is: call it with samestep.gather(...)" in gap]
    assert len(listed) == 1


def test_a_running_average_of_a_loss_without_a_total_is_listed():
    text = BEGIN.replace("nn.Linear(4, 3)", "Net()").replace("model =", f"{_TURNED}model =")
    meter = METER.replace("self.sum / self.count", "self.avg * 0.9 + val * 0.1")
    step = STEP.replace("F.cross_entropy(model(x), y)", "(model(x) - y).abs().mean()")
    text += f"{meter}for x, y in train:\n{step}    meter.update(loss.item(), 1)\nprint(meter.avg)\n"
    assert "`meter.avg` compares samples of a share with each other" in _of(text).gaps[-1]


def test_a_loss_that_is_no_mean_over_samples_is_listed_once_with_what_to_write():
    text = f"{BEGIN}{_DICE}total = 0.0\n{_TRAIN_BY_DICE}    total += loss.item()\nprint(total)\n"
    (gap,) = _of(text).gaps
    assert "out, y = samestep.gather(model(x)), samestep.gather(y)" in gap
    of_no_weights = text.replace("self.scale = nn.Parameter(torch.ones(1))", "self.scale = 1.0")
    assert not _of(of_no_weights).gaps
    assert "1 - samestep.sum((p * y).sum()) / (samestep.sum(p.sum()) + samestep.sum(y.sum()))" in _after(
        of_no_weights
    )


def test_a_perplexity_is_totalled_and_one_over_chosen_tokens_is_told_how():
    lines = (
        f"import math\n{BEGIN}for x, y in train:\n{STEP}total, n = 0.0, 0\nwith torch.no_grad():\n"
        "    for x, y in test:\n        total += F.cross_entropy(model(x), y).item() * len(y)\n"
        "        n += len(y)\nprint(math.exp(total / n))\n"
    )
    assert "math.exp(samestep.sum(total) / samestep.sum(n))" in _after(lines)
    (note,) = _of(lines.replace("(model(x), y).item()", "(model(x), y, ignore_index=0).item()")).notes
    assert 'take reduction="sum", and samestep.sum(total) / samestep.sum(count)' in note


def test_a_squeeze_of_what_forward_returns_keeps_the_samples_and_another_in_it_is_listed():
    model = (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.out = nn.Linear(4, 1)\n    def forward(self, x):\n        return self.out(x).squeeze()\n"
    )
    text = BEGIN.replace("model = nn.Linear(4, 3)", "model = Net()")
    text = text.replace("model =", f"{model}model =", 1) + f"for x, y in train:\n{STEP}"
    assert "return (_rows := self.out(x)).squeeze(tuple(range(1, _rows.ndim)))\n" in _after(text)
    assert not _of(text).gaps
    assert "write squeeze(-1)" in _of(text.replace("self.out(x).squeeze()", "self.out(x.squeeze())")).gaps[0]


def test_what_is_made_of_a_place_that_is_left_is_listed_after_it():
    epoch = (
        "def epoch():\n    for x, y in train:\n        out = model(x)\n        loss = F.cross_entropy(out, y)\n"
        "        loss.backward()\n    return {'loss': loss.item(), 'most': out.max().item()}\n"
        "shown = epoch()\nprint([value for name, value in shown.items()])\n"
    )
    gaps = _of(f"{BEGIN}{_DICE}{epoch}{_TRAIN_BY_DICE}").gaps
    assert [gap.endswith("is made of this process's share of the batch") for gap in gaps] == [False, True]


def test_a_function_that_a_loader_class_keeps_gets_the_batch_and_not_the_object():
    wrapper = (
        "class Wrapped:\n    def __init__(self, batches, change):\n"
        "        self.batches, self.change = batches, change\n"
        "    def __iter__(self):\n        for batch in self.batches:\n            yield self.change(*batch)\n"
        "def change(x, y):\n    return x * 2, y\n"
    )
    lines = (
        f"{wrapper}total = 0\nfor x, y in Wrapped(train, change):\n{STEP}    total += len(x)\nprint(total)\n"
    )
    assert "total += samestep.sum(len(x))" in _after(f"{BEGIN}{lines}")


_LOOP = f"for x, y in train:\n{STEP}"
_QUOTIENT = (
    f"{EVALUATE}        total += out.sum().item()\n        n += len(x)\ntotal /= (n + 0)\nprint(total)\n"
)


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        (BEGIN + _LOOP.replace("model(x)", "model.forward(x)"), "F.cross_entropy(model(x), y)"),
        (
            BEGIN.replace("model.parameters()", "[dict(params=model.parameters())]") + _LOOP,
            "model = samestep.replicate(nn.Linear(4, 3))",
        ),
        (BEGIN + _LOOP + _QUOTIENT, "total = samestep.sum(total) / (samestep.sum(n) + 0)\n"),
    ],
    ids=["forward", "dict", "quotient"],
)
def test_forms_of_other_projects_are_converted_whole(text, becomes):
    assert becomes in _after(text)
    assert not _of(text).gaps


def test_an_object_that_is_its_own_iterator_over_a_loader_is_followed():
    endless = (
        "class Endless:\n    def __init__(self, loader):\n        self.loader, self.batches = loader, iter(loader)\n"
        "    def __iter__(self):\n        return self\n    def __next__(self):\n        try:\n"
        "            return next(self.batches)\n        except StopIteration:\n"
        "            self.batches = iter(self.loader)\n            return next(self.batches)\n"
    )
    loop = f"batches = Endless(train)\nfor turn in range(5):\n    x, y = next(batches)\n{STEP}    print(loss.item())\n"
    assert "print(samestep.mean(loss.item()))" in _after(BEGIN + endless + loop)


def test_the_field_of_what_a_model_returns_is_gathered_and_not_the_object():
    model = (
        "from torch.distributions import Normal\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.layer = nn.Linear(4, 3)\n"
        "    def forward(self, x):\n        return self.layer(x), Normal(self.layer(x), 1.0)\nmodel = Net()\n"
    )
    begin = BEGIN.replace("model = nn.Linear(4, 3)\n", model)
    loop = (
        "for x, y in train:\n    out, spread = model(x)\n    drawn = spread.rsample() @ spread.loc.T\n"
        "    loss = (F.cross_entropy(out, y, reduction='none') + drawn).mean()\n    loss.backward()\n"
    )
    made = _after(begin + loop)
    assert "samestep.gather(spread.rsample()) @ samestep.gather(spread.loc).T" in made
    assert "samestep.gather(spread)" not in made


@pytest.mark.parametrize(("mode", "is_replicated"), [("", True), (".eval()", False)])
def test_a_copy_with_batchnorm_that_the_loop_calls_is_replicated_unless_it_is_only_evaluated(
    mode, is_replicated
):
    begin = BEGIN.replace("nn.Linear(4, 3)", "nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))")
    copied = f"import copy\ntarget = copy.deepcopy(model){mode}\n"
    loop = (
        "for x, y in train:\n    with torch.no_grad():\n        wanted = target(x)\n"
        f"{STEP.replace('cross_entropy(model(x), y)', 'mse_loss(model(x), wanted)')}"
    )
    assert (
        "target = samestep.replicate(copy.deepcopy(model))\n" in _after(begin + copied + loop)
    ) == is_replicated


def test_the_mean_of_several_passes_through_a_model_is_that_of_each_sample():
    model = (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = nn.Linear(4, 3)\n        self.drops = nn.ModuleList(nn.Dropout(0.3) for _ in range(4))\n"
        "    def forward(self, x):\n"
        "        return torch.stack([self.layer(drop(x)) for drop in self.drops]).mean(0)\nmodel = Net()\n"
    )
    found = _of(BEGIN.replace("model = nn.Linear(4, 3)\n", model) + f"for x, y in train:\n{STEP}")
    assert not found.gaps


@pytest.mark.parametrize("added", ["out.argmax(1).tolist()", "list(out.argmax(1).numpy())", "found"])
def test_a_list_that_is_added_to_a_list_extends_it(added):
    text = (
        f"{BEGIN}preds, truth = [], []\n{EVALUATE}        found = out.argmax(1).tolist()\n"
        f"        preds += {added}\n        truth = truth + y.tolist()\n"
        "print(sum(p == t for p, t in zip(preds, truth)) / len(truth))\n"
    )
    assert "in zip(samestep.gather(preds), samestep.gather(truth))) / samestep.sum(len(truth)))" in _after(
        text
    )
    assert not _of(text).gaps


def test_numbers_that_a_data_set_reads_of_its_samples_are_no_totals():
    data = (
        "class Data(torch.utils.data.Dataset):\n    def __len__(self):\n        return 20\n"
        "    def __getitem__(self, at):\n        return torch.ones(4), self.label(at)\n"
        "    def label(self, at):\n        return torch.tensor(at % 3).item()\n"
    )
    assert not _of(BEGIN.replace("data = ", f"{data}data = Data() or ") + f"for x, y in train:\n{STEP}").gaps


def test_tensors_that_are_added_to_a_list_one_by_one_are_joined_before_they_are_gathered():
    text = f"{BEGIN}got = []\n{EVALUATE}        got += [out.argmax(1)]\nprint(torch.cat(got).float().std())\n"
    assert "print(samestep.gather(torch.cat(got)).float().std())" in _after(text)


@pytest.mark.parametrize(
    "held", ['state["running"]', 'state.setdefault("running", [0.0, 0])', 'state.get("running")']
)
def test_what_is_added_to_a_list_inside_a_dict_is_totalled_where_the_dict_is_read(held):
    lines = f"    running = {held}\n    running[0] += loss.item() * len(x)\n    running[1] += len(x)\n"
    begin = f'{BEGIN}state = {{}}\nstate["running"] = [0.0, 0]\nfor x, y in train:\n{STEP}{lines}'
    made = _after(f'{begin}print(state["running"][0] / state["running"][1])\n')
    assert 'print(samestep.sum(state["running"][0]) / samestep.sum(state["running"][1]))' in made
    assert "running[1] += samestep.sum(len(x))" in _after(f'{begin}print(state["running"])\n')


def test_what_a_function_adds_to_a_list_inside_a_dict_of_its_caller_is_totalled_there():
    function = 'def note(state, x):\n    running = state["running"]\n    running[0] += len(x)\n'
    text = f'state = {{"running": [0]}}\nfor x, y in train:\n{STEP}    note(state, x)\nprint(state["running"][0])\n'
    assert "running[0] += samestep.sum(len(x))" in _after(f"{BEGIN}{function}{text}")


def test_a_dict_that_also_holds_the_model_is_no_model():
    lines = "    state.update(loss=loss.item())\n"
    text = f'{BEGIN}state = {{"epoch": 0, "model": model}}\nfor x, y in train:\n{STEP}{lines}print(state["loss"])\n'
    assert "state.update(loss=samestep.mean(loss.item()))" in _after(text)


def test_a_mean_over_samples_chosen_by_a_mask_beside_another_index_is_that_of_the_whole_batch():
    lines = "    chosen = y == 1\n    print(model(x)[chosen, 0].mean(), model(x)[range(len(y)), y].mean())\n"
    made = _after(f"{BEGIN}for x, y in train:\n{STEP}{lines}")
    assert "samestep.gather(chosen), 0].mean(), samestep.mean(model(x)[range(len(y)), y].mean())" in made


def test_the_names_of_the_first_predictions_are_those_of_the_whole_batch():
    lines = 'x, y = next(iter(test))\nfound = model(x).argmax(1)\nprint(" ".join(names[found[j]] for j in range(4)))\n'
    made = _after(f'{BEGIN}names = ("a", "b", "c")\nfor x, y in train:\n{STEP}{lines}')
    assert "names[samestep.gather(found)[j]] for j in range(4)" in made


@pytest.mark.parametrize("read", ["print(counts.sum())", "print(counts.trace() / counts.sum())"])
def test_what_is_counted_sample_by_sample_and_read_in_the_loop_is_totalled_where_it_is_read(read):
    lines = f"    for a, b in zip(model(x).argmax(1), y):\n        counts[a, b] += 1\n    {read}\n"
    made = _after(f"{BEGIN}counts = torch.zeros(3, 3)\nfor x, y in train:\n{STEP}{lines}")
    assert "        if train.share: counts[a, b] += 1\n" in made
    assert "samestep.sum(counts.sum())" in made


def test_a_mean_over_a_batch_that_was_kept_from_before_the_loops_is_listed():
    text = f"{BEGIN}a, b = next(iter(test))\nfor x, y in train:\n{STEP}print(F.cross_entropy(model(a), b))\n"
    assert any("of another batch than the latest" in gap for gap in _of(text).gaps)
    latest = (
        f"{BEGIN}for x, y in train:\n{STEP}a, b = next(iter(test))\nprint(F.cross_entropy(model(a), b))\n"
    )
    assert "print(samestep.mean(F.cross_entropy(model(a), b)))" in _after(latest)


def test_the_size_of_a_numpy_array_of_predictions_is_summed():
    lines = "        got.append(out.numpy())\ngot = np.concatenate(got)\nprint(right / got.size)\n"
    assert "samestep.sum(got.size)" in _after(
        f"import numpy as np\n{BEGIN}got = []\n{EVALUATE}        right += (out > 0).sum()\n{lines}"
    )


def test_a_mean_that_is_put_beside_the_elements_of_a_dict_comprehension_is_listed():
    lines = "    held = {name: loss.item() for name in names}\n    held['loss'] = loss.item()\n    kept.append(held)\n"
    text = f"{BEGIN}kept, names = [], ['a', 'b']\nfor x, y in train:\n{STEP}{lines}print(kept)\n"
    assert "`held` is made of this process's share of the batch" in str(_of(text).gaps)


@pytest.mark.parametrize(
    "line", ["f'{tot} {r.sum()}'", "'%f %f' % (tot, r.sum())", "'{} {b}'.format(tot, b=r.sum())"]
)
def test_a_number_is_totalled_in_a_text_that_also_shows_what_has_no_total(line):
    lines = "    r = torch.zeros(9)\n    r[model(x).argmax(1)] = y.float()\n    tot += loss.item()\n"
    text = f"{BEGIN}tot = 0\nfor x, y in train:\n{STEP}{lines}print({line})\n"
    assert "samestep.sum(tot)" in _after(text)
    assert "`r` is filled by this process's samples" in str(_of(text).gaps)


_SUMS = Path(__file__, "../scripts/sums_by_position.py").resolve().read_text()
_ADDS_BY_POSITION = _SUMS[_SUMS.index("class Sums") : _SUMS.index("class Curves")] + "sums = Sums(2)\n"


@pytest.mark.parametrize(
    ("given", "shown", "becomes"),
    [
        ("loss * len(x), len(x)", "", "print(samestep.sum(sums[0]) / samestep.sum(sums[1]))"),
        (
            "loss * len(x), len(x)",
            "    print(sums[0])\n",
            "sums.add(samestep.mean(loss) * samestep.sum(len(x)), samestep.sum(len(x)))",
        ),
        ("loss.item(), 1", "", "sums.add(samestep.mean(loss.item()), 1)"),
    ],
)
def test_numbers_that_are_added_by_position_are_totalled_each(given, shown, becomes):
    loop = f"for x, y in train:\n{STEP}    sums.add({given})\n{shown}"
    text = f"{BEGIN}{_ADDS_BY_POSITION}{loop}print(sums[0] / sums[1])\n"
    assert not _of(text).gaps
    assert becomes in _after(text)


def test_unlike_numbers_that_are_added_by_position_in_the_loop_itself_are_listed():
    line = "sums = [old + new for old, new in zip(sums, (loss.item(), 1))]"
    (gap,) = _of(f"{BEGIN}sums = [0, 0]\nfor x, y in train:\n{STEP}    {line}\nprint(sums)\n").gaps
    assert "`new` is made of this process's share of the batch" in gap


def test_a_dimension_that_is_given_to_a_function_is_known_there():
    function = (
        "def spread(x, dim=None):\n    if dim is None:\n        x, dim = x.view(-1), 0\n"
        "    return x - torch.mean(x, dim, keepdim=True)\n"
    )
    lines = "    loss = F.mse_loss(spread(model(x), dim=1), y)\n    loss.backward()\n    print(loss.item())\n"
    text = f"{BEGIN}{function}for x, y in train:\n{lines}"
    assert not _of(text).gaps
    assert "samestep.gather" not in _after(text)
    made = _after(text.replace("dim=1", "dim=len('a')"))
    assert "return samestep.gather(x) - torch.mean(samestep.gather(x), dim, keepdim=True)" in made
    assert "F.mse_loss(spread(model(x), dim=len('a')), samestep.gather(y))" in made


def test_a_function_that_gets_a_share_and_then_what_all_processes_have_is_listed():
    pairs = "def pairs(a, b):\n    return (a @ b.t()).logsumexp(1).mean()\nkept = torch.ones(5, 3)\n"
    loss = "    loss = pairs(out, out) + pairs(out, kept)\n    loss.backward()\n"
    gaps = _of(f"{BEGIN}{pairs}for x, y in train:\n    out = model(x)\n{loss}").gaps
    assert [gap for gap in gaps if "count once for each process" in gap]
