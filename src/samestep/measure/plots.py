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
    for name, draw in (("throughput", _throughput), ("speedup", _speedup), ("step", _step)):
        figure = Figure(figsize=(5, 3.6), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        draw(axes, rows)
        axes.set_xticks(range(len(rows)), [str(row.variant) for row in rows])
        axes.margins(0.15)
        axes.set_ylim(0)
        axes.set_xlabel("processes")
        figure.savefig(directory / f"{name}.png", dpi=150)
        written = StringIO()
        with matplotlib.rc_context({"svg.fonttype": "none"}):  # letters stay letters
            figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
        text = written.getvalue()
        found.append(text[text.index("<svg") :])
    return found


def _throughput(axes: Any, rows: Sequence[Row]) -> None:
    _line(axes, [row.throughput for row in rows], "{:,.0f}")
    axes.set(title="Throughput", ylabel="samples/s")


def _speedup(axes: Any, rows: Sequence[Row]) -> None:
    _line(axes, [row.speedup for row in rows], "{:.2f}")
    ideal = [row.variant.size / rows[0].variant.size for row in rows]
    axes.plot(range(len(rows)), ideal, "--", color="#555", label="ideal")
    axes.set(title="Speed-up", ylabel="times as fast")
    axes.legend()


def _step(axes: Any, rows: Sequence[Row]) -> None:
    base = [0.0] * len(rows)
    for name in SHOWN:
        high = [1e3 * row.parts[name] for row in rows]
        if any(high):
            colour, hatch = _LOOKS[name]
            axes.bar(
                range(len(rows)), high, 0.6, base, label=name, color=colour, hatch=hatch, edgecolor="#222"
            )
        base = [low + more for low, more in zip(base, high, strict=True)]
    axes.set(title="Time of a step", ylabel="ms")
    axes.legend()


def _line(axes: Any, spreads: Sequence[Any], form: str) -> None:
    values = [one.value for one in spreads]
    ends = [[one.value - one.low for one in spreads], [one.high - one.value for one in spreads]]
    axes.errorbar(range(len(values)), values, ends, label="measured", marker="o", capsize=4)
    for at, value in enumerate(values):
        axes.annotate(form.format(value), (at, value), (6, 6), textcoords="offset points")
