"""What is told of every pass, step and microbatch, and what the spine asks of the models."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from samestep.train.step import Pass, Share


class Subscriber:
    """Is told of every pass, step and microbatch; what it does not need it leaves out."""

    def phase_begins(self, phase: str, call: str) -> None:
        """This rank does something else from here on: one of rundir's PHASES, and the call with its line."""

    def backward_begins(self, loss: torch.Tensor) -> None:
        """The script calls backward() of this tensor."""

    def slopes_given(self, given: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor | None], bool]) -> None:
        """Of these tensors torch.autograd.grad gave these slopes; whether those of ranks are added to the batch's."""

    def pass_begins(self, begun: "Pass") -> None: ...
    def step_begins(self, share: "Share") -> None: ...
    def microbatch_begins(self, share: "Share") -> None: ...
    def microbatch_ends(self, share: "Share") -> None: ...
    def step_ends(self, share: "Share") -> None: ...
    def pass_ends(self, ended: "Pass") -> None: ...
    def pass_left(self, left: "Pass") -> None: ...


class Models(Subscriber):
    """The models that are kept equal on all ranks; there are none, until the first is replicated."""

    def trains(self, shuffled: bool) -> bool:
        """Whether a pass that begins now is one of training."""
        return False

    def parameters(self) -> Iterable[torch.Tensor]:
        """What is kept equal on all ranks."""
        return ()

    def exchanging(self) -> AbstractContextManager[None]:
        """Collective. Around a backward: at its end all gradients are there."""
        return nullcontext()

    def adds(self, leaves: Iterable[torch.Tensor] = ()) -> bool:
        """Whether the gradients of ranks are added in a model that has one of these leaves; in any, where none has."""
        return False

    @property
    def weigh_losses(self) -> bool:
        """Whether a loss counts by its share where backward begins; a tree weighs gradients itself."""
        return False

    def exchanges(self) -> Iterable[tuple[float, float]]:
        """Seconds that the latest measured exchanges of gradients took, and in how many of them backward went on."""
        return ()
