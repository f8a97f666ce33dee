"""Each example runs as it stands, alone and on several processes, and the digits differ in seven lines."""

import difflib
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from forked import Nest

EXAMPLES = Path(__file__).parents[2] / "examples"
SAMESTEP = Path(sys.executable).with_name("samestep")

SEVEN_LINES = """\
-from torch.utils.data import DataLoader
+import samestep
-device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
-train = DataLoader(digits(args.data_dir, train=True), args.batch_size, shuffle=True)
-test = DataLoader(digits(args.data_dir, train=False), batch_size=2000)
-model = Net().to(device)
+device = samestep.init().device
+train = samestep.loader(digits(args.data_dir, train=True), args.batch_size, shuffle=True)
+test = samestep.loader(digits(args.data_dir, train=False), batch_size=2000)
+model = samestep.replicate(Net().to(device))
-    print(f"epoch {epoch}: {correct / len(test.dataset):.2%}")
+    print(f"epoch {epoch}: {samestep.sum(correct) / len(test.dataset):.2%}")
-torch.save(model.state_dict(), "digits.pt")
+samestep.save("digits.pt", model.state_dict())
"""


def run(directory: Path, size: int, script: str, *args: object) -> str:
    """What an example prints, started as a user starts it."""
    done = subprocess.run(
        [str(word) for word in (SAMESTEP, "run", "--fork", "-n", size, EXAMPLES / script, *args)],
        cwd=directory,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_forked(nest: Nest, directory: Path, size: int, script: Path, *args: object) -> str:
    """What rank 0 prints on forked ranks, or a process without a world for size 0, which start sooner."""
    env = {"CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "error"}
    ranks = nest.start(script, size, *args, env=env, cwd=directory, apart=True)
    codes = nest.wait(ranks)
    assert not any(codes), "".join(rank.said + rank.complained for rank in ranks)
    return ranks[0].said


def test_the_digits_before_and_after_samestep_differ_in_seven_lines() -> None:
    before, after = ((EXAMPLES / name).read_text().splitlines() for name in ("digits_serial.py", "digits.py"))
    diff = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    assert "\n".join(line for line in diff if not line.startswith("@@")) + "\n" == SEVEN_LINES
    assert "import samestep" not in before


def learn_digits(
    nest: Nest, directory: Path, size: int, script: str
) -> tuple[list[float], dict[str, torch.Tensor]]:
    printed = run_forked(nest, directory, size, EXAMPLES / script, "--epochs", 3)
    found = [float(accuracy) for accuracy in re.findall(r"^epoch \d+: ([\d.]+)%$", printed, re.MULTILINE)]
    assert len(found) == 3
    return found, torch.load(directory / "digits.pt", weights_only=True)


@pytest.fixture(scope="module")
def alone(
    nest: Nest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[float], dict[str, torch.Tensor]]:
    return learn_digits(nest, tmp_path_factory.mktemp("alone"), 0, "digits.py")


def test_the_serial_digits_are_learnt_as_well_in_another_order(
    nest: Nest, tmp_path: Path, alone: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    accuracies, weights = learn_digits(nest, tmp_path, 0, "digits_serial.py")
    assert min(accuracies[-1], alone[0][-1]) > 93
    assert weights.keys() == alone[1].keys()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_the_digits_are_learnt_alike_by_one_process_and_by_more(
    nest: Nest, tmp_path: Path, alone: tuple[list[float], dict[str, torch.Tensor]], size: int
) -> None:
    accuracies, weights = learn_digits(nest, tmp_path, size, "digits.py")
    assert accuracies == alone[0]
    for name, weight in alone[1].items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_best_epoch_is_kept_and_an_early_stop_holds_after_a_resume(nest: Nest, tmp_path: Path) -> None:
    words = ("--lr", 0.1, "--batch-size", 64, "--patience", 2)
    printed = ""
    for size, epochs in ((2, 3), (3, 30), (2, 30)):  # more epochs after a stop change nothing
        printed += run_forked(nest, tmp_path, size, EXAMPLES / "digits_best.py", *words, "--epochs", epochs)
    found = [float(accuracy) for accuracy in re.findall(r"^epoch \d+: ([\d.]+)%$", printed, re.MULTILINE)]
    # each start evaluates the epoch that it resumes once more
    assert 4 < len(found) < 25
    bests = [float(best) for best in re.findall(r"^best ([\d.]+)%$", printed, re.MULTILINE)]
    assert (bests[0], bests[1:]) == (max(found[:3]), [max(found)] * 2)
    assert next(iter(torch.load(tmp_path / "best.pt", weights_only=True))) == "conv1.weight"


@pytest.fixture(scope="module")
def data(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny data sets of all kinds in one directory."""
    root = tmp_path_factory.mktemp("data")
    tiny.write_mnist(root, count=12)
    tiny.write_cifar(root, "binary")
    tiny.write_digits(root)
    tiny.write_images(root, count=3)
    (root / "tale.txt").write_text("once upon a time there was a rank that waited for another\n" * 40)
    return root


DRY_RUNS = {
    "mnist.py": ["--batch-size", 8, "--save-model"],
    "cifar10.py": ["--batch-size", 6],
    "resnet.py": ["--batch-size", 4, "--image-size", 32, "--workers", 0],
    "gpt.py": ["--batch-size", 4, "--length", 16, "--width", 32, "--layers", 1],
}


def check_dry_run(printed: str, directory: Path) -> None:
    assert re.findall(r"^epoch (\d+):", printed, re.MULTILINE) == ["1"]
    (written,) = directory.glob("*.pt")
    assert torch.load(written, weights_only=True)


@pytest.mark.slow
def test_a_dry_run_by_samestep_run_takes_one_step_and_stops(tmp_path: Path, data: Path) -> None:
    args = ("--data-dir", data, "--dry-run", "--model", "mlp", *DRY_RUNS["mnist.py"])
    check_dry_run(run(tmp_path, 2, "mnist.py", *args), tmp_path)


@pytest.mark.parametrize(
    ("script", "size"),
    [
        pytest.param(
            script, 0 if script == "mnist.py" else 2, marks=[pytest.mark.slow] * (script == "resnet.py")
        )
        for script in DRY_RUNS
    ],
)
def test_a_dry_run_of_every_example_takes_one_step_and_stops(
    nest: Nest, tmp_path: Path, data: Path, script: str, size: int
) -> None:
    args = ("--data-dir", data, "--dry-run", *DRY_RUNS[script])
    check_dry_run(run_forked(nest, tmp_path, size, EXAMPLES / script, *args), tmp_path)


@pytest.mark.parametrize(("script", "size"), [("digits_serial.py", 0), ("digits.py", 2)])
def test_a_dry_run_of_the_digits_takes_one_step_too(
    nest: Nest, tmp_path: Path, data: Path, script: str, size: int
) -> None:
    printed = run_forked(nest, tmp_path, size, EXAMPLES / script, "--data-dir", data, "--dry-run")
    assert len(printed.splitlines()) == 1


def test_all_of_ucis_digits_to_test_on_are_one_batch(nest: Nest, tmp_path: Path, tiny: ModuleType) -> None:
    tiny.write_digits(tmp_path, 1797)
    source = f"import runpy; print(len(runpy.run_path({str(EXAMPLES / 'digits.py')!r})['test']))"
    (tmp_path / "count.py").write_text(f"import sys\nsys.path.insert(0, {str(EXAMPLES)!r})\n{source}\n")
    printed = run_forked(nest, tmp_path, 0, tmp_path / "count.py", "--data-dir", tmp_path, "--dry-run")
    assert printed.splitlines()[-1] == "1"


def test_a_missing_data_set_is_one_sentence_without_a_traceback(nest: Nest, tmp_path: Path) -> None:
    (rank,) = nest.start(EXAMPLES / "mnist.py", 0, "--data-dir", tmp_path, apart=True)
    assert nest.wait([rank]) == [1]
    assert rank.said == ""
    assert rank.complained.startswith(f"{tmp_path} has no train-images-idx3-ubyte")
    assert rank.complained.count("\n") == 1


@pytest.mark.parametrize(
    ("script", "args", "says"),
    [
        ("mnist.py", ["--log-interval", "0"], "argument --log-interval: 0 is no number from 1 up"),
        ("resnet.py", ["--image-size", "-1"], "argument --image-size: -1 is no number from 1 up"),
        ("gpt.py", ["--length", "many"], "argument --length: many is no number from 1 up"),
        ("gpt.py", ["--heads", "3"], "argument --heads: 3 do not divide --width 128"),
    ],
)
def test_a_number_that_cannot_be_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str,
    args: list[str],
    says: str,
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [script, *args])
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module(script.removesuffix(".py")).main()
    assert capsys.readouterr().err.splitlines()[-1] == f"{script}: error: {says}"


@pytest.mark.slow
def test_the_networks_have_the_published_numbers_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import cifar10
    import mnist
    import resnet

    def parameters(model: torch.nn.Module) -> int:
        return sum(parameter.numel() for parameter in model.parameters())

    assert parameters(mnist.Net()) == 1_199_882
    assert parameters(cifar10.ResNet()) == 269_722
    assert len(cifar10.PyramidNet().blocks) == 54
    assert parameters(cifar10.PyramidNet()) == 1_772_706
    with torch.device("meta"):
        assert parameters(resnet.ResNet(resnet.BLOCKS["resnet50"], 1000)) == 25_557_032
        assert parameters(resnet.ResNet(resnet.BLOCKS["resnet101"], 1000)) == 44_549_160
    assert cifar10.PyramidNet()(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
