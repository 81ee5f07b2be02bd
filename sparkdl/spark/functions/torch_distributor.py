"""A drop-in for ``pyspark.ml.torch.distributor.TorchDistributor``, executed by our launcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark.ml.torch import distributor as pyspark_distributor

from sparkdl.arguments import require_whole
from sparkdl.spark.cluster.network import network_of
from sparkdl.spark.diagnostics.console import echoes
from sparkdl.spark.functions.program import Directory, function_of
from sparkdl.spark.functions.run import run_call
from sparkdl.spark.functions.task import Call, CallPlacement
from sparkdl.spark.session.required import require_session


class TorchDistributor(pyspark_distributor.TorchDistributor):
    """pyspark's class with the same constructor and methods, whose ``run`` starts in a second.

    On the cluster (``local_mode=False``) ``run`` calls the function in a process forked for it,
    shows what the ranks print, and raises what they raise: where pyspark's returns None after a
    script has failed, this raises ``WorkerError``. Each Spark task is a node, as with pyspark's:
    ``LOCAL_RANK`` counts the ranks of a task, which see the task's GPUs, or none with
    ``use_gpu=False``. ``local_mode=True`` is left to pyspark.
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
        require_session(self.spark, connect=True)
        self._check_encryption()
        call = Call(function_of(train_object, kwargs, "train_object"), args, kwargs)
        placement = CallPlacement(
            network=network_of(self.spark),
            directory=Directory.of_driver(None),
            device="cuda" if self.use_gpu else "cpu",
            echo=echoes(self.spark),
            tasks_are_nodes=True,
        )
        processes = require_whole("num_processes", self.num_processes, 1)
        return run_call(self.spark, call, placement, processes, name="num_processes")[0]
