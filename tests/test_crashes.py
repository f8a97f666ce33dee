"""What C++, C and a device's kernels print before a process is aborted, and what is told of it."""

import os
import subprocess
import sys

from samestep.tracebacks import read_traceback, with_assertion


def test_a_crash_in_a_thread_of_torch_is_told_with_the_scripts_line_and_what_gloo_said(tmp_path):
    stderr = f"""
terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at pair.cc:456] 644 vs 12. Received data size doesn't match expected size. Is there a
Fatal Python error: Aborted

Thread 0x00007f37680696c0 (most recent call first):
  File "{os.__file__}", line 3 in wait

Thread 0x00007f378adf5b80 (most recent call first):
  File "{os.__file__}", line 4 in backward
  File "{tmp_path}/train.py", line 14 in <module>
"""
    found = read_traceback(stderr)
    assert found.frame.place.endswith("train.py:14")
    aborted, said, remedy = found.exception
    assert (aborted, said[:29]) == ("Fatal Python error: Aborted", "[enforce fail at pair.cc:456]")
    assert remedy.startswith("two ranks brought unlike data to one exchange")


ON_GPU = (
    "/pytorch/aten/src/ATen/native/cuda/IndexKernel.cu:111: operator(): block: [0,0,0], thread: [3,0,0] Assertion "
    '`-sizes[i] <= index && index < sizes[i] && "index out of bounds"` failed.'
)
RAISED = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
torch.AcceleratorError: CUDA error: device-side assert triggered
Search for `cudaErrorAssert' in a manual
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace may be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""


def test_a_kernels_assertion_is_told_with_a_way_to_see_its_line():
    thrown = (
        "terminate called after throwing an instance of 'c10::AcceleratorError'\n"
        "  what():  CUDA error: device-side assert triggered\n"
    )
    for stderr in (
        f"{ON_GPU}\n{ON_GPU}\n{thrown}Fatal Python error: Aborted\n",
        f"{ON_GPU}\nFatal Python error: Aborted\n",
        f"{ON_GPU}\n{RAISED}",
    ):
        found = with_assertion(read_traceback(stderr), stderr)
        *_, assertion, remedy = found.exception
        assert assertion.startswith("IndexKernel.cu:111: assertion `-sizes[i] <= index")
        assert "CUDA_LAUNCH_BLOCKING=1 samestep run" in remedy
        assert len(found.exception) == 3


def test_an_assertion_of_c_is_told(tmp_path):
    script = tmp_path / "train.py"
    call = "ctypes.CDLL(None).__assert_fail(b'n > 0', b'net.c', 31, b'forward')"
    script.write_text(f"import ctypes, faulthandler\nfaulthandler.enable()\n{call}\n")
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    found = with_assertion(read_traceback(ran.stderr), ran.stderr)
    assert found.exception == ("Fatal Python error: Aborted", "net.c:31: assertion `n > 0` failed")
    assert found.frame.place.endswith("train.py:3")
