"""Draws the curves of time_to_accuracy.py; matplotlib comes with ``sparkdl-torch[examples]``.

``python accuracy_plot.py RESULT.json PICTURE`` draws them again from the benchmark's last line. The
background is transparent and all colours are of medium brightness, so that the picture can be read
on a light page and on a dark one.
"""

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from accuracy_curves import crossing
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

INK, FAINT = "#767e8a", "#767e8a59"
LOOKS: dict[str, tuple[str, str, str]] = {
    "sparkdl": ("sparkdl, ParameterAveraging", "#2b7de9", "-"),
    "sparkdl_all_reduce": ("sparkdl, GradientAllReduce", "#0e9aa7", "-"),
    "one_process": ("one process, rows collected", INK, "--"),
    "averaging_loop": ("loop by hand, its best case", "#d9661f", "-"),
    "averaging_frame": ("loop by hand, on a DataFrame", "#c2902a", "-"),
    "elephas": ("elephas", "#b455c8", "-"),
    "torch_distributor": ("TorchDistributor, DDP", "#d8496a", "-"),
}
"""Name, colour and stroke; contenders not listed, like ours in another session, are not drawn."""
PANELS = {"First fit of a session": slice(1), "Later fits": slice(1, None)}
LOWEST = 0.7
FIGURE_SPACE = "\u2007"
"""A space as wide as a digit."""

Runs = Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]


def draw(runs: Runs, wanted: float, path: Path) -> None:
    """Writes the picture.

    Args:
        runs: by contender, the sessions, each a list of fits with their ``curve``.
        wanted: the accuracy to reach.
        path: where to write; the suffix determines the format.
    """
    style = {
        "font.size": 10.5,
        "font.family": "sans-serif",
        "svg.hashsalt": "time-to-accuracy",  # otherwise every run names its shapes differently
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
        "axes.edgecolor": INK,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9, 6.6), layout="constrained")
        panels = figure.subplots(len(PANELS), sharex=True)
        for axes, (title, part) in zip(panels, PANELS.items(), strict=True):
            fits = {
                name: [fit["curve"] for session in runs[name] for fit in session[part]]
                for name in LOOKS
                if name in runs
            }
            _panel(axes, title, fits, wanted)
        panels[-1].set_xlabel("seconds since fit() was called")
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, transparent=True, dpi=160, metadata=metadata)


def _panel(axes: Axes, title: str, fits: Mapping[str, Sequence[Any]], wanted: float) -> None:
    """Draws one kind of fit: all curves faint, the median, with its crossing, in full colour."""
    order = {}
    for name, curves in fits.items():
        _, colour, stroke = LOOKS[name]
        ranked = sorted(curves, key=lambda curve: _seconds(curve, wanted))
        middle = ranked[(len(ranked) - 1) // 2]
        there = crossing(middle, wanted)
        order[name] = statistics.median(_seconds(curve, wanted) for curve in curves)
        for curve in curves:
            width, opacity = (2.2, 1.0) if curve is middle else (0.9, 0.3)
            seconds, accuracies = zip(*curve, strict=True)
            axes.plot(seconds, accuracies, stroke, color=colour, linewidth=width, alpha=opacity)
        if there is not None:
            axes.plot(there, dict(middle)[there], "o", color=colour, markersize=6.5)
    axes.axhline(wanted, color=INK, linewidth=0.9, linestyle=(0, (2, 3)))
    axes.set_xscale("log")
    axes.set_ylim(LOWEST, 0.99)
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.set_ylabel("test accuracy")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.set_yticks([0.7, 0.8, 0.9, wanted])
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelbottom=True)
    axes.grid(axis="x", color=FAINT, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    lines, labels = [], []
    for name in sorted(order, key=order.__getitem__):
        label, colour, stroke = LOOKS[name]
        lines.append(Line2D([], [], color=colour, linestyle=stroke, linewidth=2.2))
        reached = f"{order[name]:.1f} s" if math.isfinite(order[name]) else "never"
        labels.append(f"{reached.rjust(6, FIGURE_SPACE)}   {label}")
    axes.legend(
        lines,
        labels,
        title=f"to {wanted:.0%}",
        alignment="left",
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
    )


def _seconds(curve: Sequence[tuple[float, float]], wanted: float) -> float:
    seconds = crossing(curve, wanted)
    return math.inf if seconds is None else seconds


def main() -> None:
    """Draws a result that was written to a file."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("result", type=Path, help="output of time_to_accuracy.py")
    options.add_argument("picture", type=Path)
    chosen = options.parse_args()
    detail = json.loads(chosen.result.read_text().strip().splitlines()[-1])["detail"]
    draw(detail["fits"], detail["accuracy"], chosen.picture)


if __name__ == "__main__":
    main()
