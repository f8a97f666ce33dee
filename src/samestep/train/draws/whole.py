"""Calls kernels that draw by themselves on the whole batch's size, and uses this rank's rows.

Fused attention draws its dropout mask, and cuDNN's recurrent network the masks between its layers, by an element's
place in the batch. No other kernel draws these numbers. So such a kernel gets this rank's rows at their places in the
whole batch, and zeros elsewhere: it draws what the serial script draws, and takes as long as for the whole batch. Its
backward kernel, which draws the mask again, gets the same.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import pad

from samestep.train.batch.mixing import arguments_of
from samestep.train.batch.parts import Part

ATTENTION = tuple(f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn"))
RECURRENT = "_cudnn_rnn"
_OF_ATTENTION = ("query", "key", "value", "attn_bias", "out", "grad_out", "grad_out_", "logsumexp")
_OF_STATE = ("hx", "cx", "grad_hy", "grad_cy")
_BIAS_STEP = 16  # values: fused attention takes a bias only where its rows begin at multiples of this


class WholeCalls:
    """Remembers for each call in forward which part of the batch this rank had, for its call in backward."""

    def __init__(
        self,
        part: Callable[[str, torch.Tensor], Part | None],
        quiet: Callable[[], AbstractContextManager[None]],
        say_other: Callable[[str, str], object],
    ) -> None:
        self._part, self._quiet, self._say_other = part, quiet, say_other
        # by the memory of a result that backward gets: an attention's logsumexp, a recurrent network's reserve
        self._parts: dict[int, tuple[StorageWeakRef, Part]] = {}
        self._shapes: set[torch.Size] = set()

    def forward(self, name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        given = _given(name, args, kwargs)
        draws = given.get("dropout_p", given.get("dropout")) and given.get("train", True)
        part = self._part(name, args[0]) if draws else None
        with self._quiet():
            if part is None:
                return original(*args, **kwargs)
        dims, is_recurrent = _dims(given), name == RECURRENT
        of_batch = {0: dims["input"], 1: 1, 2: 1} if is_recurrent else {0: 0, 1: 0}
        if part.chosen is not None or args[0].shape[of_batch[0]] % part.rows.mine:
            self._say_other(name, "where it draws for this rank's samples is its kernel's secret")
            return original(*args, **kwargs)
        if part.dim != of_batch[0]:  # where other dimensions have the size of this rank's share
            part = Part(of_batch[0], part.rows)
        with self._quiet():
            results = list(_call_enlarged(original, given, dims, part, args, kwargs))
        for at, dim in of_batch.items():
            if results[at].numel():
                results[at] = replace(part, dim=dim).of(results[at]).clone()
        self._remember(results[3] if is_recurrent else results[1], part)
        self._shapes.add(args[0].shape)
        return tuple(results)

    def backward(self, name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        given = _given(f"{name}_backward", args, kwargs)
        kept, of = (given["reserve"], "input") if name == RECURRENT else (given["logsumexp"], "query")
        _, part = self._parts.get(kept.untyped_storage()._cdata, (None, None))
        if part is None:
            if given.get("dropout_p", given.get("dropout")) and given[of].shape in self._shapes:
                why = "its saved tensors were copied, as by save_on_cpu, so that its backward draws another mask"
                self._say_other(name, why)
            return original(*args, **kwargs)
        dims = _dims(given)
        results = list(_call_enlarged(original, given, dims, part, args, kwargs))
        of_batch = (dims["input"], 1, 1) if name == RECURRENT else (0,) * len(results)
        for at, dim in enumerate(of_batch):
            if results[at] is not None and results[at].numel():
                results[at] = replace(part, dim=dim).of(results[at])
        return tuple(results)

    def _remember(self, kept: torch.Tensor, part: Part) -> None:
        self._parts = {at: known for at, known in self._parts.items() if not known[0].expired()}  # type: ignore[no-untyped-call]
        reference = StorageWeakRef(kept.untyped_storage())  # type: ignore[no-untyped-call]
        self._parts[reference.cdata] = reference, part


def _given(name: str, args: Any, kwargs: Any) -> dict[str, Any]:
    return arguments_of(getattr(torch.ops.aten, name).default, args, kwargs)


def _dims(given: Mapping[str, Any]) -> dict[str, int]:
    """The dimension of samples in each argument that has one."""
    if "hx" not in given:
        return dict.fromkeys(_OF_ATTENTION, 0)
    samples = 0 if given["batch_first"] else 1
    return dict.fromkeys(("input", "output", "grad_output"), samples) | dict.fromkeys(_OF_STATE, 1)


def _call_enlarged(
    original: Any, given: Mapping[str, Any], dims: Mapping[str, int], part: Part, args: Any, kwargs: Any
) -> Any:
    def enlarged(name: str, value: Any) -> Any:
        if name not in dims or value is None or not value.numel():
            return value
        own = replace(part, dim=dims[name], layout=())
        if name != "attn_bias":
            # gradients may be expanded, and have no order of dimensions in memory
            return own.enlarged(value.contiguous() if name.startswith("grad") else value, 0.0)
        return own.enlarged(pad(value, (0, -value.shape[-1] % _BIAS_STEP)), 0.0)[..., : value.shape[-1]]

    named = [enlarged(name, value) for name, value in zip(given, args, strict=False)]
    return original(*named, **kwargs)
