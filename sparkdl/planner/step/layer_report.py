"""What ``layer_balance`` has found: a table, words, and the fastest ``hybrid=`` setting."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparkdl.errors import ConfigError
from sparkdl.planner.links import Link
from sparkdl.planner.step.balance import (
    Layer,
    Step,
    best_exchange,
    best_groups,
    by_data,
    exchange,
    step,
)
from sparkdl.strategies import Hybrid

GAIN = 0.99
"""A split step / one of plain all-reduce, from which on a split is not worth naming."""

TRIED = 50
"""Patterns that are tried, those with the most gradients: a model may have thousands of layers."""


def fastest_split(
    layers: Sequence[Layer], batch_size: int, workers: int, compute_s: float, link: Link
) -> tuple[Hybrid | None, Step]:
    """The layers and groups with which a step is fastest, and that step.

    It tries every number of groups with all ``nn.Linear`` layers, with those of each module around
    some of them, and with each alone, up to ``TRIED``. Layers are taken to compute as long as ever.

    Args:
        layers: from the input to the output.
        batch_size: rows of a worker's minibatch.
        workers: how many there are.
        compute_s: seconds in which a worker computes its minibatch.
        link: a worker's.

    Returns:
        None and the step of plain all-reduce if nothing gains a hundredth.
    """
    rows = batch_size * workers
    plain = by_data(layers, rows, workers)
    best, found = None, step(layers, plain, workers, compute_s, link)
    least = GAIN * found.seconds
    for pattern in _patterns(layers):
        chosen = [each.splits and fnmatch.fnmatchcase(each.name, pattern) for each in layers]
        for groups in (each for each in range(1, workers) if workers % each == 0):
            sent = [
                exchange(layer, rows, workers, groups) if is_chosen else whole
                for layer, is_chosen, whole in zip(layers, chosen, plain, strict=True)
            ]
            tried = step(layers, sent, workers, compute_s, link)
            if tried.seconds < least:
                best, found, least = Hybrid(pattern, groups=groups), tried, tried.seconds
    return best, found


def _patterns(layers: Sequence[Layer]) -> list[str]:
    """Patterns that name different layers, those with the most gradients first."""
    sizes = {each.name: each.gradient_bytes for each in layers if each.splits}
    around = {name.rsplit(".", up)[0] for name in sizes for up in range(1, name.count(".") + 1)}
    folders = sorted((f"{each}.*" for each in around), key=lambda each: (-each.count("."), each))
    found: dict[tuple[str, ...], str] = {}
    for pattern in [*sizes, *folders, "*"]:
        found.setdefault(tuple(fnmatch.filter(sizes, pattern)), pattern)
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

    def step(self, workers: int | None = None) -> Step:
        """A step of ``GradientAllReduce``.

        Args:
            workers: how many, each with as many rows; None for those of the table.
        """
        n = self.workers if workers is None else workers
        if n < 1:
            raise ConfigError(f"workers must be >= 1, got {n}")
        sent = by_data(self.layers, self.batch_size * n, n)
        return step(self.layers, sent, n, self.compute_s, self.link)

    @property
    def split(self) -> Hybrid | None:
        """What ``GradientAllReduce(hybrid=...)`` gains most with, if it gains something."""
        return self._fastest()[0]

    def _fastest(self) -> tuple[Hybrid | None, Step]:
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
        found = []
        for layer, wait in zip(self.layers, self.step().bubbles_s, strict=True):
            sent, best = exchange(layer, rows, n, n).data, best_exchange(layer, rows, n)
            flop = layer.flop * self.batch_size
            found.append(
                {
                    "layer": layer.name,
                    "kind": layer.kind,
                    "flop": flop,
                    "gradient_bytes": layer.gradient_bytes,
                    "sent_bytes": sent,
                    "flop_a_byte": flop / sent if sent else math.inf,
                    "bubble_ms": wait * 1e3,
                    "best": {n: "data", 1: "model"}.get(best.groups, "hybrid"),
                    "groups": best.groups,
                    "best_bytes": best.data + best.model,
                    "optimal_groups": best_groups(layer, rows, n) if layer.splits else math.nan,
                }
            )
        return pd.DataFrame(found)

    def explain(self) -> str:
        """What a step takes and waits for, in words."""
        now, (split, best) = self.step(), self._fastest()
        lines = [
            f"{self.workers} workers with {self.batch_size} rows each at {self.link}: a step takes "
            f"{now.seconds * 1e3:.3g} ms, {now.compute_s * 1e3:.3g} ms of it computing "
            f"(efficiency {now.efficiency:.0%})."
        ]
        slow = self.table.nlargest(3, "bubble_ms").query("bubble_ms > 0")
        if len(slow):
            waits = ", ".join(f"{r.layer} {r.bubble_ms:.3g} ms" for r in slow.itertuples())
            lines.append(f"It waits longest for {waits}.")
        if split is not None:
            lines.append(f"With hybrid={split} it takes {best.seconds * 1e3:.3g} ms.")
        measured = f"measured on {self.machine}" if self.machine else "as given"
        return " ".join([*lines, f"The time of computing is {measured}.", *self.notes])

    def __str__(self) -> str:
        table = self.table.to_string(index=False, float_format="{:.4g}".format)
        return f"{self.explain()}\n{table}"

    def _repr_html_(self) -> str:
        from html import escape

        table = self.table.to_html(index=False, float_format="{:.4g}".format)
        return f"<p>{escape(self.explain())}</p>{table}"
