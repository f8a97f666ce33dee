"""Whether a run is started again after a failure: not for the same failure twice, and as often as it gets further."""

from collections.abc import Container

from samestep.start.nodes import End


class Restarts:
    """The starts of a run after its first; new steps give it all of them again."""

    def __init__(self, most: int, codes: Container[int]) -> None:
        """`codes` are the exit codes after which to start again; none means any."""
        self._most, self._codes = most, codes
        self._furthest = -1
        self._failures: dict[str, str] = {}
        self.generation = 0  # which start this is
        self.used = 0  # since the run got further

    def are_over(self, node: int, end: End) -> str | None:
        """What the run ends with, after this end of an attempt on this node (-1: a lost one); None to start again."""
        report = end.text or ""
        if end.asked is not None or end.code == 0 or node < 0:
            return report
        if self._codes and end.code not in self._codes:
            return report
        if end.step > self._furthest:
            self._furthest, self.used = end.step, 0
        if self.used == self._most:
            return report
        if end.place in self._failures:
            again = "The same failure came again at the same place, so the run is not restarted:"
            return f"{self._failures[end.place]}\n\n{again}\n\n{report}"
        if end.place is not None:
            self._failures[end.place] = report
        self.generation, self.used = self.generation + 1, self.used + 1
        return None
