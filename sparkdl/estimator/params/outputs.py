"""The Params of which columns ``transform`` adds, of an estimator for any task and its model."""

from __future__ import annotations

from typing import Self

from pyspark.ml.param import Param, Params

from sparkdl.estimator.head import Head
from sparkdl.estimator.params.data import InputOutputParams
from sparkdl.estimator.predictions import predicted_columns
from sparkdl.outputs import OutputKey, Widths
from sparkdl.spark.inference.predictor import OutputColumn
from sparkdl.spark.rows.column_overrides import outputs
from sparkdl.spark.rows.converters import one_of

OUTPUT_TYPES = ("auto", "class", "probability", "raw")


class OutputParams(InputOutputParams):
    """Params of ``TorchEstimator`` and ``TorchModel``: which outputs become which columns."""

    outputCols: Param[dict[str, OutputKey] | None] = Param(
        Params._dummy(),
        "outputCols",
        "the columns that the model adds, if it returns several outputs: by the name of each its "
        "output's name, or position in a tuple; None for predictionCol alone",
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
        """By the name of each column that the model adds its output; None for the only one."""
        return {**(self.getOutputCols() or {self.getPredictionCol(): None})}

    def setter_of(self, column: str) -> str:
        """The method that gives a column which the model adds another name."""
        return "setPredictionCol" if self.getOutputCols() is None else "setOutputCols"

    def predicted_columns(self, head: Head, widths: Widths) -> list[OutputColumn]:
        """The columns that the model adds; see ``InputOutputParams``."""
        return predicted_columns(
            self.output_keys(), self.getPredictionCol(), self.getOutputType(), head, widths
        )
