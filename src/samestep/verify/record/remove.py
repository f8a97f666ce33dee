"""Removes suspected causes, by their names in experiments.py, from a run, to test if the difference goes away."""

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.distributed import DistributedSampler

import samestep
from samestep.train import optimizers, passes, totals
from samestep.train.data import loader as loaders
from samestep.train.data import share, steps
from samestep.train.data.batches import _Seeded
from samestep.train.group import world
from samestep.train.model import replica, replicate, weighing
from samestep.train.model.replicas import Replicas
from samestep.train.script.lines import scripts_frame
from samestep.train.weights import Weights
from samestep.verify.record import wrap

_SEED = 20
# files that call torch.distributed on behalf of the script
_BETWEEN = (str(Path(__file__).parent), optimizers.__file__)


class Removed:
    """The causes that are removed from this run."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._values: dict[str, list[str]] = {}
        for name, _, value in (name.partition("=") for name in names):
            self._values.setdefault(name, []).append(value)
        self._loaders: dict[int, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def values(self, name: str) -> Sequence[str]:
        """What is named of this cause, such as the lines at which the script sees rank 0 of size 1."""
        return self._values.get(name, [])

    def begin(self) -> None:
        if "seeds" in self:
            _seed()
        if "sum" in self or "counts" in self:
            (replicate.replicate.__kwdefaults__ or {})["loss"] = "sum"
        if "shares" in self:
            _share_nothing()
            if "*" in self.values("world"):
                _exchange_nothing()
        if "augment" in self:
            wrap(_Seeded, "_sample", lambda original, of, seed, epoch, index: original(of, 0, 0, index))
            wrap(_MapDatasetFetcher, "__init__", _fix_draws)
        if "no_sync" in self:
            wrap(replicate, "no_sync", lambda original, model, enabled=True: original(model, False), samestep)
        for record in self.values("reseeded"):
            facts = json.loads(Path(record).read_text(encoding="utf-8").splitlines()[-1])["facts"]
            wrap(torch, "manual_seed", partial(_reseed, iter(facts["seeded"])), torch.random)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        for scale in self.values("scale"):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad /= world.joined().world.size ** float(scale)

    def loader(self, original: DataLoader[Any]) -> Any:
        """A loader of samestep for a DataLoader of the script."""
        if id(original) not in self._loaders:
            sampler: Any = original.sampler
            has_own_order = not isinstance(sampler, RandomSampler | SequentialSampler | DistributedSampler)
            self._loaders[id(original)] = loaders.loader(
                original.dataset,
                original.batch_size or len(next(iter(original.batch_sampler or ()))),
                shuffle=not has_own_order and getattr(sampler, "shuffle", isinstance(sampler, RandomSampler)),
                sampler=sampler if has_own_order else None,
                drop_last=original.drop_last,
                collate_fn=original.collate_fn,
                num_workers=original.num_workers,
            )
        return self._loaders[id(original)]


class _Fixed(Dataset[Any]):
    """A dataset in which a sample's random draws depend only on the sample."""

    def __init__(self, dataset: Any) -> None:
        self._seeded = _Seeded(dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._seeded.__getitems__(([(0, 0, index)], None))[0][0]


def _fix_draws(original: Callable[..., None], fetcher: Any, dataset: Any, *options: Any) -> None:
    original(fetcher, dataset if isinstance(dataset, _Seeded) else _Fixed(dataset), *options)


def _reseed(seeds: Iterator[int], original: Callable[[int], Any], given: int) -> Any:
    return original(next(seeds, given))


def _seed() -> None:
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    np.random.seed(_SEED)
    wrap(torch, "seed", lambda seed: torch.manual_seed(_SEED).initial_seed())
    for module, name in ((random, "seed"), (np.random, "seed"), (np.random, "default_rng")):
        wrap(module, name, _with_a_seed)


def _with_a_seed(call: Callable[..., Any], *seed: Any, **options: Any) -> Any:
    return call(*seed, **options) if options or any(value is not None for value in seed) else call(_SEED)


def _exchange_nothing() -> None:
    """Answer what the script asks of torch.distributed as at one process: it believes to be alone."""
    done = SimpleNamespace(wait=lambda *_: True, is_completed=lambda: True)

    def answer(fill: Callable[..., None], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
            frame = frame.f_back
        if frame is None or scripts_frame(frame) is not frame:
            return original(*args, **kwargs)
        fill(*args, **kwargs)
        return done

    for name, fill in _FILLED.items():
        wrap(dist, name, partial(answer, fill))


def _fill_tensors(tensor_list: list[torch.Tensor], tensor: torch.Tensor, *_: Any, **__: Any) -> None:
    for part in tensor_list:
        part.copy_(tensor)


def _fill_objects(object_list: list[Any], obj: Any, *_: Any, **__: Any) -> None:
    object_list[:] = [obj] * len(object_list)


def _fill_tensor(output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, **__: Any) -> None:
    output_tensor.copy_(input_tensor.view_as(output_tensor))


_FILLED: Mapping[str, Callable[..., None]] = {
    **dict.fromkeys(("all_reduce", "reduce"), lambda *_, **__: None),
    "all_gather": _fill_tensors,
    "all_gather_object": _fill_objects,
    "all_gather_into_tensor": _fill_tensor,
}


def _share_nothing() -> None:
    """Give each rank all samples of every batch, and make totals local: every rank is a copy of the serial script."""
    alone = SimpleNamespace(world=SimpleNamespace(size=1))

    def met() -> Any:
        # the script may rely on a total to make ranks wait, as for a file that rank 0 writes
        world.joined().all_gather("a total", 0)
        return alone

    answers: list[tuple[Any, str, Callable[..., Any]]] = [
        *((module, "cut", lambda count, size, rank: (0, count)) for module in (share, steps, passes)),
        *((module, "share_weight", lambda *_, **__: 1.0) for module in (replica, weighing)),
        (totals, "joined", met),
        (Replicas, "draw_apart", lambda _: None),
        (replicate, "convert", lambda _: None),  # BatchNorm has the whole batch already
        (Weights, "of_mean", lambda *_: 1.0),
    ]
    for owner, name, answer in answers:
        assert hasattr(owner, name), name
        setattr(owner, name, answer)
