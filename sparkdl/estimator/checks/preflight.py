"""Everything that can be checked without training, checked before training."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass, replace
from typing import Any, cast

from pyspark.sql import DataFrame
from torch import nn

from sparkdl.checkpoint.portable import require_portable
from sparkdl.driver import as_builder
from sparkdl.errors import ConfigError, DataError
from sparkdl.estimator.checks.building import build_whole, parameter_dtype
from sparkdl.estimator.checks.probe import (
    PREDICTED_ROWS,
    probe,
    require_single_row,
    widths_of_shorter_rows,
)
from sparkdl.estimator.checks.rehearsal import require_schedule, require_steady_state, require_steps
from sparkdl.estimator.checks.values import (
    UnbalancedError,
    balanced,
    check_held_out,
    check_label,
    check_weight,
    require_holdable,
)
from sparkdl.estimator.head import head_of
from sparkdl.estimator.metric_inputs import MetricInputs
from sparkdl.estimator.params.estimator import EstimatorParams
from sparkdl.estimator.predictions import require_any_length
from sparkdl.estimator.schema import fed_columns
from sparkdl.feed.columns.schema import FeedSchema
from sparkdl.feed.feed import FeedOptions
from sparkdl.feed.statistics.shards import DataStatistics
from sparkdl.metrics import Metrics
from sparkdl.metrics.metrics import WEIGHTS
from sparkdl.outputs import Widths, pick, widths_of
from sparkdl.protocols import ColumnSpec
from sparkdl.replica import Precision
from sparkdl.replica.initial import WarmStart
from sparkdl.replica.loss_use import divides_by
from sparkdl.replica.losses import LossUse
from sparkdl.replica.schedule import Unit
from sparkdl.spark.catalyst.plans import has_stable_order, known_partitions
from sparkdl.spark.closures.pickling import require_picklable
from sparkdl.spark.cluster.gpus import gpu_profile, ranks_a_task
from sparkdl.spark.cluster.network import network_of
from sparkdl.spark.cluster.slots import choose_num_workers, require_static_allocation
from sparkdl.spark.launch.worker_rows import Workers, delivered
from sparkdl.spark.rows.converters import in_bytes
from sparkdl.spark.rows.delivery import Delivery, Way
from sparkdl.spark.session.encryption import (
    encrypts_connections,
    keeps_rows_in_memory,
    require_trusted_network,
)
from sparkdl.spark.session.required import require_frame
from sparkdl.worker import Job

logger = logging.getLogger(__name__)


class Preflight:
    """What can be told from a fit's Params, the DataFrame's schema and the cluster.

    Args:
        params: the estimator.
        frame: the DataFrame to fit.
        warm_start: the model whose values it starts from; None for new ones.

    Raises:
        ConfigError: more workers than slots, or the strategy does not go with the model, the
            optimizer, ``clipNorm`` or the number of workers.
        DataError: a column is missing, duplicated or not numeric.
        ModelError: the model, loss or optimizer cannot be built or shipped.

    Attributes:
        job: what every worker trains.
        workers: where they run, and on which rows.
        head: what the model's outputs mean.
        warm_start: values to start from; None for new ones.
        checked: what only the rows could tell; set by ``check``.
    """

    checked: Checked
    _has_stepped = False
    _loss_use: LossUse | None = None

    def __init__(
        self, params: EstimatorParams, frame: DataFrame, warm_start: nn.Module | None = None
    ) -> None:
        require_frame(frame, to_end="Fit")
        self._params = params
        for name in ("model", "loss", "optimizer", "scheduler", "strategy", "batchTransform"):
            require_picklable(name, params.getOrDefault(name))
        require_picklable("callbacks", list(params.worker_callbacks()))
        require_picklable("metrics", params.getMetrics())
        builder = as_builder(params.getModel())
        loss = params.loss_function()
        builder, self._replica = build_whole(builder, params, frame)
        require_portable(self._replica.module, builder)
        params.getStrategy().require_fits(self._replica)
        self.warm_start: WarmStart | None = None
        if warm_start is not None:
            self.warm_start = WarmStart(warm_start)
            self.warm_start.require_fits(self._replica.module)
            builder = self.warm_start.builder(builder, self._replica.module)
        scheduler_every = cast(Unit, params.getSchedulerEvery())
        scheduler = params.getScheduler()
        schedule = require_schedule(self._replica.optimizer, scheduler, scheduler_every)
        if params.getStrategy().needs.exchanges_optimizer_state:
            # A scheduler that follows losses changes only the learning rate.
            steps = None if schedule.follows_epoch_losses else scheduler
            require_steady_state(params.getOptimizer(), steps)
        fractions = parameter_dtype(self._replica.module)
        self.head = head_of(loss)
        fed = fed_columns(params, frame, loss, self.head, fractions, params.getSeed())
        spark = frame.sparkSession
        self.job = Job(
            model=builder,
            loss=loss,
            optimizer=params.getOptimizer(),
            scheduler=scheduler,
            scheduler_every=scheduler_every,
            strategy=params.getStrategy(),
            schema=fed.schema,
            epochs=params.getEpochs(),
            batch_size=params.getBatchSize(),
            seed=params.getSeed(),
            deadline_s=params.getTimeout(),
            max_failures=params.getMaxFailures(),
            min_workers=params.getMinWorkers(),
            callbacks=params.worker_callbacks(),
            metrics=self._metrics(),
            scheduler_metric=params.getSchedulerMetric(),
            clip_norm=params.getClipNorm(),
            precision=cast(Precision, params.getPrecision()),
            features_as_kwargs=params.getFeaturesAsKwargs(),
            feed=FeedOptions(
                drop_last=params.getDropLast(),
                reshuffle_every=params.getReshuffleEvery(),
                transform=params.getBatchTransform(),
                resident_bytes=in_bytes(params.getMemoryBudget()),
                group_by_length=params.getGroupByLength(),
            ),
            tls=encrypts_connections(spark, params.getTls()),
        )
        if params.getStreamFirstEpoch():
            self._require_streamable()
        if self.job.strategy.needs.gang_start:
            require_static_allocation(spark)
        if self.job.strategy.needs.collective:
            require_trusted_network(spark, params.getTls(), type(self.job.strategy).__name__)
        profile = gpu_profile(spark, params.getDevice())
        ranks = ranks_a_task(spark, params.getDevice())
        num_workers = choose_num_workers(spark, params.getNumWorkers(), profile, ranks)
        if params.getMinWorkers() > num_workers:
            raise ConfigError(
                f"minWorkers is {params.getMinWorkers()}, but there are {num_workers} workers. Set "
                f"it to at most {num_workers}"
            )
        strategy = self.job.strategy
        strategy.require_workers(num_workers)
        if num_workers > 1 and self._replica.adds_losses:
            raise ConfigError(
                f"{_name(loss)} has reduction='sum', and there are {num_workers} workers: the sum "
                "over the rows of one is not that over all, nor is it a mean, which strategies can "
                "weigh. Use reduction='mean', with a smaller learning rate, or numWorkers=1"
            )
        gang_start_for = _name(strategy) if strategy.needs.gang_start else None
        delivery, replanned = delivered(
            frame, num_workers // ranks, ranks, params.getShuffleRows(), gang_start_for
        )
        self.workers = Workers(
            frame=frame if replanned is None else replanned.frame,
            columns=fed.columns,
            num_workers=num_workers,
            delivery=delivery,
            device=params.getDevice(),
            description=_describe(params, num_workers),
            store_in=params.getStoreIn(),
            network=network_of(
                spark,
                interface=params.getCollectiveInterface(),
                ports=params.getCollectivePorts(),
            ),
            ranks_a_task=ranks,
            ship_modules=params.getShipModules(),
            replanned=replanned,
        )
        # Memory may not have room for all rows twice.
        self._set_feed(
            exchange_rows=self.workers.delivery.exchanged,
            keep_exchanged=keeps_rows_in_memory(spark, params.getStoreIn()) is None,
        )
        if params.getStreamFirstEpoch():
            self._stream_if_ordered()
        self._refuse_not_finite = params.getHandleInvalid() == "error"

    def _metrics(self) -> Metrics | None:
        given = self._params.getMetrics()
        if given is None:
            return None
        metrics = Metrics.of(given, MetricInputs.of(self._params, self.head))
        metrics.begin()  # raises for what does not make a metric
        weight, alike = self._params.optional_column("weightCol"), metrics.without_weights()
        if weight is not None and alike:
            logger.warning(
                "weightCol='%s' weights the losses; the metrics %s count every row equally, "
                "because their update takes no '%s'",
                weight,
                ", ".join(alike),
                WEIGHTS,
            )
        return metrics

    def _require_streamable(self) -> None:
        """Refuse settings that need all rows to be known before the first is trained on."""
        if self.job.strategy.needs.equal_steps:
            raise ConfigError(
                f"streamFirstEpoch cannot be combined with {_name(self.job.strategy)} among "
                "executors, whose workers agree on the number of steps before the first. Drop it, "
                "or use ParameterAveraging(aggregation='driver')"
            )
        if self.job.schema.weight is not None:
            raise ConfigError(
                "streamFirstEpoch cannot be combined with weightCol: weights are divided by their "
                "mean, which is known only once all rows are read. Drop one of the two"
            )

    def _set_feed(self, **changes: Any) -> None:
        self.job = replace(self.job, feed=replace(self.job.feed, **changes))

    def _stream_if_ordered(self) -> None:
        """Stream the first epoch if the rows come in the same order whenever they are read.

        Spark's shuffle would read all rows before the first arrives, so surplus partitions are
        merged instead, whatever ``shuffleRows`` says.
        """
        frame, tasks = self.workers.frame, self.workers.num_tasks
        partitions = known_partitions(frame)
        reason = None
        if self.workers.ranks_a_task > 1:
            reason = "the GPUs of a task share its rows and could end up waiting for each other"
        elif partitions is None or not has_stable_order(frame):
            reason = "they do not come straight from files. Write them to files first"
        elif partitions < tasks:
            reason = (
                f"the DataFrame has {partitions} partitions for {tasks} workers, so some would "
                "start with none. Lower spark.sql.files.maxPartitionBytes, or write more files"
            )
        if reason is not None:
            logger.warning("streamFirstEpoch: the rows are read before the first epoch: %s", reason)
            return
        self._set_feed(stream_first_epoch=True)
        if self.workers.delivery.way is Way.SHUFFLED:
            self.workers = replace(self.workers, delivery=Delivery(Way.GROUPED))

    def read_first(self) -> None:
        """Have all rows read before the first epoch and spread evenly over the workers."""
        self._set_feed(stream_first_epoch=False)
        if not self.workers.delivery.exchanged:
            spread = Delivery(Way.SHUFFLED, reason="the partitions are too unequal")
            self.workers = replace(self.workers, delivery=spread)

    def _check_values(self, statistics: DataStatistics) -> None:
        schema, batch_size = self.job.schema, self.job.batch_size
        features = statistics.columns[: len(schema.features)]
        labels = slice(len(features), len(features) + len(schema.labels))
        for spec, found in zip(schema.features, features, strict=True):
            if found.not_finite and self._refuse_not_finite:
                raise DataError(
                    f"column '{spec.name}' holds NaN or infinity in {found.not_finite} of "
                    f"{statistics.rows + statistics.held_out} rows (the first is "
                    f"{found.where('not_finite')}). Replace them first (NaN with F.nanvl(col, "
                    "F.lit(0.0)), in arrays with F.transform(col, lambda x: F.nanvl(x, "
                    "F.lit(0.0)))), or feed them as they are with handleInvalid='keep'"
                )
            require_holdable(spec, found)
        for column, found in zip(
            self.workers.columns[labels], statistics.columns[labels], strict=True
        ):
            check_label(column, self.job.loss, found)
        for spec, found in zip(schema.labels, statistics.columns[labels], strict=True):
            require_holdable(spec, found)
        if schema.weight is not None:
            weights = statistics.columns[labels.stop]
            check_weight(schema.weight.name, weights, statistics.weight, statistics.rows)
        if not statistics.complete:
            return
        if schema.validation is not None:
            check_held_out(self._params.held_out_by(), statistics.held_out, statistics.rows)
        feed, most = self.job.feed, max(statistics.shard_rows)
        if any(map(feed.reshuffles, range(1, self.job.epochs + 1))):
            most = math.ceil(statistics.rows / len(statistics.shard_rows))
        if feed.drop_last and most < batch_size:
            raise DataError(
                f"dropLast leaves nothing: the workers have at most {most} rows, but a minibatch "
                f"has {batch_size}"
            )

    def _task_rows(self, statistics: DataStatistics) -> list[int]:
        """Rows by task; how its ranks share them, Spark's shuffle cannot change."""
        rows, ranks = statistics.shard_rows, self.workers.ranks_a_task
        return [sum(rows[first : first + ranks]) for first in range(0, len(rows), ranks)]

    def _check_balance(self, statistics: DataStatistics) -> None:
        delivery, streams = self.workers.delivery, self.job.feed.stream_first_epoch
        if delivery.way is Way.SHUFFLED or (delivery.exchanged and not streams):
            return
        read = self._task_rows(statistics)
        known = [rows for rank, rows in enumerate(read) if rank not in statistics.pending]
        # Of tasks with more rows it is only certain that they have no fewer.
        if not known or balanced(read if statistics.complete else [min(known), max(read)]):
            return
        more = "" if statistics.complete else "more than "
        found = f"one task has {min(known)} rows, another {more}{max(read)}"
        stay = self._params.getShuffleRows() == "none"
        if not (self._has_stepped or stay):
            raise UnbalancedError(found)
        if statistics.complete:
            logger.warning(
                "%s: at the end of %s the other workers wait for the one with the most. %s",
                found,
                "the first epoch" if delivery.exchanged else "each epoch",
                "With shuffleRows='exchange' all would have the same number"
                if stay
                else "Without streamFirstEpoch they would be spread evenly",
            )

    def check(self, statistics: DataStatistics) -> LossUse:
        """Check what the workers found in their rows, and try one step on a made-up batch.

        Args:
            statistics: of the rows, every column of them sound; of the first rows if the first
                epoch is streamed, and of all once those are known.

        Returns:
            How workers use the loss.

        Raises:
            UnbalancedError: one worker has so many rows that starting over pays off.
            DataError: values do not fit the loss or the model.
            ConfigError: the loss is a sum, and there are several workers.
            ModelError: the model fails on a batch.
        """
        self._check_balance(statistics)
        self._check_values(statistics)
        schema = self.job.schema.of_lengths([column.longest for column in statistics.columns])
        outputs = probe(
            self._replica,
            schema,
            statistics.columns,
            self.head,
            steps=not self._has_stepped,
            metrics=self.job.metrics,
            use=self._loss_use,
            scores=self._params.getScoreCol() is not None,
        )
        self._has_stepped = True
        if self._loss_use is None:
            transforms = self.job.feed.transform is not None
            by = divides_by(self.job.loss, schema, statistics, transforms=transforms)
            if by is None:
                by = "rows" if self._replica.divisor is None else "counts"
            self._loss_use = replace(self._replica.loss_use, divides_by=by)
            self._replica.use_loss(self._loss_use)
        keys = list(self._params.output_keys().values())
        shorter = widths_of_shorter_rows(self._replica, schema, statistics.columns)
        # Kept through the fit, its gradients and optimizer state would be several times the center.
        if statistics.complete:
            self._check_last_minibatch(schema, statistics)
            self._check_schedule(statistics)
            del self._replica
        else:
            self._replica.optimizer.zero_grad()
            self._replica.rebuild_optimizer()
        for key in keys:
            pick(outputs, key, len(PREDICTED_ROWS))
        widths = widths_of(outputs, len(PREDICTED_ROWS))
        if shorter is not None:
            require_any_length(widths, shorter, keys)
        self._params.predicted_columns(self.head, widths)
        self.checked = Checked(schema.features, widths, schema.labels, self._loss_use)
        return self._loss_use

    def _shard_rows(self, statistics: DataStatistics) -> set[int]:
        """The numbers of rows that a worker may have in an epoch."""
        feed, epochs = self.job.feed, range(1, self.job.epochs + 1)
        exchanged = any(map(feed.reshuffles, epochs))
        share, left_over = divmod(statistics.rows, len(statistics.shard_rows))
        even = {share, share + 1} if left_over else {share}
        as_read = set(statistics.shard_rows) if feed.epochs_as_read else set()
        return as_read | even if exchanged else set(statistics.shard_rows)

    def _check_last_minibatch(self, schema: FeedSchema, statistics: DataStatistics) -> None:
        batch_size = self.job.batch_size
        lonely = [rows for rows in self._shard_rows(statistics) if rows % batch_size == 1]
        if lonely and batch_size > 1 and not self.job.feed.drop_last:
            require_single_row(self._replica, schema, statistics.columns, lonely[0])

    def _check_schedule(self, statistics: DataStatistics) -> None:
        job = self.job
        by_steps = job.scheduler_every == "step"
        steps = (
            job.steps_before(job.epochs + 1, statistics.shard_rows) if by_steps else job.epochs - 1
        )
        require_steps(self._replica.optimizer, job.scheduler, steps)


@dataclass(frozen=True)
class Checked:
    """What only the rows could tell about a model.

    Attributes:
        features: its inputs.
        widths: of its outputs, as ``outputs.widths_of`` returns them.
        labels: what its outputs are compared with.
        loss_use: how the loss does that.
    """

    features: tuple[ColumnSpec, ...]
    widths: Widths
    labels: tuple[ColumnSpec, ...]
    loss_use: LossUse


def _describe(params: EstimatorParams, num_workers: int) -> str:
    model = _name(params.getModel())
    strategy = re.sub(r"\s+", " ", repr(params.getStrategy()))
    return f"sparkdl: train {model} on {num_workers} workers, {strategy}"


def _name(value: Any) -> str:
    return getattr(value, "__name__", type(value).__name__)
