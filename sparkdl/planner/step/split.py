"""Which fully connected layers groups of workers should compute together, by what a step takes.

``GradientAllReduce(hybrid=Hybrid(layers, groups))`` exchanges the gradients of a layer between the
groups, as Das et al. 2016 do (``sparkdl.planner.step.balance``), but gives back to each worker the
outputs of its own rows. With B rows of all workers, in G groups of M = N / G, a worker sends for a
layer and waits for

    model(G)  =  (M - 1) / M * 2 * (input bytes + output bytes / M) * B / G
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sparkdl.planner.links import Link
from sparkdl.planner.step.balance import Exchange, Layer, Step, by_data, exchange, step

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
