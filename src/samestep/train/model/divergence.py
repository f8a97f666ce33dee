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
from samestep.train.digest import bit_sums
from samestep.train.group.control import meet, ranks_in_words
from samestep.train.group.world import init
from samestep.train.model.replica import Replica, replicas

_CALL = "samestep's comparison of replicas"
_WORD = 8


def compare_replicas(step: int) -> None:
    """Collective. Every $SAMESTEP_CHECK_EVERY steps (200; 0 is never) an error where parameters differ."""
    every = _every()
    if not every or step % every:
        return
    if init().size > 1:
        _compare(step, every)


def _every() -> int:
    asked = os.environ.get("SAMESTEP_CHECK_EVERY", "200")
    if not asked.isdigit():
        raise UsageError(f"SAMESTEP_CHECK_EVERY is {asked!r}, no number of steps; use 0 or more")
    return int(asked)


def _compare(step: int, every: int) -> None:
    """One that is gone on some ranks, and awaits its collection on others, is no one's business."""
    mine = {one.number: one for one in replicas()}
    sums = {number: bit_sums(one.equal_tensors().values()) for number, one in mine.items()}
    said = json.dumps([(number, hashlib.sha256(one).hexdigest()) for number, one in sums.items()])
    told = [dict(json.loads(one)) for one in meet(_CALL, said.encode())]
    for number in sorted(set.intersection(*map(set, told))):
        if len({one[number] for one in told}) > 1:
            _name_the_difference(mine[number], meet(_CALL, sums[number]), step, every)


def _name_the_difference(replica: Replica, ranks: Sequence[bytes], step: int, every: int) -> None:
    for at, name in enumerate(replica.equal_tensors()):
        column = [one[at * _WORD : (at + 1) * _WORD] for one in ranks]
        if len(set(column)) > 1:
            raise RanksDiffer(_difference(name, column, max(1, step - every), step))
    raise RanksDiffer(f"replicas differ between steps {step - every} and {step}")


def _difference(name: str, column: Sequence[bytes], since: int, step: int) -> str:
    commonest, votes = Counter(column).most_common(1)[0]
    when = f"between steps {since} and {step}"
    if votes * 2 <= len(column):
        groups = [[rank for rank, one in enumerate(column) if one == kind] for kind in dict.fromkeys(column)]
        sides = " and ".join(ranks_in_words(group) for group in groups)
        return f"replicas came apart {when}: {name} differs between {sides}; resume from the last checkpoint"
    odd = [rank for rank, one in enumerate(column) if one != commonest]
    most = [rank for rank, one in enumerate(column) if one == commonest]
    return (
        f"replicas came apart {when}: {name} of {ranks_in_words(odd)} is not what {ranks_in_words(most)} "
        "have; memory of that process, or code that only it runs, changed it: resume from the last checkpoint"
    )
