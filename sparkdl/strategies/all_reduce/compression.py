"""Gradients that are sent as something smaller; what is left out is sent later.

Error feedback (Seide et al. 2014, "1-Bit Stochastic Gradient Descent"; Karimireddy et al. 2019,
"Error Feedback Fixes SignSGD"). With g the gradient of one worker in a step, weighted by its rows,
and e what it has left out so far, initially 0:

    M  <-  g + e          send what stands for M          e  <-  M - what was sent

as in Vogels et al. 2019. Stich et al. 2018 keep the error of g times the learning rate: what was
left out before a rate is lowered is applied at the higher rate there, and at the lower one here.

DistributedDataParallel passes on each bucket of gradients as soon as backward has filled it, and
takes back the workers' common result. Backward waits meanwhile: an exchange has several messages,
which all workers must send in the same order.

A worker's memory is kept by parameter, not by bucket, since DDP rebuilds its buckets after the
first step of a process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from sparkdl.collective import Collective
from sparkdl.errors import ConfigError
from sparkdl.replica import Replica
from sparkdl.strategies.all_reduce.chain import Step, Transform
from sparkdl.strategies.arguments import CheckedFields
from sparkdl.strategies.worker_group import HALVES


class Compression(CheckedFields, ABC):
    """What workers send in place of their gradients; an argument of ``GradientAllReduce``."""

    reads_optimizer: ClassVar[bool] = False
    """Whether every worker needs the whole state of the optimizer."""

    def require_fits(self, replica: Replica) -> None:
        """Check that this goes with a replica's optimizer and settings.

        Raises:
            ConfigError: it does not; the message says what to change.
        """

    @abstractmethod
    def compressor(self, collective: Collective, replica: Replica) -> Compressor:
        """One worker's part.

        Args:
            collective: the group of all workers.
            replica: this worker's.
        """


class Compressor(Transform, ABC):
    """What one worker has left out, and how it exchanges the rest.

    Args:
        collective: the group of all workers.
        start_after: optimizer steps at the start of the training whose gradients it is not given:
            they are sent whole.

    Attributes:
        collective: as given.
        start_after: as given.
        errors: what has been left out so far, by the parameter's place among the trained ones.
        memories: all that depends on what was sent, likewise, by a name to save it under.
    """

    def __init__(self, collective: Collective, start_after: int) -> None:
        self.collective = collective
        self.start_after = start_after
        self.errors: dict[int, Tensor] = {}
        self.memories: dict[str, dict[int, Any]] = {"error": self.errors}
        # For parameters that this worker has not used in this step: what to remember if no worker
        # has used them.
        self._unused: list[tuple[Tensor, dict[int, Any], int, Any]] = []

    @abstractmethod
    def average(self, gradients: Mapping[int, Tensor]) -> None:
        """Overwrite gradients with the mean of all workers', or an approximation of it.

        Args:
            gradients: this worker's, of any shape, by their parameters' places; the same places on
                all workers.
        """

    def after_reduction(self, step: Step) -> None:
        """Called before each optimizer step, with the gradients that all workers have.

        What was sent for a parameter that no worker has used is taken back, as DDP drops it.
        """
        for parameter, memory, place, before in self._unused:
            if parameter.grad is None:
                memory.pop(place, None)
                if before is not None:
                    memory[place] = before
        self._unused.clear()

    def saved(self) -> dict[str, Any]:
        """All memories."""
        return {
            f"{name}.{place}": value
            for name, memory in self.memories.items()
            for place, value in memory.items()
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Resume with them."""
        for key, value in saved.items():
            name, _, place = key.rpartition(".")
            if name in self.memories:
                self.memories[name][int(place)] = value

    def take_bucket(self, bucket: GradBucket, places: dict[Tensor, int]) -> Future[Tensor]:
        """Exchange one of DDP's buckets.

        Args:
            bucket: gradients of one dtype; overwritten.
            places: each parameter's place among the trained ones.

        Returns:
            The bucket's own memory, with all communication finished.

        Raises:
            ConfigError: the gradients are sparse.
            CollectiveError: a worker did not take part.
        """
        values = bucket.buffer()
        if values.is_sparse:
            raise ConfigError(
                "compression takes dense gradients, but a layer of this model has sparse ones "
                "(nn.Embedding(sparse=True)): build it with sparse=False, or drop compression"
            )
        # In the shapes of the parameters, but in memory order (channels_last).
        of_bucket = zip(bucket.parameters(), bucket.gradients(), strict=True)
        unused = [parameter for parameter in bucket.parameters() if parameter.grad is None]
        self._unused += [
            (parameter, memory, places[parameter], memory.get(places[parameter]))
            for parameter in unused
            for memory in self.memories.values()
        ]
        self.average({places[parameter]: gradient for parameter, gradient in of_bucket})
        # torch must be told of devices other than the CPU.
        on_cpu = values.device.type == "cpu"
        done: Future[Tensor] = Future(devices=None if on_cpu else [values.device])
        done.set_result(values)
        return done

    def with_error(self, place: int, gradient: Tensor) -> Tensor:
        """M: a gradient plus what earlier ones left out; never narrower than float32."""
        wide = gradient.float() if gradient.dtype in HALVES else gradient
        error = self.errors.get(place)
        return wide.clone() if error is None else wide + error.view_as(wide)

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The mean of all workers' tensors, of the same shapes and one dtype, in one message."""
        if not tensors:
            return []
        flat = torch.cat([each.reshape(-1) for each in tensors])
        # Divided first, as in DDP: half precision would overflow the other way around.
        self.collective.all_reduce(flat.div_(self.collective.world_size))
        parts = torch.split(flat, [each.numel() for each in tensors])
        return [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]
