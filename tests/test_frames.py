"""Reading the frames of a thread that runs."""

import subprocess
import sys

import pytest

from samestep.failure import stack_of, torchs_wait


def test_an_instruction_without_a_line_has_that_of_its_function():
    def stack():
        return sys._getframe().f_lineno, list(stack_of(sys._getframe()))

    stack.__code__ = stack.__code__.replace(co_linetable=b"")
    line, (innermost, *_) = stack()
    assert (line, innermost.line) == (None, stack.__code__.co_firstlineno)
    assert torchs_wait([innermost], 0) == ""


_WATCHED = """
import gc, threading, time
from samestep.failure import frames_of_thread, handled_by_thread
main, ended = threading.get_ident(), time.monotonic() + 3
class Cycle:
    def __init__(self):
        self.own = self
    def __del__(self):
        time.sleep(0.0005)  # lets the main thread go on
def watch():
    for reads in range(10**6):
        if time.monotonic() > ended:
            return
        Cycle()
        gc.set_threshold(1 + reads % 40)
        assert frames_of_thread(main) and handled_by_thread(main) is None
        time.sleep(0.001)
def nested(depth):
    return depth and nested(depth - 1)
threading.Thread(target=watch).start()
while time.monotonic() < ended:
    nested(30), [nested(depth) for depth in range(5)]
"""


@pytest.mark.slow
def test_a_thread_whose_frames_are_read_goes_on_while_garbage_is_collected():
    assert subprocess.run([sys.executable, "-c", _WATCHED]).returncode == 0
