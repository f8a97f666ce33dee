"""Forges commits of a run and lets the run resume from each: python tests/attack/forge.py DIRECTORY

The forger knows everything: the run's identity, its number, the commit before. The files are well formed and their
digests right; only what they say is a state that no run can have. A line of JSON for each: its name, the step that
the run went on from, or its error.
"""

import json
import math
import os
import shutil
import sys
from pathlib import Path

import torch

import samestep
from samestep.files import open_directory
from samestep.state import file, lease
from samestep.state.directory import examine
from samestep.train.checkpoint import capture

STEPS = 3
HUGE = 2**80
EVIL = "\x1b]0;owned\x07\x1b[31m"
RIGHT = "as it was"
NO_COUNTS = (-1, HUGE, 1.5, math.nan, math.inf, "3", None, True, [], b"3")
WRONG = {
    ("samestep", "step"): (*NO_COUNTS, 7),
    ("samestep", "facts"): (
        None, [], "x", {"train": 3}, {"train": None}, {"train": {"batch_size": 10**5000}}, {"train": {"seed": EVIL}},
        {"train": {EVIL: 1}}, {"train": {"seed": [1]}}),
    (5,): (1,),
    (EVIL,): (1, {}),
    ("samestep", "streams"): (None, [], {}, "x", [b""], [b"{}"], [1], [b"[" * 100_000], [b'{"torch": "00"}'], [None]),
    ("samestep", "arithmetic"): (3, "x", [], {"torch": EVIL}, {"torch": 10**5000}, {"torch": []}),
    ("samestep",): (None, [], "x", {}),
    ("model",): (None, [], 3, "x"),
    ("model", "weight"): (None, 3, "x", [1.0], b"x"),
    ("optimizer",): (None, [], 3),
    ("optimizer", "param_groups"): (None, {}, 3, [3], [{"lr": "x"}], [{"lr": math.nan}], [{}]),
    ("optimizer", "state"): (None, [], 3, {0: 3}),
    ("scheduler",): (None, [], 3),
    ("scheduler", "last_epoch"): ("x", [], math.nan, HUGE, b"1"),
    ("scheduler", "base_lrs"): ("x", 3, {}),
    ("train",): (None, [], 3),
    ("train", "epoch"): NO_COUNTS,
    ("train", "position"): (*NO_COUNTS, 10**9),
    ("train", "seed"): (10**5000, EVIL, [], math.nan),
    ("train", "batch_size"): (10**5000, EVIL, None),
    ("train", "length"): (math.nan, "x", [], -1),
    ("train", "ledger"): ("x", 3, None),
    ("train", "order"): (3, None, [], {"seed": -1}, {"seed": "x"}, {"drawn": 0}, {"digest": 3}, {"other": 1}),
}  # fmt: skip


def parts():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    data = torch.utils.data.TensorDataset(torch.randn(12, 4))
    train = samestep.loader(data, 4, shuffle=True)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "train": train}


def trained(directory):
    made = parts()
    run = samestep.Checkpoint(directory, every=1, keep=STEPS, **made)
    run.resume()
    for (inputs,) in made["train"]:
        made["model"](inputs).sum().backward()
        made["optimizer"].step()
        made["scheduler"].step()
        run.step()
        run._writer.wait()
    run._directory.release()


def forged(directory, place, value):
    """Put a state with this value at this place behind the newest commit, as its right successor."""
    with open_directory(directory) as dir_fd:
        newest = examine(dir_fd)[0].outline
        record = lease.read(dir_fd)
    state, meta = capture.read(next(directory.glob(f"{newest.seal.number:06d}-*")))
    inner = state
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = None if value is RIGHT else value
    step = value if place == ("samestep", "step") and type(value) is int and 0 <= value < 2**62 else STEPS + 1
    if place != ("samestep", "step") and isinstance(state.get("samestep"), dict):
        state["samestep"] = (
            {**state["samestep"], "step": step} if len(state["samestep"]) > 1 else state["samestep"]
        )
    # 7 is a count, but not that of the file
    step = STEPS + 1 if value == 7 else step
    seal = file.Seal(newest.seal.run, newest.seal.number + 1, step, newest.root)
    name = f"{seal.number:06d}-step-{step}-{os.urandom(4).hex()}.samestep"
    with (directory / name).open("xb") as opened:
        root = file.write(opened.fileno(), capture.pack(state, meta), seal)
    # the forger notes it in the lease as well
    with open_directory(directory) as dir_fd:
        writable = lease._File(dir_fd, os.O_RDWR)
        writable.write(record._replace(commits=(*record.commits[-1:], (seal.number, root))))
        writable.close()


def resumed(directory):
    try:
        run = samestep.Checkpoint(directory, **parts())
        step = run.resume()
        run._directory.release()
    except samestep.SamestepError as error:
        return {"error": str(error)}
    except BaseException as error:
        return {"python": repr(error)}
    return {"step": step}


def shown(value):
    try:
        return f"{value!r:.40}"
    except ValueError:
        return "an endless number"


def main():
    samestep.init()
    good = Path(sys.argv[1], "good")
    trained(good)
    for place, values in [(("samestep", "arithmetic"), (RIGHT,)), *WRONG.items()]:
        for value in values:
            directory = Path(sys.argv[1], "forged")
            shutil.copytree(good, directory)
            forged(directory, place, value)
            name = f"{place} = {shown(value)}"
            print(json.dumps({"name": name, **resumed(directory)}), flush=True)
            shutil.rmtree(directory)


if __name__ == "__main__":
    main()
