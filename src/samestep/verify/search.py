"""Finds the causes of a difference by experiments: runs with a suspected cause removed.

A cause is named only if the difference goes away without it, to the end or up to the next difference. The search then
goes on from there, until nothing differs or no experiment changes anything.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from samestep.verify.causes import Cause, failure_of, says_its_cause, stated, suspects, unstable
from samestep.verify.experiments import Experiments, Removed
from samestep.verify.read import Run
from samestep.verify.remedies import OWN_DRAWS, STILL_UNSTABLE
from samestep.verify.trajectory import SOFT, Compared, first_fact, follow

_MOST_CAUSES = 8
_MOST_LINES = 2
_IsEnough = Callable[[Sequence[Cause]], bool]
_SCALE = "scale="  # removes the difference, whatever its cause


class Search:
    """Looks for all causes by which runs at several sizes differ."""

    def __init__(self, experiments: Experiments) -> None:
        self._experiments = experiments
        self.causes: list[Cause] = []
        self.removed: Removed = ("draws",) if experiments.first is None else ()

    def without(self, size: int | None, causes: Sequence[Cause] = ()) -> Compared:
        """The run at this size without the causes found so far, and these."""
        names = (cause.removed for cause in causes if cause.removed)
        return self._experiments.compared(size, (*self.removed, *names))

    def by_default(self, size: int) -> Compared:
        """The run of this size in which ranks draw for themselves; rounding that the training amplifies is left out."""
        without = tuple(name for name in self.removed if name != "draws")
        found = self._experiments.compared(size, without)
        return replace(found, difference=None) if self._is_amplified(found) else found

    def explain(self, size: int) -> Compared:
        """Find all causes of the difference of the run at this size; returns what is left of it without them."""
        found = self.without(size)
        while found.difference is not None and len(self.causes) < _MOST_CAUSES:
            after = self._without_clock(found, size) or self._find_next(found, size)
            if after is None:
                break
            found = after
        return found

    def _without_clock(self, found: Compared, size: int) -> Compared | None:
        """Where the script reads the clock, try that first: how far a run comes in its time is chance, and may be as
        far in the run of another experiment."""
        clock = [cause for cause in unstable(found.first) if cause.removed == "clock"]
        if not clock or "clock" in self.removed or not _is_progress(found, self.without(size, clock)):
            return None
        return self._confirmed(clock, size)

    def _without_draws(self, found: Compared, size: int) -> Compared | None:
        """From here on all ranks draw the serial script's numbers, so that a mistake stands alone."""
        after = self.without(size, [Cause("", "draws")])
        if "failed" in (found.kind, after.kind):
            return None
        self.removed = (*self.removed, "draws")
        # draws of a rank's own make a loss differ first, where the model has dropout too
        apart, still = (first_fact(run, run) for run in (found.run, after.run))
        if apart and apart.kind == "apart" and not still:
            self.causes.append(Cause(OWN_DRAWS, "draws"))
        return after

    def _find_next(self, found: Compared, size: int) -> Compared | None:
        """The state of the search after one more cause, or several that only differ together; None where there is
        none to be found."""
        if found.kind == "failed" and says_its_cause(found.run):
            self._state(failure_of(found.run)[1])
            return None

        def is_enough(some: Sequence[Cause]) -> bool:
            return _is_progress(found, self.without(size, some))

        for of in (self._experiments.first, size):
            if not self._experiments.is_stable(of, self.removed):
                return self._made_stable(of, size)
        if "draws" not in self.removed and (after := self._without_draws(found, size)):
            return after
        listed = self._suspects(found, is_enough)
        for suspect in listed:
            if suspect.removed == "shares" and (note := self._is_amplified(found)):
                # It goes on with what rounding cannot change.
                fact = first_fact(found.first, found.run)
                return replace(found, difference=fact, note=None if fact else note)
            if is_enough([suspect]):
                return self._confirmed([suspect], size)
        chosen = [cause for cause in listed if not str(cause.removed).startswith(_SCALE)]
        # The general experiment last: what remains is as specific as can be.
        chosen.sort(key=lambda cause: cause.removed != "shares")
        if together := _together(chosen, is_enough):
            return self._confirmed(together, size)
        self._state(stated(found))
        return None

    def _state(self, sentence: str | None) -> None:
        """A cause that the records show, and no experiment; another size may show the same in other words."""
        if sentence and not any(cause.removed is None for cause in self.causes):
            self.causes.append(Cause(sentence))

    def _confirmed(self, causes: Sequence[Cause], size: int) -> Compared:
        self.causes += causes
        self.removed = (*self.removed, *(cause.removed for cause in causes if cause.removed))
        return self.without(size)

    def _made_stable(self, of: int | None, size: int) -> Compared | None:
        """Without what two runs of one size have different: before that, an experiment shows nothing."""
        run = self._experiments.run(of, self.removed)
        listed = [cause for cause in unstable(run) if cause.removed not in self.removed]

        def is_stable(some: Sequence[Cause]) -> bool:
            return self._experiments.is_stable(of, (*self.removed, *(str(cause.removed) for cause in some)))

        alone = next(([cause] for cause in listed if is_stable([cause])), [])
        if chosen := alone or _together(listed, is_stable):
            return self._confirmed(chosen, size)
        self._state(STILL_UNSTABLE.format(run.at))
        return None

    def _suspects(self, found: Compared, is_enough: _IsEnough) -> list[Cause]:
        """Those left to try; of many lines that read the rank none, where hiding it at all of them is not enough."""
        listed = [suspect for suspect in suspects(found) if suspect.removed not in self.removed]
        of_world = [suspect for suspect in listed if str(suspect.removed).startswith("world=")]
        if len(of_world) > _MOST_LINES and not is_enough([Cause("", "world=*")]):
            listed = [suspect for suspect in listed if suspect not in of_world]
        return listed

    def _is_amplified(self, found: Compared) -> str | None:
        """Says so where the training amplifies rounding this far at the first size too, from changed last bits."""
        if found.kind not in SOFT or not found.step:
            return None
        first = found.first
        nudged = follow(first, self._experiments.reference(self.removed, "nudged"))
        if nudged.kind not in SOFT or not 0 < nudged.step <= 3 * found.step + 5:
            return None
        return (
            f"from step {found.step + 1} on the training itself amplifies rounding, as it does from step "
            f"{nudged.step + 1} on where {first.processes} start{'s' * (first.size == 1)} from changed last bits"
        )

    def harmless(self, size: int) -> list[Cause]:
        """What each rank draws for itself, beside the causes of a difference."""
        run = self._experiments.run(size, ())
        if self._experiments.first is None or "draws" not in self.removed or not run.fact("own"):
            return []
        said = f"{draws_of(run)} are each rank's own; --same makes them those of the whole batch"
        return [Cause(said, "draws", is_harmless=True)]


def draws_of(run: Run) -> str:
    """What each rank has of its own by default, in words."""
    return " and ".join(run.fact("own") or ["random draws, or what collate_fn makes of a share (padding),"])


def _together(causes: list[Cause], is_enough: _IsEnough) -> list[Cause]:
    """Those that are only enough together; none where all of them are not."""
    if len(causes) < 2 or not is_enough(causes):
        return []
    for cause in list(causes):
        fewer = [other for other in causes if other is not cause]
        if fewer and is_enough(fewer):
            causes = fewer
    return causes


def _is_progress(before: Compared, after: Compared) -> bool:
    """Whether the difference went away, to the end or up to the next one."""
    assert before.difference is not None
    if after.difference is None:
        return True
    if after.kind == "failed":
        return False
    if after.place != before.place:
        return after.place > before.place
    was, now = ({found.key: found.own for found in one.also} for one in (before, after))
    if before.difference.key not in now:
        return True
    return before.difference.own > 3 * now[before.difference.key] and len(now) <= len(was)
