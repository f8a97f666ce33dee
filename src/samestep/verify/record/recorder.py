"""Records each optimizer step of a rank; read.py describes the format.

Covered: samples, inputs, losses, gradients, parameters, buffers and hyper-parameters of torch's own optimizers.
Not covered: optimizers that are not torch's.
"""

import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from stat import S_ISREG
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

import samestep
from samestep.train import totals
from samestep.train.backward import is_functional
from samestep.train.draws.draws import Draws
from samestep.train.group.control import users_line
from samestep.train.group.group import Group
from samestep.train.loss import reduction_of
from samestep.train.model import replicate
from samestep.train.model.batchnorm import Synced
from samestep.train.passes import Pass, Share
from samestep.train.step import Spine
from samestep.verify.read import EPSILON, record_path
from samestep.verify.record import facts, wrap
from samestep.verify.record.draws import Drawn
from samestep.verify.record.outputs import Outputs
from samestep.verify.record.reads import Reads
from samestep.verify.record.remove import Removed

_WRITES = os.O_WRONLY | os.O_RDWR


class Recorder:
    """The record of a rank, from its first forward pass to the end of its script."""

    def __init__(
        self,
        directory: Path,
        *,
        without: Sequence[str] = (),
        steps: int | None = None,
        timeout_s: float | None = None,
        began: float = math.inf,
        nudge: bool = False,
        untouched: bool = False,
        draws: bool = False,
    ) -> None:
        """`nudge` changes the last bits of weights and gradients; unless `untouched`, a serial script ends at once."""
        self._removed = Removed(without)
        self._drawn = Drawn(self._removed.values("undrawn"), is_noted=draws)
        self._reads = Reads(self._removed, timeout_s)
        self._most_steps, self._untouched = steps, untouched
        self._nudge = torch.Generator().manual_seed(0) if nudge else None
        self._file = record_path(directory, int(os.environ.get("RANK", "0"))).open("w", encoding="utf-8")
        self._roots: list[nn.Module] = []
        self._taken: dict[torch.optim.Optimizer, int] = {}  # the number of steps
        self._parts: list[dict[str, Any]] = []
        self._forwards: list[dict[str, Any]] = []
        self._given: dict[str, list[float]] = {}
        self._clips: dict[str, list[float]] = {}
        self._widths: list[Sequence[int]] = []  # of each batch, its first tensor's sizes behind the samples
        self._turn = self._depth = 0
        self._evaluated = self._in_backward = False
        self._own: set[str] = set()
        self._foreign: str | None = None
        self._facts: dict[str, Any] = {"precision": "float32", "backwards": 0}
        self._of_earlier_runs = (began, time.time())

    def begin(self) -> None:
        self._removed.begin()
        self._reads.begin()
        self._drawn.begin()
        Outputs(self._write, self._where, self._trained).begin()
        sys.addaudithook(self._audit)
        register_module_forward_pre_hook(self._before_forward)
        register_module_forward_hook(self._after_forward, always_call=True)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        wrap(torch.autograd, "backward", self._backward)
        wrap(torch.amp.GradScaler, "scale", _scaled)
        wrap(nn.utils, "clip_grad_norm_", partial(self._clip, "max_norm"), nn.utils.clip_grad)
        wrap(nn.utils, "clip_grad_value_", partial(self._clip, "clip_value"), nn.utils.clip_grad)
        wrap(DataLoader, "__iter__", self._iterate)
        if self._untouched:
            self._follow_cycles()
        wrap(BaseProcess, "start", self._start_process)
        wrap(Spine, "hand_out", self._hand_out)
        wrap(Spine, "leave_pass", self._leave_pass)
        wrap(replicate, "no_sync", self._no_sync, samestep)
        wrap(Draws, "say_other", self._draw_apart)
        wrap(Group, "say", self._say)
        wrap(os, "stat", self._stat)

    def finish(self) -> None:
        self._facts |= {
            "serial": not facts.is_parallel(),
            "optimizers": len(self._taken),
            "told": self._reads.lines,
            "clock": self._reads.clock,
            "seeded": self._reads.seeded,
            "whole_batches": "shares" in self._removed,
            "made_sums": "sum" in self._removed or "counts" in self._removed,
            "own": sorted(self._own, reverse=True),
            "widths": self._widths,
            "drawn": self._drawn.draws,
            "param": facts.digests_of(self._named(nn.Module.named_parameters)),
            "buffer": facts.digests_of(self._named(nn.Module.named_buffers)),
        }
        self._write({"facts": self._facts})
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        if not self._file.closed:
            self._file.write(json.dumps(line) + "\n")

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Note the first Python process that the script starts; check files that it reads with `_stat`."""
        if event == "subprocess.Popen" and sys.executable in str(args[:2]):
            self._facts.setdefault("children", users_line())
        if event == "open" and isinstance(args[0], str) and not args[2] & _WRITES:
            with suppress(OSError):
                os.stat(args[0])

    def _stat(self, original: Callable[..., os.stat_result], path: Any, **options: Any) -> os.stat_result:
        """Note the first file of an earlier run that the script reads or tests for."""
        status, (began, now) = original(path, **options), self._of_earlier_runs
        is_file = S_ISREG(status.st_mode) and status.st_size and not str(path).endswith(".pyc")
        if is_file and began < status.st_mtime < now and "left" not in self._facts and (line := users_line()):
            self._facts["left"] = f"{Path(path).name} ({line})"
        return status

    def _where(self) -> tuple[int, bool]:
        return sum(self._taken.values()), facts.is_in_training_loop() and not self._evaluated

    def _trained(self) -> set[int]:
        kinds = (nn.Module.named_parameters, nn.Module.named_buffers)
        return {tensor.data_ptr() for kind in kinds for _, tensor in self._named(kind)}

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self._depth += 1
        if self._depth > 1 or self._in_backward or (first := next(module.parameters(), None)) is None:
            return
        if precision := facts.precision_of(first.device):
            self._facts["precision"] = precision
        # tensors have no values under torch.func and in tracers
        has_values = not is_functional() and torch._C._get_tracing_state() is None
        if module not in self._roots:
            self._roots.append(module)
            self._change_last_bits(module.parameters() if has_values else ())
        if not has_values:
            return
        parts = [part for part in module.modules() if part.training]
        if torch.is_grad_enabled():
            self._forwards.append({"training": module.training, "rows": facts.rows_of(args)})
            self._own |= {own for own in map(_own_of_each_rank, parts) if own}
        elif any(isinstance(part, _BatchNorm) and part.momentum is not None for part in parts):
            self._facts["careless_last"] = users_line()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if not self._depth and self._forwards and "out" not in self._forwards[-1]:
            self._forwards[-1]["out"] = facts.rows_of(output)

    @torch.no_grad()
    def _change_last_bits(self, parameters: Iterable[torch.Tensor]) -> None:
        for tensor in parameters if self._nudge else ():
            if tensor.is_floating_point():
                tensor.mul_((1 + self._last_bits(tensor, tensor.shape)).to(tensor))

    def _last_bits(self, tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The dtype's epsilon with a random sign for each element."""
        epsilon = max(torch.finfo(tensor.dtype).eps, EPSILON.get(self._facts["precision"], 0.0))
        return epsilon * (torch.randint(0, 2, tuple(shape), generator=self._nudge) * 2 - 1)

    @torch.no_grad()
    def _add_rounding(self, tensors: Sequence[torch.Tensor]) -> None:
        """Add rounding to gradients, as sums in another order have it, even if terms cancel out; not to unused rows."""
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        strided = [grad for grad in gradients if grad.layout is torch.strided and grad.numel()]
        dense = [grad for grad in strided if grad.is_floating_point()]
        sizes = [float(grad.double().norm()) / grad.numel() ** 0.5 for grad in dense]
        for gradient, size in zip(dense, sizes, strict=True):
            rows = gradient.reshape(len(gradient), -1) if gradient.dim() > 1 else gradient.reshape(1, -1)
            is_used = rows.any(1, keepdim=True) if gradient.dim() > 1 else 1
            rounding = self._last_bits(gradient, rows.shape) * max(size, max(sizes) / 10) * is_used
            gradient.add_(rounding.reshape(gradient.shape).to(gradient))

    def _backward(self, original: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        if self._in_backward or facts.is_of_inputs(kwargs.get("inputs")):
            original(tensors, *args, **kwargs)
            return
        losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        with _disable_current_modes():  # modes of the script must not see these operations
            gradients = kwargs.get("grad_tensors", args[0] if args else None)
            gradients = [gradients] if isinstance(gradients, torch.Tensor) else gradients
            weight = self._record_loss(losses, gradients)
        self._facts["backwards"] += 1
        self._facts.pop("careless_last", None)  # it is a part of this step, as a GAN's samples are
        self._in_backward = True
        try:
            original([loss * weight for loss in losses] if weight != 1 else tensors, *args, **kwargs)
        finally:
            self._in_backward = False

    def _record_loss(self, losses: list[torch.Tensor], gradients: Sequence[Any] | None) -> float:
        """Note the losses of a backward call; returns the factor by which to multiply them."""
        share, reduction = facts.current_share(), reduction_of(losses[-1])
        count = reduction.get("count") if "counts" in self._removed else None
        weight = count / totals.sum(float(count)) if count else 1.0
        part = {
            "loss": sum(map(_value, losses, gradients or [None] * len(losses))) * weight,
            "forwards": self._forwards,
            **self._given,
            "turn": self._turn,
            "line": users_line(),
        }
        self._parts.append(part | reduction | share)
        self._forwards = []
        if not share and self._foreign is not None:
            self._facts.setdefault("foreign", self._foreign)
        return weight

    def _clip(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._clips[name] = [float(kwargs[name] if name in kwargs else args[1])]
        self._facts["clip"] = users_line()
        return original(*args, **kwargs)

    def _iterate(self, original: Callable[..., Iterator[Any]], loader: DataLoader[Any]) -> Iterator[Any]:
        if facts.is_ours(loader):
            return original(loader)
        if torch.is_grad_enabled():
            sampler_or_batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
            sampler = getattr(loader.batch_sampler, "sampler", sampler_or_batches)
            is_plain = isinstance(sampler, RandomSampler | SequentialSampler)
            self._foreign = f"a {'plain DataLoader' if is_plain else type(sampler).__name__} ({users_line()})"
        if "loaders" in self._removed:
            return iter(self._removed.loader(loader))
        return self._handed_out(original(loader)) if self._untouched else original(loader)

    def _follow_cycles(self) -> None:
        """Note the batches that `itertools.cycle` repeats: it asks a DataLoader for those of one pass alone."""
        original, again = itertools.cycle, self._again

        class Cycle(itertools.cycle):  # type: ignore[type-arg]
            def __new__(cls, iterable: Any) -> Any:
                return again(iter(iterable)) if isinstance(iterable, DataLoader) else original(iterable)

        itertools.cycle = Cycle  # type: ignore[misc]

    def _again(self, batches: Iterator[Any]) -> Iterator[Any]:
        kept = []
        for batch in batches:
            kept.append(batch)
            yield batch
        while kept:
            yield from self._handed_out(iter(kept))

    def _handed_out(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if torch.is_grad_enabled():
                self._note_batch(batch)
            yield batch
        # an evaluation may end inside a step, and must not replace the training batch
        if torch.is_grad_enabled():
            self._note_batch(None)

    def _hand_out(
        self, original: Callable[..., None], spine: Spine, share: Share, batch: Any = None, *more: Any
    ) -> None:
        original(spine, share, batch, *more)
        if share.microbatch is None and share.of.training:
            self._note_batch(batch)

    def _note_batch(self, batch: Any) -> None:
        """Note a batch before the training loop gets it."""
        self._evaluated = False
        if "careless_last" in self._facts:
            self._facts["careless"] = self._facts.pop("careless_last")
        self._given = facts.batch_of(batch)
        if (tensor := facts.first_tensor(batch)) is not None:
            self._widths.append(tensor.shape[1:])
        self._turn += 1

    def _leave_pass(self, original: Callable[..., None], spine: Spine, passed: Pass) -> None:
        original(spine, passed)
        self._evaluated = not passed.training
        if passed.training:
            self._given = {}

    def _start_process(self, original: Callable[..., None], process: BaseProcess) -> None:
        if not self._depth and not type(process).__module__.startswith("torch.utils.data"):
            self._facts.setdefault("children", users_line())
        original(process)

    def _no_sync(self, original: Callable[..., Any], model: nn.Module, enabled: bool = True) -> Any:
        self._facts["no_sync"] = users_line()
        return original(model, enabled)

    def _draw_apart(self, original: Callable[..., str], draws: Draws, *words: str) -> None:
        self._facts.setdefault("apart", original(draws, *words))

    def _say(self, original: Callable[..., None], group: Group, text: str, what: str = "") -> None:
        self._facts.setdefault("said", {}).setdefault(what or text, text)
        original(group, text, what)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._taken.setdefault(optimizer, 0)
        if not (self._untouched or facts.is_parallel()):
            raise SystemExit(0)
        number = [*self._taken].index(optimizer)
        self._removed.before_step(optimizer)
        stepped = _stepped(optimizer)
        names = {id(tensor): f"optimizer {number}, tensor {at}" for at, tensor in enumerate(stepped)}
        names |= {id(tensor): name for name, tensor in self._named(nn.Module.named_parameters)}
        named = [(names[id(tensor)], tensor) for tensor in stepped]
        step = {
            "parts": self._parts,
            "hyper": [facts.hyper_of(group) | self._clips for group in optimizer.param_groups],
            "grad": facts.digests_of((name, tensor.grad) for name, tensor in named),
            "param": facts.digests_of(named),
            "buffer": facts.digests_of(self._named(nn.Module.named_buffers)),
        }
        self._write(step)
        self._parts, self._clips = [], {}
        if self._nudge is not None:
            self._add_rounding(stepped)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._taken[optimizer] += 1
        self._change_last_bits(_stepped(optimizer))
        if self._taken[next(iter(self._taken))] == self._most_steps:
            self._facts["cut"] = True
            raise SystemExit(0)

    def _outermost(self) -> list[nn.Module]:
        inner = {id(part) for root in self._roots for part in root.modules() if part is not root}
        return [root for root in self._roots if id(root) not in inner]

    def _named(self, kind: Callable[..., Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """The models' tensors with their names; with several models, a prefix makes the names unique."""
        roots = self._outermost()
        kinds = [type(root).__name__ for root in roots]
        for at, root in enumerate(roots):
            number = str(kinds[: at + 1].count(kinds[at])) if kinds.count(kinds[at]) > 1 else ""
            prefix = f"{kinds[at]}{number}." if len(roots) > 1 else ""
            inner = root.module if isinstance(root, DistributedDataParallel) else root
            yield from ((f"{prefix}{name}", tensor) for name, tensor in kind(inner))


def _scaled(original: Callable[..., Any], scaler: torch.amp.GradScaler, outputs: Any) -> Any:
    scaled = original(scaler, outputs)
    if isinstance(scaled, torch.Tensor):
        scaled.loss_scale = scaler.get_scale()  # type: ignore[attr-defined]
    return scaled


def _value(loss: torch.Tensor, gradient: torch.Tensor | None) -> float:
    """A loss without the scale of a GradScaler; of several, the sum that their gradients stand for."""
    terms = loss.detach().double() * (gradient if gradient is not None and loss.numel() > 1 else 1.0)
    return float(terms.sum()) / getattr(loss, "loss_scale", 1.0)


def _stepped(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [tensor for group in optimizer.param_groups for tensor in group["params"]]


def _own_of_each_rank(part: nn.Module) -> str | None:
    """What this module draws for each rank, or computes only from the rank's share, by default."""
    if isinstance(part, _BatchNorm) and not isinstance(part, Synced | nn.SyncBatchNorm):
        return "BatchNorm statistics"
    return "dropout masks" if isinstance(part, _DropoutNd) and part.p else None
