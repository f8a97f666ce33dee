"""A training script of which one rank gets stuck in a given way at a given place; tests/hang.py and its test run it.

python stuck.py --kind sleep --where middle --rank 1 [--exact]: prints the line where that rank is stuck.
"""

import argparse
import ctypes
import inspect
import itertools
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import samestep

WAIT_S = 120.0
SAMPLES, BATCH = 96, 12


def note():
    """Tell where the caller is stuck: the line that a notice has to name."""
    frame = inspect.currentframe().f_back
    print(f"stuck at {frame.f_lineno}", flush=True)


def sleep(fifo):
    note(), time.sleep(WAIT_S)


def loop(fifo):
    until = time.monotonic() + WAIT_S
    note()
    while time.monotonic() < until:
        pass


def hold_the_gil(fifo):
    c, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    c.pthread_mutex_lock(mutex)
    note(), c.pthread_mutex_lock(mutex)  # which waits for itself, and no signal ends that


def sleep_in_c(fifo):
    """Sleep and hold the GIL, in a call that a signal would end."""
    c = ctypes.PyDLL(None)
    note(), c.sleep(int(WAIT_S))


def lock(fifo):
    held = threading.Lock()
    held.acquire()
    note(), held.acquire(timeout=WAIT_S)


def read_a_fifo(fifo):
    note(), Path(fifo).read_bytes()


def stop(fifo):
    note(), os.kill(os.getpid(), signal.SIGSTOP)


def sleep_uninterruptibly(fifo):
    """A parent of vfork waits so for its child."""
    import ctypes

    note()
    if ctypes.CDLL(None).vfork() == 0:
        ctypes.CDLL(None).pause()


def leave(fifo):
    note(), sys.exit(77)


def leave_at_once(fifo):
    note(), os._exit(5)


def barrier(fifo):
    note(), dist.barrier()


def work(fifo):
    note(), dist.barrier(async_op=True).wait()


def ddps_backward(fifo):
    model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1), init_sync=False)
    with torch.enable_grad():  # it may be an evaluation
        loss = model(torch.ones(1, 1)).sum()
    note(), loss.backward()


def extra_sum(fifo):
    note(), samestep.sum(1.0)


def go_on(fifo):
    """Whoever reads this cuts the link to this machine, or stops the launcher here."""
    note()


KINDS = {
    "link": go_on,
    "launcher": go_on,
    "sleep": sleep,
    "loop": loop,
    "gil": hold_the_gil,
    "c-sleep": sleep_in_c,
    "lock": lock,
    "fifo": read_a_fifo,
    "stop": stop,
    "d-state": sleep_uninterruptibly,
    "exit": leave,
    "os-exit": leave_at_once,
    "barrier": barrier,
    "work": work,
    "ddp": ddps_backward,
    "extra": extra_sum,
}


class Reads(Dataset):
    """Rows, of which one is never read to its end on the stuck rank."""

    def __init__(self, rows, stuck):
        self.rows, self.stuck, self.count = rows, stuck, 0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.count += 1
        if self.stuck and self.count == 5:
            note(), time.sleep(WAIT_S)
        return self.rows[index], self.rows[index].sum()


def main():  # noqa: C901
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="none")
    parser.add_argument("--where", default="middle")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--fifo")
    asked = parser.parse_args()
    world = samestep.init()
    mine = world.rank == asked.rank
    torch.manual_seed(0)
    rows = torch.rand(SAMPLES, 8)
    stuck_reading = asked.kind == "loader" and mine
    data = Reads(rows, stuck_reading) if asked.kind == "loader" else TensorDataset(rows, rows.sum(1))
    model = samestep.replicate(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1)), exact=asked.exact)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"num_workers": 2, "persistent_workers": True} if asked.kind == "loader" else {}
    train = (
        samestep.steps(data, BATCH, microbatch=2, shuffle=True, seed=1, **options)
        if asked.exact
        else samestep.loader(data, BATCH, shuffle=True, seed=1, **options)
    )
    test = samestep.loader(Reads(rows, False) if asked.kind == "loader" else data, 24, **options)
    run = samestep.Checkpoint("commits", every=5, model=model, optimizer=optimizer, train=train)

    if asked.kind == "hook" and mine:
        calls = itertools.count(1)
        model[0].weight.register_hook(lambda gradient: sleep(None) if next(calls) == 12 else None)

    def stick(where):
        if mine and asked.where == where and asked.kind in KINDS:
            KINDS[asked.kind](asked.fifo)
        if mine and asked.where == where and asked.kind == "slow":
            time.sleep(asked.slow)

    def loss_of(x, y):
        return nn.functional.mse_loss(model(x).squeeze(1), y)

    step = 0
    for _ in train.epochs(200 if asked.kind != "slow" else 2):
        for batch in train:
            step += 1
            if step == 1:
                stick("first step")
            if step == 12:
                stick("middle")
            skipped = asked.kind == "skip" and mine and step >= 12
            for x, y in batch if asked.exact else [batch]:
                loss = loss_of(x, y)
                if not skipped:
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(asked.pause)
            if asked.kind == "uneven" and mine and step == 14:
                print(f"stuck at {inspect.currentframe().f_lineno}", flush=True)
                break
            run.step()
        model.eval()
        total = 0.0
        with torch.no_grad():
            for x, y in test:
                stick("evaluation")
                total += float(loss_of(x, y))
        samestep.sum(total)
        model.train()
        stick("checkpoint")
        samestep.save("model.pt", model.state_dict())


if __name__ == "__main__":
    main()
