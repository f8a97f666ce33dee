"""Converts a state to JSON and back with exact types: a tree of plain values, and its tensors and bytes as blobs.

Plain: None, bool, int, float, str, bytes, list, tuple, dict, OrderedDict and Counter (which schedulers hold), and no
subclass of them. A value that would not come back equal is refused with its place. NumPy's scalars come back as
Python's. No torch, no files.
"""

import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from samestep.errors import UsageError
from samestep.text import printable

ITEMSIZE = {
    **dict.fromkeys(("bytes", "bool", "uint8", "int8"), 1),
    **{f"float8_{kind}": 1 for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")},
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
}
_DEEPEST = 64
_MAPPINGS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_PLAIN = {type(None), bool, int, float, str, bytes, list, tuple, *_MAPPINGS.values()}
_HEX = re.compile(r"-?[0-9a-f]+")
_DOUBLE = re.compile(r"[0-9a-f]{16}")


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
        if not _is_key(key):
            raise UsageError(
                f"{place(where)} has a key that is a {type(key).__name__}; use str, or int of at most 64 bits"
            )
        return [key, self.node(value, (*where, key))]

    def foreign(self, value: object, where: Path) -> Any:
        if blob := self.leaf(value, where):
            return {"tensor": self.blob(*blob)}
        if type(plain := _number(value)) in _PLAIN:
            return self.node(plain, where)
        raise UsageError(
            f"{place(where)} is a {type(value).__name__}, which a checkpoint cannot carry; "
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


class Unpacker:
    """Turns the header's tree into the state; a blob's name is the first place where it occurs."""

    def __init__(self, blobs: Sequence[Blob], values: Sequence[object] | None = None) -> None:
        self.blobs = blobs
        self.values = values
        self.names: list[str] = []

    def unpack(self, tree: Any) -> Any:
        state = self.value(tree, ())
        if len(self.names) != len(self.blobs):
            raise Bad(f"announces {len(self.blobs)} blobs and uses {len(self.names)}")
        return state

    def value(self, node: Any, where: Path) -> Any:
        if len(where) > _DEEPEST:
            raise Bad(f"nests more than {_DEEPEST} levels deep")
        if isinstance(node, list):
            return [self.value(item, (*where, i)) for i, item in enumerate(node)]
        if not isinstance(node, dict):
            return node
        ((tag, body),) = node.items() if len(node) == 1 else [("", None)]
        if tag in ("tensor", "bytes") and type(body) is int:
            return self.blob(tag, body, where)
        if tag == "tuple" and isinstance(body, list):
            return tuple(self.value(body, where))
        if tag in _MAPPINGS and isinstance(body, list):
            return self.mapping(_MAPPINGS[tag], body, where)
        if tag == "int" and isinstance(body, str) and _HEX.fullmatch(body):
            return int(body, 16)
        if tag == "float" and isinstance(body, str) and _DOUBLE.fullmatch(body):
            return struct.unpack(">d", bytes.fromhex(body))[0]
        raise Bad(f"has something at {place(where)} that this format does not know")

    def mapping(self, kind: type, pairs: list[Any], where: Path) -> Any:
        result = kind()
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2 or not _is_key(pair[0]) or pair[0] in result:
                raise Bad(f"has a broken or repeated name in {place(where)}")
            result[pair[0]] = self.value(pair[1], (*where, pair[0]))
        return result

    def blob(self, tag: str, index: int, where: Path) -> object:
        if not 0 <= index <= len(self.names) or index >= len(self.blobs):
            raise Bad(f"refers to blob {printable(index)} of {len(self.blobs)}")
        if (self.blobs[index].dtype == "bytes") != (tag == "bytes"):
            raise Bad(f"takes blob {index} for {tag}")
        if index == len(self.names):
            self.names.append(place(where))
        return self.values[index] if self.values is not None else None


def place(where: Path) -> str:
    """A place in a state in words, safe to print."""
    return printable(".".join(str(key)[:200] for key in where)) or "the state"


def _number(value: Any) -> object:
    """A NumPy scalar (such as a scheduler's rate) as a Python number, without importing NumPy."""
    kinds = {(base.__module__, base.__name__) for base in type(value).__mro__}
    return value.item() if ("numpy", "generic") in kinds else value


def _is_key(key: object) -> TypeGuard[str | int]:
    return type(key) is str or (type(key) is int and -(2**63) <= key < 2**63)
