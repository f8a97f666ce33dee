"""Sums of an exchange in the tree, while the script's stream is delayed, beside the serial tree."""

import os
import tempfile

import torch
import torch.distributed as dist

import samestep
from samestep.train.group.census import added
from samestep.train.model.tree import add_up
from samestep.train.passes import cut

world = samestep.init(backend=os.environ.get("SAMESTEP_TEST_BACKEND"))
if world.size == 1:
    backend = dist.get_default_backend_for_device(world.device)
    store = dist.FileStore(tempfile.mktemp(), 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
draw = torch.Generator().manual_seed(0)
for count in (1, 2, 3, 5, 8, 13):
    if count < world.size:
        continue
    length, waiting = 10_007, []
    for bucket in range(4):
        leaves = (
            torch.randn(count, length, generator=draw) * 10.0 ** torch.arange(count).remainder(7)[:, None]
        )
        serial = added({(0, at): leaves[at].clone() for at in range(count)}, count, torch.Tensor.add_)
        own = {}
        for at in range(*cut(count, world.size, world.rank)):
            if world.device.type == "cuda":
                torch.cuda._sleep(500_000)
            own[0, at] = leaves[at].to(world.device, non_blocking=True) * 1
            own = added(own, count, torch.Tensor.add_)
        like = torch.zeros(length, device=world.device)
        waiting.append((add_up(own, like, count), serial.popitem()[1], bucket))
    for total, expected, bucket in waiting:
        assert torch.equal(total.cpu(), expected), (count, bucket)
if world.rank == 0:
    print("the tree's sums have the serial bits")
if world.size == 1:
    dist.destroy_process_group()
