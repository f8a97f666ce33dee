"""Damages checkpoints in every way we know, and shows that none is read: python tests/fuzz_state.py"""

import argparse
import collections
import gc
import multiprocessing
import os
import pickle
import random
import struct
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch

from samestep.errors import CheckpointError
from samestep.state import file as pure
from samestep.train.checkpoint import capture as carry

CODE = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pickle.find_class", "exec")
SLACK = 12 << 20
PAGE = 4096
HEADER = 128
ran = []


class Canary:
    def __reduce__(self):
        return os.system, ("touch canary",)


def originals(directory):
    """Checkpoints of several shapes; two of each, so that parts can be exchanged."""
    files = []
    for seed in range(2):
        torch.manual_seed(seed)
        rng = random.Random(seed)
        for scale in (1, 20, 150):
            model = torch.nn.Sequential(
                torch.nn.Linear(scale, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, scale)
            )
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.randn(8, scale)).sum().backward()
            optimizer.step()
            state = {
                "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                "rng": torch.get_rng_state(), "ledger": rng.randbytes(32), "python": rng.getstate(),
                "position": (3, {"epoch": 1, 7: None}),
            }  # fmt: skip
            path = directory / f"good-{seed}-{scale}"
            with path.open("wb") as file:
                pure.write(file.fileno(), carry.pack(state, {"step": 10 * seed + scale, "seed": seed}))
            files.append(path.read_bytes())
            path.unlink()
    return files


def flip(rng, data, other):
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def flip_header(rng, data, other):
    data[rng.randrange(min(len(data), 2 * PAGE))] ^= 1 << rng.randrange(8)
    return data


def truncate(rng, data, other):
    return data[
        : rng.choice((rng.randrange(len(data)), len(data) - 1, len(data) & ~63, len(data) // PAGE * PAGE))
    ]


def lengthen(rng, data, other):
    return data + rng.choice((b"\0", bytes(64), rng.randbytes(PAGE), other))


def zero_page(rng, data, other):
    at = rng.randrange(0, len(data), PAGE)
    data[at : at + PAGE] = bytes(len(data[at : at + PAGE]))
    return data


def zero_tail(rng, data, other):
    at = rng.randrange(0, len(data), 512)
    data[at:] = bytes(len(data) - at)
    return data


def double_page(rng, data, other):
    here, there = (rng.randrange(0, max(1, len(data) - PAGE), 64) for _ in range(2))
    data[there : there + PAGE] = data[here : here + PAGE]
    return data


def exchange_blocks(rng, data, other):
    length = 64 * rng.randrange(1, 40)
    here, there = (rng.randrange(0, max(1, len(data) - length), 64) for _ in range(2))
    data[here : here + length], data[there : there + length] = (
        data[there : there + length],
        data[here : here + length],
    )
    return data


def exchange_tensors(rng, data, other):
    outline = outline_of(data)
    places = [
        (at, blob.nbytes)
        for (at, _), blob in zip(outline.offsets(), outline.blobs, strict=True)
        if blob.nbytes
    ]
    at, length = rng.choice(places)
    to = rng.choice([start for start, size in places if size == length])
    data[at : at + length], data[to : to + length] = data[to : to + length], data[at : at + length]
    return data


def splice(rng, data, other):
    at = rng.randrange(0, min(len(data), len(other)), rng.choice((1, 64, PAGE)))
    return data[:at] + other[at:]


def splice_tensors(rng, data, other):
    start = outline_of(data).start
    return data[:start] + other[outline_of(other).start :]


def lie_in_preamble(rng, data, other):
    field, at = rng.choice((("<I", 8), ("<I", 12), ("<Q", 16), ("<Q", 24)))
    top = 2 ** (32 if field == "<I" else 64)
    value = rng.choice((0, 1, top - 1, top // 2, len(data), len(data) * 2, rng.randrange(top)))
    struct.pack_into(field, data, at, value)
    return data


def garbage_header(rng, data, other):
    (length,) = struct.unpack_from("<Q", data, 16)
    data[HEADER : HEADER + length] = rng.choice(
        (rng.randbytes(length), b"[]," * (length // 3) + b" " * (length % 3), bytes(length))
    )
    return data


def become_a_pickle(rng, data, other):
    code = pickle.dumps(Canary())
    at = rng.choice((0, HEADER, outline_of(data).start, len(data) - len(code)))
    data[at : at + len(code)] = code
    return data


def noise(rng, data, other):
    return bytearray(
        rng.choice((b"", b"samestep", b"\0" * 64, rng.randbytes(rng.randrange(9999)), bytes(data[:64]) * 2))
    )


DAMAGES = (
    flip, flip, flip, flip_header, flip_header, truncate, truncate, lengthen, zero_page, zero_tail,
    double_page, exchange_blocks, exchange_tensors, splice, splice_tensors, lie_in_preamble,
    garbage_header, become_a_pickle, noise,
)  # fmt: skip
OUTLINES = {}


def outline_of(data):
    key = blake2b(data).digest()
    if key not in OUTLINES:
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            OUTLINES[key] = pure.peek(file.name)
    return OUTLINES[key]


def memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(field))


def tried(path):
    """What reading does to one file: its outcome, seconds of a core, and bytes of memory at the highest."""
    Path("/proc/self/clear_refs").write_text("5")
    before, start = memory("VmRSS"), time.process_time()
    try:
        carry.read(path)
        outcome = "read"
    except CheckpointError as error:
        outcome = "" if str(error).startswith(f"{path} ") else f"nameless: {error}"
    except BaseException as error:
        outcome = f"{type(error).__name__}: {error}"
    return outcome, time.process_time() - start, memory("VmHWM") - before


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    memory = Path("/dev/shm")
    shares = [arguments.files // arguments.processes] * arguments.processes
    shares[0] += arguments.files - sum(shares)
    with tempfile.TemporaryDirectory(
        dir=arguments.directory or (memory if memory.is_dir() else None)
    ) as directory:
        os.chdir(directory)
        good = originals(Path(directory))
        fork = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(arguments.processes, fork) as pool:
            seeds = range(arguments.seed, arguments.seed + arguments.processes)
            found = list(pool.map(fuzz, [good] * len(shares), shares, seeds))
        canary = ["canary"] if os.path.exists("canary") else []
    counts = sum((result.counts for result in found), collections.Counter())
    worst, ran = (
        list(chain.from_iterable(lists))
        for lists in zip(*((result.worst, result.ran) for result in found), strict=True)
    )
    ran += canary
    silent = sum(": read in" in line for line in worst)
    print(
        f"damaged files {counts.total()} | read silently {silent} | other errors {len(worst) - silent} "
        f"| code run {len(ran)} | slowest {max(result.slowest for result in found):.3f} s "
        f"| memory {max(result.highest for result in found):.2f} of twice the file + {SLACK >> 20} MiB "
        f"| seed {arguments.seed}"
    )
    print(*(f"{name} {count}" for name, count in sorted(counts.items())), sep=", ")
    print(*worst[:20], *ran[:5], sep="\n")
    sys.exit(bool(worst or ran))


class Found(NamedTuple):
    """What one process found: files by damage, what went wrong, code that ran, the slowest, the most memory."""

    counts: collections.Counter
    worst: list
    ran: list
    slowest: float
    highest: float


def fuzz(good, files, seed):
    path = Path(f"damaged-{seed}")
    for data in good:
        path.write_bytes(data)
        assert tried(path)[0] == "read"
    sys.addaudithook(lambda event, args: ran.append(event) if event.startswith(CODE) else None)
    rng = random.Random(seed)
    counts = collections.Counter()
    gc.freeze()
    worst, slowest, highest, done = [], 0.0, 0.0, 0
    while done < files:
        data, other = (bytearray(rng.choice(good)) for _ in range(2))
        damage = rng.choice(DAMAGES)
        data = damage(rng, data, other)
        if bytes(data) in good:
            continue
        path.write_bytes(data)
        if done % 20 == 0:
            gc.collect()
        outcome, seconds, peak = tried(path)
        done += 1
        counts[damage.__name__] += 1
        slowest, highest = max(slowest, seconds), max(highest, peak / (2 * len(data) + SLACK))
        if outcome or seconds > 1 or peak > 2 * len(data) + SLACK:
            cost = f"{seconds:.2f} s, {peak >> 20} MiB of {len(data)} bytes"
            worst.append(f"{damage.__name__}: {outcome or 'refused'} in {cost}")
    return Found(counts, worst, ran, slowest, highest)


if __name__ == "__main__":
    main()
