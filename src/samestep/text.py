"""Turns facts into words: ranks, sizes, percentages, durations, reasons, and untrusted text that is safe to print."""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

_MOST_LISTED = 8


def name_ranks(ranks: Iterable[int], hosts: Sequence[str] = (), noun: str = "rank") -> str:
    """`rank 2`; `ranks 0, 1`; `ranks 2, 3 (node02), 5 (node03)`; many as `ranks 3, 5-12 and 40 more`."""
    ordered = sorted(set(ranks))
    by_host: dict[str, list[int]] = {}
    for rank in ordered:
        by_host.setdefault(hosts[rank] if rank < len(hosts) else "", []).append(rank)
    longest = 1 if len(ordered) <= _MOST_LISTED else len(ordered)
    spans = [(host, span) for host, group in by_host.items() for span in _spans(group, longest)]
    listed = spans[:_MOST_LISTED]
    parts = []
    for host, group_of_spans in groupby(listed, key=lambda item: item[0]):
        numbers = ", ".join(f"{s[0]}" if len(s) == 1 else f"{s[0]}-{s[-1]}" for _, s in group_of_spans)
        parts.append(f"{numbers} ({host})" if host else numbers)
    more = len(ordered) - sum(len(span) for _, span in listed)
    plural = "" if len(ordered) == 1 else "s"
    return f"{noun}{plural} {', '.join(parts)}{f' and {more} more' if more else ''}"


def counted(number: int, noun: str) -> str:
    """`1 step`, `2 steps`; `1 process`, `2 processes`."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def type_of(value: object) -> str:
    """`a Linear`, `an int`, `None`."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"


def size(num_bytes: float, of: float | None = None) -> str:
    """`1.2 GB`, or with `of` in the larger number's unit `0.4 of 2.1 GB`."""
    largest = num_bytes if of is None else of
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB")) if largest >= u), (1e3, "kB"))
    part = f"{num_bytes / unit:.1f}"
    return f"{part} {name}" if of is None else f"{part} of {of / unit:.1f} {name}"


def percent(fraction: float) -> str:
    """`83 %`."""
    return f"{100 * fraction:.0f} %"


def figures(number: float) -> str:
    """Three figures, or more, without an exponent: `0.0125`, `12.5`, `1,254`."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def step_time(seconds: float) -> str:
    """`8.05 ms`, `3.17 s`."""
    return f"{figures(1e3 * seconds)} ms" if seconds < 1 else f"{figures(seconds)} s"


def unbroken(text: str) -> str:
    """The text with no-break spaces before its units, as in `5 %`."""
    return re.sub(r"(?<=\d) (?=%|m?s\b|[kMG]B\b)", "\xa0", text)


def duration(seconds: float) -> str:
    """`4.2 s`, `34 s`, `3 min 12 s` or `2 h 5 min`."""
    if seconds < 59.5:
        return f"{seconds:.{int(seconds < 9.95)}f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def reason_of(error: OSError) -> str:
    """The operating system's words for an error, as a part of a sentence."""
    return (error.strerror or str(error)).lower()


def printable(text: object, limit: int = 200) -> str:
    """Untrusted text on a single line: control characters escaped, at most `limit` long."""
    escaped = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
        for letter in str(text)[: limit + 1]
    )
    return escaped if len(escaped) <= limit else escaped[: limit - 3] + "..."


def _spans(numbers: Sequence[int], longest: int) -> list[list[int]]:
    """The numbers as spans of consecutive numbers, each at most `longest` long."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1 and len(spans[-1]) < longest:
            spans[-1].append(number)
        else:
            spans.append([number])
    return spans
