"""Joining and small messages by the number of ranks: time, processor time, open files; beside plain torch.

Ranks are forked from one process on this machine, so wall times are those of all ranks on these cores; processor time
is what each rank spends, and is what to compare. `tree` are samestep's connections without torch, `samestep` the
channel that training uses, with Gloo opened, `torch` plain `init_process_group` and `all_gather_object`.
"""

import argparse
import gc
import json
import mmap
import os
import resource
import statistics
import struct
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

from samestep.placement.place import Placement
from samestep.rendezvous.listen import hold_port
from samestep.rendezvous.ranks import connect_ranks
from samestep.train.group.census import Item, added, items_of, merged, message_of, of_kind

ROUNDS = 20
LIMIT = timedelta(minutes=5)
NAMES = ("join", "equal", "total", "gather")
ROW = struct.Struct("<" + "d" * (2 * len(NAMES) + 2))


class Calls(NamedTuple):
    """What one system calls for each measure, and what it opens to do so."""

    equal: Callable[[], object]
    total: Callable[[], object]
    gather: Callable[[], object]


def by_tree(here: Placement) -> Calls:
    tree = connect_ranks(here, LIMIT.total_seconds())
    mine = [[tree.number, tree.number]]

    def add(left: bytes, right: bytes) -> bytes:
        return struct.pack("<d", struct.unpack("<d", left)[0] + struct.unpack("<d", right)[0])

    def call(items: list[Item], is_total: bool = False) -> list[Item]:
        def join(parts: Sequence[list[Item]]) -> bytes:
            here = [*items, *chain(*parts)]
            if not is_total:
                return message_of(merged(here))
            blocks = {(item.ranks[0], item.ranks[1]): item.value for item in of_kind("block", here)}
            return message_of(
                [Item("block", at, value) for at, value in added(blocks, tree.size, add).items()]
            )

        return tree.round(partial(items_of, num_ranks=tree.size), join, LIMIT.total_seconds())

    return Calls(
        lambda: call([Item("place", mine, b"samestep.first (train.py:10)")]),
        lambda: call([Item("block", [0, tree.number], struct.pack("<d", 0.1))], is_total=True),
        lambda: call([Item("payload", mine, b"%16d" % tree.number)]),
    )


def by_samestep(here: Placement) -> Calls:
    import samestep
    from samestep.train.group.world import joined

    samestep.init(timeout=LIMIT)
    group = joined()
    own = b"%16d" % here.rank
    return Calls(
        lambda: group.all_gather("a call"), lambda: samestep.sum(0.1), lambda: group.all_gather("a call", own)
    )


def by_torch(here: Placement) -> Calls:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", timeout=LIMIT)
    found: list[Any] = [None] * here.size

    def total() -> None:
        value = torch.tensor([0.1], dtype=torch.float64)
        dist.all_reduce(value)

    return Calls(
        lambda: dist.all_gather_object(found, "samestep.first (train.py:10)"),
        total,
        lambda: dist.all_gather_object(found, here.rank),
    )


WAYS = {"tree": by_tree, "samestep": by_samestep, "torch": by_torch}


def rank_main(way: str, rank: int, size: int, port: int, told: mmap.mmap, start: int) -> None:
    variables = {
        "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1,
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in variables.items()})
    origin = {
        "node": "GROUP_RANK=0",
        "local_rank": f"LOCAL_RANK={rank}",
        "local_size": f"LOCAL_WORLD_SIZE={size}",
    }
    here = Placement(rank, size, rank, size, 0, 1, "torchrun", "127.0.0.1", port, origin, run=f"port {port}")
    os.read(start, 1)
    times, spent = [time.monotonic()], [time.process_time()]
    calls = WAYS[way](here)
    times.append(time.monotonic())
    spent.append(time.process_time())
    for call in calls:
        call()
        for _ in range(ROUNDS):
            call()
        times.append(time.monotonic())
        spent.append(time.process_time())
    took = [late - early for early, late in pairwise(times)]
    used = [late - early for early, late in pairwise(spent)]
    rounds = [1, *[ROUNDS + 1] * 3]
    took, used = ([value / count for value, count in zip(some, rounds, strict=True)] for some in (took, used))
    files = len(os.listdir("/proc/self/fd"))
    ROW.pack_into(told, rank * ROW.size, *took, *used, files, 1.0)


def measure(way: str, size: int) -> dict[str, Any]:
    held, port = hold_port()
    told = mmap.mmap(-1, ROW.size * size)
    start, go = os.pipe()
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            try:
                os.close(go)
                rank_main(way, rank, size, port, told, start)
            except BaseException as error:
                print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
            finally:
                # the other ranks still need this one for their last round
                os.read(start, 1)
                time.sleep(0.5)
                os._exit(0)
        pids.append(pid)
    os.close(start)
    os.write(go, b"x" * size)
    until = time.monotonic() + LIMIT.total_seconds()
    rows = []
    while len(rows) < size and time.monotonic() < until:
        time.sleep(0.05)
        rows = [row for row in ROW.iter_unpack(told) if row[-1]]
    os.close(go)
    for pid in pids:
        os.waitpid(pid, 0)
    held.close()
    if len(rows) < size:
        raise SystemExit(f"{way} at {size} ranks did not end")
    count = len(NAMES)
    row: dict[str, Any] = {"way": way, "ranks": size, "files of rank 0": int(rows[0][-2])}
    row["most files"] = int(max(figures[-2] for figures in rows))
    for at, name in enumerate(NAMES):
        cpu = [figures[count + at] * 1000 for figures in rows]
        row[name] = {
            "ms": max(figures[at] for figures in rows) * 1000, "cpu of rank 0": cpu[0],
            "cpu of a rank": statistics.median(cpu), "cpu in all": sum(cpu),
        }  # fmt: skip
        row[name] = {key: round(value, 3) for key, value in row[name].items()}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="2,4,8,16,32,64,128,256")
    parser.add_argument("--ways", default="tree,samestep,torch")
    parser.add_argument("--keep", action="store_true")
    asked = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    rows = []
    for way in asked.ways.split(","):
        if way != "tree":
            import torch

            import samestep

            for name in samestep.__all__:
                getattr(samestep, name)
            torch.set_num_threads(1)
        gc.collect()
        gc.freeze()
        for size in map(int, asked.sizes.split(",")):
            rows.append(measure(way, size))
            row = rows[-1]
            parts = [
                f"{name} {row[name]['ms']:8.2f} ms, cpu {row[name]['cpu of a rank']:7.3f}" for name in NAMES
            ]
            print(f"{way:<9} {size:>5}  {'   '.join(parts)}   files {row['files of rank 0']}", flush=True)
            print(
                f"{'':<15}  rank 0: "
                + "  ".join(f"{name} {row[name]['cpu of rank 0']:.3f}" for name in NAMES)
            )
    if asked.keep:
        from report import keep

        keep(ROUNDS, rows)
    else:
        json.dump(rows, sys.stderr)


if __name__ == "__main__":
    main()
