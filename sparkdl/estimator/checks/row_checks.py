"""What only the rows can tell, checked once the workers have read them: labels, weights, shards."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from sparkdl.arguments import counted
from sparkdl.averager.service.server import EdgeOptions
from sparkdl.driver import Launch, Observers, Outcome, RunOptions, Slots, run
from sparkdl.errors import CallbackError, DataError
from sparkdl.estimator.checks.preflight import FitPlan, require_steps
from sparkdl.estimator.checks.probe import PREDICTED_ROWS, Trial
from sparkdl.estimator.outputs import require_any_length
from sparkdl.feed.column_statistics import ColumnStatistics
from sparkdl.feed.decode import without_infinity
from sparkdl.feed.schema import FeedSchema
from sparkdl.feed.shards import OR_SKIP, DataStatistics, left_out
from sparkdl.outputs import OutputKey, Widths, names_output, pick, widths_of
from sparkdl.protocols import ColumnSpec, LossFunction
from sparkdl.replica import Replica
from sparkdl.replica.loss_use import divides_by
from sparkdl.replica.losses import LossUse
from sparkdl.spark.rows.columns import InputColumn
from sparkdl.worker import Job

logger = logging.getLogger(__name__)


def check_label(label: InputColumn, loss: LossFunction, statistics: ColumnStatistics) -> None:
    """Check that a loss can learn from a label column.

    Args:
        label: the column.
        loss: the loss that is given its values.
        statistics: of what the workers read.

    Raises:
        DataError: it has NaN, infinity, or fractions where the loss takes class indices.
    """
    low, high = statistics.smallest or 0.0, statistics.largest or 0.0
    if not (math.isfinite(low) and math.isfinite(high)):
        what = "NaN (not a number)" if math.isnan(high) else "infinity"
        raise DataError(
            f"label column '{label.name}' holds {what}, the first in "
            f"{statistics.where('not_finite')}, which no loss can learn from. "
            f"{without_infinity(label.name, is_array=bool(label.dimensions))}"
        )
    if statistics.fractions:
        raise DataError(
            f"label column '{label.name}' ({label.type_name}) holds numbers that are "
            f"not whole in {counted(statistics.fractions, 'row')}, the first in "
            f"{statistics.where('fractions')}, but "
            f"{getattr(loss, '__name__', type(loss).__name__)} takes class indices 0, 1, .... "
            "Index the classes with pyspark.ml.feature.StringIndexer, or use a regression loss"
        )


def require_holdable(spec: ColumnSpec, statistics: ColumnStatistics, or_skip: str = "") -> None:
    """Refuse NaN, infinity and fractions in a column that becomes integers, which have none.

    Args:
        spec: what the column becomes.
        statistics: of what the workers read.
        or_skip: how else such rows can be left out, for the message.

    Raises:
        DataError: there are some.
    """
    if spec.dtype.is_floating_point:
        return
    dtype = str(spec.dtype).removeprefix("torch.")
    if statistics.not_finite:
        raise DataError(
            f"column '{spec.name}' holds NaN or infinity in "
            f"{counted(statistics.not_finite, 'row')} (the first is "
            f"{statistics.where('not_finite')}), which {dtype} cannot hold. "
            f"{without_infinity(spec.name, is_array=spec.is_array)}, or ask for a floating-point "
            f"dtype with columnDtypes{or_skip}"
        )
    if statistics.fractions:
        raise DataError(
            f"column '{spec.name}' holds numbers that are not whole in "
            f"{counted(statistics.fractions, 'row')} (the first is "
            f"{statistics.where('fractions')}), which {dtype} cannot hold. Round them first with "
            f"F.round, or ask for a floating-point dtype with columnDtypes{or_skip}"
        )


def check_weight(name: str, statistics: ColumnStatistics, total: float, rows: int) -> None:
    """Check that a column holds weights: none below 0, not all of them 0, none too small to count.

    Args:
        name: the column's.
        statistics: of what the workers read.
        total: the sum of the weights of the rows to train on.
        rows: how many those are.

    Raises:
        DataError: it does not.
    """
    low, high = statistics.smallest or 0.0, statistics.largest or 0.0
    for value, what in ((low, "smallest"), (high, "largest")):
        if not 0 <= value < math.inf:
            raise DataError(
                f"weight column '{name}' holds {value:g} in {statistics.where(what)}; weights are "
                "finite numbers >= 0"
            )
    if total == 0:
        where = "every row" if high == 0 else "every row to train on"
        raise DataError(f"weight column '{name}' is 0 in {where}: there is nothing to train on")
    mean = total / rows
    if not 0 < mean < math.inf:
        largest = f"up to {high:g} ({statistics.where('largest')})"
        raise DataError(
            f"weight column '{name}' holds numbers {largest}, and the mean of "
            f"{counted(rows, 'row')} is {'0' if mean == 0 else 'infinite'} in float64. Scale the "
            "weights first; only their ratios count"
        )
    least = statistics.least
    if least is not None and not torch.tensor(least / mean, dtype=torch.float32):
        raise DataError(
            f"weight column '{name}' holds {least:g} in {statistics.where('least')}, which is "
            f"{least / mean:g} of the mean weight, {mean:g}, and so 0 in float32. Set it to 0 to "
            "leave the row out of the loss, or make the weights less unequal"
        )


def check_held_out(by: str | float | None, held_out: int, trained: int) -> None:
    """Check that there are rows to validate with, and as many as were asked for.

    Args:
        by: the column that marks held-out rows, or the fraction that is held out.
        held_out: how many rows are held out.
        trained: how many are not.

    Raises:
        DataError: none is held out.
    """
    rows = trained + held_out
    if isinstance(by, str) and not held_out:
        raise DataError(
            f"column '{by}' (validationIndicatorCol) is false in all of "
            f"{counted(rows, 'row')}: there is nothing to validate with"
        )
    if not isinstance(by, float):
        return
    if not held_out:
        raise DataError(
            f"validationFraction={by:g} holds out none of {counted(rows, 'row')}: there is nothing "
            "to validate with. Raise it, or choose another seed"
        )
    # Were all rows different, the odds of so few, or so many, would be below one in a million.
    if abs(held_out - by * rows) > 5 * math.sqrt(rows * by * (1 - by)) + 1:
        logger.warning(
            "validationFraction=%g holds out %d of %d rows: rows with the same content are on the "
            "same side, and there are few distinct ones. To choose among equal rows, mark them in "
            "a column (validationIndicatorCol)",
            by,
            held_out,
            rows,
        )


_COUNTS = range(1 << 31)
"""Numbers that a row may have; an index of it is itself."""


@dataclass(frozen=True)
class Checked:
    """What only the rows could tell about a model.

    Attributes:
        features: its inputs.
        widths: of its outputs, as ``outputs.widths_of`` returns them.
        labels: what its outputs are compared with.
    """

    features: tuple[ColumnSpec, ...]
    widths: Widths
    labels: tuple[ColumnSpec, ...]

    def as_json(self) -> dict[str, Any]:
        """Return it in JSON's types, for ``from_json``."""
        return {
            "elements": [each.elements for each in (*self.features, *self.labels)],
            "widths": list(map(list, self.widths.items())),
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any], schema: FeedSchema) -> Checked:
        """Restore what ``as_json`` has returned.

        Args:
            told: that.
            schema: of the columns, before their rows were read.

        Raises:
            AttributeError, LookupError, TypeError, ValueError: it is something else.
        """
        planned = (*schema.features, *schema.labels)
        counts = [None if each is None else _COUNTS[each] for each in told["elements"]]
        known = tuple(spec.of_length(count) for spec, count in zip(planned, counts, strict=True))
        widths: dict[OutputKey | None, int | None] = {}
        for key, width in told["widths"]:
            if key is not None and not names_output(key):
                raise TypeError(f"{key!r:.100} does not name an output")
            widths[key] = None if width is None else _COUNTS[width]
        features = len(schema.features)
        return cls(known[:features], widths, known[features:])


class RowChecks:
    """Checks a fit against what its workers have read.

    Args:
        replica: one to try out, which is let go then: its gradients and optimizer state are several
            times the center.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica: Replica | None = replica
        self._result: Checked | None = None

    def result(self) -> Checked:
        """What the rows have told; there is no model without."""
        assert self._result is not None
        return self._result

    def check(self, plan: FitPlan, statistics: DataStatistics) -> LossUse:
        """Check what the workers found in their rows, and try one step on a made-up batch.

        Args:
            plan: of the fit.
            statistics: of the rows, every column of them sound.

        Returns:
            How workers use the loss.

        Raises:
            DataError: values do not fit the loss or the model.
            ConfigError: the loss is a sum, and there are several workers.
            ModelError: the model fails on a batch.
        """
        _warn_of_imbalance(plan, statistics)
        self._check_values(plan, statistics)
        replica, columns = self._replica, statistics.columns
        assert replica is not None
        schema = plan.job.schema.of_lengths([column.longest for column in columns])
        model, scores = plan.settings.getModel(), plan.settings.getLossCol() is not None
        given = model if isinstance(model, nn.Module) else None
        trial = Trial(replica, schema, columns, given)
        several = max(len(statistics.shard_rows), plan.job.max_workers or 1) > 1
        outputs = trial.step(plan.head, metrics=plan.job.metrics, scores=scores, several=several)
        transforms = plan.job.feed.transform is not None
        loss_use = divides_by(plan.job.loss, schema, statistics, transforms=transforms)
        if loss_use is None:
            loss_use = "rows" if replica.divisor is None else "counts"
        replica.use_loss(loss_use)
        shorter = trial.widths_of_shorter_rows()
        if told := left_out(statistics, schema.columns):
            logger.warning("%s", told)
        _check_last_minibatch(trial, plan, statistics)
        _check_schedule(replica, plan.job, statistics)
        self._replica = None
        keys = list(plan.settings.output_keys().values())
        for key in keys:
            pick(outputs, key, PREDICTED_ROWS)
        widths = widths_of(outputs, PREDICTED_ROWS)
        if shorter is not None:
            require_any_length(widths, shorter, keys)
        plan.settings.predicted_columns(plan.head, widths)
        self._result = Checked(schema.features, widths, schema.labels)
        return loss_use

    def _check_values(self, plan: FitPlan, statistics: DataStatistics) -> None:
        schema, batch_size = plan.job.schema, plan.job.batch_size
        features = statistics.columns[: len(schema.features)]
        labels = slice(len(features), len(features) + len(schema.labels))
        for spec, found in zip(schema.features, features, strict=True):
            if found.not_finite and plan.settings.getHandleInvalid() == "error":
                raise DataError(
                    f"column '{spec.name}' holds NaN or infinity in {found.not_finite} of "
                    f"{counted(statistics.rows + statistics.held_out, 'row')} (the first is "
                    f"{found.where('not_finite')}). Replace them first (NaN with F.nanvl(col, "
                    "F.lit(0.0)), in arrays with F.transform(col, lambda x: F.nanvl(x, "
                    "F.lit(0.0)))), feed them as they are with handleInvalid='keep', or leave "
                    "those rows out with handleInvalid='skip'"
                )
            require_holdable(spec, found, OR_SKIP)
        for column, found in zip(
            plan.workers.columns[labels], statistics.columns[labels], strict=True
        ):
            check_label(column, plan.job.loss, found)
        for spec, found in zip(schema.labels, statistics.columns[labels], strict=True):
            require_holdable(spec, found)
        if schema.weight is not None:
            weights = statistics.columns[labels.stop]
            check_weight(schema.weight.name, weights, statistics.weight, statistics.rows)
        if schema.validation is not None:
            check_held_out(plan.settings.held_out_by(), statistics.held_out, statistics.rows)
        feed, most = plan.job.feed, max(statistics.shard_rows)
        if any(map(feed.reshuffles, range(1, plan.job.epochs + 1))):
            most = math.ceil(statistics.rows / len(statistics.shard_rows))
        if (workers := plan.job.max_workers) is not None:
            if workers > statistics.rows:
                raise DataError(
                    f"maxWorkers is {workers}, but there are {counted(statistics.rows, 'row')} to "
                    f"train on. Set it to at most {statistics.rows}"
                )
            most = min(most, math.ceil(statistics.rows / workers))
        if feed.drop_last and most < batch_size:
            raise DataError(
                f"dropLast leaves nothing: the workers have at most {counted(most, 'row')}, but a "
                f"minibatch has {batch_size}"
            )


def _warn_of_imbalance(plan: FitPlan, statistics: DataStatistics) -> None:
    rows = statistics.shard_rows
    if plan.workers.shuffle == "none" and max(rows) > 1.05 * sum(rows) / len(rows) + 1:
        logger.warning(
            "one worker has %s, another %d: at the end of each epoch the other workers wait for "
            "the one with the most. With shuffleRows='exchange' all would have the same number",
            counted(min(rows), "row"),
            max(rows),
        )


def _shard_rows(plan: FitPlan, statistics: DataStatistics) -> list[list[int]]:
    """The workers' rows in an epoch, in each of the ways in which they may be shared."""
    feed, epochs = plan.job.feed, range(1, plan.job.epochs + 1)
    exchanged = any(map(feed.reshuffles, epochs))
    share, left_over = divmod(statistics.rows, len(statistics.shard_rows))
    as_read = list(statistics.shard_rows)
    even = [share + (rank < left_over) for rank in range(len(as_read))]
    shares = [even, *([as_read] if feed.epochs_as_read else [])] if exchanged else [as_read]
    if (most := plan.job.max_workers) is not None:
        for number in range(plan.job.min_workers, most + 1):
            share, left_over = divmod(statistics.rows, number)
            shares.append([share, share + (left_over > 0)])  # no more than two differ
    return shares


def _check_last_minibatch(trial: Trial, plan: FitPlan, statistics: DataStatistics) -> None:
    batch_size, shares = plan.job.batch_size, _shard_rows(plan, statistics)
    lonely = [rows for share in shares for rows in share if rows % batch_size == 1]
    if lonely and batch_size > 1 and not plan.job.feed.drop_last:
        joint = plan.job.strategy.needs.joint_batch_norm and all(
            _in_last_step(share, batch_size) != 1 for share in shares
        )
        trial.require_single_row(lonely[0], joint_batch_norm=joint)


def _in_last_step(share: Sequence[int], batch_size: int) -> int:
    """Rows of all workers in the last minibatches of an epoch; before these there are more."""
    before = (max(share) - 1) // batch_size * batch_size
    return sum(max(0, rows - before) for rows in share)


def _check_schedule(replica: Replica, job: Job, statistics: DataStatistics) -> None:
    by_steps = job.scheduler_every == "step"
    rows = statistics.shard_rows
    if job.max_workers is not None:
        rows = (math.ceil(statistics.rows / job.min_workers),) * job.min_workers
    steps = job.steps_before(job.epochs + 1, rows) if by_steps else job.epochs - 1
    require_steps(replica.optimizer, job.scheduler, steps)


def run_checked(
    plan: FitPlan,
    checks: RowChecks,
    launch: Launch,
    edge: EdgeOptions,
    slots: Slots | None = None,
    **observers: Any,
) -> tuple[Outcome, Checked]:
    """Serve a fit, and check it against what its workers have read.

    Args:
        plan: of the fit.
        checks: hold a replica to try out.
        launch: starts the workers; see ``driver.run``.
        edge: where the averager listens.
        slots: tells where workers could be added, if their number may change.
        observers: others than the checks and the callbacks; see ``driver.Observers``.

    Returns:
        The outcome, and what only the rows could tell; so is the ``model`` of a CallbackError.

    Raises:
        SparkDLError: as ``driver.run``.
    """
    start, checkpoints = plan.warm_start, plan.checkpoints
    options = RunOptions(checkpoints=checkpoints, warm_start=start, edge=edge, slots=slots)
    callbacks, check = plan.settings.driver_callbacks(), partial(checks.check, plan)
    followed = Observers(check=check, callbacks=callbacks, **observers)
    try:
        outcome = run(plan.job, plan.workers.num_workers, launch, options, followed)
    except CallbackError as error:
        if isinstance(error.model, Outcome):
            error.model = error.model, checks.result()
        raise
    return outcome, checks.result()
