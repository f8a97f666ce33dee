"""Where the batch is in each tensor that a model draws, found while the model is called.

Beside every tensor goes a tensor without values (on torch's meta device) of another batch size: a dimension that
differs between the two is one of the batch. So a hidden size, a number of heads or a sequence length that happens to
equal this rank's number of samples is not taken for the batch, and the memory layout of a share of one sample is known.
Not covered: tensors that an operation of another library makes; there the place is guessed from the shape.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.train.draw_sizes import fixed_sizes
from samestep.train.nested import memory_of
from samestep.train.step import Share
from samestep.train.views import key_of, layout_of, meta_of, moved

# Primes are no products of the sizes of layers. The first stands for the samples, the next ones for nodes of graphs and
# the like, the last ones for a batch that is merged behind another dimension, as in a view of (length * batch, …).
_SAMPLES = 7919
_RAGGED = (7841, 7853, 7867, 7873, 7877, 7879, 7883, 7901, 7907)
_MERGED = (7927, 7933, 7937, 7949, 7951, 7963, 7993, 8009, 8011, 8017)
_VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias"}
_GROWN = {"expand", "repeat"}
_SIZED = {"new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided", "as_strided"}


@dataclass(frozen=True)
class Place:
    """The dimension of the batch, None for a draw that is one for all ranks, and the memory's order.

    The dimension may be merged of several: `before` the batch, and `after` it. It is that of the
    samples, or of nodes of graphs and the like, whose name in the batch is in `ragged`.
    """

    dim: int | None
    before: int = 1
    after: int = 1
    layout: tuple[int, ...] = ()
    ragged: str = ""


class _Kind(NamedTuple):
    """The size that stands for this rank's `mine` samples, or for its nodes of graphs and the like."""

    size: int
    mine: int
    before: int = 1
    ragged: str = ""


class _Other(NamedTuple):
    """A tensor, whose memory must stay its own, and the same of another batch size; None where that is not known."""

    tensor: torch.Tensor
    other: torch.Tensor | None
    sure: bool = True


class BatchPlaces(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active: beside each tensor one of another batch size."""

    def __init__(
        self,
        share: Share,
        given: Iterable[tuple[torch.Tensor, Place | None]],
        constant: Iterable[torch.Tensor],
        is_paused: Callable[[], bool] = lambda: False,
    ) -> None:
        """`given` are a model's inputs, or a batch, with where the batch is in each, if that is known."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_paused = is_paused
        self._others: dict[Any, _Other] = {}
        self._to_come: torch.Tensor | None = None
        self._samples = _Kind(_SAMPLES, share.mine)
        for tensor in constant:
            self._note(tensor, meta_of(tensor))
        # tensors of equal rows, such as those of nodes and of the graph that each is in, are of one kind
        ragged = {one.rows: name for name, one in reversed(share.of.ragged.items()) if one.rows != share.rows}
        kinds = {
            rows: _Kind(size, rows.mine, 1, name)
            for size, (rows, name) in zip(_RAGGED, ragged.items(), strict=False)
        }
        self._kinds = [self._samples, *kinds.values()]
        self._note_given(share, list(given))
        for name, laid in share.of.tensors():
            one = share.of.ragged.get(name)
            if one is not None and one.rows in kinds:
                self._note_at(laid, one.dim, kinds[one.rows])

    def _note_given(self, share: Share, given: Sequence[tuple[torch.Tensor, Place | None]]) -> None:
        """A view of a tensor of the batch has the samples where their stride is; other tensors in front or second."""
        in_front = any(tensor.dim() and tensor.shape[0] == share.mine for tensor, _ in given)
        of_batch = {memory_of(tensor): (tensor, share.dim_in(name)) for name, tensor in share.of.tensors()}
        # it was computed from the batch, as labelled and unlabelled rows laid end to end, or from nothing of it
        has_none = not any(place or share.mine in tensor.shape[:2] for tensor, place in given)
        for tensor, place in given:
            if place is not None:
                kind = next((one for one in self._kinds if one.ragged == place.ragged), self._samples)
                self._note_place(tensor, place, kind)
                continue
            # as a state that a recurrent layer gave for the batch before
            is_second = tensor.dim() > 2 and tensor.shape[0] != share.mine == tensor.shape[1]
            laid, dim = of_batch.get(memory_of(tensor), (None, int(is_second or not in_front)))
            if laid is not None and (laid.shape, laid.stride()) != (tensor.shape, tensor.stride()):
                stride = laid.stride(dim) if laid.dim() else None
                dims = (at for at in range(tensor.dim()) if tensor.stride(at) == stride)
                dim = next(dims, int(not in_front))
            self._note_at(tensor, dim, self._samples)
            if laid is None and has_none and tensor.dim() and tensor.shape[0] > 1:
                self._others[key_of(tensor)] = _Other(tensor, None)

    def _note_place(self, tensor: torch.Tensor, place: Place, kind: _Kind) -> None:
        sizes = list(tensor.shape)
        if place.dim is not None and not sizes[place.dim] % (place.before * kind.mine):
            size = self._merged_behind(place.before, kind).size if place.before > 1 else kind.size
            sizes[place.dim] = sizes[place.dim] // kind.mine * size
        self._note(tensor, meta_of(tensor, sizes))

    def mark(self, tensor: torch.Tensor, dim: int) -> None:
        """Say where the batch is in what a layer returned."""
        self._note_at(tensor, dim, self._samples)

    def _note_at(self, tensor: torch.Tensor, dim: int, kind: _Kind) -> None:
        if tensor.shape[dim : dim + 1] == (kind.mine,):
            self._note_place(tensor, Place(dim), kind)
        else:
            self._note(tensor, meta_of(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused():
            return func(*args, **kwargs)
        other, sure = self._computed(func, args, kwargs)
        before, self._to_come = self._to_come, None
        if isinstance(other, torch.Tensor) and (sure or any(map(self._kinds_in, other.shape))):
            self._to_come = other
        try:
            made = func(*args, **kwargs)
        finally:
            self._to_come = before
        if func._overloadname.endswith("out") or func._schema.is_mutable:
            return made
        if isinstance(made, torch.Tensor):
            if not self._makes_sense(made, other):
                other, sure = self._computed(func, args, kwargs, as_guessed=False)
            other, sure = self._by_sizes(func._opname, args, made, other, sure)
        self._note(made, other, sure)
        return made

    def _by_sizes(self, name: str, args: Any, made: torch.Tensor, other: Any, sure: bool) -> tuple[Any, bool]:
        """The same of an operation that got sizes as numbers, or that put batches end to end."""
        if other is None and name in _VIEWS | _GROWN:
            of = self._found(args[0])
            return (
                self._viewed(made, of) if name in _VIEWS else self._grown(made, of, args[1], name == "repeat")
            )
        if other is None and (name in _SIZED or not _has_tensor(args)):
            return self._sized(made, args)
        if name == "cat" and other is not None and other.shape != made.shape:
            return self._end_to_end(made, other, list(map(self._found, args[0]))), sure
        # some of this rank's samples are not alike on all ranks, though their number is given
        if name == "slice" and other is not None and (found := self._batch_known_in(self._found(args[0]))):
            return (None if other.shape[found[0]] == made.shape[found[0]] else other), sure
        return other, sure

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Where the batch is in this tensor, None where it is not known."""
        _, other, sure = self._others.get(key_of(tensor), _Other(tensor, None))
        if other is None or (not sure and tensor.shape == other.shape):
            other = self._to_come
        if other is None or not self._makes_sense(tensor, other):
            return None
        found = self._batch_in(tensor, other)
        if found is None:
            # a share of the other batch's size is no share that anyone has
            return Place(None)
        dim, kind = found
        layout, guessed = layout_of(tensor), layout_of(other)
        # strides say nothing of a dimension of size 1, as that of a share of one sample
        wide = [dim for dim in layout if tensor.shape[dim] > 1]
        if wide == [dim for dim in guessed if tensor.shape[dim] > 1]:
            layout = guessed
        return Place(dim, kind.before, tensor.shape[dim] // kind.mine // kind.before, layout, kind.ragged)

    def _sizes_of_kinds(self) -> dict[int, int]:
        """For as many rows as this rank has of a kind, the size that stands for them."""
        return {one.before * one.mine: one.before * one.size for one in reversed(self._kinds)}

    def _kinds_in(self, size: int) -> list[_Kind]:
        return [kind for kind in self._kinds if size and size % kind.size == 0]

    def _batch_in(self, tensor: torch.Tensor, other: torch.Tensor) -> tuple[int, _Kind] | None:
        """The dimension of the batch, None where there is none; LookupError where the sizes are no such two."""
        unlike = [dim for dim in range(tensor.dim()) if tensor.shape[dim] != other.shape[dim]]
        if not unlike:
            return None
        dim = unlike[0]
        for kind in self._kinds_in(other.shape[dim]):
            if len(unlike) == 1 and other.shape[dim] // kind.size * kind.mine == tensor.shape[dim]:
                return dim, kind
        raise LookupError

    def _batch_known_in(self, of: _Other) -> tuple[int, _Kind] | None:
        with suppress(LookupError):
            return None if of.other is None else self._batch_in(of.tensor, of.other)
        return None

    def _makes_sense(self, tensor: torch.Tensor, other: Any) -> bool:
        """Whether these can be the same of two batch sizes."""
        if not isinstance(other, torch.Tensor) or other.dim() != tensor.dim():
            return False
        with suppress(LookupError):
            self._batch_in(tensor, other)
            return True
        return False

    def _computed(self, func: Any, args: Any, kwargs: Any, *, as_guessed: bool = True) -> tuple[Any, bool]:
        """What the operation makes of the others, and whether that is sure; None where it does not go.

        Where what was guessed leads to nothing, it is taken for tensors that have nothing of the batch.
        """
        if func._opname in _VIEWS | _GROWN | _SIZED or func.namespace not in ("aten", "prims"):
            return None, True
        found: list[_Other] = []

        def other_of(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                if (known := self._found(value)).other is None:
                    raise LookupError
                found.append(known)
                return known.other if known.sure or as_guessed else meta_of(value)
            if isinstance(value, torch.device):
                return torch.device("meta")
            if isinstance(value, list | tuple):
                return type(value)(map(other_of, value))
            return value

        try:
            others = [other_of(one) for one in args], {name: other_of(one) for name, one in kwargs.items()}
            made = func(*others[0], **others[1]) if found else None
        except Exception:  # the operation needs values, or sizes that were given as numbers
            if as_guessed and not all(one.sure for one in found):
                return self._computed(func, args, kwargs, as_guessed=False)
            return None, True
        is_sure = all(one.sure for one in found)
        if not is_sure and isinstance(made, torch.Tensor) and any(map(self._kinds_in, made.shape)):
            is_sure = any(
                one.sure and one.other.shape != one.tensor.shape for one in found if one.other is not None
            )
        return made, is_sure

    def _viewed(self, made: torch.Tensor, of: _Other) -> tuple[torch.Tensor | None, bool]:
        """The other of a view, whose sizes were given as numbers, and whether it is sure."""
        given, other, sure = of
        if other is None or given.shape == made.shape:
            return other, sure
        sizes = list(made.shape)
        try:
            if found := self._batch_in(given, other):
                dim, kind = found
                dim, before = moved(given.shape, made.shape, dim, kind.before, kind.mine)
                kind = self._merged_behind(before, kind)
                sizes[dim] = sizes[dim] // kind.mine * kind.size
            return other.view(sizes), sure
        except LookupError:
            return None, True
        except RuntimeError:
            return meta_of(made, sizes), sure

    def _end_to_end(self, made: torch.Tensor, other: torch.Tensor, of: list[_Other]) -> torch.Tensor | None:
        """The same of tensors one behind the other, each of which may have the whole batch."""
        dim = next((dim for dim, size in enumerate(made.shape) if size != of[0].tensor.shape[dim]), None)
        places = [(one.tensor, self._batch_known_in(one)) for one in of]
        kinds = [(tensor.shape[dim], found[1]) for tensor, found in places if found and found[0] == dim]
        if dim is None or not kinds or any(kind.ragged for _, kind in kinds):
            return other
        if len(kinds) < len(of) or any(size != kind.before * kind.mine for size, kind in kinds):
            return None
        sizes, before = list(made.shape), sum(kind.before for _, kind in kinds)
        sizes[dim] = before * self._merged_behind(before, self._samples).size
        return meta_of(made, sizes)

    def _grown(
        self, made: torch.Tensor, of: _Other, counts: Sequence[int], is_repeated: bool
    ) -> tuple[torch.Tensor | None, bool]:
        """The other of what was expanded or repeated, and whether it is sure."""
        given, other, sure = of
        if other is None:
            return None, True
        sizes = list(made.shape)
        before_it = [1] * (made.dim() - given.dim()) + list(given.shape)
        try:
            if found := self._batch_in(given, other):
                dim, kind = found
                dim += made.dim() - given.dim()
                if is_repeated and counts[dim] > 1:
                    kind = self._merged_behind(counts[dim] * kind.before, kind)
                sizes[dim] = sizes[dim] // kind.mine * kind.size
                return meta_of(made, sizes), sure
        except LookupError:
            return None, True
        # as a token is put before every sample
        fits, pairs = self._sizes_of_kinds(), enumerate(zip(counts, sizes, before_it, strict=True))
        grown = [
            dim for dim, (count, size, before) in pairs if before == 1 and count == size and count in fits
        ]
        if len(grown) == 1 or (grown and self._samples.mine == 1):
            sizes[grown[0]], sure = fits[sizes[grown[0]]], False
        return meta_of(made, sizes), sure

    def _merged_behind(self, before: int, kind: _Kind) -> _Kind:
        """The same of a batch that is merged behind a dimension of this size; of samples only."""
        if kind.before == before:
            return kind
        if kind.ragged:
            raise LookupError
        known = [one for one in self._kinds if not one.ragged]
        for one in known:
            if one.before == before:
                return one
        new = self._samples._replace(size=_MERGED[len(known) - 1 :][0], before=before)
        self._kinds.append(new)
        return new

    def _sized(self, made: torch.Tensor, args: Any) -> tuple[torch.Tensor, bool]:
        """A guess for a tensor whose size was given in numbers; what is computed of it shows whether it is wrong."""
        sizes = list(made.shape)
        like = self._found(args[0]) if _has_tensor(args[:1]) else None
        if like and like.other is not None and like.tensor.dim() == made.dim() > 1:
            # as feature dropout makes its mask
            pairs = zip(sizes, like.tensor.shape, like.other.shape, strict=True)
            alike = [other if here == size else size for size, here, other in pairs]
            if alike != sizes:
                return meta_of(made, alike), True
        equal = [dim for dim, size in enumerate(sizes) if size == self._samples.mine]
        if len(equal) > 1 and len(fixed := fixed_sizes()) == len(sizes):
            equal = [dim for dim in equal if not fixed[dim]]
        if len(equal) == 1:
            sizes[equal[0]] = _SAMPLES
        elif sizes and not equal:
            sizes[0] = self._sizes_of_kinds().get(sizes[0], sizes[0])
        # where several are equal it is perhaps a mask over time, which may be combined with a tensor of the batch
        return meta_of(made, sizes), not equal and sizes == list(made.shape)

    def _note(self, made: Any, other: Any, sure: bool = True) -> None:
        if isinstance(made, list | tuple):
            has_all = isinstance(other, list | tuple) and len(other) == len(made)
            for one, its in zip(made, other if has_all else [None] * len(made), strict=True):
                self._note(one, its, sure)
        elif isinstance(made, torch.Tensor):
            key = key_of(made)
            is_like = isinstance(other, torch.Tensor) and other.dim() == made.dim()
            # what is known stays known where it was changed in place, as by an all-reduce
            if is_like or key not in self._others or self._others[key].tensor is not made:
                self._others[key] = _Other(made, other if is_like else None, sure)

    def _found(self, tensor: torch.Tensor) -> _Other:
        """What was made before the call and is not of the batch is constant."""
        return self._others.setdefault(key_of(tensor), _Other(tensor, meta_of(tensor)))


def _has_tensor(args: Sequence[Any]) -> bool:
    return any(isinstance(one, torch.Tensor) for one in args)
