"""Finds the causes of a difference by experiments: runs without a suspected cause.

A cause is only named if the difference goes away without it, at least up to a later difference. The search continues
from there, until nothing differs or no experiment changes anything.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from samestep.verify.causes import Cause, came_apart, failure_of, says_its_cause, stated, suspects, unstable
from samestep.verify.experiments import Experiments, Removed
from samestep.verify.read import are_given_alike
from samestep.verify.remedies import OWN_DRAWS, STILL_UNSTABLE
from samestep.verify.trajectory import SOFT, Compared, first_fact, follow, is_noise

_MOST_CAUSES = 8
_MOST_LINES = 2
_IsEnough = Callable[[Sequence[Cause]], bool]
_DRAWN = "draw them before the first batch"  # data that each rank draws for itself
_COLLATED = "batches that collate_fn makes of a share (padding, a mean)"


class Search:
    """Searches for all causes why runs of several sizes differ."""

    def __init__(self, experiments: Experiments) -> None:
        self._experiments = experiments
        self.causes: list[Cause] = []
        self.removed: Removed = ("draws",) if experiments.first is None else ()

    def without(self, size: int | None, causes: Sequence[Cause] = ()) -> Compared:
        """Compare the run of this size without the causes found so far, and without `causes`."""
        names = (cause.removed for cause in causes if cause.removed)
        return self._experiments.compared(size, (*self.removed, *names))

    def by_default(self, size: int) -> Compared:
        """The run of this size in which ranks draw for themselves; rounding that the training amplifies is left out."""
        without = tuple(name for name in self.removed if name != "draws")
        compared = self._experiments.compared(size, without)
        return replace(compared, difference=None) if self._is_amplified(compared) else compared

    def explain(self, size: int) -> Compared:
        compared = self.without(size)
        while compared.difference is not None and len(self.causes) < _MOST_CAUSES:
            after = self._without_clock(compared, size) or self._find_next(compared, size)
            if after is None:
                break
            compared = after
        return compared

    def _without_clock(self, compared: Compared, size: int) -> Compared | None:
        """If the script reads the clock, test that first: how far a run comes in its time varies, so another experiment
        may succeed by chance. Runs as long as each other whose numbers repeat do not need this test."""
        clock = [cause for cause in unstable(compared.first) if cause.removed == "clock"]
        if not clock or "clock" in self.removed:
            return None
        sizes, is_as_long = (self._experiments.first, size), compared.first.length == compared.run.longest
        if is_as_long and all(self._experiments.is_stable(either, self.removed) for either in sizes):
            return None
        return self._confirmed(clock, size) if _is_progress(compared, self.without(size, clock)) else None

    def _without_draws(self, compared: Compared, size: int) -> Compared | None:
        """From here on all ranks draw the serial script's random numbers, so that only mistakes make a difference."""
        after = self.without(size, [Cause("", "draws")])
        said = failure_of(compared.run)[1] if compared.kind == "failed" else ""
        if (said and _DRAWN not in said) or (after.kind == "failed" and (said or not came_apart(after.run))):
            return None
        self.removed = (*self.removed, "draws")
        if said:
            sentence = f"{said}; with --same, where all ranks draw alike, it does not fail"
            self.causes.append(Cause(sentence, "draws"))
            return after
        # compare facts only: with dropout, a loss differs before the weights that own draws make differ
        before, after_fact = (first_fact(run, run) for run in (compared.run, after.run))
        if before and before.kind == "apart" and not after_fact:
            self.causes.append(Cause(OWN_DRAWS, "draws"))
        return after

    def _find_next(self, compared: Compared, size: int) -> Compared | None:
        """The comparison after a further cause is removed, or several causes that only help together; None if no cause
        is found."""
        if compared.kind == "failed" and says_its_cause(compared.run):
            self._state(failure_of(compared.run)[1])
            return None

        def is_enough(causes: Sequence[Cause]) -> bool:
            return _is_progress(compared, self.without(size, causes))

        for checked in (self._experiments.first, size):
            if not self._experiments.is_stable(checked, self.removed):
                return self._stabilized(checked, size)
        if "draws" not in self.removed and (after := self._without_draws(compared, size)):
            return after
        listed = self._suspects(compared, is_enough)
        for suspect in listed:
            if suspect.removed == "shares" and (note := self._rounding_in(compared, size)):
                # The search continues with facts that rounding cannot change.
                fact = first_fact(compared.first, compared.run)
                return replace(compared, difference=fact, note=None if fact else note)
            if is_enough([suspect]):
                return self._confirmed([suspect], size)
        chosen = [cause for cause in listed if not _scales(cause)]
        # The general experiment is first in the list, so `_together` drops it first, and specific causes remain.
        chosen.sort(key=lambda cause: cause.removed != "shares")
        if together := _together(chosen, is_enough):
            return self._confirmed(together, size)
        self._state(stated(compared))
        return None

    def _state(self, sentence: str | None) -> None:
        """Add a cause from the records; only one, as another size may show the same in other words."""
        if sentence and not any(cause.removed is None for cause in self.causes):
            self.causes.append(Cause(sentence))

    def _confirmed(self, causes: Sequence[Cause], size: int) -> Compared:
        # the same factor is another power of another number of ranks
        is_scaled = any(_scales(cause) for cause in self.causes)
        self.causes += [cause for cause in causes if not (is_scaled and _scales(cause))]
        self.removed = (*self.removed, *(cause.removed for cause in causes if cause.removed))
        return self.without(size)

    def _stabilized(self, unstable_size: int | None, size: int) -> Compared | None:
        """Remove what makes two runs of the same size differ; until then, experiments prove nothing."""
        run = self._experiments.run(unstable_size, self.removed)
        candidates = [cause for cause in unstable(run) if cause.removed not in self.removed]

        def is_stable(causes: Sequence[Cause]) -> bool:
            names = (str(cause.removed) for cause in causes)
            return self._experiments.is_stable(unstable_size, (*self.removed, *names))

        alone = next(([cause] for cause in candidates if is_stable([cause])), [])
        if chosen := alone or _together(candidates, is_stable):
            return self._confirmed(chosen, size)
        self._state(STILL_UNSTABLE.format(run.at))
        return None

    def _suspects(self, compared: Compared, is_enough: _IsEnough) -> list[Cause]:
        """The causes left to test; skip many lines that read the rank, if hiding it at all of them does not help."""
        listed = [suspect for suspect in suspects(compared) if suspect.removed not in self.removed]
        of_world = [suspect for suspect in listed if str(suspect.removed).startswith("world=")]
        if len(of_world) > _MOST_LINES and not is_enough([Cause("", "world=*")]):
            listed = [suspect for suspect in listed if suspect not in of_world]
        return listed

    def _rounding_in(self, compared: Compared, size: int) -> str | None:
        """A note if rounding makes this difference: the training amplifies it, or a last bit decides."""
        if (note := self._is_amplified(compared)) or compared.kind not in SOFT:
            return note
        # a mistake stays where this run too starts from changed last bits
        nudged = self._experiments.reference(self.removed, "nudged")
        other = self._experiments.run(size, self.removed, "nudged")
        if other.code or follow(compared.first, other, nudged).difference:
            return None
        return (
            f"in step {compared.step + 1} a last bit decides, as at the zero of a relu: {other.processes} from changed "
            "last bits take the same steps; see What rounding is in docs/verify.md"
        )

    def _is_amplified(self, compared: Compared) -> str | None:
        """A note if the training amplifies rounding as much at the first size, from changed last bits; else None."""
        if compared.kind not in SOFT or not compared.step:
            return None
        first, until = compared.first, 3 * compared.step + 5
        nudged = follow(first, self._experiments.reference(self.removed, "nudged"))
        if nudged.kind not in SOFT or not 0 < nudged.step <= until:
            return None
        if not is_noise(compared, nudged.run, until):
            return None
        loss = "" if nudged.run.last_loss is None else f", which ends at the loss {nudged.run.last_loss:.5g}"
        return (
            f"from step {compared.step + 1} on the training itself amplifies rounding, as it does from step "
            f"{nudged.step + 1} on where {first.processes} start{'s' * (first.size == 1)} from changed last bits"
            f"{loss}; see What rounding is in docs/verify.md"
        )

    def harmless(self, size: int) -> list[Cause]:
        """A harmless cause: what each rank draws for itself, in addition to the harmful causes."""
        compared = self._experiments.compared(size, ())
        if self._experiments.first is None or "draws" not in self.removed or not compared.run.fact("own"):
            return []
        sentence = f"{draws_of(compared)} are each rank's own; --same makes them those of the whole batch"
        return [Cause(sentence, "draws", is_harmless=True)]


def draws_of(compared: Compared) -> str:
    """In words, what each rank draws for itself by default."""
    first, run, step = compared.first, compared.run, compared.step
    widths = zip(first.fact("widths") or (), run.fact("widths") or (), strict=False)
    is_collated = any(mine != theirs for mine, theirs in widths)
    if compared.is_in_a_step and not are_given_alike(first, run, step):
        is_collated = True
    own = [*(run.fact("own") or ()), *[_COLLATED] * is_collated]
    return " and ".join(own or ["random draws"])


def _scales(cause: Cause) -> bool:
    """Whether it is a factor of the gradients: removing that hides the difference, whatever its cause."""
    return str(cause.removed).startswith("scale=")


def _together(causes: list[Cause], is_enough: _IsEnough) -> list[Cause]:
    """A minimal set of causes that are enough together; empty if all of them are not enough."""
    if len(causes) < 2 or not is_enough(causes):
        return []
    for cause in list(causes):
        others = [other for other in causes if other is not cause]
        if others and is_enough(others):
            causes = others
    return causes


def _is_progress(before: Compared, after: Compared) -> bool:
    """Whether the difference has gone, to the end or up to a later difference."""
    assert before.difference is not None
    if after.difference is None:
        return True
    if after.kind == "failed":
        return False
    if after.place != before.place:
        return after.place > before.place
    was, now = ({item.key: item.own for item in side.also} for side in (before, after))
    if before.difference.key not in now:
        return True
    return before.difference.own > 3 * now[before.difference.key] and len(now) <= len(was)
