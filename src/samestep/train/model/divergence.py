"""Replicas that should be equal are compared every so many steps; one that is not is named, with its tensor.

Covered: any change of a single bit in a parameter, or in a buffer of an exact replica, by memory that fails or by
code that only one rank runs.
Not covered: optimizer state, until it shows in a parameter.
"""

import os
from collections import Counter
from collections.abc import Sequence

from samestep.errors import RanksDiffer, UsageError
from samestep.text import name_ranks
from samestep.train.group.group import Group, Member
from samestep.train.model.replicas import Replicas, first_unlike, sums_of
from samestep.train.step import Pass, Share, Spine
from samestep.train.subscriber import Subscriber

_EARLY = {1, 2, 5, 10, 20, 50, 100}


class Divergence(Member, Subscriber):
    """Compares the replicas every $SAMESTEP_CHECK_EVERY training steps (200; 0 is never), and after the first few.

    A script that keeps them apart by mistake does so from its first step, and may end before the 200th.
    """

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._compared_at = 0
        if group.world.size > 1:
            group.the(Spine).subscribe(self)

    def step_begins(self, share: Share) -> None:
        """Collective. An error where parameters differ."""
        if share.of.training and (every := check_every()):
            step = share.step
            if not step % every or (step in _EARLY and step < every):
                self._compare(step)

    def pass_ends(self, ended: Pass) -> None:
        """Collective. The last steps of a pass are compared too."""
        step = self.group.the(Spine).steps
        if ended.training and check_every() and step != self._compared_at:
            self._compare(step)

    def _compare(self, step: int) -> None:
        """Compare the replicas that are alive on every rank."""
        since, self._compared_at = self._compared_at, step
        compared = self.group.the(Replicas).compared(
            "samestep's comparison of replicas", lambda replica: sums_of(replica.equal_tensors().values())
        )
        for replica, ranks in compared:
            if len(set(ranks)) > 1:
                found = first_unlike(replica.equal_tensors(), ranks)
                name, column = found or ("a parameter added later", ranks)
                raise RanksDiffer(_difference(name, column, f"between steps {since} and {step}"))


def check_every() -> int:
    """The value of $SAMESTEP_CHECK_EVERY."""
    asked = os.environ.get("SAMESTEP_CHECK_EVERY", "200")
    if not asked.isdigit():
        raise UsageError(f"SAMESTEP_CHECK_EVERY is {asked!r}, which is not a number of steps; use 0 or more")
    return int(asked)


def _difference(name: str, column: Sequence[str | None], when: str) -> str:
    said = f"replicas came apart {when}: {name}"
    ranks = {
        value: name_ranks([rank for rank, other in enumerate(column) if other == value]) for value in column
    }
    commonest, votes = Counter(column).most_common(1)[0]
    if votes * 2 <= len(column):
        return f"{said} differs between {' and '.join(ranks.values())}; resume from the last checkpoint"
    odd = [rank for rank, value in enumerate(column) if value != commonest]
    return (
        f"{said} of {name_ranks(odd)} is not what {ranks[commonest]} have; memory of that process, or code that "
        "only it runs, changed it: resume from the last checkpoint"
    )
