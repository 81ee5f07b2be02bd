"""How much memory a training step takes, from small steps of a copy of the model.

The bytes of all live tensors are noted after each operation of a step, with b rows and with 2 b.
After the t-th operation they are f_t + s_t * rows, where f_t are parameters, gradients and the
optimizer's state, and s_t what the forward pass has saved for the backward pass so far, with what
the present operation works on. So

    peak(rows)  =  max over t of (f_t + s_t * rows)

and a step with 4 b rows has to confirm it. The usual estimate, (2 to 4) * parameters + rows * saved
bytes a row (Zou et al. 2017), adds up what is not there at the same time, and leaves out what an
operation works on.

Not in it are what a kernel allocates for itself and gives back, what the allocator rounds up and
does not give back, a GPU's context, minibatches that wait, and what a strategy keeps besides.

``fastest`` chooses one option for each layer under a memory budget: Zou et al. 2017's choice of
algorithms, exactly.

    minimise    sum over k of seconds[k, x_k]
    subject to  sum over k of bytes[k, x_k] <= budget,  x_k an option of layer k

This is the multiple-choice knapsack, solved as an integer programme (HiGHS, by SciPy). It is known
to us second hand (arXiv 1709.06622, section on mini-batch size and algorithms).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from sparkdl.arguments import as_whole, require_whole
from sparkdl.errors import ConfigError, ModelError, SparkDLError, required
from sparkdl.outputs import described, parts_of
from sparkdl.protocols import Batch, LossFunction, OptimizerBuilder
from sparkdl.replica.replica import Precision, Replica
from sparkdl.user_code.tracebacks import message_of


def fastest(layers: Sequence[Sequence[tuple[float, int]]], budget: int) -> list[int]:
    """Choose one option for each layer: those that together take the least seconds and fit.

    Args:
        layers: the options of each layer, as seconds >= 0 and bytes >= 0.
        budget: bytes for all layers together.

    Returns:
        By layer, the position of its option.

    Raises:
        ConfigError: nothing fits, or a layer has no options.
        SetupError: SciPy is not installed.
    """
    with required("choosing options within a memory budget needs SciPy", "planning"):
        from scipy import optimize
    if not all(layers):
        raise ConfigError("a layer has no options to choose from")
    least = sum(min(size for _, size in options) for options in layers)
    if not budget >= least:
        raise ConfigError(
            f"a budget of {budget:,} bytes is too small: even the options that need least take "
            f"{least:,}. Raise the budget, or take smaller minibatches"
        )
    if not layers:
        return []
    seconds, sizes = np.array([each for options in layers for each in options], dtype=float).T
    layer_of = np.repeat(np.arange(len(layers)), [len(options) for options in layers])
    one_each = layer_of == np.arange(len(layers))[:, None]
    unit = max(1.0, sizes.max())
    constraints = [
        optimize.LinearConstraint(one_each * 1.0, 1, 1),
        optimize.LinearConstraint(sizes / unit, -np.inf, budget / unit),
    ]
    while True:
        found = optimize.milp(
            seconds,
            integrality=np.ones_like(seconds),
            constraints=constraints,
            options={"mip_rel_gap": 0.0},
        )
        picks = [int(found.x[own].argmax()) for own in one_each]
        taken = sum(options[pick][1] for options, pick in zip(layers, picks, strict=True))
        if taken <= budget:
            return picks
        # What the solver takes for equal is some bytes apart: anything but this choice.
        other = optimize.LinearConstraint(np.rint(found.x), -np.inf, len(layers) - 1)
        constraints.append(other)


Example = Batch | Tensor | tuple[Tensor, ...] | dict[str, Tensor]
"""A minibatch: the model's inputs as one tensor, several or a dict; or a Batch, with labels."""

Bytes = np.ndarray[Any, Any]
_ROWS = 2
"""The least that batch normalization takes."""
_LINEAR = 0.05


@dataclass(frozen=True)
class StepMemory:
    """What a training step takes, in bytes.

    Attributes:
        fixed: f_t of the module's docstring, shape (operations,).
        by_row: s_t.
    """

    fixed: Bytes
    by_row: Bytes

    def peak(self, batch_size: int) -> int:
        """The most bytes at any time of a step.

        Args:
            batch_size: rows of the minibatch.

        Raises:
            ConfigError: that is no whole number >= 1.
        """
        rows = require_whole("batch_size", batch_size, 1)
        return int(np.ceil((self.fixed + self.by_row * rows).max()))

    def largest_batch(self, budget: int) -> int:
        """The most rows of a minibatch with which a step fits.

        Args:
            budget: bytes.

        Raises:
            ConfigError: not even one row fits.
        """
        limit = as_whole(budget)
        if limit is None or self.peak(1) > limit:
            raise ConfigError(
                f"a budget of {budget!r} bytes is too small: a step with one row takes "
                f"{self.peak(1):,}, most of it parameters, gradients and the optimizer's state "
                "unless the rows are large. Take a smaller model, an optimizer that keeps less, or "
                "more memory"
            )
        grows = self.by_row > 0
        if not grows.any():
            raise ConfigError("a step of this model takes the same memory for any number of rows")
        return int(((limit - self.fixed[grows]) / self.by_row[grows]).min() + 1e-6)


def step_memory(
    model: nn.Module,
    example: Example,
    *,
    optimizer: OptimizerBuilder,
    loss: LossFunction | None = None,
    precision: Precision = "float32",
    features_as_kwargs: bool = False,
) -> StepMemory:
    """Measure what a training step takes, on the device where the model is.

    Args:
        model: it is copied, and stays as it is.
        example: a minibatch of any number of rows; of these, minibatches of 2, 4 and 8 are made.
        optimizer: builds the optimizer.
        loss: (outputs, targets) -> mean over the minibatch; the example then has to be a Batch.
            None for the mean of all outputs, which leaves out what a loss saves: much, for a model
            of language.
        precision: as for the estimator.
        features_as_kwargs: as for the estimator.

    Raises:
        ConfigError: the example is no minibatch.
        ModelError: the model cannot be trained on it, or its memory does not grow linearly with
            the rows.
    """
    batch = as_batch(example)
    timelines = []
    for rows in (_ROWS, 2 * _ROWS, 4 * _ROWS):
        replica = probe(model, optimizer, loss, precision, features_as_kwargs)
        with in_words(f"the model cannot be trained on {rows} rows of the example"):
            live = Live(tensors_of(replica.module, replica.loss))
            with live:
                replica.step(rows_of(batch, rows))  # the optimizer makes its state
                live.timeline.clear()
                replica.step(rows_of(batch, rows))
        timelines.append(np.array(live.timeline, dtype=float))
    return _lines(*timelines)


def _lines(*timelines: Bytes) -> StepMemory:
    if len({len(each) for each in timelines}) > 1:  # the model takes other ways for other rows
        timelines = tuple(each.max(keepdims=True) for each in timelines)
    few, more, most = timelines
    by_row = (more - few) / _ROWS
    fixed = few - by_row * _ROWS
    expected, found = (fixed + by_row * 4 * _ROWS).max(), most.max()
    if abs(expected - found) > _LINEAR * found:
        peaks = ", ".join(f"{int(each.max()):,}" for each in timelines)
        raise ModelError(
            f"with {_ROWS}, {2 * _ROWS} and {4 * _ROWS} rows a step takes {peaks} bytes, which is "
            "not linear in the rows: what a larger minibatch takes cannot be told from them. Does "
            "the model compare all rows of a minibatch with each other?"
        )
    return StepMemory(fixed, by_row)


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all live tensors while it is active.

    Args:
        tensors: those that are there before.

    Attributes:
        bytes: now.
        timeline: after each operation.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.timeline: list[int] = []
        self._storages: dict[int, weakref.ref[Any]] = {}
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor) -> None:
        """Count a tensor until its storage is freed."""
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if not size or address in self._storages:
            return

        def freed(_: object) -> None:
            self.bytes -= size
            del self._storages[address]

        self.bytes += size
        self._storages[address] = weakref.ref(storage, freed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for each in tree_leaves(outputs):
            if isinstance(each, Tensor) and each.layout is torch.strided:
                self.add(each)
        self.timeline.append(self.bytes)
        return outputs


def tensors_of(*owners: Any) -> list[Tensor]:
    """The parameters and buffers of modules."""
    modules = [each for each in owners if isinstance(each, nn.Module)]
    return [each for module in modules for each in (*module.parameters(), *module.buffers())]


def as_batch(example: Example) -> Batch:
    """The minibatch that is meant.

    Raises:
        ConfigError: it is none.
    """
    given: Any = example.features if isinstance(example, Batch) else example
    several = given if isinstance(given, (tuple, list, dict)) else (given,)
    features = several if isinstance(several, dict) else tuple(several)
    if isinstance(example, Batch):
        example = replace(example, features=features)
    else:
        example = Batch(features, (), last=False)
    leaves = [e for e in tree_leaves((example.features, example.targets)) if e is not None]
    rows = {len(e) if isinstance(e, Tensor) and e.dim() else 0 for e in leaves}
    if len(rows) != 1 or rows == {0}:
        raise ConfigError(
            "the example must be a minibatch as the model takes it: tensors that all have the same "
            "number of rows, at least one, as their first dimension; got "
            + (", ".join(map(described, leaves)) or "nothing")
        )
    return example


def rows_of(batch: Batch, rows: int) -> Batch:
    """A minibatch of so many rows, in which those of another come again and again."""

    def taken(tensor: Tensor) -> Tensor:
        return tensor[torch.arange(rows, device=tensor.device) % len(tensor)]

    parts = ((name, getattr(batch, name)) for name in ("features", "targets", "weights"))
    return Batch(last=False, **{name: tree_map_only(Tensor, taken, each) for name, each in parts})


def probe(
    model: nn.Module,
    optimizer: OptimizerBuilder,
    loss: LossFunction | None,
    precision: Precision = "float32",
    features_as_kwargs: bool = False,
) -> Replica:
    """A replica of a copy of a model, in training mode, on the device where the model is.

    Raises:
        ModelError: there is none.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {described(model)}")
    device = next((each.device for each in tensors_of(model)), torch.device("cpu"))
    with in_words("the model cannot be copied and trained"):
        module = copy.deepcopy(model).train()
        module.zero_grad()
        make = partial(Replica, module, optimizer, loss or mean_of_outputs, device)
        return make(precision=precision, features_as_kwargs=features_as_kwargs)


def mean_of_outputs(outputs: Any, targets: Any) -> Tensor:
    """A loss for models of which only the outputs are known.

    Raises:
        ModelError: no output has a gradient.
    """
    leaves = tree_leaves(list(parts_of(outputs).values()) or outputs)
    means = [each.mean() for each in leaves if isinstance(each, Tensor) and each.requires_grad]
    if not means:
        raise ModelError(f"nothing that the model returns has a gradient: {described(outputs)}")
    return torch.stack(means).sum() if len(means) > 1 else means[0]


@contextmanager
def in_words(what: str) -> Iterator[None]:
    """Say what failed in a model, and leave torch's random numbers as they were.

    Raises:
        ModelError: something failed.
    """
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpus = range(torch.cuda.device_count() if used else 0)
    try:
        with torch.random.fork_rng(gpus):
            yield
    except SparkDLError:
        raise
    except Exception as error:
        raise ModelError(f"{what}: {message_of(error)}") from error
