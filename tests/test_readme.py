"""What README and docs show is so: their blocks run, their diff, output, names, commands and links are real."""

import difflib
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from forked import Nest

import samestep
from samestep import cli

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
README = PAGES[0].read_text()
BLOCK = re.compile(r"(?P<before>^[^\n]*\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)

RUN_ALL = """\
import gc, json, sys
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
import samestep

with open(sys.argv[1]) as file:
    blocks = json.load(file)
samestep.init()
for place, text in blocks:
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(41, 8), torch.randint(0, 3, (41,)))
    net = nn.Sequential(nn.Linear(8, 3))
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    names = {"dataset": dataset, "net": net, "model": net, "optimizer": optimizer, "scheduler": scheduler}
    names["evaluate"] = torch.nn.Module.eval
    exec(compile(text, place, "exec"), {**globals(), **names})
    del net, optimizer, scheduler, names
    gc.collect()  # the next block's replicas are its own alone
print("all of", len(blocks))
"""

TRAIN = """\
import torch
import samestep


class Volumes(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, i):
        if i == 710:
            raise FileNotFoundError(f"/data/volume-{i}.bin")
        return torch.randn(8), torch.randn(1)


world = samestep.init()
train = samestep.loader(Volumes(), batch_size=16, num_workers=0)
model = samestep.replicate(torch.nn.Linear(8, 1))
for x, y in train:
    (model(x) - y).square().mean().backward()
"""

# Without torch: that ranks find each other under every launcher is tested elsewhere.
WORKS = "from samestep.placement.place import this_process\nassert this_process().size in (1, 2)\n"


def blocks(kind: str) -> list[tuple[str, str]]:
    """Place and text of each block of a kind that is to be run; a script (#!) is only shown."""
    found = []
    for page in PAGES:
        whole = page.read_text()
        for block in BLOCK.finditer(whole):
            shown = block["text"].startswith("#!") or "<!-- not run" in (block["before"] or "")
            if block["kind"] == kind and not shown:
                line = whole[: block.start("text")].count("\n")
                found.append((f"{page.relative_to(ROOT)}:{line + 1}", block["text"]))
    return found


def run(directory: Path, *command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        cwd=directory,
        env={
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "CUDA_VISIBLE_DEVICES": "",
            "SAMESTEP_RUN_DIR": "runs",
        },
        capture_output=True,
        text=True,
        timeout=55,
    )


@pytest.mark.parametrize("size", [1, 2])
def test_every_python_block_runs(nest: Nest, tmp_path: Path, size: int) -> None:
    found = blocks("python")
    assert len(found) > 8
    (tmp_path / "blocks.json").write_text(json.dumps(found))
    (tmp_path / "run_all.py").write_text(RUN_ALL)
    env = {"CUDA_VISIBLE_DEVICES": "", "SAMESTEP_RUN_DIR": "runs"}
    ranks = nest.start(tmp_path / "run_all.py", size, "blocks.json", env=env, cwd=tmp_path)
    assert nest.wait(ranks) == [0] * size, "".join(rank.said for rank in ranks)
    assert f"all of {len(found)}" in ranks[0].said


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks("bash"), ids=lambda block: block[0])
def test_every_shell_block_runs(tmp_path: Path, block: tuple[str, str]) -> None:
    (tmp_path / "train.py").write_text(WORKS)
    done = run(tmp_path, "bash", "-ec", block[1])
    assert done.returncode == 0, done.stderr


def test_the_readme_shows_the_real_difference_of_the_two_scripts() -> None:
    before, after = (
        (ROOT / "examples" / name).read_text().splitlines() for name in ("digits_serial.py", "digits.py")
    )
    diff = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    shown = next(block["text"] for block in BLOCK.finditer(README) if block["kind"] == "diff")
    assert shown.splitlines() == [line for line in diff if not line.startswith("@@")]


@pytest.mark.slow
def test_the_readme_shows_how_a_run_really_fails(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = run(tmp_path, BIN / "samestep", "run", "-n", 3, "train.py")
    shown = README.split("$ samestep run -n 3 train.py\n", 1)[1].split("```", 1)[0]

    def shape(text: str) -> list[str]:
        text = re.sub(r"\((\S+), cpu\) after [\d.]+ s", "(HOST, cpu) after N s", text)
        return re.sub(r"runs/[\d-]+", "runs/NAME", text).splitlines()

    assert done.returncode == 1
    assert shape(done.stderr) == shape(shown)


def test_the_readme_has_plain_torch_for_every_public_function() -> None:
    table = README.split("## In plain torch", 1)[1].split("## ", 1)[0]
    said = set(re.findall(r"\w+", " ".join(line.split(" | ")[0] for line in table.splitlines())))
    functions = {
        name for name in samestep.__all__ if not name.endswith(("Error", "Differ", "Missing", "Failed"))
    }
    assert functions - said - {"World"} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_targets_and_links_exist(page: Path) -> None:
    text = page.read_text()
    verbs = {*cli.COMMANDS, "help", "version"}
    typed = re.findall(r"(?:^|`|\$ |srun |mpirun -n \d )samestep ([a-z]+)", text, re.MULTILINE)
    # A sentence may begin with the name.
    prose = {"makes", "compares", "cannot", "script"}
    assert set(typed) - verbs - prose == set()
    targets = re.findall(r"(?:^|`|\$ )make ([a-z-]+)", text, re.MULTILINE)
    assert set(targets) <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / link).exists(), link


def test_the_options_of_commands_exist() -> None:
    text = "".join(page.read_text() for page in PAGES)
    typed = re.findall(r"`(?:srun |mpirun -n \d )?samestep (\w+) ([^`]+)`", text)
    of_commands = [(verb, words) for verb, words in typed if verb in cli.COMMANDS]
    assert len(of_commands) > 50
    for verb, words in of_commands:
        params = import_module(f"samestep.cli.{verb}").command.params
        known = {option for param in params for option in (*param.opts, *param.secondary_opts)}
        ours = re.split(r" \S+\.py\b", words)[0]  # what follows a script is the script's
        assert set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", ours)) - {"-h", "--help"} <= known, words


def test_every_environment_variable_in_the_list_is_read() -> None:
    names = re.findall(r"^\| `(SAMESTEP_\w+)=", (ROOT / "docs" / "launch.md").read_text(), re.MULTILINE)
    code = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert len(names) == 10
    assert all(f'"{name}"' in code for name in names)


def measured(benchmark: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{benchmark}.json").read_text())["rows"]


TABLES = """\
import importlib, json, sys
for name in sys.argv[1:]:
    with open(f"results/{name}.json") as file:
        print(json.dumps(list(importlib.import_module(name).table(json.load(file)["rows"]))))
"""


@pytest.mark.slow
def test_a_page_has_the_table_of_each_benchmark_that_was_measured() -> None:
    names = [name for name in ("peers", "launchers", "predict") if (RESULTS / f"{name}.json").exists()]
    done = run(ROOT / "benchmarks", sys.executable, "-c", TABLES, *names)
    assert done.returncode == 0, done.stderr
    tables = ["\n".join(json.loads(line)) for line in done.stdout.splitlines()]
    assert len(tables) == len(names)
    assert all(tables)
    for table in tables:
        assert any(f"{table}\n" in page.read_text() for page in PAGES), table


def test_the_page_of_costs_shows_what_was_measured() -> None:
    steps = {
        (row["base"], row["model"], row["kind"], row["system"]): f"{row['ratio']:.2f}"
        for row in measured("overhead")
        if "model" in row
    }
    loading = {(row["images"], row["system"]): f"{row['ratio']:.1f}" for row in measured("data")}
    text = (ROOT / "docs" / "speed.md").read_text()
    tables = re.findall(r"^\| (.+) \|\n\|[-|]+\|\n((?:\|.+\|\n)+)", text, re.MULTILINE)
    seen = 0
    for head, body in tables:
        names = head.split(" | ")
        for line in body.splitlines():
            cells = dict(zip(names, line.strip("| ").split(" | "), strict=True))
            for system in names[2 if "model" in cells else 1 :]:
                if "model" in cells:
                    base = "serial" if "serial again" in names else "ddp"
                    assert cells[system] == steps[base, cells["model"], cells["kind"], system]
                else:
                    assert cells[system] == loading[cells["images"], system]
                seen += 1
    assert seen == 6 * 2 + 6 * 4 + 2 * 2
    start = next(
        row for row in measured("overhead") if row["kind"] == "start" and row["system"] == "samestep"
    )
    assert f"takes {start['ratio']:.2f} of `torchrun`'s time ({start['seconds']:.1f}" in text


def test_the_table_of_changed_lines_shows_what_was_measured() -> None:
    text = (ROOT / "docs" / "migration.md").read_text()
    rows = json.loads((ROOT / "benchmarks" / "results" / "lines.json").read_text())["rows"]
    cells: dict[str, list[str]] = {}
    for row in rows:
        same = "the same numbers" if row["difference"] == "the same" else "others"
        cells.setdefault(row["script"], []).append(f"{row['lines']}, {same}")
    assert len(cells) == 5
    for script, shown in cells.items():
        assert f"| {script} | {' | '.join(shown)} |\n" in text


def test_the_navigation_names_every_page_once_and_no_other() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n", 1)[1]
    named = re.findall(r"- (?:[^:\n]+: )?([\w-]+\.md)$", navigation, re.MULTILINE)
    assert sorted(named) == sorted(page.name for page in PAGES[1:]), "mkdocs.yml names the pages under nav"


def test_the_map_of_the_code_names_every_folder_and_no_file_that_is_not_there() -> None:
    package, text = ROOT / "src" / "samestep", (ROOT / "docs" / "architecture.md").read_text()
    folders = {f"{path.parent.relative_to(package)}/" for path in package.glob("**/*.py")} - {"./"}
    assert [folder for folder in sorted(folders) if folder not in text] == []
    files = re.findall(r"`((?:\w+/)*\w+\.py)`", text)
    assert len(files) > 20
    assert [file for file in files if not ((package / file).exists() or (ROOT / file).exists())] == []
