"""What callbacks and reports see of a training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from sparkdl.averager.messages.progress import Progress
from sparkdl.averager.service.saving import CheckpointPlan
from sparkdl.averager.service.snapshot import KeptModel
from sparkdl.callbacks.base import Training
from sparkdl.driver.measuring import Measuring
from sparkdl.protocols import Layout
from sparkdl.replica import Replica
from sparkdl.report import Recording, Setup
from sparkdl.worker import Job


def setup_of(job: Job, replica: Replica, layout: Layout, settings: Mapping[str, object]) -> Setup:
    """What is trained, and how, for callbacks and reports."""
    strategy = job.strategy
    parameters = list(replica.module.parameters())
    return Setup(
        model=type(replica.module).__name__,
        strategy=repr(strategy),
        period=getattr(strategy, "period", None),
        aggregation=getattr(strategy, "aggregation", None),
        collective=strategy.needs.collective,
        wire_dtype=getattr(strategy, "wire_dtype", None),
        epochs=job.epochs,
        batch_size=job.batch_size,
        parameters=sum(each.numel() for each in parameters),
        trained=sum(each.numel() for each in parameters if each.requires_grad),
        model_bytes=sum(
            segment.numel * segment.dtype.itemsize
            for segment in layout
            if segment.kind in ("parameters", "buffers")
        ),
        settings=settings,
    )


def training_of(
    job: Job,
    world_size: int,
    progress: Progress | None,
    kept_model: KeptModel | None,
    plan: CheckpointPlan | None,
    measuring: Measuring | None,
) -> Training:
    """What callbacks see when a training begins or resumes."""
    history = () if progress is None else progress.history
    # If nothing was committed after an epoch, the workers validate that epoch again.
    known = len(history) if progress is None or progress.rounds else len(history) - 1
    kept_epoch = None if kept_model is None else kept_model.epoch
    metrics = {} if measuring is None else measuring.higher_is_better
    history = history[: max(known, 0)]
    recording = Recording(world_size, history=history)
    return Training(
        job.epochs,
        history,
        kept_epoch,
        metrics,
        recording=recording,
        step=0 if progress is None else max(each.step for each in progress.positions),
        resumed=progress is not None,
        identity=None if plan is None else _name_of(plan),
        features_as_kwargs=job.features_as_kwargs,
    )


def _name_of(plan: CheckpointPlan) -> str:
    """A name shared by all fits that resume from each other's checkpoints."""
    told = json.dumps([plan.store.path, plan.config], sort_keys=True, default=repr)
    return hashlib.sha256(told.encode()).hexdigest()[:32]
