"""What same=True cannot make the serial script's is said once, by operation; the run goes on."""

from textwrap import dedent, indent

import pytest

AVERAGES = "averages over the samples of a batch (train.py:"
DROPOUT = "samestep: dropout draws other masks"
PARTED = "the random stream of torch on ranks 1, 2 differs from rank 0's"
SCRIPT = """
import random
import numpy as np
import torch, samestep
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
world = samestep.init()
torch.manual_seed({seed})
train = samestep.loader(TensorDataset(torch.rand(23, 4)), batch_size=6, shuffle=True)
width = int(torch.ones(2).sum())
class Net(nn.Sequential):
    def forward(self, x, epoch):
        return super().forward(x + torch.rand(width, 2).mean() if {square} and epoch else x)

model = samestep.replicate(Net(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 1)), same={same})
{after}
for epoch in range(2):
    for (x,) in train:
        {inside}
        loss = model(x, epoch).square().mean()
        loss.backward()
        print(samestep.mean(loss.item()))
"""
PLAIN = {"seed": "0", "after": "", "inside": "pass", "square": "False", "same": "True"}
FLIPPED = "x = 0.7 * x + 0.3 * x.flip(0)"
TURNED = "rows = np.arange(len(x))[::-1].copy(); x = 0.7 * x + 0.3 * x[rows]"
MIXED = "x = x.clone(); x[:, 2:] = x.flip({})[:, 2:]"
LABELS = (
    "y = (x[:, 0] > 0.5).long(){}; "
    "F.binary_cross_entropy_with_logits(model(x{}, 0)[:, 0], y.double()).backward()"
)
SORTED = (
    "rows = np.argsort(x[:, 0].numpy()); z = model(x[rows], 0)[np.argsort(rows)]; (z * x).mean().backward()"
)
PAIRED = "y = model(x, 0); (y @ y.t()).mean().backward()"
NORMALIZED = "x = (x - x.mean()) / x.std()"
BLOCKED = "kept = (torch.rand(len(x), 4) > 0.1).float(); x = x * kept * kept.numel() / kept.sum()"
BALANCED = "p = model(x, 0); f = F.one_hot(p.argmax(1), 2).double().mean(0); (f * p.mean(0)).sum().backward()"
PRODUCT = "p = model(x, 0); (p.mean(0) * (p > 0).double().mean(0)).sum().backward()"
LOSSES = "o = model(x, 0); a, b = o.square().mean(), o.abs().mean()"
READ = f"{LOSSES}; w = a.item() / (a.item() + b.item()); (w * a + (1 - w) * b).backward()"
READ_LATER = f"{LOSSES}; ((s / 4 if epoch else 1.0) * a).backward(); s += a.item() * (not epoch)"
ADAPTED = (
    f"{LOSSES}; of = list(model[2].parameters())[:1]; da, = torch.autograd.grad(a, of, retain_graph=True); "
    "db, = torch.autograd.grad(b, of, retain_graph=True); (a + (da.norm() / db.norm()).detach() * b).backward()"
)
INVARIANT = (
    "w = torch.ones({}, requires_grad=True); l = (w * model(x, 0)).square().mean(); "
    "g, = torch.autograd.grad(l, w, create_graph=True); (l + g.square().sum()).backward()"
)
REFERRED = "o = model(x, 0); sum((o[i] - o).square().mean() for i in range(len(o))).backward()"
EASY = "l = model(x, 0).square()[:, 0]; (l * (l < l.mean())).mean().backward()"
MASKED = "l = model(x, 0)[:, 0].square(); l[l >= l.detach().quantile(0.7)].mean().backward()"
COUNTED = "l = model(x, 0).square()[:, 0]; m = torch.ones(len(x)); ((l * m).sum() / m.sum().clamp(min=1)).backward()"
FREQUENT = (
    "y = (x[:, 0] > 0.5).long(); w = len(y) / torch.bincount(y, minlength=2).clamp(min=1); "
    "(model(x, 0).square()[:, 0] * w[y]).mean().backward()"
)
POSITIVE = (
    "t = x[:, :1] > 0.5; n = t.sum(); w = (len(t) - n) / n.clamp(min=1); "
    "F.binary_cross_entropy_with_logits(model(x, 0), t.float(), pos_weight=w).backward()"
)
PICKED = (
    "l = model(x, 0).square()[:, 0]; m = x[:, 0] >= 0; "
    "(l[m].sum() / m.sum() + (l * m).sum() / (m.sum() + 1e-8)).backward()"
)
ATTACK = (
    "d = torch.zeros_like(x, requires_grad=True)\n"
    "        F.mse_loss(model(x + d, 0), x[:, :1], reduction='{}').backward(inputs=[d]); "
)
OF_BOTH = (
    "a, b = model(torch.cat([x, x + d.grad.sign()]), 0).chunk(2)\n"
    "        (F.mse_loss(a, x[:, :1]) + F.kl_div(b.log_softmax(1), a.softmax(1), reduction='batchmean')).backward()"
)
PADDED = (
    "n = torch.arange(3, 3 + len(x)); rnn = nn.utils.rnn; "
    "z = (x * model(x, 0))[..., None]; p = rnn.pack_padded_sequence(z, n, batch_first=True, enforce_sorted=False); "
    "(rnn.pad_packed_sequence(p, batch_first=True)[0].mean(1) * x[:, :1]).mean().backward()"
)
TRAINED = "model(x, 0).square().mean().backward()"
NOISE = f"noise = {{}}; x = x + torch.tensor(noise)[:, None].float(); {TRAINED}"
MADE = (
    "n, s = 0, 0.0; kept = torch.randn(8, 4); mean = torch.ones(4) / 3; "
    "made, drawn = (torch.randn(4, 4, generator=torch.Generator().manual_seed(n)) for n in (world.rank, 0))"
)
IMPORTED = "0); from numpy.random import normal; (0"
OF_RANK = "g = torch.Generator().manual_seed(world.rank); shift = {}"
UNLIKE = "a tensor that the loop computes with, and that is no batch's, differs between ranks"
DRAWN = (
    "import random; lam = random.Random(world.rank).random(); (lam * model(x, 0).square().mean()).backward()"
)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"after": "g = torch.Generator()", "inside": "torch.randn(x.shape, generator=g)"}, "leave generator= out"),
        ({"after": "g = np.random.default_rng(0)", "inside": NOISE.format("g.normal(size=len(x))")}, "g.normal (train"),
        ({"after": "r = random.Random(0)", "inside": NOISE.format("[r.random() for row in x]")}, "r.random (train.py:"),
        ({"seed": IMPORTED, "inside": NOISE.format("normal(size=len(x))")}, "samestep: normal (train"),
        ({"after": "fixed = torch.randn(8, 1)", "inside": f"x = x + fixed[:len(x)]; {TRAINED}"}, "by their place in"),
        ({"after": OF_RANK.format("torch.rand(4, generator=g)"), "inside": f"x = x * shift; {TRAINED}"}, UNLIKE),
        ({"after": "g = np.random.default_rng(world.rank)", "inside": NOISE.format("g.normal(size=1)")}, UNLIKE),
        ({"inside": "torch.distributions.Beta(torch.ones(len(x)), 0.4).sample()"}, "_sample_dirichlet (train.py:"),
        ({"inside": "torch.poisson(x)"}, "poisson (train.py:"),
        ({"inside": "x = x[torch.randperm(len(x))]"}, "randperm (train.py:"),
        ({"inside": "x = x[np.random.permutation(len(x))]"}, "numpy.random.permutation (train.py:"),
        ({"inside": "at = list(range(len(x))); random.shuffle(at)"}, "random.shuffle (train.py:"),
        ({"inside": "at = np.random.choice(len(x), 3)"}, "numpy.random.choice (train.py:"),
        ({"inside": "np.random.binomial(5, x)"}, "numpy.random.binomial (train.py:"),
        ({"inside": "x = torch.stack([row if random.random() < 0.5 else -row for row in x])"}, "random.random (train"),
        ({"inside": "n = x.size(0); [np.random.randint(3, size=2) for at in range(n)]"}, "numpy.random.randint (train"),
        ({"inside": "[torch.rand(1) for row, other in zip(x, x)]"}, "uniform_ (train.py:"),
        ({"inside": "n = []\n        while len(n) < len(x): n.append(torch.rand(1))"}, "uniform_ (train.py:"),
        ({"inside": "list(map(lambda row: row * random.random(), x))"}, "random.random (train.py:"),
        ({"inside": "torch.stack([F.dropout(row) for row in x])"}, "it draws one by one for this rank's samples"),
        ({"inside": "torch.stack([row * torch.rand(()) for row in x])"}, "it draws one by one for this rank's samples"),
        ({"inside": "y = [model(x, 0)[i] for i in range(len(x))]"}, "it draws one by one for this rank's samples"),
        ({"inside": "world.rank or torch.rand(3)"}, PARTED),
        ({"after": "torch.manual_seed(world.rank)"}, PARTED),
        ({"square": "True"}, "uniform_ (train.py:"),
        ({"inside": "torch.rand(len(x) * 3)"}, "numbers are 3 for each of this rank's 2 samples"),
        ({"inside": "n = len(x); torch.randint(0, 9, (n // 2,))"}, "its 1 numbers are counted by this rank's samples"),
        ({"inside": "torch.multinomial(torch.ones(9), 3 * len(x))"}, "multinomial(weights.expand(len(x), -1), 3)"),
        ({"inside": "torch.multinomial(torch.ones(len(x)), 1)"}, "a choice among this rank's samples"),
        ({"inside": FLIPPED}, "moves samples within a batch (train.py:"),
        ({"inside": TURNED}, "moves samples within a batch (train.py:"),
        ({"inside": PAIRED}, "pairs of the samples of a batch (train.py:"),
        ({"inside": "model(x, 0)[:, 0].sort()[0][0].backward()"}, "compares the samples of a batch (train.py:"),
        ({"inside": MASKED}, "compares the samples of a batch (train.py:"),
        ({"inside": "model(x, 0).square().mean().sqrt().backward()"}, AVERAGES),
        ({"inside": NORMALIZED}, AVERAGES),
        ({"inside": PRODUCT}, AVERAGES),
        ({"inside": BALANCED}, AVERAGES),
        ({"inside": BLOCKED}, AVERAGES),
        ({"inside": f"model(x, 0).mean().backward(); {PAIRED}"}, "pairs of the samples of a batch (train.py:"),
        ({"after": "copy = nn.BatchNorm1d(4)", "inside": "copy(torch.stack((x, x), 2))"}, "a BatchNorm (train.py:"),
    ],
    ids=[
        *("own-generator", "numpys-own", "pythons-own", "imported-by-name", "fixed-rows", "of-rank", "drawn-by-rank"),
        *("gamma", "poisson", "permutation", "by-numpy", "by-python", "a-choice-by-numpy", "by-samples-parameters"),
        *("one-by-one", "one-by-one-by-numpy", "one-by-one-by-torch", "in-while", "by-map", "one-by-one-dropout"),
        *("single-numbers", "one-by-one-of-all"),
        *("on-rank-0", "seeded-by-rank", "square-and-not-in-the-first-call"),
        *("several-for-each-sample", "half-as-many", "several-words", "a-choice-of-samples"),
        *("flipped-samples", "turned-by-numpy", "pairs-of-samples", "hardest-samples", "above-a-quantile"),
        *("a-root-of-a-mean", "a-normalized-batch"),
        *("a-product-of-means", "a-balance-of-experts", "a-masks-mean", "pairs-in-a-later-loss", "a-copys-statistics"),
    ],
)  # fmt: skip
def test_what_is_not_the_serial_scripts_is_said_once(parts, said, nest, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(dedent(SCRIPT).format(**PLAIN | parts))
    ranks = nest.start(script, 3, cwd=tmp_path, apart=True)
    assert nest.wait(ranks) == [0, 0, 0], ranks[0].complained
    assert ranks[0].complained.count(said) == 1
    assert not ranks[1].complained


DRAWN_FOR_ALL = """
steps, doubled = x[:, :2].t(), (x * 2)[:, :2].t()
forced = [random.random() < 0.5 for t in range(steps.shape[0])] + [random.random() < 0.5 for t in range(len(doubled))]
forced += [random.random() < 0.5 for step in list(x.cumsum(0)[:, :2].unbind(1))]
for t in range(doubled.shape[0]): forced.append(random.random() < 0.5)
model((x * ones[:len(x)] - torch.tensor(own_rng.normal(size=4)) + torch.tensor(np.abs(x.numpy()))).float(), 0)
static[:len(x)] = x
x = x * 0.5 + static[:len(x)] - mean
lam, width, hidden = np.random.beta(0.4, 0.4), np.random.randint(0, 4), torch.rand(2)
words, classes = np.random.permutation(2), list(range(2))
lam += torch.distributions.Beta(0.4, 0.4).sample().item()
random.shuffle(classes)
own = torch.Generator().manual_seed(3)
lam += sum(torch.randn(p.shape, generator=own).sum().item() for p in model.parameters())
lam += torch.randn(2, 3, generator=own).sum().item()
seen = [random.random() for layer in range(2)] + [torch.rand(1) for p in model.parameters()][:2]
print(repr((lam, width, hidden, words, classes, seen, forced)))
"""


def test_what_is_drawn_for_all_is_alike_without_a_word(nest, tmp_path):
    """Some are as many as this rank's samples, by chance."""
    script = tmp_path / "train.py"
    inside = indent(DRAWN_FOR_ALL, " " * 8).strip()
    before = "own_rng, ones = np.random.default_rng(0), torch.ones(9, 1)"
    before += "; static, mean = torch.zeros(9, 4), torch.rand(4)"
    script.write_text(dedent(SCRIPT).format(**PLAIN | {"inside": inside, "after": before}))
    ranks = nest.start(script, 3, cwd=tmp_path, apart=True)
    assert nest.wait(ranks) == [0, 0, 0], ranks[0].complained
    assert ranks[0].said == ranks[1].said == ranks[2].said
    assert not ranks[0].complained


VIEWS = "torch.cat([model(x, 0), model(-x, 0)])"
OF_PAIRS = "(z @ z.t()).mean().backward()"


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        (f"x = (x @ made).cos(); {TRAINED}", UNLIKE),
        (f"x = (x @ drawn).cos() * mean; {TRAINED}; model(kept, 0)", ""),
        (FLIPPED, "moves samples within a batch (train.py:"),
        (TURNED, "moves samples within a batch (train.py:"),
        (PAIRED, "pairs of the samples of a batch (train.py:"),
        (NORMALIZED, AVERAGES),
        (PRODUCT, AVERAGES),
        (f"if epoch: {PAIRED}", "pairs of the samples of a batch (train.py:"),
        (f"n += 1\n        if n % 4 == 0: {PAIRED}", "pairs of the samples of a batch (train.py:"),
        ("l = model(x, 0).square().mean(); (l / (l.detach() + 1e-8)).backward()", AVERAGES),
        (READ, "is weighed by a number of this rank's samples (train.py:"),
        (READ_LATER, "is weighed by a number of this rank's samples, and"),
        (ADAPTED, AVERAGES),
        (INVARIANT.format("4"), "add that up with samestep.sum(...)"),
        (INVARIANT.format("()"), ""),
        (EASY, AVERAGES),
        (REFERRED, "makes pairs of the samples of a batch (train.py:"),
        ("o = model(x, 0); (sum(F.mse_loss(o[i], x[i, :1]) for i in range(len(x))) / len(x)).backward()", ""),
        ("l = model(x, 0).square(); (l.mean() / (1 + (x[:, 0] > 0.5).float().mean())).backward()", AVERAGES),
        ("(model(x, 0).mean(0) - model(x / 2, 0).mean(0)).pow(2).sum().backward()", AVERAGES),
        ("z = samestep.gather(model(x, 0)); (z @ z.t()).mean().backward()", ""),
        (f"z = samestep.gather({VIEWS}); {OF_PAIRS}", "joins 2 views of the batch that lie one after another"),
        (f"z = torch.cat([samestep.gather(v) for v in {VIEWS}.chunk(2)]); {OF_PAIRS}", ""),
        (f"z = samestep.gather(model(x, 0).repeat_interleave(2, 0)); {OF_PAIRS}", ""),
        ("m = samestep.mean(x.mean()); x = (x - m) / samestep.mean((x - m).square().mean()).sqrt()", ""),
        ("x = x / x.norm(dim=1, keepdim=True); (model(x, 0) * x).softmax(1).sum(1).mean().backward()", ""),
        (SORTED, ""),
        ("l = model(x, 0).square().mean(); s = samestep.mean(l.item()); (l / s).backward()", ""),
        (f"{LOSSES}; s = a.item(); (0.3 * a + 0.7 * b).backward()", ""),
        (f"{DRAWN}; s += model(x, 0).mean().item()", ""),
        (COUNTED, ""),
        (MIXED.format(0), "moves samples within a batch (train.py:"),
        (MIXED.format(1), ""),
        (LABELS.format(".roll(1, 0)", ""), "moves samples within a batch (train.py:"),
        (LABELS.format(".flip(0)", ".flip(0)"), ""),
        (FREQUENT, AVERAGES),
        (POSITIVE, AVERAGES),
        (PICKED, ""),
        (PADDED, ""),
        (ATTACK.format("sum") + "model(x + d.grad.sign(), 0).mean().backward()", ""),
        (ATTACK.format("mean") + OF_BOTH, ""),
    ],
    ids=[
        *("drawn-by-rank", "drawn-alike"),
        *("flipped", "turned-by-numpy", "pairs", "normalized", "product", "late-pairs", "pairs-at-times", "detached"),
        *("read", "read-later", "adapted", "invariant", "invariant-number", "easy-samples", "one-with-all"),
        *("losses-one-by-one", "a-mean-of-a-mask", "features"),
        *("gathered-pairs", "gathered-views", "each-view-gathered", "gathered-elements"),
        *("normalized-by-all", "by-sample", "sorted-and-back", "read-of-all", "logged", "drawn"),
        *("counted", "mixed-in-place", "mirrored-in-place", "labels-of-others", "turned-with-its-labels"),
        *("weights-by-frequency", "weight-of-positives", "picked-and-counted", "padded-again"),
        *("attacked", "attacked-and-joined"),
    ],
)  # fmt: skip
def test_a_loss_that_mixes_samples_is_said_by_default_too_and_no_other(inside, said, nest, tmp_path):
    script = tmp_path / "train.py"
    parts = {"inside": inside, "same": "False", "after": MADE}
    script.write_text(dedent(SCRIPT).format(**PLAIN | parts))
    ranks = nest.start(script, 3, cwd=tmp_path, apart=True)
    assert nest.wait(ranks) == [0, 0, 0], ranks[0].complained
    assert DROPOUT in ranks[0].complained
    complained = ranks[0].complained.replace(DROPOUT, "")
    assert complained.count(said or "samestep:") == bool(said)
    assert complained.count("samestep:") == bool(said), complained
    assert not ranks[1].complained


WATCHED = """
import weakref, torch, samestep
samestep.init()
train = samestep.loader(torch.utils.data.TensorDataset(torch.rand(8, 4)), batch_size=8)
model = samestep.replicate(torch.nn.Linear(4, 4), same={same})
for (x,) in train:
    hidden = model(x)
    memory = weakref.ref(hidden.untyped_storage())
    del hidden
    assert memory() is None
    loss = (model(x).square().sum() / 3) / 3
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()
"""


@pytest.mark.parametrize("same", [False, True])
def test_what_is_watched_keeps_no_memory_and_its_numbers_can_be_read(same, nest, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(WATCHED.format(same=same))
    ranks = nest.start(script, 2, cwd=tmp_path, apart=True)
    assert nest.wait(ranks) == [0, 0], ranks[0].complained


DRAWN = "draws for samples that were sorted"


@pytest.mark.parametrize("seed", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize(
    "inside",
    [
        "rows = x[:, 0].argsort(); model(x[rows], 0)[rows.argsort()].square().mean().backward()",
        "rows = x[:, 0].argsort(); (model(x, 0)[rows] + torch.randn(len(x), 1)).square().mean().backward()",
        "y = model(x[x[:, 0].argsort()], 0); (y + torch.rand_like(y)).square().mean().backward()",
    ],
    ids=["a-mask", "noise", "noise-like"],
)
def test_draws_for_samples_that_were_sorted_are_said_by_same_alone(inside, same, seed, nest, tmp_path):
    """Also where the first batch has rank 0's samples in order already, as with the first seed."""
    script = tmp_path / "train.py"
    script.write_text(dedent(SCRIPT).format(**PLAIN | {"inside": inside, "same": same, "seed": seed}))
    ranks = nest.start(script, 3, cwd=tmp_path, apart=True)
    assert nest.wait(ranks) == [0, 0, 0], ranks[0].complained
    assert ranks[0].complained.count(DRAWN) == same
    assert "unlike numbers" not in ranks[0].complained
    assert "samples of a batch" not in ranks[0].complained
