"""One training step in the driver on a made-up batch, before any worker takes its first.

The batch has two rows: the smallest and the largest value of every column. An embedding too small,
a label out of range, a wrong width or a loss that wants another dtype all show here, in a second.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn

from sparkdl.driver import build_replica
from sparkdl.errors import ConfigError, DataError, ModelError, TrainingError
from sparkdl.estimator.head import Head
from sparkdl.estimator.params import SEVERAL_OPTIMIZERS
from sparkdl.feed.columns import FeedSchema
from sparkdl.feed.facts import ColumnFacts
from sparkdl.initial import has_lazy_parameters
from sparkdl.protocols import (
    Batch,
    ColumnSpec,
    Features,
    LossFunction,
    ModelBuilder,
    OptimizerBuilder,
    SchedulerBuilder,
    Targets,
)
from sparkdl.randomness import borrowed_random_numbers
from sparkdl.replica import Replica, align_targets, forward
from sparkdl.schedule import Schedule, Unit

logger = logging.getLogger(__name__)

REHEARSED_STEPS = 100
"""A tenth of a second; optimizers that grow late do so every few steps."""

SHOW_ZEROS = "Give a function as model that builds it and calls it on a batch of zeros"


def require_schedule(
    optimizer: torch.optim.Optimizer, scheduler: SchedulerBuilder | None, every: Unit
) -> None:
    """Check that a scheduler can be built for an optimizer.

    Raises:
        ModelError: it cannot, or is none.
    """
    try:
        Schedule(optimizer, scheduler, every)
    except Exception as error:  # the user's function may raise anything
        own = isinstance(error, ConfigError)
        kind = "" if own else f"the scheduler cannot be built: {type(error).__name__}: "
        raise ModelError(f"{kind}{error}") from error


def require_steps(
    optimizer: torch.optim.Optimizer, scheduler: SchedulerBuilder | None, steps: int
) -> None:
    """Check that a schedule is as long as the training.

    Args:
        optimizer: any that the scheduler takes.
        scheduler: as the user gave it.
        steps: how many the schedule will take.

    Raises:
        ModelError: it ends before.
    """
    built = None if scheduler is None else scheduler(optimizer)
    most = getattr(built, "total_steps", None)
    if isinstance(most, int) and steps > most:
        raise ModelError(
            f"{type(built).__name__} ends after total_steps={most}, but this training takes "
            f"{steps} of its steps, those of the worker with the most rows. Set it to {steps}, or "
            "see what schedulerEvery counts"
        )


def require_steady_state(optimizer: OptimizerBuilder, scheduler: SchedulerBuilder | None) -> None:
    """Check on a small stand-in for the model that the optimizer's state does not grow late.

    Replicas exchange the state as it was counted before the first step. What the stand-in does not
    show, the replicas themselves will say.

    Raises:
        ModelError: it grows or shrinks in one of the first steps.
    """
    try:
        stand_in = Replica(
            nn.Linear(2, 2), optimizer, nn.MSELoss(), scheduler=scheduler, scheduler_every="step"
        )
        stand_in.count_optimizer_state()
        for _ in range(REHEARSED_STEPS):
            for parameter in stand_in.trainable():
                parameter.grad = torch.ones_like(parameter)
            stand_in.update()
            stand_in.layout(with_optimizer=True)
    except TrainingError as error:
        raise ModelError(f"tried on a layer of 2 x 2 numbers, {error}") from None
    except Exception as error:  # it may be made for another model, or a schedule of fewer steps
        logger.debug("the optimizer was not rehearsed to the end: %s", error)


def build(
    model: ModelBuilder, optimizer: OptimizerBuilder, loss: LossFunction, seed: int
) -> Replica:
    """Build the replica that will be probed.

    Raises:
        LazyModelError: the model has to see a batch first.
        ModelError: the model or its optimizer cannot be built.
    """

    def checked_model() -> nn.Module:
        module = model()
        if not isinstance(module, nn.Module):
            raise ModelError(f"model builds a {type(module).__name__}; it must return an nn.Module")
        if has_lazy_parameters(module):
            raise LazyModelError(module)
        return module

    def checked_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        built = optimizer(parameters)
        if not hasattr(built, "param_groups"):
            raise ModelError(
                f"optimizer builds a {type(built).__name__}; it must return one "
                f"torch.optim.Optimizer. {SEVERAL_OPTIMIZERS}"
            )
        return built

    try:
        return build_replica(checked_model, checked_optimizer, loss, seed)
    except ModelError:
        raise
    except Exception as error:  # the user's constructors may raise anything
        # Of an instance, for torch cannot copy all of those.
        fix = f". {SHOW_ZEROS}" if "uninitialized parameter" in str(error) else ""
        raise ModelError(
            f"the model or its optimizer cannot be built: {type(error).__name__}: {error}{fix}"
        ) from error


class LazyModelError(ModelError):
    """A model has lazy layers that have not seen a batch.

    Attributes:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(
            f"the model has lazy layers that no forward pass has initialized. {SHOW_ZEROS}"
        )
        self.module = module


def probe(
    replica: Replica,
    schema: FeedSchema,
    facts: Sequence[ColumnFacts],
    head: Head,
    *,
    steps: bool = True,
) -> Tensor:
    """Take one step with a replica that is thrown away afterwards.

    Args:
        replica: from ``build``.
        schema: the tensors that it will be fed.
        facts: what is known of each of its columns.
        head: what the loss says about the outputs.
        steps: whether to take the step, or to go only as far as the loss.

    Returns:
        The model's outputs for the two rows.

    Raises:
        ModelError: the model, the loss or the optimizer fails.
        DataError: the label is out of the model's range.
    """
    columns = list(map(_extremes, facts, schema.stored))
    if schema.weight is not None:
        columns[-1] = torch.ones(2)
    batch = schema.batch(columns, last=True)
    with borrowed_random_numbers(), torch.set_grad_enabled(steps):
        outputs, loss = _try_out(replica, batch, schema, facts, head)
        if steps:
            try:
                loss.backward()  # type: ignore[no-untyped-call]
                replica.optimizer.step()
            except Exception as error:  # a detached output, an optimizer that needs a closure, ...
                both = _both(outputs, batch)
                _fail(f"the backward pass or the optimizer's step fails after {both}", error)
    return outputs.detach()


def _try_out(
    replica: Replica,
    batch: Batch,
    schema: FeedSchema,
    facts: Sequence[ColumnFacts],
    head: Head,
) -> tuple[Tensor, Tensor]:
    """The outputs and the loss."""
    replica.module.train()
    shapes = _shapes(batch.features)
    labels = schema.labels
    features, label_facts = facts[: len(schema.features)], facts[len(schema.features) :]
    try:
        outputs = forward(replica.module, batch.features)
    except Exception as error:  # the user's forward may raise anything
        integers = _integers(schema.features, features)
        hint = _hint(error, schema.features, features)
        _fail(f"the model fails on a batch with features of {shapes}{integers}", error, hint)
    if not isinstance(outputs, Tensor):
        raise ModelError(
            f"the model returns a {type(outputs).__name__} for features of {shapes}; it must "
            "return one tensor of shape (rows, ...)"
        )
    if outputs.dim() == 0 or len(outputs) != 2:
        raise ModelError(
            f"the model returns shape {tuple(outputs.shape)} for features of {shapes}; the first "
            "dimension must be the rows"
        )
    ignored = getattr(replica.loss, "ignore_index", None)
    for label, found in zip(labels, label_facts[: len(labels)], strict=True):
        _check_label_range(label, found, outputs, head, ignored)
    both = _both(outputs, batch)
    try:
        with warnings.catch_warnings():
            # torch only warns before it broadcasts (2, 2) outputs against (2,) targets.
            warnings.filterwarnings("error", message="Using a target size")
            loss = replica.loss_of(outputs, batch)
    except ModelError:
        raise
    except Exception as error:  # the user's loss may raise anything
        _fail(f"the loss fails on {both} (label column '{labels[0].name}')", error)
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ModelError(f"the loss of {both} must be a scalar tensor, the mean; it is {shape}")
    return outputs, loss


def _both(outputs: Tensor, batch: Batch) -> str:
    targets = align_targets(outputs, batch.targets)
    return f"outputs {_shapes(outputs)} and targets {_shapes(targets)}"


def _check_label_range(
    label: ColumnSpec, facts: ColumnFacts, outputs: Tensor, head: Head, ignored: int | None
) -> None:
    name, low, high = label.name, facts.smallest, facts.largest
    if low is None or high is None or label.is_array:
        return
    if head.takes_class_index and outputs.dim() >= 2:
        classes = outputs.shape[1]
        if (low < 0 and low != ignored) or high >= classes:
            raise DataError(
                f"label column '{name}' holds {low:g} to {high:g} ({_where(facts)}), but the "
                f"model has {classes} outputs and so takes classes 0 to {classes - 1}. Number the "
                "classes from 0 (pyspark.ml.feature.StringIndexer does), or give the model more "
                "outputs"
            )
    if head in (Head.BINARY_LOGIT, Head.BINARY_PROBABILITY) and (low < 0 or high > 1):
        raise DataError(
            f"label column '{name}' holds {low:g} to {high:g} ({_where(facts)}), but the loss "
            "takes 0 to 1. Map the two classes to 0 and 1, or use CrossEntropyLoss for more classes"
        )


def _integers(features: Sequence[ColumnSpec], facts: Sequence[ColumnFacts]) -> str:
    """What integers the batch holds, which may be out of an embedding's range, and whose."""
    ranges = [
        f"'{spec.name}' from {found.smallest} ({found.where('smallest')}) to {found.largest} "
        f"({found.where('largest')})"
        for spec, found in zip(features, facts, strict=True)
        if not spec.dtype.is_floating_point and found.smallest is not None
    ]
    return f", {', '.join(ranges)}" if ranges else ""


def _where(facts: ColumnFacts) -> str:
    return f"{facts.where('smallest')}, {facts.where('largest')}"


def _extremes(facts: ColumnFacts, spec: ColumnSpec) -> Tensor:
    """Two rows: the column's smallest and largest value, 0 and 1 where those are not known."""
    low = 0.0 if facts.smallest is None else facts.smallest
    high = 1.0 if facts.largest is None else facts.largest
    exact = torch.float64 if spec.dtype.is_floating_point else spec.dtype
    rows = torch.tensor([low, high], dtype=exact).to(spec.dtype)
    return rows.view(2, *[1 for _ in spec.row_shape]).repeat(1, *spec.row_shape)


def _shapes(tensors: Features | Targets) -> str:
    if isinstance(tensors, dict):
        return ", ".join(f"'{name}' {_shapes(tensor)}" for name, tensor in tensors.items())
    if isinstance(tensors, tuple):
        return ", ".join(map(_shapes, tensors))
    return f"{str(tensors.dtype).removeprefix('torch.')} {tuple(tensors.shape)}"


_OF_SHAPE = re.compile(r"\b[2-5]D\b|channels")
_OF_MASK = re.compile("bool", re.IGNORECASE)


def _hint(error: Exception, features: Sequence[ColumnSpec], facts: Sequence[ColumnFacts]) -> str:
    """Which Param helps, if torch misses dimensions or booleans; empty otherwise."""
    flat = [spec.name for spec in features if len(spec.row_shape) == 1]
    if flat and _OF_SHAPE.search(str(error)):
        return (
            f". Rows of '{flat[0]}' are flat; to give them a shape, as images have it: "
            f"columnShapes={{'{flat[0]}': [channels, height, width]}}"
        )
    zero_or_one = [
        spec.name
        for spec, found in zip(features, facts, strict=True)
        if spec.dtype == torch.int64 and (found.smallest, found.largest) in ((0, 0), (0, 1), (1, 1))
    ]
    if zero_or_one and _OF_MASK.search(str(error)):
        masks = ", ".join(f"'{name}': 'bool'" for name in zero_or_one)
        return f". Booleans are fed as int64; to have masks of them: columnDtypes={{{masks}}}"
    return ""


def _fail(what: str, error: Exception, hint: str = "") -> NoReturn:
    raise ModelError(f"{what}: {type(error).__name__}: {error}{hint}") from error
