"""Where the batch is in each tensor that a model draws, found while the model is called.

Beside every tensor goes a tensor without values (on torch's meta device) of another batch size: a dimension that
differs between the two is one of the batch. So a hidden size, a number of heads or a sequence length that happens to
equal this rank's number of samples is not taken for the batch, and the memory layout of a share of one sample is known.
Not covered: tensors that an operation of another library makes; there the place is guessed from the shape.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.train.batch_sizes import Kinds, Other, Place
from samestep.train.draw_sizes import distribution_drawn, fixed_sizes, measured
from samestep.train.group.control import users_line
from samestep.train.loss import Averaged
from samestep.train.mixing import IN_PLACE, averaged, mixed_by_copy, order_kept
from samestep.train.nested import memory_of, named_tensors
from samestep.train.step import Share
from samestep.train.views import dim_in_view, key_of, layout_of, meta_of, moved

_VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias"}
_GROWN = {"expand", "repeat"}
_SELECT: Any = torch.ops.aten.select.int
_SIZED = {"new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided", "as_strided"}


class BatchPlaces(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active: beside each tensor one of another batch size."""

    def __init__(
        self,
        share: Share,
        given: Iterable[tuple[torch.Tensor, Place | None]],
        constant: Iterable[torch.Tensor],
        is_paused: Callable[[], bool] = lambda: False,
        is_new: Callable[[torch.Tensor], bool] = lambda _: False,
        is_joined: Callable[[torch.Tensor], bool] = lambda _: False,
    ) -> None:
        """`given` are a model's inputs, or a batch, with where the batch is in each, if that is known.

        `is_new` says whether a tensor that was not seen being made, as of NumPy's numbers, may be of this batch, and
        `is_joined` whether it has the rows of all ranks.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_paused, self._is_new, self._is_joined = is_paused, is_new, is_joined
        # with what tells whether its memory is still there, which may come to be another tensor's
        self._others: dict[Any, tuple[Any, ...]] = {}
        self._to_come: torch.Tensor | None = None
        self._is_as_guessed = True
        self._kinds, self._rows = Kinds(share), share.rows
        # where a number was read of such an average, and where of those that a number then weighed
        self._read_at = self.weighed_by = ""
        for tensor in constant:
            self._note(tensor, meta_of(tensor))
        self._note_given(share, list(given))
        for name, laid in share.of.tensors():
            one = share.of.ragged.get(name)
            if one is not None and one.rows in self._kinds.ragged:
                self._note_place(laid, Place(one.dim, ragged=name))

    def _note_given(self, share: Share, given: Sequence[tuple[torch.Tensor, Place | None]]) -> None:
        """A view of a tensor of the batch has the samples where their stride is; other tensors in front or second."""
        in_front = any(tensor.dim() and tensor.shape[0] == share.mine for tensor, _ in given)
        of_batch = {memory_of(tensor): (tensor, share.dim_in(name)) for name, tensor in share.of.tensors()}
        is_plain = any(
            place or share.mine in tensor.shape[:2] or memory_of(tensor) in of_batch
            for tensor, place in given
        )
        for tensor, place in given:
            # as a state that a recurrent layer gave for the batch before
            is_second = tensor.dim() > 2 and tensor.shape[0] != share.mine == tensor.shape[1]
            laid, dim = of_batch.get(memory_of(tensor), (None, int(is_second or not in_front)))
            if place is None and laid is not None and key_of(laid) != key_of(tensor):
                place = Place(dim_in_view(tensor, laid, dim, share.mine))
            elif place is None and tensor.shape[dim : dim + 1] == (share.mine,):
                place = Place(dim)
            if place is None and not is_plain and tensor.dim() and len(tensor) > 1:
                self._put(Other(tensor, None))
            else:
                self._note_place(tensor, place or Place(None))

    def _note_place(self, tensor: torch.Tensor, place: Place) -> None:
        sizes = list(tensor.shape)
        if place.dim is not None and place.dim < len(sizes):
            kind = self._kinds.at(place)
            if sizes[place.dim] % (kind.before * kind.mine) == 0:
                sizes[place.dim] = sizes[place.dim] // kind.mine * kind.size
        self._note(tensor, meta_of(tensor, sizes))

    def mark(self, tensor: torch.Tensor, dim: int) -> None:
        """Say where the batch is in what a layer returned, if that was not seen."""
        other = self._found(tensor).other
        if tensor.shape[dim] == self._kinds.samples.mine and (other is None or other.shape == tensor.shape):
            self._note_place(tensor, Place(dim))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types or self._is_paused():  # a subclass of Tensor computes in its own way
            return func(*args, **kwargs)
        if func._opname == "_local_scalar_dense" and not isinstance(args[0], torch.Tensor):
            return args[0]  # torch hands on a tensor that it made of a number as the number
        other, sure = self._computed(func, args, kwargs)
        before, self._to_come = self._to_come, None
        if isinstance(other, torch.Tensor) and (sure or any(map(self._kinds.in_size, other.shape))):
            self._to_come = other
        try:
            made = func(*args, **kwargs)
        finally:
            self._to_come = before
        with suppress(Exception):  # what cannot be followed is not known, and the script goes on
            if func._opname == "unbind":
                self._follow_each(made, *args)
            else:
                self._follow(func, args, kwargs, made, other, sure)
        return made

    def _follow_each(self, pieces: Sequence[torch.Tensor], of: torch.Tensor, along: int = 0) -> None:
        """Note the others of what unbind made, each as one that was selected."""
        for at, one in enumerate(pieces):
            self._follow(_SELECT, (of, along, at), {}, one, *self._computed(_SELECT, (of, along, at), {}))

    def _follow(self, func: Any, args: Any, kwargs: Any, made: Any, other: Any, sure: bool) -> None:
        """Note the other of what an operation made."""
        if func._overloadname.endswith("out") or func._schema.is_mutable:
            if func._opname == "copy_":
                self._note_copied(*args[:2])
            self._note_changed(made, args, other if sure else None)
            if func._opname not in IN_PLACE:
                return
            _, other, sure, *_ = self._found(made)
        if isinstance(made, torch.Tensor):
            if not self._makes_sense(made, other):
                other, sure = self._computed(func, args, kwargs, as_guessed=False)
            other, sure = self._by_sizes(func._opname, args, made, other, sure)
        given = [self._found(tensor) for _, tensor in named_tensors((args, kwargs))]
        if not self._is_as_guessed:
            given = [one if one.sure else one._replace(other=meta_of(one.tensor)) for one in given]
        order = order_kept(func._opname, given, Other(made, other).has_batch)
        if (chosen := self._kinds.chosen(func._opname, args, made, self._found)) is not None:
            (other, order), sure = chosen, True
        average = averaged((func, args, kwargs), given, made, other, order, self._rows)
        if func._opname == "_local_scalar_dense" and given[0].averaged and given[0].averaged.of_model:
            self._read_at = users_line()
        elif average is not None and any(type(one) is float for one in args):
            self.weighed_by = self.weighed_by or self._read_at
        self._note(made, other, sure, average, order)

    def averaged(self, tensor: torch.Tensor) -> Averaged | None:
        """How it is made of averages over this rank's samples, None where not at all."""
        return self._found(tensor).averaged

    def mark_slopes(self, inputs: Sequence[torch.Tensor], slopes: Sequence[Any], sums: bool) -> None:
        """Say that slopes of what is none of the batch are averages or sums over this rank's samples, made unseen."""
        for of, slope in zip(map(self._found, inputs), slopes, strict=True):
            if slope is not None and of.other is not None and of.other.shape == of.tensor.shape:
                self._put(self._found(slope)._replace(averaged=Averaged("", True, sums)))

    def _note_changed(self, made: Any, args: Any, other: Any) -> None:
        """Note the other of what an operation changed in place, where that says more than was known."""
        if isinstance(made, torch.Tensor):
            other = other if self._makes_sense(made, other) else self._filled(made, args)
            if other is not None:
                self._put(self._found(made)._replace(other=other, sure=True))

    def _note_copied(self, into: torch.Tensor, of: torch.Tensor) -> None:
        """Samples in another order, or what mixes them: in a part of a tensor they are in all that has its memory."""
        there, here = self._found(into), self._found(of)
        if into.untyped_storage().nbytes() == into.nbytes:
            self._put(there := there._replace(order=here.order))
        if does := mixed_by_copy(there, here):
            memory = into.untyped_storage().data_ptr()
            for key, (held, *known) in self._others.items():
                if (one := held()) is not None and one.data_ptr() == memory:
                    self._others[key] = held, *known[:2], Averaged(does), *known[3:]

    def _filled(self, made: torch.Tensor, args: Sequence[Any]) -> torch.Tensor | None:
        """The other of what is filled from a tensor of the batch, as one_hot fills what it made of sizes."""
        for arg in (one for one in args if isinstance(one, torch.Tensor) and one is not made):
            _, other, sure, *_ = self._found(arg)
            if (
                other is None
                or not sure
                or arg.dim() != made.dim()
                or not (found := self._kinds.batch_in(arg, other))
            ):
                continue
            dim, sizes = found[0], list(made.shape)
            if sizes[dim] == arg.shape[dim]:
                sizes[dim] = other.shape[dim]
                return meta_of(made, sizes)
        return None

    def _by_sizes(self, name: str, args: Any, made: torch.Tensor, other: Any, sure: bool) -> tuple[Any, bool]:
        """The same of an operation that got sizes as numbers."""
        if other is None and name in _VIEWS | _GROWN:
            of = self._found(args[0])
            return (
                self._viewed(made, of) if name in _VIEWS else self._grown(made, of, args[1], name == "repeat")
            )
        if other is None and (name in _SIZED or not _has_tensor(args)):
            return self._sized(made, args)
        if name == "bincount" and (len(args[0]) == self._rows.mine or len(made) not in self._kinds.sizes()):
            return meta_of(made), True  # of labels; else perhaps a number for each graph
        if other is None and all(self._found(tensor).is_constant for _, tensor in named_tensors(args)):
            return meta_of(made), True
        return other, sure

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Where the batch is in this tensor, None where it is not known."""
        _, other, sure, *_ = self._known(tensor) or Other(tensor, None)
        if other is None or (not sure and tensor.shape == other.shape):
            other = self._to_come
        if other is None:
            other = self._measured(tensor)
        if other is None or not self._makes_sense(tensor, other):
            return None
        found = self._kinds.batch_in(tensor, other)
        if found is None:
            # a share of the other batch's size is no share that anyone has
            return Place(None)
        dim, kind = found
        after = tensor.shape[dim] // kind.mine // kind.before
        return Place(dim, kind.before, after, layout_of(other), kind.ragged)

    def _measured(self, made: torch.Tensor, of: Any = None) -> torch.Tensor | None:
        """The other as that of what it is made of, of the distribution that draws, or of what has its length."""
        sizes = list(made.shape)
        for _, like in named_tensors(distribution_drawn() if of is None else of):
            if (other := self._found(like).other) is not None and like.dim() == made.dim() > 1:
                # as feature dropout makes its mask
                pairs = zip(sizes, like.shape, other.shape, strict=True)
                alike = [one if here == size else size for size, here, one in pairs]
                if alike != sizes:
                    return meta_of(made, alike)
        of = measured()
        if not isinstance(of, torch.Tensor):
            return None
        behind = zip(sizes[1:], fixed_sizes(len(sizes))[1:], strict=False)
        if any(size == self._kinds.samples.mine and not is_fixed for size, is_fixed in behind):
            return None
        _, other, sure, *_ = self._found(of)
        if other is None or not sure:
            return None
        if other.shape[0] == of.shape[0]:
            return meta_of(made) if other.shape == of.shape else None
        sizes[0] = other.shape[0]
        return meta_of(made, sizes) if made.shape[0] == of.shape[0] else None

    def _makes_sense(self, tensor: torch.Tensor, other: Any) -> bool:
        """Whether these can be the same of two batch sizes."""
        if not isinstance(other, torch.Tensor) or other.dim() != tensor.dim():
            return False
        with suppress(LookupError):
            self._kinds.batch_in(tensor, other)
            return True
        return False

    def _computed(self, func: Any, args: Any, kwargs: Any, *, as_guessed: bool = True) -> tuple[Any, bool]:
        """What the operation makes of the others, and whether that is sure; None where it does not go.

        Where what was guessed leads to nothing, it is taken for tensors that have nothing of the batch.
        """
        if func._opname in _VIEWS | _GROWN | _SIZED or func.namespace not in ("aten", "prims"):
            return None, True
        found: list[Other] = []

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
            made = self._kinds.computed(func, args, *others) if found else None
        except Exception:  # the operation needs values, or sizes that were given as numbers
            if as_guessed and not all(one.sure for one in found):
                return self._computed(func, args, kwargs, as_guessed=False)
            return None, True
        self._is_as_guessed, is_sure = as_guessed, all(one.sure for one in found)
        if not is_sure and isinstance(made, torch.Tensor) and any(map(self._kinds.in_size, made.shape)):
            is_sure = any(
                one.sure and one.other.shape != one.tensor.shape for one in found if one.other is not None
            )
        return made, is_sure

    def _viewed(self, made: torch.Tensor, of: Other) -> tuple[torch.Tensor | None, bool]:
        """The other of a view, whose sizes were given as numbers, and whether it is sure."""
        given, other, sure, *_ = of
        if other is None or given.shape == made.shape:
            return other, sure
        sizes = list(made.shape)
        try:
            if found := self._kinds.batch_in(given, other):
                dim, kind = found
                dim, before = moved(given.shape, made.shape, dim, kind.before, kind.mine)
                kind = self._kinds.behind(before, kind)
                sizes[dim] = sizes[dim] // kind.mine * kind.size
            return other.view(sizes), sure
        except LookupError:
            return None, True
        except RuntimeError:
            return meta_of(made, sizes), sure

    def _grown(
        self, made: torch.Tensor, of: Other, counts: Sequence[int], is_repeated: bool
    ) -> tuple[torch.Tensor | None, bool]:
        """The other of what was expanded or repeated, and whether it is sure."""
        given, other, sure, *_ = of
        if other is None:
            return None, True
        sizes = list(made.shape)
        before_it = [1] * (made.dim() - given.dim()) + list(given.shape)
        try:
            if found := self._kinds.batch_in(given, other):
                dim, kind = found
                dim += made.dim() - given.dim()
                if is_repeated and counts[dim] > 1:
                    kind = self._kinds.behind(counts[dim] * kind.before, kind)
                sizes[dim] = sizes[dim] // kind.mine * kind.size
                return meta_of(made, sizes), sure
        except LookupError:
            return None, True
        # as a token is put before every sample
        fits, pairs = self._kinds.sizes(), enumerate(zip(counts, sizes, before_it, strict=True))
        grown = [
            dim for dim, (count, size, before) in pairs if before == 1 and count == size and count in fits
        ]
        if len(grown) == 1 or (grown and self._kinds.samples.mine == 1):
            sizes[grown[0]] = fits[sizes[grown[0]]]
        return meta_of(made, sizes), sure and not grown

    def _sized(self, made: torch.Tensor, args: Any) -> tuple[torch.Tensor, bool]:
        """A guess for a tensor whose size was given in numbers; what is computed of it shows whether it is wrong."""
        sizes = list(made.shape)
        if (other := self._measured(made, args[0] if _has_tensor(args[:1]) else None)) is not None:
            return other, True
        equal = [dim for dim, size in enumerate(sizes) if size == self._kinds.samples.mine]
        fixed = fixed_sizes(len(sizes)) if equal else []
        if any(fixed) and len(fixed) == len(sizes):
            equal = [dim for dim in equal if not fixed[dim]][:1]  # features come behind the samples
        if len(equal) == 1:
            sizes[equal[0]] = self._kinds.samples.size
        elif sizes and not equal and not any(fixed):
            sizes[0] = self._kinds.sizes().get(sizes[0], sizes[0])
        # where several are equal it is perhaps a mask over time, which may be combined with a tensor of the batch
        return meta_of(made, sizes), not equal and sizes == list(made.shape)

    def _note(
        self,
        made: Any,
        other: Any,
        sure: bool = True,
        average: Averaged | None = None,
        order: tuple[int, ...] = (),
    ) -> None:
        if isinstance(made, list | tuple):
            has_all = isinstance(other, list | tuple) and len(other) == len(made)
            for one, its in zip(made, other if has_all else [None] * len(made), strict=True):
                self._note(one, its, sure, average, order)
        elif isinstance(made, torch.Tensor):
            is_like = isinstance(other, torch.Tensor) and other.dim() == made.dim()
            # what is known stays known where it was changed in place, as by an all-reduce
            if is_like or self._known(made) is None:
                self._put(Other(made, other if is_like else None, sure, average, order))

    def _put(self, found: Other) -> None:
        tensor, *known = found
        memory = tensor.untyped_storage() if tensor.layout == torch.strided else tensor
        self._others[key_of(tensor)] = weakref.ref(memory), *known

    def _known(self, tensor: torch.Tensor) -> Other | None:
        held, *known = self._others.get(key_of(tensor), (lambda: None,))
        return None if held() is None else Other(tensor, *known)

    def _found(self, tensor: torch.Tensor) -> Other:
        """What was made before the call and is not of the batch is constant."""
        if self._is_joined(tensor):
            return Other(tensor, meta_of(tensor))
        if known := self._known(tensor):
            return known
        if self._is_new(tensor):
            return Other(tensor, *self._sized(tensor, ()))
        return Other(tensor, meta_of(tensor))


def _has_tensor(args: Sequence[Any]) -> bool:
    return any(isinstance(one, torch.Tensor) for one in args)
