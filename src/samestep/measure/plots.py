"""The plots of a report as SVG, without any library, and as PNG where matplotlib is installed.

They can be told apart without colours: parts by their hatching, lines by their dashes and marks.
"""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, log10
from pathlib import Path
from statistics import median

_WIDE, _HIGH, _LEFT, _TOP, _BOTTOM = 420, 300, 52, 34, 40
_GREYS = ("#f2f2f2", "#8db3d9", "#e0a458", "#b03a48", "#d9d9d9", "#7a9e7e", "#c7b8ea", "#555555")
_HATCHES = ("", "", "//", "xx", "\\\\", "..", "--", "")


@dataclass(frozen=True)
class Spread:
    """A median with the middle half around it."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        ordered = sorted(values)
        quarter = len(ordered) // 4
        return cls(median(ordered), ordered[quarter], ordered[-1 - quarter])


@dataclass(frozen=True)
class Plot:
    """Values by variant: lines with their spread, and an ideal beside them, or parts on top of each other."""

    title: str
    unit: str
    labels: Sequence[str]
    lines: Mapping[str, Sequence[Spread]] = field(default_factory=dict)
    stacked: Mapping[str, Sequence[float]] = field(default_factory=dict)
    ideal: Sequence[float] = ()

    @property
    def top(self) -> float:
        values = [one.high for line in self.lines.values() for one in line]
        values += [*self.ideal, *(sum(column) for column in zip(*self.stacked.values(), strict=True))]
        return max(values, default=1.0) or 1.0

    @property
    def ticks(self) -> list[float]:
        """Round numbers from 0 to beyond the largest value."""
        rough = self.top / 4
        base = 10.0 ** floor(log10(rough))
        step = next(factor * base for factor in (1, 2, 2.5, 5, 10) if factor * base >= rough)
        return [step * at for at in range(ceil(self.top / step) + 1)]


def svg(plot: Plot) -> str:
    """As an element of a page."""
    high = _HIGH + 16 * -(-len(plot.stacked) // 2)
    ticks, bottom = plot.ticks, _HIGH - _BOTTOM
    scale = (bottom - _TOP) / ticks[-1]
    at = [_LEFT + (_WIDE - _LEFT - 10) * (n + 0.5) / len(plot.labels) for n in range(len(plot.labels))]
    parts = [
        f'<svg viewBox="0 0 {_WIDE} {high}" role="img" font-family="system-ui, sans-serif" font-size="12">',
        f"<title>{html.escape(plot.title)}</title>",
        f'<text x="{_LEFT}" y="18" font-size="14" font-weight="bold">{html.escape(plot.title)}, {plot.unit}</text>',
    ]
    for tick in ticks:
        y = bottom - tick * scale
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDE - 10}" stroke="#ccc"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{tick:,.6g}</text>')
    for x, label in zip(at, plot.labels, strict=True):
        size = 12 if len(label) < 12 else 9
        text = html.escape(label)
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 18}" font-size="{size}" text-anchor="middle">{text}</text>'
        )
    parts += _bars(plot, at, bottom, scale)
    if plot.ideal:
        path = "L".join(f"{x:.1f} {bottom - y * scale:.1f}" for x, y in zip(at, plot.ideal, strict=True))
        parts.append(f'<path d="M{path}" fill="none" stroke="#555" stroke-dasharray="6 4"/>')
        y = bottom - plot.ideal[-1] * scale
        parts.append(f'<text x="{at[-1] - 8:.1f}" y="{y + 4:.1f}" text-anchor="end" fill="#555">ideal</text>')
    for line in plot.lines.values():
        path = "L".join(f"{x:.1f} {bottom - one.value * scale:.1f}" for x, one in zip(at, line, strict=True))
        parts.append(f'<path d="M{path}" fill="none" stroke="#1f5a99" stroke-width="2"/>')
        for x, one in zip(at, line, strict=True):
            low, y, top = (bottom - value * scale for value in (one.low, one.value, one.high))
            parts.append(f'<path d="M{x:.1f} {low:.1f}V{top:.1f}" stroke="#111"/>')
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#1f5a99"/>')
            parts.append(f'<text x="{x + 7:.1f}" y="{y - 7:.1f}">{_short(one.value)}</text>')
    return "".join([*parts, "</svg>"])


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _bars(plot: Plot, at: Sequence[float], bottom: float, scale: float) -> list[str]:
    """Stacked parts with their legend."""
    parts, base = [], [bottom] * len(at)
    wide = min(60.0, 0.6 * (_WIDE - _LEFT) / len(at))
    hatch = '<pattern id="h{0}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate({1})">'
    for number, (name, values) in enumerate(plot.stacked.items()):
        look = number % len(_GREYS)
        fill = _GREYS[look]
        if _HATCHES[look]:
            lines = '<path d="M0 0V6" stroke="#222" stroke-width="1.5"/>'
            parts.append(
                hatch.format(look, 45 * look) + f'<rect width="6" height="6" fill="{fill}"/>{lines}</pattern>'
            )
            fill = f"url(#h{look})"
        box = f'fill="{fill}" stroke="#222" stroke-width=".7"'
        for index, (x, value) in enumerate(zip(at, values, strict=True)):
            base[index] -= value * scale
            size = f'width="{wide:.1f}" height="{value * scale:.1f}"'
            parts.append(f'<rect x="{x - wide / 2:.1f}" y="{base[index]:.1f}" {size} {box}/>')
        x, y = _LEFT + 180 * (number % 2), _HIGH + 16 * (number // 2)
        parts.append(f'<rect x="{x}" y="{y - 12}" width="14" height="12" {box}/>')
        parts.append(f'<text x="{x + 20}" y="{y - 2}">{html.escape(name)}</text>')
    return parts


def png(plot: Plot, path: Path) -> None:
    """As a file, where matplotlib is installed (the extra `plot`)."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except Exception:  # an installation that is broken is none
        return
    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    at = range(len(plot.labels))
    base = [0.0] * len(plot.labels)
    for number, (name, values) in enumerate(plot.stacked.items()):
        look = number % len(_GREYS)
        axes.bar(
            at, values, 0.6, base, label=name, color=_GREYS[look], hatch=_HATCHES[look], edgecolor="#222"
        )
        base = [low + value for low, value in zip(base, values, strict=True)]
    for name, line in plot.lines.items():
        ends = [[one.value - one.low for one in line], [one.high - one.value for one in line]]
        axes.errorbar(at, [one.value for one in line], ends, label=name, marker="o", capsize=4)
    if plot.ideal:
        axes.plot(at, plot.ideal, "--", color="#555", label="ideal")
    axes.set_xticks(at, plot.labels)
    axes.set_ylim(0, plot.ticks[-1])
    axes.set(title=plot.title, ylabel=plot.unit, xlabel="processes")
    axes.legend()
    figure.savefig(path, dpi=150)
