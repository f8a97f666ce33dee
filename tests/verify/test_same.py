"""What --same makes equal is no mistake, and a conversion takes the untouched script's step."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from forked import Nest
from verify.corpus import Forked

from samestep.cli.verify import command
from samestep.verify.verify import verify

pytestmark = pytest.mark.timeout(200)
MISTAKES = Path(__file__).parent / "mistakes"


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _verify(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def _edited(mistake: str, *words: tuple[str, str]) -> str:
    """A script of this name's mistake with other words in it."""
    source = (MISTAKES / f"{mistake}.py").read_text()
    for old, new in words:
        assert old in source
        source = source.replace(old, new)
    Path("edited.py").write_text(source)
    return "edited.py"


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "own"), [("dropout", "dropout masks"), ("batchnorm", "BatchNorm statistics")]
)
def test_what_same_makes_equal_is_no_mistake(script: str, own: str) -> None:
    result = _verify("-n", "1,2", "--steps", "3", "--json", str(MISTAKES / f"{script}.py"))
    report = json.loads(result.stdout)
    assert result.exit_code == 0, result.output
    assert (report["same"], report["verdict"]) == (True, "with_same")
    assert report["sentence"] == f"same to rounding with --same; without it, {own} are each rank's own"
    assert report["sizes"][1]["verdict"] == "different"


@pytest.mark.long
def test_a_mistake_is_named_although_dropout_makes_the_runs_differ_too() -> None:
    script = _edited(
        "dropout", ("F.cross_entropy(model(x), y)", 'F.cross_entropy(model(x), y, reduction="sum")')
    )
    result = _verify("-n", "1,2", script)
    assert result.exit_code == 1, result.output
    assert "the loss is a sum over each rank's samples" in result.stdout.splitlines()[-1]
    assert "no mistake: dropout masks are each rank's own" in result.stdout


_SERIAL = (
    ("import samestep\n", "from torch.utils.data import DataLoader\n"),
    ("world = samestep.init()\n", ""),
    ("samestep.loader(data, 8, shuffle=True)", "DataLoader(data, 8, shuffle=True)"),
    ("samestep.replicate", ""),
)


_EVALUATED_IN_A_STEP = (
    "        loss = F.cross_entropy(model(x), y)\n",
    "        with torch.no_grad():\n"
    "            losses = [F.cross_entropy(model(a), b) for a, b in samestep.loader(data, 11)]\n"
    "        loss = F.cross_entropy(model(x), y)\n",
)
_SERIALLY = ("samestep.loader(data, 11)", "DataLoader(data, 11)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "sizes"), [("dropout", "2"), pytest.param("batchnorm", "2", marks=pytest.mark.long)]
)
def test_a_conversion_is_compared_with_the_untouched_script(script: str, sizes: str) -> None:
    serial = Path(_edited(script, _EVALUATED_IN_A_STEP, _SERIALLY, *_SERIAL)).rename("serial.py")
    result = _verify("--against", str(serial), "-n", sizes, _edited(script, _EVALUATED_IN_A_STEP))
    assert result.exit_code == 0, result.output
    verdict = result.stdout.splitlines()[-1]
    own = {"dropout": "dropout masks", "batchnorm": "BatchNorm statistics"}[script]
    said = f"same to rounding with --same; without it, {own} are each rank's own"
    assert verdict == f"your conversion takes the serial script's step: {said}"


@pytest.mark.slow
def test_a_conversion_without_draws_is_the_same_also_without_same(nest: Nest) -> None:
    serial = (
        Path(_edited("dropout", ("Dropout(0.3)", "Dropout(0.0)"), *_SERIAL)).rename("serial.py").resolve()
    )
    edited = Path(_edited("dropout", ("Dropout(0.3)", "Dropout(0.0)"))).resolve()
    report = verify([str(edited)], [1, 2], steps=2, against=[str(serial)], run=Forked(nest))
    assert (report.exit_code, report.verdict) == (0, "rounding"), report
    left_out = "what it prints after the last of these steps was not compared"
    assert str(report).endswith(f"; also without --same; {left_out}"), report


@pytest.mark.parametrize(
    ("old", "new", "where", "cause"),
    [
        ("shuffle=True", "shuffle=True, seed=1", "step 1, samples", "no seed"),
        pytest.param(
            "model.parameters(), 0.1",
            "model.parameters(), 0.2",
            "step 1, lr",
            "the untouched script gives them",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "manual_seed(0)",
            "manual_seed(1)",
            "before step 1, 0.weight",
            "not those in the untouched script",
            marks=pytest.mark.long,
        ),
        (
            "\noptimizer = ",
            "\nprobe = torch.randn(3)\noptimizer = ",
            "step 1, samples",
            "only this script draws by torch.randn (edited.py:15)",
        ),
    ],
)
def test_a_conversion_that_takes_another_step_is_told_where(
    nest: Nest, old: str, new: str, where: str, cause: str
) -> None:
    serial = Path(_edited("dropout", *_SERIAL)).rename("serial.py").resolve()
    edited = Path(_edited("dropout", (old, new))).resolve()
    report = verify([str(edited)], [1], steps=2, against=[str(serial)], run=Forked(nest))
    assert report.exit_code == 1, report
    assert str(report).startswith(f"different already at one process: {where}"), report
    assert cause in str(report)


def test_the_untouched_script_runs_with_the_other_files_as_they_were(nest: Nest) -> None:
    """A conversion that is wrong in another file was called right: both runs imported the converted one."""
    source = (MISTAKES / "dropout.py").read_text()
    assert "F.cross_entropy(model(x), y)" in source
    for name in ("train_serial.py", "train.py"):
        own = source.replace("F.cross_entropy(model(x), y)", "loss_of(model(x), y)")
        for old, new in _SERIAL if name == "train_serial.py" else ():
            own = own.replace(old, new)
        Path(name).write_text(f"from pieces.losses import loss_of\n{own}")
    Path("pieces").mkdir()
    for name, factor in (("losses_serial", 1), ("losses", 3)):
        text = "import torch.nn.functional as F\n\n\ndef loss_of(out, y):\n    return F.cross_entropy(out, y)"
        Path(f"pieces/{name}.py").write_text(f"{text} * {factor}\n")
    script, serial = (str(Path(name).resolve()) for name in ("train.py", "train_serial.py"))
    report = verify([script], [1], steps=2, against=[serial], run=Forked(nest))
    assert report.exit_code == 1, report
    Path("pieces/losses.py").write_text(Path("pieces/losses_serial.py").read_text())
    assert verify([script], [1], steps=2, against=[serial], run=Forked(nest)).exit_code == 0


_AUGMENTED = """
import random

import numpy as np
import torch
from torch.utils.data import DataLoader

import samestep


class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, at):
        x = torch.arange(4.0) + at + torch.rand(4)
        x = x.flip(0) if random.random() < 0.5 else x
        return x * float(np.random.uniform(0.9, 1.1)), at % 3


for stream in (torch.manual_seed, random.seed, np.random.seed):
    stream(0)
train = DataLoader(Augmented(), batch_size=8, shuffle=True, num_workers=WORKERS)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(2):
    total = 0.0
    for x, y in train:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"loss {total:.4f}")
"""
_CONVERTED = (
    ("train = DataLoader(", "train = samestep.loader("),
    ("optimizer = ", "samestep.replicate(model)\noptimizer = "),
    ("total += loss.item()", "total += samestep.mean(loss.item())"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "mistake", "code", "said"),
    [
        (0, (), 0, "the serial script's step: same to rounding with equal augmentation; without it, each"),
        (2, (), 0, "the serial script's step: same to rounding with equal augmentation; without it, each"),
        (0, ("lr=0.01", "lr=0.02"), 1, "lr is 0.01 in the untouched script and 0.02"),
        (0, ("samestep.mean(loss.item())", "loss.item()"), 3, "what it prints is not the same"),
    ],
)
def test_augmentation_in_the_data_set_is_no_mistake_of_a_conversion_and_hides_none(
    nest: Nest, workers: int, mistake: tuple[str, ...], code: int, said: str
) -> None:
    serial, converted = Path("serial.py").resolve(), Path("converted.py").resolve()
    source = _AUGMENTED.replace("WORKERS", str(workers))
    serial.write_text(source.replace("import samestep\n", ""))
    for old, new in (*_CONVERTED, *[mistake] * bool(mistake)):
        assert old in source
        source = source.replace(old, new)
    converted.write_text(source)
    report = verify([str(converted)], [2], against=[str(serial)], run=Forked(nest))
    assert report.exit_code == code, report.lines
    assert said in str(report)
    assert [cause.removed for cause in report.causes if cause.is_harmless] == ["augment"]


@pytest.mark.slow
def test_batches_that_the_untouched_script_repeats_by_itertools_cycle_are_those_of_its_conversion(
    nest, tmp_path
):
    serial, converted = tmp_path / "train_serial.py", tmp_path / "train.py"
    text = """
import itertools
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
train = DataLoader(TensorDataset(torch.randn(10, 3)), batch_size=4, shuffle=True)
model = torch.nn.Linear(3, 1)
batches = itertools.cycle(train)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(7):
    (x,) = next(batches)
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(sum(p.sum().item() for p in model.parameters()))
"""
    serial.write_text(text)
    text = text.replace("DataLoader(Tensor", "samestep.loader(Tensor").replace(
        "itertools.cycle(train)", "train.cycle()"
    )
    converted.write_text(
        "import samestep" + text.replace("torch.nn.Linear(3, 1)", "samestep.replicate(torch.nn.Linear(3, 1))")
    )
    report = verify([str(converted)], [1, 2], against=[str(serial)], run=Forked(nest))
    assert report.exit_code == 0


_DETECTOR = """
import torch, samestep
from torch import nn
samestep.init()
torch.manual_seed(0)
class Boxes(torch.utils.data.Dataset):
    def __len__(self):
        return 18
    def __getitem__(self, index):
        image = torch.full((1, 4, 4), index / 9.0)
        return image, {"box": torch.tensor([index / 18.0, 1.0])}
class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 2)
    def forward(self, images, targets):
        boxes = torch.stack([target["box"] for target in targets])
        return (self.head(torch.stack(images).flatten(1)) - boxes).square().mean()
model = samestep.replicate(Detector())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for images, targets in samestep.loader(Boxes(), 4, shuffle=True, collate_fn=COLLATE):
    loss = model(images, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("collate", ["lambda samples: tuple(zip(*samples))", "lambda samples: samples"])
def test_batches_in_which_each_sample_has_its_own_tensors_are_compared(nest: Nest, collate: str) -> None:
    script = _DETECTOR.replace("COLLATE", collate)
    if collate.endswith(": samples"):
        script = script.replace("for images, targets in", "for samples in").replace(
            "    loss =", "    images, targets = zip(*samples)\n    loss ="
        )
    converted, serial = Path("boxes.py").absolute(), Path("boxes_serial.py").absolute()
    converted.write_text(script)
    of_torch = script.replace("samestep.loader", "torch.utils.data.DataLoader")
    serial.write_text(of_torch.replace("samestep.replicate", "").replace("samestep.init()", ""))
    report = verify([str(converted)], [1, 2], against=[str(serial)], run=Forked(nest))
    assert (report.verdict, report.causes) == ("rounding", [])
