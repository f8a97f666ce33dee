"""Runs a converted script without samestep: `python serially.py SCRIPT` is the untouched script.

A module of the same name takes samestep's place. Its loader is torch's DataLoader, and its other functions return
what they are given.
"""

import runpy
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader


def init(**options: Any) -> SimpleNamespace:
    return SimpleNamespace(device=torch.get_default_device(), rank=0, size=1)


def replicate(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    return model


def unchanged(value: Any, **options: Any) -> Any:
    return value


def stand_in() -> ModuleType:
    module = ModuleType("samestep")
    module.__dict__.update(init=init, replicate=replicate, loader=DataLoader)
    module.__dict__.update(sum=unchanged, mean=unchanged, gather=unchanged)
    module.__dict__.update(no_sync=lambda model, enabled=True: nullcontext(), first=nullcontext)
    module.__dict__.update(save=lambda path, state: torch.save(state, path))
    return module


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.modules["samestep"] = stand_in()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, sys.argv[0].rpartition("/")[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
