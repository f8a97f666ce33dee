"""Joins what torch's profiler saw on several ranks to one trace, with steps, phases and buckets by name.

The format is Chrome's Trace Event Format, which Perfetto and chrome://tracing read. All ranks are on one time axis,
that of their clocks: on several nodes it is as exact as these agree.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from samestep.errors import UsageError, WorkerFailed
from samestep.files import write_atomically
from samestep.measure.trial import Trial
from samestep.text import size as size_in_words

Event = dict[str, Any]
_STEPS, _PHASES, _BUCKETS = 1, 2, 3
_ROWS = {_STEPS: "steps", _PHASES: "phases"}
_BYTES = {"float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2}


def profile(script: Sequence[str], size: int, first: int, last: int, ranks: Sequence[int], out: Path) -> Path:
    """Run the script to the end of the last step, and write the trace of the chosen ranks (none: all of them)."""
    with TemporaryDirectory(prefix="samestep-") as folder:
        directory = Path(folder)
        chosen = ",".join(map(str, ranks))
        env = {
            "SAMESTEP_PROFILE": f"{first}:{last}:{chosen}:{directory}",
            "SAMESTEP_MEASURE_STEPS": str(last + 1),
            "SAMESTEP_METER": "0",
        }
        result = Trial(script, size, directory / "run", env).run()
        if result.code:
            raise WorkerFailed(result.failure or result.text)
        events = [event for rank in ranks or range(size) for event in _events_of(directory, rank)]
    if not events:
        raise UsageError(
            f"{script[0]} took no step {last} over samestep.loader or samestep.steps; write an earlier --steps"
        )
    begin = min(event["ts"] for event in events if "ts" in event)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - begin, 3)
    document = {"traceEvents": events, "displayTimeUnit": "ms"}
    write_atomically(out, json.dumps(document).encode(), 0o644)
    return out


def _events_of(directory: Path, rank: int) -> Iterator[Event]:
    trace, phases = (directory / f"rank-{rank}.{kind}.json" for kind in ("trace", "phases"))
    if not phases.exists():
        return
    seen = json.loads(trace.read_text())
    named = {"ph": "M", "pid": rank}
    yield {**named, "name": "process_name", "args": {"name": f"rank {rank}"}}
    yield {**named, "name": "process_sort_index", "args": {"sort_index": rank}}
    for row, name in _ROWS.items():
        yield {**named, "tid": row, "name": "thread_name", "args": {"name": name}}
    marks = json.loads(phases.read_text())
    yield from _spans(marks, rank)
    base = seen.get("baseTimeNanoseconds", 0) / 1e3
    steps = [at for name, at in marks if name.startswith("step ")]
    numbers = dict.fromkeys(range(len(steps)), 0)
    for event in sorted(seen["traceEvents"], key=lambda event: event.get("ts", 0)):
        if event.get("ph") != "X" or not isinstance(event.get("pid"), int):
            continue
        event = event | {"pid": rank, "ts": event["ts"] + base}
        if not _is_exchange(event):
            yield event
            continue
        step = sum(at <= event["ts"] for at in steps) - 1
        if step >= 0:
            # buckets overlap, and events of one row must not
            number, row = numbers[step], _BUCKETS + numbers[step]
            yield {**named, "tid": row, "name": "thread_name", "args": {"name": f"bucket {number}"}}
            yield event | {"tid": row, "name": f"bucket {number}{_size_of(event)}"}
            numbers[step] += 1


def _spans(marks: Sequence[tuple[str, float]], rank: int) -> Iterator[Event]:
    """Steps and phases: each lasts until the next one of its row begins."""
    end = marks[-1]
    for row in (_STEPS, _PHASES):
        own = [mark for mark in marks if mark[0].startswith("step ") == (row == _STEPS)]
        for (name, begin), (_, after) in pairwise([*own, end]):
            if name != "end" and after > begin:
                yield {"ph": "X", "pid": rank, "tid": row, "name": name, "ts": begin, "dur": after - begin}


def _is_exchange(event: Event) -> bool:
    return str(event["name"]).endswith(":all_reduce") and event.get("cat") in ("cpu_op", "user_annotation")


def _size_of(event: Event) -> str:
    facts = event.get("args", {})
    dims, kinds = facts.get("Input Dims") or [], facts.get("Input type") or []
    shape = next((dim for dim in dims if dim), None)
    while shape and isinstance(shape[0], list):
        shape = shape[0]
    if not shape:
        return ""
    count = 1
    for length in shape:
        count *= length
    return f" ({size_in_words(count * _BYTES.get(str(kinds[0]) if kinds else 'float', 4))})"
