"""The Params about columns: what goes in, what comes out, and how rows are fed."""

from __future__ import annotations

from typing import Any, Self

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import (
    HasFeaturesCol,
    HasPredictionCol,
    HasWeightCol,
)

from sparkdl.errors import ConfigError
from sparkdl.estimator.head import Head
from sparkdl.estimator.params.labels import LabelParams
from sparkdl.estimator.params.scores import ScoreParams
from sparkdl.estimator.params.validation import ValidationParams
from sparkdl.outputs import OutputKey, Widths
from sparkdl.protocols import SequenceInput
from sparkdl.spark.inference.predictor import OutputColumn
from sparkdl.spark.rows.column_overrides import dtypes, names, pad_inputs, paddings, shapes
from sparkdl.spark.rows.converters import one_of, optional_function, optional_whole, whole
from sparkdl.spark.rows.delivery import SHUFFLES
from sparkdl.spark.rows.scratch import STORE_PLACES


class InputOutputParams(HasFeaturesCol, HasPredictionCol, ScoreParams):
    """Params shared by the estimator and the model: what goes in and what comes out."""

    featuresCols: Param[list[str] | None] = Param(
        Params._dummy(),
        "featuresCols",
        "several feature columns, passed to the model as separate arguments; wins over featuresCol",
        typeConverter=names("featuresCols"),
    )
    featuresAsDict: Param[bool] = Param(
        Params._dummy(),
        "featuresAsDict",
        "whether the model takes its features as one dict by the columns' names",
        typeConverter=TypeConverters.toBoolean,
    )
    featuresAsKwargs: Param[bool] = Param(
        Params._dummy(),
        "featuresAsKwargs",
        "whether the model takes its features as keyword arguments by the columns' names",
        typeConverter=TypeConverters.toBoolean,
    )
    shipModules: Param[bool] = Param(
        Params._dummy(),
        "shipModules",
        "whether modules of your own that the model and the other Params need, neither installed "
        "nor of the standard library, are sent to the executors",
        typeConverter=TypeConverters.toBoolean,
    )

    def _set(self, **values: Any) -> Self:
        # pyspark.ml lets None pass without a look at it.
        for name, value in values.items():
            if value is None:
                self.getParam(name).typeConverter(value)
        return super()._set(**values)

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

    def getShipModules(self) -> bool:
        """Gets the value of shipModules or its default value."""
        return self.getOrDefault(self.shipModules)

    def setShipModules(self, value: bool) -> Self:
        """Sets the value of shipModules."""
        self._set(shipModules=value)
        return self

    def setFeaturesCol(self, value: str) -> Self:
        """Sets the value of featuresCol."""
        self._set(featuresCol=value)
        return self

    def setPredictionCol(self, value: str) -> Self:
        """Sets the value of predictionCol."""
        self._set(predictionCol=value)
        return self

    def feature_columns(self) -> list[str]:
        """The feature columns in the order of the model's arguments."""
        return self.getFeaturesCols() or [self.getFeaturesCol()]

    def output_keys(self) -> dict[str, OutputKey | None]:
        """By the name of each column that the model adds its output; None for the only one."""
        return {self.getPredictionCol(): None}

    def setter_of(self, column: str) -> str:
        """The method that gives a column which the model adds another name."""
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

    def features_by_name(self) -> bool:
        """Whether the model takes its features by the columns' names, in whichever way.

        Raises:
            ConfigError: in two ways at once.
        """
        if self.getFeaturesAsDict() and self.getFeaturesAsKwargs():
            raise ConfigError(
                "featuresAsDict gives the model one dict, featuresAsKwargs keyword arguments: "
                "leave one of the two out"
            )
        return self.getFeaturesAsDict() or self.getFeaturesAsKwargs()


class DataParams(InputOutputParams, LabelParams, HasWeightCol, ValidationParams):
    """Params of ``TorchEstimator`` about the columns and how they are fed."""

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
        "the tensor's dtype by column, for example 'bfloat16'; of a binary column also that of its "
        "bytes",
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
        "columns of arrays of unequal length, by each the number that shorter rows are padded with "
        "to the longest of their minibatch",
        typeConverter=paddings,
    )
    padInputs: Param[dict[str, SequenceInput] | None] = Param(
        Params._dummy(),
        "padInputs",
        "what the model is given besides padded features, by column: 'padding_mask', "
        "'attention_mask' or 'lengths'; None for a padding mask of each",
        typeConverter=pad_inputs,
    )
    groupByLength: Param[bool] = Param(
        Params._dummy(),
        "groupByLength",
        "whether rows of about equal length share a minibatch, so that little is padded",
        typeConverter=TypeConverters.toBoolean,
    )
    handleInvalid: Param[str] = Param(
        Params._dummy(),
        "handleInvalid",
        "what to do about NaN and infinity among the features: 'error' or 'keep'",
        typeConverter=one_of("handleInvalid", ("error", "keep")),
    )
    dropLast: Param[bool] = Param(
        Params._dummy(),
        "dropLast",
        "whether a worker leaves out the last minibatch of an epoch if it is short",
        typeConverter=TypeConverters.toBoolean,
    )
    shuffleRows: Param[str] = Param(
        Params._dummy(),
        "shuffleRows",
        "how the rows are spread over the workers: 'exchange' (they exchange them among "
        "themselves), 'spark' (by its shuffle) or 'none' (they stay where they are read)",
        typeConverter=one_of("shuffleRows", SHUFFLES),
    )
    reshuffleEvery: Param[int] = Param(
        Params._dummy(),
        "reshuffleEvery",
        "epochs after which the workers exchange their rows once more (>= 0); 0 for never",
        typeConverter=whole("reshuffleEvery", 0),
    )
    batchTransform: Param[Any] = Param(
        Params._dummy(),
        "batchTransform",
        "Batch -> Batch, called on each minibatch to train on; None for none",
        typeConverter=optional_function("batchTransform", "a function of a Batch"),
    )
    memoryBudget: Param[int | None] = Param(
        Params._dummy(),
        "memoryBudget",
        "MiB of its stored rows that a worker keeps mapped into memory (>= 1); None for no limit",
        typeConverter=optional_whole("memoryBudget", 1),
    )

    streamFirstEpoch: Param[bool] = Param(
        Params._dummy(),
        "streamFirstEpoch",
        "whether the first epoch trains on rows as they arrive, instead of when all are read",
        typeConverter=TypeConverters.toBoolean,
    )
    storeIn: Param[str] = Param(
        Params._dummy(),
        "storeIn",
        "where each worker keeps its rows: 'disk' (Spark's local directory) or 'memory' (/dev/shm)",
        typeConverter=one_of("storeIn", STORE_PLACES),
    )

    def setWeightCol(self, value: str) -> Self:
        """Sets the value of weightCol."""
        self._set(weightCol=value)
        return self

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

    def getGroupByLength(self) -> bool:
        """Gets the value of groupByLength or its default value."""
        return self.getOrDefault(self.groupByLength)

    def setGroupByLength(self, value: bool) -> Self:
        """Sets the value of groupByLength."""
        self._set(groupByLength=value)
        return self

    def getHandleInvalid(self) -> str:
        """Gets the value of handleInvalid or its default value."""
        return self.getOrDefault(self.handleInvalid)

    def setHandleInvalid(self, value: str) -> Self:
        """Sets the value of handleInvalid."""
        self._set(handleInvalid=value)
        return self

    def getDropLast(self) -> bool:
        """Gets the value of dropLast or its default value."""
        return self.getOrDefault(self.dropLast)

    def setDropLast(self, value: bool) -> Self:
        """Sets the value of dropLast."""
        self._set(dropLast=value)
        return self

    def getShuffleRows(self) -> str:
        """Gets the value of shuffleRows or its default value."""
        return self.getOrDefault(self.shuffleRows)

    def setShuffleRows(self, value: str) -> Self:
        """Sets the value of shuffleRows."""
        self._set(shuffleRows=value)
        return self

    def getReshuffleEvery(self) -> int:
        """Gets the value of reshuffleEvery or its default value."""
        return self.getOrDefault(self.reshuffleEvery)

    def setReshuffleEvery(self, value: int) -> Self:
        """Sets the value of reshuffleEvery."""
        self._set(reshuffleEvery=value)
        return self

    def getBatchTransform(self) -> Any:
        """Gets the value of batchTransform or its default value."""
        return self.getOrDefault(self.batchTransform)

    def setBatchTransform(self, value: Any) -> Self:
        """Sets the value of batchTransform."""
        self._set(batchTransform=value)
        return self

    def getMemoryBudget(self) -> int | None:
        """Gets the value of memoryBudget or its default value."""
        return self.getOrDefault(self.memoryBudget)

    def setMemoryBudget(self, value: int | None) -> Self:
        """Sets the value of memoryBudget."""
        self._set(memoryBudget=value)
        return self

    def getStreamFirstEpoch(self) -> bool:
        """Gets the value of streamFirstEpoch or its default value."""
        return self.getOrDefault(self.streamFirstEpoch)

    def setStreamFirstEpoch(self, value: bool) -> Self:
        """Sets the value of streamFirstEpoch."""
        self._set(streamFirstEpoch=value)
        return self

    def getStoreIn(self) -> str:
        """Gets the value of storeIn or its default value."""
        return self.getOrDefault(self.storeIn)

    def setStoreIn(self, value: str) -> Self:
        """Sets the value of storeIn."""
        self._set(storeIn=value)
        return self

    def optional_column(self, param: str) -> str | None:
        """The column that a Param names, None if it is not set."""
        return self.getOrDefault(param) if self.isDefined(param) else None
