"""Reads from a loss's autograd graph how it was reduced, and by which count."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from samestep.train.passes import Share

_SCALED = ("Mul", "Div", "Neg", "ToCopy", "View", "Squeeze", "Clone", "_Weighed")
_ADDED = ("Add", "Sub", "Rsub")
_PASSED = (*_SCALED, *_ADDED)
_CHOSEN = ("Mul", "_Weighed")  # of their several inputs, one has the reduction
_NEAR = 8
_MANY_LOSSES = 4


class Averaged(NamedTuple):
    """How a tensor depends on reductions over this rank's samples."""

    # `does`: the operation that made it differ from an average over samples, with its line; "" where it is an average.
    # `of_model`: whether it depends on a model's outputs. `sums`: whether it has a sum over samples that is not divided
    # by their number. `means`: whether it has a mean over this rank's samples.

    does: str = ""
    of_model: bool = False
    sums: bool = False
    means: bool = False


def reduction_of(loss: torch.Tensor) -> dict[str, Any]:
    """The last reduction of a loss: its kind, its divisor, a mean's number of terms, and how many losses are added."""
    return _reduction_at(loss.grad_fn)


def kind_of(found: dict[str, Any], share: Share | None) -> tuple[str | None, float | None]:
    """The kind of a loss that was reduced so, "mean", "sum" or None, and a mean's number of terms."""
    # A sum divided by the whole batch's size is a sum. So is a sum of as many mean losses as this rank has samples;
    # divided by that number it is a mean.
    count, mine = found.get("terms"), share.mine if share is not None else 0
    if found["reduction"] == "mean":
        is_sum = found["losses"] >= mine >= _MANY_LOSSES and found["divisor"] is None
        return ("sum", None) if is_sum else ("mean", mine if found["divisor"] == mine else count)
    if count is None:
        return found["reduction"], None
    is_sum = share is not None and share.mine < share.all == count
    return ("sum", None) if is_sum else ("mean", count)


def addends_of(loss: torch.Tensor, most: int) -> list[dict[str, Any]]:
    """How each loss was reduced that this loss is a sum or a mean of; none where these are more than `most`."""
    found: list[dict[str, Any]] = []
    queue: list[Any] = [loss.grad_fn]
    while queue and len(found) <= most:
        top = node = queue.pop()
        while name_of(node).startswith(_SCALED) and (child := _only_child(node)) is not None:
            node = child
        if name_of(node).startswith(("Mean", "Sum")) and name_of(_only_child(node)).startswith("Stack"):
            node = _only_child(node)
        if name_of(node).startswith((*_ADDED, "Stack")):
            queue += [child for child, _ in reversed(node.next_functions) if child is not None]
        else:
            found.append(_reduction_at(top))
    return found if len(found) <= most else []


def weights_in(loss: torch.Tensor, most: int) -> list[float]:
    """The scalars that multiply or divide the loss or its parts, the nearest first. Counts are left out."""
    weights = []
    for node in nodes_before(
        loss.grad_fn, most, lambda node: name_of(node).startswith((*_PASSED, "Sum", "Stack"))
    ):
        is_product = name_of(node) == "Mul"
        for name in ("_saved_self", "_saved_other") if is_product or name_of(node) == "Div" else ():
            factor = getattr(node, name, None)
            if isinstance(factor, torch.Tensor) and not factor.dim() and not factor.requires_grad:
                weights += [float(factor)] if is_product or factor % 1 else []
    return weights


def leaves_before(tensor: torch.Tensor, most: int = 1000) -> Iterator[torch.Tensor]:
    """The leaves of a tensor's graph, as far as `most` nodes reach."""
    if tensor.is_leaf:
        yield tensor
    variables = (getattr(node, "variable", None) for node in nodes_before(tensor.grad_fn, most))
    yield from (leaf for leaf in variables if leaf is not None)


def nodes_before(
    start: Any, most: int, goes_through: Callable[[Any], bool] = lambda _: True
) -> Iterator[Any]:
    """At most `most` nodes of the autograd graph from `start`, breadth first, that `goes_through` leads to."""
    seen, queue = {start}, [start]
    for node in itertools.islice(queue, most):
        yield node
        for child, _ in getattr(node, "next_functions", ()) if goes_through(node) else ():
            if child is not None and child not in seen:
                seen.add(child)
                queue.append(child)


def _reduction_at(node: Any) -> dict[str, Any]:
    divisor: float | None = None
    losses = 1
    while node is not None:
        name = name_of(node)
        reduction = getattr(node, "_saved_reduction", {"Mean": 1, "Sum": 2}.get(name))
        behind = nodes_before(node, _NEAR, lambda child: name_of(child).startswith((*_PASSED, "Sum")))
        stack = next((child for child in behind if name == "Sum" and name_of(child) == "Stack"), None)
        # a sum of several losses, perhaps weighted, is reduced as its first loss is
        if (
            stack is not None
            and (reduced := _reduction_at(stack.next_functions[0][0]))["reduction"] is not None
        ):
            return reduced
        if reduction in (1, 2) and getattr(node, "_saved_self_sym_sizes", None) != ():
            count = divisor if reduction == 2 else _count(node)
            terms = getattr(node, "_saved_self", None) if reduction == 1 else None
            is_counted = count is None and isinstance(terms, torch.Tensor)
            reduced = {"reduction": ("mean", "sum")[reduction - 1], "count": count}
            sizes: Any = getattr(node, "_saved_self_sym_sizes", None) or getattr(terms, "shape", ())
            reduced |= {"divisor": divisor, "losses": losses, "rows": sizes[0] if sizes else None}
            return {**reduced, "terms": float(terms.numel()) if is_counted and terms is not None else count}
        if not name.startswith((*_PASSED, "Mean", "Sum")) or not node.next_functions:
            break
        denominator = getattr(node, "_saved_other", None) if name == "Div" else None
        if isinstance(denominator, torch.Tensor) and denominator.requires_grad:
            break  # not a count: it depends on the model's outputs
        divisor = _single(denominator) if name == "Div" else divisor
        children = [child for child, _ in node.next_functions if child is not None or name != "Add"]
        losses += name == "Add" and len(children) > 1
        node = _only_child(node) if name in _CHOSEN else children[0] if children else None
    return {"reduction": None}


def _only_child(node: Any) -> Any:
    """The only child; of a product, or of the outputs of a model, the only child with a reduction."""
    children = [child for child, _ in node.next_functions if child is not None]
    if len(children) > 1 and name_of(node) in _CHOSEN:
        children = [child for child in children if _has_reduction(child)]
    return children[0] if len(children) == 1 else None


def _has_reduction(node: Any) -> bool:
    near = nodes_before(node, _NEAR, lambda child: name_of(child).startswith(_PASSED))
    return any(hasattr(child, "_saved_reduction") or name_of(child) in ("Mean", "Sum") for child in near)


def name_of(node: Any) -> str:
    return str(node.name()).partition("Backward")[0] if node is not None else ""


def _count(node: Any) -> float | None:
    """The divisor of a mean; cross entropy divides by the weights of the targets that it does not ignore."""
    return _single(getattr(node, "_saved_total_weight", getattr(node, "_saved_self_sym_numel", None)))


def _single(value: Any) -> float | None:
    is_single = isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    return float(value) if is_single else None
