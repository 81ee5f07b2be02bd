"""The driver's half of a run: an initial center in, rounds in between, a trained module out.

Knows nothing of Spark: whoever starts the workers is handed in as ``launch``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sparkdl.averager.rounds import Event
from sparkdl.averager.server import Averager
from sparkdl.errors import ModelError, SparkDLError
from sparkdl.events import EpochSummary
from sparkdl.feed.facts import DataFacts, check_facts
from sparkdl.protocols import Layout, LossFunction, ModelBuilder, OptimizerBuilder
from sparkdl.replica import Replica
from sparkdl.worker import Job

Launch = Callable[[Averager], AbstractContextManager[object]]
"""Starts the workers and, on leaving, sees that none is left; failures go to ``Averager.fail``."""


@dataclass(frozen=True)
class Outcome:
    """What a run leaves behind.

    Attributes:
        module: the model with the last center's parameters and buffers, on the CPU.
        history: one summary an epoch.
    """

    module: nn.Module
    history: list[EpochSummary]


def as_builder(model: nn.Module | ModelBuilder) -> ModelBuilder:
    """A function that builds a module of one's own: a copy of an instance, or the function given.

    Args:
        model: a module, or a function or class that takes no arguments and returns one.
    """
    if isinstance(model, nn.Module):
        return functools.partial(copy.deepcopy, model)
    return model


def build_replica(
    model: ModelBuilder, optimizer: OptimizerBuilder, loss: LossFunction, seed: int
) -> Replica:
    """Build a replica as every worker does, leaving the caller's random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Replica(model(), optimizer, loss)


def initial_center(replica: Replica, *, with_optimizer: bool) -> tuple[Layout, list[Tensor]]:
    """Take a replica's state as the first center, sharing its memory where dtypes allow.

    Args:
        replica: freshly built.
        with_optimizer: whether optimizer state is part of the center. It starts at zero and is
            not sent to anyone before the first round.
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


def run(
    job: Job,
    world_size: int,
    launch: Launch,
    *,
    host: str = "127.0.0.1",
    advertised_host: str | None = None,
    check: Callable[[DataFacts], None] = lambda facts: None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Outcome:
    """Serve the rounds of one run from the initial center to the trained module.

    Args:
        job: what the workers train.
        world_size: number of workers.
        launch: starts them, given the averager.
        host: interface to bind the averager to.
        advertised_host: the name under which workers reach it.
        check: called with what the workers found in their rows, before any of them trains; what
            it raises ends the run.
        on_event: called in this thread for the data's facts and each window and epoch reported.

    Raises:
        ModelError: the optimizer cannot take a step.
        DataError: the rows cannot be trained on.
        TrainingError: the run could not be finished; see ``errors``.
    """
    replica = build_replica(job.model, job.optimizer, job.loss, job.seed)
    try:
        layout, center = initial_center(
            replica, with_optimizer=job.strategy.exchanges_optimizer_state
        )
    except Exception as error:  # the user's optimizer may raise anything
        raise ModelError(
            f"the optimizer's step fails on zero gradients: {type(error).__name__}: {error}"
        ) from error
    history: list[EpochSummary] = []
    averager = Averager(
        layout,
        center,
        world_size,
        job.strategy.codec,
        host=host,
        advertised_host=advertised_host,
        deadline_s=job.deadline_s,
    )
    with averager, launch(averager):
        for event in averager.events():
            if isinstance(event, DataFacts):
                try:
                    check_facts(event, job.schema.columns)
                    check(event)
                except SparkDLError as error:
                    # Workers wait for the answer; the launch waits for them to leave.
                    averager.fail(error)
                    raise
                averager.start()
            on_event(event)
            if isinstance(event, EpochSummary):
                history.append(event)
    for values, tensor in zip(
        replica.segments(with_optimizer=False), averager.center, strict=False
    ):
        values.copy_(tensor)
    return Outcome(replica.release(), history)
