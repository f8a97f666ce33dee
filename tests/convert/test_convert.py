"""`samestep convert` changes what it says it changes, leaves every other byte, and lists the rest."""

import re
import subprocess
from pathlib import Path
from textwrap import dedent

import pytest
from click.testing import CliRunner, Result
from convert import corpus

from samestep.cli.convert import command
from samestep.convert.convert import Conversion, check_parses, conversion, convert
from samestep.errors import UsageError

ROOT = Path(__file__).parents[2]
SAMPLE = ["mnist_example", "own_bar", "step_function", "plateau", "mingpt", "imagenet_example"]
BEGIN = """\
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.rand(20, 4), torch.randint(0, 3, (20,)))
train = DataLoader(data, batch_size=8, shuffle=True)
test = DataLoader(data, batch_size=8)
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""
STEP = """\
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
METER = """\
class Meter:
    def __init__(self):
        self.sum = self.count = self.avg = 0
    def update(self, val, n):
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count
    def __str__(self):
        return "{avg}".format(**self.__dict__)
meter = Meter()
"""
TABLE = """\
class Table:
    def __init__(self):
        self.rows = {"loss": {"total": 0.0}}
    def add(self, key, value):
        self.rows[key]["total"] += value
table = Table()
"""


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _of(text: str | bytes) -> Conversion:
    Path("train.py").write_bytes(text.encode() if isinstance(text, str) else text)
    return convert(Path("train.py").resolve())


def _after(text: str | bytes) -> str:
    (found,) = _of(text).files.values()
    return found[1].decode()


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_converted_script_runs_as_the_untouched_one_at_one_two_and_three_processes(name, nest, tmp_path):
    outcome = corpus.tried(nest, name, tmp_path / name)
    assert outcome.gaps == []
    assert outcome.differences == {1: "", 2: "", 3: ""}


def test_a_total_in_a_function_that_an_evaluation_calls_too_is_listed():
    text = (
        f"{BEGIN}def best(out):\n    order = torch.argsort(out[:, 0])\n    return order[0]\n"
        f"for x, y in train:\n{STEP}    print(best(model(x)).item())\n"
        "with torch.no_grad():\n    for x, y in train:\n        best(model(x))\n"
    )
    (gap,) = _of(text).gaps
    assert gap.startswith("train.py:11: this line runs in training")
    assert _of(text.partition("with torch.no_grad")[0]).gaps == ()


def test_the_corpus_tells_a_number_of_one_share_from_one_of_the_whole_batch():
    ran, serial = (corpus.Ran(f"loss {number}\n", {}) for number in ("0.71", "0.69"))
    assert corpus.difference(ran, serial) == "prints `loss 0.71` for `loss 0.69`"
    assert not corpus.difference(serial, serial)


def test_edits_of_a_line_that_do_not_fit_together_are_named_and_nothing_is_converted(tmp_path):
    with pytest.raises(
        UsageError, match=re.escape("train.py could not be converted: its edits gave `total = sum(`")
    ):
        check_parses(tmp_path / "train.py", b"import torch\ntotal = sum(\n")


def test_the_example_of_the_readme_is_converted_as_by_hand():
    made = convert(ROOT / "examples" / "digits_serial.py")
    lines = made.files[ROOT / "examples" / "digits_serial.py"][1].splitlines()
    assert sorted(filter(None, lines)) == sorted(
        filter(None, (ROOT / "examples" / "digits.py").read_bytes().splitlines())
    )
    assert made.gaps == ()


@pytest.mark.parametrize(
    ("imported", "call"),
    [
        ("from torch.utils.data import DataLoader as DL", "DL"),
        ("from torch.utils import data as D", "D.DataLoader"),
        ("import torch.utils.data as tud", "tud.DataLoader"),
        ("import torch.utils.data", "torch.utils.data.DataLoader"),
        ("from torch.utils.data.dataloader import DataLoader", "DataLoader"),
        ("from torch.utils.data import *", "DataLoader"),
    ],
)
def test_a_dataloader_is_found_under_every_name(imported, call):
    made = _after(
        f"{imported}\ntrain = {call}(\n    data,\n    32, True,  # shuffled\n    num_workers=0,\n)\n"
    )
    assert (
        "train = samestep.loader(\n    data,\n    32, shuffle=True,  # shuffled\n    num_workers=0,\n)\n"
        in made
    )


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("cookie", ["utf-8", "latin-1"])
def test_every_byte_that_is_not_changed_stays(end, cookie):
    head = f"# -*- coding: {cookie} -*-\n# é\n{BEGIN}"
    text = f"{head}for x, y in train:\n{STEP.replace(chr(32) * 4, chr(9))}\tprint('é', loss.item())"
    before = text.replace("\n", end).encode(cookie)
    path = Path("train.py").resolve()
    path.write_bytes(before)
    after = convert(path).files[path][1]
    for old, new in (
        (b"\timport samestep", b""),
        (b"import samestep" + end.encode(), b""),
        (b"samestep.replicate(nn.Linear(4, 3))", b"nn.Linear(4, 3)"),
        (b"samestep.loader(", b"DataLoader("),
        (b"import TensorDataset", b"import DataLoader, TensorDataset"),
        (b"samestep.mean(loss.item())", b"loss.item()"),
    ):
        after = after.replace(old, new)
    assert after == before


def test_the_patch_can_be_applied_by_patch():
    found = _of(f"{BEGIN}for x, y in train:\n{STEP}    print(loss.item())")
    (pair,) = found.files.values()
    Path("train.py").resolve().write_bytes(pair[0])
    subprocess.run(
        ["patch", "-p0", "train.py"], input=found.patch().encode(), check=True, capture_output=True
    )
    assert Path("train.py").read_bytes() == pair[1]


def test_values_inside_f_strings_are_found_where_they_are():
    made = _after(
        f"{BEGIN}for x, y in train:\n{STEP}"
        "    print(f'{{é}} {loss.item():.4f}' ' {no} ' f\"{loss.item()!r:>{10}} {len(x)=}\")\n"
        '    print(f"""\n{loss.item()}\n""")\n'
    )
    assert "{samestep.mean(loss.item()):.4f}' ' {no} ' f\"{samestep.mean(loss.item())!r:>{10}}" in made
    assert "\n{samestep.mean(loss.item())}\n" in made


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("device = torch.device('cuda:1' if torch.cuda.is_available() else 'cpu')", "device = samestep.init().device"),
        ("device = 'cuda' if torch.cuda.is_available() else 'cpu'", "device = samestep.init().device.type"),
        ("args.device = torch.device('cuda', args.gpu)", "args.device = samestep.init().device"),
        ("model.to('cuda:0')", "model.to('cuda')"),
        ("torch.save(model.state_dict(),\n    'a.pt')", "samestep.save('a.pt', model.state_dict())"),
        ("torch.save(model.state_dict(), 'a{}.pt'.format(3))", "samestep.save('a{}.pt'.format(3), model.state_dict())"),
        ("import os\nos.mkdir('out')", "import os\nos.makedirs('out', exist_ok=True)"),
        ("torch.save(obj=model.state_dict(), f=path)", "samestep.save(path, model.state_dict())"),
        ("net = nn.DataParallel(model, device_ids=[0])", "net = model"),
        ("log = open('log', 'w')", 'log = open(\'log\' if samestep.init().rank == 0 else "/dev/null", \'w\')'),
    ],
)  # fmt: skip
def test_each_line_of_a_serial_script_becomes_the_parallel_one_beside_it(line, becomes):
    assert f"\n{becomes}\n" in _after(f"{BEGIN}{line}\n")


LOOP = f"total, best = 0.0, 9.0\nfor x, y in train:\n{STEP}"
EVALUATE = "with torch.no_grad():\n    total = right = n = 0\n    for x, y in test:\n        out = model(x)\n"


@pytest.mark.parametrize(
    ("lines", "becomes"),
    [
        (f"{LOOP}    total += loss.item()\nprint(total)",
         "total += loss.item() * train.share\nprint(samestep.sum(total))"),
        (f"{LOOP}    total += loss.item()\n    print(total)", "total += samestep.mean(loss.item())\n    print(total)"),
        (f"{LOOP}    total += len(x)\nprint(total)", "if train.share: total += len(x)\nprint(samestep.sum(total))"),
        (f"{LOOP}    total += len(x); best += 1\nprint(total, best)",
         "    total += samestep.sum(len(x)); best += 1\nprint(total, best)"),
        (f"{LOOP}    if loss < best:\n        best = loss.item()",
         "if samestep.mean(loss) < best:\n        best = samestep.mean(loss.item())"),
        ("for x, y in train:\n    out = model(x).squeeze()\n    F.cross_entropy(out, y).backward()",
         "    out = (_rows := model(x)).squeeze(tuple(range(1, _rows.ndim)))\n"),
        ("for x, y in train:\n    out = (model(x) / 2).squeeze()\n    F.cross_entropy(out, y).backward()",
         "    out = (_rows := (model(x) / 2)).squeeze(tuple(range(1, _rows.ndim)))\n"),
        ("for x, y in train:\n    out = model(x)\n    F.cross_entropy(out.squeeze(), y).backward()",
         "    F.cross_entropy(out.squeeze(tuple(range(1, out.ndim))), y).backward()\n"),
        (f"{LOOP}print(loss.item())", "print(samestep.sum(loss.item() * train.share))"),
        (f"{LOOP}    print(model(x).std())", "print(samestep.gather(model(x)).std())"),
        (f"{EVALUATE}        total += F.cross_entropy(out, y)\nprint(total / len(test))",
         "total += F.cross_entropy(out, y) * test.share\nprint(samestep.sum(total) / len(test))"),
        (f"{EVALUATE}        right += (out.argmax(1) == y).sum()\n        n += len(y)\nprint(right / n)",
         "print(samestep.sum(right) / samestep.sum(n))"),
        (f"{EVALUATE}        right += (out.argmax(1) == y).float().mean()\n        n += 1\nprint(right / n)",
         "print(samestep.sum(right) / max(samestep.gather([n])))"),
        ("for x, y in train:\n    loss = F.cross_entropy(model(x), y, ignore_index=2)\n    loss.backward()",
         "loss = F.cross_entropy(samestep.gather(model(x)), samestep.gather(y), ignore_index=2)"),
        ("for x, y in train:\n    loss = F.cross_entropy(model(x).view(-1, 3), y.view(-1), ignore_index=2)\n"
         "    loss.backward()",  # flat, as each rank may pad to another length
         "F.cross_entropy(samestep.gather(model(x).view(-1, 3)), samestep.gather(y.view(-1)), ignore_index=2)"),
        (f"{EVALUATE}        total += F.cross_entropy(out, y)\nbest = 9.0\nif total < best:\n    best = total\n"
         "print(best)",
         "if samestep.sum(total) < best:\n    best = samestep.sum(total)"),
        (f"got = []\n{EVALUATE}        got.extend(out.argmax(1).tolist())\nprint(len(got))",
         "print(samestep.sum(len(got)))"),
        (f"{EVALUATE}        total += out.sum().item()\nprint(round(abs(total), 2))",
         "print(round(abs(samestep.sum(total)), 2))"),
        (f"{METER}for x, y in train:\n{STEP}    meter.update(loss.item(), len(x))\n"
         "    print([f'{m}' for m in [meter]])",
         "meter.update(samestep.mean(loss.item()), samestep.sum(len(x)))"),
        (f"sums = {{'a': 0.0}}\nfor x, y in train:\n{STEP}    sums['a'] += loss.item()\n"
         "print(' '.join('%s %s' % (k, v / 2) for k, v in sums.items()))",
         "sums['a'] += loss.item() * train.share\n"
         "print(' '.join('%s %s' % (k, samestep.sum(v) / 2) for k, v in sums.items()))"),
        (f"{EVALUATE}        total += out.sum().item()\nlog = {{'total': total / 2}}\n"
         "print(' '.join(f'{k}={v}' for k, v in log.items()))",
         "log = {'total': samestep.sum(total) / 2}"),
        (f"{EVALUATE}        total += (out > 0).sum(0)\nprint(total.tolist())", "print(samestep.sum(total).tolist())"),
        (f"{TABLE}for x, y in train:\n{STEP}    table.add('loss', loss.item())",
         "table.add('loss', samestep.mean(loss.item()))"),
    ],
)  # fmt: skip
def test_numbers_of_a_share_become_those_of_the_whole_batch(lines, becomes):
    assert becomes in _after(f"{BEGIN}{lines}\n")
    assert not _of(f"{BEGIN}{lines}\n").gaps


def test_an_evaluation_at_a_training_step_is_noted():
    inside = EVALUATE.replace("\n", "\n    ")
    step = STEP.replace("x", "a").replace("y)", "b)")
    lines = f"for a, b in train:\n{step}    {inside}        n += len(y)\n    print(n)\n"
    found = _of(BEGIN + lines)
    assert [note for note in found.notes if "evaluate between the epochs" in note]
    assert not _of(f"{BEGIN}{EVALUATE}        n += len(y)\nprint(n)\n").notes


def test_a_string_that_the_script_gives_decides_what_a_loss_is():
    text = (
        f"{BEGIN}class Loss(nn.Module):\n    def __init__(self, reduction='mean'):\n"
        "        super().__init__()\n        self.reduction = reduction\n    def forward(self, out, y):\n"
        "        each = F.cross_entropy(out, y, reduction='none')\n        if self.reduction == 'mean':\n"
        "            return each.mean()\n        return each.sum()\n"
        "criterion = Loss(KIND)\nfor x, y in train:\n    criterion(model(x), y).backward()\n"
    )
    assert "replicate(nn.Linear(4, 3))" in _after(text.replace("KIND", ""))
    assert 'replicate(nn.Linear(4, 3), loss="sum")' in _after(text.replace("KIND", "reduction='sum'"))
    assert _of(text.replace("KIND", "option")).gaps


def test_a_summed_loss_is_said_to_replicate():
    lines = "for x, y in train:\n    F.cross_entropy(model(x), y, reduction='sum').backward()\n"
    assert 'samestep.replicate(nn.Linear(4, 3), loss="sum")' in _after(f"{BEGIN}{lines}")


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("with torch.no_grad():\n    for x, y in test:\n        print(model(x).mean())", "in an evaluation"),
        (f"{TABLE}with torch.no_grad():\n    for x, y in test:\n        table.add('n', F.cross_entropy(model(x), y))",
         "in an evaluation"),
        (f"{EVALUATE}        loss = F.cross_entropy(out, y)\nprint(loss)",
         "is made of this process's share of the batch"),
        (f"got = []\n{EVALUATE}        got.append(F.cross_entropy(out, y).item())\nprint(got[-1])", "single batches"),
        (f"frame = make()\n{EVALUATE}        frame.at[n, 'loss'] = out.mean()\nframe.save()", "holds values"),
        (f"got = []\n{EVALUATE}        got.extend(out[:, 0].tolist())\n"
         "rank = torch.zeros(len(got))\nrank[torch.tensor(got).argsort()] = torch.arange(26.)\nprint(rank)",
         "is filled by"),
        (f"got = []\n{EVALUATE}        got.extend(out[:, 0].tolist())\n"
         "best = sorted(range(len(got)), key=lambda i: got[i])\nprint(best)", "sorted"),
        (f"got = []\n{EVALUATE}        got += [i for i, row in enumerate(out) if row[0] > 0]\nprint(got)",
         "`got` is made of"),
        (f"all = torch.empty(0)\n{EVALUATE}        all = torch.cat([all, out[:, 0]])\nprint(all)", "earlier batch"),
    ],
)  # fmt: skip
def test_a_loader_of_an_evaluation_without_totals_stays_torchs_own(lines, reason):
    found = _of(f"{BEGIN}for x, y in train:\n{STEP}{lines}\n")
    assert not found.gaps
    (note,) = found.notes
    assert note.startswith("train.py:7: this DataLoader is of an evaluation"), note
    assert reason in note


def test_a_total_of_what_all_processes_have_is_listed():
    lines = (
        "singles = DataLoader(data, batch_size=1)\ndef count(loader):\n    n = 0\n    with torch.no_grad():\n"
        "        for x, y in loader:\n            n += len(x)\n    return n\nprint(count(train), count(singles))"
    )
    found = _of(f"{BEGIN}for x, y in train:\n{STEP}{lines}\n")
    assert [gap for gap in found.gaps if "count once for each process" in gap]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("from x import SummaryWriter\nwith SummaryWriter() as writer:\n    pass", "every process would write here"),
        ("wandb.init(mode='offline')", "every process would write here"),
        ("x = torch.rand(8, 4)\nmodel(x).sum().backward()", "no samestep.loader shares"),
        (f"for x, y in train:\n{STEP}    if loss.item() > 1:\n        break\nfor x, y in train:\n"
         "    if model(x).max() > 9:\n        break", "decide when the loop ends"),
        ("mix = torch.randperm(4)\nfor x, y in train:\n    out = model(x[torch.randperm(len(x)), :])\n"
         "    F.cross_entropy(out, y).backward()", "compares samples"),
        ("for x, y in train:\n    out = model(x)\n    F.cross_entropy(out, y).backward()\nprint(out.std())",
         "is of the last batch"),
        ("from functools import partial\nmake = partial(DataLoader, batch_size=8)", "functools.partial"),
        ("import os\nos.environ.setdefault('CUDA_VISIBLE_DEVICES', '0')", "CUDA_VISIBLE_DEVICES"),
        ("for (x, y), (a, b) in zip(train, test):\n    F.cross_entropy(model(x) + model(a).mean(0), y).backward()",
         "takes batches of two loaders"),
        ("import os\nif not os.path.exists('a.pt'):\n    torch.save(model.state_dict(), 'a.pt')", "no test for a file"),
        ("class Out:\n    def __init__(self, x):\n        self.x = x\nclass Net(nn.Module):\n"
         "    def forward(self, x):\n        return Out(x)\nnet = Net()\nfor x, y in train:\n    net(x)",
         "make it a dataclass"),
    ],
)  # fmt: skip
def test_what_is_not_converted_is_listed_with_its_line(lines, reason):
    found = _of(f"{BEGIN}for x, y in train:\n{STEP}{lines}\n")
    assert [gap for gap in found.gaps if reason in gap], found.gaps
    assert all(re.match(r"train\.py:\d+: ", str(gap)) for gap in found.gaps)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("import samestep\n", "train.py uses samestep, so it is not a serial script"),
        ("import torch.distributed as dist\n", "train.py uses torch.distributed"),
        ("from accelerate import Accelerator\n", "train.py uses accelerate"),
        ("print 'epoch'\n", "train.py:1 is Python 2"),
        ("x = 1\n%matplotlib inline\n", "train.py:2 is a line of IPython"),
        ("def broken(:\n", "train.py:1 cannot be parsed"),
    ],
)
def test_a_script_that_cannot_be_converted_gets_one_sentence(text, sentence):
    with pytest.raises(UsageError, match=re.escape(sentence)):
        _of(text)
    assert _run("train.py").exit_code == 2


def test_a_complete_patch_exits_with_0_and_an_incomplete_one_with_1():
    Path("train.py").write_text(f"{BEGIN}for x, y in train:\n{STEP}")
    done = _run("train.py")
    assert done.exit_code == 0
    assert "+train = samestep.loader(data, batch_size=8, shuffle=True)" in done.stdout
    Path("train.py").write_text(f"{BEGIN}for x, y in train:\n{STEP}wandb.init(mode=mode)\n")
    done = _run("train.py")
    assert done.exit_code == 1
    assert "not complete, 1 place left to change by hand:\n  train.py:15: every process would" in done.stderr


def test_write_keeps_a_copy_and_never_replaces_another():
    before = f"{BEGIN}for x, y in train:\n{STEP}"
    Path("train.py").write_text(before)
    done = _run("--write", "train.py")
    assert done.exit_code == 0
    assert "\ntest it: samestep verify --against train_serial.py train.py\n" in done.stdout
    assert done.stdout.endswith("verify --steps 50 --against train_serial.py train.py\n")
    assert Path("train_serial.py").read_text() == before
    assert "samestep.loader" in Path("train.py").read_text()
    Path("train.py").write_text(before + "print(1)\n")
    done = _run("--write", "train.py")
    assert done.exit_code == 2
    assert "train_serial.py exists" in done.stderr
    assert Path("train_serial.py").read_text() == before


def test_verify_is_given_the_lines_and_what_is_left():
    Path("train.py").write_text(dedent(BEGIN))
    assert conversion(Path("train.py")).startswith("+import samestep\n-from torch.utils.data import Data")
    Path("train.py").write_text("print(1)\n")
    assert conversion(Path("train.py")).startswith("left to change by hand: train.py:1: no optimizer gets")
