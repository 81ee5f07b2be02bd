"""What each layer computes and exchanges, and what a step waits for: Das et al. 2016.

N workers share a minibatch of B rows. In G groups of N / G members, each member of a group computes
its part of a layer's outputs, for which it needs all inputs of the group (model parallelism: G = 1
for the layer), and those of all groups that hold the same part add up its gradients (data
parallelism: G = N). In a step, a worker sends for the layer

    data(G)   =  s * gradient bytes * G / N        s = 2 (G - 1) / G in a ring;  Das: 2 - overlap
    model(G)  =  m * 2 * input bytes * B / G       m = 1 - G / N in a ring;      Das: 1
    G*        =  sqrt(2 * input bytes * B * N / (gradient bytes * (2 - overlap)))    d/dG = 0

where Das' data(1) and model(N) are 0. Inputs are waited for. Gradients are sent while the backward
pass of the layers below runs (torch's DistributedDataParallel, and ours) or, with Das, also while
the next forward pass does, up to the layer that needs them. With layer 1 nearest the input, c_i
the seconds in which layer i's gradients are sent, and h_i its own that hide those of others,

    lag_k  =  max(0, c_1 + ... + c_k  -  h_1 - ... - h_(k-1))

and a step waits for the largest lag: when the gradient of layer k is there, those of all layers up
to k remain to be sent. A layer's bubble is what it adds to the largest lag so far, so that bubbles
sum to the wait; a sum of lags would count a wait more than once. Volumes, G* and published figures
are known to us second hand (arXiv 1602.06709), the ring's and the wait are derived here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from sparkdl.planner.links import Link

BUCKET = 25 * 2**20
"""Bytes of gradients in one message of DistributedDataParallel."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What there is to know of a layer.

    Attributes:
        name: in the module.
        kind: its class.
        flop: floating-point operations of a training step for each row.
        backward_flop: of these, those of the backward pass.
        gradient_bytes: what data parallelism exchanges.
        input_bytes: what model parallelism exchanges for each row.
        splits: whether its outputs can be computed in parts.
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


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a worker sends for one layer in a step.

    Attributes:
        groups: G; 1 for model parallelism, the number of workers for data parallelism.
        data: bytes that may be hidden.
        model: bytes that are waited for.
    """

    groups: int
    data: float
    model: float


def exchange(
    layer: Layer, rows: int, workers: int, groups: int, overlap: float | None = None
) -> Exchange:
    """What a worker sends for a layer.

    Args:
        layer: the layer.
        rows: of all workers' minibatches together.
        workers: how many there are.
        groups: a divisor of it.
        overlap: in [0, 1], what share of receiving is hidden behind sending, for the paper's form;
            None for what a ring sends.
    """
    members = workers // groups
    if overlap is None:
        added, gathered = 2 * (groups - 1) / groups, (members - 1) / members
    else:
        added, gathered = (2 - overlap) * (groups > 1), float(members > 1)
    data = added * layer.gradient_bytes / members
    return Exchange(groups, data, gathered * 2 * layer.input_bytes * rows / groups)


def best_exchange(layer: Layer, rows: int, workers: int, overlap: float | None = None) -> Exchange:
    """The one that sends least, of all divisors of the number of workers."""
    groups = [g for g in range(1, workers + 1) if workers % g == 0] if layer.splits else [workers]
    sent = [exchange(layer, rows, workers, each, overlap) for each in groups]
    return min(sent, key=lambda each: (each.data + each.model, -each.groups))


def best_groups(layer: Layer, rows: int, workers: int, overlap: float = 0.0) -> float:
    """G* of the paper, any number > 0; inf for a layer without gradients."""
    if not layer.gradient_bytes:
        return math.inf
    sent = layer.gradient_bytes * (2 - overlap)
    return math.sqrt(2 * layer.input_bytes * rows * workers / sent)


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
        messages_s: the processor's part in sending messages, in all.
    """

    compute_s: float
    model_s: Any
    bubbles_s: Any
    messages_s: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return float(self.compute_s + self.model_s.sum() + self.bubbles_s.sum() + self.messages_s)

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
    *,
    hidden_behind: Literal["backward", "step"] = "backward",
    bucket: int | None = BUCKET,
    message_s: float = 0.0,
) -> Step:
    """What a step takes.

    Args:
        layers: from the input to the output.
        exchanges: theirs.
        workers: how many there are.
        compute_s: seconds in which a worker computes its minibatch.
        link: a worker's; each message of a ring takes its latency.
        hidden_behind: what hides gradients that are sent: the rest of the backward pass, or also
            the next forward pass.
        bucket: gradients that share a message, in bytes; None for one message a layer.
        message_s: processor time of each message, which nothing hides.
    """
    whole = sum(each.flop for each in layers)
    work = [each.backward_flop if hidden_behind == "backward" else each.flop for each in layers]
    data, model = (np.array([getattr(e, n) for e in exchanges]) for n in ("data", "model"))
    groups = np.array([each.groups for each in exchanges])
    between, within = 2 * (groups - 1), 2 * (workers / groups - 1)
    share = np.ones_like(data)
    if bucket is not None:
        share = data / max(min(bucket, data.sum()), math.ulp(0.0))
    sent = data / link.bandwidth + link.latency * between * share
    hides = np.array(work) * (compute_s / whole if whole else 0.0)
    return Step(
        compute_s,
        model / link.bandwidth + link.latency * within,
        bubbles(sent, hides),
        message_s * float((between * share + within).sum()),
    )


def by_data(layers: Sequence[Layer], rows: int, workers: int) -> list[Exchange]:
    """Every layer data parallel, as ``GradientAllReduce`` is."""
    return [exchange(each, rows, workers, workers) for each in layers]


def by_layer(layers: Sequence[Layer], rows: int, workers: int) -> list[Exchange]:
    """Every layer as it sends least."""
    return [best_exchange(each, rows, workers) for each in layers]
