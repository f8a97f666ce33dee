"""Gives recurrent layers what they need of the whole batch (`replicate(same=True)`).

It tells where they have the batch, since their kernels draw inside, where no operation can be followed, and lets
`pad_packed_sequence` pad to the whole batch's longest sequence.
"""

import sys
from typing import Any

import torch
from torch import _VF
from torch.nn.utils.rnn import PackedSequence

from samestep.train.batch.parts import Packed, Part
from samestep.train.draws.draws import Draws
from samestep.train.group.group import Group, Member
from samestep.train.group.world import joined
from samestep.train.passes import Rows, Share
from samestep.train.script.sizes import is_over_samples
from samestep.train.step import Spine, spine


class Padding(Member):
    """Replaces the kernel of pad_packed_sequence on several ranks, from `begin` on."""

    # Without this a rank would pad to the longest sequence of its share, beside labels of the whole batch's length.

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._spine = group.the(Spine)
        self._kernel: Any = None

    def begin(self) -> None:
        if self._kernel is None and self.group.world.size > 1:
            # functions that the script has imported by name look the kernel up at each call
            self._kernel = self.group.replace(_VF, "_pad_packed_sequence", self._pad)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _pad(self, data: Any, batch_sizes: Any, batch_first: bool, value: float, length: int) -> Any:
        """Collective where other ranks have a share of the batch too."""
        share = self._spine.origins.at_hand
        if share is not None and share.all > 1 and share.microbatches == 1:
            length = max(length, self._longest(share, length))
        return self._kernel(data, batch_sizes, batch_first, value, length)

    def _longest(self, share: Share, mine: int) -> int:
        if is_over_samples(sys._getframe(2), share.mine or share.all):
            return mine
        if _is_on_all_ranks(share, self.group):
            lengths: list[int] = self.group.all_gather("pad_packed_sequence", 0 if share.lent else mine)
            return max(lengths)
        # collate_fn has padded to the whole batch's longest
        pairs = share.of.tensors()
        sizes = (t.shape[1 - share.dim_in(name)] for name, t in pairs if t.dim() > 1)
        return min((size for size in sizes if size >= mine), default=mine)


def _is_on_all_ranks(share: Share, group: Group) -> bool:
    """Whether each rank has samples of this batch, in training at least lent ones."""
    return share.of.training or share.all >= group.world.size


def note_layouts(model: torch.nn.Module) -> None:
    """Local. Add hooks to recurrent layers that tell where the batch is while they are called."""
    for module in model.modules():
        if isinstance(module, torch.nn.RNNBase):
            # module-level functions: a hook that refers to the group would be copied and pickled with the model
            module.register_forward_pre_hook(_enter_recurrent)
            module.register_forward_hook(_leave_recurrent, always_call=True)


def _enter_recurrent(module: torch.nn.Module, args: Any) -> None:
    draws = joined().the(Draws)
    if draws.active and module.training and module.dropout and isinstance(args[0], PackedSequence):
        draws.packed = _packed(args[0])


def _leave_recurrent(module: torch.nn.Module, args: Any, output: Any) -> None:
    draws = joined().the(Draws)
    draws.packed = None
    if (
        (places := draws.watching.places) is not None
        and isinstance(output, tuple)
        and isinstance(output[0], torch.Tensor)
    ):
        places.mark(output[0], 0 if module.batch_first else 1)


def _packed(packed: PackedSequence) -> Packed | None:
    """Collective. This rank's part of the whole batch's packed sequence."""
    group, share = joined(), spine().origins.at_hand
    if share is None or group.world.size == 1:
        return None
    if not _is_on_all_ranks(share, group):
        if share.mine < share.all:
            why = "the lengths of other ranks' sequences are not known; give the evaluation larger batches"
            group.the(Draws).say_other("dropout between recurrent layers", why)
        return None
    host = torch.arange(int(packed.batch_sizes[0]), device="cpu")
    lengths = (packed.batch_sizes.unsqueeze(1) > host).sum(0)  # of the sorted sequences
    if packed.unsorted_indices is not None:
        lengths = lengths[packed.unsorted_indices.cpu()]
    mine = [] if share.lent else lengths.tolist()
    ranks = group.all_gather("samestep.replicate's packed sequences", mine)
    if share.lent or share.mine == share.all:
        return None
    everyones = torch.tensor([length for rank in ranks for length in rank], device="cpu")
    first = sum(map(len, ranks[: group.world.rank]))
    ordered, by_length = torch.sort(everyones, descending=True)
    place = torch.argsort(by_length)
    sizes = (ordered > torch.arange(int(ordered[0]), device="cpu").unsqueeze(1)).sum(1)
    begins = torch.cumsum(sizes, 0) - sizes
    own = place[first + (host if packed.sorted_indices is None else packed.sorted_indices.cpu())]
    rows = [begins[step] + own[: int(count)] for step, count in enumerate(packed.batch_sizes)]
    return Packed(
        Part(0, Rows(len(packed.data), 0, int(sizes.sum())), chosen=torch.cat(rows)),
        Part(1, Rows(len(own), 0, len(everyones)), chosen=own),
        sizes.tolist(),
    )
