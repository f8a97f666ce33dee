"""Gives every rank its part of the serial script's random numbers (`replicate(same=True)`).

All ranks keep the same random streams. Example: of a batch of 8 samples rank 0 of 2 has 4, and a dropout draws a mask
of shape (4, 100). The replaced kernel draws (8, 100), as the serial script does, and uses rows 0 to 3. Rank 1 draws the
same (8, 100) and uses rows 4 to 7. A draw that does not have the batch, such as a new weight, stays as it is.

Covered: torch's kernels on a CPU and on CUDA, and NumPy's and Python's functions (host.py).
Not covered, with a remark where it happens: draws whose number of values depends on their input (gamma, Poisson, …), a
permutation of the share's length, compiled graphs.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from samestep.text import name_ranks
from samestep.train import streams
from samestep.train.batch.parts import FOR_ALL, Line, Packed, Part, Places, of_permutation
from samestep.train.batch.sizes import Place
from samestep.train.batch.views import has_gaps
from samestep.train.batch.watching import Watching
from samestep.train.draws.guess import DEPENDENT, Guess
from samestep.train.draws.host import DrawsOfHost, OneByOne
from samestep.train.draws.skipping import Skipping
from samestep.train.draws.whole import ATTENTION, RECURRENT, WholeCalls
from samestep.train.group.control import users_line
from samestep.train.group.group import Group, Member
from samestep.train.passes import Share
from samestep.train.script.lines import line_of_draw, named_in_call
from samestep.train.script.sizes import fixed_sizes, is_written_out
from samestep.train.step import Spine

_FILLS = (
    *("bernoulli_.float", "normal_", "uniform_", "exponential_", "cauchy_", "log_normal_", "geometric_"),
    *("random_", "random_.from", "random_.to"),
)
_CALL = "samestep's random streams"


class Draws(Member):
    """Replaces kernels that draw; inactive until a model is replicated with same=True on several ranks."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.active = False
        self.packed: Packed | None = None
        self._spine = group.the(Spine)
        self._pid = os.getpid()
        self._library: torch.library.Library | None = None
        self._paused = False
        self.watching = Watching(self._spine, self.say_other)
        self._spine.subscribe(self.watching)
        self._guess = Guess(self._spine, self.watching, self.say_other)
        self._places = Places()
        self._one_by_one = OneByOne(self._share_drawn, self.watching.may_be_samples, self.say_other)
        self._of_host = DrawsOfHost(self._share_drawn, self._part_by_shape, self._one_by_one, self.say_other)
        self._skipping = Skipping()
        self._whole = WholeCalls(self._part, lambda: self.packed, self._quiet, self.say_other)

    def begin(self) -> None:
        """Collective. From now on all ranks draw the serial script's numbers."""
        if self.active or self.group.world.size == 1:
            return
        self.adopt_first()
        self.active = self.watching.finds_draws = True
        if self._library is None:
            self.group.watch(self._digest, self._streams_differ)
        self._of_host.stand_in(self.group)
        self._library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that a kernel is replaced, which is meant
            for key in {"CPU", torch._C._dispatch_key_for_device(self.group.world.device.type)}:
                self._replace_all(key)

    def close(self) -> None:
        if self._library is not None:
            self._library._destroy()  # type: ignore[no-untyped-call]
            self.active = False

    def adopt_first(self) -> None:
        """Collective. Go on in rank 0's random streams."""
        with self._quiet():
            streams.restore(self.group.broadcast(_CALL, streams.capture()))

    def _digest(self) -> str:
        return "" if self._paused else streams.digest().hex()

    def _streams_differ(self, digests: list[str], call: str) -> None:
        """Collective. Print that ranks drew different amounts, and adopt rank 0's streams."""
        with self._quiet():
            captured = self.group.all_gather(_CALL, streams.capture())
        names = streams.different(captured[0], next(other for other in captured if other != captured[0]))
        streams.restore(captured[0])
        odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        self.group.say(
            f"the random stream of {' and '.join(names)} on {name_ranks(odd)} differs from rank 0's at "
            f"{call}: seed all ranks alike, and draw on all ranks or on none; the numbers drawn since the last such "
            "call are not the serial script's, and all ranks go on in rank 0's stream",
            what="parted streams",
        )

    def _replace_all(self, key: str) -> None:
        for name in _FILLS:
            self._replace(name, key, self._fill(name))
        self._replace("bernoulli_.Tensor", key, self._drawn_whole("bernoulli_", 0.5, 0.5))
        for kinds in ("Tensor_float", "float_Tensor", "Tensor_Tensor"):
            self._replace(f"normal.{kinds}", key, self._drawn_whole("normal", 0.0, 1.0))
        self._replace("multinomial", key, self._multinomial)
        self._replace("native_dropout", key, self._native_dropout)
        self._replace("native_batch_norm", key, self._batch_norm)
        self._replace("randperm.generator_out", key, self._randperm)
        for name in DEPENDENT:
            self._replace(name, key, self._remarked(name))
        for name in (*ATTENTION, RECURRENT):
            self._replace(name, key, partial(self._whole.forward, name))
            self._replace(f"{name}_backward", key, partial(self._whole.backward, name))

    def _replace(self, name: str, key: str, function: Callable[..., Any]) -> None:
        try:
            kernel = torch.library.get_kernel(f"aten::{name}", key)
        except RuntimeError:
            return  # this build of torch has no such operation
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

        def original(*args: Any, **kwargs: Any) -> Any:
            given = {k: v for k, v in kwargs.items() if v is not None or name.startswith("randperm")}
            return kernel.call_boxed(keys, *args, **given)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if self._is_unseen():
                return original(*args, **kwargs)
            return function(original, *args, **kwargs)

        assert self._library is not None
        self._library.impl(name, replaced, key)  # type: ignore[no-untyped-call]

    def _fill(self, name: str) -> Callable[..., torch.Tensor]:
        def fill(
            original: Any, tensor: torch.Tensor, *args: Any, generator: Any = None, **kwargs: Any
        ) -> Any:
            rows = self.packed.rows_of(tensor) if self.packed else tensor
            part = self._part(name, rows, generator)
            if part is None:
                return original(tensor, *args, generator=generator, **kwargs)

            def draw(into: torch.Tensor, own: torch.Generator | None) -> object:
                return original(into, *args, generator=own, **kwargs)

            with self._quiet():
                if not self._skipping.drew(name, rows, part, draw):
                    rows.copy_(part.of(original(part.enlarged(rows), *args, **kwargs)))
            return tensor

        return fill

    def _drawn_whole(self, name: str, *fills: float) -> Callable[..., Any]:
        """A draw whose first arguments are its parameters: a tensor with one element for each number, or a number."""

        def draw(original: Any, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
            given, rest = args[: len(fills)], args[len(fills) :]
            leading = (*given, *fills[len(given) :])  # normal(mean) leaves out its last parameter
            like = torch.broadcast_tensors(*filter(torch.is_tensor, leading))[0]  # type: ignore[no-untyped-call]
            # parameters that are older than the batch, such as a prior's mean, make a draw that is equal on all ranks
            older = self.watching.is_older(like, self._spine.origins.at_hand)
            part = None if older else self._part(name, like, generator)
            if name == "multinomial" and part is not None and part.dim:
                part = None
            with self._quiet():
                if part is None:
                    return original(*args, generator=generator, **kwargs)
                whole = (
                    part.enlarged(argument.expand(like.shape).contiguous(), fill)
                    if isinstance(argument, torch.Tensor)
                    else argument
                    for argument, fill in zip(leading, fills, strict=True)
                )
                mine = part.of(original(*whole, *rest, **kwargs))
            return args[0].copy_(mine) if name.endswith("_") else mine.clone()

        return draw

    def _multinomial(
        self, original: Any, weights: torch.Tensor, count: int, *args: Any, **kwargs: Any
    ) -> Any:
        share = self._spine.origins.at_hand
        is_shared = kwargs.get("generator") is None and share is not None and 0 < share.mine < share.all
        if weights.dim() > 1 or not is_shared:
            return self._drawn_whole("multinomial", 1.0)(original, weights, count, *args, **kwargs)
        assert share is not None
        rows, named = share.rows, named_in_call()
        if len(weights) == rows.mine and not self._guess.is_of_weights("multinomial", weights.shape, share):
            self.say_other("multinomial", "a choice among this rank's samples is none among the whole batch")
        elif count == rows.mine and count in [value for value in named if type(value) is int]:
            return original(weights, rows.all, *args, **kwargs)[rows.start :][:count].clone()
        else:
            self._guess.look_for_multiple("multinomial", torch.Size([count]), rows)
        return original(weights, count, *args, **kwargs)

    def _native_dropout(self, original: Any, input: torch.Tensor, p: float, train: bool | None) -> Any:
        """CUDA's fused dropout, with this rank's part of the whole batch's mask."""
        part = self._part("native_dropout", input) if train in (None, True) and 0 < p < 1 else None
        with self._quiet():
            if part is None:
                return original(input, p, train)
            whole = part.enlarged(input, 1.0)
            if has_gaps(input, part.dim):  # the kernel takes another order for such a tensor
                whole = torch.stack((whole, whole), -1)[..., 0]
            mask = part.of(original(whole, p, train)[1]).clone()
        return input * mask * (1 / (1 - p)), mask

    def _batch_norm(self, original: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Print a remark on a BatchNorm outside of a replica; InstanceNorm calls it with a batch of one."""
        share, is_training = self._spine.origins.at_hand, args[4] if len(args) > 4 else kwargs["training"]
        if is_training and input.shape[0] > 1 and share is not None and share.mine < share.all:
            self.group.say(
                f"a BatchNorm ({users_line()}) takes its statistics from each rank's share and not from the whole "
                "batch, because its model was not replicated (a copy needs samestep.replicate(copy)) or keeps no "
                "running statistics",
                what="own statistics",
            )
        return original(input, *args, **kwargs)

    def _randperm(self, original: Any, n: int, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
        share = self._share_drawn()
        if generator is not None or share is None or n != share.mine or is_written_out(0, "n"):
            return original(n, *args, generator=generator, **kwargs)
        self.say_other("randperm", "a permutation of this rank's share is none of the whole batch")
        # all ranks draw the whole batch's permutation, so that their streams stay equal
        whole = original(share.all, generator=None, out=torch.empty_like(kwargs["out"]))
        return kwargs["out"].resize_(n).copy_(of_permutation(whole, share.rows))

    def _remarked(self, name: str) -> Callable[..., Any]:
        def draw(original: Any, *args: Any, **kwargs: Any) -> Any:
            if self._part(name, args[0]) is not None:
                self.say_other(name, "how many numbers it draws depends on its input")
            return original(*args, **kwargs)

        return draw

    def say_other(self, name: str, why: str, does_not: str = "does not") -> str:
        """Print that a draw is not the serial script's; returns the text, which verify records."""
        text = f"{name} ({users_line()}) {does_not} draw the serial script's numbers under same=True: {why}"
        self.group.say(text, what=f"{name} under same=True")
        return text

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Context manager: draws are the original kernels', and streams are not compared."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _is_unseen(self) -> bool:
        return self._paused or self._spine.is_reading or os.getpid() != self._pid

    def _share_drawn(self) -> Share | None:
        """The batch at hand if it is shared, so that a draw may be a part of the whole batch's; else None."""
        share = self._spine.origins.at_hand
        return None if self._is_unseen() or share is None or not 0 < share.mine < share.all else share

    def _part_by_shape(self, name: str, shape: torch.Size) -> Part | None:
        """The same as `_part` for a draw of which only the shape is known."""
        share = self._share_drawn()
        if share is None or not all(shape):
            return None
        part = self._guess.part((name, len(shape), line_of_draw()), shape, share)
        return None if part is FOR_ALL else part

    def _part(self, name: str, tensor: torch.Tensor, generator: Any = None) -> Part | None:
        """Which part of the whole batch's draw this draw is; None where all ranks make the same draw."""
        share, shape = self._share_drawn(), tensor.shape
        if share is None or not tensor.numel():
            return None
        if not shape:
            self._one_by_one.note(name)
            return None
        if self.packed is not None and shape[0] == (rows := self.packed.rows).rows.mine:
            return rows
        line = name, tensor.dim(), line_of_draw()
        self._watch(line, tensor)
        known = self._places.part(line, self.watching.in_model, shape, share)
        part = known or self._guess.part(line, shape, share)
        # a loop over samples may call a model with all of them each time; the first batch shows it
        if part is FOR_ALL or self.watching.places is not None:
            self._one_by_one.note(name)
        if generator is None or part is FOR_ALL:
            return None if part is FOR_ALL else part
        self.say_other(name, "a generator of the script's own draws it; leave generator= out")
        return None

    def _watch(self, line: Line, tensor: torch.Tensor) -> None:
        watching = self.watching
        if watching.places is None:
            if not self._places.has(line, watching.in_model):
                watching.watch_again()
            return
        place = Place(None) if all(fixed_sizes(tensor.dim())) else watching.places.place(tensor)
        self._places.note(line, watching.in_model, tensor.shape, place)
