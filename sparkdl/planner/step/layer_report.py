"""What ``layer_balance`` has found, as a table, a drawing and in words.

Which fully connected layers groups of workers should compute together, by what a step takes.

``GradientAllReduce(hybrid=Hybrid(layers, groups))`` exchanges the gradients of a layer between the
groups, as Das et al. 2016 do (``sparkdl.planner.step.balance``), but gives back to each worker the
outputs of its own rows. With B rows of all workers, in G groups of M = N / G, a worker sends for a
layer and waits for

    model(G)  =  (M - 1) / M * 2 * (input bytes + output bytes / M) * B / G
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparkdl.errors import ConfigError
from sparkdl.figures import new_figure
from sparkdl.planner.links import Link
from sparkdl.planner.step.balance import (
    Exchange,
    Layer,
    Step,
    best_exchange,
    best_groups,
    by_data,
    by_layer,
    exchange,
    step,
)

GAIN = 0.99
"""A split step / one of plain all-reduce, from which on a split is not worth naming."""

TRIED = 50
"""Patterns that are tried, those with the most gradients: a model may have thousands of layers."""


@dataclass(frozen=True)
class Split:
    """A setting of ``GradientAllReduce``, which ``str`` shows.

    Attributes:
        layers: the pattern of their names.
        groups: how many groups of workers.
        step: what a step takes with it.
    """

    layers: str
    groups: int
    step: Step

    def __str__(self) -> str:
        return f"hybrid=Hybrid({self.layers!r}, groups={self.groups})"


def split_exchange(layer: Layer, rows: int, workers: int, groups: int) -> Exchange:
    """What a worker sends for a layer that groups of workers compute together.

    Args:
        layer: the layer.
        rows: of all workers' minibatches together.
        workers: how many there are.
        groups: a divisor of it.
    """
    given_back = layer.output_bytes * groups / workers
    return exchange(
        replace(layer, input_bytes=layer.input_bytes + given_back), rows, workers, groups
    )


def fastest_split(
    layers: Sequence[Layer], batch_size: int, workers: int, compute_s: float, link: Link
) -> Split | None:
    """The layers and groups with which a step is fastest; None if none gains a hundredth.

    It tries every number of groups with all ``nn.Linear`` layers, with those of each module around
    some of them, and with each alone, up to ``TRIED``. Layers are taken to compute as long as ever.

    Args:
        layers: from the input to the output.
        batch_size: rows of a worker's minibatch.
        workers: how many there are.
        compute_s: seconds in which a worker computes its minibatch.
        link: a worker's.
    """
    rows = batch_size * workers
    plain = by_data(layers, rows, workers)
    best: Split | None = None
    least = GAIN * step(layers, plain, workers, compute_s, link).seconds
    for pattern in _patterns(layers):
        chosen = [_fits(each) and fnmatch.fnmatchcase(each.name, pattern) for each in layers]
        for groups in (each for each in range(1, workers) if workers % each == 0):
            sent = [
                split_exchange(layer, rows, workers, groups) if is_chosen else whole
                for layer, is_chosen, whole in zip(layers, chosen, plain, strict=True)
            ]
            found = step(layers, sent, workers, compute_s, link)
            if found.seconds < least:
                best, least = Split(pattern, groups, found), found.seconds
    return best


def _fits(layer: Layer) -> bool:
    return layer.kind == "Linear" and layer.splits


def _patterns(layers: Sequence[Layer]) -> list[str]:
    """Patterns that name different layers, those with the most gradients first."""
    sizes = {each.name: each.gradient_bytes for each in layers if _fits(each)}
    around = {".".join(name.split(".")[:depth]) for name in sizes for depth in range(9)}
    found: dict[tuple[str, ...], str] = {}
    folders = sorted(around, key=lambda each: (-each.count("."), not each, each))
    for pattern in [*sizes, *(f"{each}.*" if each else "*" for each in folders)]:
        if matched := tuple(fnmatch.filter(sizes, pattern)):
            found.setdefault(matched, pattern)
    most = sorted(found, key=lambda matched: -sum(sizes[name] for name in matched))
    return [found[matched] for matched in most[:TRIED]]


@dataclass(frozen=True)
class LayerBalance:
    """What ``layer_balance`` has found; a notebook shows it as a table.

    Attributes:
        layers: from the input to the output.
        batch_size: rows of a worker's minibatch.
        workers: how many there are.
        link: a worker's.
        compute_s: seconds in which a worker computes its minibatch.
        machine: where that was measured.
        notes: what the figures leave out.
    """

    layers: tuple[Layer, ...]
    batch_size: int
    workers: int
    link: Link
    compute_s: float
    machine: str
    notes: tuple[str, ...] = ()

    def step(self, workers: int | None = None, *, hybrid: bool = False) -> Step:
        """A step.

        Args:
            workers: how many; None for those of the table.
            hybrid: whether each layer is exchanged as it sends least, rather than all as
                ``GradientAllReduce`` does.
        """
        n = self.workers if workers is None else workers
        if n < 1:
            raise ConfigError(f"workers must be >= 1, got {n}")
        choose = by_layer if hybrid else by_data
        sent = choose(self.layers, self.batch_size * n, n)
        return step(self.layers, sent, n, self.compute_s, self.link)

    @property
    def split(self) -> Split | None:
        """What ``GradientAllReduce(hybrid=...)`` gains most with, if it gains something."""
        return fastest_split(self.layers, self.batch_size, self.workers, self.compute_s, self.link)

    @property
    def efficiency(self) -> float:
        """What share of a step of ``GradientAllReduce`` is computing."""
        return self.step().efficiency

    @property
    def table(self) -> Any:
        """The layers as a pandas DataFrame, for one worker and step.

        ``flop``; ``gradient_bytes``, ``sent_bytes`` by data parallelism and ``flop_a_byte`` of
        these; ``bubble_ms``, what the layer adds to the wait; ``best`` of data, model and hybrid,
        the one that sends least, its ``groups`` and ``best_bytes``; ``optimal_groups`` is G*.
        """
        import pandas as pd

        rows, n = self.batch_size * self.workers, self.workers
        waits = self.step().bubbles_s
        found = []
        for layer, wait in zip(self.layers, waits, strict=True):
            sent, best = exchange(layer, rows, n, n), best_exchange(layer, rows, n)
            flop, sent_bytes = layer.flop * self.batch_size, sent.data + sent.model
            found.append(
                {
                    "layer": layer.name,
                    "kind": layer.kind,
                    "flop": flop,
                    "gradient_bytes": layer.gradient_bytes,
                    "sent_bytes": sent_bytes,
                    "flop_a_byte": flop / sent_bytes if sent_bytes else math.inf,
                    "bubble_ms": wait * 1e3,
                    "best": {n: "data", 1: "model"}.get(best.groups, "hybrid"),
                    "groups": best.groups,
                    "best_bytes": best.data + best.model,
                    "optimal_groups": best_groups(layer, rows, n) if layer.splits else math.nan,
                }
            )
        return pd.DataFrame(found)

    def scaling(
        self, workers: Sequence[int] = (1, 2, 4, 8, 16, 32, 64), *, hybrid: bool = False
    ) -> Any:
        """A pandas DataFrame of ``workers``, ``step_ms``, ``speedup`` and ``efficiency``.

        Args:
            workers: how many, each with as many rows a step.
            hybrid: as for ``step``.
        """
        import pandas as pd

        steps = [self.step(n, hybrid=hybrid) for n in workers]
        found = [
            (n, s.seconds * 1e3, n * s.efficiency, s.efficiency)
            for n, s in zip(workers, steps, strict=True)
        ]
        return pd.DataFrame(found, columns=["workers", "step_ms", "speedup", "efficiency"])

    def plot(self, workers: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)) -> Any:
        """Draw the speed-up with each number of workers, and what each layer's best would give.

        Args:
            workers: how many, each with as many rows a step.

        Returns:
            matplotlib's figure.

        Raises:
            SetupError: matplotlib is not installed.
        """
        figure = new_figure(5.2, 3.8)
        axes = figure.subplots()
        for hybrid, name in ((False, "data parallel"), (True, "each layer as it sends least")):
            found = self.scaling(workers, hybrid=hybrid)
            axes.plot(found.workers, found.speedup, marker="o", label=name)
        axes.plot(workers, workers, color="black", linewidth=0.8, linestyle=":")
        axes.set(xlabel="workers", ylabel="times as fast as one", title=f"Speed-up at {self.link}")
        axes.legend()
        return figure

    def explain(self) -> str:
        """What a step takes and waits for, in words."""
        now, best, table = self.step(), self.step(hybrid=True), self.table
        lines = [
            f"{self.workers} workers with {self.batch_size} rows each at {self.link}: a step takes "
            f"{now.seconds * 1e3:.3g} ms, {now.compute_s * 1e3:.3g} ms of it computing "
            f"(efficiency {now.efficiency:.0%})."
        ]
        slow = table.nlargest(3, "bubble_ms")
        slow = slow[slow.bubble_ms > 0]
        if len(slow):
            waits = ", ".join(f"{r.layer} {r.bubble_ms:.3g} ms" for r in slow.itertuples())
            lines.append(f"It waits longest for {waits}.")
        if best.seconds < now.seconds * 0.99:
            other = table[(table.best != "data")].nlargest(5, "sent_bytes")
            named = ", ".join(f"{r.layer} as {r.best} ({r.groups})" for r in other.itertuples())
            lines.append(
                f"Were each layer exchanged as it sends least, {named} among them, it would take "
                f"{best.seconds * 1e3:.3g} ms ({best.efficiency:.0%})."
            )
        if (split := self.split) is not None:
            lines.append(f"With {split} it takes {split.step.seconds * 1e3:.3g} ms.")
        measured = f"measured on {self.machine}" if self.machine else "as given"
        return " ".join([*lines, f"The time of computing is {measured}.", *self.notes])

    def __str__(self) -> str:
        return (
            f"{self.explain()}\n{self.table.to_string(index=False, float_format='{:.4g}'.format)}"
        )

    def _repr_html_(self) -> str:
        from html import escape

        table = self.table.to_html(index=False, float_format="{:.4g}".format)
        return f"<p>{escape(self.explain())}</p>{table}"
