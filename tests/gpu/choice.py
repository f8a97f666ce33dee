"""Every process takes its own device before the group is made, and says what it promised about it."""

import os

import torch

import samestep
from samestep.train.group.device import name_of_hardware
from samestep.train.group.world import joined

world = samestep.init(backend=os.environ.get("SAMESTEP_TEST_BACKEND"))
if torch.accelerator.is_available():
    shared = torch.accelerator.device_count() == 1
    assert world.device.index == (0 if shared else world.local_rank), world
    assert torch.accelerator.current_device_index() == world.device.index
    assert torch.empty(1, device=world.device.type).device == world.device
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] in (":4096:8", ":16:8")
else:
    assert world.device == torch.device("cpu"), world
assert len(samestep.gather([str(world.device)])) == world.size == len(joined().all_gather("devices"))
if world.rank == 0:
    print(f"{world.device.type} {name_of_hardware()}")
