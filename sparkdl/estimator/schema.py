"""What a fit makes of an estimator's Params and a DataFrame's schema: settings, and what is fed."""

from __future__ import annotations

import inspect
import logging
from functools import partial
from typing import Any

import torch
from pyspark.sql import DataFrame
from torch import nn

from sparkdl.callbacks import Callback
from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.errors import ConfigError, DataError
from sparkdl.estimator.head import Head, head_of
from sparkdl.estimator.outputs import SharedParams
from sparkdl.estimator.params.columns import ColumnParams
from sparkdl.estimator.params.converters import optimizer_builder
from sparkdl.estimator.params.declaration import described
from sparkdl.estimator.params.training import (
    MonitoringParams,
    NetworkParams,
    RecoveryParams,
    RowParams,
    TrainingParams,
    ValidationParams,
    WorkerParams,
)
from sparkdl.feed.schema import FeedSchema
from sparkdl.protocols import LossFunction, OptimizerBuilder
from sparkdl.replica.losses import ModelLoss
from sparkdl.spark.files import open_hadoop
from sparkdl.spark.rows.column_overrides import (
    GROUPS_WITHOUT_PADDING,
    ColumnOverrides,
    require_distinct,
)
from sparkdl.spark.rows.columns import InputColumn, held_out_fraction, input_column, input_columns


class FitSettings(
    TrainingParams,
    WorkerParams,
    SharedParams,
    ColumnParams,
    RowParams,
    ValidationParams,
    MonitoringParams,
    RecoveryParams,
    NetworkParams,
):
    """The Params of every estimator, and what a fit makes of several of them."""

    def driver_callbacks(self) -> list[Callback]:
        """The callbacks that run in the driver."""
        return [each for each in self.getCallbacks() or () if isinstance(each, Callback)]

    def weight_column(self) -> str | None:
        """The column of the rows' weights; None for none."""
        return self.getWeightCol() if self.isDefined("weightCol") else None

    def loss_function(self) -> LossFunction:
        """The loss to train with.

        Raises:
            ConfigError: it is the model's own, and another Param does not go with that.
        """
        loss: Any = self.getLoss()
        if not isinstance(loss, str):
            return loss  # type: ignore[no-any-return]
        if self.weight_column() is not None:
            raise ConfigError(
                "weightCol cannot be combined with loss='model': a model that computes its own "
                "loss gives no value per row to weight. Drop one of the two"
            )
        keywords = tuple(self.getLabelCols() or ["labels"])
        by_keyword = self.getFeaturesAs() == "kwargs"
        both = set(keywords) & set(self.feature_columns()) if by_keyword else set()
        if both:
            raise ConfigError(
                f"the model would be given '{min(both)}' twice: as a feature (featuresAs='kwargs') "
                "and as a label (loss='model'). Remove it from featuresCols"
            )
        return ModelLoss(keywords)

    def optimizer_builder(self) -> OptimizerBuilder:
        """The optimizer to train with, at the learning rate that is set.

        Raises:
            ConfigError: it takes no learning rate.
        """
        build: Any = optimizer_builder(self.getOptimizer())
        rate = self.getLearningRate()
        if rate is None:
            return build  # type: ignore[no-any-return]
        taken = inspect.signature(build).parameters
        if "lr" not in taken and all(each.kind is not each.VAR_KEYWORD for each in taken.values()):
            raise ConfigError(
                f"learningRate={rate:g} is passed to the optimizer as lr, but {described(build)} "
                f"takes only ({', '.join(taken)}). Give it an argument lr, or leave out "
                "learningRate"
            )
        return partial(build, lr=rate)

    def held_out_by(self) -> str | float | None:
        """The column that marks held-out rows, or the fraction to hold out; None for neither.

        Raises:
            ConfigError: both are given.
        """
        fraction, column = self.getValidationFraction(), None
        if self.isDefined("validationIndicatorCol"):
            column = self.getValidationIndicatorCol()
        if fraction is not None and column is not None:
            raise ConfigError(
                f"validationFraction={fraction:g} and validationIndicatorCol='{column}' both say "
                "which rows are held out: drop one of the two"
            )
        return column if fraction is None else fraction

    def checkpoint_policy(self, application: str | None = None) -> CheckpointPolicy | None:
        """What is asked of checkpoints; None without ``checkpointPath``.

        Args:
            application: the one that trains, to name to another that is refused its directory.
        """
        path = self.getCheckpointPath()
        if path is None:
            return None
        return CheckpointPolicy(
            path=path,
            every_epochs=self.getCheckpointEvery(),
            every_rounds=self.getCheckpointRounds(),
            keep_last=self.getKeepLast(),
            resume="auto" if self.getResume() == "auto" else "never",
            open_elsewhere=open_hadoop,
            application=application,
        )


logger = logging.getLogger(__name__)


def fed_columns(
    settings: FitSettings, loss: LossFunction, frame: DataFrame, module: nn.Module
) -> tuple[FeedSchema, tuple[InputColumn, ...]]:
    """Look up the columns that a fit needs, and decide what they become.

    Args:
        settings: which columns, and what was declared about them.
        loss: what the labels are for.
        frame: the DataFrame to fit.
        module: the model; fractions get the dtype of its parameters.

    Returns:
        The tensors, and the DataFrame's columns in the same order.

    Raises:
        ConfigError: a column's shape or dtype is missing, impossible or declared for no column, or
            held-out rows are specified in two ways.
        DataError: a column is missing, duplicated or of a type that cannot become a tensor.
    """
    head = head_of(loss)
    fractions = parameter_dtype(module)
    param = "featuresCol" if settings.getFeaturesCols() is None else "featuresCols"
    features = input_columns(frame, settings.feature_columns(), param)
    several = settings.getLabelCols() is not None
    labels = input_columns(frame, settings.label_columns(), "labelCols" if several else "labelCol")
    overrides = ColumnOverrides(
        settings.getColumnShapes(),
        settings.getColumnDtypes(),
        settings.getImageCols(),
        settings.getImageSize(),
        settings.getImageFit(),
        settings.getImageScale(),
        settings.getPadCols(),
        settings.getPadInputs(),
    )
    label_specs = tuple(
        overrides.spec(column, fractions, target=_target_dtype(column, loss, head, fractions))
        for column in labels
    )
    weight = scalar_column(frame, settings.weight_column(), "weightCol")
    held_out = settings.held_out_by()
    indicator: InputColumn | None
    if isinstance(held_out, float):
        content = (*features, *labels, *([] if weight is None else [weight]))
        indicator = held_out_fraction(content, held_out, settings.getSeed())
    else:
        indicator = scalar_column(frame, held_out, "validationIndicatorCol")
    schema = FeedSchema(
        tuple(overrides.spec(column, fractions) for column in features),
        label_specs if several else label_specs[0],
        weight=None if weight is None else weight.spec(torch.float64),
        validation=None if indicator is None else indicator.spec(torch.bool),
        by_name=settings.getFeaturesAs() != "tensor",
    )
    overrides.require_known([c.name for c in (*features, *labels)])
    _require_paddable(settings, schema)
    optional = [column for column in (weight, indicator) if column is not None]
    columns = (*features, *labels, *optional)
    for column, spec in zip(columns, schema.columns, strict=True):
        logger.info("column '%s' (%s) becomes %s", column.name, column.type_name, spec.dtype)
    return schema, columns


def parameter_dtype(module: nn.Module) -> torch.dtype:
    """The dtype of the model's parameters, in which fractions are fed too."""
    dtypes = (p.dtype for p in module.parameters() if p.is_floating_point())
    return next(dtypes, torch.float32)


def _require_paddable(settings: FitSettings, schema: FeedSchema) -> None:
    """Refuse settings that do not go with padded columns, or that need some."""
    if schema.by_name:
        require_distinct(schema.features)
    named = set(settings.getPadInputs() or ()) - {spec.name for spec in schema.features}
    if named:
        raise ConfigError(
            f"padInputs names the label column '{min(named)}', but a model is not given labels: "
            "name a feature column, or drop it"
        )
    padded = [spec.name for spec in schema.labels if spec.padding is not None]
    if padded and schema.weight is not None:
        raise ConfigError(
            f"weightCol cannot be combined with the padded label column '{padded[0]}': the loss "
            "of a row would be the mean over its padding too. Drop one of the two, or weight rows "
            "in a loss of your own"
        )
    if settings.getGroupByLength() and not settings.getPadCols():
        raise ConfigError(GROUPS_WITHOUT_PADDING)


def scalar_column(frame: DataFrame, name: str | None, param: str) -> InputColumn | None:
    """A column with one number per row, or of booleans for ``validationIndicatorCol``.

    Raises:
        DataError: it is of another type, or missing.
    """
    if name is None:
        return None
    column = input_column(frame, name, param)
    wanted = "boolean" if param == "validationIndicatorCol" else "a number"
    boolean = column.type_name == "boolean"
    if column.dimensions != 0 or boolean != (wanted == "boolean"):
        raise DataError(
            f"column '{name}' ({param}) has type {column.type_name}; it must be {wanted}"
        )
    return column


def _target_dtype(
    column: InputColumn, loss: LossFunction, head: Head, fractions: torch.dtype
) -> torch.dtype:
    """The dtype in which the loss takes targets; for a loss that is not torch's, the column's."""
    if head.takes_class_index and column.dimensions == 0:
        return torch.int64
    of_torch = isinstance(loss, nn.modules.loss._Loss) or head is not Head.UNKNOWN
    if of_torch and not head.takes_class_index:
        return fractions
    return column.tensor_dtype(fractions)
