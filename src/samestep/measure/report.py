"""A measurement as tables, as one HTML page that needs nothing else, and as plots."""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from samestep.files import write_atomically
from samestep.measure.plots import plots_of
from samestep.measure.predict import Prediction
from samestep.measure.verdict import Row
from samestep.steptimes import SHOWN
from samestep.text import duration, percent

_RUNS = ("processes", "samples/s", "step ms", "speed-up", "efficiency")
_EACH = ("processes", "samples/s each", "cores each", "device time an epoch")
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; color: #111; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; }
.table { overflow-x: auto; } table { border-collapse: collapse; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #999; text-align: right; }
td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 1rem; }
@media (max-width: 30rem) { table { font-size: .8rem; } th, td { padding: .2rem .25rem; white-space: normal; } }
svg { width: 100%; height: auto; } figure { margin: 0; break-inside: avoid; }
@media print { body { max-width: none; padding: 0; } .plots { display: block; } figure { max-width: 13cm; } }
"""


@dataclass(frozen=True)
class Report:
    """All that is said of a measurement."""

    rows: Sequence[Row]
    verdict: str
    predicted: Sequence[Prediction]

    def write(self, directory: Path, title: str, document: Mapping[str, object]) -> Path:
        """Write report.json, report.html and, where matplotlib is installed, the plots as PNG; the page's path."""
        write_atomically(directory / "report.json", json.dumps(document, indent=1).encode(), 0o644)
        plots = plots_of(self.rows, directory)
        figures = "".join(f"<figure>{plot}</figure>" for plot in plots)
        figures = figures or "<p>For plots: pip install 'samestep[plot]', and give the command again.</p>"
        name = html.escape(title)
        said = "".join(f"<p>{html.escape(text)}</p>" for text in self.said()).replace(" %", "&nbsp;%")
        text = (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}: scaling</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<style>{_STYLE}</style><h1>How {name} scales</h1>{said}"
            f'<div class="plots">{figures}</div>{"".join(map(_html, self.tables()))}'
            "<p>Medians, with the middle half of the runs in brackets.</p></html>\n"
        )
        page = directory / "report.html"
        write_atomically(page, text.encode(), 0o644)
        return page

    def tables(self) -> list[tuple[str, Sequence[Sequence[str]]]]:
        """Runs, parts of a step, and what was predicted: by title, rows of which the first has the heads."""
        parts = [["part of a step", *(str(row.variant) for row in self.rows)]]
        for part in SHOWN:
            parts.append([part, *(percent(row.parts[part] / row.step_s.value) for row in self.rows)])
        hidden = ["" if row.hidden is None else percent(row.hidden) for row in self.rows]
        parts.append(["(of all exchange, hidden)", *hidden])
        parts = [row for row in parts if not {*row[1:]} <= {"", "0 %"}]
        if any(row.variant.settings for row in self.rows):  # their names are too long for heads of columns
            parts = [list(column) for column in zip(*parts, strict=True)]
        tables: list[tuple[str, Sequence[Sequence[str]]]] = [
            ("Runs", [_RUNS, *map(_run, self.rows)]),
            ("Each process", [_EACH, *map(_each, self.rows)]),
            ("Parts of a step", parts),
        ]
        if self.predicted:
            heads = ["predicted", "samples/s", "interval", "efficiency", "exchange"]
            tables.append(("Predicted", [heads, *(one.cells() for one in self.predicted)]))
        return tables

    def said(self) -> list[str]:
        """The verdict, and which size of bucket would be best at the largest size predicted."""
        if not self.predicted:
            return [self.verdict]
        last = self.predicted[-1]
        best = f"At {last.size} processes no other size of buckets is better than DDP's own."
        if last.best_gain > 1.02:
            best = (
                f"At {last.size} processes buckets of {last.best_mb:g} MB (replicate(bucket_cap_mb={last.best_mb:g})) "
                f"are {last.best_gain:.2f} times as fast as DDP's own."
            )
        return [self.verdict, f"Predicted for a link of {last.link}. {best}"]


def _html(table: tuple[str, Sequence[Sequence[str]]]) -> str:
    """As an element of a page."""
    title, (heads, *rows) = table
    cells = ["".join(f"<th>{html.escape(cell)}</th>" for cell in heads)]
    cells += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return f'<h2>{title}</h2><div class="table"><table>{"".join(f"<tr>{row}</tr>" for row in cells)}</table></div>'


def _run(row: Row) -> list[str]:
    rate, step = f"{row.throughput.value:,.0f}", f"{1e3 * row.step_s.value:.3g}"
    return [str(row.variant), rate, step, str(row.speedup), percent(row.efficiency)]


def _each(row: Row) -> list[str]:
    rate = f"{row.throughput.value / row.variant.size:,.0f}"
    return [str(row.variant), rate, str(row.variant.cores), duration(row.device_s)]
