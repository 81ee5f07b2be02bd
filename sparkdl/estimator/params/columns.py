"""The Params for the input columns, and what those become."""

from __future__ import annotations

from typing import Self

from pyspark.ml.param import Param, Params
from pyspark.ml.param.shared import HasFeaturesCol, HasLabelCol, HasWeightCol

from sparkdl.errors import ConfigError
from sparkdl.protocols import SequenceInput
from sparkdl.spark.rows.column_overrides import dtypes, names, pad_inputs, paddings, shapes
from sparkdl.spark.rows.converters import one_of, switch


class FeatureParams(HasFeaturesCol):
    """The Params for which columns the model is given, which it has itself too."""

    featuresCols: Param[list[str] | None] = Param(
        Params._dummy(),
        "featuresCols",
        "several feature columns, passed to the model as separate arguments; wins over featuresCol",
        typeConverter=names("featuresCols"),
    )
    featuresAsDict: Param[bool] = Param(
        Params._dummy(),
        "featuresAsDict",
        "whether the model takes its features as one dict keyed by column name",
        typeConverter=switch("featuresAsDict"),
    )
    featuresAsKwargs: Param[bool] = Param(
        Params._dummy(),
        "featuresAsKwargs",
        "whether the model takes its features as keyword arguments named like the columns",
        typeConverter=switch("featuresAsKwargs"),
    )

    def getFeaturesCols(self) -> list[str] | None:
        """Gets the value of featuresCols or its default value."""
        return self.getOrDefault(self.featuresCols)

    def setFeaturesCols(self, value: list[str] | None) -> Self:
        """Sets the value of featuresCols."""
        self._set(featuresCols=value)
        return self

    def getFeaturesAsDict(self) -> bool:
        """Gets the value of featuresAsDict or its default value."""
        return self.getOrDefault(self.featuresAsDict)

    def setFeaturesAsDict(self, value: bool) -> Self:
        """Sets the value of featuresAsDict."""
        self._set(featuresAsDict=value)
        return self

    def getFeaturesAsKwargs(self) -> bool:
        """Gets the value of featuresAsKwargs or its default value."""
        return self.getOrDefault(self.featuresAsKwargs)

    def setFeaturesAsKwargs(self, value: bool) -> Self:
        """Sets the value of featuresAsKwargs."""
        self._set(featuresAsKwargs=value)
        return self

    def setFeaturesCol(self, value: str) -> Self:
        """Sets the value of featuresCol."""
        self._set(featuresCol=value)
        return self

    def feature_columns(self) -> list[str]:
        """The feature columns in the order of the model's arguments."""
        return self.getFeaturesCols() or [self.getFeaturesCol()]

    def features_by_name(self) -> bool:
        """Whether the model takes its features by column name, in either way.

        Raises:
            ConfigError: both ways are set at once.
        """
        if self.getFeaturesAsDict() and self.getFeaturesAsKwargs():
            raise ConfigError(
                "featuresAsDict gives the model one dict, featuresAsKwargs keyword arguments: "
                "drop one of the two"
            )
        return self.getFeaturesAsDict() or self.getFeaturesAsKwargs()


class LabelParams(HasLabelCol):
    """The labels that the estimator trains on, and that the model is evaluated on."""

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


class ColumnParams(FeatureParams, LabelParams, HasWeightCol):
    """Params of ``TorchEstimator``; its docstring says what each is for."""

    columnShapes: Param[dict[str, list[int | None]] | None] = Param(
        Params._dummy(),
        "columnShapes",
        "the shape of one row by column, where the type does not say; images have [channels, "
        "height, width], padded rows [None, ...]",
        typeConverter=shapes,
    )
    columnDtypes: Param[dict[str, str] | None] = Param(
        Params._dummy(),
        "columnDtypes",
        "the tensor's dtype by column, for example 'bfloat16'; for a binary column, also that of "
        "its bytes",
        typeConverter=dtypes,
    )
    imageCols: Param[list[str] | None] = Param(
        Params._dummy(),
        "imageCols",
        "binary columns of encoded images (BMP, GIF, JPEG, PNG or WebP), decoded on the workers",
        typeConverter=names("imageCols"),
    )
    padCols: Param[dict[str, float] | None] = Param(
        Params._dummy(),
        "padCols",
        "columns of arrays of unequal length, each with the number that pads shorter rows to the "
        "longest of their minibatch",
        typeConverter=paddings,
    )
    padInputs: Param[dict[str, SequenceInput] | None] = Param(
        Params._dummy(),
        "padInputs",
        "what the model is given besides padded features, by column: 'padding_mask', "
        "'attention_mask' or 'lengths'; None for a padding mask of each",
        typeConverter=pad_inputs,
    )
    handleInvalid: Param[str] = Param(
        Params._dummy(),
        "handleInvalid",
        "what to do about NaN and infinity among the features: 'error' or 'keep'",
        typeConverter=one_of("handleInvalid", ("error", "keep")),
    )

    def getColumnShapes(self) -> dict[str, list[int | None]] | None:
        """Gets the value of columnShapes or its default value."""
        return self.getOrDefault(self.columnShapes)

    def setColumnShapes(self, value: dict[str, list[int | None]] | None) -> Self:
        """Sets the value of columnShapes."""
        self._set(columnShapes=value)
        return self

    def getColumnDtypes(self) -> dict[str, str] | None:
        """Gets the value of columnDtypes or its default value."""
        return self.getOrDefault(self.columnDtypes)

    def setColumnDtypes(self, value: dict[str, str] | None) -> Self:
        """Sets the value of columnDtypes."""
        self._set(columnDtypes=value)
        return self

    def getImageCols(self) -> list[str] | None:
        """Gets the value of imageCols or its default value."""
        return self.getOrDefault(self.imageCols)

    def setImageCols(self, value: list[str] | None) -> Self:
        """Sets the value of imageCols."""
        self._set(imageCols=value)
        return self

    def getPadCols(self) -> dict[str, float] | None:
        """Gets the value of padCols or its default value."""
        return self.getOrDefault(self.padCols)

    def setPadCols(self, value: dict[str, float] | None) -> Self:
        """Sets the value of padCols."""
        self._set(padCols=value)
        return self

    def getPadInputs(self) -> dict[str, SequenceInput] | None:
        """Gets the value of padInputs or its default value."""
        return self.getOrDefault(self.padInputs)

    def setPadInputs(self, value: dict[str, SequenceInput] | None) -> Self:
        """Sets the value of padInputs."""
        self._set(padInputs=value)
        return self

    def getHandleInvalid(self) -> str:
        """Gets the value of handleInvalid or its default value."""
        return self.getOrDefault(self.handleInvalid)

    def setHandleInvalid(self, value: str) -> Self:
        """Sets the value of handleInvalid."""
        self._set(handleInvalid=value)
        return self

    def setWeightCol(self, value: str) -> Self:
        """Sets the value of weightCol."""
        self._set(weightCol=value)
        return self

    def optional_column(self, param: str) -> str | None:
        """The column that a Param names; None if it is not set."""
        return self.getOrDefault(param) if self.isDefined(param) else None
