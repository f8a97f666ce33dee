"""Cuts the power at every moment of some commits, and reads what may then be on the disk: python tests/power_loss.py

The real writer's system calls are recorded by strace. After each of them the power may fail: what was synced is
there; of the rest any part may be, in any order, sectors of a write and names in a directory apart from each other.
In every such state the newest good commit must be the last one that was acknowledged, or the one under way. Then
each sync is left out in turn: without it some state must be wrong, or the sync has no use.
"""

import argparse
import ast
import itertools
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from samestep.errors import CheckpointError
from samestep.state import file as state_file
from samestep.state.directory import CheckpointDirectory

CALLS = (
    "openat", "mkdir", "mkdirat", "pwritev", "pwritev2", "pwrite64", "write", "fsync", "fdatasync", "rename",
    "renameat", "renameat2", "unlink", "unlinkat", "fallocate", "ftruncate", "newfstatat",
)  # fmt: skip
COMMITS = 5
SECTOR = 512
MOST_STATES = 4096
LINE = re.compile(r"\d+ +(\w+)\((.*)\) += (-?\d+)")
STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
PATH = re.compile(r"<((?:\\x[0-9a-f]{2})+)>")


def work(directory):
    """What is recorded: commits, the second half by another process's object, and the mark after each."""
    for numbers in (range(1, 4), range(4, COMMITS + 1)):
        commits = CheckpointDirectory(directory / "deep" / "run")
        commits.newest(read)
        for step in numbers:
            commits.commit(state_file.pack({"step": step, "blob": bytes([step]) * 1500}), step)
            os.path.exists(f"/committed-{step}")
        commits.release()


def read(name, dir_fd):
    return state_file.read(name, dir_fd=dir_fd)[0]["step"]


def text(hexed):
    return ast.literal_eval(f"b'{hexed}'")


def recorded(directory, log):
    """The calls that change something below the directory, as (what, where, ...)."""
    command = [
        "strace",
        "-f",
        "-y",
        "-v",
        "-xx",
        "-s",
        "1000000",
        "-o",
        log,
        "-e",
        f"trace={','.join(CALLS)}",
    ]
    subprocess.run([*command, sys.executable, "-B", __file__, "--work", directory], check=True)
    found = []
    for line in completed(log.read_text().splitlines()):
        if (match := LINE.match(line)) and not match[3].startswith("-"):
            found += of_call(match[1], match[2], str(directory))
        elif match and b"/committed-" in text("".join(STRING.findall(match[2])[:1])):
            found.append(("mark", "", ""))
    return found


def completed(lines):
    """The calls in the order in which they ended: strace breaks a line where another thread comes between."""
    begun = {}
    for line in lines:
        pid, _, rest = line.partition(" ")
        if rest.endswith("<unfinished ...>"):
            begun[pid] = line.removesuffix("<unfinished ...>").rstrip()
        elif " resumed>" in rest:
            yield begun.pop(pid) + rest.partition(" resumed>")[2]
        else:
            yield line


def of_call(name, words, below):
    """One call as operations on names and on files, or nothing where it changes nothing below the directory."""
    strings = [text(quoted) for quoted in STRING.findall(words)]
    places = [os.fsdecode(text(quoted)) for quoted in PATH.findall(words)]
    here = places[0] if places else ""
    if name in ("pwritev", "pwritev2", "pwrite64", "write") and here.startswith(below):
        offset = 0 if name == "write" else int(words.split(", ")[-2 if name == "pwritev2" else -1])
        data = b"".join(strings)
        return [("data", here, (offset + at, data[at : at + SECTOR])) for at in range(0, len(data), SECTOR)]
    if name == "fallocate" and here.startswith(below):
        return [("size", here, int(words.split(", ")[-1]))]
    if name in ("fsync", "fdatasync") and here.startswith(below):
        return [("sync", here, "")]
    paths = [
        os.path.join(folder, os.fsdecode(string))
        for folder, string in zip(places or [""] * 2, strings, strict=False)
    ]
    if not paths or not paths[-1].startswith(below + "/"):
        return []
    if name == "openat" and "O_CREAT" in words:
        return [("create", paths[0], "")]
    if name.startswith("rename"):
        return [("rename", paths[0], paths[1])]
    return (
        [
            (
                {"mkdir": "mkdir", "mkdirat": "mkdir", "unlinkat": "unlink", "unlink": "unlink"}[name],
                paths[0],
                "",
            )
        ]
        if (name in ("mkdir", "mkdirat", "unlink", "unlinkat"))
        else []
    )


def is_durable(operations, index, end):
    """Whether a sync before the power failed covers an operation."""
    what, where, _ = operations[index]
    target = where if what in ("data", "size") else os.path.dirname(where)
    return any(op[:2] == ("sync", target) for op in operations[index + 1 : end])


def states(operations, end, rng, most):
    """Every choice of operations that the disk may have when the power fails after `end` of them."""
    changing = [i for i in range(end) if operations[i][0] not in ("sync", "mark")]
    sure = [i for i in changing if is_durable(operations, i, end)]
    pending = [i for i in changing if i not in set(sure)]
    choices = itertools.chain.from_iterable(
        itertools.combinations(pending, count) for count in range(len(pending) + 1)
    )
    if 2 ** len(pending) > most:
        prefixes = [tuple(pending[:count]) for count in range(len(pending) + 1)]
        without = [tuple(i for i in pending if i != left) for left in pending]
        sampled = [tuple(i for i in pending if rng.random() < 0.5) for _ in range(most)]
        choices = [*prefixes, *without, *sampled]
    for choice in choices:
        yield sorted((*sure, *choice))


def disk_after(operations, applied):
    """Names and contents that these operations leave: files are known by the name they were made under."""
    names, contents, folders = {}, Counter(), set()
    # what was made under a name stays reachable by later operations, also where that name was lost
    made = {}
    for index, (what, where, more) in enumerate(operations):
        if what == "create" and where not in made:
            made[where] = where
        if what == "rename":
            made[more] = made.get(where, where)
        if index not in applied:
            continue
        if what == "mkdir":
            folders.add(where)
        elif what == "create":
            names.setdefault(where, made[where])
        elif what == "rename":
            names.pop(where, None)
            names[more] = made[more]
        elif what == "unlink":
            names.pop(where, None)
        else:
            file = made.get(where, where)
            old = contents[file] or b""
            at, data = (more, b"") if what == "size" else more
            contents[file] = old.ljust(at, b"\0")[:at] + data + old[at + len(data) :]
    return names, contents, folders


class Disk:
    """Builds a disk's state in a directory, and says what is found there."""

    def __init__(self, below, build):
        self.below, self.build, self.known = below, build, {}

    def newest(self, operations, applied):
        names, contents, folders = disk_after(operations, set(applied))
        reachable = {
            name: file for name, file in names.items() if self.is_there(os.path.dirname(name), folders)
        }
        key = (*sorted((name, contents[file] or b"") for name, file in reachable.items()), *sorted(folders))
        if key not in self.known:
            self.known[key] = self.found(reachable, contents, folders)
        return self.known[key]

    def is_there(self, folder, folders):
        return folder == self.below or (folder in folders and self.is_there(os.path.dirname(folder), folders))

    def found(self, names, contents, folders):
        shutil.rmtree(self.build, ignore_errors=True)
        self.build.mkdir()
        for folder in sorted(folders):
            if self.is_there(folder, folders):
                (self.build / os.path.relpath(folder, self.below)).mkdir()
        for name, file in names.items():
            (self.build / os.path.relpath(name, self.below)).write_bytes(contents[file] or b"")
        try:
            found = CheckpointDirectory(self.build / "deep" / "run").newest(read)
        except CheckpointError as error:
            return str(error)
        return found.value if found else 0


def wrong(operations, disk, rng, most):
    """How many states were looked at, and the first that is neither the old nor the new one."""
    count = acknowledged = 0
    for end in range(len(operations) + 1):
        acknowledged += end > 0 and operations[end - 1][0] == "mark"
        for applied in states(operations, end, rng, most):
            count += 1
            found = disk.newest(operations, applied)
            if found not in (acknowledged, acknowledged + 1):
                return count, f"after {operations[end - 1][:2]} with {acknowledged} acknowledged: {found}"
    return count, ""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--states", type=int, default=MOST_STATES, help="tried at most at each moment")
    arguments = parser.parse_args()
    if arguments.work:
        work(arguments.work)
        return
    with tempfile.TemporaryDirectory() as base:
        below = Path(base, "disk")
        below.mkdir()
        operations = recorded(below, Path(base, "log"))
        disk = Disk(str(below), Path(base, "build"))
        rng = random.Random(arguments.seed)
        count, problem = wrong(operations, disk, rng, arguments.states)
        syncs = [i for i, op in enumerate(operations) if op[0] == "sync"]
        needless = [
            f"sync {operations[i][1]} after {operations[i - 1][:2]} can be left out"
            for i in syncs
            if not wrong([*operations[:i], *operations[i + 1 :]], disk, rng, arguments.states)[1]
        ]
    print(
        f"operations {len(operations)} | states {count}, different {len(disk.known)} | neither old nor new "
        f"{int(bool(problem))} | syncs {len(syncs)}, needless {len(needless)}"
    )
    print(*([problem] if problem else []), *needless, sep="\n")
    sys.exit(bool(problem or needless or operations.count(("mark", "", "")) != COMMITS))


if __name__ == "__main__":
    main()
