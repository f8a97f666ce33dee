"""Finds loops that draw one number for each sample: on a rank these are not the serial script's numbers."""

import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType

from samestep.train.passes import Share
from samestep.train.script.lines import scripts_frame
from samestep.train.script.sizes import is_over_samples


class OneByOne:
    """Counts the draws at each line of the script, batch by batch."""

    def __init__(self, share: Callable[[], Share | None], say_other: Callable[[str, str], str]) -> None:
        self._share, self._say_other = share, say_other
        self._counted_in: Share | None = None
        self._counts = Counter[tuple[CodeType, int]]()

    def note(self, name: str) -> None:
        """Count a draw; print a remark where its line is in a loop over the samples and draws as often."""
        share, frame = self._share(), scripts_frame(sys._getframe(1))
        if share is None or frame is None:
            return
        if share is not self._counted_in:
            self._counted_in = share
            self._counts.clear()
        self._counts[at := (frame.f_code, frame.f_lasti)] += 1
        if self._counts[at] == share.mine and is_over_samples(frame, share.mine):
            why = "it draws one by one for this rank's samples; draw for all at once, as in rand(len(x)) or model(x)"
            self._say_other(name, why)
