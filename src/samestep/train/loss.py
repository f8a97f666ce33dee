"""Reads from a loss's autograd graph how it was reduced, and by which count."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

_PASSED = ("Mul", "Div", "Neg", "ToCopy", "Add", "Sub", "Rsub", "View", "Squeeze", "Clone")


def reduction_of(loss: torch.Tensor) -> dict[str, Any]:
    """The last reduction (mean or sum), the count it divides by, and the terms of a mean."""
    return _reduction_at(loss.grad_fn)


def leaves_before(tensor: torch.Tensor, nodes: int = 1000) -> Iterator[torch.Tensor]:
    """What it is made of, as far as that is found in so many steps."""
    if tensor.is_leaf:
        yield tensor
    variables = (getattr(node, "variable", None) for node in nodes_before(tensor, nodes))
    yield from (leaf for leaf in variables if leaf is not None)


def nodes_before(
    tensor: torch.Tensor, most: int, through: Callable[[Any], bool] = lambda node: True
) -> Iterator[Any]:
    """Its autograd graph, the nearest operations first, as far as it goes through such."""
    seen = {tensor.grad_fn}
    to_do = [tensor.grad_fn]
    for node in itertools.islice(to_do, most):
        yield node
        for before, _ in getattr(node, "next_functions", ()) if through(node) else ():
            if before is not None and before not in seen:
                seen.add(before)
                to_do.append(before)


def _reduction_at(node: Any) -> dict[str, Any]:
    divisor: float | None = None
    while node is not None:
        name = name_of(node)
        reduction = getattr(node, "_saved_reduction", {"Mean": 1, "Sum": 2}.get(name))
        stack = _stack_before(node, 4) if name == "Sum" else None
        if stack is not None and stack.next_functions:
            # a sum of several losses, perhaps with weights, is what each of them is
            found = _reduction_at(stack.next_functions[0][0])
            if found["reduction"] is not None:
                return found
        if reduction in (1, 2) and getattr(node, "_saved_self_sym_sizes", None) != ():
            count = divisor if reduction == 2 else _count(node)
            terms = getattr(node, "_saved_self", None) if reduction == 1 else None
            is_counted = count is None and isinstance(terms, torch.Tensor)
            found = {"reduction": ("mean", "sum")[reduction - 1], "count": count}
            return {**found, "terms": float(terms.numel()) if is_counted and terms is not None else count}
        if not name.startswith((*_PASSED, "Mean", "Sum")) or not node.next_functions:
            break
        other = getattr(node, "_saved_other", None) if name == "Div" else None
        if isinstance(other, torch.Tensor) and other.requires_grad:
            break  # no count: it is made of the model's outputs too
        divisor = _single(other) if name == "Div" else divisor
        node = node.next_functions[0][0]
    return {"reduction": None}


def _stack_before(node: Any, steps: int) -> Any:
    """The stack of losses that is summed up there, None where it is none."""
    for before, _ in node.next_functions if steps else ():
        if before is not None and name_of(before) == "Stack":
            return before
        if (
            before is not None
            and name_of(before).startswith(_PASSED)
            and (found := _stack_before(before, steps - 1))
        ):
            return found
    return None


def name_of(node: Any) -> str:
    return str(node.name()).partition("Backward")[0]


def _count(node: Any) -> float | None:
    """What a mean divides by: cross entropy divides by the weights of the targets that it does not ignore."""
    return _single(getattr(node, "_saved_total_weight", getattr(node, "_saved_self_sym_numel", None)))


def _single(value: Any) -> float | None:
    is_single = isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    return float(value) if is_single else None
