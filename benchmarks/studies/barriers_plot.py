"""Draws the results of probabilistic_barriers.py; needs ``sparkdl-torch[examples]``.

``python barriers_plot.py RESULT PICTURE``, with the benchmark's output in a file. The background is
transparent, and all colours are of medium brightness, for light pages and for dark ones.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import matplotlib
from accuracy_plot import FAINT, INK
from matplotlib.figure import Figure
from probabilistic_barriers import BOLD, SAMPLES, SECONDS, SMALL, WORKERS

from sparkdl.strategies import BSP, PBSP, PSSP, SSP, Barrier

PANELS = {
    "steps": f"steps in {SECONDS:g} s (median)",
    "missing": "windows missing of each other worker",
    "error": f"error after {SECONDS:g} s",
}
OTHERS: dict[Barrier, tuple[str, str]] = {
    SSP(4): ("SSP, s = 4", "#d9661f"),
    PSSP(10, 4): ("PSSP, samples of 10, s = 4", "#b455c8"),
}


def draw(found: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Writes the picture.

    Args:
        found: by barrier, the results of a run of ``WORKERS``.
        path: where to write; the suffix determines the format.
    """
    curve = [found[str(PBSP(size))] for size in SAMPLES] + [found[str(BSP())]]
    places = range(len(curve))
    style = {
        "font.size": 10.5,
        "font.family": "sans-serif",
        "svg.hashsalt": "barriers",  # otherwise every run names its shapes differently
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
        "axes.edgecolor": INK,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(10, 3.8), layout="constrained")
        panels = figure.subplots(1, len(PANELS))
        for axes, (name, title) in zip(panels, PANELS.items(), strict=True):
            axes.plot(
                places,
                [each[name] for each in curve],
                "o-",
                color="#2b7de9",
                label=f"PBSP, learning rate {SMALL:g}",
            )
            for barrier, (label, colour) in OTHERS.items():
                axes.axhline(found[str(barrier)][name], color=colour, linestyle="--", label=label)
            axes.set_title(title, loc="left", fontsize=11)
            axes.set_xticks(places, [*map(str, SAMPLES), "all"])
            axes.set_xlabel(f"sample, of {WORKERS:,} workers")
            axes.grid(color=FAINT, linewidth=0.5)
            axes.spines[["top", "right"]].set_visible(False)
            if name == "error":
                bold = [each["bold_error"] for each in curve]
                axes.plot(
                    places, bold, "s:", color="#2b7de9", label=f"PBSP, learning rate {BOLD:g}"
                )
                axes.set_yscale("log")
            else:
                axes.set_ylim(bottom=0)
        lines, labels = panels[-1].get_legend_handles_labels()
        figure.legend(lines, labels, loc="outside lower center", ncols=len(lines), frameon=False)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, transparent=True, dpi=160, metadata=metadata)


def main() -> None:
    """Draws a result that was written to a file."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("result", type=Path, help="output of probabilistic_barriers.py")
    options.add_argument("picture", type=Path)
    chosen = options.parse_args()
    detail = json.loads(chosen.result.read_text().strip().splitlines()[-1])["detail"]
    draw(detail["slowed"], chosen.picture)


if __name__ == "__main__":
    main()
