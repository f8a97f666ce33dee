"""Writes down what each optimizer step of a run was made of, for whoever compares it with another run.

Covered: samples, inputs, losses, gradients, parameters, buffers and hyper-parameters of torch's own optimizers.
Not covered: a backward pass that does not begin at a tensor's `backward()`.
"""

import contextlib
import hashlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from samestep.state.directory import Vault
from samestep.train.data import share
from samestep.train.data.loader import Loader
from samestep.train.digest import digests
from samestep.train.group import world
from samestep.train.group.control import users_line
from samestep.train.model.batchnorm import Synced
from samestep.train.model.exact import ExactReplica
from samestep.train.model.replica import replica_of
from samestep.verify.recorded import Digest

_MOST_ROWS = 4096
_PICKING = {"Topk", "Sort", "Kthvalue"}
_PASSED = ("Mul", "Div", "Neg", "ToCopy", "Add", "Sub", "View", "Squeeze", "Clone")


class Recorder:
    """One rank's record, from its first forward pass to the end of its script."""

    def __init__(self, directory: Path, most_steps: int | None, nudge: bool) -> None:
        """With `nudge` the first step starts from weights whose last bit is another."""
        self._directory = directory
        self._most_steps = most_steps
        self._nudge = nudge
        self._rank, self._size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._file = (directory / f"rank-{self._rank}.jsonl").open("w", encoding="utf-8")
        self._roots: list[torch.nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._taken: list[int] = []
        self._parts: list[dict[str, Any]] = []
        self._forward: dict[str, Any] = {}
        self._drawn = b""
        self._given: list[str] = []
        self._at_batch = self._at_backward = b""
        self._depth = 0
        self._in_backward = False
        self._foreign: dict[str, Any] | None = None
        self._facts: dict[str, Any] = {"foreign": [], "sampler": None, "precision": "float32", "careless": ""}

    def begin(self) -> None:
        """Watch from here on what torch does."""
        register_module_forward_pre_hook(self._before_forward)
        register_module_forward_hook(self._after_forward, always_call=True)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        torch.Tensor.backward = self._backward(torch.Tensor.backward)  # type: ignore[method-assign]
        DataLoader.__iter__ = self._iterated(DataLoader.__iter__)  # type: ignore[assignment,method-assign]
        Loader._pass = self._handed_out(Loader._pass)  # type: ignore[method-assign]
        Vault.__init__ = self._elsewhere(Vault.__init__)  # type: ignore[method-assign]

    def finish(self) -> None:
        """Write the state at the end, rank 0 as it is and the others its digest."""
        self._facts["serial"] = not self._is_parallel()
        self._facts["optimizers"] = len(self._optimizers)
        self._facts["roots"] = [_described(root) for root in self._outermost()]
        self._facts["end"] = self._watched(torch.nn.Module.named_parameters)
        self._write({"facts": self._facts})
        self._file.close()
        if self._rank == 0:
            models: dict[str, Any] = {}
            for prefix, root in self._prefixed():
                models |= {f"{prefix}{name}": one for name, one in _plain(root.state_dict()).items()}
            optimizers = [_plain(one.state_dict()) for one in self._optimizers]
            torch.save({"model": models, "optimizer": optimizers}, self._directory / "state.pt")

    def _is_parallel(self) -> bool:
        return world._world is not None or dist.is_initialized()

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        self._depth += 1
        if self._depth > 1 or self._in_backward or next(module.parameters(), None) is None:
            return
        if module not in self._roots:
            self._roots.append(module)
        if not torch.is_grad_enabled():
            if module.training and any(isinstance(one, _BatchNorm) for one in module.modules()):
                self._facts["careless"] = users_line()
            return
        self._forward = {"training": module.training, "rows": _rows(args)}
        self._drawn = _streams()
        if self._given:
            self._forward |= {"given": self._given, "loop_drew": self._drawn != self._at_batch}
        kind = next(module.parameters()).device.type
        if torch.is_autocast_enabled(kind):
            self._facts["precision"] = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        elif kind == "cuda" and torch.backends.cuda.matmul.allow_tf32 | torch.backends.cudnn.allow_tf32:
            self._facts["precision"] = "tf32"

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if not self._depth and self._drawn:
            self._forward["drew"] = self._drawn != _streams()
            self._drawn = b""

    def _backward(self, original: Callable[..., None]) -> Callable[..., None]:
        def backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            self._note_loss(loss)
            self._in_backward = True
            try:
                original(loss, *args, **kwargs)
            finally:
                self._in_backward = False
                self._at_backward = _streams()

        return backward

    def _note_loss(self, loss: torch.Tensor) -> None:
        at_hand = share.current()
        part = {"loss": float(loss.detach().double().sum()), **_root(loss), **self._forward}
        if at_hand is not None and at_hand.all:
            part |= {"mine": at_hand.mine, "all": at_hand.all, "samples": at_hand.samples.tolist()}
            if isinstance(at_hand.of, Loader):
                part["epoch"] = at_hand.of.epoch
                if at_hand.of.sampler is not None:
                    self._facts["sampler"] = type(at_hand.of.sampler).__name__
        elif self._foreign is not None and self._foreign not in self._facts["foreign"]:
            self._facts["foreign"].append(self._foreign)
        self._parts.append(part)
        self._forward = {}

    def _iterated(self, original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
            if not _is_ours(loader) and torch.is_grad_enabled():
                sampler = getattr(loader.batch_sampler, "sampler", loader.batch_sampler or loader.sampler)
                self._foreign = {"sampler": type(sampler).__name__, "line": users_line()}
            return original(loader)

        return iterate

    def _handed_out(self, original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def hand_out(loader: Loader, training: bool) -> Iterator[Any]:
            with contextlib.closing(original(loader, training)) as batches:  # type: ignore[type-var]
                for batch in batches:
                    self._given, self._at_batch = _rows(batch), _streams()
                    yield batch
            self._given = []

        return hand_out

    def _elsewhere(self, original: Callable[..., None]) -> Callable[..., None]:
        """Runs that are compared all begin at the beginning, and leave the script's own commits alone."""

        def begin(vault: Vault, directory: str | os.PathLike[str], *args: Any) -> None:
            original(vault, self._directory / "checkpoints" / Path(directory).name, *args)

        return begin

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
            self._taken.append(0)
        if not self._is_parallel():
            raise SystemExit(0)
        number = self._optimizers.index(optimizer)
        names = {id(one): name for name, one in self._named(torch.nn.Module.named_parameters)}
        owned = [one for group in optimizer.param_groups for one in group["params"]]
        called = [names.get(id(one), f"optimizer {number}, tensor {at}") for at, one in enumerate(owned)]
        moved = [(name, one.grad) for name, one in zip(called, owned, strict=True) if one.grad is not None]
        self._write(
            {
                "optimizer": number,
                "parts": self._parts,
                "hyper": [_hyper(group) for group in optimizer.param_groups],
                "grad": _named_digests(moved),
                "param": _named_digests(zip(called, owned, strict=True)),
                "buffer": self._watched(torch.nn.Module.named_buffers),
                "drew_after": bool(self._parts) and _streams() != self._at_backward,
            }
        )
        self._parts = []
        if self._nudge and not self._taken[number]:
            with torch.no_grad():
                for one in owned:
                    if one.is_floating_point():
                        one.mul_(1 + torch.finfo(one.dtype).eps)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        number = self._optimizers.index(optimizer)
        self._taken[number] += 1
        if self._taken[number] == self._most_steps:
            raise SystemExit(0)

    def _outermost(self) -> list[torch.nn.Module]:
        inner = {id(part) for root in self._roots for part in root.modules() if part is not root}
        return [root for root in self._roots if id(root) not in inner]

    def _prefixed(self) -> Iterator[tuple[str, torch.nn.Module]]:
        roots = self._outermost()
        kinds = [type(root).__name__ for root in roots]
        for at, root in enumerate(roots):
            kind = kinds[at] + (str(kinds[: at + 1].count(kinds[at])) if kinds.count(kinds[at]) > 1 else "")
            inner = root.module if isinstance(root, DistributedDataParallel) else root
            yield (f"{kind}." if len(roots) > 1 else ""), inner

    def _named(self, kind: Callable[..., Any]) -> Iterator[tuple[str, torch.Tensor]]:
        for prefix, root in self._prefixed():
            yield from ((f"{prefix}{name}", one) for name, one in kind(root))

    def _watched(self, kind: Callable[..., Any]) -> dict[str, Digest]:
        return _named_digests(self._named(kind))


def _named_digests(named: Any) -> dict[str, Digest]:
    pairs = list(named)
    return dict(zip((name for name, _ in pairs), digests(one for _, one in pairs), strict=True))


def _is_ours(loader: DataLoader[Any]) -> bool:
    """Whether samestep.loader made this loader, for which it chooses the samples."""
    return type(loader.batch_sampler).__module__.startswith("samestep.")


def _described(root: torch.nn.Module) -> dict[str, Any]:
    """What may make a step of this model another one at another number of processes."""
    replica = replica_of(root)
    norms = [name for name, one in root.named_modules() if isinstance(one, _BatchNorm)]
    synced = [name for name, one in root.named_modules() if isinstance(one, Synced | torch.nn.SyncBatchNorm)]
    dropouts = [name for name, one in root.named_modules() if isinstance(one, _DropoutNd) and one.p]
    return {
        "kind": type(root).__name__,
        "replicated": replica is not None or isinstance(root, DistributedDataParallel),
        "exact": isinstance(replica, ExactReplica),
        "batchnorm": [name for name in norms if name not in synced],
        "dropout": dropouts,
    }


def _hyper(group: Mapping[str, Any]) -> dict[str, float | list[float]]:
    """The numbers an optimizer works with."""
    found: dict[str, float | list[float]] = {}
    for name, value in group.items():
        if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            found[name] = float(value)
        elif isinstance(value, tuple | list) and name != "params":
            found[name] = [float(one) for one in value if isinstance(one, int | float)]
    return found


def _root(loss: torch.Tensor) -> dict[str, Any]:
    """How the loss was made of its samples and by which count it is a mean, as the last few operations tell."""
    node: Any = loss.grad_fn
    divisor: float | None = None
    while node is not None:
        name = node.name().partition("Backward")[0]
        reduction = getattr(node, "_saved_reduction", {"Mean": 1, "Sum": 2}.get(name))
        if reduction in (1, 2):
            count = divisor if reduction == 2 else _count(node)
            return {"reduction": ("mean", "sum")[reduction - 1], "count": count, "picked": _picked(node)}
        if not name.startswith(_PASSED) or not node.next_functions:
            break
        divisor = _single(getattr(node, "_saved_other", None)) if name == "Div" else divisor
        node = node.next_functions[0][0]
    return {"reduction": None}


def _count(node: Any) -> float | None:
    """What a mean divides by: cross entropy by the weights of the targets that it does not ignore."""
    return _single(getattr(node, "_saved_total_weight", getattr(node, "_saved_self_sym_numel", None)))


def _single(value: Any) -> float | None:
    is_single = isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    return float(value) if is_single else None


def _picked(node: Any) -> bool:
    """Whether only some terms, chosen by comparing them, were reduced."""
    for _ in range(4):
        if not node.next_functions or (node := node.next_functions[0][0]) is None:
            return False
        if node.name().partition("Backward")[0] in _PICKING:
            return True
    return False


def _rows(value: Any) -> list[str]:
    """What each row of the first tensor in a nested value is, as a digest."""
    tensor = _first_tensor(value)
    if tensor is None or not tensor.dim():
        return []
    rows = tensor.detach()[:_MOST_ROWS].cpu().contiguous()
    flat = rows.reshape(len(rows), -1).view(torch.uint8) if rows.numel() else rows
    return [hashlib.blake2b(row.numpy().tobytes(), digest_size=6).hexdigest() for row in flat]


def _first_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next((one for one in map(_first_tensor, inner) if one is not None), None)


def _streams() -> bytes:
    """Where torch's, Python's and NumPy's random streams are."""
    digest = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=16)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        digest.update(torch.cuda.get_rng_state().numpy().tobytes())
    digest.update(repr(random.getstate()).encode())
    if numpy := sys.modules.get("numpy.random"):
        digest.update(repr(numpy.get_state()).encode())
    return digest.digest()


def _plain(state: Any) -> Any:
    """As much of a state as can be read without running code."""
    if isinstance(state, torch.Tensor):
        return state.detach().cpu()
    if isinstance(state, Mapping):
        return {key: _plain(one) for key, one in state.items() if not callable(one)}
    if isinstance(state, list | tuple):
        return [_plain(one) for one in state]
    return state if isinstance(state, bool | int | float | str | None) else repr(state)
