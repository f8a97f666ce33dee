"""A measurement as tables for a terminal of 60 columns, as one HTML page that needs nothing else, and as plots."""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

from samestep.files import write_atomically
from samestep.measure.plots import plots_of
from samestep.measure.predict import Prediction
from samestep.measure.verdict import Row
from samestep.steptimes import SHOWN
from samestep.text import percent

_COLUMNS = 60
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


@dataclass(frozen=True)
class Table:
    """Cells below their heads; the first column names the rows."""

    title: str
    columns: Mapping[str, Sequence[str]]

    def text(self) -> str:
        """As many columns beside each other as 60 characters take, and the others below with the first again."""
        wide = {head: max(map(len, (head, *cells))) for head, cells in self.columns.items()}
        first, *heads = wide
        blocks: list[list[str]] = []
        for head in heads:
            if not blocks or sum(wide[one] + 2 for one in (*blocks[-1], head)) + wide[first] > _COLUMNS:
                blocks.append([])
            blocks[-1].append(head)
        lines = []
        for block in blocks:
            for at in range(-1, len(self.columns[first])):
                cells = [(head, head if at < 0 else self.columns[head][at]) for head in (first, *block)]
                name, *others = (text.rjust(wide[head]) for head, text in cells)
                lines.append("  ".join([name.strip().ljust(wide[first]), *others]).rstrip())
            lines.append("")
        return "\n".join(lines)

    def html(self) -> str:
        """As an element of a page."""
        rows = [[*self.columns], *zip(*self.columns.values(), strict=True)]
        tags = ["th", *["td"] * len(rows)]
        body = "".join(
            f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in row)}</tr>"
            for tag, row in zip(tags, rows, strict=False)
        )
        return f'<h2>{self.title}</h2><div class="table"><table>{body}</table></div>'


@dataclass(frozen=True)
class Report:
    """All that is said of a measurement."""

    rows: Sequence[Row]
    verdict: str
    predicted: Sequence[Prediction]

    def text(self) -> str:
        """For a terminal."""
        said = [fill(text, _COLUMNS) for text in (self.verdict, *self._advice()) if text]
        return "\n".join([*(table.text() for table in self.tables()), "\n\n".join(said)])

    def write(self, directory: Path, title: str, document: Mapping[str, object]) -> Path:
        """Write report.json, report.html and, where matplotlib is installed, the plots as PNG; the page's path."""
        write_atomically(directory / "report.json", json.dumps(document, indent=1).encode(), 0o644)
        plots = plots_of(self.rows, directory)
        figures = "".join(f"<figure>{plot}</figure>" for plot in plots)
        figures = figures or "<p>For plots: pip install 'samestep[plot]', and give the command again.</p>"
        name, said = html.escape(title), " ".join([self.verdict, *self._advice()])
        text = (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}: scaling</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<style>{_STYLE}</style><h1>How {name} scales</h1><p>{html.escape(said)}</p>"
            f'<div class="plots">{figures}</div>{"".join(table.html() for table in self.tables())}'
            "<p>Medians, with the middle half of the runs in brackets.</p></html>\n"
        )
        page = directory / "report.html"
        write_atomically(page, text.encode(), 0o644)
        return page

    def tables(self) -> list[Table]:
        """Runs, parts of a step, and what was predicted."""
        names = [str(row.variant) for row in self.rows]
        runs = {
            "processes": names,
            "samples/s": [f"{row.throughput.value:,.0f}" for row in self.rows],
            "step ms": [f"{1e3 * row.step_s.value:.3g}" for row in self.rows],
            "speed-up": [str(row.speedup) for row in self.rows],
            "efficiency": [percent(row.efficiency) for row in self.rows],
            "samples/s each": [f"{row.throughput.value / row.variant.size:,.0f}" for row in self.rows],
            "cores each": [str(row.variant.cores) for row in self.rows],
            "device-hours an epoch": [f"{row.device_hours:.3g}" for row in self.rows],
        }
        shown = [
            part for part in SHOWN if any(row.parts[part] >= 0.005 * row.step_s.value for row in self.rows)
        ]
        hidden = any(row.hidden is not None for row in self.rows)
        parts = {"part of a step": [*shown, *(["(exchange hidden)"] * hidden)]}
        for row, name in zip(self.rows, names, strict=True):
            cells = [percent(row.parts[part] / row.step_s.value) for part in shown]
            parts[name] = [*cells, *(["" if row.hidden is None else percent(row.hidden)] * hidden)]
        tables = [Table("Runs", runs), Table("Parts of a step", parts)]
        if self.predicted:
            predicted = {
                "predicted": [str(one.size) for one in self.predicted],
                "samples/s": [f"{one.samples_per_second:,.0f}" for one in self.predicted],
                "interval": [f"{one.low:,.0f}-{one.high:,.0f}" for one in self.predicted],
                "efficiency": [percent(one.efficiency) for one in self.predicted],
                "exchange": [percent(one.waits) for one in self.predicted],
            }
            tables.append(Table("Predicted", predicted))
        return tables

    def _advice(self) -> list[str]:
        """Which size of bucket would be best at the largest size predicted."""
        if not self.predicted:
            return []
        last, gain = self.predicted[-1], "no gain over DDP's own"
        if last.best_gain > 1.02:
            gain = f"{last.best_gain:.2f} times as fast as with DDP's own"
        return [
            f"At {last.size} processes buckets of {last.best_mb:g} MB are best: {gain} (replicate(bucket_cap_mb=...))."
        ]
