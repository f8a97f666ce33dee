"""`samestep convert` knows what functions of torch and NumPy make of a share, however the script calls them."""

import pytest
from convert.test_convert import BEGIN, LOOP, STEP, _after, _of, _place  # noqa: F401

TRAIN = "import numpy as np\nfor x, y in train:\n"
SLOPES = "    loss = F.cross_entropy(model(x), y)\n    slopes = torch.autograd.grad(loss, model.parameters()"
R2 = """\
def r2(out, y):
    rest = ((y - out) ** 2).sum()
    around = ((y - y.mean()) ** 2).sum()
    return 1 - rest / around
"""


@pytest.mark.parametrize(
    ("lines", "becomes"),
    [
        (f"class Kept:\n    pass\nkept = Kept()\nfor x, y in train:\n{STEP}    kept.loss_a = loss\n"
         "    print([float(getattr(kept, 'loss_' + name)) for name in 'a'])",
         "print([samestep.mean(float(getattr(kept, 'loss_' + name))) for name in 'a'])"),
        ("scale = torch.linspace(0, 1, 9)\nfor x, y in train:\n    by = scale.gather(-1, y)\n"
         "    loss = (by * model(x)[:, 0]).mean()\n    loss.backward()\n    print(loss.item())",
         "print(samestep.mean(loss.item()))"),
        (f"{TRAIN}    place = torch.from_numpy(np.tile(np.arange(3), (len(x), 1)))\n"
         "    loss = F.cross_entropy(model(x) + place, y)\n    loss.backward()\n    print(loss.item())",
         "print(samestep.mean(loss.item()))"),
        (f"{TRAIN}    out = np.squeeze(model(x) / 2)\n    F.cross_entropy(out, y).backward()",
         "    out = (_rows := model(x) / 2).squeeze(tuple(range(1, _rows.ndim)))\n"),
        (f"losses = {{}}\n{LOOP}    losses[best] = loss.item()\nprint(max(losses, key=losses.get))",
         "print(max(samestep.sum(losses), key=samestep.sum(losses).get))"),
        (f"import numpy as np\ngot = []\n{LOOP}    got.append(loss.item() * len(x))\nprint(np.sum(got) / 20)",
         "print(samestep.sum(np.sum(got)) / 20)"),
        ("with torch.no_grad():\n    out = torch.cat([model(x) for x, y in test])\nprint(out.std())",
         "print(samestep.gather(out).std())"),
        (f"{TRAIN}{STEP}    losses = {{'ce': loss}}\n    for k, v in losses.items():\n"
         "        sums[k] = sums.get(k, 0.0) + v.item()\nprint(sums)".replace("for x", "sums = {}\nfor x", 1),
         "        sums[k] = sums.get(k, 0.0) + v.item() * train.share\nprint(samestep.sum(sums))"),
        (f"{TRAIN}{SLOPES}, create_graph=True)\n    (loss + sum(slope.pow(2).sum() for slope in slopes)).backward()\n",
         "    (loss + sum(slope.pow(2).sum() for slope in slopes)).backward()\n"),
    ],
)  # fmt: skip
def test_a_function_is_taken_as_the_method_is(lines, becomes):
    assert becomes in _after(f"{BEGIN}{lines}\n")
    assert not _of(f"{BEGIN}{lines}\n").gaps


@pytest.mark.parametrize(
    ("turned", "is_gap"),
    [
        *(
            ("x.flip(0)", True),
            ("x.flip((1, 0))", True),
            ("x.flip(1, 0)", True),
            ("torch.flip(x, [0])", True),
        ),
        *(("x.roll(1)", True), ("x.roll(1, 0)", True), ("torch.roll(x, 1, dims=0)", True)),
        *(("x.flip(1)", False), ("x.flip(-1)", False), ("torch.flip(x, dims=[2, 3])", False)),
        *(("x.roll(1, 1)", False), ("x.roll(1, dims=1)", False), ("torch.roll(x, (1, 2), (2, 3))", False)),
    ],
)
def test_samples_that_are_turned_are_listed_where_others_come_in_their_places(turned, is_gap):
    lines = f"for x, y in train:\n    x = {turned}\n{STEP}"
    assert bool(_of(f"{BEGIN}{lines}").gaps) == is_gap


def test_gradients_of_parameters_that_stay_on_their_rank_are_listed():
    (gap,) = _of(f"{BEGIN}{TRAIN}{STEP}{SLOPES})\n    print(slopes[0].norm())\n").gaps
    assert "is a gradient of this rank's share; average it" in gap


def test_a_function_that_is_given_shares_in_a_loop_and_after_it_is_not_totalled_twice():
    loop = f"total = 0\n{TRAIN}{STEP}    total += r2(model(x)[:, 0], y).item()\nprint(total)\n"
    after = (
        "p = torch.cat([model(x)[:, 0] for x, _ in test])\nprint(r2(p, torch.cat([y for _, y in test])))\n"
    )
    after = f"with torch.no_grad():\n    {after.replace(chr(10) + 'print', chr(10) + '    print')}"
    gaps = _of(f"{BEGIN}{R2}{loop}{after}").gaps
    assert [gap for gap in gaps if "count once for each process" in gap], gaps


def test_a_hook_is_listed_as_its_share_goes_where_it_is_not_followed():
    hook = "kept = {}\nmodel.register_forward_hook(lambda m, given, out: kept.update(out=out))\n"
    (gap,) = _of(f"{BEGIN}{hook}{TRAIN}{STEP}print(kept['out'].mean())\n").gaps
    assert "a hook (model.register_forward_hook) gets this process's share" in gap


def test_a_hook_of_a_parameter_stays_as_it_gets_the_gradient_of_the_whole_batch():
    hook = "for p in model.parameters():\n    p.register_hook(lambda g: g.clamp(-1, 1))\n"
    assert not _of(f"{BEGIN}{hook}{TRAIN}{STEP}").gaps


def test_an_averaged_model_whose_statistics_are_taken_anew_is_replicated():
    begin = BEGIN.replace("nn.Linear(4, 3)", "nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))")
    made = "from torch.optim.swa_utils import AveragedModel, update_bn\naveraged = AveragedModel(model)\n"
    lines = f"{begin}{made}{TRAIN}{STEP}averaged.update_parameters(model)\n"
    replicated = "averaged = samestep.replicate(AveragedModel(model))\n"
    assert replicated in _after(f"{lines}update_bn(train, averaged)\n")
    assert replicated not in _after(lines)


@pytest.mark.parametrize(
    ("made", "called"),
    [
        ("from timm.utils import ModelEmaV2\nema = ModelEmaV2(model, decay=0.9)\n", "ema.module"),
        ("from ema_pytorch import EMA\nema = EMA(model, beta=0.9)\n", "ema.ema_model"),
        ("from ema_pytorch import EMA\nema = EMA(model, beta=0.9)\n", "ema"),
    ],
)
def test_a_librarys_average_of_a_model_is_a_model(made, called):
    right = f"right += ({called}(x).argmax(1) == y).sum().item()"
    lines = f"{made}right = 0\nwith torch.no_grad():\n    for x, y in test:\n        {right}\nprint(right)\n"
    assert "print(samestep.sum(right))" in _after(f"{BEGIN}{lines}")


def test_a_model_is_replicated_before_an_optimizer_behind_a_semicolon():
    made = "self.net = nn.Linear(4, 3); self.by = torch.optim.SGD(self.net.parameters(), 1)"
    lines = f"class Both:\n    def __init__(self): {made}\n"
    assert "; samestep.replicate(self.net); self.by = " in _after(f"{BEGIN}{lines}both = Both()\n")


def test_a_copy_of_buffers_in_the_loop_is_noted_and_one_of_parameters_is_not():
    for held in ("buffers", "parameters"):
        copied = f"    for a, b in zip(ema.{held}(), model.{held}()):\n        a.copy_(b)\n"
        found = _of(f"{BEGIN}import copy\nema = copy.deepcopy(model)\nfor x, y in train:\n{STEP}{copied}")
        assert any("sync_batchnorm=True" in note for note in found.notes) == (held == "buffers")


def test_a_copy_of_a_model_is_followed_as_the_model_is():
    net = "class Net(nn.Module):\n    def forward(self, x):\n        return x, model(x)\n"
    lines = (
        "import copy\nema = copy.deepcopy(Net())\ngot = []\nwith torch.no_grad():\n    for x, y in test:\n"
    )
    lines += "        got.append(ema(x)[0])\nprint(torch.cat(got).std())\n"
    assert "print(samestep.gather(torch.cat(got)).std())" in _after(f"{BEGIN}{net}{lines}")
    assert not _of(f"{BEGIN}{net}{lines}").gaps


def test_random_numbers_that_a_method_draws_for_a_sample_are_noted():
    views = "class Views:\n    def view(self, x):\n        return x + torch.randn(4)\n"
    views += "    def __getitem__(self, i):\n        return self.view(data[i])\n"
    (note,) = _of(f"{BEGIN}{views}for x, y in train:\n{STEP}").notes
    assert note.startswith("train.py:13: what a sample draws at random is seeded by sample")
    by_sample = views.replace(
        "self.view(data[i])", "torch.randn(4, generator=torch.Generator().manual_seed(i))"
    )
    assert not _of(f"{BEGIN}{by_sample}{LOOP}").notes


@pytest.mark.parametrize("collate", ["lambda batch: nn.utils.rnn.pad_sequence(batch)", "Padded()", "stacked"])
def test_a_collate_fn_that_pads_is_noted_as_it_sees_a_share_by_default(collate):
    made = "class Padded:\n    def __call__(self, batch):\n        return F.pad(batch, (0, max(map(len, batch))))\n"
    made += "def stacked(batch):\n    return torch.stack(batch)\n"
    script = BEGIN.replace("train =", f"{made}train =").replace("shuffle=True", f"collate_fn={collate}")
    assert any("pads its share" in note for note in _of(f"{script}{LOOP}").notes) == (collate != "stacked")


def test_each_model_of_a_list_is_replicated_in_the_loop_over_them():
    text = (
        f"{BEGIN}models = [nn.Linear(4, 3) for _ in range(2)]\nfor net in models:\n"
        "    optimizer = torch.optim.SGD(net.parameters(), 0.1)\n    for x, y in train:\n"
        "        F.cross_entropy(net(x), y).backward()\n"
    )
    assert "for net in models:\n    net = samestep.replicate(net)\n    optimizer = " in _after(text)


def test_numbers_that_a_method_draws_for_the_whole_data_set_are_not_noted():
    pairs = "class Pairs:\n    def draw(self):\n        self.chosen = torch.randperm(20)\n"
    pairs += "    def __getitem__(self, i):\n        return data[self.chosen[i]]\n"
    assert not _of(f"{BEGIN}{pairs}for x, y in train:\n{STEP}").notes


@pytest.mark.parametrize(
    "made",
    [
        "torch.FloatTensor(len(y), 3).zero_()",
        "torch.cuda.FloatTensor(y.size(0), 3)",
        "torch.Tensor(x.size(0), 3)",
    ],
)
def test_a_tensor_made_by_its_type_has_a_row_for_each_sample_of_the_share(made):
    lines = (
        f"    one_hot = {made}\n    loss = (model(x) - one_hot.scatter_(1, y[:, None], 1)).square().mean()\n"
    )
    found = _of(text := f"{BEGIN}for x, y in train:\n{lines}    loss.backward()\n    optimizer.step()\n")
    assert not found.gaps
    assert lines in _after(text)


def test_a_count_in_a_tensor_made_by_its_type_is_a_number_of_the_share():
    lines = "    print(torch.FloatTensor([len(y), 3]))\n"
    assert "[samestep.sum(len(y)), 3]" in _after(f"{BEGIN}for x, y in train:\n{STEP}{lines}")


def test_a_list_repeated_for_each_sample_of_the_share_is_no_number():
    lines = "    at = torch.LongTensor([2] * len(x))\n    loss = F.nll_loss(model(x), at) + F.nll_loss(model(x), y)\n"
    found = _of(text := f"{BEGIN}for x, y in train:\n{lines}    loss.backward()\n    optimizer.step()\n")
    assert not found.gaps
    assert lines in _after(text)


@pytest.mark.parametrize(
    "product", ["torch.mm(z, z.t().contiguous())", "torch.matmul(z, z.T)", "z.matmul(z.t())"]
)
def test_products_between_samples_by_a_function_are_those_of_the_whole_batch(product):
    lines = (
        f"    z = model(x)\n    loss = {product}.exp().mean()\n    loss.backward()\n    optimizer.step()\n"
    )
    assert product.replace("z,", "samestep.gather(z),").replace("z.t", "samestep.gather(z).t").replace(
        "z.T", "samestep.gather(z).T"
    ).replace("z.m", "samestep.gather(z).m") in _after(f"{BEGIN}for x, y in train:\n{lines}")


@pytest.mark.parametrize("path", ["path", "(path / 'a.pt')"])
def test_a_file_that_a_path_opens_is_written_by_one_process(path):
    begin = f"from pathlib import Path\n{BEGIN}path = Path('out')\nfor x, y in train:\n{STEP}"
    opened = path.strip("()")
    assert (
        f'torch.save(model.state_dict(), open({opened} if samestep.init().rank == 0 else "/dev/null", "wb"))'
        in _after(f'{begin}torch.save(model.state_dict(), {path}.open("wb"))\n')
    )
    lines = f'with {path}.open("wb") as file:\n    torch.save(model.state_dict(), file)\n'
    assert "    torch.save(model.state_dict(), file)\n" in _after(begin + lines)


def test_a_command_that_is_written_to_is_no_file():
    line = 'os.popen("cat", "w").write("done")\n'
    assert line in _after(f"import os\n{BEGIN}for x, y in train:\n{STEP}{line}")


def test_a_function_that_stays_as_it_is_loses_no_half_of_an_edit():
    note = "def note(loss):\n    seen['loss'] += loss.sum().item()\n    seen['count'] += loss.size(0)\n"
    text = f"{BEGIN}seen = {{'loss': 0.0, 'count': 0}}\n{note}note(torch.zeros(4))\nfor x, y in train:\n"
    step = STEP.replace("(x), y)", "(x), y, reduction='none')").replace(
        "loss.backward", "loss.mean().backward"
    )
    text += f"{step}    note(loss.detach())\nprint(seen['loss'] / seen['count'])\n"
    assert note in _after(text)


def test_the_number_of_graphs_in_a_forward_is_only_a_size():
    """As it is made of the numbers of the graphs that nodes belong to, by `batch.max() + 1`."""
    net = (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.out = nn.Linear(4, 3)\n    def forward(self, x, batch):\n"
        "        graphs = int(batch.max()) + 1\n"
        "        return torch.zeros(graphs, 3).index_add_(0, batch, self.out(x))\n"
    )
    begin = BEGIN.replace("nn.Linear(4, 3)\n", "Net()\n").replace("data =", f"{net}data =", 1)
    loop = f"for x, batch, y in train:\n{STEP}".replace("model(x)", "model(x, batch)")
    assert not _of(f"{begin}{loop}").gaps
    assert _of(f"{begin}{loop}".replace("batch.max()", "x.max()")).gaps


@pytest.mark.parametrize(
    "lines",
    [
        "(few if p.ndim < 2 else many).append(p)",
        "if p.ndim < 2:\n            few.append(p)\n        else:\n            many.append(p)",
    ],
)
def test_parameters_that_are_appended_to_lists_by_a_test_are_the_models(lines):
    groups = "def groups(model):\n    many, few = [], []\n    for name, p in model.named_parameters():\n"
    groups += f"        {lines}\n"
    groups += '    return [{"params": many}, {"params": few, "weight_decay": 0.0}]\n'
    begin = BEGIN.replace("model.parameters()", "groups(model)").replace(
        "optimizer =", f"{groups}optimizer =", 1
    )
    assert not _of(f"{begin}for x, y in train:\n{STEP}").gaps
    assert "samestep.replicate(model)" in _after(f"{begin}for x, y in train:\n{STEP}")


@pytest.mark.parametrize("rows", ["range(len(y))", "np.arange(len(y))"])
def test_a_row_for_each_sample_that_numpy_makes_is_no_gap_also_where_the_function_gets_other_numbers(rows):
    lines = f"    made = np.zeros((len(y), 3))\n    made[{rows}, y] = 1.0\n    return torch.Tensor(made)\n"
    step = STEP.replace("F.cross_entropy(model(x), y)", "F.mse_loss(model(x), one_hot(y.numpy()))")
    calls = f"fixed = one_hot(np.array([0, 2]))\nfor x, y in train:\n{step}"
    assert not _of(f"import numpy as np\n{BEGIN}def one_hot(y):\n{lines}{calls}").gaps


def test_a_loop_is_no_evaluation_where_only_a_part_of_the_model_is_in_eval_mode():
    net = BEGIN.replace(
        "model = nn.Linear(4, 3)",
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)\n"
        "    def forward(self, x):\n        return self.head(self.norm(x))\nmodel = Net()",
    )
    counted = (
        "right = 0\nfor x, y in test:\n    right += (model(x).argmax(1) == y).sum().item()\nprint(right)\n"
    )
    for evaluated, is_shared in ("model.norm", False), ("model", True):
        lines = f"{net}model.train()\nmodel.norm.eval()\n{TRAIN}{STEP}{evaluated}.eval()\n{counted}"
        assert ("samestep.sum(right)" in _after(lines)) == is_shared


LAYERS = """\
def drop_path(x, rate):
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    return x.div(1 - rate) * (1 - rate + torch.rand(shape)).floor_()
class Alone(nn.Module):
    def forward(self, x):
        return x + drop_path(x, 0.1)
class Together(nn.Module):
    def forward(self, x):
        return x - x.mean()
"""


@pytest.mark.parametrize(
    "layers",
    [
        "nn.Sequential(nn.Linear(4, 3), {}())",
        "nn.Sequential(*[nn.Linear(4, 3), nn.Sequential({}())])",
        "Net({})",
    ],
)
def test_layers_in_a_sequential_or_a_list_are_followed(layers):
    net = (
        "class Net(nn.Module):\n    def __init__(self, kind):\n        super().__init__()\n"
        "        self.head, self.norms = nn.Linear(4, 3), nn.ModuleList([kind() for _ in range(2)])\n"
        "    def forward(self, x):\n        x = self.head(x)\n        for norm in self.norms:\n"
        "            x = norm(x)\n        return x\n"
    )
    for kind, num_gaps in ("Alone", 0), ("Together", 1):
        begin = BEGIN.replace("model = nn.Linear(4, 3)", f"{LAYERS}{net}model = {layers.format(kind)}")
        assert len(_of(f"{begin}for x, y in train:\n{STEP}").gaps) == num_gaps, kind


@pytest.mark.parametrize(
    "moved",
    [
        "tuple(part.to('cpu') for part in batch)",
        "[part.to('cpu') for part in batch]",
        "list(map(lambda part: part.to('cpu'), batch))",
    ],
)
def test_a_part_of_a_batch_whose_parts_were_moved_one_by_one_has_all_its_samples(moved):
    step = STEP.replace("model(x), y", "model(batch[0]), batch[1]")
    assert not _of(f"{BEGIN}for batch in train:\n    batch = {moved}\n{step}").gaps


@pytest.mark.parametrize(
    "body",
    ["print('[log]', *items)", "print(' '.join(map(str, items)))", "for item in items:\n        print(item)"],
)
def test_what_a_function_gets_as_further_arguments_is_totalled_where_it_is_called(body):
    lines = f"def log(*items):\n    {body}\ntotal = 0.0\n{LOOP}    total += loss.item() * len(x)\nlog('loss', total)\n"
    assert "log('loss', samestep.sum(total))\n" in _after(f"{BEGIN}{lines}")
    assert not _of(f"{BEGIN}{lines}").gaps


NAMESPACE = BEGIN.replace("model", "run.model").replace(
    "train =", "run = types.SimpleNamespace(total=0.0)\ntrain ="
)


def test_a_namespace_is_an_object_of_the_script():
    lines = LOOP.replace("model", "run.model")
    script = f"import types\n{NAMESPACE}{lines}    run.total += loss.item()\nprint(run.total)\n"
    after = _after(script)
    assert "samestep.replicate(run.model)" in after
    assert "    run.total += loss.item() * train.share\nprint(samestep.sum(run.total))\n" in after
    assert not _of(script).gaps
    (gap,) = _of(f"{script.replace('run.total += loss.item()', 'run.last = x')}print(run.last)\n").gaps
    assert "is of the last batch, of which this process has a part at most" in gap


@pytest.mark.parametrize(
    ("test", "is_gap"),
    [("True", False), ("1", False), ("len(x) > 3", False), ("float(torch.rand(1)) > 0.5", True)],
)
def test_training_under_a_test_that_always_holds_is_training_in_each_turn(test, is_gap):
    step = STEP.replace("    ", "        ")
    lines = f"for x, y in train:\n    if {test}:\n{step}    print(loss.item())\n"
    assert bool(_of(f"{BEGIN}{lines}").gaps) == is_gap


def test_a_device_with_a_type_beside_its_name_becomes_that_of_the_process():
    assert "device: torch.device = samestep.init().device\n" in _after(
        f"{BEGIN}device: torch.device = torch.device('cuda')\nother: int\n{LOOP}"
    )


def test_gradients_that_a_statement_turns_off_are_those_of_an_evaluation():
    begin = f"{BEGIN}{LOOP}torch.set_grad_enabled(False)\ntotal = 0.0\n"
    lines = "for x, y in test:\n    total += F.cross_entropy(model(x), y, reduction='sum').item()\n"
    script = f"{begin}{lines}torch.set_grad_enabled(True)\nprint(total / 20)\n"
    assert "print(samestep.sum(total) / 20)\n" in _after(script)
    assert not _of(script).gaps


@pytest.mark.parametrize(("outer", "inner"), [("'", '"'), ('"', "'")])
def test_a_total_inside_an_f_string_has_the_other_quotes(outer, inner):
    begin = BEGIN.replace("train =", "parts = {}\nparts[KEY] =").replace("KEY", f"{outer}train{outer}")
    lines = LOOP.replace("in train", f"in parts[{outer}train{outer}]")
    after = _after(f"{begin}{lines}print(f{outer}{{loss.item():.3f}}{outer})\n")
    assert (
        f"print(f{outer}{{samestep.sum(loss.item() * parts[{inner}train{inner}].share):.3f}}{outer})" in after
    )
