"""A run that can be stopped, killed and moved: its whole state is committed, and it goes on from there.

Covered: what has a `state_dict`, the random streams of every rank, which samples were consumed (a hash chain),
and what produced it all. Not covered: what the script keeps in variables of its own.
"""

import hashlib
import json
import math
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

import samestep
from samestep.errors import CheckpointError, SamestepError, UsageError
from samestep.state.directory import Vault
from samestep.train import streams
from samestep.train.checkpoint import capture as carry
from samestep.train.checkpoint.stopping import Wishes
from samestep.train.data.loader import Loader
from samestep.train.data.share import seed_of
from samestep.train.group.control import hand_out, meet
from samestep.train.group.world import at_leaving, init
from samestep.train.meter import count_on_from
from samestep.train.model import replicate
from samestep.train.model.exact import arithmetic, in_exact_run

STOPPED = 75
_OWN = "samestep"
_TALK_SECONDS = 0.5
_RETRY_SECONDS = 30.0
_LEAVE_SECONDS = 10.0
_MEANT = {
    "length": "dataset",
    "fingerprint": "dataset",
    "batch_size": "batch_size",
    "microbatch": "batch_size",
    "seed": "seed",
    "shuffle": "order",
    "drop_last": "order",
}


class Part(Protocol):
    """Anything that can say where it is, and go on from there."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


class Checkpoint:
    """Call `resume()` before the loop and `step()` after each `optimizer.step()`."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int | timedelta = timedelta(minutes=10),
        keep: int = 2,
        accept: str | Collection[str] = (),
        **parts: Part,
    ) -> None:
        """Collective. A state is committed every so many steps or so much time; parts are what it consists of."""
        self.steps = self._asked_at = 0
        self._world = init()
        self._every = _checked_every(every)
        self._accept = {accept} if isinstance(accept, str) else set(accept)
        if unknown := self._accept - set(_MEANT.values()):
            raise UsageError(
                f"accept knows no {', '.join(sorted(unknown))}; use {', '.join(dict.fromkeys(_MEANT.values()))}"
            )
        self._parts = _checked_parts(parts)
        self._loaders = {name: part for name, part in parts.items() if isinstance(part, Loader)}
        for one in self._loaders.values():
            one.keep_ledger(self.finish)
        self._vault = Vault(directory, keep)
        self._wishes = Wishes()
        self._writer: threading.Thread | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._failure = ""
        self._committed: list[Any] = [0]
        self._commit_seconds = 1.0
        self._told_of_limit = False
        self._timed_at = self._talked_at = time.monotonic()
        self._talked_step = self._talk_step = 0
        self._quiet_until = 0.0
        _living.append(self)
        at_leaving(self)

    def resume(self) -> int:
        """Collective. Go on from the newest good commit; the steps it had done, 0 where there is none."""
        carry.bulk({name: part.state_dict() for name, part in self._parts.items()})
        found, failure, begun = None, "", time.monotonic()
        if self._world.rank == 0:
            try:
                found = self._vault.newest(_read_run)
                if found is not None:
                    self._check_facts(found.value[0][_OWN])
            except SamestepError as error:
                failure = str(error)
        read_seconds = time.monotonic() - begun
        path, size = (str(found.path), found.path.stat().st_size) if found else ("", 0)
        mine = json.dumps([failure, path, size]).encode()
        failure, path, size = json.loads(meet("samestep.Checkpoint.resume", mine)[0])
        if failure:
            raise CheckpointError(failure)
        if not path:
            return 0
        if found is not None:
            for reason in found.refused:
                print(f"samestep: {reason}; an older checkpoint is used", file=sys.stderr)
            state, meta = found.value
            kept = meta.get("commit_seconds")
            # the kept one is of the commit before; reading takes about as long as writing
            self._note_commit(
                max(kept if isinstance(kept, float) else 0.0, read_seconds, self._commit_seconds)
            )
            hand_out(found.path)
        else:
            state = _received(size * self._world.local_size)
        self._go_on_from(state)
        if self._world.rank == 0:
            print(f"samestep: going on after step {self.steps} from {path}", file=sys.stderr)
        return self.steps

    def step(self) -> None:
        """Collective. Say that a step was taken; commits when it is time, stops when that was asked for."""
        self.steps += 1
        if self.steps < self._quiet_until and self._wishes.heard is None:
            return
        due = isinstance(self._every, int) and self.steps % self._every == 0
        stop = ""
        if self.steps >= self._talk_step or (self._wishes.heard is not None and self._world.size == 1):
            stop, timed = self._talk()
            due = due or timed
        if stop:
            self._stop(stop)
        elif due:
            self.commit()
        next_due = (
            self.steps - self.steps % self._every + self._every if isinstance(self._every, int) else math.inf
        )
        self._quiet_until = min(self._talk_step, next_due)

    def commit(self, *, wait: bool = False) -> str:
        """Collective. Commit the state now, in the background unless it is waited for; why that failed, or nothing."""
        self._asked_at = self.steps
        replicate.settle_all()
        kept = meet("samestep.Checkpoint.commit", streams.capture())
        if self._world.rank == 0:
            if wait:
                self._await_writer()
            if self._writer is None or not self._writer.is_alive():
                self._start_writing(kept)
        return self._outcome() if wait else ""

    def finish(self) -> None:
        """Collective. Commit what was done since the last commit; `epochs(n)` calls it after the last epoch.

        What follows the last step, an epoch's own scheduler say, is part of it.
        """
        self._outcome()
        is_newest = self._committed == self._place()
        if not int(meet("samestep.Checkpoint.finish", b"%d" % is_newest)[0]):
            self.commit(wait=True)

    def leave(self) -> None:
        self._await_writer()
        if self._failure:
            raise CheckpointError(
                f"{self._failure}; the steps since {self._committed[0]} are in no checkpoint"
            )

    def _talk(self) -> tuple[str, bool]:
        """What all ranks do next: whether to stop, and whether it is time to commit; often enough, not more."""
        now = time.monotonic()
        pace = (now - self._talked_at) / max(1, self.steps - self._talked_step)
        self._talked_at, self._talked_step = now, self.steps
        every = self._every.total_seconds() if isinstance(self._every, timedelta) else math.inf
        timed = now - self._timed_at >= every
        quiet = min(_TALK_SECONDS, every if timed else every - (now - self._timed_at))
        retry = bool(self._failure) and now - self._timed_at >= _RETRY_SECONDS
        said = {
            "stop": self._wishes.asked(2 * (self._commit_seconds + pace) + _LEAVE_SECONDS),
            "commit": timed or retry,
            "quiet": max(1, min(1000, int(quiet / max(pace, 1e-9)))),
        }
        all_said = [json.loads(one) for one in meet("samestep.Checkpoint.step", json.dumps(said).encode())]
        self._talk_step = self.steps + all_said[0]["quiet"]
        return next((one["stop"] for one in all_said if one["stop"]), ""), all_said[0]["commit"]

    def _stop(self, why: str) -> None:
        # signals came to the newest alone
        here = self._vault.directory
        others = [one for one in _living if one.steps != one._asked_at and one._vault.directory != here]
        for one in (*others, self):
            if failure := one.commit(wait=True):
                raise CheckpointError(failure)
        self._wishes.fulfilled()
        if self._world.rank == 0:
            print(
                f"samestep: stopped by {why} after step {self.steps}, which is committed in "
                f"{self._vault.directory}; run it again to go on",
                file=sys.stderr,
            )
        raise SystemExit(STOPPED)

    def _start_writing(self, kept: list[bytes]) -> None:
        own = {
            "step": self.steps,
            # exact ranks draw alike, and what they commit does not tell how many they were
            "streams": kept[:1] if in_exact_run() else kept,
            "facts": self._facts,
            "arithmetic": arithmetic() if in_exact_run() else None,
        }
        state = {name: part.state_dict() for name, part in self._parts.items()} | {_OWN: own}
        meta = {
            **_origin(),
            "step": self.steps,
            "time": time.time(),
            "size": self._world.size,
            "commit_seconds": self._commit_seconds,
        }
        bulk = carry.bulk(state)
        if len(self._buffer) < bulk:
            pinned = self._world.device.type == "cuda"
            self._buffer = torch.empty(bulk, dtype=torch.uint8, pin_memory=pinned)
        packed = carry.pack(state, meta, into=self._buffer)
        if self._world.device.type == "cuda":
            torch.cuda.synchronize()
        self._timed_at = time.monotonic()
        self._writer = threading.Thread(
            target=self._write, args=(packed, self._place()), name="samestep-commit"
        )
        self._writer.start()

    def _write(self, packed: Any, place: list[Any]) -> None:
        begun = time.monotonic()
        try:
            self._vault.commit(packed, place[0])
        except Exception as error:
            # also what no one foresaw: a writer that dies must not pass for one that committed
            if not self._failure:
                print(f"samestep: {error}; training goes on and tries again", file=sys.stderr)
            self._failure = str(error) or type(error).__name__
        else:
            self._failure, self._committed = "", place
            self._note_commit(time.monotonic() - begun)

    def _note_commit(self, seconds: float) -> None:
        """How long a commit takes, which a job has to keep free before its time limit."""
        self._commit_seconds = seconds
        if self._wishes.job_seconds < 2 * seconds + _LEAVE_SECONDS and not self._told_of_limit:
            self._told_of_limit = True
            print(
                f"samestep: a commit takes {seconds:.1f} s and this job's time limit is "
                f"{self._wishes.job_seconds:.0f} s, so next to nothing is trained between two stops; "
                "ask for more --time",
                file=sys.stderr,
            )

    def _outcome(self) -> str:
        self._await_writer()
        return meet("samestep.Checkpoint.commit", self._failure.encode())[0].decode()

    def _await_writer(self) -> None:
        if self._writer is not None:
            self._writer.join()

    def _go_on_from(self, state: Mapping[str, Any]) -> None:
        own = state[_OWN]
        if missing := self._parts.keys() ^ state.keys() - {_OWN}:
            raise CheckpointError(
                f"the checkpoint and this run differ in {', '.join(sorted(missing))}; give Checkpoint the same parts"
            )
        for name, part in self._parts.items():
            part.load_state_dict(self._adjusted(name, state[name]))
        self.steps = self._asked_at = int(own["step"])
        self._committed = self._place()
        count_on_from(self.steps)
        self._talked_step = self._talk_step = self.steps
        self._quiet_until = 0.0
        kept, rank = own["streams"], self._world.rank
        if in_exact_run():
            streams.restore(kept[0])
        elif rank < len(kept):
            streams.restore(kept[rank])
        else:
            streams.draw_as("rank", rank, seed_of(kept[0].hex()))

    def _adjusted(self, name: str, state: Any) -> Any:
        """A loader's state, whose changed facts are meant; an epoch in another order is begun anew."""
        if name not in self._loaders:
            return state
        now = self._loaders[name].facts()
        moved = any(state[fact] != now[fact] for fact in ("length", "seed", "shuffle"))
        return {**state, **now, "position": 0 if moved else state["position"]}

    def _place(self) -> list[Any]:
        return [self.steps, *(one.state_dict() for one in self._loaders.values())]

    @cached_property
    def _facts(self) -> dict[str, Any]:
        return {
            name: {**one.facts(), "fingerprint": one.fingerprint()} for name, one in self._loaders.items()
        }

    def _check_facts(self, own: Mapping[str, Any]) -> None:
        for name, then in own["facts"].items():
            for fact, now in self._facts.get(name, {}).items():
                if then.get(fact) != now and _MEANT[fact] not in self._accept:
                    what = "another dataset" if fact == "fingerprint" else f"{fact} {then.get(fact)}"
                    here = "this run's" if fact == "fingerprint" else f"{now}"
                    raise UsageError(
                        f"the checkpoint's {name} had {what}, not {here}; use the same, or "
                        f"Checkpoint(accept={_MEANT[fact]!r}) where the change is meant"
                    )
        if own["arithmetic"] and in_exact_run():
            for fact, here in arithmetic().items():
                if (then := own["arithmetic"].get(fact)) != here:
                    print(
                        f"samestep: {fact} was {then} and is {here}; bits may differ from here on",
                        file=sys.stderr,
                    )


_living: list[Checkpoint] = []


def _read_run(name: str, dir_fd: int) -> tuple[dict[str, Any], dict[str, Any]]:
    state, meta = carry.read(name, dir_fd=dir_fd)
    own = state.get(_OWN) if isinstance(state, dict) else None
    if not isinstance(own, dict) or not {"step", "streams", "facts", "arithmetic"} <= own.keys():
        raise CheckpointError(f"{name} is whole, and no state of a run")
    return state, meta


def _checked_every(every: int | timedelta) -> int | timedelta:
    whole = isinstance(every, int) and not isinstance(every, bool) and every > 0
    if not whole and not (isinstance(every, timedelta) and every > timedelta(0)):
        raise UsageError(f"every={every!r} is no number of steps and no time; use every=100 or a timedelta")
    return every


def _checked_parts(parts: Mapping[str, Any]) -> dict[str, Part]:
    if not parts:
        raise UsageError(
            "Checkpoint got no parts to keep; pass model=model, optimizer=optimizer, train=train"
        )
    if _OWN in parts:
        raise UsageError(f"Checkpoint keeps its own state as {_OWN}; give your part another name")
    for name, part in parts.items():
        if not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict"):
            raise UsageError(
                f"Checkpoint cannot keep {name}, a {type(part).__name__} without state_dict and load_state_dict; "
                "leave it out, or give it both"
            )
    return dict(parts)


def _received(size: int) -> Any:
    # containers often have 64 MB of it, for all ranks of a node together
    memory = "/dev/shm"
    fits = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > size
    with tempfile.TemporaryDirectory(dir=memory if fits else None) as directory:
        path = Path(directory, "state")
        hand_out(path)
        return carry.read(path)[0]


def _origin() -> dict[str, Any]:
    script = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path("-")
    digest = hashlib.sha256(script.read_bytes()).hexdigest()[:12] if script.is_file() else ""
    return {
        "script": script.name,
        "digest": digest,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "samestep": samestep.__version__,
    }
