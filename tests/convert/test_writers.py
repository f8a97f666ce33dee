"""`samestep convert` lets rank 0 alone write logs, and gives each process its own device."""

import runpy

import pytest
from convert.test_convert import BEGIN, STEP, _after, _of, _place  # noqa: F401

TRAIN = f"for x, y in train:\n{STEP}"


def test_a_tensorboard_writer_is_made_on_rank_0_and_takes_totals(tmp_path):
    text = f"import os\nfrom x import SummaryWriter\n{BEGIN}writer = SummaryWriter('logs')\n{TRAIN}"
    text += "    writer.add_scalar('loss', loss.item())\n"
    assert not _of(text).gaps
    made = _after(text)
    assert "writer = SummaryWriter('logs') if samestep.init().rank == 0 else NoWriter()\n" in made
    assert "writer.add_scalar('loss', samestep.mean(loss.item()))" in made
    class_ = made[made.index("class NoWriter:") :].partition("\n\n")[0]
    (tmp_path / "silent.py").write_text(f"{class_}\nNoWriter().add_scalar('loss', 1, global_step=2)\n")
    runpy.run_path(str(tmp_path / "silent.py"))


@pytest.mark.parametrize(
    "asks", ["path = writer.log_dir", "writer.add_graph(model, data)", "writer.get_logdir()"]
)
def test_a_tensorboard_writer_that_is_asked_for_its_directory_is_listed(asks):
    text = f"from x import SummaryWriter\n{BEGIN}writer = SummaryWriter(args.log_dir)\n{TRAIN}"
    assert not _of(text).gaps
    (gap,) = _of(f"{text}{asks}\n").gaps
    assert "every process would write here (SummaryWriter); make it on rank 0 only" in gap


@pytest.mark.parametrize(
    ("call", "becomes"),
    [
        ("wandb.init()", 'wandb.init(mode="disabled" if samestep.init().rank else None)'),
        ("wandb.init(\n    project='p',\n)", "project='p',\nmode=\"disabled\" if samestep.init().rank else None)"),
        ("logging.FileHandler(log)", 'logging.FileHandler(log if samestep.init().rank == 0 else "/dev/null")'),
        ("logging.basicConfig(level=1, filename=log)",
         'logging.basicConfig(level=1, filename=log if samestep.init().rank == 0 else "/dev/null")'),
        ("logging.basicConfig(level=1)", "logging.basicConfig(level=1)"),
        ("os.fsync(log.fileno())", "if samestep.init().rank == 0: os.fsync(log.fileno())"),
        ("os.environ['CUDA_VISIBLE_DEVICES'] = '0'  # GPU", "pass  # each process has a device of its own  # GPU"),
    ],
)  # fmt: skip
def test_what_every_process_would_write_or_set_is_left_to_one(call, becomes):
    text = f"import os, logging, wandb\n{BEGIN}{TRAIN}{call}\n"
    assert f"\n{becomes}\n" in _after(text) or f"    {becomes}\n" in _after(text)
    assert not _of(text).gaps


def test_a_device_that_is_chosen_by_a_variable_is_noted():
    text = f"import os\n{BEGIN}{TRAIN}os.environ['CUDA_VISIBLE_DEVICES'] = '0'\n"
    (note,) = _of(text).notes
    assert "set it where you start the run" in note


def test_random_transforms_are_noted_once():
    text = f"from torchvision import transforms as T\n{BEGIN}both = [T.RandomCrop(3), T.RandomErasing()]\n{TRAIN}"
    (note,) = _of(text).notes
    assert "seeded by sample" in note
    assert not _of(text.replace("Random", "Center")).notes


def test_a_file_that_is_written_and_read_back_is_waited_for():
    text = f"import json\n{BEGIN}{TRAIN}with open('log.txt', 'w') as file:\n    file.write('1')  # the last\n"
    text += "json.dump(1, open('m.json', 'w'))\nprint(open('log.txt').read(), json.load(open('m.json')))\n"
    made, waits = _after(text), "samestep.sum(0)  # the other processes wait"
    assert f"file.write('1')  # the last\n{waits}" in made
    assert made.count(waits) == 2
    assert "json.dump(1, open('m.json' if samestep.init().rank == 0 else \"/dev/null\", 'w'))\n" in made


@pytest.mark.parametrize(
    ("made", "path"),
    [
        ("place = tempfile.mkdtemp()", "os.path.join(place, 'log.txt')"),
        ("place = Path(tempfile.mkdtemp())", "place / 'log.txt'"),
        ("place = tempfile.TemporaryDirectory().name", "f'{place}/log.txt'"),
    ],
)
def test_a_temporary_directory_is_each_processs_own(made, path):
    begin = f"import os, tempfile\nfrom pathlib import Path\n{BEGIN}{made}\npath = {path}\n{TRAIN}"
    text = f"{begin}with open(path, 'w') as file:\n    file.write('1')\nprint(open(path).read())\n"
    assert not _of(text).gaps
    assert "with open(path, 'w') as file:" in _after(text)


def test_a_file_behind_an_early_return_is_listed_because_ranks_may_test_for_it_after_another_wrote_it():
    lines = "    if Path(root, 'y.json').exists():\n        return\n    json.dump([1], open(f'{root}/y.json', 'w'))\n"
    text = f"import json\nfrom pathlib import Path\n{BEGIN}def make(root):\n{lines}make('kp')\n{TRAIN}"
    assert any("kept for later runs" in gap for gap in _of(text).gaps)


def test_a_directory_made_by_pathlib_may_be_there_already():
    made = _after(
        f"from pathlib import Path\nPath('a').mkdir()\nPath('b').mkdir(parents=True)\n{BEGIN}for x, y in train:\n{STEP}"
    )
    assert "Path('a').mkdir(exist_ok=True)" in made
    assert "Path('b').mkdir(parents=True, exist_ok=True)" in made


@pytest.mark.parametrize(
    "line",
    ["os.remove('a.pt')", "os.rename('a.pt', 'b.pt')", "shutil.rmtree('old')", "Path('a.pt').unlink()"],
)
def test_a_file_is_moved_or_removed_by_rank_0_alone(line):
    begin = f"import os, shutil, tempfile\nfrom pathlib import Path\n{BEGIN}"
    made = _after(f"{begin}if len(data) > 2:\n    {line}\n{TRAIN}")
    assert f"    if samestep.init().rank == 0: {line}\n" in made
    own = "place = tempfile.mkdtemp()\nshutil.rmtree(place)\nnames = []\nnames.remove(1)\n"
    assert "rank == 0" not in _after(f"{begin}{own}{TRAIN}")
    (gap,) = _of(f"{begin}if len(data) > 2: {line}\n{TRAIN}").gaps
    assert "in a line of its own" in gap


def test_rank_0_alone_writes_a_file_whose_mode_an_expression_chooses():
    begin = f"{BEGIN}again = len(data) > 2\n"
    alone = "open('l.txt' if samestep.init().rank == 0 else \"/dev/null\", 'a' if again else 'w')"
    assert f"log = {alone}\n" in _after(f"{begin}log = open('l.txt', 'a' if again else 'w')\n{TRAIN}")
    made = _after(f"{begin}how = 'a'\nlog = open('l.txt', how)\n{TRAIN}")
    assert "log = open('l.txt' if samestep.init().rank == 0 else \"/dev/null\", how)\n" in made
    (gap,) = _of(f"{begin}log = open('l.txt', 'r' if again else 'w')\n{TRAIN}").gaps
    assert "every process would write here (open)" in gap
