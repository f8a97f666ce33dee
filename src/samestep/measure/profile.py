"""Joins the traces of torch's profiler from several ranks, with steps, phases and buckets by name.

The format is Chrome's Trace Event Format, which Perfetto and chrome://tracing read. All ranks share a time axis, by
their nodes' clocks: with several nodes it is only as exact as the clocks agree.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from samestep.errors import UsageError
from samestep.files import write_atomically
from samestep.measure.trial import Trial
from samestep.text import size as size_in_words

Event = dict[str, Any]
_STEPS, _PHASES, _BUCKETS = 1, 2, 3
_BYTES = {"double": 8, "c10::Half": 2, "c10::BFloat16": 2}  # others have 4


def profile(script: Sequence[str], size: int, first: int, last: int, ranks: Sequence[int], out: Path) -> None:
    """Run the script to the end of the last step, and write the trace of the chosen ranks (none: all of them)."""
    with TemporaryDirectory(prefix="samestep-") as folder:
        directory = Path(folder)
        env = {
            "SAMESTEP_PROFILE": f"{first}:{last}:{','.join(map(str, ranks))}:{directory}",
            "SAMESTEP_MEASURE_STEPS": str(last + 1),
            "SAMESTEP_METER": "0",
        }
        Trial(script, size, directory / "run", env).run().checked()
        events = [event for rank in ranks or range(size) for event in _events_of(directory, rank)]
    if not events:
        raise UsageError(
            f"{script[0]} ended before step {last} of a samestep.loader or samestep.steps; "
            "write an earlier --steps, or convert it first"
        )
    begin = min(event["ts"] for event in events if "ts" in event)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - begin, 3)
    document = {"traceEvents": events, "displayTimeUnit": "ms"}
    write_atomically(out, json.dumps(document).encode(), 0o644)


def _events_of(directory: Path, rank: int) -> Iterator[Event]:
    trace, phases = (directory / f"rank-{rank}.{kind}.json" for kind in ("trace", "phases"))
    if not phases.exists():
        return
    marks, seen = json.loads(phases.read_text()), json.loads(trace.read_text())
    *begun, (_, end) = marks
    steps = [mark for mark in begun if mark[0].startswith("step ")]
    rows = {_STEPS: "steps", _PHASES: "phases"}
    for row, own in ((_STEPS, steps), (_PHASES, [mark for mark in begun if mark not in steps])):
        for (name, begin), (_, after) in pairwise([*own, ("end", end)]):
            if after > begin:
                shown = "script" if name == "user" else name
                yield {"ph": "X", "pid": rank, "tid": row, "name": shown, "ts": begin, "dur": after - begin}
    numbers, until = [0] * len(steps), list[float]()
    for event in sorted(seen["traceEvents"], key=lambda event: event.get("ts", 0)):
        if event.get("ph") != "X" or not isinstance(event.get("pid"), int):
            continue
        event |= {"pid": rank, "ts": event["ts"] + seen.get("baseTimeNanoseconds", 0) / 1e3}
        if event["name"].endswith(":all_reduce") and event.get("cat") in ("cpu_op", "user_annotation"):
            step = sum(begin <= event["ts"] for _, begin in steps) - 1
            if step < 0:
                continue
            # exchanges overlap, but events of a row must not, so each takes the first free lane
            lane = next((at for at, end in enumerate(until) if end <= event["ts"]), len(until))
            until[lane : lane + 1] = [event["ts"] + event["dur"]]
            rows[_BUCKETS + lane] = f"exchange {lane}"
            event |= {"tid": _BUCKETS + lane, "name": f"bucket {numbers[step]}{_size_of(event)}"}
            numbers[step] += 1
        yield event
    named = {"ph": "M", "pid": rank}
    yield {**named, "name": "process_name", "args": {"name": f"rank {rank}"}}
    yield {**named, "name": "process_sort_index", "args": {"sort_index": rank}}
    for row, name in rows.items():
        yield {**named, "tid": row, "name": "thread_name", "args": {"name": name}}


def _size_of(event: Event) -> str:
    """The size of the exchanged tensor in words; "" if the profiler has not recorded its shape."""
    facts = event.get("args", {})
    shape: Sequence[Any] = next(filter(None, facts.get("Input Dims", [])), [])
    while shape and isinstance(shape[0], list):
        shape = shape[0]
    kind = next(iter(facts.get("Input type", [])), "")
    return f" ({size_in_words(prod(shape) * _BYTES.get(str(kind), 4))})" if shape else ""
