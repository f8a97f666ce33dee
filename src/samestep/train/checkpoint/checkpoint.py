"""`samestep.Checkpoint`: commits the whole state of a run, so that it can be stopped, killed and resumed elsewhere.

Covered: parts with a `state_dict`, the random streams of every rank, which samples were consumed (a hash chain), and
the versions of script and libraries. Not covered: variables of the script that belong to no part.
"""

import hashlib
import math
import os
import sys
import time
from collections.abc import Collection, Mapping
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from samestep.errors import CheckpointError, RanksDiffer, SamestepError, UsageError
from samestep.rendezvous.member import say
from samestep.rundir import CHECKPOINTED
from samestep.state.directory import CheckpointDirectory
from samestep.state.slots import slots_of
from samestep.text import name_ranks
from samestep.train import streams
from samestep.train.checkpoint import capture
from samestep.train.checkpoint.parts import (
    ACCEPTED_AS,
    OWN,
    Part,
    Values,
    accumulate_again,
    accumulated,
    checked_every,
    checked_parts,
    load_part,
    place_of,
)
from samestep.train.checkpoint.stopping import CommonStep, StopRequests
from samestep.train.checkpoint.writer import Writer, holder, of_element, origin
from samestep.train.data.loader import Loader
from samestep.train.draws.draws import Draws
from samestep.train.group.control import users_line
from samestep.train.group.group import Group, Member
from samestep.train.group.world import joined
from samestep.train.meter import Meter
from samestep.train.model.arithmetic import arithmetic
from samestep.train.model.replicas import Replicas

_RETRY_SECONDS = 30.0
_LEAVE_SECONDS = 10.0


class Checkpoint:
    """Commits the whole state of a run, resumes it from the newest commit, and stops it after one when asked to.

    Call `resume()` before the loop and `step()` after each `optimizer.step()`.

    directory: where the commits are kept; each run needs its own.
    every: a commit every so many steps (an int) or so often (a timedelta). Default timedelta(minutes=10).
    keep: how many good commits stay, at least 2. Older ones are removed. Default 2.
    accept: what may differ from the run that committed: "dataset", "batch_size", "seed", "order" (shuffle and
        drop_last), or several of them. Default (): `resume` refuses each such change.
    **parts: what is committed, by name: anything with state_dict and load_state_dict, loaders too, and dicts of
        numbers, text, tensors, lists and dicts, which `resume` updates in place.

    Raises UsageError if an argument cannot be used. `resume` raises CheckpointError if what was committed is of another
    run, or if there are commits and none is good.

        run = samestep.Checkpoint("runs/commits", model=model, optimizer=optimizer, train=train)
        run.resume()
        for epoch in train.epochs(10): ...  # and run.step() after each optimizer.step()
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *unnamed: Any,
        every: int | timedelta = timedelta(minutes=10),
        keep: int = 2,
        accept: str | Collection[str] = (),
        **parts: Part | dict[str, Any],
    ) -> None:
        """Collective. Make it on every rank, with the same parts."""
        self.steps = self._asked_at = self._remember_at = 0
        self._group = joined()
        self._meter = self._group.the(Meter)
        self._world = self._group.world
        self._every = checked_every(every)
        self._accept = {accept} if isinstance(accept, str) else set(accept)
        if unknown := self._accept - set(ACCEPTED_AS.values()):
            raise UsageError(
                f"accept got {', '.join(sorted(unknown))}; use {', '.join(dict.fromkeys(ACCEPTED_AS.values()))}"
            )
        self._parts = checked_parts(directory, unnamed, parts, self._group)
        self._loaders = {name: part for name, part in parts.items() if isinstance(part, Loader)}
        for loader in self._loaders.values():
            loader.keep_ledger(self._epoch_ends)
        # a run that is measured or verified must not change the script's commits
        elsewhere = os.environ.get("SAMESTEP_CHECKPOINTS")
        directory = Path(elsewhere, os.path.abspath(directory).lstrip("/")) if elsewhere else directory
        self._directory = CheckpointDirectory(directory, keep)
        self._requests = StopRequests()
        others = self._group.the(_Checkpoints).living
        slots = None if others else slots_of(os.environ)  # they have room for one checkpoint's state
        self._writer = Writer(self._directory, self._world.device, self._note_commit, slots)
        self._told_of_limit = self._is_held = self._is_held_back = False
        self._commit_seconds = 1.0
        # random streams at the last commit: the digest of this rank's, and the states of every rank's
        self._drawn, self._streams = b"", [b""] * self._world.size
        self._common = CommonStep(self._group, len(others), lambda pace: any(self._reasons(pace)))
        others.append(self)

    def resume(self) -> int:
        """Collective. Go on from the newest good commit; returns the steps it had taken, 0 if there is none."""
        capture.bulk({name: part.state_dict() for name, part in self._parts.items()})
        for checkpoint in self._group.the(_Checkpoints).living:
            checkpoint._writer.wait()  # it may be writing to this directory
        self._hold()
        found, failure, begun = None, "", time.monotonic()
        if self._world.rank == 0:
            try:
                found = self._directory.newest(capture.read, self._writer.slots)
                if found is not None:
                    self._check_facts(found.value[0][OWN], found.value[1])
            except SamestepError as error:
                failure = str(error)
        read_seconds = time.monotonic() - begun
        place = (str(found.path), found.path.stat().st_size, found.root.hex()) if found else ("", 0, "")
        mine = [failure, *place]
        failure, path, size, root = self._group.broadcast("samestep.Checkpoint.resume", mine)
        if failure:
            raise CheckpointError(failure)
        if not path:
            return 0
        if found is not None:
            for reason in found.refused:
                say(f"{reason}; an older checkpoint is used")
            state, meta = found.value
            # the state holds the time of the commit before it; reading takes about as long as writing
            self._note_commit(max(meta["commit_seconds"], read_seconds, self._commit_seconds))
            with self._directory.opened(found) as file:
                self._group.hand_out(file)
        else:
            state = capture.received(size * self._world.local_size, root, self._group)
        self._go_on_from(state)
        if found is not None:
            where = "memory" if found.is_memory else path
            self._writer.committed = [0] if found.is_memory else self._place()
            keeps = any(isinstance(part, Values) for part in self._parts.values())
            places = "".join(place_of(*named, keeps_values=keeps) for named in self._loaders.items())
            say(f"going on after step {self.steps} from {where}{of_element(meta)}{places}")
        return self.steps

    def step(self) -> None:
        """Collective. Count a step: commit if it is time; if a stop was asked for, commit and exit with 75."""
        self.steps += 1
        self._meter.counted = self.steps
        is_common = self._common.reached(self.steps, now=self._requests.heard is not None)
        due = isinstance(self._every, int) and self.steps % self._every == 0
        remembers = self.steps == self._remember_at
        if not (is_common or due or remembers):
            return
        with self._group.within("checkpoint", f"samestep.Checkpoint.step ({users_line()})"):
            began = time.monotonic()
            stop, timed = self._agree() if is_common else ("", False)
            if stop:
                self._stop(stop)
            elif due or timed:
                self._remember_at += remembers
                self._commit(is_patient=False)
            elif remembers:
                self._remember(began)

    def commit(self, *, wait: bool = False) -> str:
        """Collective. Commit now, in the background; with `wait` return why that failed, or "" if it did not.

        Without `wait`, a commit after the last step of an epoch is made when `epochs` begins the next epoch.
        """
        self._commit(
            is_patient=True, is_held=not wait and any(part.is_between for part in self._loaders.values())
        )
        return self._outcome() if wait else ""

    def _epoch_ends(self, is_last: bool) -> None:
        """Collective. Make the commit that was held: a resume of it does not run the code before it again."""
        if is_last:
            self.finish()
        elif self._is_held_back:
            self._commit(is_patient=True)

    def _commit(self, is_patient: bool, *, is_held: bool = False) -> None:
        """Collective. Commit now; during another commit a patient call waits for it, another call is left out."""
        self._hold()
        self._asked_at, self._is_held_back = self.steps, is_held
        self._group.the(Replicas).settle()
        self._gather()
        if self._world.rank == 0 and self._writer.is_free(is_patient):
            self._writer.start(*self._state(), self._place(), is_held)

    def _remember(self, began: float) -> None:
        """Collective. Keep the state in the launcher's memory for a restart."""
        self._group.the(Replicas).settle()
        self._remember_at = self._gather(self._writer.remembers_next(self.steps))
        if self._world.rank == 0 and not self._writer.is_writing:
            self._writer.remember(*self._state(), self.steps, began)

    def _hold(self) -> None:
        """Collective the first time. Take the directory for this run alone, or raise on every rank."""
        if self._is_held:
            return
        failure = ""
        if self._world.rank == 0:
            try:
                self._directory.hold(*holder(os.environ, self._directory.directory))
            except CheckpointError as error:
                failure = str(error)
        if failure := self._group.broadcast("samestep.Checkpoint", failure):
            raise CheckpointError(failure, path=self._directory.directory)
        self._is_held = True

    def _gather(self, number: int = 0) -> int:
        """Collective. Gather every rank's values and random streams; raise if ranks consumed different samples."""
        # Returns rank 0's number.
        for part in self._parts.values():
            if isinstance(part, Values):
                part.gather()
        self._gradients = accumulated(self._parts, self._group)
        ledgers = hashlib.sha256(b"".join(loader.ledger for loader in self._loaders.values())).digest()
        # many scripts draw nothing between two commits
        drawn, self._drawn = self._drawn, streams.digest()
        news = b"" if self._drawn == drawn else streams.capture()
        ranks = self._group.all_gather("samestep.Checkpoint.commit", ledgers + number.to_bytes(8) + news)
        others = [rank for rank, sent in enumerate(ranks) if sent[:32] != ledgers]
        if others:
            raise RanksDiffer(
                f"rank {self._world.rank} consumed other samples than {name_ranks(others)}, so this state is not "
                "committed; give every rank the same data set, order and loop",
                ranks=others,
            )
        self._streams = [sent[40:] or before for sent, before in zip(ranks, self._streams, strict=True)]
        return int.from_bytes(ranks[0][32:40])

    def finish(self) -> None:
        """Collective. Commit what was done since the last commit; `epochs(n)` calls it after the last epoch."""
        self._outcome()
        is_newest = self._writer.committed == self._place()
        if not self._group.broadcast("samestep.Checkpoint.finish", is_newest):
            self.commit(wait=True)

    def unsaved(self) -> str:
        """Local. A sentence on the steps that could not be committed and will be lost, or ""."""
        self._writer.wait(is_end=True)
        if not self._writer.failure:
            return ""
        return f"{self._writer.failure}; the steps since {self._writer.committed[0]} are in no checkpoint"

    def _reasons(self, pace: float) -> tuple[str, bool]:
        """Why this rank should stop now, or "", and on rank 0 whether it is time to commit."""
        since = time.monotonic() - self._writer.begun_at
        every = self._every.total_seconds() if isinstance(self._every, timedelta) else math.inf
        is_late = self._writer.left_out or (bool(self._writer.failure) and since >= _RETRY_SECONDS)
        stop = self._requests.asked(2 * (self._commit_seconds + pace) + _LEAVE_SECONDS)
        is_time = (since >= every or is_late) and not self._writer.is_writing
        return stop, is_time and self._world.rank == 0

    def _agree(self) -> tuple[str, bool]:
        """Collective. What all ranks do next: stop, and why, or commit, or nothing."""
        remembers = self._is_held and self._writer.slots is not None
        mine = [*self._reasons(self._common.pace), remembers]
        answers = self._group.all_gather("samestep.Checkpoint.step", mine)
        self._common.decided()
        if answers[0][2] and not self._remember_at:
            self._remember_at = self.steps + 1
        return next((stop for stop, *_ in answers if stop), ""), answers[0][1]

    def _stop(self, why: str) -> None:
        # only the newest checkpoint handles signals, so it commits the others too
        here = self._directory.directory
        others = [
            checkpoint
            for checkpoint in self._group.the(_Checkpoints).living
            if checkpoint.steps != checkpoint._asked_at and checkpoint._directory.directory != here
        ]
        for checkpoint in (*others, self):
            if failure := checkpoint.commit(wait=True):
                raise CheckpointError(failure)
        self._requests.fulfilled()
        if self._world.rank == 0:
            say(
                f"stopped by {why} after step {self.steps}, which is committed in {here}; run it again to go on"
            )
        sys.exit(CHECKPOINTED)  # not SystemExit: what samestep puts in place of sys.exit notes the code

    def _state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        exact = self._group.the(Replicas).exact
        own = {
            "step": self.steps,
            # ranks of an exact run have equal streams; the commit does not depend on their number
            "streams": self._streams[:1] if exact else self._streams,
            "facts": self._facts,
            "arithmetic": arithmetic() if exact else None,
            "gradients": self._gradients,
            "kernels": None if exact else self._group.the(Replicas).kernels,
        }
        state = {name: part.state_dict() for name, part in self._parts.items()} | {OWN: own}
        meta = {
            **origin(),
            "step": self.steps,
            "time": time.time(),
            "size": self._world.size,
            "commit_seconds": self._commit_seconds,
        }
        return state, meta

    def _note_commit(self, seconds: float) -> None:
        """Note how long a commit takes: a job needs that time before its time limit."""
        self._commit_seconds = seconds
        if self._requests.job_seconds < 2 * seconds + _LEAVE_SECONDS and not self._told_of_limit:
            self._told_of_limit = True
            limit = f"a commit takes {seconds:.1f} s and this job's time limit is {self._requests.job_seconds:.0f} s"
            say(f"{limit}, so almost nothing is trained between two stops; ask for more --time")

    def _outcome(self) -> str:
        self._writer.wait()
        return str(self._group.broadcast("samestep.Checkpoint.commit", self._writer.failure))

    def _go_on_from(self, state: Mapping[str, Any]) -> None:
        own = state[OWN]
        if missing := self._parts.keys() ^ state.keys() - {OWN}:
            raise CheckpointError(
                f"the checkpoint and this run differ in {', '.join(sorted(missing))}; give Checkpoint the same parts"
            )
        for name, part in self._parts.items():
            load_part(name, part, self._adjusted(name, state[name]))
        accumulate_again(self._parts, own.get("gradients", {}), self._group)
        self.steps = self._asked_at = int(own["step"])
        self._meter.counted = self.steps
        self._common.decided(is_first=True)
        replicas = self._group.the(Replicas)
        # ranks with equal streams all continue rank 0's
        alike = replicas.exact or self._group.the(Draws).active
        kept, rank = own["streams"], 0 if alike else self._world.rank
        if rank < len(kept):
            streams.restore(kept[rank])
        else:
            streams.draw_as("rank", rank, streams.seed_of(kept[0].hex()))
        are_apart = alike or rank >= len(kept) or "torch" in streams.different(kept[rank], kept[0])
        replicas.go_on(is_apart=are_apart, kernels=own.get("kernels"))

    def _adjusted(self, name: str, state: Any) -> Any:
        """A loader's state with this run's facts, which `accept` allows; with another order the epoch starts again."""
        if name not in self._loaders:
            return state
        now = self._loaders[name].facts()
        of_order = now.keys() - {"batch_size", "microbatch", "drop_last"}
        position = 0 if any(state[fact] != now[fact] for fact in of_order) else state["position"]
        return {**state, **now, "position": position}

    def _place(self) -> list[Any]:
        return [self.steps, *(loader.state_dict() for loader in self._loaders.values())]

    @cached_property
    def _facts(self) -> dict[str, Any]:
        return {
            name: {**loader.facts(), "fingerprint": loader.fingerprint()}
            for name, loader in self._loaders.items()
        }

    def _check_facts(self, own: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        for name, then in own["facts"].items():
            for fact, now in self._facts.get(name, {}).items():
                if then.get(fact) != now and ACCEPTED_AS[fact] not in self._accept:
                    what = "another dataset" if fact == "fingerprint" else f"{fact} {then.get(fact)}"
                    here = "this run's" if fact == "fingerprint" else f"{now}"
                    raise UsageError(
                        f"the checkpoint's {name} had {what}, not {here}; use the same, or "
                        f"Checkpoint(accept={ACCEPTED_AS[fact]!r}) where the change is meant"
                    )
        now, is_exact = arithmetic(), self._group.the(Replicas).exact
        before = (own["arithmetic"] or now) if is_exact else {"torch": meta.get("torch")}
        for fact, then in before.items():
            if then != now.get(fact):
                say(f"{fact} was {then} and is {now.get(fact)}; bits may differ from here on")


class _Checkpoints(Member):
    """All checkpoints of a group: a stop commits each of them, and `close` waits for their commits."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.living: list[Checkpoint] = []

    def close(self) -> None:
        for checkpoint in self.living:
            checkpoint._common.close()
        failures = [failure for checkpoint in self.living if (failure := checkpoint.unsaved())]
        for checkpoint in self.living:
            checkpoint._directory.release()
        if failures:
            raise CheckpointError("; ".join(failures))
