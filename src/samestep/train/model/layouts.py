"""Where a model's random draws have the batch in another place: sequence-first layers, heads, packed sequences."""

import json
import sys
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from samestep.train.draw_parts import Part
from samestep.train.draws import Draws
from samestep.train.group.world import World, joined
from samestep.train.step import spine


def note_layouts(model: torch.nn.Module, target: torch.nn.Module, world: World) -> None:
    """Local. Have the layers that draw in another layout say so while they are called."""
    for module in target.modules():
        if isinstance(module, torch.nn.RNNBase):
            # torch runs recurrent layers sequence-first, whatever their inputs are
            _watch(module, _enter_recurrent, _leave_recurrent)
        elif isinstance(module, torch.nn.MultiheadAttention):
            _watch(module, _enter_attention, _leave_attention)
        elif getattr(module, "batch_first", True) is False:
            _watch(module, _enter_sequence, _leave_sequence)
    compiled = model is not target or getattr(target, "_compiled_call_impl", None) is not None
    if compiled and world.rank == 0:
        print(
            "samestep: a compiled model may draw by itself and then does not draw the serial script's numbers under "
            "same=True; compile without fusing random operations (torch._inductor.config.fallback_random = True)",
            file=sys.stderr,
        )


def _watch(module: torch.nn.Module, enter: Any, leave: Any) -> None:
    # functions of this module: a hook that held the group would be copied and saved with the model
    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def _enter_sequence(module: torch.nn.Module, args: Any) -> None:
    joined().the(Draws).sequence_first += 1


def _leave_sequence(module: torch.nn.Module, args: Any, output: Any) -> None:
    joined().the(Draws).sequence_first -= 1


def _enter_attention(module: torch.nn.Module, args: Any) -> None:
    # its weights are (batch, heads, …) whatever its inputs are
    joined().the(Draws).in_attention += 1


def _leave_attention(module: torch.nn.Module, args: Any, output: Any) -> None:
    joined().the(Draws).in_attention -= 1


def _enter_recurrent(module: torch.nn.Module, args: Any) -> None:
    draws = joined().the(Draws)
    draws.sequence_first += 1
    if draws.active and module.training and module.dropout and isinstance(args[0], PackedSequence):
        draws.packed = _packed_part(args[0])


def _leave_recurrent(module: torch.nn.Module, args: Any, output: Any) -> None:
    draws = joined().the(Draws)
    draws.sequence_first -= 1
    draws.packed = None
    if draws.tracing is not None and isinstance(output, tuple) and isinstance(output[0], torch.Tensor):
        draws.tracing.mark(output[0], 0 if module.batch_first else 1)


def _packed_part(packed: PackedSequence) -> Part | None:
    """Collective. Which rows of the whole batch's packed sequence are those of this rank."""
    group, share = joined(), spine().at_hand
    if share is None or group.world.size == 1:
        return None
    sizes = packed.batch_sizes
    lengths = (sizes.unsqueeze(1) > torch.arange(int(sizes[0]), device="cpu")).sum(
        0
    )  # of the sorted sequences
    if packed.unsorted_indices is not None:
        lengths = lengths[packed.unsorted_indices.cpu()]
    mine = json.dumps([] if share.lent else lengths.tolist()).encode()
    ranks = [json.loads(one) for one in group.all_gather("samestep.replicate's packed sequences", mine)]
    if share.lent or share.mine == share.all:
        return None
    everyones = torch.tensor([length for rank in ranks for length in rank], device="cpu")
    first = sum(len(rank) for rank in ranks[: group.world.rank])
    ordered, by_length = torch.sort(everyones, descending=True)
    place = torch.empty_like(by_length)
    place[by_length] = torch.arange(len(by_length), device="cpu")
    steps = torch.arange(int(ordered[0]), device="cpu")
    whole_sizes = (ordered.unsqueeze(0) > steps.unsqueeze(1)).sum(1)
    begins = torch.cumsum(whole_sizes, 0) - whole_sizes
    own = (
        torch.arange(len(lengths), device="cpu")
        if packed.sorted_indices is None
        else packed.sorted_indices.cpu()
    )
    rows = [begins[step] + place[first + own[: int(count)]] for step, count in enumerate(sizes)]
    return Part(0, 0, len(packed.data), int(whole_sizes.sum()), torch.cat(rows))
