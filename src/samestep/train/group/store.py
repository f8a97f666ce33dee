"""torch's key-value store over the run's own tree of connections: it opens no port, and each process has a copy.

torch uses it while it opens a process group: Gloo exchanges the ranks' addresses, NCCL a unique id.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from samestep.rendezvous.tree import Tree


class TreeStore(dist.Store):  # type: ignore[misc, name-defined]
    """Changes go to rank 0, which orders them and sends them to all ranks; reads use this process's copy."""

    def __init__(self, tree: Tree, timeout: timedelta) -> None:
        super().__init__()
        self.tree, self._limit = tree, timeout

    def set(self, key: str, value: str | bytes) -> None:
        self.tree.change("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.tree.stored[key]

    def add(self, key: str, amount: int) -> int:
        return int(self.tree.change("add", key, b"%d" % amount)[1] or b"0")

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        stored = self.tree.change("replace", key, _bytes(desired), _bytes(expected))[1]
        return _bytes(expected) if stored is None else stored

    def delete_key(self, key: str) -> bool:
        return self.tree.change("delete", key)[0] is not None

    def check(self, keys: Sequence[str]) -> bool:
        return self.tree.await_keys(keys, 0.0)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        limit = timeout or self._limit
        if not self.tree.await_keys(keys, limit.total_seconds()):
            missing = [key for key in keys if key not in self.tree.stored]
            raise dist.DistStoreError(
                f"no rank set {', '.join(missing[:3])} within {limit.total_seconds():g} s"
            )

    def set_timeout(self, timeout: timedelta) -> None:
        self._limit = timeout

    def clone(self) -> Any:
        return self


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
