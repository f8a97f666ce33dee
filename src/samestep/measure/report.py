"""Writes a measurement as tables, as a self-contained HTML page, and as plots.

The plots need matplotlib (the extra `plot`). They are readable without colours: parts have different hatching, lines
have different dashes and marks.
"""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from samestep.files import write_atomically
from samestep.measure.predict import Prediction
from samestep.measure.verdict import Row
from samestep.steptimes import SHOWN
from samestep.text import duration, percent, step_time, unbroken

_RUNS = ("processes", "samples/s", "step", "speed-up", "efficiency")
_EACH = ("processes", "samples/s each", "cores each", "device time an epoch")
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; color: #111; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; }
.table { overflow-x: auto; } table { border-collapse: collapse; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #999; text-align: right; }
td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 1rem; }
@media (max-width: 30rem) { table { font-size: .75rem; } th, td { padding: .2rem; white-space: normal; } }
svg { width: 100%; height: auto; } figure { margin: 0; break-inside: avoid; }
@media print { body { max-width: none; padding: 0; } .plots { display: block; } figure { max-width: 13cm; } }
"""
_LOOKS = {
    "data": ("#f2f2f2", ""), "compute": ("#8db3d9", ""), "exchange": ("#e0a458", "//"),
    "slowest rank": ("#b03a48", "xx"), "optimizer": ("#d9d9d9", "\\\\"), "checkpoint": ("#7a9e7e", ".."),
    "evaluation": ("#c7b8ea", "--"), "rest": ("#555555", ""),
}  # fmt: skip


@dataclass(frozen=True)
class Report:
    rows: Sequence[Row]
    verdict: str
    predicted: Sequence[Prediction]

    def write(self, directory: Path, title: str, made: str, document: Mapping[str, object]) -> Path:
        """Write report.json, report.html and, with matplotlib, the plots as PNG; returns the path of the page."""
        write_atomically(directory / "report.json", json.dumps(document, indent=1).encode(), 0o644)
        plots = plots_of(self.rows, directory)
        figures = "".join(f"<figure>{plot}</figure>" for plot in plots)
        figures = figures or "<p>For plots: pip install 'samestep[plot]', and give the command again.</p>"
        name = html.escape(title)
        body = "".join(f"<p>{html.escape(unbroken(text))}</p>" for text in self.sentences())
        text = (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}: scaling</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<style>{_STYLE}</style><h1>How {name} scales</h1>{body}"
            f'<div class="plots">{figures}</div>{"".join(map(_html, self.tables()))}'
            "<p>Medians, with the middle half of the runs in brackets. Speed-ups are of runs beside each other.</p>"
            f"<p>{html.escape(made)}</p></html>\n"
        )
        page = directory / "report.html"
        write_atomically(page, text.encode(), 0o644)
        return page

    def tables(self) -> list[tuple[str, Sequence[Sequence[str]]]]:
        """Tables of runs, parts of a step and predictions: titles with rows, of which the first has the headings."""
        parts = [["part of a step", *(str(row.variant) for row in self.rows)]]
        for part in SHOWN:
            parts.append([part, *(percent(row.parts[part] / row.step_s.value) for row in self.rows)])
        hidden = ["" if row.hidden is None else percent(row.hidden) for row in self.rows]
        parts.append(["share of exchange hidden", *hidden])
        parts = [row for row in parts if not {*row[1:]} <= {"", "0 %"}]
        if any(row.variant.settings for row in self.rows):  # names of settings are too long for headings
            parts = [list(column) for column in zip(*parts, strict=True)]
        tables: list[tuple[str, Sequence[Sequence[str]]]] = [
            ("Runs", [_RUNS, *map(_run, self.rows)]),
            ("Each process", [_EACH, *map(_each, self.rows)]),
            ("Parts of a step", parts),
        ]
        if self.predicted:
            heads = ["predicted", "samples/s", "interval", "efficiency", "exchange"]
            tables.append(("Predicted", [heads, *(prediction.cells() for prediction in self.predicted)]))
        return tables

    def sentences(self) -> list[str]:
        """The verdict, and the best bucket size at the largest predicted size."""
        if not self.predicted:
            return [self.verdict]
        last = self.predicted[-1]
        best = (
            f"At {last.size} processes buckets of {last.best_mb:g} MB (replicate(bucket_cap_mb={last.best_mb:g})) are "
            f"best: {last.best_gain:.2f} times as fast as DDP's own."
        )
        return [self.verdict, f"Predicted for a link of {last.link}. {best}"]


def _html(table: tuple[str, Sequence[Sequence[str]]]) -> str:
    title, (heads, *rows) = table
    cells = ["".join(f"<th>{html.escape(cell)}</th>" for cell in heads)]
    cells += ["".join(f"<td>{html.escape(unbroken(cell))}</td>" for cell in row) for row in rows]
    return f'<h2>{title}</h2><div class="table"><table>{"".join(f"<tr>{row}</tr>" for row in cells)}</table></div>'


def _run(row: Row) -> list[str]:
    rate, step_s = f"{row.throughput.value:,.0f}", row.step_s.value
    return [str(row.variant), rate, step_time(step_s), str(row.speedup), percent(row.efficiency)]


def _each(row: Row) -> list[str]:
    rate = f"{row.throughput.value / row.variant.size:,.0f}"
    return [str(row.variant), rate, str(row.variant.cores), duration(row.device_s)]


def plots_of(rows: Sequence[Row], directory: Path) -> list[str]:
    """Write the plots to the directory as PNG, and return them as SVG elements for the page."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except Exception:  # a broken installation counts as none
        return []
    plots = []
    sizes = [row.variant.size for row in rows]
    # sizes have a linear axis, so that the ideal is a straight line; settings are side by side
    are_sizes = len({*sizes}) == len(sizes)
    names = [str(row.variant) for row in rows]
    for name, draw in (("throughput", _throughput), ("speedup", _speedup), ("step", _step)):
        height = 3.6 if are_sizes else 3.6 + 0.08 * max(map(len, names))
        figure = Figure(figsize=(5, height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        at = sizes if are_sizes and draw is not _step else list(range(len(rows)))
        draw(axes, rows, at, are_sizes)
        axes.set_xticks(at, names, rotation=0 if are_sizes else 90)
        axes.margins(0.2)
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])  # room for the highest number
        axes.set_xlabel("processes" if are_sizes else "")
        figure.savefig(directory / f"{name}.png", dpi=150)
        written = StringIO()
        with matplotlib.rc_context({"svg.fonttype": "none"}):  # keep text as text
            figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
        text = written.getvalue()
        plots.append(text[text.index("<svg") :])
    return plots


def _throughput(axes: Any, rows: Sequence[Row], at: Sequence[int], are_sizes: bool) -> None:
    _line(axes, at, [row.throughput for row in rows], "{:,.0f}", are_sizes)
    axes.set(title="Throughput", ylabel="samples/s")


def _speedup(axes: Any, rows: Sequence[Row], at: Sequence[int], are_sizes: bool) -> None:
    _line(axes, at, [row.speedup for row in rows], "{:.2f}", are_sizes)
    if are_sizes and len(at) > 1:
        axes.plot(at, [size / at[0] for size in at], "--", color="#555", label="ideal")
        axes.legend(loc="upper left")  # above the ideal
    axes.set(title="Speed-up", ylabel="times as fast")


def _step(axes: Any, rows: Sequence[Row], at: Sequence[int], are_sizes: bool) -> None:
    base = [0.0] * len(rows)
    unit, times = ("s", 1.0) if max(row.step_s.value for row in rows) >= 1 else ("ms", 1e3)
    for name in SHOWN:
        high = [times * row.parts[name] for row in rows]
        if any(high):
            colour, hatch = _LOOKS[name]
            axes.bar(at, high, 0.6, base, label=name, color=colour, hatch=hatch, edgecolor="#222")
        base = [low + more for low, more in zip(base, high, strict=True)]
    axes.set(title="Time of a step", ylabel=unit)
    axes.figure.legend(loc="outside right upper")  # inside it would cover bars


def _line(axes: Any, at: Sequence[int], spreads: Sequence[Any], form: str, is_joined: bool) -> None:
    values = [spread.value for spread in spreads]
    errors = [[each.value - each.low for each in spreads], [each.high - each.value for each in spreads]]
    axes.errorbar(at, values, errors, fmt="o-" if is_joined else "o", label="measured", capsize=4)
    for place, value in zip(at, values, strict=True):
        text = axes.annotate(form.format(value), (place, value), (6, 6), textcoords="offset points")
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # lines may pass there
