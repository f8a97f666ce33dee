"""`samestep convert` takes the length, keys and elements of lists and dicts for those of the whole data set."""

import pytest
from convert.test_convert import BEGIN, EVALUATE, STEP, _after, _of, _place  # noqa: F401

NO_MODEL = BEGIN.partition("model =")[0]
EACH = f"{EVALUATE}        p = out.argmax(1)\n        for i in range(len(x)):\n"
TRAIN = f"for x, y in train:\n{STEP}"


@pytest.mark.parametrize(
    "added",
    [
        *("wrong.append(i)", "wrong.append([i, p[i].item()])", "wrong.append((i, p[i]))", "wrong += [i]"),
        *("wrong.append({'at': i})", "wrong.append(p[i].item())", "wrong.append(x[i])"),
    ],
)
@pytest.mark.parametrize("test", ["            if p[i] != y[i]:\n    ", ""])
def test_a_list_filled_by_sample_is_as_long_as_the_lists_of_all_ranks(added, test):
    text = f"{BEGIN}wrong = []\n{EACH}{test}            {added}\nprint(len(wrong) / 20)\n"
    assert "print(samestep.sum(len(wrong)) / 20)" in _after(text)
    assert not _of(text).gaps


def test_a_list_filled_by_batch_is_as_long_as_on_one_rank():
    text = f"{BEGIN}losses = []\n{EVALUATE}        losses.append([loss.item()])\nprint(len(losses))\n"
    assert "print(max(samestep.gather([len(losses)])))" in _after(text.replace("loss.item()", "len(x)"))


@pytest.mark.parametrize("empty", ["{}", "dict()", "Counter()", "defaultdict(int)"])
@pytest.mark.parametrize("counts", ["seen[int(p[i])] += 1", "seen[int(p[i])] = seen.get(int(p[i]), 0) + 1"])
def test_a_dict_with_keys_of_the_data_is_added_before_its_keys_are_counted(empty, counts):
    begin = f"from collections import Counter, defaultdict\n{BEGIN}seen = {empty}\n"
    text = f"{begin}{EACH}            {counts}\nprint(len(seen), sorted(seen.items()))\n"
    assert "print(len(samestep.sum(seen)), sorted(samestep.sum(seen).items()))" in _after(text)
    assert not _of(text).gaps


@pytest.mark.parametrize("adds", ["params += list(b.parameters())", "params = params + list(b.parameters())"])
@pytest.mark.parametrize("begins", ["params = list(a.parameters())", "params = []\nparams += a.parameters()"])
def test_every_model_whose_parameters_a_list_gets_is_replicated(begins, adds):
    models = (
        f"a = nn.Linear(4, 3)\nb = nn.Linear(3, 3)\n{begins}\n{adds}\noptimizer = torch.optim.SGD(params)\n"
    )
    made = _after(f"{NO_MODEL}{models}for x, y in train:\n    F.cross_entropy(b(a(x)), y).backward()\n")
    assert "a = samestep.replicate(nn.Linear(4, 3))\nb = samestep.replicate(nn.Linear(3, 3))" in made


@pytest.mark.parametrize("shape", ["[len(x), 4]", "(len(x), 4)", "len(x), 4"])
def test_the_number_of_samples_in_a_shape_stays_this_ranks(shape):
    text = f"{BEGIN}for x, y in train:\n    x = x * torch.linspace(0, 1, 4).expand({shape})\n{STEP}"
    assert f"expand({shape})" in _after(text)
    assert not _of(text).gaps


def test_a_function_that_trains_a_model_at_two_places_gets_it_replicated():
    loop = "".join(f"    {line}\n" for line in TRAIN.splitlines())
    fit = f"def fit(model, lr):\n    optimizer = torch.optim.SGD(model.parameters(), lr)\n{loop}"
    made = _after(f"{NO_MODEL}{fit}net = nn.Linear(4, 3)\nfit(net, 1.0)\nfit(net, 0.1)\n")
    assert "net = samestep.replicate(nn.Linear(4, 3))" in made


@pytest.mark.parametrize(
    "inner", ["torch.cat([a] + rest, dim=1)", "torch.cat([a, *rest], dim=1)", "torch.cat(rest + rest, 1)"]
)
def test_lists_of_features_may_be_joined_in_forward(inner):
    net = (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.a = nn.Linear(4, 3)\n"
        f"    def forward(self, x):\n        a = self.a(x)\n        rest = [self.a(x)]\n        return {inner}\n"
    )
    text = f"{NO_MODEL}{net}model = Net()\noptimizer = torch.optim.SGD(model.parameters())\n{TRAIN}"
    assert not _of(text).gaps


def test_how_many_nodes_each_graph_has_is_a_number_of_each_graph():
    net = (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.a = nn.Linear(4, 3)\n"
        "    def forward(self, x, batch):\n        sums = torch.zeros(8, 3).index_add_(0, batch, self.a(x))\n"
        "        return sums / torch.bincount(batch, minlength=8)[:, None]\n"
    )
    lines = "for x, batch, y in train:\n    loss = F.cross_entropy(model(x, batch), y)\n    loss.backward()\n"
    text = f"{NO_MODEL}{net}model = Net()\noptimizer = torch.optim.SGD(model.parameters())\n{lines}"
    assert not _of(text).gaps


def test_what_a_training_loop_computes_of_the_texts_of_its_samples_is_not_gathered_for_its_loss():
    encode = "def encode(text):\n    return torch.tensor(['abc'.index(c) for c in ''.join(text)])\n"
    lines = "for x, text in train:\n    loss = F.cross_entropy(model(x), encode(text))\n    loss.backward()\n"
    made = _of(f"{BEGIN}{encode}{lines}")
    assert "gather" not in _after(f"{BEGIN}{encode}{lines}")
    assert "the loss is ''.join(...) of this process's values" in made.gaps[0]


INTERLEAVED = (
    "for x, y in train:\n    both = torch.cat((x, x * 2)).reshape(-1, 2, 4).transpose(0, 1).reshape(-1, 4)\n"
    "    loss = F.cross_entropy(model(both)[: len(x)], y)\n    loss.backward()\n"
)


@pytest.mark.parametrize(
    ("lines", "gap"),
    [
        (INTERLEAVED, "the loss mixes the rows of tensors that were joined"),
        ("size = 8\nreal = torch.ones(size, 3)\nfor x, y in DataLoader(data, size, drop_last=True):\n"
         "    F.mse_loss(model(x), real).backward()\n",
         "`torch.ones(size, 3)` is made for a whole batch; make it in the loop"),
        (f"for x, y in train:\n{STEP}    at = torch.nonzero(y)\n    print(at)\n", "numbers the samples of a share"),
    ],
)  # fmt: skip
def test_what_no_rank_can_cut_out_of_the_whole_batch_is_listed(lines, gap):
    assert any(gap in found for found in _of(f"{BEGIN}{lines}").gaps)


@pytest.mark.parametrize(
    "places", ["torch.where(y > 0)[0]", "(y > 0).nonzero()", "y.nonzero(as_tuple=True)[0]"]
)
def test_the_number_of_samples_that_were_found_is_summed(places):
    lines = f"for x, y in train:\n{STEP}    found = {places}\n    print(len(found), x[found].sum())\n"
    assert "    print(samestep.sum(len(found)), samestep.sum(x[found].sum()))\n" in _after(f"{BEGIN}{lines}")
    assert not _of(f"{BEGIN}{lines}").gaps


def test_what_is_added_to_the_data_of_rows_is_theirs():
    lines = "    noise = torch.zeros_like(x)\n    for _ in range(3):\n        noise.data += x.sign()\n"
    script = f"{BEGIN}for x, y in train:\n{lines}{STEP.replace('model(x)', 'model(x + noise)')}"
    assert "        noise.data += x.sign()\n" in _after(script)
    assert not _of(script).gaps


@pytest.mark.parametrize("given", ["self.kept['net']", "self.net"])
def test_what_an_object_gets_by_keywords_is_known_by_its_name(given):
    kept = "self.kept = options" if "kept" in given else "self.net = options['net']"
    trainer = (
        f"class Trainer:\n    def __init__(self, **options):\n        {kept}\n        self.loss = options['loss']\n"
        f"    def fit(self):\n        for x, y in train:\n            loss = self.loss({given}(x), y)\n"
        "            loss.backward()\n            print(loss.item())\nTrainer(net=model, loss=F.cross_entropy).fit()\n"
    )
    assert "            print(samestep.mean(loss.item()))\n" in _after(f"{BEGIN}{trainer}")
    assert not _of(f"{BEGIN}{trainer}").gaps


def test_the_fields_of_a_named_tuple_are_followed():
    net = (
        "from collections import namedtuple\nOut = namedtuple('Out', 'first second')\n"
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = nn.Linear(4, 3)\n    def forward(self, x):\n"
        "        return Out(self.layer(x), second=x)\nmodel = Net()"
    )
    lines = (
        "for x, y in train:\n    loss = F.cross_entropy(model(x).first, y)\n    for part in model(x):\n"
        "        loss = loss + part.mean()\n    loss.backward()\n"
    )
    assert not _of(f"{BEGIN.replace('model = nn.Linear(4, 3)', net)}{lines}").gaps


def test_what_is_added_to_a_list_that_a_loop_has_put_into_an_object_is_totalled_there():
    lines = f"class Held:\n    pass\nheld, shown = Held(), [[], []]\nfor x, y in train:\n{STEP}"
    lines += "    for held.losses in shown:\n        held.losses.append(loss.item())\nprint(shown[0])\n"
    assert "        held.losses.append(samestep.mean(loss.item()))\nprint(shown[0])\n" in _after(
        f"{BEGIN}{lines}"
    )


ENGINE = """\
class Engine:
    def __init__(self):
        self.handlers, self.loss = [], 0.0
    def on(self, handler):
        self.handlers.append(handler)
        return handler
trainer = Engine()
"""


@pytest.mark.parametrize("keeps", ["@trainer.on\n{}", "{}trainer.on(show)\n", "{}[trainer.on][0](show)\n"])
@pytest.mark.parametrize(
    ("body", "is_gap"), [("print(engine.loss)", True), ("return nn.Linear(4, 3)", False)]
)
def test_a_function_that_the_project_keeps_is_listed_if_it_shows_something(keeps, body, is_gap):
    loop = f"for x, y in train:\n{STEP}    trainer.loss = loss.item()\n    for handler in trainer.handlers:\n"
    kept = keeps.format(f"def show(engine):\n    {body}\n")
    script = f"{BEGIN}{ENGINE}{kept}{loop}        handler(trainer)\n"
    assert any("another function keeps it" in gap for gap in _of(script).gaps) == is_gap


@pytest.mark.parametrize(
    ("shown", "becomes"),
    [
        ("dataclasses.asdict(stats)", "stats.loss += samestep.mean(loss.item())"),
        (
            "dataclasses.replace(stats, n=20).loss",
            "print(samestep.sum(dataclasses.replace(stats, n=20).loss))",
        ),
        ("copy.copy(stats).loss", "print(samestep.sum(copy.copy(stats).loss))"),
    ],
)
def test_a_copy_of_an_object_has_its_sums(shown, becomes):
    made = "import copy, dataclasses\n@dataclasses.dataclass\nclass Stats:\n    loss: float = 0.0\n    n: int = 0\n"
    lines = f"stats = Stats()\nfor x, y in train:\n{STEP}    stats.loss += loss.item()\nprint({shown})\n"
    assert becomes in _after(f"{BEGIN}{made}{lines}")
    assert not _of(f"{BEGIN}{made}{lines}").gaps


def test_what_is_counted_at_the_numbers_of_samples_is_listed():
    (gap,) = _of(
        f"{BEGIN}seen = torch.zeros(20)\nfor x, y in train:\n{STEP}    seen[y] += 1\nprint(seen)\n"
    ).gaps
    assert "`seen` is filled by this process's samples" in gap


def test_a_number_of_the_batch_beside_its_rows_is_totalled():
    scaled = "    y = (x - x.mean()) / (x.std() + 1e-8)\n    loss = (model(x).mean(1) * y[:, 0]).mean()\n"
    script = f"{BEGIN}for x, y in train:\n{scaled}    loss.backward()\n"
    assert "    y = (x - samestep.mean(x.mean())) / (samestep.gather(x).std() + 1e-8)\n" in _after(script)
    assert not _of(script).gaps


def test_a_partial_of_a_function_of_the_project_is_followed_with_its_arguments():
    step = "def fit(net, scale, batch):\n    x, y = batch\n    loss = F.cross_entropy(net(x), y) * scale\n"
    step += "    loss.backward()\n    optimizer.step()\n    return loss.item()\n"
    lines = "from functools import partial\nstep, total = partial(fit, model, scale=2.0), 0.0\n"
    script = f"{BEGIN}{step}{lines}for batch in train:\n    total += step(batch=batch)\nprint(total)\n"
    assert "    total += step(batch=batch) * train.share\nprint(samestep.sum(total))\n" in _after(script)
    assert not _of(script).gaps


@pytest.mark.parametrize(
    "made",
    [
        "nn.Parameter(torch.zeros(3, 3))",
        "torch.zeros(3, 3, requires_grad=True)",
        "torch.eye(3).requires_grad_()",
        "torch.eye(3).requires_grad_(True)",
    ],
)
def test_a_tensor_of_an_optimizer_that_is_in_no_model_is_listed_if_batches_train_it(made):
    made = f"centres = {made}\nopt = torch.optim.SGD([*model.parameters(), centres], 0.1)\n"
    loop = (
        f"{made}for x, y in train:\n    (model(x) - centres[y]).square().mean().backward()\n    opt.step()\n"
    )
    (gap,) = _of(f"{BEGIN}{loop}").gaps
    assert "write `centres.grad = samestep.mean(centres.grad)`" in gap


@pytest.mark.parametrize("given", ["", "True"])
def test_a_model_that_is_told_to_learn_is_no_tensor_in_no_model(given):
    begin = BEGIN.replace("nn.Linear(4, 3)", f"nn.Linear(4, 3).requires_grad_({given})")
    assert not _of(f"{begin}{TRAIN}").gaps


def test_lists_of_batches_that_map_joins_are_gathered_where_they_are_used():
    lines = "    outs, ys = [], []\n    for x, y in test:\n        outs.append(model(x)); ys.append(y)\n"
    lines = f"with torch.no_grad():\n{lines}    outs, ys = map(torch.cat, (outs, ys))\nprint(outs.std())\n"
    assert "print(samestep.gather(outs).std())" in _after(f"{BEGIN}{lines}")


def test_a_batch_that_is_kept_for_the_next_turn_is_of_an_earlier_batch_there():
    step = STEP.replace("model(x), y", "model(last[0]), last[1]")
    text = (
        f"{BEGIN}last = None\nfor x, y in train:\n    if last is None: last = x, y\n{step}    last = x, y\n"
    )
    (gap,) = _of(text).gaps
    assert "the loss is of an earlier batch, of which this process may have another part" in gap
    step = STEP.replace("model(x)", "model(kept)")
    assert not _of(f"{BEGIN}for x, y in train:\n    kept = x\n{step}").gaps


def test_the_methods_of_an_iterator_are_those_functions_of_python():
    lines = "batches = train.__iter__()\nfor _ in range(3):\n    x, y = batches.__next__()\n"
    assert "print(samestep.mean(loss.item()))" in _after(f"{BEGIN}{lines}{STEP}    print(loss.item())\n")
    assert not _of(f"{BEGIN}{lines}{STEP}").gaps


def test_tensors_that_a_star_hands_to_a_function_of_torch_are_followed():
    lines = "    loss = F.pairwise_distance(*[model(x), model(x)]).mean()\n    loss.backward()\n"
    assert not _of(f"{BEGIN}for x, y in train:\n{lines}").gaps
