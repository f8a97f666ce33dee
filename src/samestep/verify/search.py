"""Finds the causes of a difference by experiments: runs with a suspected cause removed.

A cause is named only if the difference goes away without it, to the end or up to the next difference. The search then
goes on from there, until nothing differs or no experiment changes anything.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from samestep.compare.compare import compare
from samestep.compare.weights import read
from samestep.errors import CheckpointError, UsageError
from samestep.verify.causes import (
    Suspect,
    draws_of,
    failure_of,
    is_unstable,
    says_its_cause,
    stated,
    suspects,
)
from samestep.verify.read import Run, record_path
from samestep.verify.trajectory import SOFT, Difference, Trajectory, first_fact, follow

_END = 1e-3
_END_JUMP = 100.0
_END_NOISE = 30.0
_MOST_CAUSES = 8
_AT_SIZE_1_TOO = ("seeds", "loaders", "statistics")
_ORDER = (
    "failed",
    "uneven",
    "steps",
    "apart",
    "weights",
    "batch",
    "samples",
    "mode",
    "hyper",
    "buffer",
    "loss",
    "grad",
    "end",
)
_OWN_DRAWS = (
    "each rank draws its own random numbers between backward and the step; draw them from a torch.Generator with the "
    "same seed on every rank"
)

Removed = tuple[str, ...]
Record = Callable[
    [int | None, Removed, str], Run
]  # a run at a size, without some causes; "", "again" or "nudged"


@dataclass(frozen=True)
class Cause:
    """Why runs differ; confirmed by an experiment, or a fact that the records show."""

    sentence: str
    removed: str | None = None
    is_harmless: bool = False


@dataclass(frozen=True)
class Found:
    """How two runs compare: the first difference beyond rounding, where the run has one."""

    run: Run
    path: Trajectory
    difference: Difference | None
    note: str | None = None

    @property
    def place(self) -> tuple[float, int]:
        """Where in the training the difference is."""
        if self.difference is None:
            return math.inf, 0
        kind = _ORDER.index(self.difference.kind)
        if self.difference.kind == "failed":
            return -1, kind
        if self.difference.kind == "uneven":
            return self.run.length, kind
        return (math.inf if self.difference.step is None else self.difference.step), kind


@dataclass
class Search:
    """Looks for all causes by which runs at several sizes differ."""

    record: Record
    sizes: Sequence[int | None]  # None: the untouched script
    removed: Removed = ()
    causes: list[Cause] = field(default_factory=list)
    _compared: dict[tuple[int | None, Removed], Found] = field(default_factory=dict)

    def run(self, size: int | None, removed: Removed, kind: str = "") -> Run:
        """A run of this size; the reference at one process is the same without what only several ranks have."""
        if (size or 1) == 1:
            removed = tuple(name for name in removed if name.startswith(_AT_SIZE_1_TOO))
        return self.record(size, tuple(sorted(set(removed))), kind)

    def reference(self, removed: Removed, kind: str = "") -> Run:
        return self.run(self.sizes[0], removed, kind)

    def is_stable(self, removed: Removed) -> bool:
        """Whether a second run like the first has its numbers."""
        return not is_unstable(self.reference(removed), self.reference(removed, "again"))

    def compared(self, size: int | None, removed: Removed) -> Found:
        """The run at this size against the first."""
        key = (size, tuple(sorted(removed)))
        if key not in self._compared:
            self._compared[key] = self._compare(size, removed)
        return self._compared[key]

    def _compare(self, size: int | None, removed: Removed) -> Found:
        first, run = self.reference(removed), self.run(size, removed)
        if run.code or first.code:
            return Found(
                run,
                Trajectory(None, None, 0.0),
                Difference("failed", None, None, failure_of(run)[1], math.inf, math.inf),
            )
        if run is first:
            return Found(run, Trajectory(None, None, 0.0), None)
        path = follow(first, run)
        if path.beyond is not None and path.beyond.kind in SOFT and self.is_stable(removed):
            path = follow(first, run, self.reference(removed, "nudged"))
        found = path.beyond
        if found is None:
            path = self._with_the_end(first, run, path, removed)
            found = path.beyond
        return Found(run, path, found)

    def find_all(self, found: Found, size: int) -> Found:
        """All causes of the difference of the run at this size; what is left of it without them."""
        if not found.run.fact("serial") and self.sizes[0] is not None and "draws" not in self.removed:
            found = self._without_draws(found, size)
        while found.difference is not None and len(self.causes) < _MOST_CAUSES:
            if (after := self._find_next(found, size)) is None:
                break
            found = after
        return found

    def _without_draws(self, found: Found, size: int) -> Found:
        """From here on all ranks draw the serial script's numbers, so that a mistake stands alone."""
        assert found.difference is not None
        if found.difference.kind == "failed":
            return found
        after = self.compared(size, (*self.removed, "draws"))
        if after.difference is not None and after.difference.kind == "failed":
            return found
        self.removed = (*self.removed, "draws")
        if found.difference.kind == "apart" and after.place > found.place:
            self.causes.append(Cause(_OWN_DRAWS, "draws"))
        return after

    def _find_next(self, found: Found, size: int) -> Found | None:
        """The state of the search after one more cause, or several that only differ together; None where there is
        none to be found."""
        assert found.difference is not None
        if found.difference.kind == "failed" and says_its_cause(found.run):
            self._state(failure_of(found.run)[1])
            return None
        listed = list(self._suspects(found))
        for suspect in listed:
            if suspect.remove == "shares" and self._is_amplified(found, size):
                break
            after = self.compared(size, (*self.removed, suspect.remove))
            if _is_progress(found, after):
                return self._confirmed([suspect], after)
        if together := self._needed_together(found, size, listed):
            return self._confirmed(*together)
        if note := self._is_amplified(found, size):
            return self._after_chaos(found, note)
        self._state(stated(self.reference(self.removed), found.run, found.difference))
        return None

    def _state(self, sentence: str | None) -> None:
        """A cause that the records show, and no experiment; another size may show the same in other words."""
        if sentence and not any(cause.removed is None for cause in self.causes):
            self.causes.append(Cause(sentence))

    def _suspects(self, found: Found) -> Iterator[Suspect]:
        first, difference = self.reference(self.removed), found.difference
        assert difference is not None
        listed = [
            suspect
            for suspect in suspects(first, found.run, difference, self.reference(self.removed, "again"))
            if suspect.remove not in self.removed
        ]
        of_world = [suspect for suspect in listed if suspect.remove.startswith("world=")]
        if len(of_world) > 2 and "world=*" not in self.removed:
            without = self.compared(found.run.size, (*self.removed, "world=*"))
            if not _is_progress(found, without):
                listed = [suspect for suspect in listed if suspect not in of_world]
        yield from listed
        if difference.kind == "hyper":
            path = record_path(first.state.parent, 0)
            yield Suspect(f"settings={path}", str(stated(first, found.run, difference)))

    def _confirmed(self, listed: list[Suspect], after: Found) -> Found:
        self.causes += [Cause(suspect.sentence, suspect.remove) for suspect in listed]
        self.removed = (*self.removed, *(suspect.remove for suspect in listed))
        return after

    def _needed_together(
        self, found: Found, size: int, listed: Sequence[Suspect]
    ) -> tuple[list[Suspect], Found] | None:
        """The causes that have to be removed together for the difference to go away, each of them needed."""
        chosen = [suspect for suspect in listed if not suspect.remove.startswith(("scale=", "settings="))]
        if len(chosen) < 2:
            return None
        after = self.compared(size, (*self.removed, *(suspect.remove for suspect in chosen)))
        if not _is_progress(found, after):
            return None
        # the general experiment last: what remains is as specific as can be
        for suspect in sorted(chosen, key=lambda one: one.remove != "shares"):
            fewer = [other for other in chosen if other is not suspect]
            without = self.compared(size, (*self.removed, *(other.remove for other in fewer)))
            if fewer and _is_progress(found, without):
                chosen, after = fewer, without
        return chosen, after

    def _is_amplified(self, found: Found, size: int) -> str | None:
        """Says so where the training amplifies rounding this far at the first size too, from changed last bits."""
        difference = found.difference
        if difference is None or difference.kind not in SOFT | {"end"} or difference.step == 0:
            return None
        first = self.reference(self.removed)
        nudged = follow(first, self.reference(self.removed, "nudged")).beyond
        if nudged is None or nudged.kind not in SOFT or not nudged.step:
            return None
        step = first.length if difference.step is None else difference.step
        if nudged.step > 3 * step + 5:
            return None
        return (
            f"from step {step + 1} on the training itself amplifies rounding, as it does from step "
            f"{nudged.step + 1} on where {first.processes} start{'s' * (first.size == 1)} from changed last bits"
        )

    def _after_chaos(self, found: Found, note: str) -> Found:
        """Goes on with what rounding cannot change."""
        fact = first_fact(self.reference(self.removed), found.run)
        return replace(found, difference=fact, note=None if fact else note)

    def is_clean_without(self, size: int, name: str) -> bool:
        """Whether the run is right although this is not removed."""
        rest = tuple(removed for removed in self.removed if removed != name)
        return self.compared(size, rest).difference is None

    def harmless(self, size: int) -> Cause | None:
        """What each rank draws for itself, where that too makes the runs differ."""
        if "draws" not in self.removed or self.is_clean_without(size, "draws"):
            return None
        run = self.run(size, self.removed)
        return Cause(
            f"{draws_of(run)} are each rank's own; --same makes them those of the whole batch", "draws", True
        )

    def _with_the_end(self, first: Run, run: Run, path: Trajectory, removed: Removed) -> Trajectory:
        """The same, with the differences between the states at the end of the script."""
        bits, largest, noise = path.bits, path.largest, None
        for found in _at_the_end(first, run):
            bits = bits or found
            if found.distance > max(_END, _END_JUMP * largest):
                if noise is None and self.is_stable(removed):
                    nudged = self.reference(removed, "nudged")
                    noise = {one.name: one.distance for one in _at_the_end(first, nudged)}
                if found.distance > _END_NOISE * (noise or {}).get(found.name, 0.0):
                    return Trajectory(bits, found, largest, [found])
        return Trajectory(bits, None, largest)


def _is_progress(before: Found, after: Found) -> bool:
    """Whether the difference went away, to the end or up to the next one."""
    assert before.difference is not None
    if after.difference is None:
        return True
    if after.difference.kind == "failed":
        return False
    if after.place != before.place:
        return after.place > before.place
    was, now = ({found.key: found.own for found in one.path.also} for one in (before, after))
    if before.difference.key not in now:
        return True
    return before.difference.own > 3 * now[before.difference.key] and len(now) <= len(was)


def _at_the_end(first: Run, run: Run) -> Iterator[Difference]:
    for rank, facts in enumerate(run.facts):
        for name, digest in facts["end"].items():
            if digest != run.facts[0]["end"].get(name, digest):
                yield Difference("apart", run.length, rank, name, math.inf, math.inf)
    try:
        states = read(first.state).state, read(run.state).state
    except CheckpointError as error:
        raise UsageError(f"the state at the end cannot be compared ({error})") from error
    for found in compare(*states, names=(first.processes, run.processes)).differences:
        # An optimizer's averages may be noise about zero; the gradients that it averages were compared.
        is_noise = found.name.startswith("optimizer.") and found.kind == "value" and not found.exact
        distance = 0.0 if is_noise else found.relative
        yield Difference("end", None, None, f"{found.name} at the end", distance, distance)
