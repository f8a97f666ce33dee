"""The plots of a report, where matplotlib is installed (the extra `plot`).

They can be told apart without colours: parts by their hatching, lines by their dashes and marks.
"""

from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from samestep.measure.verdict import Row
from samestep.steptimes import SHOWN

_LOOKS = {
    "data": ("#f2f2f2", ""), "compute": ("#8db3d9", ""), "exchange": ("#e0a458", "//"),
    "slowest rank": ("#b03a48", "xx"), "optimizer": ("#d9d9d9", "\\\\"), "checkpoint": ("#7a9e7e", ".."),
    "evaluation": ("#c7b8ea", "--"), "rest": ("#555555", ""),
}  # fmt: skip


def plots_of(rows: Sequence[Row], directory: Path) -> list[str]:
    """Write the plots to the directory as PNG, and give them as SVG elements of a page."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except Exception:  # an installation that is broken is none
        return []
    found = []
    sizes = [row.variant.size for row in rows]
    # sizes are as far apart as they differ, so that the ideal is a straight line; settings are side by side
    are_sizes = len({*sizes}) == len(sizes)
    names = [str(row.variant).replace(", ", "\n") for row in rows]
    for name, draw in (("throughput", _throughput), ("speedup", _speedup), ("step", _step)):
        figure = Figure(figsize=(5, 3.6 if are_sizes else 5), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        at = sizes if are_sizes and draw is not _step else list(range(len(rows)))
        draw(axes, rows, at, are_sizes)
        axes.set_xticks(at, names, rotation=0 if are_sizes else 90)
        axes.margins(0.15)
        axes.set_ylim(0)
        axes.set_xlabel("processes" if are_sizes else "")
        figure.savefig(directory / f"{name}.png", dpi=150)
        written = StringIO()
        with matplotlib.rc_context({"svg.fonttype": "none"}):  # letters stay letters
            figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
        text = written.getvalue()
        found.append(text[text.index("<svg") :])
    return found


def _throughput(axes: Any, rows: Sequence[Row], at: Sequence[int], are_sizes: bool) -> None:
    _line(axes, at, [row.throughput for row in rows], "{:,.0f}", are_sizes)
    axes.set(title="Throughput", ylabel="samples/s")


def _speedup(axes: Any, rows: Sequence[Row], at: Sequence[int], are_sizes: bool) -> None:
    _line(axes, at, [row.speedup for row in rows], "{:.2f}", are_sizes)
    if are_sizes:
        axes.plot(at, [size / at[0] for size in at], "--", color="#555", label="ideal")
        axes.legend()
    axes.set(title="Speed-up", ylabel="times as fast")


def _step(axes: Any, rows: Sequence[Row], at: Sequence[int], are_sizes: bool) -> None:
    base = [0.0] * len(rows)
    for name in SHOWN:
        high = [1e3 * row.parts[name] for row in rows]
        if any(high):
            colour, hatch = _LOOKS[name]
            axes.bar(at, high, 0.6, base, label=name, color=colour, hatch=hatch, edgecolor="#222")
        base = [low + more for low, more in zip(base, high, strict=True)]
    axes.set(title="Time of a step", ylabel="ms")
    axes.figure.legend(loc="outside right upper")  # it would cover bars


def _line(axes: Any, at: Sequence[int], spreads: Sequence[Any], form: str, is_joined: bool) -> None:
    values = [one.value for one in spreads]
    ends = [[one.value - one.low for one in spreads], [one.high - one.value for one in spreads]]
    axes.errorbar(at, values, ends, fmt="o-" if is_joined else "o", label="measured", capsize=4)
    for place, value in zip(at, values, strict=True):
        axes.annotate(form.format(value), (place, value), (6, 6), textcoords="offset points")
