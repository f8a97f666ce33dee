"""`python on_device.py [serially.py] SCRIPT` runs a script of tests/same with all new tensors on this machine's device.

The loaders read on the CPU, as they do without a default device, and the batches are moved.
"""

import os
import runpy
import sys

import torch
from torch.utils.data import DataLoader

from samestep.train.data.loader import Loader
from samestep.train.nested import map_tensors

_END = object()
# CUDA's dropout is one operation; on the cores the same operation takes its place
FUSED = """
def dropout(input, p=0.5, training=True, inplace=False):
    dropped = torch.native_dropout(input, p, True)[0] if training and 0 < p < 1 else _dropout(input, p, training)
    return input.copy_(dropped) if inplace else dropped
"""
device = torch.get_default_device() if not torch.cuda.is_available() else torch.device("cuda", 0)


def reading_on_the_cpu(iterate):
    def batches(loader):
        with torch.device("cpu"):
            source = iterate(loader)
        while True:
            with torch.device("cpu"):
                batch = next(source, _END)
            if batch is _END:
                return
            yield map_tensors(lambda item: item.to(device), batch, movable=True)

    return batches


if device.type == "cpu":
    functional = torch.nn.functional
    vars(functional)["_dropout"] = functional.dropout
    exec(compile(FUSED, functional.__file__, "exec"), vars(functional))  # so it counts as torch's own
is_serial = os.path.basename(sys.argv[1]) == "serially.py"
reader = DataLoader if is_serial else Loader
reader.__iter__ = reading_on_the_cpu(reader.__iter__)
torch.set_default_device(device)
torch.use_deterministic_algorithms(True, warn_only=True)
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
