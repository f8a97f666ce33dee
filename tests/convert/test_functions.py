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
        (f"{TRAIN}    out = np.squeeze(model(x) / 2)\n    F.cross_entropy(out, y).backward()",
         "    out = model(x) / 2; out = out.squeeze(tuple(range(1, out.ndim)))\n"),
        (f"losses = {{}}\n{LOOP}    losses[best] = loss.item()\nprint(max(losses, key=losses.get))",
         "print(max(samestep.sum(losses), key=samestep.sum(losses).get))"),
        (f"import numpy as np\ngot = []\n{LOOP}    got.append(loss.item() * len(x))\nprint(np.sum(got) / 20)",
         "print(samestep.sum(np.sum(got)) / 20)"),
        ("with torch.no_grad():\n    out = torch.cat([model(x) for x, y in test])\nprint(out.std())",
         "print(samestep.gather(out).std())"),
        (f"{TRAIN}{STEP}    losses = {{'ce': loss}}\n    for k, v in losses.items():\n"
         "        sums[k] = sums.get(k, 0.0) + v.item()\nprint(sums)".replace("for x", "sums = {}\nfor x", 1),
         "        sums[k] = sums.get(k, 0.0) + v.item() * train.share\nprint(samestep.sum(sums))"),
        (f"{TRAIN}{SLOPES}, create_graph=True)\n    (loss + sum(one.pow(2).sum() for one in slopes)).backward()\n",
         "    (loss + sum(one.pow(2).sum() for one in slopes)).backward()\n"),
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


def test_a_model_is_replicated_before_an_optimizer_behind_a_semicolon():
    made = "self.net = nn.Linear(4, 3); self.by = torch.optim.SGD(self.net.parameters(), 1)"
    lines = f"class Both:\n    def __init__(self): {made}\n"
    assert "; samestep.replicate(self.net); self.by = " in _after(f"{BEGIN}{lines}both = Both()\n")


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


def test_each_model_of_a_list_is_replicated_in_the_loop_over_them():
    text = (
        f"{BEGIN}models = [nn.Linear(4, 3) for _ in range(2)]\nfor net in models:\n"
        "    optimizer = torch.optim.SGD(net.parameters(), 0.1)\n    for x, y in train:\n"
        "        F.cross_entropy(net(x), y).backward()\n"
    )
    assert "for net in models:\n    net = samestep.replicate(net)\n    optimizer = " in _after(text)


def test_data_that_are_drawn_after_the_model_is_made_are_drawn_before_it_is_replicated():
    drawn = "part, _ = torch.utils.data.random_split(data, [12, 8])\n"
    after = _after(BEGIN.replace("optimizer =", f"{drawn}optimizer =") + f"for x, y in train:\n{STEP}")
    assert "model = nn.Linear(4, 3)\n" in after
    assert f"{drawn}model = samestep.replicate(model)\noptimizer =" in after
