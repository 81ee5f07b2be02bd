"""The replica whose values a training starts from, and the first center."""

from __future__ import annotations

import copy
import functools

from torch import Tensor, nn

from sparkdl.process.randomness import borrowed_random_numbers
from sparkdl.protocols import (
    Layout,
    LossFunction,
    ModelBuilder,
    OptimizerBuilder,
    SchedulerBuilder,
)
from sparkdl.replica import Replica
from sparkdl.worker import Job


def as_builder(model: nn.Module | ModelBuilder) -> ModelBuilder:
    """A function that builds a fresh module: a copy of an instance, or the given function itself.

    Args:
        model: a module, or a function or class that takes no arguments and returns one.
    """
    if isinstance(model, nn.Module):
        return functools.partial(copy.deepcopy, model)
    return model


def build_replica(
    model: ModelBuilder,
    optimizer: OptimizerBuilder,
    loss: LossFunction,
    seed: int,
    scheduler: SchedulerBuilder | None = None,
    *,
    clip_norm: float | None = None,
    features_as_kwargs: bool = False,
) -> Replica:
    """Build a replica as every worker does, leaving the caller's random state unchanged."""
    with borrowed_random_numbers(seed):
        return Replica(
            model(),
            optimizer,
            loss,
            clip_norm=clip_norm,
            scheduler=scheduler,
            features_as_kwargs=features_as_kwargs,
        )


def first_replica(job: Job) -> Replica:
    """Build the replica whose values a training starts from: the same for the same seed."""
    # With the schedule, which may turn on momentum, for which the optimizer keeps state.
    return build_replica(job.model, job.optimizer, job.loss, job.seed, job.scheduler)


def initial_center(replica: Replica, *, with_optimizer: bool) -> tuple[Layout, list[Tensor]]:
    """Take a replica's state as the first center, sharing its memory where dtypes allow.

    Args:
        replica: the freshly built replica.
        with_optimizer: whether optimizer state is part of the center. It starts at zero and is sent
            to nobody before the first round.
    """
    layout = replica.layout(with_optimizer=with_optimizer)
    segments = replica.segments(with_optimizer=with_optimizer)
    center = [
        tensor.detach().to(segment.center_dtype)
        for tensor, segment in zip(segments, layout, strict=True)
    ]
    for tensor, segment in zip(center, layout, strict=True):
        if segment.kind == "optimizer":
            tensor.zero_()
    return layout, center
