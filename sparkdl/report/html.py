"""Pieces of an HTML page: text that is only text, numbers with units, charts.

Shapes are drawn in SVG that is stretched to the available width; text is HTML next to them, so that
it has the same size on every screen. No script runs. Everything that we did not write goes through
``text``.
"""

from __future__ import annotations

import html
import math
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

LONGEST = 300
"""The most characters of a text that we did not write."""
POINTS = 300
"""The most points of a curve; if there are more, some are left out."""
DOTS = 40
"""Up to this many points are marked and labelled."""
SMALLEST, LARGEST = 1e-290, 1e290
"""The largest value that a chart can scale, short of a float's limit; larger ones are gaps."""
WIDTH, HEIGHT = 1000, 400


def text(value: object, longest: int = LONGEST) -> str:
    """Anything as text in which a browser finds no markup."""
    shown = str(value)
    if len(shown) > longest:
        shown = shown[: longest - 1] + "…"
    # Without control characters or those that change the writing direction.
    kept = (c if c in "\n\t" or not unicodedata.category(c).startswith("C") else "�" for c in shown)
    return html.escape("".join(kept), quote=True)


def table(columns: Mapping[str, str], rows: Iterable[Iterable[str]]) -> str:
    """A table of cells that are HTML; ``columns`` are its headings, with the class of each."""
    marks = [f' class="{each}"' if each else "" for each in columns.values()]
    head = "".join(f"<th{mark}>{name}</th>" for name, mark in zip(columns, marks, strict=True))
    body = "".join(
        f"<tr>{''.join(f'<td{m}>{cell}</td>' for m, cell in zip(marks, row, strict=True))}</tr>"
        for row in rows
    )
    whole = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="scroll"><table>{whole}</table></div>'


def number(value: float, digits: int = 3) -> str:
    """A number as a person would write it: 12,345, 1.23, 0.00456."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e15 or size < 1e-4:
        figures, _, power = f"{value:.{digits - 1}e}".partition("e")
        return f"{figures}e{int(power)}".replace("-", "−")
    if size >= 10 ** (digits - 1):
        return f"{value:,.0f}".replace("-", "−")
    places = digits - 1 - math.floor(math.log10(size))
    shown = f"{value:.{places}f}".replace("-", "−")
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def count(value: float) -> str:
    """A count in thousands, millions and so on: 12.3 k, 4.56 M."""
    return number(value) if abs(value) < 1e4 else _scaled(value, (" k", " M", " G", " T"))


def octets(value: float) -> str:
    """Bytes: 664 B, 1.23 MB."""
    return f"{value:.0f} B" if value < 1e3 else _scaled(value, (" kB", " MB", " GB", " TB"))


def _scaled(value: float, units: Sequence[str]) -> str:
    power = min(len(units), int(math.log10(abs(value)) // 3)) if math.isfinite(value) else 0
    return f"{number(value / 1e3**power)}{units[power - 1] if power else ''}"


def duration(seconds: float) -> str:
    """A length of time: 4.2 ms, 12.3 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 1:
        return f"{number(seconds * 1e3)} ms"
    if seconds < 60:
        return f"{number(seconds)} s"
    whole = round(seconds)
    if whole < 3600:
        minutes, rest = divmod(whole, 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, rest = divmod(round(whole / 60), 60)
    return f"{hours:,} h {rest} min" if rest else f"{hours:,} h"


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers in a range, at most ``most`` of them: 0, 0.5, 1, 1.5."""
    if not high > low:
        return [low]
    step = 10 ** math.floor(math.log10((high - low) / most))
    for factor in (1, 2, 2.5, 5, 10, 20):
        first = math.ceil(low / (step * factor) - 1e-9)
        last = math.floor(high / (step * factor) + 1e-9)
        if last - first + 1 <= most:
            break
    # Rounded, since 3 * 0.1 is not a whole number of tenths.
    size = step * factor
    digits = max(0, 2 - math.floor(math.log10(size)))
    return [round(index * size, digits) for index in range(first, last + 1)] or [low]


def time_unit(seconds: float) -> tuple[float, str]:
    """The best unit for a stretch of time: its seconds, and its name."""
    for size, name in ((2 * 86400.0, "hours"), (7200.0, "hours"), (120.0, "minutes")):
        if seconds >= size:
            return (3600.0, name) if name == "hours" else (60.0, name)
    return (1.0, "seconds") if seconds >= 1 else (1e-3, "milliseconds")


class Curve(NamedTuple):
    """Points that belong together.

    Attributes:
        name: in the legend.
        points: (x, y), by x; a y that is not finite is a gap.
        place: among the curves of a chart; all but the first are dashed.
    """

    name: str
    points: Sequence[tuple[float, float]]
    place: int = 0

    @property
    def look(self) -> str:
        """The classes of the style for it."""
        return f"c{self.place % 4}{' dashed' if self.place else ''}"


def chart(title: str, curves: Sequence[Curve], *, x_name: str, whole: bool = False) -> str:
    """A chart of one curve or more; empty if they have no finite point.

    Args:
        title: shown above it.
        curves: what to draw.
        x_name: what x is, with its unit.
        whole: whether x are whole numbers.
    """
    shown = [c._replace(points=_drawable(c.points)) for c in curves]
    finite = [(x, y) for c in shown for x, y in c.points if math.isfinite(y)]
    if not finite:
        return ""
    left, right = min(x for x, _ in finite), max(x for x, _ in finite)
    if not right > left:
        left, right = left - 0.5, right + 0.5
    low, high = min(y for _, y in finite), max(y for _, y in finite)
    if not high - low > SMALLEST:
        low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
    else:
        low, high = low - 0.04 * (high - low), high + 0.04 * (high - low)
    xs = [x for x in ticks(left, right, 6) if not whole or x == int(x)]
    # If all values are the same, there is only one to label.
    ys = ticks(low, high, 5) if len({y for _, y in finite}) > 1 else [finite[0][1]]

    def place(x: float, y: float) -> str:
        across, down = (x - left) / (right - left), (high - y) / (high - low)
        return f"{short(across * WIDTH)} {short(down * HEIGHT)}"

    grid = "".join(f'<path class="grid" d="M{place(left, y)}h{WIDTH}"/>' for y in ys)
    lines = "".join(_line(curve, place, x_name) for curve in shown)
    y_labels = "".join(
        f'<span style="bottom:{100 * (y - low) / (high - low):.2f}%">{_tick(y, ys)}</span>'
        for y in ys
    )
    x_labels = "".join(_x_label(x, (x - left) / (right - left), xs) for x in xs)
    named = "".join(
        f'<span class="key"><i class="line {c.look}"></i>{text(c.name, 60)}</span>' for c in shown
    )
    legend = f'<div class="legend">{named}</div>' if len(shown) > 1 else ""
    return (
        f'<figure class="chart"><figcaption>{text(title, 80)}</figcaption>{legend}'
        f'<div class="plot"><div class="y">{y_labels}</div><div class="area">'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{text(title, 80)}">{grid}{lines}</svg></div>'
        f'<div class="x">{x_labels}</div><div class="x-name">{text(x_name)}</div></div></figure>'
    )


def _drawable(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    some = points[:: math.ceil(len(points) / POINTS) or 1]
    return [(x, y if abs(y) < LARGEST else math.nan) for x, y in some]


def _line(curve: Curve, place: Callable[[float, float], str], x_name: str) -> str:
    path, dots, pen = [], [], "M"
    for x, y in curve.points:
        if not math.isfinite(y):
            pen = "M"
            continue
        path.append(f"{pen}{place(x, y)}")
        says = text(f"{x_name} {number(x)}: {curve.name[:60]} {number(y, 4)}")
        dots.append(
            f'<path class="dot {curve.look}" d="M{place(x, y)}h.01"><title>{says}</title></path>'
        )
        pen = "L"
    drawn = f'<path class="curve {curve.look}" d="{"".join(path)}"/>'
    return drawn + ("".join(dots) if len(curve.points) <= DOTS else "")


def axis(seconds: float) -> tuple[str, str]:
    """The labels under a stretch of time that begins at 0, and their unit."""
    size, name = time_unit(seconds)
    xs = ticks(0, seconds / size, 6)
    return "".join(_x_label(x, x * size / seconds, xs) for x in xs), name


def _x_label(x: float, share: float, xs: Sequence[float]) -> str:
    # The first and the last one end where the plot does.
    edge = " class=first" if share < 0.02 else " class=last" if share > 0.98 else ""
    return f'<span style="left:{100 * share:.2f}%"{edge}>{_tick(x, xs)}</span>'


def _tick(value: float, all_of_them: Sequence[float]) -> str:
    """A tick's number, with enough digits to tell it from its neighbours."""
    if len(all_of_them) < 2:
        return number(value, 4)
    if max(map(abs, all_of_them)) >= 1e5:
        return count(value).replace(" ", "\u202f")
    return f"{value:,.10g}".replace("-", "−")


def short(value: float) -> str:
    """A coordinate, with no more digits than are visible."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
