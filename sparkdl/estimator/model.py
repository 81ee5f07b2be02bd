"""``TorchModel``: a trained module as a pyspark.ml Transformer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pyspark.ml import Model
from pyspark.ml.util import MLReadable, MLWritable
from pyspark.sql import DataFrame
from torch import nn

from sparkdl.checkpoint.module_files import SavedModule
from sparkdl.checkpoint.trust import TrustArgument
from sparkdl.errors import ConfigError, DataError
from sparkdl.estimator.data_params import InputOutputParams
from sparkdl.estimator.head import Head
from sparkdl.estimator.persistence import ModelReader, ModelWriter
from sparkdl.estimator.predictions import predicted_columns
from sparkdl.events import EpochSummary
from sparkdl.outputs import Widths
from sparkdl.protocols import ColumnSpec
from sparkdl.spark.inference import ModelSharing, prediction_columns, readable
from sparkdl.spark.rows.columns import input_column


class TorchModel(Model, InputOutputParams, MLWritable, MLReadable["TorchModel"]):
    """A trained PyTorch model that adds columns of predictions to a DataFrame.

    Made by ``TorchEstimator.fit`` or ``TorchModel.load``.

    Attributes:
        module: the plain nn.Module, on the CPU and in evaluation mode. ``transform`` predicts with
            it as it is when it is called.
        history: one ``EpochSummary`` an epoch of training.
    """

    def __init__(
        self,
        module: nn.Module,
        features: Sequence[ColumnSpec],
        *,
        builder: Any,
        head: Head,
        widths: Widths,
        history: Sequence[EpochSummary],
    ) -> None:
        super().__init__()
        self.module = module
        self.history = list(history)
        self._features = tuple(features)
        self._builder = builder
        self._head = head
        self._widths = widths
        self._sharing = ModelSharing()
        self._setDefault(
            featuresCols=None,
            featuresAsDict=False,
            featuresAsKwargs=False,
            outputCols=None,
            outputType="auto",
            shipModules=True,
        )

    def _transform(self, dataset: DataFrame) -> DataFrame:
        """Called by ``transform``: add the predictions to every row, in the rows' order."""
        outputs = predicted_columns(self, self._head, self._widths)
        taken = [each.name for each in outputs if each.name in dataset.columns]
        if taken:
            setter = "setPredictionCol" if self.getOutputCols() is None else "setOutputCols"
            raise DataError(
                f"the DataFrame already has a column '{taken[0]}'. Drop it, or choose another "
                f"name: model.{setter}(...)"
            )
        names = self.feature_columns()
        if len(names) != len(self._features):
            raise ConfigError(
                f"the model takes {len(self._features)} feature columns, but {len(names)} are "
                f"named: {', '.join(names)}"
            )
        columns = [input_column(dataset, name, "featuresCol") for name in names]
        # Named as in training: a model that takes a dict knows those names.
        specs = [
            replace(
                column.spec(
                    trained.dtype, trained.row_shape or None, image=trained.encoding == "image"
                ),
                name=trained.name,
            )
            for column, trained in zip(columns, self._features, strict=True)
        ]
        context = dataset.sparkSession.sparkContext
        shared = self._sharing.share(
            self.module, self._builder, context, ship_modules=self.getShipModules()
        )
        return readable(dataset, columns[0]).withColumns(
            prediction_columns(
                shared,
                dataset,
                columns,
                specs,
                outputs,
                by_name=self.features_by_name(),
                as_kwargs=self.getFeaturesAsKwargs(),
            )
        )

    def write(self) -> ModelWriter:
        """A writer: ``model.write().overwrite().save(path)``."""
        saved = SavedModule(
            module=self.module,
            builder=self._builder,
            features=self._features,
            head=self._head.value,
            widths=self._widths,
            history=self.history,
        )
        return ModelWriter(self, saved)

    @classmethod
    def read(cls, *, trust: TrustArgument = False) -> ModelReader:
        """A reader; ``trust`` is that of ``load``."""
        return ModelReader(cls._from_saved, trust=trust)

    @classmethod
    def load(cls, path: str, *, trust: TrustArgument = False) -> TorchModel:
        """Load a saved model; needs no Spark if the path is local.

        Args:
            path: where it was saved.
            trust: names of the modules that the model's own classes and functions are of, for
                example ``["mypackage.models"]``; torch's need no trust. True trusts everything,
                also a pickled architecture, which runs its author's code.

        Raises:
            ConfigError: there is no model, it is damaged, or what it is built of is not trusted.
        """
        model: TorchModel = cls.read(trust=trust).load(path)
        return model

    @classmethod
    def _from_saved(cls, saved: SavedModule) -> TorchModel:
        if saved.head not in [head.value for head in Head]:
            raise ConfigError(f"the saved model's outputs are said to mean {saved.head!r}")
        return cls(
            saved.module,
            saved.features,
            builder=saved.builder,
            head=Head(saved.head),
            widths=saved.widths,
            history=saved.history,
        )

    def copy(self, extra: Any = None) -> TorchModel:
        """A copy with other Params; it shares the module, also on the executors."""
        copied: TorchModel = super().copy(extra)
        return copied
