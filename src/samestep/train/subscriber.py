"""The interfaces of the spine: what it tells its subscribers, and what it asks of the models."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from samestep.train.passes import Pass, Share


class Subscriber:
    """Gets the spine's events; a subclass overrides those that it needs."""

    def phase_begins(self, phase: str, call: str) -> None:
        """This rank enters a phase, one of rundir's PHASES; `call` is the call with its line."""

    def backward_begins(self, loss: torch.Tensor) -> None:
        """The script calls backward() of this tensor."""

    def slopes_given(self, given: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor | None], bool]) -> None:
        """torch.autograd.grad returned gradients: its inputs, the gradients, and whether they are terms of a sum."""

    def gathered(self, own: torch.Tensor) -> None:
        """samestep.gather joins this tensor with those of other ranks."""

    def pass_begins(self, begun: Pass) -> None: ...
    def step_begins(self, share: Share) -> None: ...
    def microbatch_begins(self, share: Share) -> None: ...
    def microbatch_ends(self, share: Share) -> None: ...
    def step_ends(self, share: Share) -> None: ...
    def pass_ends(self, ended: Pass) -> None: ...
    def pass_left(self, left: Pass) -> None: ...


class Models(Subscriber):
    """What the spine asks of the replicas; these are the answers until the first model is replicated."""

    def trains(self, shuffled: bool) -> bool:
        """Whether a pass that begins now trains."""
        return False

    def part(self) -> None:
        """A model is called: from here on each rank draws its own numbers, where it is to."""

    def parameters(self) -> Iterable[torch.Tensor]:
        """The parameters of all replicas."""
        return ()

    def name_of(self, parameter: torch.Tensor) -> str:
        """`conv1.bias of Net`; "" where it is in no replica."""
        return ""

    def holds_back(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether a rank has a gradient of these parameters that the ranks have not exchanged, as inside no_sync."""
        return False

    def exchanging(self) -> AbstractContextManager[None]:
        """Collective. Context manager around a backward; at its end all gradients were exchanged."""
        return nullcontext()

    def adds(self, leaves: Iterable[torch.Tensor] = ()) -> bool:
        """Whether a replica with one of these leaves adds the ranks' gradients (loss="sum"), or without leaves any."""
        return False

    def holds(self, module: torch.nn.Module) -> bool:
        """Whether a module is a part of a replica."""
        return False

    @property
    def weighs_losses(self) -> bool:
        """Whether a loss is multiplied by its share's weight where backward begins; a tree weighs gradients itself."""
        return False

    def exchanges(self) -> Iterable[tuple[float, float]]:
        """Of the latest measured exchanges of gradients: their seconds, and for how many of these backward went on."""
        return ()
