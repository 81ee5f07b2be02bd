"""The Params of which columns are the labels, of the estimator and of the model."""

from __future__ import annotations

from typing import Self

from pyspark.ml.param import Param, Params
from pyspark.ml.param.shared import HasLabelCol

from sparkdl.spark.rows.column_overrides import names


class LabelParams(HasLabelCol):
    """To the estimator what it trains on, to the model what it is evaluated on."""

    labelCols: Param[list[str] | None] = Param(
        Params._dummy(),
        "labelCols",
        "several label columns, passed to the loss as a tuple; wins over labelCol",
        typeConverter=names("labelCols"),
    )

    def getLabelCols(self) -> list[str] | None:
        """Gets the value of labelCols or its default value."""
        return self.getOrDefault(self.labelCols)

    def setLabelCols(self, value: list[str] | None) -> Self:
        """Sets the value of labelCols."""
        self._set(labelCols=value)
        return self

    def setLabelCol(self, value: str) -> Self:
        """Sets the value of labelCol."""
        self._set(labelCol=value)
        return self

    def label_columns(self) -> list[str]:
        """The label columns in the order of the loss's targets."""
        return self.getLabelCols() or [self.getLabelCol()]
