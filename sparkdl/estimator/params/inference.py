"""The Params for how ``TorchModel`` predicts."""

from __future__ import annotations

from typing import Any, Self

import torch
from pyspark.ml.param import Param, Params

from sparkdl.spark.cluster.devices import device_name
from sparkdl.spark.inference.predictor import Manner
from sparkdl.spark.rows.converters import one_of, switch, whole

_PRECISIONS = {"own": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


class InferenceParams(Params):
    """Params that decide how fast and how precisely a model predicts, not what."""

    predictBatchSize: Param[int] = Param(
        Params._dummy(),
        "predictBatchSize",
        "rows that go through the model at once when it predicts (>= 1)",
        typeConverter=whole("predictBatchSize", 1),
    )
    predictDevice: Param[str] = Param(
        Params._dummy(),
        "predictDevice",
        "where the model predicts: auto, cpu, cuda or cuda:N",
        typeConverter=device_name("predictDevice"),
    )
    predictPrecision: Param[str] = Param(
        Params._dummy(),
        "predictPrecision",
        "of the weights and features when the model predicts: 'own' (what they have), or half: "
        "'bfloat16' or 'float16'",
        typeConverter=one_of("predictPrecision", tuple(_PRECISIONS)),
    )
    predictCompiled: Param[bool] = Param(
        Params._dummy(),
        "predictCompiled",
        "whether each Python process of an executor compiles the model with torch.compile, which "
        "takes it seconds and needs a C++ compiler on the host (on a GPU, Triton too)",
        typeConverter=switch("predictCompiled"),
    )
    predictionDtype: Param[str] = Param(
        Params._dummy(),
        "predictionDtype",
        "of the predictions: 'float64' (double and vectors, as pyspark.ml takes them) or 'float32' "
        "(float and array<float>, which are half as large)",
        typeConverter=one_of("predictionDtype", ("float64", "float32")),
    )

    def _set_inference_defaults(self) -> None:
        self._setDefault(
            predictBatchSize=1024,  # larger ones gain no speed on CPUs and cost memory
            predictDevice="auto",
            predictPrecision="own",
            predictCompiled=False,
            predictionDtype="float64",
        )

    def manner(self) -> Manner:
        """How the model predicts, according to the Params."""
        return Manner(
            batch_rows=self.getPredictBatchSize(),
            device=self.getPredictDevice(),
            dtype=_PRECISIONS[self.getPredictPrecision()],
            compiled=self.getPredictCompiled(),
            double=self.getPredictionDtype() == "float64",
        )

    def getPredictBatchSize(self) -> int:
        """Gets the value of predictBatchSize or its default value."""
        return self.getOrDefault(self.predictBatchSize)

    def setPredictBatchSize(self, value: int) -> Self:
        """Sets the value of predictBatchSize."""
        self._set(predictBatchSize=value)
        return self

    def getPredictDevice(self) -> str:
        """Gets the value of predictDevice or its default value."""
        return self.getOrDefault(self.predictDevice)

    def setPredictDevice(self, value: Any) -> Self:
        """Sets the value of predictDevice."""
        self._set(predictDevice=value)
        return self

    def getPredictPrecision(self) -> str:
        """Gets the value of predictPrecision or its default value."""
        return self.getOrDefault(self.predictPrecision)

    def setPredictPrecision(self, value: str) -> Self:
        """Sets the value of predictPrecision."""
        self._set(predictPrecision=value)
        return self

    def getPredictCompiled(self) -> bool:
        """Gets the value of predictCompiled or its default value."""
        return self.getOrDefault(self.predictCompiled)

    def setPredictCompiled(self, value: bool) -> Self:
        """Sets the value of predictCompiled."""
        self._set(predictCompiled=value)
        return self

    def getPredictionDtype(self) -> str:
        """Gets the value of predictionDtype or its default value."""
        return self.getOrDefault(self.predictionDtype)

    def setPredictionDtype(self, value: str) -> Self:
        """Sets the value of predictionDtype."""
        self._set(predictionDtype=value)
        return self
