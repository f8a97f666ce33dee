"""Stops a commit at every system call it makes, by a death or an error, and reads what is then there.

python tests/crash_points.py: SIGKILL, EIO, ENOSPC, EDQUOT and EINTR at each call, by strace.
python tests/crash_points.py --quick: the first three, at the calls that change something.
"""

import argparse
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from samestep.errors import CheckpointError
from samestep.state import file as carry
from samestep.state.directory import CheckpointDirectory
from samestep.state.lease import NAME as LEASE

CHANGING = ("fallocate", "pwritev2", "pwrite64", "fsync", "fdatasync", "renameat", "unlinkat")
CALLS = (*CHANGING, "flock", "utimensat", "openat", "close", "fcntl", "fstatfs", "newfstatat", "getdents64")
FAULTS = ("signal=KILL", "error=EIO", "error=ENOSPC", "error=EDQUOT", "error=EINTR")
SKIPPED = 3


def state(step):
    return {"step": step, "blobs": [b"%d of %d" % (i, step) * 99 for i in range(80)]}


def commit(directory):
    commits = CheckpointDirectory(directory)
    assert commits.newest(read).value["step"] == 2
    packed = carry.pack(state(3), {"step": 3})
    os.path.exists("/begin")
    try:
        commits.commit(packed, 3)
    except CheckpointError as error:
        os._exit(SKIPPED if str(error).startswith("checkpoint skipped: ") else 1)
    os.path.exists("/end")
    os._exit(0)


def read(name, dir_fd):
    return carry.read(name, dir_fd=dir_fd)[0]


def traced(directory, log, calls, *options):
    """The exit code of a commit under strace, and its calls between begin and end, numbered by name."""
    command = [
        "strace",
        "-f",
        "-o",
        log,
        "-e",
        f"trace={','.join(calls)},newfstatat",
        *options,
    ]
    code = subprocess.run([*command, sys.executable, "-B", __file__, "--commit", directory]).returncode
    counts, found, inside = dict.fromkeys(CALLS, 0), [], False
    for line in log.read_text().splitlines():
        match = re.match(r"\d+ +(\w+)\(", line)
        if match and match[1] in counts:
            counts[match[1]] += 1
            inside = (inside or '"/begin"' in line) and '"/end"' not in line
            if inside and '"/begin"' not in line:
                found.append((match[1], counts[match[1]], line))
    return code, found


def wrong(directory, code):
    """What is not as promised after a commit that ended with `code`, in words; nothing when all is."""
    names = set(os.listdir(directory)) - {LEASE}
    good = []
    for entry in carry.listing(directory):
        try:
            found = carry.read(directory / entry.name)[0]
        except CheckpointError as error:
            return f"a damaged file stands under its name: {error}"
        if found != state(entry.step):
            return "a file mixes states"
        if stat.S_IMODE(os.stat(directory / entry.name).st_mode) != 0o600:
            return "others may read it"
        good.append(entry.step)
    if code not in (0, SKIPPED, -9):
        return f"it ended with {code}"
    if len(good) < 2 or good[0] not in ((3,) if code == 0 else (2, 3)):
        return f"it left {good}"
    if code != -9 and len(names) > len(good):
        return f"it left {names}"
    CheckpointDirectory(directory).commit(carry.pack(state(4)), 4)
    if CheckpointDirectory(directory).newest(read).value != state(4) or any(
        ".writing" in name for name in os.listdir(directory)
    ):
        return f"the next commit left {os.listdir(directory)}"
    return ""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--commit", type=Path)
    arguments = parser.parse_args()
    if arguments.commit:
        commit(arguments.commit)
    calls, faults = (CHANGING, FAULTS[:3]) if arguments.quick else (CALLS, FAULTS)
    with tempfile.TemporaryDirectory() as base, ThreadPoolExecutor(os.cpu_count()) as at_once:
        old = Path(base, "old")
        for step in (1, 2):
            CheckpointDirectory(old).commit(carry.pack(state(step)), step)

        def tried(number, *options):
            """How a commit ended, its calls, and what is not as promised after it."""
            directory = Path(base, f"tried-{number}")
            shutil.copytree(old, directory)
            code, found = traced(directory, Path(base, f"log-{number}"), calls, *options)
            return code, found, wrong(directory, code)

        _, points, problem = tried("undisturbed")
        failures = [f"undisturbed: {problem}"] if problem else []
        faulty = [(*point, fault) for point in points for fault in faults]
        injected = [f"inject={name}:{fault}:when={number}" for name, number, _, fault in faulty]
        ends = {0: 0, SKIPPED: 0, -9: 0}
        outcomes = at_once.map(lambda pair: tried(pair[0], "-e", pair[1]), enumerate(injected))
        for (_, _, line, fault), (code, _, problem) in zip(faulty, outcomes, strict=True):
            ends[code] = ends.get(code, 0) + 1
            if problem:
                failures.append(f"{fault} at {line[:100]}: {problem}")
    print(
        f"crash points {len(points)} | faults {len(points) * len(faults)} | killed {ends[-9]} | skipped "
        f"{ends[SKIPPED]} | committed {ends[0]} | neither old nor new, or a mix: {len(failures)}"
    )
    print(*failures, sep="\n")
    sys.exit(bool(failures or ends[-9] < len(points)))


if __name__ == "__main__":
    main()
