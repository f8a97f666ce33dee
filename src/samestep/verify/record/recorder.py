"""Records what each optimizer step of one rank was made of; read.py has the format.

Covered: samples, inputs, losses, gradients, parameters, buffers and hyper-parameters of torch's own optimizers.
Not covered: optimizers that are not torch's.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

import samestep
from samestep.train import streams, totals
from samestep.train.digest import digests
from samestep.train.group.control import users_line
from samestep.train.loss import reduction_of
from samestep.train.model import replicate
from samestep.train.model.batchnorm import Synced
from samestep.train.model.replica import replica_of
from samestep.verify.read import EPSILON, Digest, Step, record_path, state_path
from samestep.verify.record import training
from samestep.verify.record.remove import Removed
from samestep.verify.record.said import Said
from samestep.verify.record.told import Told

_MOST_ROWS = 4096
_save = torch.save


class Recorder:
    """One rank's record, from its first forward pass to the end of its script."""

    def __init__(
        self,
        directory: Path,
        removed: Removed,
        most_steps: int | None = None,
        timeout_s: float | None = None,
        *,
        nudge: bool = False,
        untouched: bool = False,
    ) -> None:
        """With `nudge` the last bits of all weights are changed before the first step and after each; a serial
        script is stopped at its first step, unless `untouched`."""
        self._directory = directory
        self._removed = removed
        self._most_steps = most_steps
        self._nudge = torch.Generator().manual_seed(0) if nudge else None
        self._untouched = untouched
        self._rank = int(os.environ.get("RANK", "0"))
        self._file = record_path(directory, self._rank).open("w", encoding="utf-8")
        self._told = Told(removed.lines, timeout_s)
        self._roots: list[torch.nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._taken: list[int] = []
        self._parts: list[dict[str, Any]] = []
        self._forwards: list[dict[str, Any]] = []
        self._drawn = b""
        self._given: list[float] = []
        self._at_batch = self._at_backward = b""
        self._depth = self._backwards = 0
        self._evaluated = self._in_backward = False
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._foreign: dict[str, Any] | None = None
        self._facts: dict[str, Any] = {"foreign": [], "precision": "float32"}

    def begin(self) -> None:
        """Record from here on."""
        self._removed.begin()
        self._told.begin()
        Said(self._write, self._where).begin()
        register_module_forward_pre_hook(self._before_forward)
        register_module_forward_hook(self._after_forward, always_call=True)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        torch.autograd.backward = self._backward(torch.autograd.backward)
        DataLoader.__iter__ = self._iterated(DataLoader.__iter__)  # type: ignore[assignment,method-assign]
        BaseProcess.start = self._started(BaseProcess.start)  # type: ignore[method-assign]
        replicate.no_sync = samestep.no_sync = self._unsynced(replicate.no_sync)
        training.watch_batches(self._before_batch, self._after_pass)
        training.move_checkpoints(self._directory / "checkpoints")

    def finish(self, failed: bool = False) -> None:
        """Write the facts and digests of the state at the end; rank 0 writes the state itself too."""
        self._facts |= {
            "serial": not training.is_parallel(),
            "optimizers": len(self._optimizers),
            "backwards": self._backwards,
            "told": self._told.lines,
            "whole_batches": "shares" in self._removed,
            "roots": [_described(root) for root in self._outermost()],
            "end": _digests_of(self._named(torch.nn.Module.named_parameters)),
        }
        self._write({"facts": self._facts})
        self._file.close()
        if self._rank == 0 and not failed:
            models: dict[str, Any] = {}
            for prefix, root in self._prefixed():
                models |= {f"{prefix}{name}": value for name, value in _plain(root.state_dict()).items()}
            optimizers = [_plain(optimizer.state_dict()) for optimizer in self._optimizers]
            _save({"model": models, "optimizer": optimizers}, state_path(self._directory))

    def _write(self, line: Mapping[str, Any]) -> None:
        if not self._file.closed:
            self._file.write(json.dumps(line) + "\n")

    def _where(self) -> dict[str, Any]:
        """Where in the training the script is."""
        return {"step": sum(self._taken), "inside": training.is_inside() and not self._evaluated}

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        self._depth += 1
        if self._depth > 1 or self._in_backward or next(module.parameters(), None) is None:
            return
        self._note_precision(module)
        if module not in self._roots:
            self._roots.append(module)
            self._change_last_bits(module.parameters())
        if not torch.is_grad_enabled():
            if module.training and any(isinstance(inner, _BatchNorm) for inner in module.modules()):
                self._facts["careless"] = users_line()
                if "statistics" in self._removed:
                    self._kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
            return
        self._forwards.append({"training": module.training, "rows": _rows(args)})
        self._drawn = streams.digest()

    def _after_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        if self._drawn:
            self._forwards[-1] |= {"drew": self._drawn != streams.digest(), "out": _rows(output)}
            self._drawn = b""
        for buffer, value in self._kept:
            buffer.copy_(value)
        self._kept = []

    def _note_precision(self, module: torch.nn.Module) -> None:
        kind = next(module.parameters()).device.type
        if torch.is_autocast_enabled(kind):
            self._facts["precision"] = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
        elif kind == "cuda" and torch.backends.cuda.matmul.allow_tf32 | torch.backends.cudnn.allow_tf32:
            self._facts["precision"] = "tf32"

    @torch.no_grad()
    def _change_last_bits(self, parameters: Iterable[torch.Tensor]) -> None:
        if self._nudge is None:
            return
        for tensor in parameters:
            if tensor.is_floating_point():
                eps = max(torch.finfo(tensor.dtype).eps, EPSILON.get(self._facts["precision"], 0.0))
                signs = torch.randint(0, 2, tensor.shape, generator=self._nudge) * 2 - 1
                tensor.mul_((1 + eps * signs).to(tensor))

    def _backward(self, original: Callable[..., None]) -> Callable[..., None]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if self._in_backward:
                original(tensors, *args, **kwargs)
                return
            losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            weight = self._record_loss(losses)
            self._backwards += 1
            self._in_backward = True
            try:
                original([loss * weight for loss in losses] if weight != 1 else tensors, *args, **kwargs)
            finally:
                self._in_backward = False
                self._at_backward = streams.digest()

        return backward

    def _record_loss(self, losses: list[torch.Tensor]) -> float:
        """Note the losses that backward is called on; returns by what they are to be multiplied."""
        shared = training.current_share()
        found = reduction_of(losses[-1])
        weight = 1.0
        if "counts" in self._removed and (count := found.get("count")):
            weight = count / totals.sum(float(count))
        value = sum(float(loss.detach().double().sum()) for loss in losses) * weight
        draws = {"loop_drew": bool(self._given) and streams.digest() != self._at_batch}
        self._parts.append(
            {"loss": value, **found, "forwards": self._forwards, "given": self._given, **draws, **shared}
        )
        self._forwards = []
        if not shared and self._foreign is not None and self._foreign not in self._facts["foreign"]:
            self._facts["foreign"].append(self._foreign)
        return weight

    def _iterated(self, original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
            if training.is_ours(loader):
                return original(loader)
            if torch.is_grad_enabled():
                sampler = getattr(loader.batch_sampler, "sampler", loader.batch_sampler or loader.sampler)
                is_plain = isinstance(sampler, RandomSampler | SequentialSampler)
                self._foreign = {"sampler": "" if is_plain else type(sampler).__name__, "line": users_line()}
            if "loaders" in self._removed:
                return iter(self._removed.loader(loader))
            return self._handed_out(original(loader)) if self._untouched else original(loader)

        return iterate

    def _handed_out(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if torch.is_grad_enabled():
                self._before_batch(batch, is_training=True)
            yield batch
        self._before_batch(None, is_training=True)

    def _before_batch(self, batch: Any, is_training: bool) -> None:
        """Before the loop gets a batch."""
        if is_training:
            self._evaluated = False
            self._given, self._at_batch = _rows(batch), streams.digest()

    def _after_pass(self, is_training: bool) -> None:
        if is_training:
            self._given = []
        self._evaluated = not is_training

    def _started(self, original: Callable[..., None]) -> Callable[..., None]:
        def start(process: BaseProcess) -> None:
            if not self._depth and not type(process).__module__.startswith("torch.utils.data"):
                self._facts.setdefault("children", users_line())
            original(process)

        return start

    def _unsynced(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def no_sync(model: torch.nn.Module, enabled: bool = True) -> Any:
            self._facts["no_sync"] = users_line()
            return original(model, enabled)

        return no_sync

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
            self._taken.append(0)
        if not (self._untouched or training.is_parallel()):
            raise SystemExit(0)
        number = self._optimizers.index(optimizer)
        self._removed.before_step(optimizer, sum(self._taken))
        names = {id(tensor): name for name, tensor in self._named(torch.nn.Module.named_parameters)}
        owned = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        named = [
            (names.get(id(tensor), f"optimizer {number}, tensor {at}"), tensor)
            for at, tensor in enumerate(owned)
        ]
        step = Step(
            optimizer=number,
            parts=self._parts,
            hyper=[_hyper(group) for group in optimizer.param_groups],
            grad=_digests_of((name, tensor.grad) for name, tensor in named if tensor.grad is not None),
            param=_digests_of(named),
            buffer=_digests_of(self._named(torch.nn.Module.named_buffers)),
            drew_after=bool(self._parts) and streams.digest() != self._at_backward,
        )
        self._write(vars(step))
        self._parts = []

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        number = self._optimizers.index(optimizer)
        self._taken[number] += 1
        self._change_last_bits(tensor for group in optimizer.param_groups for tensor in group["params"])
        if self._taken[number] == self._most_steps:
            raise SystemExit(0)

    def _outermost(self) -> list[torch.nn.Module]:
        inner = {id(part) for root in self._roots for part in root.modules() if part is not root}
        return [root for root in self._roots if id(root) not in inner]

    def _prefixed(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Each model, with a prefix that makes its names unique where there are several."""
        roots = self._outermost()
        kinds = [type(root).__name__ for root in roots]
        for at, root in enumerate(roots):
            kind = kinds[at] + (str(kinds[: at + 1].count(kinds[at])) if kinds.count(kinds[at]) > 1 else "")
            inner = root.module if isinstance(root, DistributedDataParallel) else root
            yield (f"{kind}." if len(roots) > 1 else ""), inner

    def _named(self, kind: Callable[..., Any]) -> Iterator[tuple[str, torch.Tensor]]:
        for prefix, root in self._prefixed():
            yield from ((f"{prefix}{name}", tensor) for name, tensor in kind(root))


def _described(root: torch.nn.Module) -> dict[str, Any]:
    """What may make this model's step depend on the number of processes."""
    replica = replica_of(root)
    synced = Synced | torch.nn.SyncBatchNorm
    parts = [*root.named_modules()]
    return {
        "kind": type(root).__name__,
        "exact": replica is not None and replica.tree is not None,
        "batchnorm": [
            name for name, part in parts if isinstance(part, _BatchNorm) and not isinstance(part, synced)
        ],
        "dropout": [name for name, part in parts if isinstance(part, _DropoutNd) and part.p],
    }


def _digests_of(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Digest]:
    pairs = list(named)
    sums = digests(tensor if tensor.layout is torch.strided else tensor.to_dense() for _, tensor in pairs)
    return {name: Digest(*numbers) for (name, _), numbers in zip(pairs, sums, strict=True)}


def _hyper(group: Mapping[str, Any]) -> dict[str, float | list[float]]:
    """The numbers an optimizer works with."""
    found: dict[str, float | list[float]] = {}
    for name, value in group.items():
        if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            found[name] = float(value)
        elif isinstance(value, tuple | list) and name != "params":
            found[name] = [float(number) for number in value if isinstance(number, int | float)]
    return found


def _rows(value: Any) -> list[float]:
    """A number for each row of the first dense tensor in a nested value, close where the rows are close."""
    tensor = _first_tensor(value)
    if tensor is None or not tensor.dim() or not tensor.numel():
        return []
    rows = tensor.detach()[:_MOST_ROWS].cpu()
    rows = torch.view_as_real(rows) if rows.is_complex() else rows
    flat = rows.reshape(len(rows), -1).double()
    along = torch.arange(1, flat.shape[1] + 1, dtype=torch.float64).sin()
    return [float(f"{number:.9g}") for number in (flat @ along).tolist()]


def _first_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value if value.layout is torch.strided and not value.is_nested else None
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next((tensor for tensor in map(_first_tensor, inner) if tensor is not None), None)


def _plain(state: Any) -> Any:
    """As much of a state as can be read without running code."""
    if isinstance(state, torch.Tensor):
        return state.detach().cpu() if state.layout is torch.strided else state.detach().to_dense().cpu()
    if isinstance(state, Mapping):
        return {key: _plain(value) for key, value in state.items() if not callable(value)}
    if isinstance(state, list | tuple):
        return [_plain(value) for value in state]
    return state if isinstance(state, bool | int | float | str | None) else repr(state)
