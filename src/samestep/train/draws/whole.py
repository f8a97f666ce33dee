"""Calls kernels that draw by themselves on the whole batch's size, and uses this rank's rows.

Fused attention draws its dropout mask, and cuDNN's recurrent network the masks between its layers, by an element's
place in the batch. No other kernel draws these numbers. So such a kernel gets this rank's rows at their places in the
whole batch, and zeros elsewhere: it draws what the serial script draws, and takes as long as for the whole batch. Its
backward kernel, which draws the mask again, gets the same.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import pad

from samestep.train.batch.mixing import arguments_of
from samestep.train.batch.parts import Packed, Part

ATTENTION = tuple(f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn"))
RECURRENT = "_cudnn_rnn"
# arguments of the operations and of their backward operations that have the batch
_OF_ATTENTION = ("query", "key", "value", "attn_bias", "out", "grad_out", "grad_out_", "logsumexp")
_OF_STEPS = ("input", "output", "grad_output")
_OF_STATES = ("hx", "cx", "grad_hy", "grad_cy")
_MANY = 64
_BIAS_STEP = 16  # values: fused attention takes a bias only where its rows begin at multiples of this


class _Call(NamedTuple):
    """This rank's part of each argument and of the first results of a call; batch_sizes are a packed sequence's."""

    arguments: Mapping[str, Part]
    of_forward: Sequence[Part]
    of_backward: Sequence[Part]
    batch_sizes: list[int]


class WholeCalls:
    """Remembers for each call in forward which part of the batch this rank had, for its call in backward."""

    def __init__(
        self,
        part: Callable[[str, torch.Tensor], Part | None],
        packed: Callable[[], Packed | None],
        quiet: Callable[[], AbstractContextManager[None]],
        say_other: Callable[[str, str], object],
    ) -> None:
        self._part, self._packed, self._quiet, self._say_other = part, packed, quiet, say_other
        # by the memory of a result that backward gets: an attention's logsumexp, a recurrent network's reserve
        self._calls: dict[int, tuple[StorageWeakRef, _Call]] = {}
        self._most_calls = _MANY
        self._shapes: set[torch.Size] = set()

    def forward(self, name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        given = _given(name, args, kwargs)
        part = self._part(name, args[0]) if _draws(given) else None
        call = (
            _of_attention(args[0], part) if name in ATTENTION else _of_recurrent(given, part, self._packed())
        )
        with self._quiet():
            if part is None:
                return original(*args, **kwargs)
            if call is not None:
                results = _called(original, call, call.of_forward, given, args, kwargs)
                self._remember(results[1 if name in ATTENTION else 3], call)
                self._shapes.add(args[0].shape)
                return tuple(results)
        self._say_other(name, "where it draws for this rank's samples is its kernel's secret")
        return original(*args, **kwargs)

    def backward(self, name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        given = _given(f"{name}_backward", args, kwargs)
        kept, input = ("logsumexp", "query") if name in ATTENTION else ("reserve", "input")
        _, call = self._calls.get(given[kept].untyped_storage()._cdata, (None, None))
        if call is not None:
            return tuple(_called(original, call, call.of_backward, given, args, kwargs))
        if _draws(given) and given[input].shape in self._shapes:
            why = "its saved tensors were copied, as by save_on_cpu, so that its backward draws another mask"
            self._say_other(name, why)
        return original(*args, **kwargs)

    def _remember(self, kept: torch.Tensor, call: _Call) -> None:
        if len(self._calls) > self._most_calls:
            self._calls = {at: known for at, known in self._calls.items() if not known[0].expired()}  # type: ignore[no-untyped-call]
            self._most_calls = 2 * len(self._calls) + _MANY
        reference = StorageWeakRef(kept.untyped_storage())  # type: ignore[no-untyped-call]
        self._calls[reference.cdata] = reference, call


def _given(name: str, args: Any, kwargs: Any) -> dict[str, Any]:
    return arguments_of(getattr(torch.ops.aten, name).default, args, kwargs)


def _draws(given: Mapping[str, Any]) -> bool:
    return bool(given.get("dropout_p", given.get("dropout"))) and given.get("train", True)


def _of_attention(query: torch.Tensor, part: Part | None) -> _Call | None:
    part = _at(0, query, part)
    return _Call(dict.fromkeys(_OF_ATTENTION, part), [part] * 2, [part] * 4, []) if part else None


def _of_recurrent(given: Mapping[str, Any], part: Part | None, packed: Packed | None) -> _Call | None:
    if given["batch_sizes"]:
        if packed is None:
            return None
        steps, states, batch_sizes = packed.rows, packed.sequences, packed.batch_sizes
    else:
        found = _at(0 if given["batch_first"] else 1, given["input"], part)
        if found is None:
            return None
        steps, states, batch_sizes = found, replace(found, dim=1), []
    arguments = dict.fromkeys(_OF_STEPS, steps) | dict.fromkeys(_OF_STATES, states)
    return _Call(arguments, [steps, states, states], [steps, states, states], batch_sizes)


def _at(dim: int, tensor: torch.Tensor, part: Part | None) -> Part | None:
    """The part along the dimension in which the kernel has samples; another may have this rank's number of rows too."""
    if part is None or part.chosen is not None or tensor.shape[dim] % part.rows.mine:
        return None
    return replace(part, layout=()) if part.dim == dim else Part(dim, part.rows)


def _called(
    original: Any, call: _Call, parts: Sequence[Part], given: Mapping[str, Any], args: Any, kwargs: Any
) -> list[Any]:
    """The results of the whole call, the first of them as this rank's parts."""

    def enlarged(name: str, value: Any) -> Any:
        if name == "batch_sizes":
            return call.batch_sizes
        part = call.arguments.get(name)
        if part is None or value is None or not value.numel():
            return value
        if name != "attn_bias":
            # gradients may be expanded, and have no order of dimensions in memory
            return part.enlarged(value.contiguous() if name.startswith("grad") else value, 0.0)
        return part.enlarged(pad(value, (0, -value.shape[-1] % _BIAS_STEP)), 0.0)[..., : value.shape[-1]]

    named = [enlarged(name, value) for name, value in zip(given, args, strict=False)]
    results = list(original(*named, **kwargs))
    for at, part in enumerate(parts[: len(results)]):
        if results[at] is not None and results[at].numel():
            results[at] = part.of(results[at]).clone()
    return results
