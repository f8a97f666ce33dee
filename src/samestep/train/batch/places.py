"""Finds which dimension of a tensor is the batch, by running every operation a second time at another batch size.

Every tensor gets a probe (see batch/sizes.py): a meta tensor that goes through the same operations. A dimension whose
size differs between tensor and probe is the batch. Example: this rank has 8 samples, and a model computes dropout(h)
with 8 hidden units. `h` has shape (8, 8) and its probe (7919, 8), so the mask is drawn for the whole batch along
dimension 0. The probe also shows the memory layout that a share of one sample does not show.

Covered: operations of torch. Where they get sizes as numbers, as zeros(8, 3) does, the probe may be a guess. Not
covered: tensors that another library makes; there the place is guessed from the shape.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.train.batch.mixing import IN_PLACE, averaged, draws_for_moved, mixed_by_copy, order_kept
from samestep.train.batch.sizes import BatchSizes, Order, Place, Traced, draws_whole
from samestep.train.batch.views import dim_after_view, dim_in_view, key_of, layout_of, meta_of
from samestep.train.group.control import users_line
from samestep.train.loss import Averaged
from samestep.train.nested import memory_of, named_tensors
from samestep.train.passes import Share
from samestep.train.script.sizes import copied, distribution_drawn, fixed_sizes, measured

_VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias"}
_GROWN = {"expand", "repeat"}
_SELECT: Any = torch.ops.aten.select.int
_RESHAPING = {"squeeze_", "unsqueeze_", "transpose_", "t_"}  # in place, as quantile does it
_SIZED = {"new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided", "as_strided"}


class BatchPlaces(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, every operation on tensors is also run on their probes."""

    def __init__(
        self,
        share: Share,
        inputs: Iterable[tuple[torch.Tensor, Place | None]],
        constants: Iterable[torch.Tensor],
        is_paused: Callable[[], bool] = lambda: False,
        is_new: Callable[[torch.Tensor], bool] = lambda _: False,
        is_joined: Callable[[torch.Tensor], bool] = lambda _: False,
        note: Callable[[Any, Sequence[Traced]], None] = lambda *_: None,
    ) -> None:
        """inputs: a model's inputs, or a batch's tensors, each with its place of the batch where that is known.
        constants: tensors without a batch dimension, such as parameters.
        is_paused: whether operations are not to be followed now.
        is_new: whether a tensor that no followed operation made, such as one from NumPy, may be of this batch.
        is_joined: whether a tensor has the rows of all ranks. note: gets each operation with its operands.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_paused, self._is_new = is_paused, is_new
        self._is_joined, self._look_at = is_joined, note
        # by key_of(tensor): a weak reference to its memory, which another tensor may get later, and the rest of Traced
        self._stored: dict[Any, tuple[Any, ...]] = {}
        # the result's probe while an operation runs: a draw inside of it asks for its place
        self._coming_probe: torch.Tensor | None = None
        self._uses_guesses = True
        self._sizes, self._rows = BatchSizes(share), share.rows
        # lines: what read a model's average as a number, that once it weighed such an average, draws for moved samples,
        # draws as many rows as the whole batch has
        self._read_at = self.weighed_by = self.drawn_at = self.drawn_whole_at = ""
        for tensor in constants:
            self._note(tensor, meta_of(tensor))
        self._note_inputs(share, list(inputs))
        for name, laid in share.of.tensors():
            ragged = share.of.ragged.get(name)
            if ragged is not None and ragged.rows in self._sizes.ragged:
                self._note_place(laid, Place(ragged.dim, ragged=name))

    def _note_inputs(self, share: Share, inputs: Sequence[tuple[torch.Tensor, Place | None]]) -> None:
        """Inputs that are views of the batch are located by their strides, others by the size of dimension 0 or 1."""
        in_front = any(tensor.dim() and tensor.shape[0] == share.mine for tensor, _ in inputs)
        batch = {memory_of(tensor): (tensor, share.dim_in(name)) for name, tensor in share.of.tensors()}
        is_plain = any(
            place or share.mine in tensor.shape[:2] or memory_of(tensor) in batch for tensor, place in inputs
        )
        for tensor, place in inputs:
            # the state that a recurrent layer returned has the batch in dimension 1
            is_second = tensor.dim() > 2 and tensor.shape[0] != share.mine == tensor.shape[1]
            base, dim = batch.get(memory_of(tensor), (None, int(is_second or not in_front)))
            if place is None and base is not None and key_of(base) != key_of(tensor):
                place = Place(dim_in_view(tensor, base, dim, share.mine))
            elif place is None and tensor.shape[dim : dim + 1] == (share.mine,):
                place = Place(dim)
            if place is None and not is_plain and tensor.dim() and len(tensor) > 1:
                self._store(Traced(tensor, None))
            else:
                self._note_place(tensor, place or Place(None))

    def _note_place(self, tensor: torch.Tensor, place: Place) -> None:
        sizes = list(tensor.shape)
        if place.dim is not None and place.dim < len(sizes):
            batch = self._sizes.at(place)
            if sizes[place.dim] % (batch.before * batch.mine) == 0:
                sizes[place.dim] = sizes[place.dim] // batch.mine * batch.prime
        self._note(tensor, meta_of(tensor, sizes))

    def mark(self, tensor: torch.Tensor, dim: int) -> None:
        """Note the batch dimension of what a layer returned, where no followed operation has shown it."""
        probe = self._traced(tensor).probe
        if tensor.shape[dim] == self._sizes.samples.mine and (probe is None or probe.shape == tensor.shape):
            self._note_place(tensor, Place(dim))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types or self._is_paused():  # a subclass of Tensor computes in its own way
            return func(*args, **kwargs)
        if func._opname == "_local_scalar_dense" and not isinstance(args[0], torch.Tensor):
            return args[0]  # torch passes a wrapped number on as the number itself
        before = self._traced(args[0]) if func._opname in _RESHAPING else None
        probe, sure = self._run_probes(func, args, kwargs)
        shows = isinstance(probe, torch.Tensor) and (sure or any(map(self._sizes.in_probe, probe.shape)))
        outer_probe, self._coming_probe = self._coming_probe, probe if shows else None
        try:
            result = func(*args, **kwargs)
        finally:
            self._coming_probe = outer_probe
        with suppress(Exception):  # the script must not fail because a probe could not be made
            if func._opname == "unbind":
                self._follow_unbind(result, *args)
            elif before is not None:
                self._note(result, probe, sure, before.averaged, before.order)
            else:
                self._follow(func, args, kwargs, result, probe, sure)
        return result

    def _follow_unbind(self, pieces: Sequence[torch.Tensor], source: torch.Tensor, dim: int = 0) -> None:
        for index, piece in enumerate(pieces):
            args = source, dim, index
            self._follow(_SELECT, args, {}, piece, *self._run_probes(_SELECT, args, {}))

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any, probe: Any, sure: bool) -> None:
        if func._overloadname.endswith("out") or func._schema.is_mutable:
            if func._opname == "copy_":
                self._note_copied(func, *args[:2])
            self._note_changed(result, args, probe if sure else None)
            if func._opname not in IN_PLACE:
                self._note_drawn(func, [self._traced(result)], result)
                return
            _, probe, sure, *_ = self._traced(result)
        if isinstance(result, torch.Tensor):
            if not self._sizes.fits(result, probe):
                probe, sure = self._run_probes(func, args, kwargs, as_guessed=False)
            probe, sure = self._without_tensors(func._opname, args, result, probe, sure)
        operands = [self._traced(tensor) for _, tensor in named_tensors((args, kwargs))]
        if not self._uses_guesses:
            operands = [old if old.sure else old._replace(probe=meta_of(old.tensor)) for old in operands]
        self._note_drawn(func, operands, result)
        self._look_at(func, operands)
        order = order_kept(func, operands, Traced(result, probe).has_batch)
        if (reordered := self._sizes.reordered(func._opname, args, result, self._traced)) is not None:
            (probe, order), sure = reordered, True
            operands = operands[: 1 if "index" in func._opname else None]
        average = averaged((func, args, kwargs), operands, result, probe, order, self._rows)
        if func._opname == "_local_scalar_dense" and operands[0].averaged and operands[0].averaged.of_model:
            self._read_at = users_line()
        elif average is not None and any(type(arg) is float for arg in args):
            self.weighed_by = self.weighed_by or self._read_at
        self._note(result, probe, sure, average, order)

    def _note_drawn(self, func: Any, operands: list[Traced], result: Any) -> None:
        """Note where numbers are drawn for samples that were moved, or for a batch of a fixed size."""
        if draws_whole(func, operands, result, self._rows):
            self.drawn_whole_at = self.drawn_whole_at or users_line()
        self.drawn_at = self.drawn_at or (users_line() if draws_for_moved(func, operands) else "")
        if func._schema.is_mutable and torch.Tag.nondeterministic_seeded in func.tags:
            self._store(operands[0]._replace(order=None))

    def averaged(self, tensor: torch.Tensor) -> Averaged | None:
        """How a tensor depends on averages over this rank's samples, None where it does not."""
        return self._traced(tensor).averaged

    def mark_slopes(self, inputs: Sequence[torch.Tensor], slopes: Sequence[Any], sums: bool) -> None:
        """Note that gradients of inputs without a batch dimension are averages, or `sums`, over this rank's samples."""
        for traced, slope in zip(map(self._traced, inputs), slopes, strict=True):
            if slope is not None and traced.probe is not None and traced.probe.shape == traced.tensor.shape:
                self._store(self._traced(slope)._replace(averaged=Averaged("", True, sums)))

    def _note_changed(self, result: Any, args: Any, probe: Any) -> None:
        """Store the probe of a tensor that was changed in place, where this operation shows one."""
        if isinstance(result, torch.Tensor):
            probe = probe if self._sizes.fits(result, probe) else self._filled(result, args)
            if probe is not None:
                self._store(self._traced(result)._replace(probe=probe, sure=True))

    def _note_copied(self, func: Any, into: torch.Tensor, source: torch.Tensor) -> None:
        """Follow copy_: the target gets the source's order, and a mixture in a part of it goes into all its views."""
        target, copied = self._traced(into), self._traced(source)
        self._look_at(func, (target, copied))
        if into.untyped_storage().nbytes() == into.nbytes:
            self._store(target := target._replace(order=copied.order))
        if does := mixed_by_copy(target, copied):
            memory = into.untyped_storage().data_ptr()
            for key, (reference, *known) in self._stored.items():
                if (storage := reference()) is not None and storage.data_ptr() == memory:
                    self._stored[key] = reference, *known[:2], Averaged(does), *known[3:]

    def _filled(self, result: torch.Tensor, args: Sequence[Any]) -> torch.Tensor | None:
        """The probe of a tensor that is filled from a tensor of the batch, as one_hot fills the zeros that it made."""
        tensors = (arg for arg in args if isinstance(arg, torch.Tensor) and arg is not result)
        probes = (self._sized_like(result, arg) for arg in tensors if self._traced(arg).sure)
        return next((probe for probe in probes if probe is not None), None)

    def _sized_like(self, result: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
        """A probe with the batch where `like` has it, None where the tensors do not agree there."""
        if (probe := self._traced(like).probe) is None or like.dim() != result.dim():
            return None
        triples = zip(result.shape, like.shape, probe.shape, strict=True)
        sizes = [in_probe if size == in_like else size for size, in_like, in_probe in triples]
        return meta_of(result, sizes) if sizes != list(result.shape) else None

    def _without_tensors(
        self, name: str, args: Any, result: torch.Tensor, probe: Any, sure: bool
    ) -> tuple[Any, bool]:
        """The probe, and whether it is sure, of an operation that got its sizes as numbers."""
        if probe is None and name in _VIEWS | _GROWN:
            source = self._traced(args[0])
            if name in _VIEWS:
                return self._viewed(result, source)
            return self._expanded(result, source, args[1], name == "repeat")
        if probe is None and (name in _SIZED or not any(map(torch.is_tensor, args))):
            return self._guessed_by_sizes(result, args)
        if name == "batch_norm_elemt":  # CUDA's has no kernel for the meta device
            return self._traced(args[0])[1:3]
        known = self._sizes.probes()
        if name == "bincount" and (len(args[0]) == self._rows.mine or len(result) not in known):
            return meta_of(result), True  # counts of labels; other lengths may be counts for each graph
        if probe is None and all(self._traced(tensor).is_constant for _, tensor in named_tensors(args)):
            return meta_of(result), True
        return probe, sure

    def place(self, tensor: torch.Tensor) -> Place | None:
        """The place of the batch in this tensor, None where it is not known."""
        known = self._traced(tensor) if self._is_joined(tensor) else self._stored_of(tensor)
        _, probe, sure, *_ = known or Traced(tensor, None)
        if probe is None or (not sure and tensor.shape == probe.shape):
            probe = self._coming_probe
        probe = self._probe_by_script(tensor) if probe is None else probe
        if probe is None or not self._sizes.fits(tensor, probe):
            return None
        if (place := self._sizes.batch_in(tensor, probe)) is None:
            return Place(None)
        dim, batch = place
        after = tensor.shape[dim] // batch.mine // batch.before
        return Place(dim, batch.before, after, layout_of(probe), batch.ragged)

    def _probe_by_script(self, result: torch.Tensor, source: Any = None) -> torch.Tensor | None:
        """A probe from a tensor of the same sizes: `source`, a distribution's parameters, x in randn(x.shape)."""
        sizes = list(result.shape)
        for _, like in named_tensors(distribution_drawn() or copied() if source is None else source):
            # feature dropout makes its mask so; the guess for a distribution's parameter would ask for it again
            is_known = source is not None or self._stored_of(like) is not None
            if result.dim() > 1 and is_known and (probe := self._sized_like(result, like)) is not None:
                return probe
        if not isinstance(source := measured(), torch.Tensor):
            return None
        behind = zip(sizes[1:], fixed_sizes(len(sizes))[1:], strict=False)
        if any(size == self._sizes.samples.mine and not is_fixed for size, is_fixed in behind):
            return None
        _, probe, sure, *_ = self._traced(source)
        if probe is None or not sure:
            return None
        if probe.shape[0] == source.shape[0]:
            return meta_of(result) if probe.shape == source.shape else None
        is_flat = copied() is source and result.shape == (source.numel(),)
        sizes[0] = probe.numel() if is_flat else probe.shape[0]
        return meta_of(result, sizes) if is_flat or result.shape[0] == source.shape[0] else None

    def _run_probes(self, func: Any, args: Any, kwargs: Any, *, as_guessed: bool = True) -> tuple[Any, bool]:
        """The operation's result on probes, None where it fails, and whether it is sure."""
        # Where it fails with guessed probes, it is tried again as if the guessed tensors had no batch dimension.
        if func._opname in _VIEWS | _GROWN | _SIZED or func.namespace not in ("aten", "prims"):
            return None, True
        operands: list[Traced] = []

        def probe_of(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if (traced := self._traced(value)).probe is None:
                    raise LookupError
                operands.append(traced)
                return traced.probe if traced.sure or as_guessed else meta_of(value)
            if isinstance(value, list | tuple):
                return type(value)(map(probe_of, value))
            return torch.device("meta") if isinstance(value, torch.device) else value

        try:
            probes = [*map(probe_of, args)], {name: probe_of(value) for name, value in kwargs.items()}
            result = self._sizes.run(func, args, *probes) if operands else None
        except Exception:  # the operation needs values, or sizes that were given as numbers
            if as_guessed and not all(operand.sure for operand in operands):
                return self._run_probes(func, args, kwargs, as_guessed=False)
            return None, True
        self._uses_guesses, is_sure = as_guessed, all(operand.sure for operand in operands)
        if not is_sure and isinstance(result, torch.Tensor) and any(map(self._sizes.in_probe, result.shape)):
            is_sure = any(operand.sure and operand.has_batch for operand in operands)
        return result, is_sure

    def _viewed(self, result: torch.Tensor, source: Traced) -> tuple[torch.Tensor | None, bool]:
        """The probe of a view, whose sizes were given as numbers, and whether it is sure."""
        tensor, probe, sure, *_ = source
        if probe is None or tensor.shape == result.shape:
            return probe, sure
        sizes = list(result.shape)
        try:
            if place := self._sizes.batch_in(tensor, probe):
                dim, batch = place
                dim, before = dim_after_view(tensor.shape, result.shape, dim, batch.before, batch.mine)
                batch = self._sizes.merged(before, batch)
                sizes[dim] = sizes[dim] // batch.mine * batch.prime
            return probe.view(sizes), sure
        except LookupError:
            return None, True
        except RuntimeError:
            return meta_of(result, sizes), sure

    def _expanded(
        self, result: torch.Tensor, source: Traced, counts: Sequence[int], is_repeated: bool
    ) -> tuple[torch.Tensor | None, bool]:
        """The probe of what was expanded or repeated, and whether it is sure."""
        tensor, probe, sure, *_ = source
        if probe is None:
            return None, True
        sizes = list(result.shape)
        old_sizes = [1] * (result.dim() - tensor.dim()) + list(tensor.shape)
        try:
            if place := self._sizes.batch_in(tensor, probe):
                dim, batch = place
                dim += result.dim() - tensor.dim()
                if is_repeated and counts[dim] > 1:
                    batch = self._sizes.merged(counts[dim] * batch.before, batch)
                sizes[dim] = sizes[dim] // batch.mine * batch.prime
                return meta_of(result, sizes), sure
        except LookupError:
            return None, True
        # a class token is expanded to one row for each sample
        fits, pairs = self._sizes.probes(), enumerate(zip(counts, sizes, old_sizes, strict=True))
        grown = [dim for dim, (count, size, old) in pairs if old == 1 and count == size and count in fits]
        if len(grown) == 1 or (grown and self._sizes.samples.mine == 1):
            sizes[grown[0]] = fits[sizes[grown[0]]]
        return meta_of(result, sizes), sure and not grown

    def _guessed_by_sizes(self, result: torch.Tensor, args: Any) -> tuple[torch.Tensor, bool]:
        """A guess for a tensor whose sizes were given as numbers; a wrong one fails where its probe is used."""
        sizes = list(result.shape)
        like = next(filter(torch.is_tensor, args[:1]), None)
        if (probe := self._probe_by_script(result, like)) is not None:
            return probe, True
        equal = [dim for dim, size in enumerate(sizes) if size == self._sizes.samples.mine]
        if any(fixed := fixed_sizes(len(sizes)) if equal else []) and len(fixed) == len(sizes):
            equal = [dim for dim in equal if not fixed[dim]][:1]  # samples come before features
        if len(equal) == 1:
            sizes[equal[0]] = self._sizes.samples.prime
        elif sizes and not equal and not any(fixed):
            sizes[0] = self._sizes.probes().get(sizes[0], sizes[0])
        # with several equal sizes it may be a mask over time, which has no batch dimension
        return meta_of(result, sizes), not equal and sizes == list(result.shape)

    def _note(
        self, result: Any, probe: Any, sure: bool = True, average: Averaged | None = None, order: Order = ()
    ) -> None:
        if isinstance(result, list | tuple):
            has_all = isinstance(probe, list | tuple) and len(probe) == len(result)
            for part, part_probe in zip(result, probe if has_all else [None] * len(result), strict=True):
                self._note(part, part_probe, sure, average, order)
        elif isinstance(result, torch.Tensor):
            is_like = isinstance(probe, torch.Tensor) and probe.dim() == result.dim()
            # a result without a probe, as of an all-reduce in place, does not replace what is known
            if is_like or self._stored_of(result) is None:
                self._store(Traced(result, probe if is_like else None, sure, average, order))

    def _store(self, traced: Traced) -> None:
        tensor, *known = traced
        memory = tensor.untyped_storage() if tensor.layout == torch.strided else tensor
        self._stored[key_of(tensor)] = weakref.ref(memory), *known

    def _stored_of(self, tensor: torch.Tensor) -> Traced | None:
        reference, *known = self._stored.get(key_of(tensor), (lambda: None,))
        return None if reference() is None else Traced(tensor, *known)

    def _traced(self, tensor: torch.Tensor) -> Traced:
        """What is known of a tensor; a tensor that was made before and is not the batch's has no batch dimension."""
        if not self._is_joined(tensor):
            if known := self._stored_of(tensor):
                return known
            if self._is_new(tensor):
                return Traced(tensor, *self._guessed_by_sizes(tensor, ()))
        return Traced(tensor, meta_of(tensor))
