"""On a terminal the launcher draws how far a run is, below the script's own lines, and leaves nothing of it behind."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios

import pytest

TRAIN = """
import time, torch, samestep
samestep.init()
model = samestep.replicate(torch.nn.Linear(4, 1))
train = samestep.loader(torch.utils.data.TensorDataset(torch.ones(40, 4)), 1)
for epoch in train.epochs(2):
    for step, (x,) in enumerate(train):
        model(x).sum().backward()
        time.sleep(0.02)
    print("epoch", epoch, "is over", flush=True)
"""


def on_a_terminal(launcher, columns=0, **env) -> bytes:
    """What a terminal gets of a run of one process."""
    launcher.write(TRAIN)
    pid, descriptor = pty.fork()
    if pid == 0:
        os.chdir(launcher.home)
        told = {**launcher.env, "TERM": "xterm", **env}
        os.execve(sys.executable, [sys.executable, "-m", "samestep", "run", "-n", "1", "train.py"], told)
    fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    seen = b""
    try:
        while data := os.read(descriptor, 4096):
            seen += data
    except OSError:  # Linux says the end so
        pass
    finally:
        os.close(descriptor)
    assert os.waitpid(pid, 0)[1] == 0, seen
    return seen


@pytest.mark.slow
def test_a_live_line_is_drawn_and_taken_back(launcher):
    seen = on_a_terminal(launcher)
    drawn = re.findall(
        rb"epoch \d of 2, step \d+, [\d,]+ samples/s, [\d.]+ s left, loss [-\d.e]+\r\x1b\[K", seen
    )
    assert len(drawn) > 1
    left = re.sub(rb"[^\r\n]*\r\x1b\[K", b"", seen)
    assert left.split() == b"epoch 0 is over epoch 1 is over".split()


@pytest.mark.slow
def test_a_narrow_terminal_gets_the_first_facts_of_the_live_line_and_none_of_them_cut(launcher):
    seen = on_a_terminal(launcher, columns=30)
    drawn = re.findall(rb"(epoch \d of 2[^\r]*)\r\x1b\[K", seen)
    assert len(drawn) > 1
    facts = rb"epoch \d of 2, step \d+(, [\d,]+ samples/s)?(, [\d.]+ s left)?(, loss -?[\d.]+)?"
    assert all(re.fullmatch(facts, line) and len(line) < 30 for line in drawn), drawn


@pytest.mark.slow
def test_without_a_terminal_nothing_is_drawn(launcher):
    launcher.write(TRAIN)
    code, out, err = launcher.run("-n", "1", "train.py")
    assert (code, out, err) == (0, "epoch 0 is over\nepoch 1 is over\n", "")


@pytest.mark.slow
def test_a_terminal_that_cannot_take_back_gets_no_live_line(launcher):
    assert on_a_terminal(launcher, TERM="dumb").split() == b"epoch 0 is over epoch 1 is over".split()
