"""Compares replicas every so many steps, and raises an error that names the tensor and the ranks that differ.

Covered: any change of a single bit in a parameter, or in a buffer of an exact replica, by failing memory or by code
that only one rank runs. Not covered: optimizer state, until it changes a parameter.
"""

import os
import time
from collections import Counter
from collections.abc import Sequence

import torch

from samestep.errors import RanksDiffer, UsageError
from samestep.text import name_ranks
from samestep.train.group.device import on_host
from samestep.train.group.group import Group, Member
from samestep.train.model.replicas import Replicas, first_unlike, sums_of
from samestep.train.passes import Pass, Share
from samestep.train.step import Spine
from samestep.train.subscriber import Subscriber

_EARLY = {1, 2, 5, 10, 20, 50, 100}
_DECIDED = (20, 100)  # after these steps the interval is chosen so that comparisons cost _COST of the time
_OFTEN = (10, 20, 50, 100)
_SELDOM = 200
_COST = 0.01
# measured: a comparison slows the two steps after it, and with them costs this many times its own shortest time
_AND_AFTER = 4


class Divergence(Member, Subscriber):
    """Compares the replicas every $SAMESTEP_CHECK_EVERY training steps (0: never), and after the first few."""

    # Without that variable it compares every 10 to 200 steps, so that this costs 1 % of the time. The early comparisons
    # find scripts whose replicas differ from the first step on and that end before step 200.

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._compared_at, self._every = 0, _SELDOM
        self._took_s, self._since = float("inf"), time.monotonic()
        if group.world.size > 1:
            group.the(Spine).subscribe(self)

    def step_begins(self, share: Share) -> None:
        """Collective. An error where parameters differ."""
        asked, step = check_every(), share.step
        every = self._every if asked is None else asked
        if share.of.training and every and (not step % every or (step in _EARLY and step < every)):
            self._compare(step)

    def pass_ends(self, ended: Pass) -> None:
        """Collective. The last steps of a pass are compared too."""
        step = self.group.the(Spine).steps
        if ended.training and check_every() != 0 and step != self._compared_at:
            self._compare(step)

    def _compare(self, step: int) -> None:
        """Compare the replicas that are alive on every rank."""
        since, self._compared_at = self._compared_at, step
        when = f"between steps {since} and {step}" if since < step else f"before step {step + 1}"
        began = time.monotonic()
        step_s = (began - self._since) / max(1, step - since)
        compared = self.group.the(Replicas).compared(
            "samestep's comparison of replicas", lambda replica: sums_of(replica.equal_tensors().values())
        )
        for replica, ranks in compared:
            if len(set(ranks)) > 1:
                differing = first_unlike(replica.equal_tensors(), ranks)
                name, column = differing or ("a parameter added later", ranks)
                raise _difference(name, column, when)
            self._say_if_nan(replica.model, when)
        self._since = time.monotonic()
        self._took_s = min(self._took_s, self._since - began)
        if step in _DECIDED:
            steps = _AND_AFTER * self._took_s / step_s
            self._every = pace(max(self.group.all_gather("samestep's comparison of replicas", steps)))

    def _say_if_nan(self, model: torch.nn.Module, when: str) -> None:
        """Print that the model's weights are nan, on all ranks: the average of gradients carries it to all of them."""
        trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        for name, total in zip(
            trained, on_host(weight.detach().sum() for weight in trained.values()), strict=True
        ):
            if total.isnan():
                self.group.say(
                    f"{name} of {type(model).__name__} became nan {when}, as it does where a loss or one rank's "
                    "gradient of a finite loss is nan, such as that of sqrt at 0; "
                    "torch.autograd.set_detect_anomaly(True) names the operation",
                    what="lost",
                )


def pace(steps: float) -> int:
    """The number of steps between comparisons that cost _COST of the time, if a comparison takes `steps` steps."""
    return next((every for every in _OFTEN if steps / every <= _COST), _SELDOM)


def check_every() -> int | None:
    asked = os.environ.get("SAMESTEP_CHECK_EVERY")
    if asked is None:
        return None
    if not asked.isdigit():
        raise UsageError(f"SAMESTEP_CHECK_EVERY is {asked!r}, which is not a number of steps; use 0 or more")
    return int(asked)


def _difference(name: str, column: Sequence[str | None], when: str) -> RanksDiffer:
    said = f"replicas came apart {when}: {name}"
    ranks = {
        value: name_ranks([rank for rank, other in enumerate(column) if other == value]) for value in column
    }
    commonest, votes = Counter(column).most_common(1)[0]
    if votes * 2 <= len(column):
        return RanksDiffer(
            f"{said} differs between {' and '.join(ranks.values())}; let every rank load, change and step weights "
            "alike, and take samestep.mean(...) of what forward or the script computes of a share and puts into a "
            "weight or .grad; then start again, or from an older checkpoint"
        )
    odd = [rank for rank, value in enumerate(column) if value != commonest]
    return RanksDiffer(
        f"{said} of {name_ranks(odd)} is not what {ranks[commonest]} have; code that only it runs, a number of its own "
        "share, as a learning rate by its loss, or its memory changed it: start again, or from an older checkpoint",
        ranks=odd,
    )
