"""The Param of the column that holds each row's loss."""

from __future__ import annotations

from typing import Self

from pyspark.ml.param import Param, Params

from sparkdl.spark.rows.converters import optional_name


class ScoreParams(Params):
    """The Param of the estimator and the model; their docstrings say what it is for."""

    scoreCol: Param[str | None] = Param(
        Params._dummy(),
        "scoreCol",
        "the column of each row's loss, which transform adds to rows that have labels; None for "
        "none",
        typeConverter=optional_name("scoreCol"),
    )

    def getScoreCol(self) -> str | None:
        """Gets the value of scoreCol or its default value."""
        return self.getOrDefault(self.scoreCol)

    def setScoreCol(self, value: str | None) -> Self:
        """Sets the value of scoreCol."""
        self._set(scoreCol=value)
        return self
