"""Compares the ranks' models before they are replicated, and names the first difference."""

import torch

from samestep.errors import RanksDiffer
from samestep.train.group.group import Group


def check_alike(model: torch.nn.Module, group: Group) -> None:
    """Collective. Raise where models differ: DDP pairs parameters by position, and would mix them silently."""
    named = {"parameters": model.named_parameters(), "buffers": model.named_buffers()}
    mine = {
        kind: [
            f"{name} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            f"{' (frozen)' * (kind == 'parameters' and not tensor.requires_grad)}"
            for name, tensor in tensors
        ]
        for kind, tensors in named.items()
    }
    ranks = group.all_gather("samestep.replicate", mine)
    for rank, theirs in enumerate(ranks):
        for kind in mine:
            if theirs[kind] != ranks[0][kind]:
                difference = _difference(kind, ranks[0][kind], rank, theirs[kind])
                raise RanksDiffer(f"{difference}; build the same model on every rank", ranks=[rank])


def _difference(kind: str, ours: list[str], rank: int, theirs: list[str]) -> str:
    if len(ours) != len(theirs):
        shorter, longer = sorted(([fact.split()[0] for fact in facts] for facts in (ours, theirs)), key=len)
        extra = next(name for name in longer if name not in shorter)
        counts = f"{len(ours)} {kind} on rank 0 and {len(theirs)} on rank {rank}"
        return f"replicate found {counts} (first difference: {extra})"
    mine, other = next(pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1])
    return f"replicate found {mine} on rank 0 and {other} on rank {rank}"
