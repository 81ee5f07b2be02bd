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

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sparkdl.planner.links import Link

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
