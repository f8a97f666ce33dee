"""Finds hangs: which ranks wait for which, from the number of waits that each rank has begun; no torch.

A rank leaves its wait number 7 only when every other rank has reached its own wait number 7. So the other ranks wait
for the ranks with the lowest count, whatever those do. No clocks are compared.
"""

from collections.abc import Sequence
from typing import NamedTuple

from samestep.rundir import WAITS, PulseReading
from samestep.text import duration, name_ranks

ABSENT = "has not come to samestep.init"  # what a rank does that has written no pulse
LEAST_S = 5.0  # the shortest wait that is reported as a hang
GONE_S = 8.0  # how long ranks may wait for a rank that has ended
NEW_ORDER = ", for the first time after "  # in the name of a model whose gradients are exchanged out of turn
EXCHANGE = "the gradient exchange"
STUCK_S = 25.0  # a hung run must end within this time after a request; Slurm kills it after 30 s
_RECEIVES = ("recv ", "recv_object_list ")  # calls of torch.distributed that wait for a single rank
_DOES = {
    "start": "is starting",
    "data": "is reading data",
    "forward": "is in forward",
    "backward": "is in backward",
    "optimizer": "is in the optimizer's step",
    "evaluation": "is in evaluation",
    "end": "has come to the end of the script",
}


class RankState(NamedTuple):
    """What a rank does, since how many seconds, and how many waits it has begun."""

    rank: int
    step: int
    phase: str
    call: str
    waits: int
    seconds: float
    host: str = ""
    line: str = ""  # where in the script, as "train.py:28"
    does: str = ""  # what was observed from outside, as "is stopped (SIGSTOP)"
    is_gone: bool = False  # whether it has ended or failed, and so cannot reach another wait
    raised: str = ""  # the exception that the script handles meanwhile, as "ValueError: why (train.py:20)"

    @property
    def waits_now(self) -> bool:
        return self.phase in WAITS

    @property
    def wait(self) -> str:
        if self.phase == "call":
            return self.call
        at = f" ({self.line})" if self.line else ""
        model = f" of {self.call}" if self.call else ""
        return f"{EXCHANGE}{_of_step(self.step)}{at}{model}"

    @property
    def doing(self) -> str:
        return self._doing + (f" after {self.raised}" if self.raised and self.phase != "end" else "")

    @property
    def _doing(self) -> str:
        if self.waits_now:
            return f"is in {self.wait}"
        if self.phase == "end" and self.call:
            return self.call
        if self.does:
            return self.does
        if self.is_gone and self.phase != "end":
            return "ended in the middle of the script"
        if self.phase == "checkpoint":
            return f"is in {self.call}{_of_step(self.step, 'at')}"
        return _DOES.get(self.phase, "is in the script's own code") + _of_step(self.step, "at")


class Hang(NamedTuple):
    """Some ranks wait, and other ranks do not come."""

    waiting: tuple[RankState, ...]
    missing: tuple[RankState, ...]
    seconds: float

    @property
    def is_together(self) -> bool:
        """Whether all ranks are in the same wait, and it does not end."""
        return not self.missing

    @property
    def is_deadlock(self) -> bool:
        """Whether all ranks are in the wait of the same number, but in different calls."""
        waits = {(state.waits_now, state.waits) for state in (*self.waiting, *self.missing)}
        return bool(self.waiting and self.missing) and len(waits) == 1

    @property
    def cause(self) -> RankState:
        """The first rank that does not come."""
        return (self.missing or self.waiting)[0]

    @property
    def key(self) -> tuple[object, ...]:
        """Equal while it is the same hang."""
        return tuple((state.rank, state.waits) for state in self.missing or self.waiting)

    @property
    def end(self) -> str:
        if self.is_together:
            return "all ranks have gone on"
        ranks = [state.rank for state in self.missing]
        return f"{name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} gone on"

    def sentence(self, least_s: float = 0.0) -> str:
        """Which ranks wait where, for how long and for whom, and what the missing ranks do."""
        # Only ranks that have waited for about `least_s` are named: pulses differ in age, so times are not exact.
        if not self.waiting:
            return f"the run has waited {duration(self.seconds)} for the end of {self._for_whom()}"
        listed = [state for state in self.waiting if state.seconds >= 0.8 * least_s] or list(self.waiting)
        seconds = duration(min(state.seconds for state in listed))
        if self.is_together:
            why = (
                "each waits for what another one sends, and none sends; let one of every two ranks send first"
                if listed[0].wait.startswith(_RECEIVES)
                else "every rank has come, and it does not end; is a link between two nodes cut or very slow, is a "
                "device still at work, or did a rank leave out a call of torch.distributed before?"
            )
            return f"all ranks have been in {listed[0].wait} for {seconds}: {why}"
        where: dict[tuple[int, str], list[RankState]] = {}
        for state in listed:
            where.setdefault((state.waits, state.call), []).append(state)
        parts = []
        for group in where.values():
            wait = next((state.wait for state in group if state.line), group[0].wait)
            have = "has" if len(group) == 1 else "have"
            ranks = name_ranks(state.rank for state in group)
            parts.append(f"{ranks} {have} waited {seconds} in {wait}")
        conflict = "; these are different calls, so no rank can go on" if self.is_deadlock else ""
        in_exchange = any(state.phase == "exchange" for state in (*self.waiting, *self.missing))
        if conflict and in_exchange and not any(state.raised for state in self.missing):
            that = "make that call, and " if any(state.phase == "call" for state in self.missing) else ""
            conflict += f" (does each rank {that}call backward() as often?)"
        return f"{' and '.join(parts)} for {self._for_whom()}{conflict}"

    def _for_whom(self) -> str:
        host_of = {state.rank: state.host for state in (*self.waiting, *self.missing)}
        hosts = [host_of.get(rank, "") for rank in range(max(host_of) + 1)]
        does: dict[str, list[int]] = {}
        for state in self.missing:
            does.setdefault(state.doing, []).append(state.rank)
        parts = []
        for doing, ranks in does.items():
            who = name_ranks(ranks, hosts if len(set(host_of.values())) > 1 else ())
            parts.append(f"{who}, which {doing if len(ranks) == 1 else _plural(doing)}")
        return ", and ".join(parts)


def find_hang(states: Sequence[RankState], size: int, least_s: float) -> Hang | None:
    """The hang of these ranks, if it has lasted this long; None if none is certain."""
    states = named_models(sorted(states))  # all launchers must come to the same answer
    lowest = min((state.waits for state in states), default=0)
    last = [state for state in states if state.waits == lowest]
    inside = [state for state in states if state.waits_now]
    ahead = [state for state in inside if state.waits > lowest]
    late = [state for state in last if not state.waits_now]
    if late or (ahead and len(last) < len(states) == size):
        waiting, missing = ahead, late or last
    elif len(inside) == len(states) == size > 1:
        missing = _at_another_call(inside)
        waiting = [state for state in inside if state not in missing]
    else:
        return None
    # if all have come, the wait began when the last of them came
    times = [state.seconds for state in waiting]
    seconds = max(times, default=0.0) if late or ahead else min(times)
    return Hang(tuple(waiting), tuple(missing), seconds) if seconds >= least_s else None


def find_unlike_exchanges(states: Sequence[RankState], size: int) -> Hang | None:
    """The ranks that exchange gradients of another model than the others, also where the exchange has failed by now."""
    models = []
    for state in states:
        model = state.call if state.phase == "exchange" else state.call.partition(f" in {EXCHANGE} of ")[2]
        models.append(state._replace(phase="exchange", call=model, waits=0))
    if len({state.call for state in models}) == 1 or not all(state.call for state in models):
        return None
    return find_hang(models, size, 0.0)


def named_models(states: Sequence[RankState]) -> Sequence[RankState]:
    """The states, without the model whose gradients are exchanged if that is the same in all."""
    if len({state.call for state in states if state.phase == "exchange"}) > 1:
        return states
    return [state._replace(call="") if state.phase == "exchange" else state for state in states]


def _at_another_call(states: Sequence[RankState]) -> list[RankState]:
    """The smallest group of ranks in the same call; of equal groups, the one that is more likely wrong."""
    where: dict[str, list[RankState]] = {}
    for state in states:
        where.setdefault(state.call, []).append(state)

    def likeliest(group: Sequence[RankState]) -> tuple[bool, int, bool, bool]:
        is_usual, is_raised = NEW_ORDER not in group[0].call, any(state.raised for state in group)
        return is_usual, len(group), not is_raised, group[0].phase != "call"

    fewest, *others = sorted(where.values(), key=likeliest)
    return fewest if others else []


def state_of(rank: int, pulse: PulseReading, seconds: float, host: str = "") -> RankState:
    """The state that a rank's pulse describes; its phase began this many seconds ago."""
    phase = pulse.phase, pulse.call, pulse.waits
    return RankState(rank, pulse.step, *phase, seconds, host, raised=pulse.raised)


def _of_step(step: int, word: str = "of") -> str:
    return f" {word} step {step}" if step >= 0 else ""


def _plural(doing: str) -> str:
    verbs = {"is": "are", "has": "have", "waits": "wait"}
    parts = [part.partition(" ") for part in doing.split(", and ")]
    return ", and ".join(f"{verbs.get(verb, verb)}{space}{rest}" for verb, space, rest in parts)
