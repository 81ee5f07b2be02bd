"""What each layer computes and exchanges, and what a step waits for: Das et al. 2016.

N workers share a minibatch of B rows. In G groups of M = N / G members, each member of a group
computes its part of a layer's outputs, for which it needs all inputs of the group (model
parallelism: G = 1 for the layer), and those of all groups that hold the same part add up its
gradients (data parallelism: G = N). In a step, a worker sends for the layer around a ring

    data(G)   =  2 (G - 1) / G * gradient bytes / M
    model(G)  =  2 (M - 1) / M * (input bytes + output bytes / M) * B / G
    G*        =  sqrt(input bytes * B * N / gradient bytes)

Outputs are those that ``GradientAllReduce(hybrid=...)`` gives back to each worker for its own rows.
The paper's form has 1 in the place of (G - 1) / G and (M - 1) / M, and no outputs; its derivative
is 0 at G*.

Inputs are waited for. Gradients are sent while the backward pass of the layers below runs. With
layer 1 nearest the input, c_i the seconds in which layer i's gradients are sent, and h_i those of
its own backward pass, which hide those of others,

    lag_k  =  max(0, c_1 + ... + c_k  -  h_1 - ... - h_(k-1))

and a step waits for the largest lag: when the gradient of layer k is there, those of all layers up
to k remain to be sent. A layer's bubble is what it adds to the largest lag so far, so that bubbles
sum to the wait; a sum of lags would count a wait more than once. Volumes and G* are known to us
second hand (arXiv 1602.06709), the ring's and the wait are derived here.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sparkdl.planner.links import Link
from sparkdl.strategies import Hybrid

BUCKET = 25 * 2**20
"""Bytes of gradients in one message of DistributedDataParallel."""


@dataclass
class Layer:
    """What there is to know of a layer.

    Attributes:
        name: in the module.
        kind: its class.
        flop: floating-point operations of a training step for each row.
        backward_flop: of these, those of the backward pass.
        gradient_bytes: what data parallelism exchanges.
        input_bytes: what model parallelism exchanges for each row.
        splits: whether groups of workers can compute it together: a trained ``nn.Linear``.
        output_bytes: what it hands on for each row.
    """

    name: str
    kind: str
    flop: float
    backward_flop: float
    gradient_bytes: float
    input_bytes: float
    splits: bool
    output_bytes: float = 0.0


class Exchange(NamedTuple):
    """What a worker sends for one layer in a step.

    Attributes:
        groups: G; 1 for model parallelism, the number of workers for data parallelism.
        data: bytes that may be hidden.
        model: bytes that are waited for.
    """

    groups: int
    data: float
    model: float


def exchange(layer: Layer, rows: int, workers: int, groups: int) -> Exchange:
    """What a worker sends for a layer.

    Args:
        layer: the layer.
        rows: of all workers' minibatches together.
        workers: how many there are.
        groups: a divisor of it.
    """
    members = workers // groups
    given = layer.input_bytes + layer.output_bytes / members
    data = 2 * (groups - 1) / groups * layer.gradient_bytes / members
    return Exchange(groups, data, 2 * (members - 1) / members * given * rows / groups)


def best_exchange(layer: Layer, rows: int, workers: int) -> Exchange:
    """The one that sends least, of all divisors of the number of workers."""
    groups = [g for g in range(1, workers + 1) if workers % g == 0] if layer.splits else [workers]
    sent = [exchange(layer, rows, workers, each) for each in groups]
    return min(sent, key=lambda each: (each.data + each.model, -each.groups))


def best_groups(layer: Layer, rows: int, workers: int) -> float:
    """G* of the paper, any number > 0; inf for a layer without gradients."""
    if not layer.gradient_bytes:
        return math.inf
    return math.sqrt(layer.input_bytes * rows * workers / layer.gradient_bytes)


def bubbles(sent_s: Any, hides_s: Any) -> Any:
    """What each layer adds to the wait of a step, shape (layers,), in seconds.

    Args:
        sent_s: seconds in which a layer's gradients are sent, from the input to the output.
        hides_s: seconds of a layer's work behind which those above it can be sent.
    """
    hidden = np.append(0.0, np.cumsum(hides_s))[:-1]
    lags = np.maximum(np.cumsum(sent_s) - hidden, 0.0)
    return np.diff(np.maximum.accumulate(lags), prepend=0.0)


@dataclass(frozen=True)
class Step:
    """A step of all workers.

    Attributes:
        compute_s: seconds of computing.
        model_s: seconds in which inputs are exchanged, by layer.
        bubbles_s: seconds for which gradients are waited, by layer.
    """

    compute_s: float
    model_s: Any
    bubbles_s: Any

    @property
    def seconds(self) -> float:
        """All of it."""
        return float(self.compute_s + self.model_s.sum() + self.bubbles_s.sum())

    @property
    def efficiency(self) -> float:
        """What share of it is computing."""
        return self.compute_s / self.seconds


def step(
    layers: Sequence[Layer],
    exchanges: Sequence[Exchange],
    workers: int,
    compute_s: float,
    link: Link,
) -> Step:
    """What a step takes.

    Args:
        layers: from the input to the output.
        exchanges: theirs.
        workers: how many there are.
        compute_s: seconds in which a worker computes its minibatch.
        link: a worker's; each message of a ring takes its latency.
    """
    groups, data, model = np.array(exchanges, dtype=float).T
    whole = sum(each.flop for each in layers)
    hides = np.array([each.backward_flop for each in layers]) * (compute_s / (whole or 1.0))
    share = data / max(min(BUCKET, data.sum()), math.ulp(0.0))
    sent = data / link.bandwidth + link.latency * 2 * (groups - 1) * share
    inputs = model / link.bandwidth + link.latency * 2 * (workers / groups - 1)
    return Step(compute_s, inputs, bubbles(sent, hides))


def by_data(layers: Sequence[Layer], rows: int, workers: int) -> list[Exchange]:
    """Every layer data parallel, as ``GradientAllReduce`` is."""
    return [exchange(each, rows, workers, workers) for each in layers]


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
    inside: dict[str, list[str]] = {}
    for name in sizes:
        for up in range(1, name.count(".") + 1):
            inside.setdefault(f"{name.rsplit('.', up)[0]}.*", []).append(name)
    folders = sorted(inside, key=lambda each: (-each.count("."), each))
    found: dict[tuple[str, ...], str] = {(name,): name for name in sizes}
    for pattern in folders:
        found.setdefault(tuple(inside[pattern]), pattern)
    found.setdefault(tuple(sizes), "*")
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

    def step(self) -> Step:
        """A step of ``GradientAllReduce``."""
        sent = by_data(self.layers, self.batch_size * self.workers, self.workers)
        return step(self.layers, sent, self.workers, self.compute_s, self.link)

    @property
    def split(self) -> Hybrid | None:
        """What ``GradientAllReduce(hybrid=...)`` gains most with, if it gains something."""
        return self._fastest()[0]

    def _fastest(self) -> tuple[Hybrid | None, Step]:
        return fastest_split(self.layers, self.batch_size, self.workers, self.compute_s, self.link)

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
