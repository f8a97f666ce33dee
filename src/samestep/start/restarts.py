"""Whether a run is started again after a failure: not for the same failure twice, and as often as it gets further."""

from collections.abc import Container, Sequence

from samestep.start.nodes import End, Past


class Restarts:
    """The starts of a run after its first; new steps give it all of them again."""

    def __init__(self, most: int, codes: Container[int]) -> None:
        """`codes` are the exit codes after which to start again; none means any."""
        self._most, self._codes = most, codes
        self._failures: dict[str, str] = {}
        self.past = Past()

    def agree(self, pasts: Sequence[Past]) -> None:
        """Take over what the launchers of all nodes know, as one that has come in a lost node's place has to."""
        furthest, used = max((past.furthest, past.used) for past in pasts)
        self.past = Past(max(past.generation for past in pasts), used, furthest)

    def are_over(self, end: End) -> str | None:
        """What the run ends with, after this end of an attempt; None to start again."""
        report = end.text or ""
        if end.asked is not None or end.code == 0:
            return report
        if self._codes and end.code not in self._codes:
            return report
        generation, used, furthest = self.past
        if end.step > furthest:
            used, furthest = 0, end.step
        if used == self._most:
            return report
        if end.place in self._failures:
            again = "The same failure came again at the same place, so the run is not restarted:"
            return f"{self._failures[end.place]}\n\n{again}\n\n{report}"
        if end.place is not None:
            self._failures[end.place] = report
        self.past = Past(generation + 1, used + 1, furthest)
        return None
