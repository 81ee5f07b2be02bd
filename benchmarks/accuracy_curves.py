"""A model's test accuracy over the time of a fit: snapshots while it trains, evaluated afterwards.

The trainer writes the parameters to a file after every epoch, named by the time at which it had
them, in about a millisecond for the digits' MLP. Nothing is evaluated before the fit has returned.
Shared by time_to_accuracy.py and all its children, even elephas': hence no sparkdl or pyspark.
"""

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import digits
import numpy as np
import torch
from torch import nn

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

Curve = list[tuple[float, float]]
"""Seconds since the call of a fit, and the test accuracy of the model at that time."""
Fit = Callable[..., None]
"""``fit(data, snapshots, seed=..., **settings)``: trains, and takes a snapshot every epoch."""


def take(snapshots: Path, parameters: Iterable[np.ndarray]) -> None:
    """Saves a model as it is now.

    Args:
        snapshots: an existing folder for one fit.
        parameters: float32, in the order and shapes of ``digits.build_mlp().parameters()``.
    """
    moment = time.time()
    np.save(snapshots / f"{moment!r}.npy", np.concatenate([each.ravel() for each in parameters]))


def take_module(snapshots: Path, model: nn.Module) -> None:
    """Saves a ``digits.build_mlp()``, wrapped or not, as it is now."""
    take(snapshots, (each.detach().numpy() for each in model.parameters()))


def judged(snapshots: Path, called: float, data: Path) -> Curve:
    """Returns the accuracy of each snapshot, in chronological order.

    Args:
        snapshots: the folder in which they were taken.
        called: when the fit was called, as ``time.time()``.
        data: data set written by ``digits.write``.
    """
    model = digits.build_mlp()
    curve = []
    for path in sorted(snapshots.glob("*.npy"), key=lambda path: float(path.stem)):
        nn.utils.vector_to_parameters(torch.from_numpy(np.load(path)), model.parameters())
        seconds = float(path.stem) - called
        curve.append((round(seconds, 3), round(digits.accuracy(model, data), 4)))
    return curve


def seconds_to(curve: Sequence[tuple[float, float]], wanted: float) -> float:
    """Returns the seconds to the first snapshot that accurate; infinity if none is."""
    return next((seconds for seconds, accuracy in curve if accuracy >= wanted), math.inf)


def fits(fit: Fit, data: Path, plan: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls a fit once for each entry of a plan, and evaluates what it has trained.

    Args:
        fit: the fit of one contender.
        data: data set written by ``digits.write``.
        plan: the keyword arguments of each fit, including ``seed``.

    Returns:
        The ``seconds`` of each whole call, and its ``curve``.

    Raises:
        RuntimeError: the number of a fit's snapshots is not its ``epochs``.
    """
    measured = []
    for settings in plan:
        with tempfile.TemporaryDirectory() as folder:
            called = time.time()
            fit(data, Path(folder), **settings)
            seconds = time.time() - called
            curve = judged(Path(folder), called, data)
        if len(curve) != settings["epochs"]:
            raise RuntimeError(f"{len(curve)} snapshots of {settings['epochs']} epochs")
        measured.append({"seconds": round(seconds, 3), "curve": curve})
    return measured


def draw(runs: Mapping[str, Sequence[Any]], wanted: float, path: Path) -> None:
    """Writes the picture.

    Args:
        runs: by contender, the sessions, each a list of fits with their ``curve``.
        wanted: the accuracy to reach.
        path: where to write; the suffix determines the format.
    """
    import matplotlib
    from matplotlib.figure import Figure

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


def _panel(axes: Any, title: str, fits: Mapping[str, Sequence[Any]], wanted: float) -> None:
    """Draws one kind of fit: all curves faint, the median, with its crossing, in full colour."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    order = {}
    for name, curves in fits.items():
        _, colour, stroke = LOOKS[name]
        ranked = sorted(curves, key=lambda curve: seconds_to(curve, wanted))
        middle = ranked[(len(ranked) - 1) // 2]
        there = seconds_to(middle, wanted)
        order[name] = statistics.median(seconds_to(curve, wanted) for curve in curves)
        for curve in curves:
            width, opacity = (2.2, 1.0) if curve is middle else (0.9, 0.3)
            seconds, accuracies = zip(*curve, strict=True)
            axes.plot(seconds, accuracies, stroke, color=colour, linewidth=width, alpha=opacity)
        if math.isfinite(there):
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
