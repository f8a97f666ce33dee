"""A measurement as a table for a terminal of 60 columns, as one HTML page that needs nothing else, and as PNGs."""

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill

from samestep.files import write_atomically
from samestep.measure.plots import Plot, png, svg
from samestep.measure.predict import Prediction
from samestep.measure.verdict import PARTS_SHOWN, Row

_COLUMNS = 60
_NAMES = {"slowest": "wait for slowest"}
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; color: #111; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; }
.table { overflow-x: auto; } table { border-collapse: collapse; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #999; text-align: right; }
td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 1rem; }
svg { width: 100%; height: auto; } figure { margin: 0; break-inside: avoid; }
@media print { body { max-width: none; padding: 0; } .plots { display: block; } figure { max-width: 13cm; } }
"""


def text_of(rows: Sequence[Row], verdict: str) -> str:
    """Table, parts and verdict."""
    names = [str(row.variant) for row in rows]
    wide = min(18, max(9, *map(len, names)))
    lines = [f"{'processes':{wide}}  samples/s   step ms          speed-up  efficiency"[:_COLUMNS]]
    for row, name in zip(rows, names, strict=True):
        speed = row.speedup
        spread = f"{speed.value:.2f} ({speed.low:.2f}-{speed.high:.2f})"
        lines += [name] if len(name) > wide else []
        shown = "" if len(name) > wide else name
        cells = f"{row.throughput.value:>10,.0f} {1e3 * row.step_s.value:>9.3g} {spread:>17} {row.efficiency:>8.0%}"
        lines.append(f"{shown:{wide}} {cells.replace('%', ' %')}")
    lines += ["", *_parts(rows, names), ""]
    return "\n".join([*lines, *_hours(rows, wide), "", fill(verdict, _COLUMNS)])


def text_of_predictions(predicted: Sequence[Prediction]) -> str:
    """A table, and which size of bucket would be best."""
    lines = ["predicted  samples/s      interval  efficiency  exchange"]
    for one in predicted:
        interval = f"{one.low:,.0f}-{one.high:,.0f}"
        cells = f"{one.samples_per_second:>10,.0f} {interval:>15} {one.efficiency:>9.0%} {one.waits:>8.0%}"
        lines.append(f"{one.size:<9} {cells}".replace("%", " %"))
    last = predicted[-1]
    gain = (
        f"{last.best_gain:.2f} times as fast as with DDP's own"
        if last.best_gain > 1.02
        else "no gain over DDP's own"
    )
    best = f"At {last.size} processes buckets of {last.best_mb:g} MB are best: {gain} (replicate(bucket_cap_mb=...))."
    return "\n".join([*lines, "", fill(best, _COLUMNS)])


def write_report(
    directory: Path, title: str, rows: Sequence[Row], verdict: str, document: Mapping[str, object]
) -> Path:
    """Write report.json, report.html and, where matplotlib is installed, the plots as PNG; the page's path."""
    plots = plots_of(rows)
    for name, plot in plots.items():
        png(plot, directory / f"{name}.png")
    page = directory / "report.html"
    write_atomically(page, _page(title, rows, verdict, plots).encode(), 0o644)
    write_atomically(directory / "report.json", json.dumps(document, indent=1).encode(), 0o644)
    return page


def plots_of(rows: Sequence[Row]) -> dict[str, Plot]:
    """Throughput, speed-up beside the ideal one, and the step's time with its parts stacked."""
    labels = [str(row.variant) for row in rows]
    ideal = [row.variant.size / rows[0].variant.size for row in rows]
    throughput = [row.throughput for row in rows]
    speedup = [row.speedup for row in rows]
    stacked = {_NAMES.get(name, name): [1e3 * row.parts[name] for row in rows] for name in PARTS_SHOWN}
    return {
        "throughput": Plot("Throughput", "samples/s", labels, {"measured": throughput}),
        "speedup": Plot("Speed-up", "times", labels, {"measured": speedup}, ideal=ideal),
        "step": Plot("Time of a step", "ms", labels, stacked={n: v for n, v in stacked.items() if any(v)}),
    }


def _parts(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """The parts of a step in percent, as many variants beside each other as there is room for."""
    wide = max(7, *(len(name) + 1 for name in names))
    most = max(1, (_COLUMNS - 18) // wide)
    lines = []
    for start in range(0, len(rows), most):
        chosen, heads = rows[start : start + most], names[start : start + most]
        lines.append(f"{'part of a step':18}" + "".join(f"{name:>{wide}}" for name in heads))
        for part in PARTS_SHOWN:
            shares = [row.parts[part] / row.step_s.value for row in chosen]
            if max(shares) >= 0.005:
                cells = "".join(f"{100 * share:>{wide - 2}.0f} %" for share in shares)
                lines.append(f"{_NAMES.get(part, part):18}{cells}")
        hidden = [row.hidden for row in chosen]
        if any(one is not None for one in hidden):
            known = (f"{'':>{wide}}" if one is None else f"{100 * one:>{wide - 2}.0f} %" for one in hidden)
            lines.append(f"{'(exchange hidden)':18}" + "".join(known))
    return lines


def _hours(rows: Sequence[Row], wide: int) -> list[str]:
    lines = [f"{'processes':{wide}}  samples/s each  device-hours an epoch"]
    for row in rows:
        each = row.throughput.value / row.variant.size
        lines.append(f"{str(row.variant)[:wide]:{wide}} {each:>15,.0f} {row.device_hours:>22.3g}")
    return lines


def _page(title: str, rows: Sequence[Row], verdict: str, plots: Mapping[str, Plot]) -> str:
    heads = [
        "processes",
        "cores each",
        "samples/s",
        "each",
        "step",
        "speed-up",
        "efficiency",
        "device-hours an epoch",
    ]
    table = [
        [
            str(row.variant),
            str(row.variant.cores),
            f"{row.throughput.value:,.0f} ({row.throughput.low:,.0f}-{row.throughput.high:,.0f})",
            f"{row.throughput.value / row.variant.size:,.0f}",
            f"{1e3 * row.step_s.value:.3g} ms",
            f"{row.speedup.value:.2f} ({row.speedup.low:.2f}-{row.speedup.high:.2f})",
            f"{row.efficiency:.0%}",
            f"{row.device_hours:.3g}",
        ]
        for row in rows
    ]
    parts = [
        [_NAMES.get(name, name), *(f"{1e3 * row.parts[name]:.3g} ms" for row in rows)]
        for name in PARTS_SHOWN
        if any(row.parts[name] for row in rows)
    ]
    figures = "".join(f"<figure>{svg(plot)}</figure>" for plot in plots.values())
    name = html.escape(title)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}: scaling</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style><h1>How {name} scales</h1><p>{html.escape(verdict)}</p>"
        f'<div class="plots">{figures}</div>'
        f"<h2>Runs</h2>{_table(heads, table)}<p>Medians, with the middle half of the runs in brackets.</p>"
        f"<h2>Parts of a step</h2>{_table(['part', *(str(row.variant) for row in rows)], parts)}</html>\n"
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="table"><table><tr>{head}</tr>{body}</table></div>'
