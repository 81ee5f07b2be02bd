"""Synchronous SGD: the workers add up their gradients in every step, while backward still runs.

Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training". The
driver takes copies of the result, to resume from should a worker be lost.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from sparkdl.averager.values.wire_format import FULL_PRECISION
from sparkdl.collective import release_model
from sparkdl.errors import ConfigError
from sparkdl.protocols import Batch, OptimizerBuilder
from sparkdl.replica import Replica
from sparkdl.replica.optimizer_state import NamedParameters, takes_names
from sparkdl.replica.shards import ShardedSegment
from sparkdl.strategies.all_reduce.chain import Divided, Reducer
from sparkdl.strategies.all_reduce.compression import Compression
from sparkdl.strategies.all_reduce.gradient_noise import DECAY, NoiseMeter
from sparkdl.strategies.all_reduce.gradients import ROUNDED, FiniteGradients, reduce_by
from sparkdl.strategies.all_reduce.hybrid import Hybrid
from sparkdl.strategies.all_reduce.kfac import KFACPreconditioner
from sparkdl.strategies.all_reduce.model_and_loss import (
    ForwardPass,
    ModelAndLoss,
    batch_norm_layers,
    synchronize,
)
from sparkdl.strategies.all_reduce.sharded import ShardedModel
from sparkdl.strategies.all_reduce.split_layers import SplitLayers
from sparkdl.strategies.arguments import (
    BOOL,
    STEPS,
    argument,
    instance,
    must,
    number,
    or_none,
    whole,
)
from sparkdl.strategies.base import Needs, Run, Strategy
from sparkdl.strategies.worker_group import REDUCTION, ColorTrees, WorkerGroup, require_no_gpu

NOT_TOGETHER = {
    "hybrid": {
        "shard_optimizer": "gives each worker whole parameters to step",
        "shard_parameters": "gives each worker other rows to keep",
        "compression": "sends smaller gradients, and hybrid hardly any",
        "preconditioner": "needs the whole gradients of a layer on each worker",
        "measure_noise": "needs the whole gradients of each worker's own rows",
        "find_unused_parameters": "lets some rows leave out layers which others of their group "
        "need",
    },
    "reduction": {
        "hybrid": "adds up the gradients of its layers among workers of different groups",
        "shard_parameters": "gives each worker its share of the sum only",
    },
    "shard_parameters": {
        "shard_optimizer": "is part of what shard_parameters does",
        "compression": "needs the whole gradients",
        "preconditioner": "needs the whole gradients",
        "measure_noise": "needs the whole gradients",
        "find_unused_parameters": "lets workers use different parameters in a step, of which each "
        "has only a part",
    },
}
"""What cannot be combined with an argument, and why."""
NOT_WITH_COMPRESSOR = {
    "reduction": "has messages of its own, too small for trees",
    "shard_optimizer": "needs the whole optimizer state on every worker, but with shard_optimizer "
    "each has only a part",
    "measure_noise": "leaves too little of the gradients to measure their noise",
    "preconditioner": "and a preconditioner both need the gradients as the workers computed them",
}
"""What cannot be combined with a compressor, and why; the optimizer's state only if it reads it."""


@dataclass(frozen=True)
class GradientAllReduce(Strategy["Reducer"]):
    """Reduce gradients among the workers over NCCL, or gloo on CPUs, in every step.

    Rule:
        With workers r = 1..R, where worker r has n_r examples in this step (0 once its rows are
        used up)::

            g  <-  sum_r n_r * grad(mean loss of worker r's examples) / sum_r n_r
            w  <-  optimizer step on g, the same on every worker

        which is single-process SGD on the union of the workers' minibatches, for any optimizer.
        Where the loss divides by something else (class weights, labels that are ignored, a loss
        that returns its sum and weight), n_r is that, and not the number of examples.

    Phases:
        1. The workers agree on the number of steps, that of the worker with the most rows.
        2. In each step every worker computes the gradients of its minibatch, and sends them in
           buckets while the backward pass still runs.
        3. When the last bucket has arrived, all take the same optimizer step.
        4. After ``commit_every`` steps, and at the end of the epoch, the driver takes a copy of one
           worker's parameters and optimizer state; the one at the end is validated.

    When:
        Where links are fast compared with a step, or the result must be that of one process:
        nothing learns more from each row.

    When not:
        On links that take longer for the gradients than a step does (averaging, outer optimizers
        and compression send less); for small models on CPUs, whose steps are shorter than a
        message's trip; nor where workers come and go, as losing one stops all.

    All workers are needed at the same time. If one is lost, all leave and are restarted from the
    last copy that the driver took.

    Args:
        bucket_mb: MB of gradients that are sent together, > 0; smaller buckets start earlier,
            larger ones cost fewer messages. 25 is torch's own.
        accumulate: minibatches on each worker for one optimizer step, >= 1; 1 unless the minibatch
            that you want does not fit in memory.
        compression: ``fp16`` or ``bf16`` send rounded gradients, half the bytes of float32;
            ``PowerSGD``, ``TopK`` and ``OneBitAdam`` send far fewer, and send what they leave out
            later. Workers still agree, but on a different result than without.
        shard_optimizer: whether each worker keeps the optimizer's state for its share of the
            parameters only (ZeRO stage 1). The state is then not part of the driver's copy: there
            are no checkpoints, and a lost worker ends the fit.
        commit_every: optimizer steps after which the driver takes a copy, and so the most that are
            repeated after the loss of a worker; None for one at the end of each epoch only, which
            is enough if an epoch takes minutes.
        find_unused_parameters: whether a parameter may take no part in the loss; costs a traversal
            of the graph in every step.
        sync_batch_norm: whether BatchNorm layers normalize over the minibatches of all workers
            together, on CPUs too; costs two messages per layer and step. Every worker needs rows.
        measure_noise: whether each epoch's ``measured`` in the history has, as of its end, the
            ``gradient_noise_scale``, the rows up to which larger steps pay off, and what the
            ``adascale_gain`` would be. Every tenth step takes an extra pass over each gradient. It
            needs two or more workers, or minibatches per step.
        preconditioner: what is applied to the gradients before the optimizer steps; None for
            nothing.
        shard_parameters: whether each worker keeps only its share of parameters, gradients and
            optimizer state (ZeRO stage 3, by torch's ``fully_shard``). Modules of up to
            ``bucket_mb`` MB are gathered together before they run, forward and backward. The
            driver's copies and checkpoints are whole. Every worker needs rows, and a module may
            read its parameters only while it is called.
        hybrid: which fully connected layers groups of workers compute together, so that rows are
            exchanged in the place of most gradients; None for none. A training may go on from a
            checkpoint with other groups.
        reduction: None for gloo's ring, or for what NCCL chooses; ``ColorTrees()`` adds up along
            trees, on CPUs.

    Raises:
        ConfigError: an argument is out of range.
    """

    bucket_mb: float = argument(25, number("of MB > 0", lambda mb: mb > 0))
    accumulate: int = argument(1, whole(1, "minibatches"))
    compression: Literal["fp16", "bf16"] | Compression | None = argument(
        None,
        must(
            "None, 'fp16', 'bf16' or a compressor such as PowerSGD(2)",
            lambda value: value in (None, *ROUNDED) or isinstance(value, Compression),
        ),
    )
    shard_optimizer: bool = argument(False, BOOL)
    commit_every: int | None = argument(None, or_none(STEPS))
    find_unused_parameters: bool = argument(False, BOOL)
    sync_batch_norm: bool = argument(False, BOOL)
    measure_noise: bool = argument(False, BOOL)
    preconditioner: KFACPreconditioner | None = argument(
        None, instance(KFACPreconditioner | None, "None or a KFACPreconditioner")
    )
    shard_parameters: bool = argument(False, BOOL)
    hybrid: Hybrid | None = argument(None, instance(Hybrid | None, "None or a Hybrid"))
    reduction: ColorTrees | None = argument(None, REDUCTION)

    def __post_init__(self) -> None:
        super().__post_init__()
        for given, others in NOT_TOGETHER.items():
            for name, why in others.items():
                if getattr(self, given) and getattr(self, name):
                    raise ConfigError(f"{name} {why}: drop it, or {given}")
        if isinstance(self.compression, Compression):
            compression = f"compression={type(self.compression).__name__}(...)"
            for name, why in NOT_WITH_COMPRESSOR.items():
                reads = name != "shard_optimizer" or self.compression.reads_optimizer
                if getattr(self, name) and reads:
                    raise ConfigError(f"{compression} {why}: drop it, or {name}")

    wire_format = FULL_PRECISION

    @property
    def needs(self) -> Needs:
        """All workers in every step; no checkpoints where the optimizer's state is sharded."""
        return Needs(
            exchanges_optimizer_state=not self.shard_optimizer,
            collective=True,
            joint_batch_norm=self.sync_batch_norm,
            checkpointable=not self.shard_optimizer,
            shards_replica=self.shard_parameters,
            minibatches_a_step=self.accumulate,
        )

    @property
    def lasting(self) -> Strategy[Any]:
        """Who computes what changes no result."""
        if (self.hybrid, self.reduction) == (None, None):
            return self
        return replace(self, hybrid=None, reduction=None)

    def require_fits(self, replica: Replica) -> None:
        """Check what compression, preconditioner, synchronized BatchNorm and hybrid need."""
        compressed = isinstance(self.compression, Compression)
        if compressed and any(parameter.is_complex() for parameter in replica.trainable()):
            raise ConfigError(
                f"compression={type(self.compression).__name__}(...) takes real gradients, "
                "but this model has complex parameters: drop it"
            )
        if self.sync_batch_norm:
            batch_norm_layers(replica.module)
        if self.shard_parameters and replica.shards is None:
            replica.cut_state()  # refuses what cannot be cut
        for part in (self.compression, self.preconditioner, self.hybrid):
            if part is not None and not isinstance(part, str):
                part.require_fits(replica)
        require_no_gpu(self.reduction, replica)

    def require_workers(self, num_workers: int) -> None:
        """Check that the groups divide them."""
        if self.hybrid is not None:
            self.hybrid.require_workers(num_workers)

    def start(self, run: Run) -> Reducer:
        """Wrap the replica, and find out how many steps all workers have."""
        self.require_fits(run.replica)
        if self.shard_optimizer:
            run.replica.rebuild_optimizer(_sharded)
        group = WorkerGroup(run, run.batch_size * self.accumulate)
        replica, collective = run.replica, group.collective
        split = None if self.hybrid is None else self._split(run, group, self.hybrid)
        model = self._distributed(run, group, split)
        compressor, rounding, trees = None, None, None
        if isinstance(self.compression, Compression):
            compressor = self.compression.compressor(collective, replica)
        else:
            rounding = self.compression
        if self.reduction is not None:
            trees = self.reduction.among(collective)
            run.cleanup.callback(trees.close)
        if not isinstance(model, ShardedModel):
            reduce_by(model, run, rounding, compressor, trees)
        # What compressors leave out, they send later, when others count.
        divides = replica.may_divide and compressor is None
        chain = [
            split,
            FiniteGradients(run, model, ROUNDED.get(rounding or ""), split),
            Divided(replica, collective) if divides else None,
            self._meter(run, group) if self.measure_noise else None,
            compressor,
            self.preconditioner.start(run) if self.preconditioner is not None else None,
        ]
        runs_as_one = self.sync_batch_norm or self.shard_parameters or self.hybrid is not None
        return Reducer(run, group, model, [each for each in chain if each], runs_as_one)

    def _split(self, run: Run, group: WorkerGroup, hybrid: Hybrid) -> SplitLayers | None:
        layers = hybrid.named(run.replica.module)
        grid = hybrid.grid(layers.values(), group.rows_a_step, run.world_size)
        return None if grid.width == 1 else SplitLayers(layers, grid, run, group.collective)

    def _distributed(
        self, run: Run, group: WorkerGroup, split: SplitLayers | None
    ) -> DistributedDataParallel | ShardedModel:
        """The replica's model with its loss, whose gradients are reduced among the workers."""
        forward_pass = synchronize(run.replica.module) if self.sync_batch_norm else None
        if not self.shard_parameters:
            used = not self.find_unused_parameters
            inner = ModelAndLoss(run.replica, forward_pass, all_used=used, split=split)
            with warnings.catch_warnings():
                # torch is renaming the argument; older versions do not know the new name.
                warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
                model = DistributedDataParallel(
                    inner,
                    bucket_cap_mb=self.bucket_mb,
                    find_unused_parameters=self.find_unused_parameters,
                    gradient_as_bucket_view=True,
                    # All hold the initial center already, and buffers are averaged once per epoch.
                    init_sync=False,
                    broadcast_buffers=False,
                )
            run.cleanup.callback(release_model, model)  # before the group ends
            return model
        if run.replica.device.type == "cuda":
            run.cleanup.enter_context(torch.cuda.device(run.replica.device))  # fully_shard asks it
        inner = ModelAndLoss(run.replica, forward_pass or ForwardPass(undone=True), all_used=True)
        sharded = ShardedModel(inner, run.replica, group.collective, self.bucket_mb * 2**20)
        run.cleanup.callback(sharded.release)
        return sharded

    def _meter(self, run: Run, group: WorkerGroup) -> NoiseMeter:
        return NoiseMeter(run, group, DECAY)

    def train_epoch(self, run: Run, state: Reducer, batches: Iterable[Batch]) -> None:
        """Take as many optimizer steps as the worker with the most rows, then tell the driver."""
        group = state.group
        remaining = iter(batches)
        while not group.done:
            run.count_step()
            state.step(itertools.islice(remaining, self.accumulate))
            run.end_step()
            group.steps += 1
            group.heartbeat(run)
            group.commit_if_due(run, self.commit_every, lambda: self._agreed(run, state))
        self.end_epoch(run, state)

    def end_epoch(self, run: Run, state: Reducer) -> None:
        """Commit the replica's state, which is the same on all workers."""
        run.measured = {k: v for each in state.chain for k, v in each.measured().items()}
        state.group.commit(run, self._agreed(run, state), last=True)

    def _agreed(self, run: Run, state: Reducer) -> Sequence[Tensor | ShardedSegment]:
        """The replica's state, after averaging the buffers, which gradients do not keep equal."""
        for each in state.chain:
            each.gather()
        with_optimizer = not (self.shard_optimizer or self.shard_parameters)
        layout = run.replica.layout(with_optimizer=with_optimizer)
        segments = run.replica.segments(with_optimizer=with_optimizer)
        buffers = [
            values
            for segment, values in zip(layout, segments, strict=True)
            if segment.kind == "buffers"
        ]
        state.group.average(buffers, state.group.shares, run.window())
        return state.model.agreed() if isinstance(state.model, ShardedModel) else segments


def _sharded(build: OptimizerBuilder, named: NamedParameters) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    pairs = list(named)
    given: Any = pairs if takes_names(build) else [parameter for _, parameter in pairs]

    def of_a_share(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The user's optimizer for this worker's part of each group.

        Its builder takes all parameters, as it may sort them into groups or by their names.
        """
        optimizer = build(given)
        mine = {parameter for group in groups for parameter in group["params"]}
        for parameter in optimizer.state.keys() - mine:
            del optimizer.state[parameter]
        optimizer.param_groups.clear()
        for group in groups:
            optimizer.add_param_group(group)
        return optimizer

    # The names would be those of all parameters.
    whole = [{k: v for k, v in g.items() if k != "param_names"} for g in build(given).param_groups]
    return ZeroRedundancyOptimizer(whole, of_a_share)  # type: ignore[arg-type]
