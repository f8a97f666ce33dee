"""A state comes back from its file exactly, or not at all and with the reason."""

import os
import re
import struct
import subprocess
import sys
from collections import Counter, OrderedDict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.errors import CheckpointError, UsageError
from samestep.state import file
from samestep.train.checkpoint import capture

TESTS = Path(__file__).parents[1]


def write(path, state, meta=None):
    packed = capture.pack(state, meta)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        file.write(fd, packed)
    finally:
        os.close(fd)
    return path


def there_and_back(tmp_path, state):
    return capture.read(write(tmp_path / "state", state))[0]


def refused(tmp_path, data):
    path = tmp_path / "damaged"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as by_verify:
        file.verify(path)
    with pytest.raises(CheckpointError) as by_read:
        capture.read(path)
    found, again = (str(error.value).partition(" (")[0] for error in (by_verify, by_read))
    assert found == again
    return found.removeprefix(f"{path} ")


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("name", sorted(capture._DTYPES))
def test_every_dtype_comes_back_to_the_bit(tmp_path, name):
    raw = torch.arange(64, dtype=torch.uint8) % 2 if name == "bool" else torch.arange(64, dtype=torch.uint8)
    tensor = raw.view(capture._DTYPES[name])
    for state in (tensor, tensor[:0], tensor[0], tensor[1::2]):
        back = there_and_back(tmp_path, state)
        assert (back.dtype, back.shape) == (state.dtype, state.shape)
        assert capture._bytes(back) == capture._bytes(state)


def test_strides_views_and_conjugates_come_back_as_the_values_they_show(tmp_path):
    base = torch.randn(4, 6)
    state = [base.t(), base[::2, 1:3], base.expand(3, 4, 6), torch.randn(3, dtype=torch.complex64).conj()]
    for sent, back in zip(state, there_and_back(tmp_path, state), strict=True):
        assert torch.equal(sent, back)
        assert back.is_contiguous()


def test_tied_tensors_are_written_once_and_come_back_tied(tmp_path):
    layer = torch.nn.Linear(64, 64)
    tied = {"a": layer.weight, "b": layer.weight.detach(), "c": layer.weight.detach().clone()}
    path = write(tmp_path / "state", tied)
    assert len(file.peek(path).blobs) == 2
    back = capture.read(path)[0]
    assert back["a"] is back["b"]
    assert back["a"] is not back["c"]
    assert back["a"].untyped_storage().nbytes() == back["a"].nbytes


@pytest.mark.parametrize(
    "bits", ["7ff8000000000001", "fff0000000000000", "8000000000000000", "0000000000000001"]
)
def test_floats_come_back_to_the_bit(tmp_path, bits):
    value = struct.unpack(">d", bytes.fromhex(bits))[0]
    assert struct.pack(">d", there_and_back(tmp_path, {"x": value})["x"]).hex() == bits


def test_values_come_back_with_their_types(tmp_path):
    state = {
        "none": None, "true": True, "one": 1, 1: "int key", "1": "str key", -5: 0,
        "big": -(10**5000), "edge": 2**63, "text": "é\0\ud800\n", "bytes": b"\0\xff",
        "empty": [{}, [], (), b"", ""], "tuple": (1, (2.5, [3])),
        "counter": Counter({30: 1}), "ordered": OrderedDict(b=1, a=2), "../../x": "/etc/passwd", "": {"": ""},
    }  # fmt: skip
    back = there_and_back(tmp_path, state)
    assert back == state
    assert list(back) == list(state)
    assert [type(value) for value in back.values()] == [type(value) for value in state.values()]
    assert type(back["true"]) is bool
    assert type(back["empty"][2]) is tuple


def test_numpys_scalars_come_back_as_pythons(tmp_path):
    state = {"rate": np.float64(0.1), "third": np.float32(1 / 3), "steps": np.int64(7), "on": np.bool_(True)}
    back = there_and_back(tmp_path, state)
    assert back == state
    assert [type(value) for value in back.values()] == [float, float, int, bool]


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(-(2**63), 2**63 - 1), inner)
    ),
    max_leaves=20,
)


@settings(max_examples=60, deadline=None)
@given(plain)
def test_any_plain_state_comes_back(tmp_path_factory, state):
    assert repr(there_and_back(tmp_path_factory.mktemp("any"), state)) == repr(state)


class Thing:
    pass


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Thing(), "optimizer.state.3.foo is a Thing, which a checkpoint cannot carry; give tensors"),
        ({1, 2}, "optimizer.state.3.foo is a set, "),
        (namedtuple("Pair", "a b")(1, 2), "optimizer.state.3.foo is a Pair, "),
        (len, "optimizer.state.3.foo is a builtin_function_or_method, "),
        (1j, "optimizer.state.3.foo is a complex, "),
        (torch.eye(2).to_sparse(), "optimizer.state.3.foo is a sparse_coo float32 tensor on cpu; "),
        (torch.empty(2, device="meta"), "optimizer.state.3.foo is a strided float32 tensor on meta; "),
        ({2.5: 1}, "optimizer.state.3.foo has a key that is a float; use str"),
        ({True: 1}, "optimizer.state.3.foo has a key that is a bool; use str"),
        ({2**63: 1}, "optimizer.state.3.foo has a key that is an int; use str, or int of at most 64 bits"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_carried_is_refused_by_its_place(value, reason):
    with pytest.raises(UsageError, match=re.escape(reason)):
        capture.pack({"optimizer": {"state": {3: {"foo": value}}}})


def test_a_state_that_contains_itself_is_refused():
    state = []
    state.append(state)
    with pytest.raises(UsageError, match="more than 64 levels deep"):
        capture.pack(state)


def test_the_outline_is_read_without_the_rest(tmp_path):
    path = write(tmp_path / "state", {"model": {"w": torch.ones(3, 5)}, "b": b"xy"}, {"step": 7, "seed": 0})
    found = file.peek(path)
    assert (found.meta, found.names, found.size) == (
        {"step": 7, "seed": 0},
        ("model.w", "b"),
        path.stat().st_size,
    )
    assert found.blobs == (("float32", (3, 5)), ("bytes", (2,)))
    assert [at % 64 for at, _ in found.offsets()] == [0, 0]


def test_the_pure_part_reads_states_of_bytes_without_torch(tmp_path):
    write(tmp_path / "state", {"a": b"xyz", "n": 1})
    program = (
        "import sys; from samestep.state import directory, file;"
        f"print(file.read({str(tmp_path / 'state')!r})); assert 'torch' not in sys.modules"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "({'a': b'xyz', 'n': 1}, {})\n"


def test_a_snapshot_is_a_copy_of_the_state_at_that_moment(tmp_path):
    state = {
        "a": torch.ones(5),
        "b": torch.arange(3),
        "c": torch.randn(4, 3).t(),
        "d": b"x",
        "e": torch.empty(0),
    }
    before = write(tmp_path / "before", state).read_bytes()
    arena = torch.empty(capture.pack(state).bulk, dtype=torch.uint8)
    packed = capture.pack(state, into=arena)
    state["a"].add_(1)
    fd = os.open(tmp_path / "after", os.O_WRONLY | os.O_CREAT)
    file.write(fd, packed)
    os.close(fd)
    assert (tmp_path / "after").read_bytes() == before


def test_a_write_cut_short_anywhere_goes_on_where_it_stopped(tmp_path, monkeypatch):
    state = {str(i): torch.randn(i * 37) for i in range(90)}
    whole = write(tmp_path / "whole", state).read_bytes()
    lengths = iter(range(1, 10_000))
    pwritev = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, some, at: pwritev(fd, [some[0][: next(lengths)]], at))
    assert write(tmp_path / "cut", state).read_bytes() == whole


def test_a_state_larger_than_a_piece_is_checked_in_every_piece(tmp_path):
    state = {"a": torch.arange(9 << 20, dtype=torch.uint8), "b": torch.ones(3)}
    path = write(tmp_path / "state", state)
    assert torch.equal(capture.read(path)[0]["a"], state["a"])
    start = file.peek(path).start
    for at in (0, 4 << 20, (9 << 20) - 1):
        data = bytearray(path.read_bytes())
        data[start + at] ^= 1
        assert refused(tmp_path, data) == "has a damaged a"


def test_a_commit_while_the_interpreter_ends_is_whole(tmp_path):
    program = f"""
import atexit, os
from samestep.state import file
def commit():
    fd = os.open({str(tmp_path / "last")!r}, os.O_WRONLY | os.O_CREAT)
    file.write(fd, file.pack({{"a": b"x" * 100}}))
atexit.register(commit)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stderr == ""
    assert capture.read(tmp_path / "last")[0] == {"a": b"x" * 100}


def test_what_is_no_regular_file_is_refused(tmp_path):
    write(tmp_path / "state", {})
    (tmp_path / "link").symlink_to("state")
    os.mkfifo(tmp_path / "pipe")
    for name, reason in {
        "link": "is a symbolic link",
        "pipe": "is not a regular file",
        ".": "is not a regular file",
        "none": "cannot be read (No such file or directory)",
    }.items():
        with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path / name} {reason}")):
            capture.read(tmp_path / name)


def test_a_torn_file_and_a_foreign_one_are_told_apart(tmp_path):
    data = write(tmp_path / "state", {"a": torch.ones(100)}).read_bytes()
    assert refused(tmp_path, data[:-64]) == f"is torn: {len(data) - 64} of {len(data)} bytes are there"
    assert refused(tmp_path, data + b"\0") == f"is torn: {len(data) + 1} of {len(data)} bytes are there"
    assert refused(tmp_path, data[:40]) == "is torn: 40 bytes are there"
    assert refused(tmp_path, data[:15]) == refused(tmp_path, b"") == "is not a samestep checkpoint"
    assert refused(tmp_path, b"PK\3\4" + data) == "is not a samestep checkpoint"
    for other in (1, 3):
        assert refused(tmp_path, data[:8] + bytes([other]) + data[9:]) == (
            f"has format {other}, and this samestep reads format 2; use the samestep that wrote it"
        )


def test_tensors_of_one_shape_do_not_change_places(tmp_path):
    data = write(tmp_path / "state", {"a": torch.zeros(16), "b": torch.ones(16)}).read_bytes()
    assert refused(tmp_path, data[:-128] + data[-64:] + data[-128:-64]) == "has a damaged a"


@pytest.mark.slow
def test_damaged_files_are_never_read(tmp_path):
    ran = subprocess.run(
        [sys.executable, TESTS / "fuzz_state.py", "--files", "300", "--directory", tmp_path],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.match(r"damaged files 300 \| read silently 0 \| other errors 0 \| code run 0 \|", ran.stdout)
