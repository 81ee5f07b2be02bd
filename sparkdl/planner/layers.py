"""The layers of a module: what each computes and exchanges, by torch's own count."""

from __future__ import annotations

import math
import os
import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode

from sparkdl.arguments import require_positive, require_whole
from sparkdl.errors import ModelError
from sparkdl.planner.balance import Layer, LayerBalance
from sparkdl.planner.links import Link
from sparkdl.planner.memory import Example, as_batch, in_words, probe, rows_of
from sparkdl.protocols import Batch, LossFunction
from sparkdl.replica.replica import Replica

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
    for name, rule in {
        "_scaled_dot_product_flash_attention_for_cpu": _attention,
        "_scaled_dot_product_fused_attention_overrideable": _attention,
        "mkldnn_rnn_layer": _recurrent,
        "_cudnn_rnn": _recurrent,
        "miopen_rnn": _recurrent,
    }.items()
    if hasattr(torch.ops.aten, name)
}
"""What torch has no rules for."""
_MORE = re.compile(
    r"attention|rnn|encoder|convol|conv\d|mm(_|$)|_fft_[rc]2[rc]|cdist|pdist|trilinear|cholesky"
    r"|triangular|linalg_(?!vector_norm|cross|diagonal|check_errors)"
)
"""torch's operators that do more for each number than to go through it."""
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
    Descent" (arXiv 1602.06709); see ``sparkdl.planner.balance`` for the equations.
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
            threads = torch.get_num_threads()
            machine = f"{replica.device}, {threads} of {os.cpu_count()} cores"
            given = {"replica": replica, "batch": batch}
            timer = Timer("replica.forward_backward(batch)", globals=given, num_threads=threads)
            step_s = timer.timeit(3).mean
    seconds = require_positive("step_s", step_s)
    return LayerBalance(layers, batch_size, workers, link, seconds, machine, notes)


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Attributes the operations of a forward pass to the layer that was called last.

    Args:
        module: the module.
        counter: counts while it runs; inside this mode, so that operators arrive here as the
            counter has taken them apart.

    Attributes:
        layers: by name, in the order of the forward pass; all figures are of the minibatch.
        not_counted: by operator that the counter has no rule for, the layers that use it.
        handles: of hooks, to be removed.
    """

    supports_higher_order_operators = True

    def __init__(self, module: nn.Module, counter: FlopCounterMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers: dict[str, Layer] = {}
        self.not_counted: dict[str, dict[str, None]] = {}
        self.handles: list[Any] = []
        self._counter, self._counted = counter, 0
        self._factors: dict[str, int] = {}
        self._last, self._inside = "", False
        for name, layer in module.named_modules():
            if next(layer.parameters(recurse=False), None) is not None:
                before, after = partial(self._before, name), partial(self._after, name)
                self.handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
                self.handles.append(layer.register_forward_hook(after))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counted = getattr(func, "_overloadpacket", func) in self._counter.flop_registry
        if not counted and _works(func):
            self.not_counted.setdefault(func.name(), {})[self._last] = None
        if not isinstance(func, OpOverload):
            return NotImplemented
        return func(*args, **(kwargs or {}))

    def _before(self, name: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
        self.attribute()
        self._last, self._inside = name, True
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if name not in self.layers:
            trained = any(p.requires_grad and p.dim() > 1 for p in layer.parameters(recurse=False))
            # Operations of the backward pass for each of the forward pass.
            self._factors[name] = any(each.requires_grad for each in given) + trained
            kind = type(layer).__name__
            self.layers[name] = Layer(
                name or kind, kind, 0, 0, 0, _first_bytes(given), type(layer) is nn.Linear
            )

    def _after(self, name: str, layer: nn.Module, given: Any, output: Any) -> None:
        self.attribute()
        self._inside = False
        self.layers[name].output_bytes = _first_bytes(output)

    def attribute(self) -> None:
        """Give away the operations since the last call."""
        if self._last in self.layers:  # else the first layer gets them
            more = self._counter.get_total_flops() - self._counted
            self._counted += more
            # Between two layers both factors of a product have gradients, if any has.
            factor = self._factors[self._last]
            factor = factor if self._inside else 2 * bool(factor)
            self.layers[self._last].flop += more * (1 + factor)
            self.layers[self._last].backward_flop += more * factor


def _works(func: Any) -> bool:
    """Whether an operator may do more for each of its numbers than to go through it."""
    if not isinstance(func, OpOverload):
        return True
    if func.namespace != "aten":
        return func.namespace not in _NO_WORK
    return bool(_MORE.search(func._opname)) and "backward" not in func._opname


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
        count.attribute()
    for handle in count.handles:
        handle.remove()
    if not (layers := count.layers):
        raise ModelError("no layer with parameters takes part in the forward pass")
    works: set[str] = set()
    for name, parameter in replica.module.named_parameters():
        # Attention uses the parameters of parts that it does not call.
        owner = name.rpartition(".")[0]
        while owner and owner not in layers:
            owner = owner.rpartition(".")[0]
        if owner in layers:
            works.update({owner} if parameter.dim() > 1 else ())
            sent = parameter.numel() * parameter.element_size() * parameter.requires_grad
            layers[owner].gradient_bytes += sent
    told = {name for names in count.not_counted.values() for name in names}
    uncounted = [
        f"{op} in {', '.join(name or type(replica.module).__name__ for name in names)}"
        for op, names in count.not_counted.items()
    ]
    for name, layer in layers.items():
        for figure in ("flop", "backward_flop", "input_bytes", "output_bytes"):
            setattr(layer, figure, getattr(layer, figure) / batch.examples)
        layer.splits = layer.splits and layer.gradient_bytes > 0
        if name in works - told and not layer.flop and layer.kind not in _LOOKUPS:
            uncounted.append(layer.name)
    note = (
        f"torch does not count the operations of {', '.join(uncounted)}: they pass for none, and "
        "bubbles and efficiency are wrong by as much."
    )
    return tuple(layers.values()), (note,) * bool(uncounted)
