"""The kept results of ``strategies.py``, their table, and their picture."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

WORKERS = 4
"""Workers of the trainings in the table and the picture."""
INK, FAINT = "#767e8a", "#767e8a59"
COLOURS = {
    "all-reduce": "#d8496a",
    "PowerSGD": "#d9661f",
    "averaging, executors": "#2b7de9",
    "elastic, executors": "#7a6ff0",
    "DiLoCo": "#2f9e58",
    "streaming DiLoCo": "#0e9aa7",
    "ASP": "#b455c8",
    "threshold, executors": "#c2902a",
    "gossip": "#a0705a",
}

Key = tuple[str, int, int, str, int]
"""Task, Mbit/s, workers, strategy, seed."""


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        key: identifies it.
        points: before the first epoch and after each one: rows, seconds, MB through the busiest
            link in its busier direction, loss on held-out rows.
    """

    key: Key
    points: Sequence[Sequence[float]]

    def __str__(self) -> str:
        rows, seconds, megabytes, loss = self.points[-1]
        return f"{self.key}: {rows:,} rows, {seconds:.2f} s, {megabytes:.1f} MB, loss {loss:.3f}"

    def to(self, target: float) -> Sequence[float] | None:
        """The first point at which the loss is no more than a target; None if there is none."""
        return next((point for point in self.points if point[3] <= target), None)


@dataclass(frozen=True)
class Best:
    """The strategy that was first at a target.

    Attributes:
        name: its name.
        ratio: its seconds over those of all-reduce.
        seconds: the seconds of each strategy; None where it never got there.
    """

    name: str
    ratio: float
    seconds: Mapping[str, float | None]


def read(path: Path) -> dict[Key, Run]:
    """Reads the kept trainings, one per line; none if there is no file."""
    if not path.exists():
        return {}
    kept = {}
    for line in path.read_text().splitlines():
        found = json.loads(line)
        kept[tuple(found["key"])] = Run(tuple(found["key"]), found["points"])
    return kept


def write(path: Path, runs: Iterable[Run]) -> None:
    """Keep trainings, sorted so that a diff shows what is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"key": run.key, "points": run.points}, separators=(",", ":"))
        for run in sorted(runs, key=lambda run: run.key)
    ]
    path.write_text("\n".join(lines) + "\n")


def seconds_to(
    runs: Iterable[Run], task: str, link: int, target: float, workers: int = 4
) -> dict[str, float | None]:
    """Median seconds of each strategy to a target; None if half of its runs never got there."""
    by_name: dict[str, list[float]] = {}
    for run in runs:
        if run.key[:3] == (task, link, workers):
            point = run.to(target)
            by_name.setdefault(run.key[3], []).append(math.inf if point is None else point[1])
    medians = {name: statistics.median(times) for name, times in by_name.items()}
    return {name: None if math.isinf(time) else time for name, time in medians.items()}


def best_over_all_reduce(
    runs: Sequence[Run], task: str, link: int, targets: Mapping[str, float]
) -> Best:
    """The first strategy at a task's target, against all-reduce.

    The ratio is infinite if none gets there. If all-reduce does not, the ratio is to the time that
    it trained in vain, and so too large.
    """
    seconds = seconds_to(runs, task, link, targets[task])
    there = {name: time for name, time in seconds.items() if time is not None}
    last = [run.points[-1][1] for run in runs if run.key[:4] == (task, link, WORKERS, "all-reduce")]
    if not there or not last:
        return Best("nobody", math.inf, seconds)
    name = min(there, key=there.__getitem__)
    return Best(name, there[name] / there.get("all-reduce", max(last)), seconds)


def table(runs: Sequence[Run], names: Sequence[str], targets: Mapping[str, float]) -> str:
    """A table in Markdown: losses after equally many rows, and MB and seconds to the targets.

    Losses and MB are those on the fastest links, where the most rows are trained on in time.

    Args:
        runs: the runs; those without four workers are left out.
        names: the names of the strategies, in order.
        targets: the target of each task.
    """
    links = sorted({run.key[1] for run in runs})
    heads, columns = ["strategy"], [list(names)]
    for task, target in targets.items():
        mine = [run for run in runs if run.key[0] == task and run.key[2] == WORKERS]
        if not mine:
            continue
        fastest = [run for run in mine if run.key[1] == max(links)]
        rows = min((run.points[-1][0] for run in fastest), default=0)
        heads += [
            f"{task}: loss after {rows:,.0f} rows at {_speed(max(links))}",
            f"MB to {target:g} there",
        ]
        losses = [(run.key[3], _loss_after(run, rows)) for run in fastest]
        megabytes = [(run.key[3], _of(run.to(target), 2)) for run in fastest]
        columns += [_column(losses, names, "{:.3f}"), _column(megabytes, names, "{:.1f}")]
        for link in links:
            seconds = [(run.key[3], _of(run.to(target), 1)) for run in mine if run.key[1] == link]
            heads.append(f"s at {_speed(link)}")
            columns.append(_column(seconds, names, "{:.1f}"))
    lines = [heads, ["---"] * len(heads), *zip(*columns, strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table_by_workers(runs: Sequence[Run], task: str, link: int) -> str:
    """A table in Markdown: seconds that an epoch takes, by strategy and number of workers.

    Args:
        runs: the runs; strategies that ran with only one number of workers are left out.
        task: the name of the task.
        link: the speed of the links, in Mbit/s.
    """
    mine = [run for run in runs if run.key[:2] == (task, link)]
    counts = sorted({run.key[2] for run in mine})
    names = [
        name
        for name in dict.fromkeys(run.key[3] for run in mine)
        if {run.key[2] for run in mine if run.key[3] == name} == set(counts)
    ]
    columns = [
        _column(
            [(run.key[3], _seconds_an_epoch(run)) for run in mine if run.key[2] == count],
            names,
            "{:.2f}",
        )
        for count in counts
    ]
    heads = ["strategy", *(f"{count} workers" for count in counts)]
    lines = [heads, ["---"] * len(heads), *zip(names, *columns, strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _seconds_an_epoch(run: Run) -> float:
    """Seconds without the first epoch, which includes sending the center; infinity if no other."""
    if len(run.points) < 3:
        return math.inf
    return (run.points[-1][1] - run.points[1][1]) / (len(run.points) - 2)


def insert(page: Path, mark: str, text: str) -> None:
    """Replace the text between a page's two comments that contain a mark."""
    begin, end = f"<!-- begin: {mark} -->\n", f"<!-- end: {mark} -->"
    before, found, rest = page.read_text().partition(begin)
    _, found_too, after = rest.partition(end)
    if not found or not found_too:
        raise ValueError(f"{page} has no lines {begin.strip()} and {end}")
    page.write_text(f"{before}{begin}\n{text}\n\n{end}{after}")


def _column(values: Iterable[tuple[str, float]], names: Iterable[str], pattern: str) -> list[str]:
    """Medians by name; a dash where there are no values, or half of them are infinite."""
    by_name: dict[str, list[float]] = {}
    for name, value in values:
        by_name.setdefault(name, []).append(value)
    medians = [statistics.median(by_name.get(name, [math.inf])) for name in names]
    return ["-" if math.isinf(middle) else pattern.format(middle) for middle in medians]


def _speed(link: int) -> str:
    return f"{link // 1000} Gbit/s" if link >= 1000 else f"{link} Mbit/s"


def _of(point: Sequence[float] | None, index: int) -> float:
    return math.inf if point is None else point[index]


def _loss_after(run: Run, rows: float) -> float:
    """The loss after the last epoch within a number of rows."""
    return [point[3] for point in run.points if point[0] <= rows][-1]


def draw(runs: Sequence[Run], targets: Mapping[str, float], path: Path) -> None:
    """Writes the picture: one column per task; loss by rows, by seconds and by MB.

    The background is transparent and all colours are of medium brightness, for light pages and
    dark ones. Strategies without a colour of their own are drawn faintly.

    Args:
        runs: the runs; those without four workers are left out. The first seed is drawn.
        targets: the target of each task.
        path: where to write; the suffix determines the format.
    """
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    first = [run for run in runs if run.key[2] == WORKERS and run.key[4] == 0]
    fastest, slowest = max(run.key[1] for run in first), min(run.key[1] for run in first)
    axes_of = {
        "rows trained on": (0, fastest),
        f"seconds at {_speed(slowest)}": (1, slowest),
        "MB through the busiest link": (2, slowest),
    }
    style = {
        "font.size": 9.5,
        "font.family": "sans-serif",
        "svg.hashsalt": "strategies",  # otherwise every run names its shapes differently
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
        "axes.edgecolor": INK,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(10.5, 9), layout="constrained")
        panels = figure.subplots(len(axes_of), len(targets), sharey="col", squeeze=False)
        for row, (label, (index, link)) in zip(panels, axes_of.items(), strict=True):
            for axes, (task, target) in zip(row, targets.items(), strict=True):
                for run in first:
                    if run.key[:2] == (task, link):
                        colour, width = (
                            COLOURS.get(run.key[3], FAINT),
                            0.7 + (run.key[3] in COLOURS),
                        )
                        points = run.points[1 if index == 2 else 0 :]
                        axes.plot(
                            [point[index] for point in points],
                            [point[3] for point in points],
                            color=colour,
                            linewidth=width,
                            zorder=2 + (run.key[3] in COLOURS),
                        )
                axes.axhline(target, color=INK, linewidth=0.9, linestyle=(0, (2, 3)))
                axes.set_yscale("log")
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
                axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                axes.yaxis.set_minor_formatter(NullFormatter())
                axes.set_xlabel(label)
                if index == 2:
                    axes.set_xscale("log")
                    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
                    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                    axes.xaxis.set_minor_formatter(NullFormatter())  # its labels overlap
                axes.spines[["top", "right"]].set_visible(False)
        for axes, task in zip(panels[0], targets, strict=True):
            axes.set_title(task, loc="left", fontsize=12, fontweight="bold")
        for row in panels:
            row[0].set_ylabel("loss on held-out rows")
        lines = [Line2D([], [], color=colour, linewidth=2) for colour in COLOURS.values()]
        figure.legend(
            [*lines, Line2D([], [], color=FAINT)],
            [*COLOURS, "all others"],
            loc="outside lower center",
            ncols=5,
            frameon=False,
        )
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, transparent=True, dpi=160, metadata=metadata)
