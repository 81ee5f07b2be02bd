"""The layers of a module: what each computes and exchanges, by torch's own count."""

from __future__ import annotations

import math
import os
import platform
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
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


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Operations of two products: of queries and keys, and of that and the values."""
    return int(2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1]))


def _recurrent(inputs: Any, *given: Any, **_: Any) -> int:
    """Operations of a recurrent layer, which applies each weight to each step of each row."""
    weights = given[0] if isinstance(given[0], list) else given[:2]
    return int(2 * math.prod(inputs[:-1]) * sum(math.prod(w) for w in weights if len(w) == 2))


_RULES = {
    getattr(torch.ops.aten, name): rule
    for rule, names in (
        (
            _attention,
            (
                "_scaled_dot_product_flash_attention_for_cpu",
                "_scaled_dot_product_fused_attention_overrideable",
            ),
        ),
        (_recurrent, ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")),
    )
    for name in names
    if hasattr(torch.ops.aten, name)
}
"""What torch has no rules for."""
_MORE = re.compile(
    r"attention|rnn|convol|conv\d|_fft_[rc]2[rc]|cdist|pdist|trilinear|cholesky|triangular"
    r"|linalg_(?!vector_norm|cross|diagonal|check_errors)"
)
"""torch's operators that do more for each number than to go through it, beside those that take
several tensors."""
_NO_MORE = re.compile(
    r"copy|index|scatter|masked|put|loss|entropy|kl_div|norm|complex|polar|relu|grid_sampler|_cell"
    r"|cross|^dist$|set_|backward"
)
"""Those that take several tensors and only go through them, beside pointwise ones."""
_NO_WORK = ("prim", "prims", "profiler", "c10d", "_c10d_functional")


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


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Attributes the operations of a forward pass to the layer that runs, or ran last.

    Args:
        module: the module.
        counter: counts while it runs; inside this mode, so that operators arrive here as the
            counter has taken them apart.

    Attributes:
        seen: layers by name.
        not_counted: by operator that the counter has no rule for, the layers that use it.
    """

    supports_higher_order_operators = True

    def __init__(self, module: nn.Module, counter: FlopCounterMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.not_counted: dict[str, dict[str, None]] = {}
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counted = getattr(func, "_overloadpacket", func) in self._counter.flop_registry
        if not counted and _works(func, args):
            layer = self._stack[-1] if self._stack else self._last
            self.not_counted.setdefault(func.name(), {})[layer] = None
        if not isinstance(func, OpOverload):
            return NotImplemented
        return func(*args, **(kwargs or {}))

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


def _works(func: Any, args: Any) -> bool:
    """Whether an operator may do more for each of its numbers than to go through it."""
    if not isinstance(func, OpOverload):
        return True
    name = func._opname
    if func.namespace != "aten":
        return func.namespace not in _NO_WORK
    if _MORE.search(name):
        return "backward" not in name
    if torch.Tag.pointwise in func.tags or _NO_MORE.search(name):
        return False
    given = [each for each in args if isinstance(each, Tensor) and each.dim() > 1]
    return sum(each.is_floating_point() or each.is_complex() for each in given) > 1


def _first_bytes(values: Any) -> int:
    """Of the first tensor in some values."""
    found = (each for each in tree_leaves(values) if isinstance(each, Tensor))
    first = next(found, None)
    return 0 if first is None else first.numel() * first.element_size()


def _count(replica: Replica, batch: Batch) -> tuple[tuple[Layer, ...], tuple[str, ...]]:
    counter = FlopCounterMode(display=False, custom_mapping=_RULES)
    count = _Count(replica.module, counter)
    with count, counter:
        replica.forward(batch)
        found = count.end()
    if not found:
        raise ModelError("no layer with parameters takes part in the forward pass")
    called = {id(seen.module) for _, seen in found}
    sent: set[int] = set()
    whole = type(replica.module).__name__
    told = {op: [name or whole for name in names] for op, names in count.not_counted.items()}
    silent = {name for name, _ in found}.difference(*told.values())
    layers, uncounted = [], [f"{op} in {_few(names)}" for op, names in told.items()]
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
        works = kind not in _LOOKUPS and any(each.dim() > 1 for each in parameters)
        if works and not seen.forward and name in silent:
            uncounted.append(name)
    note = (
        f"torch does not count the operations of {', '.join(uncounted)}: they pass for none, and "
        "bubbles and efficiency are wrong by as much."
    )
    return tuple(layers), (note,) * bool(uncounted)


def _few(names: list[str]) -> str:
    more = len(names) - 3
    return " and ".join([", ".join(names[:3]), f"{more} more"] if more > 0 else [", ".join(names)])


def _own(module: nn.Module, called: set[int]) -> Iterator[nn.Module]:
    """A module with its parts that it uses without calling them, as attention does."""
    yield module
    for part in module.children():
        if id(part) not in called:
            yield from _own(part, called)
