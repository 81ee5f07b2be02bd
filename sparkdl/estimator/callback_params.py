"""The Param of what is called in the driver while a fit goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from pyspark.ml.param import Param, Params

from sparkdl.callbacks import Callback
from sparkdl.errors import ConfigError


def _callbacks(value: Any) -> list[Callback] | None:
    if value is None:
        return None
    wanted = "callbacks must be a list of sparkdl.callbacks.Callback"
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{wanted}, got {value!r}")
    for each in value:
        if isinstance(each, type) and issubclass(each, Callback):
            raise ConfigError(f"{wanted}, and has the class {each.__name__}: call it")
        if not isinstance(each, Callback):
            raise ConfigError(f"{wanted}, and has {each!r}")
    return list(value)


class CallbackParams(Params):
    """The Param of ``TorchEstimator``; its docstring says what it is for."""

    callbacks: Param[list[Callback] | None] = Param(
        Params._dummy(),
        "callbacks",
        "called in the driver after rounds, epochs and more; may end the training; None for none",
        typeConverter=_callbacks,
    )

    def getCallbacks(self) -> list[Callback] | None:
        """Gets the value of callbacks or its default value."""
        return self.getOrDefault(self.callbacks)

    def setCallbacks(self, value: Sequence[Callback] | None) -> Self:
        """Sets the value of callbacks."""
        self._set(callbacks=value)
        return self
