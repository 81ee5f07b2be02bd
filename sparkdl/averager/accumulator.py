"""The weighted sum of one round's contributions, formed chunk by chunk in rank order.

Floating-point addition is not associative: adding in the order of arrival would give other
parameters in every run. So the k-th contributor adds its chunk c only after contributor k-1 has.
The first contribution arrives where the sum is formed; of each other, one chunk waits for its turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from sparkdl.averager.wire import Chunk
from sparkdl.errors import DeadlineError, StoppedError
from sparkdl.protocols import Layout

WAITS = 8
"""The parts of which a wait for another rank consists."""

Receive = Callable[[Tensor], None]
"""Writes the next chunk of a contribution into a tensor of its length and of the dtype that
travels."""


class Accumulator:
    """Mean of the contributions of one round, weighted by examples.

    Weights are taken relative to the first contributor's, so equal windows are pure additions and
    a single contribution passes through unchanged, bit for bit.

    Args:
        layout: the segments' kinds and dtypes.
        wire_dtypes: the dtype in which each segment travels.
        chunks: the plan by which every contribution arrives.
        total: where the mean is formed, a tensor of ``center_dtype`` a segment; overwritten.
        ranks: who takes part, in ascending order.
    """

    def __init__(
        self,
        layout: Layout,
        wire_dtypes: Sequence[torch.dtype],
        chunks: Sequence[Chunk],
        total: list[Tensor],
        ranks: Sequence[int],
    ) -> None:
        self._layout = layout
        self._wire_dtypes = wire_dtypes
        self._chunks = chunks
        self._total = total
        self._turns = {rank: _Turn() for rank in ranks}
        self._before = dict(zip(ranks[1:], ranks[:-1], strict=True))
        self._last_rank = ranks[-1]
        self.ranks = frozenset(ranks)
        self._stopped = False
        self._declared: set[int] = set()
        self._examples: dict[int, int] = {}

    def declare(self, rank: int, examples: int) -> None:
        """Say what a contribution weighs, before its first chunk; without examples it has none."""
        self._declared.add(rank)
        if examples:
            self._examples[rank] = examples
        else:
            self._turns[rank].skip()

    def add(
        self, rank: int, index: int, receive: Receive, scratch: Tensor, deadline_s: float
    ) -> None:
        """Add chunk ``index`` of a contribution, after the ranks before have added theirs.

        Args:
            rank: whose contribution.
            index: position in the plan of chunks.
            receive: fetches the chunk.
            scratch: bytes, at least as many as the largest chunk has; overwritten.
            deadline_s: seconds to wait for the ranks before.

        Raises:
            DeadlineError: a rank before did not add this chunk in time.
            StoppedError: the round was stopped meanwhile.
        """
        if self._stopped:
            raise StoppedError("the round was stopped")
        chunk = self._chunks[index]
        total = chunk.of(self._total)
        dtype = self._wire_dtypes[chunk.segment]
        averaged = self._layout[chunk.segment].averaged
        if rank not in self._before and dtype is total.dtype:
            receive(total)
        else:
            values = scratch[: len(total) * dtype.itemsize].view(dtype)
            receive(values)
            if self._wait_for_ranks_before(rank, index, deadline_s):
                total.copy_(values)
            elif averaged:
                _add(total, values, self._weight(rank))
        if averaged and rank == self._last_rank:
            self._normalize(total)
        self._turns[rank].advance()

    def finish(self) -> bool:
        """Complete the mean; returns whether there is one, that is whether anyone had examples."""
        if self._examples and self._last_rank not in self._examples:
            # Each chunk is divided while in cache by the last rank, except if that one is empty.
            for segment, total in zip(self._layout, self._total, strict=True):
                if segment.averaged:
                    self._normalize(total)
        return bool(self._examples)

    def stop(self) -> None:
        """Wake everyone who waits for a turn; their ``add`` raises."""
        self._stopped = True
        for turn in self._turns.values():
            turn.stop()

    def _wait_for_ranks_before(self, rank: int, index: int, deadline_s: float) -> bool:
        """Wait for this chunk's turn; returns whether no rank before contributes."""
        before = self._before.get(rank)
        while before is not None:
            if not self._turns[before].wait_past(index, deadline_s):
                # A rank before that has arrived may itself wait for one that has not.
                absent = [r for r in self._turns if r < rank and r not in self._declared]
                raise DeadlineError(
                    f"rank {rank} waited {deadline_s:g} s for rank {(absent or [before])[0]} to "
                    f"send chunk {index + 1} of {len(self._chunks)} of its contribution"
                )
            if not self._turns[before].skipped:
                return False
            before = self._before.get(before)
        return True

    def _weight(self, rank: int) -> float:
        return self._examples[rank] / self._examples[min(self._examples)]

    def _normalize(self, total: Tensor) -> None:
        weights = sum(self._weight(rank) for rank in sorted(self._examples))
        if weights != 1.0:
            np.divide(total.numpy(), weights, out=total.numpy())


def _add(total: Tensor, values: Tensor, weight: float) -> None:
    # numpy works in this thread; torch would wake its pool for every chunk.
    if weight == 1.0 and values.dtype == total.dtype:
        np.add(total.numpy(), values.numpy(), out=total.numpy())
    else:
        total.add_(values, alpha=weight)


class _Turn:
    """How many chunks a contributor has added, and a way to wait for more."""

    def __init__(self) -> None:
        self.skipped = False
        self._added = 0
        self._stopped = False
        self._condition = threading.Condition()

    def advance(self) -> None:
        with self._condition:
            self._added += 1
            self._condition.notify_all()

    def skip(self) -> None:
        with self._condition:
            self.skipped = True
            self._condition.notify_all()

    def stop(self) -> None:
        with self._condition:
            self._stopped = True
            self._condition.notify_all()

    def wait_past(self, index: int, deadline_s: float) -> bool:
        done = False
        with self._condition:
            # Time in which this process stood still ends one of the waits, not all of them.
            for _ in range(WAITS):
                done = done or self._condition.wait_for(
                    lambda: self._stopped or self.skipped or self._added > index,
                    timeout=deadline_s / WAITS,
                )
            if self._stopped:
                raise StoppedError("the round was stopped")
            return done
