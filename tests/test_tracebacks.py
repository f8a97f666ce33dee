"""What a worker's stderr says of its end, read from what Python really prints."""

import json
import os
import re
import subprocess
import sys
from textwrap import dedent

import pytest

from samestep.failure import read_failure
from samestep.rundir import failure_path
from samestep.start.output import _TRACEBACK
from samestep.tracebacks import (
    Traceback,
    describe_end,
    exit_code,
    read_traceback,
    recorded_traceback,
)


def traceback_of(tmp_path, source: str) -> Traceback | None:
    script = tmp_path / "train.py"
    script.write_text(dedent(source))
    ended = subprocess.run([sys.executable, "-X", "faulthandler", script], capture_output=True, text=True)
    assert ended.returncode != 0
    return read_traceback(ended.stderr)


_RECORDED = """
import os, runpy, sys
from samestep.failure import write_failure
def note_failure(kind, error, trace):
    sys.__excepthook__(kind, error, trace)
    write_failure(os.environ, error, 1)
sys.excepthook = note_failure
sys.path[0] = os.path.dirname(sys.argv[1])
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def record_of(tmp_path, source: str) -> Traceback | None:
    """What the record of a worker says that failed in this way."""
    script = tmp_path / "train.py"
    script.write_text(dedent(source))
    run = tmp_path / "run"
    (run / "failures").mkdir(parents=True)
    env = os.environ | {"SAMESTEP_RUN": str(run), "RANK": "2"}
    with subprocess.Popen(
        [sys.executable, "-c", _RECORDED, script], stderr=subprocess.PIPE, text=True, env=env
    ) as worker:
        worker.communicate()
    failure = read_failure(failure_path(run, 2), worker.pid)
    return recorded_traceback(failure) if failure else None


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


_SLOW = "torch's loader worker"
_NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name == _SLOW)) for name in CASES if name != "crash"]


@pytest.mark.parametrize("name", [*_NAMES, "crash"])
def test_the_users_own_line_and_the_exception_are_found(tmp_path, name):
    source, (line, function, code, exception) = CASES[name]
    found = one_line(traceback_of(tmp_path, source))
    assert found[:3] == (line, function, code)
    assert found[3].startswith(exception)


@pytest.mark.parametrize("name", _NAMES)
def test_a_record_says_the_same_as_stderr(tmp_path, name):
    source, (line, function, code, exception) = CASES[name]
    found = one_line(record_of(tmp_path, source))
    assert found[:3] == (line, function, code)
    assert found[3].startswith(exception)


def test_a_process_that_crashed_left_no_record(tmp_path):
    assert record_of(tmp_path, "import os\nos._exit(3)") is None


# What Python 3.13 writes under FORCE_COLOR=1.
_COLOURED = {
    "plain": (
        "Traceback (most recent call last):\n"
        '  File \x1b[35m"/tmp/t.py"\x1b[0m, line \x1b[35m3\x1b[0m, in \x1b[35m<module>\x1b[0m\n'
        "    \x1b[31mf\x1b[0m\x1b[1;31m()\x1b[0m\n"
        "    \x1b[31m~\x1b[0m\x1b[1;31m^^\x1b[0m\n"
        '  File \x1b[35m"/tmp/t.py"\x1b[0m, line \x1b[35m2\x1b[0m, in \x1b[35mf\x1b[0m\n'
        "    return \x1b[31m[]\x1b[0m\x1b[1;31m[3]\x1b[0m\n"
        "           \x1b[31m~~\x1b[0m\x1b[1;31m^^^\x1b[0m\n"
        "\x1b[1;35mIndexError\x1b[0m: \x1b[35mlist index out of range\x1b[0m\n",
        (2, "f", "return [][3]", "IndexError: list index out of range"),
    ),
    "syntax error": (
        '  File \x1b[35m"/tmp/t.py"\x1b[0m, line \x1b[35m2\x1b[0m\n'
        "    def f(\x1b[1;31m:\x1b[0m\n"
        "          \x1b[1;31m^\x1b[0m\n"
        "\x1b[1;35mSyntaxError\x1b[0m: \x1b[35minvalid syntax\x1b[0m\n",
        (2, "", "def f(:", "SyntaxError: invalid syntax"),
    ),
    "group": (
        "  + Exception Group Traceback (most recent call last):\n"
        '  |   File \x1b[35m"/tmp/t.py"\x1b[0m, line \x1b[35m6\x1b[0m, in \x1b[35m<module>\x1b[0m\n'
        "  |     raise ExceptionGroup('many', [ExceptionGroup('inner', [e]), TypeError('t')])\n"
        "  | \x1b[1;35mExceptionGroup\x1b[0m: \x1b[35mmany (1 sub-exception)\x1b[0m\n"
        "  +-+---------------- 1 ----------------\n"
        "    | Traceback (most recent call last):\n"
        '    |   File "/tmp/t.py", line 2, in g\n'
        "    |     raise KeyError('k')\n"
        "    | KeyError: 'k'\n"
        "    +------------------------------------\n",
        (2, "g", "raise KeyError('k')", "KeyError: 'k'"),
    ),
}


@pytest.mark.parametrize("name", _COLOURED)
def test_a_coloured_traceback_is_read(name):
    stderr, expected = _COLOURED[name]
    assert one_line(read_traceback(stderr)) == expected


@pytest.mark.parametrize("name", _COLOURED)
def test_a_coloured_traceback_is_held_back_as_any_other(name):
    found = _TRACEBACK.search(b"loss 0.3\n" + _COLOURED[name][0].encode())
    assert found is not None
    assert found.start() == len(b"loss 0.3\n")


_HARD_TO_PRINT = {
    "a str() that raises": (
        "class E(Exception):\n def __str__(self): 1/0\nraise E",
        r"E: <exception str\(\) failed>",
    ),
    "control characters": ("raise ValueError('\\x1b[2J\\x07\\udc80')", r"ValueError: \\x1b\[2J\\x07\\udc80"),
    "a message of 100 MB": ("raise ValueError('x' * 10**8)", "ValueError: x{385}\\.\\.\\."),
    "no exception to speak of": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
}


@pytest.mark.parametrize("name", _HARD_TO_PRINT)
def test_a_record_of_what_is_hard_to_print_is_bounded_and_plain(tmp_path, name):
    source, exception = _HARD_TO_PRINT[name]
    found = record_of(tmp_path, source)
    assert found is not None
    assert re.fullmatch(exception, found.exception[0])
    path = failure_path(tmp_path / "run", 2)
    assert path.stat().st_size < 40_000
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_record_of_another_process_or_a_torn_one_is_not_believed(tmp_path):
    path = tmp_path / "rank-0.json"
    whole = {"exception": "E: x", "group": "", "cause": "", "frames": [], "code": 1, "pid": 7}
    path.write_text(json.dumps(whole))
    assert read_failure(path, 7) is not None
    assert read_failure(path, 8) is None
    path.write_text(json.dumps(whole | {"frames": [["a"]]}))
    assert read_failure(path, 7) is None
    path.write_text(json.dumps(whole)[:40])
    assert read_failure(path, 7) is None


@pytest.mark.slow
@pytest.mark.parametrize("read", [traceback_of, record_of])
def test_how_a_loader_worker_ended_is_told(tmp_path, read):
    found = read(
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


@pytest.mark.parametrize("read", [traceback_of, record_of])
def test_a_long_message_keeps_its_beginning(tmp_path, read):
    found = read(tmp_path, "raise ValueError('\\n'.join('abcdefgh'))")
    assert found is not None
    assert found.exception == ("ValueError: a", "b", "c", "... (more lines in the log)")


@pytest.mark.parametrize(
    ("call", "exception"),
    [
        ("multiprocessing.get_context('fork').Pool(1).map(bad, [3])", "ValueError: row 3"),
        ("list(ProcessPoolExecutor(1).map(bad, [3]))", "ValueError: row 3"),
        ("list(library(bad))", "RuntimeError: generator raised StopIteration"),
    ],
)
def test_the_line_is_told_that_raised_in_a_process_of_a_pool_or_below_a_library(tmp_path, call, exception):
    (tmp_path / "site-packages").mkdir()
    library = "def rows(bad):\n    yield bad(None)\ndef library(bad):\n    yield from rows(bad)\n"
    (tmp_path / "site-packages" / "library.py").write_text(library)
    source = f"""
        import multiprocessing, sys
        from concurrent.futures import ProcessPoolExecutor
        sys.path.append({str(tmp_path / "site-packages")!r})
        from library import library
        def bad(row):
            raise ValueError(f"row {{row}}") if row else StopIteration
        {call}
    """
    line, name, _, said = one_line(record_of(tmp_path, source))
    assert (line, name, said) == (7, "bad", exception)


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


IGNORED = """
import sys
class Held:
    def __del__(self):
        sys.nothing
held = Held()
{end}
"""


@pytest.mark.parametrize(
    ("end", "said"), [("1/0", ["ZeroDivisionError: division by zero"]), ("sys.exit(7)", [])]
)
def test_an_exception_that_python_ignored_is_no_cause(tmp_path, end, said):
    found = traceback_of(tmp_path, IGNORED.format(end=end))
    assert [*(found.exception if found else ())] == said


def test_a_clean_exit_with_a_message_is_no_traceback(tmp_path):
    assert traceback_of(tmp_path, "raise SystemExit('no such data set')") is None


@pytest.mark.parametrize(
    ("raised", "echo"),
    [
        ("RuntimeError('[pair.cc:553] Connection closed by peer [127.0.0.1]:22668')", True),
        ("RuntimeError('Connection reset by peer')", True),
        ("RuntimeError('bad shard')", False),
        ("ConnectionRefusedError(111, 'Connection refused')", False),  # by a server of the script's own
    ],
)
def test_an_echo_of_another_ranks_end_is_known(tmp_path, raised, echo):
    found = traceback_of(tmp_path, f"raise {raised}")
    assert found is not None
    assert found.is_echo is echo


def test_ends_are_named_as_a_shell_numbers_them():
    assert (describe_end(-9), exit_code(-9)) == ("killed by SIGKILL", 137)
    assert (describe_end(77), exit_code(77)) == ("exit code 77", 77)
    assert describe_end(120).endswith("Python could not write out what was printed)")
