"""Where the batch is in each tensor that a model draws, found while the model is called.

Beside every tensor goes a tensor without values (on torch's meta device) of another batch size: a dimension that
differs between the two is one of the batch. So a hidden size, a number of heads or a sequence length that happens to
equal this rank's number of samples is not taken for the batch, and the memory layout of a share of one sample is known.
Not covered: tensors that an operation of another library makes; there the place is guessed from the shape.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.train.step import Ragged

# Primes are no products of the sizes of layers. The first is the batch; a batch merged behind another dimension, as in
# a sequence-first view of (length * batch, …), has another for each size of that dimension.
_OTHER_BATCH = 7919
_MERGED = (7927, 7933, 7937, 7949, 7951, 7963, 7993, 8009, 8011, 8017)
_RAGGED = (7841, 7853, 7867, 7873, 7877, 7879, 7883, 7901, 7907)
_VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias", "expand"}
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


class BatchPlaces(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active: beside each tensor one of another batch size."""

    def __init__(
        self,
        mine: int,
        given: Sequence[torch.Tensor],
        rows: Sequence[tuple[int, int]],
        constant: Iterator[torch.Tensor],
        ragged: Sequence[Ragged] = (),
    ) -> None:
        """`given` are the model's inputs; those in the memory of the batch have its samples at the stride in `rows`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._mine = mine
        self._shadows: dict[Any, _Shadow] = {}
        self._to_come: torch.Tensor | None = None
        self._before = {_OTHER_BATCH: 1}
        # tensors of equal sizes, such as those of nodes and of the graph that each is in, have one kind of rows
        alike = {one.part: one for one in reversed(ragged)}
        self._ragged = dict(zip(_RAGGED, alike.values(), strict=False))
        self._before |= dict.fromkeys(self._ragged, 1)
        for tensor in constant:
            self._note(tensor, _meta(tensor, tuple(tensor.shape)))
        first = any(tensor.dim() and tensor.shape[0] == mine for tensor in given)
        for tensor in given:
            dim = _dim_in(tensor, rows)
            dim = int(not first) if dim is None else dim
            sizes = list(tensor.shape)
            if dim < len(sizes) and sizes[dim] == mine:
                sizes[dim] = _OTHER_BATCH
            self._note(tensor, _meta(tensor, sizes))
        for one in ragged:
            batch = next((batch for batch, kind in self._ragged.items() if kind.part == one.part), one.mine)
            laid = one.tensor()
            if laid is not None:
                self._note(laid, _meta(laid, [*laid.shape[: one.dim], batch, *laid.shape[one.dim + 1 :]]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        shadow, sure = self._computed(func, args, kwargs)
        says = isinstance(shadow, torch.Tensor) and (sure or any(map(self._batch_in, shadow.shape)))
        before, self._to_come = self._to_come, shadow if says else None
        try:
            made = func(*args, **kwargs)
        finally:
            self._to_come = before
        if func._overloadname.endswith("out") or func._schema.is_mutable:
            return made
        if isinstance(made, torch.Tensor) and not self._fits(made, shadow):
            shadow, sure = self._computed(func, args, kwargs, as_guessed=False)
        if shadow is None and isinstance(made, torch.Tensor):
            if func._opname in _VIEWS:
                shadow, sure = self._viewed(args[0], made)
            elif func._opname in _SIZED or not any(isinstance(one, torch.Tensor) for one in args):
                shadow, sure = self._sized(made)
        self._note_all(made, shadow, sure)
        return made

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Where the batch is in this tensor, None where it is not known."""
        found = self._shadows.get(_key(tensor), _Shadow(tensor, None))
        shadow = found.other
        if shadow is None or not (found.sure or tensor.shape != shadow.shape):
            shadow = self._to_come
        if shadow is None or shadow.dim() != tensor.dim():
            return None
        unlike = [
            dim
            for dim, (one, other) in enumerate(zip(tensor.shape, shadow.shape, strict=True))
            if one != other
        ]
        if not unlike:
            # a share of the other batch's size is no share that anyone has
            return Place(None)
        dim = unlike[0]
        batch = self._batch_in(shadow.shape[dim])
        if len(unlike) > 1 or not batch:
            return None
        times, before = shadow.shape[dim] // batch, self._before[batch]
        if times * self._size(batch) != tensor.shape[dim]:
            return None
        layout = _layout(tensor)
        guessed = _layout(shadow)
        # strides say nothing of a dimension of size 1, as that of a share of one sample
        if [dim for dim in layout if tensor.shape[dim] > 1] == [
            dim for dim in guessed if tensor.shape[dim] > 1
        ]:
            layout = guessed
        name = self._ragged[batch].name if batch in self._ragged else ""
        return Place(dim, before, times // before, layout, name)

    def _size(self, batch: int) -> int:
        """How many this rank has of what has this size in the other batch."""
        return self._ragged[batch].mine if batch in self._ragged else self._mine

    def _batch_in(self, size: int) -> int:
        """The other batch size that this size is a multiple of; 0 where it is of none."""
        return next((batch for batch in self._before if size % batch == 0), 0)

    def _fits(self, made: torch.Tensor, shadow: Any) -> bool:
        """Whether these are sizes that the operation can have made: at most one is another, by the batch."""
        if not isinstance(shadow, torch.Tensor) or shadow.dim() != made.dim():
            return False
        unlike = [pair for pair in zip(made.shape, shadow.shape, strict=True) if pair[0] != pair[1]]
        return not unlike or (len(unlike) == 1 and bool(self._batch_in(unlike[0][1])))

    def _computed(self, func: Any, args: Any, kwargs: Any, *, as_guessed: bool = True) -> tuple[Any, bool]:
        """What the operation makes of the shadows, and whether that is sure; None where it does not go.

        Where what was guessed leads to nothing, it is taken for tensors that have nothing of the batch.
        """
        if func._opname in _VIEWS or func._opname in _SIZED or func.namespace not in ("aten", "prims"):
            return None, True
        count = guesses = of_batch = 0

        def shadow_of(value: Any) -> Any:
            nonlocal count, guesses, of_batch
            if isinstance(value, torch.Tensor):
                found = self._found(value)
                if found.other is None:
                    raise LookupError
                count += 1
                guesses += not found.sure
                of_batch += found.sure and value.shape != found.other.shape
                return found.other if found.sure or as_guessed else _meta(value, value.shape)
            if isinstance(value, torch.device):
                return torch.device("meta")
            if isinstance(value, list | tuple):
                return type(value)(shadow_of(one) for one in value)
            return value

        try:
            shadows = [shadow_of(one) for one in args], {name: shadow_of(one) for name, one in kwargs.items()}
            if count:
                return func(*shadows[0], **shadows[1]), not guesses or of_batch > 0
        except Exception:  # the operation needs values, or sizes that were given as numbers
            if guesses and as_guessed:
                return self._computed(func, args, kwargs, as_guessed=False)
        return None, True

    def _viewed(self, given: torch.Tensor, made: torch.Tensor) -> tuple[torch.Tensor | None, bool]:
        """The shadow of another view, whose sizes were given as numbers."""
        found = self._found(given)
        return None if found.other is None else self._view_of(given, made, found.other), found.sure

    def _view_of(self, given: torch.Tensor, made: torch.Tensor, shadow: torch.Tensor) -> torch.Tensor | None:
        if given.shape == made.shape:
            return shadow
        changed = [dim for dim in range(given.dim()) if shadow.shape[dim] != given.shape[dim]]
        sizes = list(made.shape)
        if len(changed) > 1:
            return None
        if changed:
            batch = self._batch_in(shadow.shape[changed[0]])
            before = self._before.get(batch, 0)
            if not before:
                return None
            if given.numel() != made.numel():  # expanded: dimensions are added in front
                at = changed[0] + made.dim() - given.dim()
            else:
                mine = self._size(batch)
                moved = _moved(tuple(given.shape), tuple(made.shape), changed[0], before, mine)
                if moved is None or (batch in self._ragged and moved[1] > 1):
                    return None
                at, before = moved
                batch = batch if batch in self._ragged else self._batch_behind(before)
            sizes[at] = sizes[at] // self._size(batch) * batch
        try:
            return shadow.view(sizes) if given.numel() == made.numel() else shadow.expand(sizes)
        except RuntimeError:
            return _meta(made, sizes)

    def _sized(self, made: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """A guess for a tensor whose size was given in numbers; what is computed of it shows whether it is wrong."""
        equal = [dim for dim, size in enumerate(made.shape) if size == self._mine]
        sizes = list(made.shape)
        if len(equal) == 1:
            sizes[equal[0]] = _OTHER_BATCH
        elif not equal and made.dim():
            kinds = (batch for batch, one in self._ragged.items() if one.mine == made.shape[0])
            sizes[0] = next(kinds, sizes[0])
        # where several are equal it is perhaps a mask over time, which may be combined with a tensor of the batch
        return _meta(made, sizes), not equal and sizes == list(made.shape)

    def mark(self, tensor: torch.Tensor, dim: int) -> None:
        """Say where the batch is in what a layer returned."""
        sizes = list(tensor.shape)
        if dim < len(sizes) and sizes[dim] == self._mine:
            sizes[dim] = _OTHER_BATCH
            self._note(tensor, _meta(tensor, sizes))

    def _batch_behind(self, before: int) -> int:
        """The other batch size for a batch that is merged behind a dimension of this size."""
        for batch in (_OTHER_BATCH, *_MERGED):
            if self._before.setdefault(batch, before) == before:
                return batch
        raise LookupError

    def _note_all(self, made: Any, shadow: Any, sure: bool) -> None:
        if isinstance(made, torch.Tensor):
            self._note(made, shadow if isinstance(shadow, torch.Tensor) else None, sure)
        elif isinstance(made, list | tuple):
            has_all = isinstance(shadow, list | tuple) and len(shadow) == len(made)
            for one, other in zip(made, shadow if has_all else [None] * len(made), strict=True):
                self._note_all(one, other, sure)

    def _note(self, tensor: torch.Tensor, shadow: torch.Tensor | None, sure: bool = True) -> None:
        if shadow is not None and shadow.dim() != tensor.dim():
            shadow = None
        if shadow is None and _key(tensor) in self._shadows and self._shadows[_key(tensor)].tensor is tensor:
            return  # changed in place, as by an all-reduce
        self._shadows[_key(tensor)] = _Shadow(tensor, shadow, sure)

    def _found(self, tensor: torch.Tensor) -> "_Shadow":
        """The tensor of another batch size; what was made before the call and is not of the batch is constant."""
        if _key(tensor) not in self._shadows:
            self._note(tensor, _meta(tensor, tuple(tensor.shape)))
        return self._shadows[_key(tensor)]


@dataclass(frozen=True)
class _Shadow:
    """A tensor, whose memory must stay its own, and the same of another batch size; None where that is not known."""

    tensor: torch.Tensor
    other: torch.Tensor | None
    sure: bool = True


def _dim_in(tensor: torch.Tensor, rows: Sequence[tuple[int, int]]) -> int | None:
    """The dimension of the samples in a view of a tensor of the batch; None for other tensors."""
    memory = tensor.untyped_storage().data_ptr()
    for of_batch, stride in rows:
        if of_batch == memory:
            return next((dim for dim in range(tensor.dim()) if tensor.stride(dim) == stride), None)
    return None


def _key(tensor: torch.Tensor) -> Any:
    # autograd may hand on a view as another object with the same memory
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _meta(tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    return torch.empty_permuted(tuple(sizes), _layout(tensor), dtype=tensor.dtype, device="meta")


def _layout(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its dimensions in the order of memory."""
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))


def _moved(
    given: tuple[int, ...], made: tuple[int, ...], dim: int, before: int, mine: int
) -> tuple[int, int] | None:
    """Where a batch is after a view, and how much is merged before it there.

    Elements keep their order, so as many elements are before one step of the batch, and after it, as there were.
    """
    ahead, behind = given[:dim], given[dim + 1 :]
    before *= math.prod(ahead)
    passed = 1
    found = []
    for at, size in enumerate(made):
        here, rest = divmod(before, passed)
        if not rest and size % (here * mine) == 0:
            found.append((at, here))
        passed *= size
    if mine > 1 or len(found) < 2:
        return found[0] if found else None
    # of a share of one sample the batch may be in several places
    alone = next(((at, here) for at, here in found if here == 1 and made[at] == 1), None)
    split = made[: len(ahead)] == ahead and len(made) > len(ahead) + len(behind)
    return alone or (found[-1] if split else found[0])
