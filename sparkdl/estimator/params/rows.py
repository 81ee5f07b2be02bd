"""The Params for how rows are spread over the workers, kept there, and fed."""

from __future__ import annotations

from typing import Any, Self

from pyspark.ml.param import Param, Params

from sparkdl.spark.rows.converters import function, one_of, optional, switch, whole
from sparkdl.spark.rows.delivery import SHUFFLES
from sparkdl.spark.rows.scratch import STORE_PLACES


class RowParams(Params):
    """Params of ``TorchEstimator``; its docstring says what each is for."""

    dropLast: Param[bool] = Param(
        Params._dummy(),
        "dropLast",
        "whether a worker leaves out the last minibatch of an epoch if it is short",
        typeConverter=switch("dropLast"),
    )
    groupByLength: Param[bool] = Param(
        Params._dummy(),
        "groupByLength",
        "whether rows of about equal length share a minibatch, so that little is padded",
        typeConverter=switch("groupByLength"),
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
        "epochs after which the workers exchange their rows again (>= 0); 0 for never",
        typeConverter=whole("reshuffleEvery", 0),
    )
    batchTransform: Param[Any] = Param(
        Params._dummy(),
        "batchTransform",
        "Batch -> Batch, called on each training minibatch; None for none",
        typeConverter=optional(function("batchTransform", "a function of a Batch")),
    )
    memoryBudget: Param[int | None] = Param(
        Params._dummy(),
        "memoryBudget",
        "MiB of its stored rows that a worker keeps mapped into memory (>= 1); None for no limit",
        typeConverter=optional(whole("memoryBudget", 1)),
    )
    streamFirstEpoch: Param[bool] = Param(
        Params._dummy(),
        "streamFirstEpoch",
        "whether the first epoch trains on rows as they arrive, instead of once all are read",
        typeConverter=switch("streamFirstEpoch"),
    )
    storeIn: Param[str] = Param(
        Params._dummy(),
        "storeIn",
        "where each worker keeps its rows: 'disk' (Spark's local directory) or 'memory' (/dev/shm)",
        typeConverter=one_of("storeIn", STORE_PLACES),
    )

    def getDropLast(self) -> bool:
        """Gets the value of dropLast or its default value."""
        return self.getOrDefault(self.dropLast)

    def setDropLast(self, value: bool) -> Self:
        """Sets the value of dropLast."""
        self._set(dropLast=value)
        return self

    def getGroupByLength(self) -> bool:
        """Gets the value of groupByLength or its default value."""
        return self.getOrDefault(self.groupByLength)

    def setGroupByLength(self, value: bool) -> Self:
        """Sets the value of groupByLength."""
        self._set(groupByLength=value)
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
