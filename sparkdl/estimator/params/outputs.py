"""The Params, of estimators and their models, for which columns ``transform`` adds."""

from __future__ import annotations

from typing import Any, Self

from pyspark.ml.param import Param, Params
from pyspark.ml.param.shared import HasPredictionCol

from sparkdl.estimator.head import Head
from sparkdl.estimator.params.columns import FeatureParams
from sparkdl.estimator.params.workers import ModuleParams
from sparkdl.estimator.predictions import predicted_columns
from sparkdl.outputs import OutputKey, Widths
from sparkdl.spark.inference.predictor import OutputColumn
from sparkdl.spark.rows.column_overrides import outputs
from sparkdl.spark.rows.converters import nonempty_text, one_of, optional

OUTPUT_TYPES = ("auto", "class", "probability", "raw")


class PredictionParams(HasPredictionCol):
    """Params of every estimator and model: the columns that all models may add."""

    scoreCol: Param[str | None] = Param(
        Params._dummy(),
        "scoreCol",
        "a column with each row's loss, which transform adds to rows that have labels; None for "
        "none",
        typeConverter=optional(nonempty_text("scoreCol")),
    )

    def getScoreCol(self) -> str | None:
        """Gets the value of scoreCol or its default value."""
        return self.getOrDefault(self.scoreCol)

    def setScoreCol(self, value: str | None) -> Self:
        """Sets the value of scoreCol."""
        self._set(scoreCol=value)
        return self

    def setPredictionCol(self, value: str) -> Self:
        """Sets the value of predictionCol."""
        self._set(predictionCol=value)
        return self

    def output_keys(self) -> dict[str, OutputKey | None]:
        """The output of each column that the model adds, by name; None for the only one."""
        return {self.getPredictionCol(): None}

    def setter_of(self, column: str) -> str:
        """The method that renames a column that the model adds."""
        return "setPredictionCol"

    def predicted_columns(self, head: Head, widths: Widths) -> list[OutputColumn]:
        """The columns that the model adds, in their order.

        Args:
            head: what the outputs mean.
            widths: of the model's outputs.

        Raises:
            ConfigError: outputs of this meaning and width have no such columns.
        """
        raise NotImplementedError(type(self).__name__)


class InputOutputParams(FeatureParams, PredictionParams, ModuleParams):
    """Params shared by the estimator and the model: what goes in and what comes out."""

    def _set(self, **values: Any) -> Self:
        # pyspark.ml lets None pass unchecked.
        for name, value in values.items():
            if value is None:
                self.getParam(name).typeConverter(value)
        return super()._set(**values)


class OutputParams(InputOutputParams):
    """Params of ``TorchEstimator`` and ``TorchModel``: which outputs become which columns."""

    outputCols: Param[dict[str, OutputKey] | None] = Param(
        Params._dummy(),
        "outputCols",
        "the columns that the model adds if it returns several outputs: from each column's name to "
        "its output's name, or position in a tuple; None for predictionCol alone",
        typeConverter=outputs,
    )
    outputType: Param[str] = Param(
        Params._dummy(),
        "outputType",
        "what predictionCol holds: 'class' (index, double), 'probability' (vector), 'raw' (the "
        "model's output: double or vector), or 'auto': class for a classification loss, else raw",
        typeConverter=one_of("outputType", OUTPUT_TYPES),
    )

    def getOutputCols(self) -> dict[str, OutputKey] | None:
        """Gets the value of outputCols or its default value."""
        return self.getOrDefault(self.outputCols)

    def setOutputCols(self, value: dict[str, OutputKey] | None) -> Self:
        """Sets the value of outputCols."""
        self._set(outputCols=value)
        return self

    def getOutputType(self) -> str:
        """Gets the value of outputType or its default value."""
        return self.getOrDefault(self.outputType)

    def setOutputType(self, value: str) -> Self:
        """Sets the value of outputType."""
        self._set(outputType=value)
        return self

    def output_keys(self) -> dict[str, OutputKey | None]:
        """The output of each column that the model adds, by name; None for the only one."""
        return {**(self.getOutputCols() or {self.getPredictionCol(): None})}

    def setter_of(self, column: str) -> str:
        """The method that renames a column that the model adds."""
        return "setPredictionCol" if self.getOutputCols() is None else "setOutputCols"

    def predicted_columns(self, head: Head, widths: Widths) -> list[OutputColumn]:
        """The columns that the model adds; see ``InputOutputParams``."""
        return predicted_columns(
            self.output_keys(), self.getPredictionCol(), self.getOutputType(), head, widths
        )
