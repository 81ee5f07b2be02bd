"""What ``layer_balance`` has found, as a table, a drawing and in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparkdl.errors import ConfigError
from sparkdl.figures import new_figure
from sparkdl.planner.links import Link
from sparkdl.planner.step.balance import (
    Layer,
    Step,
    best_exchange,
    best_groups,
    by_data,
    by_layer,
    exchange,
    step,
)
from sparkdl.planner.step.split import Split, fastest_split


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
