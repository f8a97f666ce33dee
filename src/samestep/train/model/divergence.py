"""Replicas that should be equal are compared every so many steps; one that is not is named, with its tensor.

Covered: any change of a single bit in a parameter, or in a buffer of an exact replica, by memory that fails or by
code that only one rank runs.
Not covered: optimizer state, until it shows in a parameter.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence

from samestep.errors import RanksDiffer, UsageError
from samestep.text import name_ranks
from samestep.train.digest import bit_sums
from samestep.train.group.group import Group, Member
from samestep.train.model.replica import Replica
from samestep.train.model.replicas import Replicas
from samestep.train.step import Pass, Share, Spine, Subscriber

_CALL = "samestep's comparison of replicas"
_WORD = 8
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
        replicas = self.group.the(Replicas)
        sums = {replica.number: bit_sums(replica.equal_tensors().values()) for replica in replicas}
        mine = json.dumps([(number, hashlib.sha256(sum).hexdigest()) for number, sum in sums.items()])
        ranks = [dict(json.loads(rank)) for rank in self.group.all_gather(_CALL, mine.encode())]
        for replica, digests in replicas.alive_everywhere(ranks):
            if len(set(digests)) > 1:
                _name_the_difference(replica, self.group.all_gather(_CALL, sums[replica.number]), since, step)


def check_every() -> int:
    """The value of $SAMESTEP_CHECK_EVERY."""
    asked = os.environ.get("SAMESTEP_CHECK_EVERY", "200")
    if not asked.isdigit():
        raise UsageError(f"SAMESTEP_CHECK_EVERY is {asked!r}, which is not a number of steps; use 0 or more")
    return int(asked)


def _name_the_difference(replica: Replica, ranks: Sequence[bytes], since: int, step: int) -> None:
    for at, name in enumerate(replica.equal_tensors()):
        column = [one[at * _WORD : (at + 1) * _WORD] for one in ranks]
        if len(set(column)) > 1:
            raise RanksDiffer(_difference(name, column, since, step))
    raise RanksDiffer(f"replicas came apart between steps {since} and {step}")


def _difference(name: str, column: Sequence[bytes], since: int, step: int) -> str:
    commonest, votes = Counter(column).most_common(1)[0]
    when = f"between steps {since} and {step}"
    if votes * 2 <= len(column):
        groups = [[rank for rank, one in enumerate(column) if one == kind] for kind in dict.fromkeys(column)]
        sides = " and ".join(name_ranks(group) for group in groups)
        return f"replicas came apart {when}: {name} differs between {sides}; resume from the last checkpoint"
    odd = [rank for rank, one in enumerate(column) if one != commonest]
    most = [rank for rank, one in enumerate(column) if one == commonest]
    return (
        f"replicas came apart {when}: {name} of {name_ranks(odd)} is not what {name_ranks(most)} "
        "have; memory of that process, or code that only it runs, changed it: resume from the last checkpoint"
    )
