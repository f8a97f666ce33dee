"""Runs a script and records what each optimizer step of one rank was made of; read.py has the format.

Covered: samples, inputs, losses, gradients, parameters, buffers and hyper-parameters of torch's own optimizers.
Not covered: a backward pass that does not begin at a tensor's `backward()`.
"""

import argparse
import hashlib
import json
import os
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
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

from samestep.state.directory import CheckpointDirectory
from samestep.train import streams
from samestep.train.digest import digests
from samestep.train.group import world
from samestep.train.group.control import users_line
from samestep.train.loss import reduction_of
from samestep.train.model.batchnorm import Synced
from samestep.train.model.replica import replica_of
from samestep.train.step import Pass, Share, Spine
from samestep.verify.read import Digest, Step, record_path, state_path

_MOST_ROWS = 4096


class Recorder:
    """One rank's record, from its first forward pass to the end of its script."""

    def __init__(
        self, directory: Path, most_steps: int | None = None, nudge: bool = False, untouched: bool = False
    ) -> None:
        """With `nudge` the first step starts from weights whose last bit is changed; a serial script is stopped at
        its first step, unless `untouched`."""
        self._directory = directory
        self._most_steps = most_steps
        self._nudge = nudge
        self._untouched = untouched
        self._rank = int(os.environ.get("RANK", "0"))
        self._file = record_path(directory, self._rank).open("w", encoding="utf-8")
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
        """Record from here on."""
        register_module_forward_pre_hook(self._before_forward)
        register_module_forward_hook(self._after_forward, always_call=True)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        torch.Tensor.backward = self._backward(torch.Tensor.backward)  # type: ignore[method-assign]
        DataLoader.__iter__ = self._iterated(DataLoader.__iter__)  # type: ignore[assignment,method-assign]
        _watch_batches(self._before_batch)
        _move_checkpoints(self._directory / "checkpoints")

    def finish(self) -> None:
        """Write the facts and digests of the state at the end; rank 0 writes the state itself too."""
        self._facts["serial"] = not _is_parallel()
        self._facts["optimizers"] = len(self._optimizers)
        self._facts["roots"] = [_described(root) for root in self._outermost()]
        self._facts["end"] = _digests_of(self._named(torch.nn.Module.named_parameters))
        self._write({"facts": self._facts})
        self._file.close()
        if self._rank == 0:
            models: dict[str, Any] = {}
            for prefix, root in self._prefixed():
                models |= {f"{prefix}{name}": value for name, value in _plain(root.state_dict()).items()}
            optimizers = [_plain(optimizer.state_dict()) for optimizer in self._optimizers]
            torch.save({"model": models, "optimizer": optimizers}, state_path(self._directory))

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        self._depth += 1
        if self._depth > 1 or self._in_backward or next(module.parameters(), None) is None:
            return
        if module not in self._roots:
            self._roots.append(module)
        if not torch.is_grad_enabled():
            if module.training and any(isinstance(inner, _BatchNorm) for inner in module.modules()):
                self._facts["careless"] = users_line()
            return
        self._forward = {"training": module.training, "rows": _rows(args)}
        self._drawn = streams.digest()
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
            self._forward["drew"] = self._drawn != streams.digest()
            self._drawn = b""

    def _backward(self, original: Callable[..., None]) -> Callable[..., None]:
        def backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            self._record_loss(loss)
            self._in_backward = True
            try:
                original(loss, *args, **kwargs)
            finally:
                self._in_backward = False
                self._at_backward = streams.digest()

        return backward

    def _record_loss(self, loss: torch.Tensor) -> None:
        shared = _current_share()
        self._facts["sampler"] = shared.pop("sampler", None) or self._facts["sampler"]
        value = float(loss.detach().double().sum())
        self._parts.append({"loss": value, **reduction_of(loss), **self._forward, **shared})
        self._forward = {}
        if not shared and self._foreign is not None and self._foreign not in self._facts["foreign"]:
            self._facts["foreign"].append(self._foreign)

    def _iterated(self, original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
            if not _is_ours(loader) and torch.is_grad_enabled():
                sampler = getattr(loader.batch_sampler, "sampler", loader.batch_sampler or loader.sampler)
                self._foreign = {"sampler": type(sampler).__name__, "line": users_line()}
            return original(loader)

        return iterate

    def _before_batch(self, batch: Any) -> None:
        """Before the loop gets a batch of samestep.loader; None after the last."""
        self._given, self._at_batch = _rows(batch), streams.digest()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
            self._taken.append(0)
        if not (self._untouched or _is_parallel()):
            raise SystemExit(0)
        number = self._optimizers.index(optimizer)
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
        if self._nudge and not self._taken[number]:
            with torch.no_grad():
                for tensor in owned:
                    if tensor.is_floating_point():
                        tensor.mul_(1 + torch.finfo(tensor.dtype).eps)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        number = self._optimizers.index(optimizer)
        self._taken[number] += 1
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


# All contact with samestep's own training is in the next six functions.


def _is_parallel() -> bool:
    return world._group is not None or dist.is_initialized()


def _is_ours(loader: DataLoader[Any]) -> bool:
    """Whether samestep.loader made this loader, and so chooses its samples."""
    return type(loader.batch_sampler).__module__.startswith("samestep.")


def _current_share() -> dict[str, Any]:
    """What of the current batch is this rank's; nothing outside of samestep's loaders."""
    current = world._group.the(Spine).at_hand if world._group is not None else None
    if current is None or not current.all:
        return {}
    sampler = current.of.of.sampler
    return {
        "mine": current.mine,
        "all": current.all,
        "samples": current.samples.tolist(),
        "epoch": current.of.epoch,
        "sampler": None if sampler is None else type(sampler).__name__,
    }


def _watch_batches(heard: Callable[[Any], None]) -> None:
    """Have `heard` called with each batch before the loop gets it, and with None after the last."""
    hand_out, leave_pass = Spine.hand_out, Spine.leave_pass

    def watched(spine: Spine, share: Share, batch: Any = None, *more: Any) -> None:
        hand_out(spine, share, batch, *more)
        if share.microbatch is None:
            heard(batch)

    def left(spine: Spine, passed: Pass) -> None:
        leave_pass(spine, passed)
        heard(None)

    Spine.hand_out, Spine.leave_pass = watched, left  # type: ignore[assignment,method-assign]


def _move_checkpoints(directory: Path) -> None:
    """Keep checkpoints here: every recorded run starts at the beginning and leaves the script's own alone."""
    original = CheckpointDirectory.__init__

    def moved(self: CheckpointDirectory, place: str | os.PathLike[str], *args: Any) -> None:
        original(self, directory / Path(place).name, *args)

    CheckpointDirectory.__init__ = moved  # type: ignore[assignment,method-assign]


def _described(root: torch.nn.Module) -> dict[str, Any]:
    """What may make this model's step depend on the number of processes."""
    replica = replica_of(root)
    synced = Synced | torch.nn.SyncBatchNorm
    norms = [
        name
        for name, inner in root.named_modules()
        if isinstance(inner, _BatchNorm) and not isinstance(inner, synced)
    ]
    return {
        "kind": type(root).__name__,
        "replicated": replica is not None or isinstance(root, DistributedDataParallel),
        "exact": replica is not None and replica.exchange.needs_microbatches,
        "batchnorm": norms,
        "dropout": [
            name for name, inner in root.named_modules() if isinstance(inner, _DropoutNd) and inner.p
        ],
    }


def _digests_of(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Digest]:
    pairs = list(named)
    sums = digests(tensor for _, tensor in pairs)
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


def _rows(value: Any) -> list[str]:
    """A digest of each row of the first tensor in a nested value."""
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
    return next((tensor for tensor in map(_first_tensor, inner) if tensor is not None), None)


def _plain(state: Any) -> Any:
    """As much of a state as can be read without running code."""
    if isinstance(state, torch.Tensor):
        return state.detach().cpu()
    if isinstance(state, Mapping):
        return {key: _plain(value) for key, value in state.items() if not callable(value)}
    if isinstance(state, list | tuple):
        return [_plain(value) for value in state]
    return state if isinstance(state, bool | int | float | str | None) else repr(state)


def main() -> None:
    """`record DIRECTORY [OPTIONS] -- [-m] SCRIPT ARGS…`: run it as `python` would, and record it."""
    parser = argparse.ArgumentParser(prog="record")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--nudge", action="store_true")
    parser.add_argument("--untouched", action="store_true")
    end = sys.argv.index("--")
    asked = parser.parse_args(sys.argv[1:end])
    is_module = sys.argv[end + 1] == "-m"
    del sys.argv[: end + 1 + is_module]
    script = sys.argv[0]
    recorder = Recorder(asked.directory, asked.steps, asked.nudge, asked.untouched)
    recorder.begin()
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end_of_script:
        recorder.finish()
        raise end_of_script
    recorder.finish()


if __name__ == "__main__":
    main()
