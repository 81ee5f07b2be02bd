"""The Params for what a training survives, and how."""

from __future__ import annotations

from typing import Any, Self

from pyspark.ml.param import Param, Params

from sparkdl.checkpoint.policy import CheckpointPolicy
from sparkdl.errors import ConfigError
from sparkdl.spark.rows.converters import one_of, optional, positive, whole
from sparkdl.spark.storage.files import open_hadoop


def _path(value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"checkpointPath must be a path or URI, got {value!r}")
    return value


class RecoveryParams(Params):
    """Params of ``TorchEstimator``; its docstring says what each is for."""

    timeout: Param[float] = Param(
        Params._dummy(),
        "timeout",
        "the longest time to wait for any worker or round, in seconds (> 0)",
        typeConverter=positive("timeout"),
    )
    maxFailures: Param[int] = Param(
        Params._dummy(),
        "maxFailures",
        "how often workers may be lost during a fit (>= 0); 0 ends it at the first loss",
        typeConverter=whole("maxFailures", 0),
    )
    minWorkers: Param[int] = Param(
        Params._dummy(),
        "minWorkers",
        "with how many workers training goes on while others are lost (>= 1)",
        typeConverter=whole("minWorkers", 1),
    )
    checkpointPath: Param[str | None] = Param(
        Params._dummy(),
        "checkpointPath",
        "directory for checkpoints of the training, a path or URI; None for none",
        typeConverter=_path,
    )
    checkpointEvery: Param[int] = Param(
        Params._dummy(),
        "checkpointEvery",
        "epochs between two checkpoints (>= 1)",
        typeConverter=whole("checkpointEvery", 1),
    )
    checkpointRounds: Param[int | None] = Param(
        Params._dummy(),
        "checkpointRounds",
        "rounds between two checkpoints within an epoch (>= 1); None for none within epochs",
        typeConverter=optional(whole("checkpointRounds", 1)),
    )
    keepLast: Param[int] = Param(
        Params._dummy(),
        "keepLast",
        "checkpoints to keep (>= 1)",
        typeConverter=whole("keepLast", 1),
    )
    resume: Param[str] = Param(
        Params._dummy(),
        "resume",
        "'auto' resumes from the newest checkpoint if there is one; 'never' starts over",
        typeConverter=one_of("resume", ("auto", "never")),
    )

    def getTimeout(self) -> float:
        """Gets the value of timeout or its default value."""
        return self.getOrDefault(self.timeout)

    def setTimeout(self, value: float) -> Self:
        """Sets the value of timeout."""
        self._set(timeout=value)
        return self

    def getMaxFailures(self) -> int:
        """Gets the value of maxFailures or its default value."""
        return self.getOrDefault(self.maxFailures)

    def setMaxFailures(self, value: int) -> Self:
        """Sets the value of maxFailures."""
        self._set(maxFailures=value)
        return self

    def getMinWorkers(self) -> int:
        """Gets the value of minWorkers or its default value."""
        return self.getOrDefault(self.minWorkers)

    def setMinWorkers(self, value: int) -> Self:
        """Sets the value of minWorkers."""
        self._set(minWorkers=value)
        return self

    def getCheckpointPath(self) -> str | None:
        """Gets the value of checkpointPath or its default value."""
        return self.getOrDefault(self.checkpointPath)

    def setCheckpointPath(self, value: str | None) -> Self:
        """Sets the value of checkpointPath."""
        self._set(checkpointPath=value)
        return self

    def getCheckpointEvery(self) -> int:
        """Gets the value of checkpointEvery or its default value."""
        return self.getOrDefault(self.checkpointEvery)

    def setCheckpointEvery(self, value: int) -> Self:
        """Sets the value of checkpointEvery."""
        self._set(checkpointEvery=value)
        return self

    def getCheckpointRounds(self) -> int | None:
        """Gets the value of checkpointRounds or its default value."""
        return self.getOrDefault(self.checkpointRounds)

    def setCheckpointRounds(self, value: int | None) -> Self:
        """Sets the value of checkpointRounds."""
        self._set(checkpointRounds=value)
        return self

    def getKeepLast(self) -> int:
        """Gets the value of keepLast or its default value."""
        return self.getOrDefault(self.keepLast)

    def setKeepLast(self, value: int) -> Self:
        """Sets the value of keepLast."""
        self._set(keepLast=value)
        return self

    def getResume(self) -> str:
        """Gets the value of resume or its default value."""
        return self.getOrDefault(self.resume)

    def setResume(self, value: str) -> Self:
        """Sets the value of resume."""
        self._set(resume=value)
        return self

    def checkpoint_policy(self, application: str | None = None) -> CheckpointPolicy | None:
        """What the Params ask of checkpoints; None without ``checkpointPath``.

        Args:
            application: the one that trains, to name to another that is refused its directory.
        """
        path = self.getCheckpointPath()
        if path is None:
            return None
        return CheckpointPolicy(
            path=path,
            every_epochs=self.getCheckpointEvery(),
            every_rounds=self.getCheckpointRounds(),
            keep_last=self.getKeepLast(),
            resume="auto" if self.getResume() == "auto" else "never",
            open_elsewhere=open_hadoop,
            application=application,
        )
