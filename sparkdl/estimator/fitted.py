"""A trained module as a pyspark.ml Transformer, whatever columns it adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pyspark.ml import Model
from pyspark.ml.util import MLReadable, MLWritable
from pyspark.sql import Column, DataFrame, SparkSession
from typing_extensions import Self

from sparkdl.arguments import counted
from sparkdl.checkpoint.module_files import SavedModule, read_module, write_module
from sparkdl.checkpoint.trust import TrustArgument
from sparkdl.errors import ConfigError, DataError
from sparkdl.estimator.head import Head
from sparkdl.estimator.labels import label_tensors
from sparkdl.estimator.outputs import MetricInputs, SharedParams
from sparkdl.estimator.params.columns import InferenceParams
from sparkdl.estimator.persistence import DirectoryWriter, StageReader
from sparkdl.estimator.schema import scalar_column
from sparkdl.events import MetricValue
from sparkdl.metrics import Metrics
from sparkdl.metrics.metrics import WEIGHTS
from sparkdl.process.torch_settings import TorchSettings
from sparkdl.protocols import ColumnSpec, LossFunction
from sparkdl.replica.losses import ModelLoss
from sparkdl.report import TrainingSummary
from sparkdl.spark.inference.columns import (
    predict_function,
    prediction_columns,
    readable,
    require_end,
)
from sparkdl.spark.inference.evaluation import count_rows, evaluate
from sparkdl.spark.inference.predictor import (
    Labels,
    OutputColumn,
    PredictionSettings,
    Predictor,
    Score,
    not_of_one_output,
)
from sparkdl.spark.inference.shared_model import ModelSharing
from sparkdl.spark.required import jvm_named, require_frame, require_session
from sparkdl.spark.rows.columns import InputColumn, input_columns, require_exact
from sparkdl.user_code.needed_modules import pickled

_PRECISIONS = {"own": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


class FittedModel(Model, SharedParams, InferenceParams, MLWritable, MLReadable["FittedModel"]):
    """A trained PyTorch model that adds columns to a DataFrame; subclasses say which ones.

    Attributes:
        module: the plain nn.Module, on the CPU and in evaluation mode. ``transform`` predicts with
            it as it is when it is called.
        history: one ``EpochSummary`` per epoch of training.
    """

    def __init__(self, made_of: SavedModule, summary: TrainingSummary | None = None) -> None:
        super().__init__()
        self._summary = summary
        self.module, self.history = made_of.module, list(made_of.history)
        # Without the module, which the user may replace.
        self._made_of = replace(made_of, module=None)  # type: ignore[arg-type]
        self._sharing = ModelSharing()
        self._set_declared_defaults()

    @property
    def _head(self) -> Head:
        return Head(self._made_of.head)

    @property
    def hasSummary(self) -> bool:
        """Whether this model was returned by ``fit``."""
        return self._summary is not None

    @property
    def summary(self) -> TrainingSummary:
        """A summary of the fit that returned this model: epochs, workers, sizes, times.

        Raises:
            ConfigError: the model was loaded, or made from a module.
        """
        if self._summary is None:
            raise ConfigError(
                "only a model returned by fit() has a summary, but this one was loaded or made "
                "from a module. Its epochs are in model.history; model.summary.save_report(path), "
                "after fit, keeps the rest"
            )
        return self._summary

    def udf(self) -> Any:
        """The model as a function of its feature columns, in the order of its arguments.

        Call it with Columns, or register it: ``spark.udf.register("predict", model.udf())``. It
        returns what ``predictionCol`` would hold, but arrays in place of vectors, and a struct for
        several ``outputCols``. ``transform`` is faster, because it can pack the rows, and it takes
        pyspark.ml's vectors from Parquet files too.

        It predicts with the module as it is now, and in the session that runs now.

        Raises:
            ConfigError: there is no active Spark session, or one in which the function might
                never end; or, when it is called, another one.
        """
        spark = require_session(connect=True)
        require_end(spark)
        outputs = self.predicted_columns(self._head, self._made_of.widths)
        features = self._made_of.features
        predictor = self._predictor(outputs, [each.name for each in features], spark)
        return predict_function(predictor, features)

    def _predictor(
        self,
        outputs: Sequence[OutputColumn],
        names: Sequence[str],
        spark: SparkSession,
        *,
        used: set[str] | None = None,
        score: bytes | None = None,
    ) -> Predictor:
        used = set() if used is None else used
        precision = self.getPredictPrecision()
        if precision != "own":
            for name, each in (*self.module.named_parameters(), *self.module.named_buffers()):
                if each.is_complex():  # torch's conversion would drop the imaginary part
                    raise ConfigError(
                        f"predictPrecision='{precision}' is for real numbers, but the model's "
                        f"'{name}' is complex. Set predictPrecision='own'"
                    )
        return Predictor(
            model=self._sharing.share(
                self.module,
                self._made_of.builder,
                self._made_of.seed,
                spark,
                ship_modules=self.getShipModules(),
                used=used,
            ),
            outputs=outputs,
            names=None if self.getFeaturesAs() == "tensor" else names,
            as_kwargs=self.getFeaturesAs() == "kwargs",
            prediction=self.prediction_settings(),
            settings=TorchSettings.here(),
            score=score,
            skip_invalid=self.getHandleInvalid() == "skip",
        )

    def prediction_settings(self) -> PredictionSettings:
        """How the model predicts, according to the Params."""
        return PredictionSettings(
            batch_rows=self.getPredictBatchSize(),
            device=self.getPredictDevice(),
            dtype=_PRECISIONS[self.getPredictPrecision()],
            compiled=self.getPredictCompiled(),
            double=self.getPredictionDtype() == "float64",
        )

    @jvm_named()
    def _transform(self, dataset: DataFrame) -> DataFrame:
        """Called by ``transform``: add the predictions to every row, in the rows' order."""
        require_frame(dataset, connect=True)
        outputs = self.predicted_columns(self._head, self._made_of.widths)
        score = self.getLossCol()
        if score is not None:
            outputs = [*outputs, OutputColumn(score, None, not_of_one_output, False)]
        names = [each.name for each in outputs]
        taken = _taken(names, dataset)
        if taken is not None:
            name, present = taken
            raise DataError(
                f"the DataFrame already has a column '{present}'. Drop it, or choose another "
                f"name: model.{self.setter_of(name)}(...)"
            )
        columns, specs = self._inputs(dataset)
        spark, given = dataset.sparkSession, [each.name for each in specs]
        if score is None:
            predictor = self._predictor(outputs, given, spark)
            predicted = prediction_columns(predictor, dataset, columns, specs)
            return self._with(readable(dataset, columns[0]), predicted)
        rows, label_columns, labels = self._labelled(dataset)
        used: set[str] = set()
        octets = pickled(Score(self._loss_of_rows(), labels), used)
        predictor = self._predictor(outputs, given, spark, used=used, score=octets)
        both = [*columns, *label_columns]
        predicted = prediction_columns(predictor, rows, both, [*specs, *labels.specs])
        added = self._with(readable(rows, columns[0]), predicted)
        return added.drop(*(set(rows.columns) - set(dataset.columns)))

    def _with(self, rows: DataFrame, predicted: Mapping[str, Column]) -> DataFrame:
        # withColumns would drop a column's metadata over Spark Connect.
        return rows.select("*", *(self._added(name, each) for name, each in predicted.items()))

    def _added(self, name: str, values: Column) -> Column:
        """A column of predictions, as it is added."""
        return values.alias(name)

    def _loss_of_rows(self) -> LossFunction:
        loss: LossFunction | None = self._made_of.loss
        if loss is None:
            raise ConfigError(
                f"lossCol='{self.getLossCol()}' needs the loss, which the model does not have: "
                "set lossCol before saving a model, or pass loss=... to from_module"
            )
        if isinstance(loss, ModelLoss):
            raise ConfigError(
                "lossCol cannot be combined with loss='model': a model that computes its own "
                "loss gives no value per row. Drop one of the two"
            )
        return loss

    def _label_rows(self, dataset: DataFrame) -> tuple[DataFrame, list[str]]:
        """The rows, perhaps with added columns, and the columns of their labels."""
        return dataset, self.label_columns()

    def _labelled(self, dataset: DataFrame) -> tuple[DataFrame, list[InputColumn], Labels]:
        """The rows with labels like those in training, and what those become."""
        several = self.getLabelCols() is not None
        rows, names = self._label_rows(dataset)
        param = "labelCols" if several else "labelCol"
        columns = input_columns(rows, names, param)
        specs = label_tensors(rows, columns, self._made_of.labels, self._head)
        return rows, columns, Labels(specs, as_one=not several)

    @jvm_named()
    def evaluate(
        self, dataset: DataFrame, metrics: Mapping[str, Any], weightCol: str | None = None
    ) -> dict[str, MetricValue]:
        """Measure the model on labelled rows.

        Each executor measures its own rows; the driver combines the counts, and never sees a row.

        Args:
            dataset: with the feature columns and ``labelCol``, or ``labelCols``.
            metrics: like the estimator's: a dict by name of ``torchmetrics.Metric`` objects, or of
                functions or classes that make one; or a ``MetricCollection``. They are given
                probabilities if the model was trained with one of torch's losses for classes, else
                its output.
            weightCol: how much each row counts, for the metrics whose ``update`` takes a
                ``sample_weight``, shape (n,), float32. For the others, every row counts equally.

        Returns:
            A number by name; a list of numbers for a metric with several, such as one per class.

        Raises:
            ConfigError: something is not a metric, no metric takes weights, torchmetrics is not
                installed, or Spark's JVM has ended.
            DataError: a column is missing, or there is no row.
            ModelError: a metric cannot be computed.
        """
        require_frame(dataset, to_end="Evaluate on", connect=True)
        measured = Metrics.of(metrics, MetricInputs.of(self, self._head))
        measured.begin()  # raises for what does not make a metric
        columns, specs = self._inputs(dataset)
        rows, label_columns, labels = self._labelled(dataset)
        weights = scalar_column(rows, weightCol, "weightCol")
        weight = None if weights is None else weights.spec(torch.float64)
        if weight is not None and set(measured.without_weights()) == set(measured.makers):
            raise ConfigError(
                f"weightCol='{weightCol}' changes nothing: {', '.join(measured.makers)} count "
                f"every row equally, because their update takes no '{WEIGHTS}'. Drop it, or write "
                "a torchmetrics.Metric that takes one"
            )
        used: set[str] = set()
        octets, given = pickled(measured, used), [each.name for each in specs]
        predictor = self._predictor((), given, dataset.sparkSession, used=used)
        all_columns = [*columns, *label_columns, *([] if weights is None else [weights])]
        counts = partial(count_rows, predictor, octets, specs, labels, weight)
        return evaluate(counts, measured, rows, all_columns)

    def _inputs(self, dataset: DataFrame) -> tuple[list[InputColumn], list[ColumnSpec]]:
        """The feature columns of a DataFrame, and the tensors that they become."""
        names, features = self.feature_columns(), self._made_of.features
        if len(names) != len(features):
            raise ConfigError(
                f"the model takes {counted(len(features), 'feature column')}, not {len(names)}: "
                f"{', '.join(names)}"
            )
        columns = input_columns(dataset, names, "featuresCol")
        for column, trained in zip(columns, features, strict=True):
            require_exact(column.name, column.digits, trained.dtype)
        # A model that takes a dict expects the names of the training; errors tell the table's.
        by_position = self.getFeaturesAs() == "tensor"
        specs = [
            replace(column.as_trained(trained), name=column.name if by_position else trained.name)
            for column, trained in zip(columns, features, strict=True)
        ]
        return columns, specs

    def write(self) -> DirectoryWriter:
        """A writer: ``model.write().overwrite().save(path)``."""
        loss = None if self.getLossCol() is None else self._made_of.loss
        saved = replace(self._made_of, module=self.module, history=self.history, loss=loss)
        return DirectoryWriter(self, partial(write_module, saved))

    @classmethod
    def read(cls, *, trust: TrustArgument = False) -> StageReader:
        """A reader; for ``trust`` see ``load``."""
        return StageReader(cls, lambda directory, _: cls._from_saved(directory, trust))

    @classmethod
    def load(cls, path: str, *, trust: TrustArgument = False) -> Self:
        """Load a saved model; needs no Spark if the path is local.

        Args:
            path: where it was saved.
            trust: names of the modules that the model's own classes and functions come from, for
                example ``["mypackage.models"]``; torch's need no trust. True trusts everything,
                even a pickled architecture, which runs its author's code.

        Raises:
            ConfigError: there is no model, it is damaged, or what it is built from is not trusted.
        """
        model: Self = cls.read(trust=trust).load(path)
        return model

    @classmethod
    def _from_saved(cls, directory: Path, trust: TrustArgument) -> Self:
        saved = read_module(directory, trust=trust)
        if saved.head not in [head.value for head in Head]:
            raise ConfigError(
                f"the saved model declares an unknown meaning of its outputs: {saved.head!r}"
            )
        return cls(saved)

    def copy(self, extra: Any = None) -> Self:
        """A copy with other Params; it shares the module, on the executors too."""
        copied: Self = super().copy(extra)
        return copied


def _taken(names: Sequence[str], dataset: DataFrame) -> tuple[str, str] | None:
    """The first name that Spark takes for an existing column's, to replace it, and that column."""
    exactly = str(dataset.sparkSession.conf.get("spark.sql.caseSensitive")).lower() == "true"
    known = str if exactly else str.lower
    present = {known(name): name for name in dataset.columns}
    for name in names:
        if known(name) in present:
            return name, present[known(name)]
        present[known(name)] = name
    return None
