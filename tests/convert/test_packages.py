"""A project of several files: what docs/convert.md shows of it, and how its imports are found."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from convert.test_convert import BEGIN, STEP, _of, _place, _run  # noqa: F401
from tutorial import without_names

from samestep.convert.convert import convert

PAGE = Path(__file__).parents[2] / "docs" / "convert.md"
TYPED = re.findall(r"^\$ (.+)\n((?:(?!\$ |```).*\n)*)", PAGE.read_text(), re.MULTILINE)
FILES = {
    "__init__": "",
    "model": """
        from torch import nn

        def build_model():
            return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        """,
    "data": """
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        def build_loader(batch_size):
            x = torch.randn(203, 8)
            return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=batch_size, shuffle=True)
        """,
    "trainer": """
        import torch
        from torch.nn.functional import cross_entropy

        from .data import build_loader
        from .model import build_model

        class Trainer:
            def __init__(self, batch_size):
                self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
                self.loader = build_loader(batch_size)
                self.model = build_model().to(self.device)
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

            def epoch(self):
                total = 0.0
                for x, y in self.loader:
                    x, y = x.to(self.device), y.to(self.device)
                    loss = cross_entropy(self.model(x), y)
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                    total += loss.item()
                return total / len(self.loader)
        """,
    "train": """
        import argparse

        import torch

        from .trainer import Trainer

        if __name__ == "__main__":
            parser = argparse.ArgumentParser()
            parser.add_argument("--epochs", type=int, default=2)
            args = parser.parse_args()
            torch.manual_seed(0)
            trainer = Trainer(batch_size=16)
            for epoch in range(args.epochs):
                print(f"epoch {epoch}: {trainer.epoch():.4f}")
        """,
}


def _project(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(dedent(text).lstrip())


@pytest.mark.slow
def test_the_commands_of_the_page_print_what_it_shows() -> None:
    _project(Path("cells"))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "SAMESTEP_RUN_DIR": ""}
    assert len(TYPED) == 3
    for command, shown in TYPED:
        output = subprocess.STDOUT
        done = subprocess.run(
            command, shell=True, env=env, stdout=subprocess.PIPE, stderr=output, text=True, timeout=120
        )
        assert without_names(done.stdout) == without_names(shown), command


def test_the_script_of_a_project_is_kept_though_it_does_not_change():
    _project(Path("cells"))
    done = _run("--write", "cells/train.py")
    assert done.stdout.endswith(
        "\ntest it: samestep verify --against cells.train_serial -m cells.train\n"
        "or shorter: samestep verify --steps 50 --against cells.train_serial -m cells.train\n"
    )
    assert Path("cells/train_serial.py").read_text() == Path("cells/train.py").read_text()
    assert not Path("cells/model_serial.py").exists()


def test_a_module_that_is_in_no_package_is_tested_by_its_own_name():
    Path("train.py").write_text(BEGIN + "for x, y in train:\n" + STEP)
    assert (
        "\ntest it: samestep verify --against train_serial -m train\n"
        "or shorter: samestep verify --steps 50 --against train_serial -m train\n"
        in _run("--write", "-m", "train").stdout
    )


@pytest.mark.parametrize("how", ["cells/train.py", "src/cells/train.py", "-m cells.train", "-m cells"])
def test_a_package_imports_its_modules_by_its_name(how):
    folder = Path("src/cells" if "src" in how else "cells")
    _project(folder)
    for name in ("trainer", "train"):
        file = folder / f"{name}.py"
        file.write_text(file.read_text().replace("from .", "from cells."))
    if how == "-m cells":
        shutil.copy(folder / "train.py", folder / "__main__.py")
    done = _run(*how.split())
    assert done.exit_code == 0, done.stderr
    assert [f"+++ {folder}/{name}.py" in done.stdout for name in ("trainer", "data")] == [True, True]


def test_a_module_is_found_where_it_stands_although_no_folder_is_a_package():
    _project(Path("cells"))
    Path("cells/__init__.py").unlink()
    trainer = Path("cells/trainer.py")
    trainer.write_text(trainer.read_text().replace("from .", "from cells."))
    assert len(convert(Path("cells/train.py"), is_module=True).files) == 2


@pytest.mark.parametrize(("line", "files"), [("from . import data", 2), ("from .. import data", 1)])
def test_a_relative_import_beside_a_script_in_the_working_directory_is_followed(line, files):
    """The path of its folder is empty, and has no folder above: convert ended with a ValueError or an IndexError."""
    Path("data.py").write_text(f"import torch\n{BEGIN}")
    Path("train.py").write_text(f"{line}\n{BEGIN}for x, y in train:\n{STEP}")
    found = convert(Path("train.py"))
    assert len(found.files) == files


def test_a_file_that_a_function_writes_and_the_script_reads_is_listed():
    """Each rank but the first wrote to /dev/null, and read the file while rank 0 was still writing it."""
    text = f"""import os
def make(path, n):
    with open(path, "w") as file:
        file.write("1" * n)
if not os.path.exists(args.data):
    make(args.data, n=3)
text = open(args.data).read()
{BEGIN}for x, y in train:
{STEP}"""
    (gap,) = _of(text).gaps
    assert "train.py:3: every process would write this file, which train.py:5 reads" in gap
    (gap,) = _of(text.replace("make(args.data, n=3)", "make(n=3, path=args.data)")).gaps
    assert not _of(text.replace("make(args.data", "make(args.log")).gaps
