"""The layers of a module: what each computes and exchanges, by torch's own count."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from sparkdl.arguments import require_positive, require_whole
from sparkdl.errors import ModelError
from sparkdl.planner.links import Link
from sparkdl.planner.step.balance import Layer
from sparkdl.planner.step.layer_report import LayerBalance
from sparkdl.planner.step.memory import Example, as_batch, in_words, probe, rows_of
from sparkdl.protocols import Batch, LossFunction
from sparkdl.replica.replica import Replica

SPLIT = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose outputs can be computed in parts, each from all inputs."""
_LOOKUPS = ("Embedding", "EmbeddingBag")


def layer_balance(
    model: nn.Module,
    example: Example,
    *,
    batch_size: int,
    workers: int,
    link: str | float | Link,
    loss: LossFunction | None = None,
    step_s: float | None = None,
    features_as_kwargs: bool = False,
) -> LayerBalance:
    """Find out which layers make ``GradientAllReduce`` wait, and what would send less.

    A layer is a module with parameters of its own. Operations that run between two layers, such as
    those of attention, count as the first one's.

    Args:
        model: it is copied, and stays as it is.
        example: a minibatch of any number of rows: the model's inputs as a tensor, a tuple or a
            dict, or a ``Batch`` if there is a loss.
        batch_size: rows of a worker's minibatch.
        workers: how many there are.
        link: a worker's, such as ``"10 Gbit/s"`` or ``"1 Gbit/s, 0.3 ms"``.
        loss: (outputs, targets) -> mean over the minibatch; None for the mean of all outputs.
        step_s: seconds in which a worker's device computes forward and backward pass of its
            minibatch; None to measure it here, in three steps.
        features_as_kwargs: as for the estimator.

    Raises:
        ConfigError: an argument is wrong.
        ModelError: the model cannot be trained on the example.

    Source: Das et al. 2016, "Distributed Deep Learning Using Synchronous Stochastic Gradient
    Descent" (arXiv 1602.06709); see ``sparkdl.planner.step.balance`` for the equations.
    """
    workers = require_whole("workers", workers, 1)
    batch_size = require_whole("batch_size", batch_size, 1)
    link = Link.parse(link)
    batch = rows_of(as_batch(example), batch_size)
    replica = probe(model, torch.optim.SGD, loss, features_as_kwargs=features_as_kwargs)
    machine = ""
    with in_words(f"the model cannot be trained on {batch_size} rows of the example"):
        layers, notes = _count(replica, batch)
        if step_s is None:
            machine = machine_of(replica.device)
            step_s = seconds_of(lambda: replica.forward_backward(batch), replica.device)
    seconds = require_positive("step_s", step_s)
    return LayerBalance(layers, batch_size, workers, link, seconds, machine, notes)


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = 3) -> float:
    """The median of what some work on a device takes, after once to warm up."""
    found = []
    for _ in range(repeats + 1):
        begin = perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(perf_counter() - begin)
    return statistics.median(found[1:])


def machine_of(device: torch.device) -> str:
    """The machine, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} of {os.cpu_count()} cores ({platform.machine()})"


@dataclass
class _Seen:
    """What the forward pass has shown of a layer."""

    module: nn.Module
    factor: int
    """Operations of the backward pass for each of the forward pass."""
    input_bytes: int
    output_bytes: int = 0
    forward: float = 0.0
    backward: float = 0.0


class _Count:
    """Attributes the operations of a forward pass to the layer that runs, or ran last."""

    def __init__(self, module: nn.Module, counter: FlopCounterMode) -> None:
        self._counter = counter
        self._stack: list[str] = []
        self._last = ""
        self._counted = 0
        self.seen: dict[str, _Seen] = {}
        self._handles: list[Any] = []
        for name, layer in module.named_modules():
            if next(layer.parameters(recurse=False), None) is not None:
                before = layer.register_forward_pre_hook(self._before(name), with_kwargs=True)
                self._handles += [before, layer.register_forward_hook(self._after)]

    def _before(self, name: str) -> Any:
        def before(layer: nn.Module, args: Any, kwargs: Any) -> None:
            self.attribute()
            self._stack.append(name)
            given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            trained = any(p.requires_grad and p.dim() > 1 for p in layer.parameters(recurse=False))
            factor = any(each.requires_grad for each in given) + trained
            self.seen.setdefault(name, _Seen(layer, factor, _first_bytes(given)))

        return before

    def _after(self, layer: nn.Module, given: Any, output: Any) -> None:
        self.attribute()
        self._last = self._stack.pop()
        self.seen[self._last].output_bytes = _first_bytes(output)

    def attribute(self) -> None:
        """Give away the operations since the last call."""
        layer = self.seen.get(self._stack[-1] if self._stack else self._last)
        if layer is not None:  # else the first layer gets them
            more = self._counter.get_total_flops() - self._counted
            self._counted += more
            layer.forward += more
            # Between two layers both factors of a product have gradients, if any has.
            layer.backward += more * (layer.factor if self._stack else 2 * bool(layer.factor))

    def end(self) -> list[tuple[str, _Seen]]:
        """The layers in the order of the forward pass."""
        self.attribute()
        for handle in self._handles:
            handle.remove()
        return [(name or type(seen.module).__name__, seen) for name, seen in self.seen.items()]


def _first_bytes(values: Any) -> int:
    """Of the first tensor in some values."""
    found = (each for each in tree_leaves(values) if isinstance(each, Tensor))
    first = next(found, None)
    return 0 if first is None else first.numel() * first.element_size()


def _count(replica: Replica, batch: Batch) -> tuple[tuple[Layer, ...], tuple[str, ...]]:
    with FlopCounterMode(display=False) as counter:
        count = _Count(replica.module, counter)
        replica.forward(batch)
        found = count.end()
    if not found:
        raise ModelError("no layer with parameters takes part in the forward pass")
    called = {id(seen.module) for _, seen in found}
    sent: set[int] = set()
    layers, uncounted = [], []
    for name, seen in found:
        parameters = [p for each in _own(seen.module, called) for p in each.parameters(False)]
        own = [each for each in parameters if each.requires_grad and id(each) not in sent]
        sent.update(map(id, own))
        splits = isinstance(seen.module, SPLIT) and bool(own)
        work = (seen.forward + seen.backward) / batch.examples, seen.backward / batch.examples
        gradient = sum(each.numel() * each.element_size() for each in own)
        kind, inputs = type(seen.module).__name__, seen.input_bytes / batch.examples
        outputs = seen.output_bytes / batch.examples
        layers.append(Layer(name, kind, *work, gradient, inputs, splits, outputs))
        if not seen.forward and kind not in _LOOKUPS and any(e.dim() > 1 for e in parameters):
            uncounted.append(name)
    note = f"torch does not count the operations of {', '.join(uncounted)}: bubbles are too large."
    return tuple(layers), (note,) * bool(uncounted)


def _own(module: nn.Module, called: set[int]) -> Iterator[nn.Module]:
    """A module with its parts that it uses without calling them, as attention does."""
    yield module
    for part in module.children():
        if id(part) not in called:
            yield from _own(part, called)
