"""A drop-in for ``pyspark.ml.torch.distributor.TorchDistributor``, executed by our launcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark.ml.torch import distributor as pyspark_distributor

from sparkdl.spark.functions.run import run


class TorchDistributor(pyspark_distributor.TorchDistributor):
    """pyspark's class with the same constructor and methods, whose ``run`` starts in a second.

    On the cluster (``local_mode=False``) ``run`` calls the function in Spark's own Python
    processes, or where a task has several GPUs in a process for each, shows what the ranks print,
    and raises what they raise: where pyspark's returns None after a script has failed, this
    raises ``WorkerError``. ``local_mode=True`` is left to pyspark.
    """

    def run(self, train_object: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Run a function or a script on ``num_processes`` workers.

        Args:
            train_object: the function, or the path of the script.
            *args: its arguments.
            **kwargs: the function's arguments by name.

        Returns:
            What the function returned on rank 0; None for a script.

        Raises:
            WorkerError: it raised on a worker.
            WorkerLostError: a worker's process ended.
            ConfigError: too few slots.
        """
        if self.local_mode:
            return super().run(train_object, *args, **kwargs)
        self._check_encryption()
        device = "cuda" if self.use_gpu else "cpu"
        call = _Bound(train_object, args, kwargs) if callable(train_object) else train_object
        given = () if callable(train_object) else args
        return run(call, *given, num_workers=self.num_processes, device=device)[0]


class _Bound:
    """A function with its arguments, whatever they are called."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self._function, self._args, self._kwargs = function, args, kwargs

    def __call__(self) -> Any:
        return self._function(*self._args, **self._kwargs)
