"""Attacks at the edges of a run: file modes, limits, leases, notes, memory, squatted names, and floods of addresses."""

import os
import stat
import subprocess
import sys
from textwrap import dedent

import pytest

pytestmark = pytest.mark.timeout(170)
PRECIOUS = "what was there before"
KEY = bytes(range(32))
AS_ROOT = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user"),
]
TRAIN = """
    import hashlib, os, signal, sys
    import torch, samestep
    world = samestep.init()
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(24, 8), torch.arange(24) % 2)
    train = samestep.loader(data, batch_size=8, shuffle=True)
    net = torch.nn.Linear(8, 2)
    model = samestep.replicate(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    run = samestep.Checkpoint("ck", every=1, model=net, optimizer=optimizer, train=train)
    first = run.resume()
    for epoch in train.epochs(2):
        for x, y in train:
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
            if os.environ.get("DIES") == str(run.steps) and not first and world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    if world.rank == 0:
        print("bits", hashlib.sha256(net.weight.detach().numpy().tobytes()).hexdigest(), flush=True)
"""


def run_in(home, *words, before="", **variables):
    (home / "train.py").write_text(dedent(TRAIN))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SAMESTEP", "OMP"))}
    command = f"{before} exec {sys.executable} -m samestep run {' '.join(words)} train.py"
    return subprocess.run(
        ["bash", "-c", command], cwd=home, env=clean | variables, capture_output=True, text=True, timeout=150
    )


def bits(done):
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("bits ")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return bits(run_in(tmp_path_factory.mktemp("undisturbed"), "--fork -n 2"))


# Files that a run leaves


@pytest.mark.slow
def test_no_file_of_a_run_is_open_to_others_whatever_the_umask(attempt, tmp_path, undisturbed):
    done = run_in(tmp_path, "--fork -n 2 --max-restarts 1", before="umask 0;", DIES="3")
    assert bits(done) == undisturbed
    made = [path for name in ("ck", "runs") for path in [tmp_path / name, *(tmp_path / name).rglob("*")]]
    assert len(made) > 10
    for path in made:
        attempt(f"umask 0: {path.name}")
        assert not stat.S_IMODE(path.lstat().st_mode) & 0o077, path


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_killed_run_leaves_nothing_in_the_memory_of_the_machine(attempt, tmp_path, undisturbed):
    attempt("killed in step 3, and resumed")
    (tmp_path / "train.py").write_text(dedent(TRAIN))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SAMESTEP", "OMP"))}
    inner = f"mount -t tmpfs tmpfs /dev/shm; {sys.executable} -m samestep run --fork -n 2 --max-restarts 2 train.py; "
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", f"{inner} echo left: $(ls /dev/shm)"],
        cwd=tmp_path, env=clean | {"DIES": "3"}, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert undisturbed[0] in done.stdout
    assert done.stdout.endswith("left:\n")


# Limits of the process and the machine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "says"),
    [
        ("ulimit -n 20;", "too many open files|open files"),
        ("ulimit -n 64;", None),
        ("ulimit -f 0;", "cannot be written"),
        ("mkdir ck; ulimit -f 10;", "File too large"),
        ("mkdir -p small; mount -t tmpfs -o size=100k tmpfs small; ln -s small ck;", "checkpoint skipped"),
        ("mkdir -p small; mount -t tmpfs -o size=4k tmpfs small; ln -s small runs;", None),
        ("mkdir -p runs; mount -t tmpfs -o ro tmpfs runs;", "cannot be written"),
        ("mkdir -p ck; mount -t tmpfs -o ro tmpfs ck;", "checkpoint skipped"),
    ],
    ids=str,
)
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_limit_ends_in_a_sentence_or_in_the_right_bits(attempt, tmp_path, undisturbed, before, says):
    attempt(before)
    inner = f"{before} exec {sys.executable} -m samestep run --fork -n 2 train.py"
    (tmp_path / "train.py").write_text(dedent(TRAIN))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SAMESTEP", "OMP"))}
    command = ["unshare", "-m", "bash", "-c", inner]
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=150)
    if says is None:
        assert bits(done) == undisturbed
        return
    assert done.returncode in (1, 2, 126)
    assert any(word in done.stderr for word in says.split("|")), done.stderr
    assert "checkpoint" not in says or undisturbed[0] in done.stdout
    assert "samestep/" not in done.stderr.replace("samestep/bin", ""), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("up", [False, True])
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a network")
def test_a_run_in_a_network_of_its_own_says_that_the_loop_is_down_or_goes_on(
    attempt, tmp_path, undisturbed, up
):
    attempt(f"a network namespace whose loop is {'up' if up else 'down'}")
    bring = "ip link set lo up;" if up else ""
    (tmp_path / "train.py").write_text(dedent(TRAIN))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SAMESTEP", "OMP"))}
    inner = f"{bring} exec {sys.executable} -m samestep run --fork -n 2 train.py"
    command = ["unshare", "-n", "bash", "-c", inner]
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=150)
    if up:
        assert bits(done) == undisturbed
    else:
        assert "bring the loopback interface up (`ip link set lo up`)" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["\x1b[31mevil %s%n $(touch canary)", "\udcff\udcfe"])
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can name a machine")
def test_a_hostile_name_of_the_machine_is_printed_as_text(attempt, tmp_path, undisturbed, name):
    attempt(f"a machine named {name!r}")
    (tmp_path / "name").write_bytes(os.fsencode(name))
    (tmp_path / "train.py").write_text(dedent(TRAIN))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SAMESTEP", "OMP"))}
    ours = f"{sys.executable} -m samestep"
    inner = f"cat name > /proc/sys/kernel/hostname; {ours} run --fork -n 2 train.py; touch ck/x; rm -r ck; touch ck;"
    inner += f"{ours} run --fork -n 2 train.py; {ours} runs; {ours} status; {ours} runs --json"
    done = subprocess.run(
        ["unshare", "-u", "bash", "-c", inner], cwd=tmp_path, env=clean, capture_output=True, timeout=150
    )
    said = done.stdout.decode(errors="surrogateescape") + done.stderr.decode(errors="surrogateescape")
    assert undisturbed[0] in said
    assert not {"\x1b", "\udcff"} & set(said)
    assert "samestep/" not in said.replace(str(tmp_path), "")
    assert not (tmp_path / "canary").exists()
