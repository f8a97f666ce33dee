"""Converts a state to JSON and back with exact types: a tree of plain values, and its tensors and bytes as blobs.

Plain: None, bool, int, float, str, bytes, list, tuple, dict, OrderedDict and Counter (which schedulers hold), and no
subclass of them. A value that would not come back equal is refused with its place. NumPy's scalars come back as
Python's. No torch, no files.
"""

import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

from samestep.errors import UsageError
from samestep.text import printable, type_of

ITEMSIZE = {
    **dict.fromkeys(("bytes", "bool", "uint8", "int8"), 1),
    **{f"float8_{kind}": 1 for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")},
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
}
_DEEPEST = 64
_MAPPINGS: dict[str, Callable[[], Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_PLAIN = {type(None), bool, int, float, str, bytes, list, tuple, *_MAPPINGS.values()}


class Blob(NamedTuple):
    """The type and shape of a tensor or a `bytes`, as the header announces them."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


Path = tuple[str | int, ...]
Leaf = Callable[[object, Path], tuple[Hashable, Blob, Callable[[], memoryview]] | None]


class Bad(Exception):
    """Why a file is refused; the text follows the file's name in the sentence."""


class Packer:
    """Turns a state into the header's tree and a list of blobs; `leaf` handles values that are not plain."""

    def __init__(self, leaf: Leaf) -> None:
        self.leaf = leaf
        self.blobs: list[Blob] = []
        self.buffers: list[memoryview] = []
        self.known: dict[Hashable, int] = {}

    def node(self, value: object, where: Path = ()) -> Any:
        if len(where) > _DEEPEST:
            raise UsageError(f"{place(where)} lies more than {_DEEPEST} levels deep; flatten it")
        if type(value) not in _PLAIN:
            return self.foreign(value, where)
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
        if isinstance(value, int):
            return value if -(2**63) <= value < 2**63 else {"int": format(value, "x")}
        if isinstance(value, bytes):
            return {"bytes": self.blob(None, Blob("bytes", (len(value),)), lambda: memoryview(value))}
        if isinstance(value, (list, tuple)):
            nodes = [self.node(item, (*where, i)) for i, item in enumerate(value)]
            return nodes if isinstance(value, list) else {"tuple": nodes}
        if isinstance(value, Mapping):
            return {type(value).__name__: [self.pair(key, value[key], where) for key in value]}
        return value

    def pair(self, key: object, value: object, where: Path) -> list[Any]:
        if type(key) is not str and not (type(key) is int and -(2**63) <= key < 2**63):
            raise UsageError(
                f"{place(where)} has a key that is {type_of(key)}; use str, or int of at most 64 bits"
            )
        return [key, self.node(value, (*where, key))]

    def foreign(self, value: object, where: Path) -> Any:
        if blob := self.leaf(value, where):
            return {"tensor": self.blob(*blob)}
        if type(plain := _number(value)) in _PLAIN:
            return self.node(plain, where)
        raise UsageError(
            f"{place(where)} is {type_of(value)}, which a checkpoint cannot carry; "
            "give tensors, numbers, str, bytes, bool, None, or dicts, lists and tuples of them"
        )

    def blob(self, key: Hashable, blob: Blob, memory: Callable[[], memoryview]) -> int:
        """The blob's index in the table; blobs with the same key share memory and are written once."""
        if key is not None and key in self.known:
            return self.known[key]
        index = self.known[key] = len(self.blobs)
        self.blobs.append(blob)
        self.buffers.append(memory())
        return index


def unpacked(node: Any, blob: Callable[[int, Path], object], where: Path = ()) -> Any:
    """The state of a header's tree; `blob` returns a blob's value for its index and its place."""
    if isinstance(node, list):
        return [unpacked(item, blob, (*where, i)) for i, item in enumerate(node)]
    if not isinstance(node, dict):
        return node
    ((tag, body),) = node.items()
    match tag:
        case "tensor" | "bytes":
            return blob(body, where)
        case "tuple":
            return tuple(unpacked(body, blob, where))
        case "int":
            return int(body, 16)
        case "float":
            return struct.unpack(">d", bytes.fromhex(body))[0]
    result = _MAPPINGS[tag]()
    for key, value in body:
        result[key] = unpacked(value, blob, (*where, key))
    return result


def place(where: Path) -> str:
    """A place in a state in words, safe to print."""
    return printable(".".join(str(key)[:200] for key in where)) or "the state"


def _number(value: Any) -> object:
    """A NumPy scalar (such as a scheduler's rate) as a Python number, without importing NumPy."""
    kinds = {(base.__module__, base.__name__) for base in type(value).__mro__}
    return value.item() if ("numpy", "generic") in kinds else value
