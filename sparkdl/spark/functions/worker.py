"""What a function under ``sparkdl.run`` has: its place among the workers, its rows, the driver.

The workers' rows may be unequal, and a DistributedDataParallel loop hangs if one worker takes a
step more than another. So all take the same number of steps: as many as the worker with the most
rows needs, and every worker spreads its own rows over them. Nothing is repeated or left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Any, NoReturn, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from sparkdl.arguments import as_whole, require_whole
from sparkdl.checkpoint.state_files import load_state, save_state
from sparkdl.checkpoint.storage import CheckpointStore
from sparkdl.collective.network import Meeting
from sparkdl.errors import ConfigError
from sparkdl.feed.feed import Feed
from sparkdl.feed.order import even_sizes
from sparkdl.spark.catalyst.jvm import running_context
from sparkdl.spark.diagnostics.run_client import SAVED, RunClient
from sparkdl.spark.files import open_hadoop

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741 - an optimizer


FedRows = tuple[Feed, tuple[int, ...]]
"""The feed that has a worker's rows in its store, and how many each worker has, by rank."""


class FunctionWorker:
    """The worker that runs a function under ``sparkdl.run``.

    Attributes:
        rank: from 0 to ``world_size - 1``.
        world_size: number of workers.
        local_rank: this worker's position among those on its host.
        local_world_size: number of workers on its host.
        device: the torch device to use, for example ``cpu`` or ``cuda:0``.
        gpu: the address of the GPU that Spark assigned to this worker, in Spark's notation; None if
            it assigned none.
    """

    def __init__(
        self,
        met: Meeting,
        device: str,
        driver: RunClient,
        rows: FedRows | None = None,
        *,
        gpu: str | None = None,
    ) -> None:
        self.rank = met.rank
        self.world_size = met.world_size
        self.local_rank = met.local_rank
        self.local_world_size = met.local_world_size
        self.device = device
        self.gpu = gpu
        self._driver = driver
        self._rows = rows
        self._epochs = itertools.count(1)
        self._sizes: dict[object, np.ndarray] = {}
        self._stores: dict[str, CheckpointStore] = {}
        self._held = ExitStack()

    def batches(self, batch_size: int) -> Batches:
        """Minibatches of this worker's rows of ``df``, each a dict of tensors by column.

        Every pass over the result is an epoch: each row once, in a new order. All workers get
        equally many minibatches, so that their steps match: the worker with the most rows gets full
        ones, the others fewer rows in each, equal up to one row. Some of a worker's minibatches are
        empty only if it has fewer rows than there are steps.

        Args:
            batch_size: the most rows in a minibatch.

        Returns:
            An iterable whose ``len`` is the number of steps per epoch.

        Raises:
            ConfigError: ``run`` was called without ``df``, or the size is not a whole number >= 1.
        """
        if self._rows is None:
            raise ConfigError("there are no rows: pass sparkdl.run a DataFrame, df=...")
        size = require_whole("batch_size", batch_size, 1)
        return Batches(self._rows, size, self._epochs, self._sizes)

    def wrap(
        self, model: nn.Module, optimizer: O, **options: Any
    ) -> tuple[DistributedDataParallel, O]:
        """Put a model on this worker's device and have the workers reduce its gradients.

        All workers start from rank 0's parameters and buffers. Gradients become the mean over the
        rows of all workers' current minibatches, however many each has: with a loss that is a mean
        over the minibatch, training is single-process training on all of them. Where several
        backward passes make one step (``no_sync``), the last minibatches say how workers are
        weighted. Outside of loops over ``batches``, all workers count alike.

        Joins the default process group if the function has not: NCCL on GPUs, gloo on CPUs.

        Args:
            model: the same on every worker except for the values.
            optimizer: of the model's parameters.
            **options: more arguments of DistributedDataParallel. With ``process_group``, all
                workers are those of that group.

        Returns:
            The model to train, and the optimizer with its state on the model's device.
        """
        device = torch.device(self.device)
        self._join()
        wrapped = DistributedDataParallel(
            model.to(device), device_ids=[device] if device.type == "cuda" else None, **options
        )
        group = wrapped.process_group
        wrapped.register_comm_hook(None, lambda _, bucket: self._add_up(bucket.buffer(), group))
        if optimizer.state:  # ZeroRedundancyOptimizer has no state_dict before it is consolidated
            optimizer.load_state_dict(optimizer.state_dict())  # moves it to the parameters
        return wrapped, optimizer

    def mesh(self, q: int) -> DeviceMesh:
        """Arrange all workers as a cube, for ``sparkdl.parallelize_3d``.

        Joins the default process group if the function has not: NCCL on GPUs, gloo on CPUs.

        Args:
            q: workers along an edge, at least 2; there must be q^3.

        Raises:
            ConfigError: there are not.
        """
        # Of those who call wrap, nobody should pay for importing DTensor.
        from sparkdl.parallel.cube import cube_mesh, require_edge

        require_edge(q, self.world_size)
        self._join()
        return cube_mesh(q, self.device)

    def report(self, **metrics: float | Tensor) -> None:
        """Send the driver some numbers: it prints them after the rank, or calls ``on_report``.

        Args:
            **metrics: numbers or tensors of one element, by name.

        Raises:
            ConfigError: a value is not a number, or a whole one that a float does not hold.
        """
        try:
            given = {
                name: value.detach().reshape(()) if isinstance(value, Tensor) else value
                for name, value in metrics.items()
            }
            numbers = {name: float(value) for name, value in given.items()}
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ConfigError(f"report takes numbers, got {metrics!r:.200}: {error}") from error
        for name, value in given.items():
            whole = as_whole(value)
            if whole is not None and whole != numbers[name]:
                raise ConfigError(
                    f"report sends floats, and {name}={whole} would arrive as "
                    f"{numbers[name]:.0f}. Print it, or return it from the function"
                )
        self._driver.send_report(numbers)

    def save_checkpoint(self, path: str, state: Mapping[str, Any], *, keep_last: int = 2) -> None:
        """Save rank 0's state, all of it or nothing; every worker must call this.

        It returns once the checkpoint is there for everyone; ``sparkdl.load_checkpoint`` reads it.

        Args:
            path: a directory visible to the workers that load it: a path, or a URI that pyarrow.fs
                takes (``s3://bucket/run``). Workers have no Java, and so no Hadoop.
            state: by name: modules, optimizers and anything else with a ``state_dict``, tensors,
                numbers, strings, and lists and dicts of those.
            keep_last: how many checkpoints to keep there.

        Raises:
            ConfigError: the directory cannot be used, another process saves there, or a value
                cannot be saved without pickle.
            CheckpointError: the file system refuses.
        """
        keep_last = require_whole("keep_last", keep_last, 1)
        if self.rank == 0:
            save_state(self._store(path, keep_last), state)
        self._driver.gather(SAVED)

    def close(self) -> None:
        """Release the directories where this worker saved checkpoints."""
        self._held.close()

    def _join(self) -> None:
        if not dist.is_initialized():
            dist.init_process_group("nccl" if torch.device(self.device).type == "cuda" else "gloo")

    def _store(self, path: str, keep_last: int) -> CheckpointStore:
        if path not in self._stores:
            store = CheckpointStore(path, keep_last=keep_last, open_elsewhere=_without_hadoop)
            self._held.enter_context(store.held())
            self._stores[path] = store
        self._stores[path].keep_last = keep_last
        return self._stores[path]

    def _add_up(self, gradients: Tensor, group: dist.ProcessGroup) -> torch.futures.Future[Tensor]:
        """DDP's communication hook: sum_r share_r * gradient_r, shares adding up to 1."""
        sizes = next(reversed(self._sizes.values()), np.ones(self.world_size))
        if sizes[self.rank]:
            of_group = sizes[dist.get_process_group_ranks(group)].sum()
            gradients.mul_(float(sizes[self.rank] / of_group))
        else:
            gradients.zero_()  # the mean over no rows is NaN
        future = dist.all_reduce(gradients, group=group, async_op=True).get_future()
        return cast("torch.futures.Future[Tensor]", future.then(lambda reduced: reduced.value()[0]))


class Batches:
    """A worker's minibatches, epoch after epoch; see ``FunctionWorker.batches``."""

    def __init__(
        self,
        rows: FedRows,
        batch_size: int,
        epochs: Iterator[int],
        current: dict[object, np.ndarray],
    ) -> None:
        self._feed, shard_rows = rows
        self._shard_rows = np.array(shard_rows, dtype=np.int64)
        self._steps = -(-max(shard_rows) // batch_size)
        self._epochs = epochs
        self._current = current

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        loop = object()
        try:
            with closing(self._feed.even_epoch(next(self._epochs), self._steps)) as batches:
                for step, batch in enumerate(batches):
                    # The last one counts: of loops within each other, the one that goes on.
                    self._current.pop(loop, None)
                    self._current[loop] = even_sizes(self._shard_rows, step, self._steps)
                    yield cast("dict[str, Tensor]", batch.features)
        finally:
            self._current.pop(loop, None)


_current: FunctionWorker | None = None


def current_worker() -> FunctionWorker:
    """The worker that runs the calling function.

    Raises:
        ConfigError: the caller does not run under ``sparkdl.run``.
    """
    if _current is None:
        raise ConfigError(
            "there is no worker here: current_worker() only works in functions that sparkdl.run "
            "calls on the executors"
        )
    return _current


def load_checkpoint(path: str) -> dict[str, Any] | None:
    """The newest state that ``save_checkpoint`` wrote to a directory, with tensors on the CPU.

    Works both in the driver and in a training function.

    Args:
        path: the directory that was given to ``save_checkpoint``.

    Returns:
        What was saved, with a ``state_dict`` for each module and optimizer; None if there is
        nothing.

    Raises:
        ConfigError: the directory cannot be used, or holds checkpoints of another kind.
        CheckpointError: it cannot be read.
    """
    if _current is not None:
        return load_state(path, open_elsewhere=_without_hadoop)
    # The lookup would start a session if there is none.
    has_session = running_context() is not None
    return load_state(path, open_elsewhere=open_hadoop if has_session else None)


@contextmanager
def working_as(worker: FunctionWorker) -> Iterator[None]:
    """Make ``current_worker`` return this one."""
    global _current
    _current = worker
    try:
        yield
    finally:
        _current = None
        worker.close()


def _without_hadoop(uri: str) -> NoReturn:
    raise OSError(
        "pyarrow cannot open it (for hdfs: it needs libhdfs), and a worker has no Java to ask "
        "Hadoop: use storage that all executors have mounted, or a scheme of pyarrow's"
    )
