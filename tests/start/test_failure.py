"""What a worker's stderr says of its end, read from what Python really prints."""

import subprocess
import sys
from textwrap import dedent

import pytest

from samestep.start.failure import Traceback, describe_end, exit_code, read_traceback


def traceback_of(tmp_path, source: str) -> Traceback | None:
    script = tmp_path / "train.py"
    script.write_text(dedent(source))
    ended = subprocess.run([sys.executable, "-X", "faulthandler", script], capture_output=True, text=True)
    assert ended.returncode != 0
    return read_traceback(ended.stderr)


def one_line(traceback: Traceback | None) -> tuple[int, str, str, str]:
    assert traceback is not None
    assert traceback.frame is not None
    return traceback.frame.line, traceback.frame.name, traceback.frame.code, traceback.exception[0]


CASES = {
    "plain": (
        "def f():\n    return [][3]\nf()",
        (2, "f", "return [][3]", "IndexError: list index out of range"),
    ),
    "inside a library": (
        "import json\njson.loads('{')",
        (
            2,
            "<module>",
            "json.loads('{')",
            "json.decoder.JSONDecodeError: Expecting property name enclosed in",
        ),
    ),
    "syntax error": ("x = 1\ndef f(:\n  pass", (2, "", "def f(:", "SyntaxError: invalid syntax")),
    "chained": (
        "try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise ValueError('x') from e",
        (4, "<module>", "raise ValueError('x') from e", "ValueError: x"),
    ),
    "without a message": ("class E(Exception): pass\nraise E", (2, "<module>", "raise E", "E")),
    "group": (
        """
        def g():
            raise KeyError('k')
        try:
            g()
        except Exception as e:
            raise ExceptionGroup('many', [ExceptionGroup('inner', [e]), TypeError('t')])
        """,
        (3, "g", "raise KeyError('k')", "KeyError: 'k'"),
    ),
    "after one that was only logged": (
        """
        import sys, traceback
        try:
            1/0
        except Exception:
            traceback.print_exc()
        print('going on', file=sys.stderr)
        raise KeyError(3)
        """,
        (8, "<module>", "raise KeyError(3)", "KeyError: 3"),
    ),
    "recursion": (
        "def f(): f()\nf()",
        (1, "f", "def f(): f()", "RecursionError: maximum recursion depth exceeded"),
    ),
    "crash": (
        "import ctypes\ndef h():\n    ctypes.string_at(0)\nh()",
        (3, "h", "ctypes.string_at(0)", "Fatal Python error: Segmentation fault"),
    ),
    "a message that shows a stack, as torch.compile's does": (
        """
        raise RuntimeError('''no branch on data

        from user code:
           File "model.py", line 4, in forward
            if x.sum() > 0:

        Set TORCHDYNAMO_VERBOSE=1 for more''')
        """,
        (2, "<module>", "raise RuntimeError('''no branch on data", "RuntimeError: no branch on data"),
    ),
    "a message that quotes how a traceback begins": (
        "raise RuntimeError('remote:\\nTraceback (most recent call last):\\n  lost')",
        (
            1,
            "<module>",
            "raise RuntimeError('remote:\\nTraceback (most recent call last):\\n  lost')",
            "RuntimeError: remote:",
        ),
    ),
    "torch's loader worker": (
        """
        from torch.utils.data import DataLoader, Dataset
        class Shards(Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                return {}["a"]
        list(DataLoader(Shards(), num_workers=1))
        """,
        (7, "__getitem__", 'return {}["a"]', "KeyError: 'a'"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_users_own_line_and_the_exception_are_found(tmp_path, name):
    source, (line, function, code, exception) = CASES[name]
    found = one_line(traceback_of(tmp_path, source))
    assert found[:3] == (line, function, code)
    assert found[3].startswith(exception)


def test_how_a_loader_worker_ended_is_told(tmp_path):
    found = traceback_of(
        tmp_path,
        """
        import os
        from torch.utils.data import DataLoader
        class Shards:
            def __len__(self):
                return 4
            def __getitem__(self, index):
                os.kill(os.getpid(), 9)
        for batch in DataLoader(Shards(), num_workers=1):
            pass
        """,
    )
    assert found is not None
    assert found.frame is not None
    assert found.frame.line == 9
    assert found.exception[0].endswith("is killed by signal: Killed.")


def test_a_syntax_error_in_an_imported_file_is_shown_there(tmp_path):
    (tmp_path / "model.py").write_text("x = = 3\n")
    found = traceback_of(tmp_path, "import model")
    assert found is not None
    assert found.frame is not None
    assert (found.frame.file, found.frame.code) == (str(tmp_path / "model.py"), "x = = 3")


def test_a_long_message_keeps_its_beginning(tmp_path):
    found = traceback_of(tmp_path, "raise ValueError('\\n'.join('abcdefgh'))")
    assert found is not None
    assert found.exception == ("ValueError: a", "b", "c", "... (5 more lines in the log)")


def test_torchs_rank_prefix_and_noise_are_left_out():
    found = read_traceback(
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/home/me/train.py", line 3, in <module>\n'
        "[rank1]:     main()\n"
        "[rank1]: ValueError: bad\n"
        "[rank1]:[W1121 09:41:05.968741957 ProcessGroupNCCL.cpp:1496] Warning: destroy was not called\n"
    )
    assert found is not None
    assert found.exception == ("ValueError: bad",)


def test_a_clean_exit_with_a_message_is_no_traceback(tmp_path):
    assert traceback_of(tmp_path, "raise SystemExit('no such data set')") is None


@pytest.mark.parametrize(
    ("message", "echo"),
    [
        ("[pair.cc:553] Connection closed by peer [127.0.0.1]:22668", True),
        ("Connection reset by peer", True),
        ("bad shard", False),
    ],
)
def test_an_echo_of_another_ranks_end_is_known(tmp_path, message, echo):
    found = traceback_of(tmp_path, f"raise RuntimeError({message!r})")
    assert found is not None
    assert found.is_echo is echo


def test_ends_are_named_as_a_shell_numbers_them():
    assert (describe_end(-9), exit_code(-9)) == ("killed by SIGKILL", 137)
    assert (describe_end(77), exit_code(77)) == ("exit code 77", 77)
