"""Line charts as inline SVG. Knows nothing of what is drawn."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

# Okabe and Ito's colours, which people with any colour vision can tell apart.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES = ("", "6 3", "2 3")

_WIDTH, _HEIGHT = 560, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 16, 44
_NUM_TICKS = 5

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _Axis:
    """From values to places between two ends of the drawing."""

    least: float
    most: float
    start: float
    end: float
    is_log: bool

    def place(self, value: float) -> float:
        least, most, value = self.least, self.most, min(max(value, self.least), self.most)
        if self.is_log:
            least, most, value = math.log(least), math.log(most), math.log(value)
        return self.start + (value - least) / (most - least) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.is_log:
            powers = range(math.floor(math.log10(self.least)), math.ceil(math.log10(self.most)) + 1)
            return [10.0**p for p in powers if self.least <= 10.0**p <= self.most * 1.0001]
        step = _round_step((self.most - self.least) / _NUM_TICKS)
        first = math.ceil(self.least / step)
        return [step * i for i in range(first, math.floor(self.most / step + 1e-9) + 1)]


def line_chart(
    series: Mapping[str, Points], x_label: str, y_label: str, *, log_x: bool = False
) -> str:
    """One line for each series, with a legend of their names. Without points: a sentence."""
    points = [point for line in series.values() for point in line]
    if not points:
        return "<p>Nothing to draw.</p>"
    xs, ys = zip(*points, strict=True)
    x_axis = _axis(xs, _LEFT, _WIDTH - _RIGHT, is_log=log_x)
    y_axis = _axis((0.0, *ys), _HEIGHT - _BOTTOM, _TOP, is_log=False)
    parts = [_grid(x_axis, y_axis), _labels(x_label, y_label)]
    for i, (name, line) in enumerate(series.items()):
        parts.append(_line(name, line, x_axis, y_axis, i))
    legend = "".join(_legend_entry(name, i) for i, name in enumerate(series))
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(y_label)} by {escape(x_label)}">{"".join(parts)}</svg>'
        f"<figcaption>{legend}</figcaption></figure>"
    )


def _axis(values: Sequence[float], start: float, end: float, *, is_log: bool) -> _Axis:
    least, most = min(values), max(values)
    if is_log:
        least = max(least, most / 1e6, 1e-9)
        return _Axis(least, max(most, least * 10), start, end, is_log=True)
    return _Axis(least, most if most > least else least + 1.0, start, end, is_log=False)


def _round_step(step: float) -> float:
    """The least of 1, 2, 5 times a power of ten that is no less."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= step * (1 - 1e-9))


def _grid(x_axis: _Axis, y_axis: _Axis) -> str:
    parts = []
    for value in x_axis.ticks():
        x = x_axis.place(value)
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_HEIGHT - _BOTTOM}"/>')
        parts.append(_text(x, _HEIGHT - _BOTTOM + 16, f"{value:g}", "middle"))
    for value in y_axis.ticks():
        y = y_axis.place(value)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{value:g}", "end"))
    return "".join(parts)


def _labels(x_label: str, y_label: str) -> str:
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    x = _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, x_label, "middle")
    y = _text(14, middle, y_label, "middle")
    return x + y.replace("<text ", f'<text transform="rotate(-90 14 {middle:g})" ', 1)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(name: str, points: Points, x_axis: _Axis, y_axis: _Axis, index: int) -> str:
    places = " ".join(f"{x_axis.place(x):.1f},{y_axis.place(y):.1f}" for x, y in points)
    return f'<polyline points="{places}" {_stroke(index)}><title>{escape(name)}</title></polyline>'


def _stroke(index: int) -> str:
    dash = DASHES[index // len(COLORS) % len(DASHES)]
    return f'fill="none" stroke="{COLORS[index % len(COLORS)]}" stroke-dasharray="{dash}"'


def _legend_entry(name: str, index: int) -> str:
    sample = f'<svg viewBox="0 0 24 8"><line x1="0" y1="4" x2="24" y2="4" {_stroke(index)}/></svg>'
    return f"<span>{sample} {escape(name)}</span> "
