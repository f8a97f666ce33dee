"""Vectors are added in one binary tree over the microbatches of a step, whatever process holds which.

The tree is fixed by the number of microbatches alone. A rank adds what lies wholly in its own share while it
computes. What is left, at most two partial sums for each power of two, is exchanged once: every rank gets its
part of each vector (all-to-all), adds along the tree, and all parts are put together (all-gather).
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from samestep.train.step import cut

Vectors = list[torch.Tensor]
# torch 2.13 gave the function a new name and warns of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class Blocks:
    """Partial sums of neighbouring microbatches, left to right, each as large as the tree allows."""

    starts: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    sums: list[Vectors] = field(default_factory=list)

    def push(self, start: int, size: int, vectors: Vectors) -> None:
        """Add a block to the right; what it completes is added up, into the memory of its left part."""
        self.starts.append(start)
        self.sizes.append(size)
        self.sums.append(vectors)
        while len(self.sizes) > 1 and self.sizes[-2] == self.sizes[-1] and self._are_siblings():
            self._merge()

    def fold(self) -> Vectors:
        """The sum of all, where no more come: from the right, as in a tree whose left parts are full."""
        while len(self.sizes) > 1:
            self._merge()
        return self.sums.pop()

    def __iter__(self) -> Iterator[tuple[int, int, Vectors]]:
        return zip(self.starts, self.sizes, self.sums, strict=True)

    def _are_siblings(self) -> bool:
        return self.starts[-2] % (2 * self.sizes[-1]) == 0

    def _merge(self) -> None:
        right = self.sums.pop()
        self.starts.pop()
        self.sizes[-2:] = [self.sizes[-2] + self.sizes[-1]]
        if right:
            torch._foreach_add_(self.sums[-1], right)


def layout(count: int, size: int) -> list[list[tuple[int, int]]]:
    """For each rank the blocks (start, size) that are left of its share of count microbatches."""
    ranks = []
    for rank in range(size):
        blocks = Blocks()
        for index in range(*cut(count, size, rank)):
            blocks.push(index, 1, [])
        ranks.append([(start, width) for start, width, _ in blocks])
    return ranks


def add_up(
    own: Vectors, like: torch.Tensor, ranks: Sequence[Sequence[tuple[int, int]]], group: dist.ProcessGroup
) -> torch.Tensor:
    """The sum over all ranks' blocks, along the tree; own are this rank's, each flat and as long as like."""
    size, length = len(ranks), like.numel()
    chunk = -(-length // size)
    mine = len(ranks[dist.get_rank(group)])
    sent = like.new_zeros(size, mine, chunk)
    for at in range(mine):
        padded = like.new_zeros(size * chunk)
        padded[:length] = own[at]
        sent[:, at] = padded.view(size, chunk)
    counts = [len(blocks) * chunk for blocks in ranks]
    received = like.new_empty(sum(counts))
    dist.all_to_all_single(received, sent.view(-1), counts, [mine * chunk] * size, group=group)
    blocks = Blocks()
    parts = iter(torch.split(received, chunk))
    for start, width in sorted(block for one in ranks for block in one):
        blocks.push(start, width, [next(parts)])
    total = like.new_empty(size * chunk)
    _all_gather(total, blocks.fold()[0].contiguous(), group=group)
    return total[:length]


class Sender:
    """Runs exchanges one after another while backward goes on: on a stream of the device, or in a thread."""

    def __init__(self, device: torch.device, stream: torch.Stream | None, timeout: timedelta) -> None:
        self.group = dist.new_group(timeout=timeout)
        self._device, self._stream = device, stream
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="samestep-exchange", daemon=True)
        if stream is None:
            self._thread.start()

    def send(self, job: Callable[[], torch.Tensor]) -> "torch.futures.Future[torch.Tensor]":
        """Run the job after those before it; every rank has to send the same jobs."""
        if self._stream is not None:
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[self._device])
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
            with self._stream:
                done.set_result(job())
            return done
        done = torch.futures.Future()

        def work() -> None:
            try:
                done.set_result(job())
            except Exception as error:
                done.set_exception(error)  # type: ignore[arg-type]

        self._work.put(work)
        return done

    def dismiss(self) -> None:
        """End the thread after the jobs that were sent."""
        self._work.put(None)

    def stop(self) -> None:
        self.dismiss()
        if self._stream is None:
            self._thread.join(timeout=5)
        dist.destroy_process_group(self.group)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            work = None  # or the last step's replica would live until the next
