"""A torch.distributed process group of all workers of a run that leaves nothing behind."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.nn.parallel import DistributedDataParallel

from sparkdl.collective.network import Gather, Meeting, Network, interface_settings, meet
from sparkdl.collective.tree_sum import TreeSum
from sparkdl.errors import CollectiveError
from sparkdl.phases import EXCHANGE, PhaseClock
from sparkdl.user_code.tracebacks import text_of

logger = logging.getLogger(__name__)

PATIENCE = 0.75
"""The share of the run's deadline for which an operation waits. A rank knows who is missing, the
driver only that all are silent, so the rank should speak first."""
ROLL_CALL_S = 1.0
"""Seconds after a failure within which the other ranks, if alive, notice it too."""
_MISSING_S = 0.2
"""Seconds to wait for each rank's sign after that."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """The group that a worker has joined; the process's default group of torch.distributed.

    Attributes:
        meeting: who the run's workers are, and where.
        members: the ranks of this group: all of them, or those of one host.
        device: the device that tensors must be on to be reduced.
        deadline_s: the longest for which one operation waits, in seconds.
        clock: counts the time that operations take, including waiting for the others.
    """

    meeting: Meeting
    members: tuple[int, ...]
    device: torch.device
    deadline_s: float
    clock: PhaseClock
    _store: Store
    _group: dist.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        """This worker's rank in the run."""
        return self.meeting.rank

    @property
    def index(self) -> int:
        """This worker's place among the members."""
        return self.members.index(self.rank)

    @property
    def world_size(self) -> int:
        """Number of members."""
        return len(self.members)

    def within_host(self) -> Collective:
        """The group of the workers on this host; every worker of the run has to call it."""
        hosts = self.meeting.hosts
        return self.within(
            [
                tuple(rank for rank in self.members if hosts[rank] == host)
                for host in dict.fromkeys(hosts)
            ]
        )

    def within(self, parts: Sequence[tuple[int, ...]]) -> Collective:
        """The group of this worker's part; every worker of the run has to call it.

        Args:
            parts: the ranks of each part; every member is in exactly one.
        """
        own = self
        with self.guarded("forming groups"):
            for members in parts:
                group = dist.new_group(list(members), timedelta(seconds=self.deadline_s))
                if self.rank in members:
                    own = replace(self, members=tuple(members), _group=group)
        return own

    def all_reduce(self, tensor: Tensor, trees: TreeSum | None = None) -> Tensor:
        """Overwrite a tensor with the sum of all ranks' tensors and return it.

        Args:
            tensor: this rank's.
            trees: along which it is added up; None for the backend's own way.
        """
        what = "an all-reduce" if trees is None else "an all-reduce in trees"
        with self.guarded(what), self.clock.phase(EXCHANGE):
            if trees is None:
                dist.all_reduce(tensor, group=self._group)
            else:
                trees(tensor)
        return tensor

    def in_trees(self, colors: int, chunk_bytes: int) -> TreeSum:
        """What adds up tensors along trees, for ``all_reduce``; every member has to make it.

        It has connections of its own, so that the others notice at once when it has failed.

        Args:
            colors: as in ``TreeSum``.
            chunk_bytes: likewise.
        """
        with self.guarded("forming groups"):
            name = f"trees/{self.members}"
            number = self._store.add(f"{name}/{self.rank}", 1)
            store = PrefixStore(f"{name}/group/{number}", self._store)
            timeout = timedelta(seconds=self.deadline_s)
            group = dist.ProcessGroupGloo(store, self.index, self.world_size, timeout)
        return TreeSum(group, colors, chunk_bytes)

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        """Start an ``all_reduce``; returns a function that waits for its end.

        Every rank has to begin, and to wait, in the same order.
        """
        what = "an all-reduce"
        with self.guarded(what):
            work = dist.all_reduce(tensor, group=self._group, async_op=True)

        def arrive() -> None:
            with self.guarded(what), self.clock.phase(EXCHANGE):
                work.wait()

        return arrive

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Overwrite a tensor with rank ``source``'s and return it."""
        with self.guarded(f"a broadcast from rank {source}"), self.clock.phase(EXCHANGE):
            dist.broadcast(tensor, source, group=self._group)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every member's tensor, by index; all must have the same size and dtype."""
        gathered = [torch.empty_like(tensor) for _ in self.members]
        with self.guarded("an all-gather"), self.clock.phase(EXCHANGE):
            dist.all_gather(gathered, tensor, group=self._group)
        return gathered

    def all_to_all(
        self,
        tensor: Tensor,
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
    ) -> Tensor:
        """What each member has for this one, by index.

        Args:
            tensor: what this one has for each: shape (members, ...), the same shape on all; or
                1-D, with so many values for each as ``sent`` says.
            sent: how many values this member has for each.
            received: how many each has for it; 1-D are then returned.
        """
        shape = tensor.shape if received is None else (sum(received),)
        found = tensor.new_empty(shape)
        with self.guarded("an all-to-all exchange"), self.clock.phase(EXCHANGE):
            dist.all_to_all_single(
                found,
                tensor,
                output_split_sizes=None if received is None else list(received),
                input_split_sizes=None if sent is None else list(sent),
                group=self._group,
            )
        return found

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Turn a broken exchange among the workers into an error that names who was missing.

        Args:
            what: what was being exchanged, for the message.

        Raises:
            CollectiveError: a worker died, cannot be reached or did not take part in time.
        """
        try:
            yield
        except RuntimeError as error:
            if not is_of_backend(error):
                raise
            missing = self._call_the_roll()
            who = ", ".join(f"rank {rank} on {self.meeting.hosts[rank]}" for rank in missing)
            raise CollectiveError(
                f"{what} among {self.world_size} workers failed on rank {self.rank}: "
                + (f"{who} did not take part within {self.deadline_s:g} s or died" if who else "")
                + ("" if who else "all workers noticed, so the network between them broke")
                + f" ({_first_line(error)}). If it takes longer here, raise the 'timeout'",
                ranks=tuple(missing),
            ) from error

    def _call_the_roll(self) -> list[int]:
        """The ranks that give no sign of having seen the failure: they hang, or are dead."""
        here = f"failed/{self.rank}"
        try:
            self._store.set(here, "yes")
        except dist.DistError:  # rank 0 hosts the store
            time.sleep(ROLL_CALL_S)
            return [0]
        time.sleep(ROLL_CALL_S)
        missing = [rank for rank in self.members if not self._gave_sign(rank)]
        if self.rank == 0:  # it hosts the store, in which others are still looking
            time.sleep(_MISSING_S * (1 + len(missing)))
        return missing

    def _gave_sign(self, rank: int) -> bool:
        try:
            self._store.wait([f"failed/{rank}"], timedelta(seconds=_MISSING_S))
        except dist.DistError:
            return False
        return True


@contextmanager
def join_collective(
    rank: int,
    gather: Gather,
    *,
    device: str | torch.device,
    deadline_s: float,
    network: Network | None = None,
    clock: PhaseClock | None = None,
) -> Iterator[Collective]:
    """Form a group with all other workers; leaving the ``with`` block dissolves it.

    It is the process's default group, NCCL for GPUs and gloo for CPUs, so everything in torch that
    communicates between processes finds it.

    Args:
        rank: this worker's rank.
        gather: how the workers find each other.
        device: where the tensors to exchange are.
        deadline_s: the longest for which anything in the run waits, in seconds.
        network: interface and ports; by default the route to this host itself.
        clock: counts the time that exchanges take; by default a clock that nobody reads.

    Raises:
        ConfigError: the interface or ports are not available, or two ranks use one GPU.
        CollectiveError: the workers cannot reach each other.
    """
    network = network or Network()
    device = torch.device(device)
    timeout = timedelta(seconds=PATIENCE * deadline_s)
    if dist.is_initialized():
        logger.warning(
            "an earlier task left a process group behind in this process; shutting it down"
        )
        leave_group()
    met = meet(rank, gather, device=device, network=network, timeout=timeout)
    try:
        with environment(interface_settings(device, met.address)):
            store = _form_group(met, device, timeout)
            yield Collective(
                meeting=met,
                members=tuple(range(met.world_size)),
                device=device,
                deadline_s=timeout.total_seconds(),
                clock=clock or PhaseClock(),
                _store=store,
            )
    finally:
        leave_group()


def _form_group(met: Meeting, device: torch.device, timeout: timedelta) -> Store:
    """Make the ranks that have met this process's default group; returns the store they share."""
    try:
        store = met.store
        if store is None:
            store = TCPStore(*met.master, timeout=timeout, wait_for_workers=False)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=met.rank,
            world_size=met.world_size,
            timeout=timeout,
        )
    except RuntimeError as error:
        if not is_of_backend(error):
            raise
        raise CollectiveError(
            f"rank {met.rank} on {met.hosts[met.rank]} ({met.address}) cannot form a group with "
            f"rank 0 at {met.master[0]}:{met.master[1]}: {_first_line(error)}. Unless a worker "
            "has failed in the meantime, a firewall may be in the way: workers must reach each "
            "other; collectiveInterface (spark.sparkdl.collective.interface) chooses the network"
        ) from error
    return store


def release_model(model: DistributedDataParallel) -> None:
    """Release a model's hold on the process group before the group ends; leaves the model useless.

    Otherwise its C++ part would be the last to hold the group and end it with the GIL held, while
    gloo's thread, which that waits for, may need the GIL to drop the last tensor.
    """
    model.reducer = None  # type: ignore[assignment]
    model.logger = None


@contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables temporarily, because Spark reuses this process for other tasks."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def leave_group() -> None:
    """End this process's group, if it has one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def is_of_backend(error: RuntimeError) -> bool:
    """Whether the backend failed, not the user's code; gloo raises plain RuntimeErrors."""
    return isinstance(error, dist.DistError) or "gloo/" in text_of(error)


def _first_line(error: Exception) -> str:
    return text_of(error).partition("\n")[0]
