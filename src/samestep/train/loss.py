"""Reads from a loss's autograd graph how it was reduced, and by which count."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

_PASSED = ("Mul", "Div", "Neg", "ToCopy", "Add", "Sub", "Rsub", "View", "Squeeze", "Clone")
_NEAR = 8


class Averaged(NamedTuple):
    """How a tensor is made of averages over this rank's samples.

    `does`: what was done to them, and where, so that it is no average over samples; `of_model`: whether a model's
    outputs are in it; `sums`, `means`: whether some of it is a sum over samples that nothing divides by their number,
    or an average over this rank's samples.
    """

    does: str = ""
    of_model: bool = False
    sums: bool = False
    means: bool = False


def reduction_of(loss: torch.Tensor) -> dict[str, Any]:
    """The last reduction (mean or sum), the count it divides by, the terms of a mean, and of how many it is one."""
    return _reduction_at(loss.grad_fn)


def weights_in(loss: torch.Tensor, nodes: int) -> list[float]:
    """The numbers that it and its parts are multiplied with or divided by, the nearest first; no counts."""
    found = []
    for node in nodes_before(
        loss.grad_fn, nodes, lambda node: name_of(node).startswith((*_PASSED, "Sum", "Stack"))
    ):
        is_product = name_of(node) == "Mul"
        for name in ("_saved_self", "_saved_other") if is_product or name_of(node) == "Div" else ():
            one = getattr(node, name, None)
            if isinstance(one, torch.Tensor) and not one.dim() and not one.requires_grad:
                found += [float(one)] if is_product or one % 1 else []
    return found


def leaves_before(tensor: torch.Tensor, nodes: int = 1000) -> Iterator[torch.Tensor]:
    """What it is made of, as far as that is found in so many steps."""
    if tensor.is_leaf:
        yield tensor
    variables = (getattr(node, "variable", None) for node in nodes_before(tensor.grad_fn, nodes))
    yield from (leaf for leaf in variables if leaf is not None)


def nodes_before(node: Any, most: int, through: Callable[[Any], bool] = lambda node: True) -> Iterator[Any]:
    """The autograd graph from there, the nearest operations first, as far as it goes through such."""
    seen, to_do = {node}, [node]
    for node in itertools.islice(to_do, most):
        yield node
        for before, _ in getattr(node, "next_functions", ()) if through(node) else ():
            if before is not None and before not in seen:
                seen.add(before)
                to_do.append(before)


def _reduction_at(node: Any) -> dict[str, Any]:
    divisor: float | None = None
    losses = 1
    while node is not None:
        name = name_of(node)
        reduction = getattr(node, "_saved_reduction", {"Mean": 1, "Sum": 2}.get(name))
        behind = nodes_before(node, _NEAR, lambda one: name_of(one).startswith((*_PASSED, "Sum")))
        stack = next((one for one in behind if name == "Sum" and name_of(one) == "Stack"), None)
        # a sum of several losses, perhaps with weights, is what each of them is
        if (
            stack is not None
            and (found := _reduction_at(stack.next_functions[0][0]))["reduction"] is not None
        ):
            return found
        if reduction in (1, 2) and getattr(node, "_saved_self_sym_sizes", None) != ():
            count = divisor if reduction == 2 else _count(node)
            terms = getattr(node, "_saved_self", None) if reduction == 1 else None
            is_counted = count is None and isinstance(terms, torch.Tensor)
            found = {"reduction": ("mean", "sum")[reduction - 1], "count": count}
            found |= {"divisor": divisor, "losses": losses}
            return {**found, "terms": float(terms.numel()) if is_counted and terms is not None else count}
        if not name.startswith((*_PASSED, "Mean", "Sum")) or not node.next_functions:
            break
        other = getattr(node, "_saved_other", None) if name == "Div" else None
        if isinstance(other, torch.Tensor) and other.requires_grad:
            break  # no count: it is made of the model's outputs too
        divisor = _single(other) if name == "Div" else divisor
        before = [one for one, _ in node.next_functions if one is not None or name != "Add"]
        losses += name == "Add" and len(before) > 1
        node = before[0] if before else None
    return {"reduction": None}


def name_of(node: Any) -> str:
    return str(node.name()).partition("Backward")[0]


def _count(node: Any) -> float | None:
    """What a mean divides by: cross entropy divides by the weights of the targets that it does not ignore."""
    return _single(getattr(node, "_saved_total_weight", getattr(node, "_saved_self_sym_numel", None)))


def _single(value: Any) -> float | None:
    is_single = isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    return float(value) if is_single else None
