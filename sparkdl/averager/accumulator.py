"""The weighted sum of one round's contributions, formed chunk by chunk in rank order.

Floating-point addition is not associative: adding in the order of arrival would give other
parameters in every run. So the k-th contributor adds its chunk c only after contributor k-1 has;
each has at most one chunk in memory while it waits, and the first ``HELD_CHUNKS`` more.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from sparkdl.averager.wire import Chunk
from sparkdl.errors import DeadlineError, StoppedError
from sparkdl.protocols import Layout

HELD_CHUNKS = 2
"""How many of the first contribution's chunks are kept as they arrived. Two that meet are added in
one pass; the first by itself would have to be copied, which costs as much as the addition."""


class Accumulator:
    """Mean of the contributions of one round, weighted by examples.

    Weights are taken relative to the first contributor's, so equal windows are pure additions and
    a single contribution passes through unchanged, bit for bit.

    Args:
        layout: the segments' kinds and dtypes.
        chunks: the plan by which every contribution arrives.
        total: where the mean is formed, a tensor of ``center_dtype`` a segment; overwritten.
        ranks: who takes part, in ascending order.
    """

    def __init__(
        self, layout: Layout, chunks: Sequence[Chunk], total: list[Tensor], ranks: Sequence[int]
    ) -> None:
        self._layout = layout
        self._chunks = chunks
        self._total = total
        self._turns = {rank: _Turn() for rank in ranks}
        self._before = dict(zip(ranks[1:], ranks[:-1], strict=True))
        self._last_rank = ranks[-1]
        self._declared: set[int] = set()
        self._examples: dict[int, int] = {}
        self._held: dict[int, Tensor] = {}
        self._holding = threading.Lock()

    def declare(self, rank: int, examples: int) -> None:
        """Say what a contribution weighs, before its first chunk; without examples it has none."""
        self._declared.add(rank)
        if examples:
            self._examples[rank] = examples
        else:
            self._turns[rank].skip()

    def add(self, rank: int, index: int, values: Tensor, deadline_s: float) -> None:
        """Add chunk ``index`` of a contribution, after the ranks before have added theirs.

        Args:
            rank: whose contribution.
            index: position in the plan of chunks.
            values: shape (chunk.stop - chunk.start,), in the dtype that travelled.
            deadline_s: seconds to wait for the ranks before.

        Raises:
            DeadlineError: a rank before did not add this chunk in time.
            StoppedError: the round was stopped meanwhile.
        """
        first = self._wait_for_ranks_before(rank, index, deadline_s)
        chunk = self._chunks[index]
        total = chunk.of(self._total)
        averaged = self._layout[chunk.segment].averaged
        if first:
            self._begin(index, values, total, may_hold=averaged and rank != self._last_rank)
        elif averaged:
            self._continue(index, values, total, self._weight(rank))
        if averaged and rank == self._last_rank:
            self._normalize(total)
        self._turns[rank].advance()

    def _begin(self, index: int, values: Tensor, total: Tensor, *, may_hold: bool) -> None:
        """Take the first contribution to a chunk, in the hope that the second is near."""
        if not may_hold or values.dtype != total.dtype:
            total.copy_(values)
            return
        with self._holding:
            self._held[index] = values
            if len(self._held) > HELD_CHUNKS:
                self._write_held(min(self._held))

    def _continue(self, index: int, values: Tensor, total: Tensor, weight: float) -> None:
        """Add another contribution to a chunk."""
        with self._holding:
            held = self._held.pop(index, total)
        # numpy works in this thread; torch would wake its pool for every chunk.
        if weight == 1.0 and values.dtype == total.dtype:
            np.add(held.numpy(), values.numpy(), out=total.numpy())
        else:
            total.copy_(held).add_(values, alpha=weight)

    def _write_held(self, index: int) -> None:
        np.copyto(self._chunks[index].of(self._total).numpy(), self._held.pop(index).numpy())

    def finish(self) -> bool:
        """Complete the mean; returns whether there is one, that is whether anyone had examples."""
        for index in list(self._held):
            self._write_held(index)
        if self._examples and self._last_rank not in self._examples:
            # Each chunk is divided while in cache by the last rank, except if that one is empty.
            for segment, total in zip(self._layout, self._total, strict=True):
                if segment.averaged:
                    self._normalize(total)
        return bool(self._examples)

    def stop(self) -> None:
        """Wake everyone who waits for a turn; their ``add`` raises."""
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
        with self._condition:
            done = self._condition.wait_for(
                lambda: self._stopped or self.skipped or self._added > index, timeout=deadline_s
            )
            if self._stopped:
                raise StoppedError("the round was stopped")
            return done
