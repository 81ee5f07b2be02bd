"""Pieces of an HTML page: text that is only text, numbers with units, charts.

Shapes are drawn in SVG that is stretched to the available width; text is HTML next to them, so that
it has the same size on every screen. No script runs. Everything that we did not write goes through
``text``.
"""

from __future__ import annotations

import html
import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

LONGEST = 300
"""The most characters of a text that we did not write."""
POINTS = 300
"""The most points of a curve; if there are more, neighbours become their mean."""
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


def count(value: float, unit: str = "") -> str:
    """A count in thousands, millions and so on: 12.3 k, 4.56 M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scale = 1e3 if letter == "k" else size
            return f"{number(value / scale)} {letter}{unit}"
    return f"{number(value)} {unit}".rstrip()


def octets(value: float) -> str:
    """Bytes: 664 B, 1.23 MB."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            return f"{number(value / size)} {unit}"
    return f"{value:.0f} B"


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


@dataclass(frozen=True)
class Curve:
    """Points that belong together.

    Attributes:
        name: in the legend.
        points: (x, y), by x; a y that is not finite is a gap.
        dashed: whether it is drawn dashed.
        colour: the style's class for its colour, ``c0`` to ``c3``.
    """

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    colour: str = "c0"


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most ``POINTS`` points, each the mean of neighbours."""
    each = math.ceil(len(points) / POINTS)
    if each <= 1:
        return list(points)
    kept = []
    for start in range(0, len(points), each):
        group = points[start : start + each]
        finite = [y for _, y in group if math.isfinite(y)]
        y = sum(finite) / len(finite) if finite else math.nan
        kept.append((sum(x for x, _ in group) / len(group), y))
    return kept


def chart(
    title: str,
    curves: Sequence[Curve],
    *,
    x_name: str,
    x_range: tuple[float, float] | None = None,
    whole: bool = False,
    from_zero: bool = False,
    y_unit: str = "",
) -> str:
    """A chart of one curve or more; empty if they have no finite point.

    Args:
        title: shown above it.
        curves: what to draw.
        x_name: what x is, with its unit.
        x_range: the ends of the x axis; by default the points' range.
        whole: whether x are whole numbers.
        from_zero: whether y begins at 0.
        y_unit: of y.
    """
    shown = [Curve(c.name, _drawable(thinned(c.points)), c.dashed, c.colour) for c in curves]
    finite = [(x, y) for c in shown for x, y in c.points if math.isfinite(y)]
    if not finite:
        return ""
    left, right = x_range or (min(x for x, _ in finite), max(x for x, _ in finite))
    if not right > left:
        left, right = left - 0.5, right + 0.5
    low, high = min(y for _, y in finite), max(y for _, y in finite)
    if from_zero:
        low = min(low, 0.0)
    if not high - low > SMALLEST:
        low, high = low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5)
    else:
        low, high = (
            low - (0 if from_zero and not low else 0.04) * (high - low),
            high + 0.04 * (high - low),
        )
    xs = [x for x in ticks(left, right, 6) if not whole or x == int(x)]
    # If all values are the same, there is only one to label.
    ys = ticks(low, high, 5) if len({y for _, y in finite}) > 1 or from_zero else [finite[0][1]]

    def place(x: float, y: float) -> tuple[str, str]:
        across = (x - left) / (right - left) * WIDTH
        return short(across), short((high - y) / (high - low) * HEIGHT)

    grid = "".join(f'<path class="grid" d="M0 {place(left, y)[1]}h{WIDTH}"/>' for y in ys)
    lines = "".join(_line(curve, place, x_name) for curve in shown)
    y_labels = "".join(
        f'<span style="bottom:{100 * (y - low) / (high - low):.2f}%">{_tick(y, ys)}</span>'
        for y in ys
    )
    x_labels = "".join(_x_label(x, (x - left) / (right - left), xs) for x in xs)
    named = "".join(
        f'<span class="key"><i class="line {c.colour}{" dashed" if c.dashed else ""}"></i>'
        f"{text(c.name, 60)}</span>"
        for c in shown
    )
    legend = f'<div class="legend">{named}</div>' if len(shown) > 1 else ""
    unit = f' <span class="unit">{text(y_unit)}</span>' if y_unit else ""
    return (
        f'<figure class="chart"><figcaption>{text(title, 80)}{unit}</figcaption>{legend}'
        f'<div class="plot"><div class="y">{y_labels}</div><div class="area">'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{text(title, 80)}">{grid}{lines}</svg></div>'
        f'<div class="x">{x_labels}</div><div class="x-name">{text(x_name)}</div></div></figure>'
    )


def _drawable(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, y if abs(y) < LARGEST else math.nan) for x, y in points]


def _line(curve: Curve, place, x_name: str) -> str:  # type: ignore[no-untyped-def]
    path, pen_down = [], False
    for x, y in curve.points:
        if not math.isfinite(y):
            pen_down = False
            continue
        across, down = place(x, y)
        path.append(f"{'L' if pen_down else 'M'}{across} {down}")
        pen_down = True
    dashed = " dashed" if curve.dashed else ""
    drawn = f'<path class="curve {curve.colour}{dashed}" d="{"".join(path)}"/>'
    if len(curve.points) > DOTS:
        return drawn
    dots = []
    for x, y in curve.points:
        if math.isfinite(y):
            across, down = place(x, y)
            says = text(f"{x_name} {number(x)}: {curve.name[:60]} {number(y, 4)}")
            dots.append(
                f'<path class="dot {curve.colour}" d="M{across} {down}h.01">'
                f"<title>{says}</title></path>"
            )
    return drawn + "".join(dots)


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
    step = abs(all_of_them[1] - all_of_them[0])
    largest = max(map(abs, all_of_them))
    if largest >= 1e5:
        return count(value).replace(" ", "\u202f")
    if largest < 1e-3:
        return "0" if value == 0 else f"{value:.3g}".replace("e+0", "e").replace("e-0", "e−")
    places = max(0, -math.floor(math.log10(step) + 1e-9))
    if abs(step * 10**places - round(step * 10**places)) > 1e-6:
        places += 1  # steps of 0.25
    return f"{value:,.{places}f}".replace("-", "−")


def short(value: float) -> str:
    """A coordinate, with no more digits than are visible."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
