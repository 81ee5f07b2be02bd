"""Streaming: a round exchanges one fragment of the parameters, and may overlap with some steps.

Douillard et al. 2025, "Streaming DiLoCo with overlapping communication" (arXiv 2501.18512). With
period p, F fragments, overlap tau and merge factor alpha, the next fragment f is sent after steps
p/F, 2p/F, ... of an epoch, and after tau more steps its center c_f, moved by the outer optimizer,
is merged with what worker r has trained since:

    w_r,f  <-  alpha * w_r,f + (1 - alpha) * c_f

so that each fragment is synchronized every p steps, and the others go on meanwhile. A fragment's
change is weighted by the rows since it was last sent. At the end of an epoch each worker sends its
F fragments once more, in one round after another, so that nothing trained is left out and all begin
the next epoch with the center. Workers with fewer rows do so earlier.

A fragment is a stretch of the flat parameters, in the order of ``module.parameters()``: consecutive
layers. All are of the same size, and so are the rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from sparkdl.averager.client import merge
from sparkdl.averager.values.wire_format import Chunk, plan_fragments
from sparkdl.protocols import Batch, Segment
from sparkdl.strategies.base import Run, StepsAhead


class Stream:
    """One worker's rounds of fragments.

    Args:
        run: the worker's; its replica holds the center.
        fragments: how many there are.
        overlap: steps between sending a fragment and merging the answer.
        merge: the merge factor.
    """

    def __init__(self, run: Run, fragments: int, overlap: int, merge: float) -> None:
        self._run = run
        self._fragments = fragments
        self._overlap = overlap
        self._merge = merge
        # The rows since each fragment was last sent.
        self._rows: list[float] = [0] * fragments
        # Whether a round is under way; steps since it began, or, once restored, since a commit.
        self._under_way = False
        self._ahead = StepsAhead(run)
        # For what was sent but not yet merged when saved: steps until then, merge factor.
        self._due: tuple[int, float] | None = None
        self._ends_epoch = False
        # The answer of a round that was under way when all were restarted, and its merge factor.
        self._answer: tuple[list[tuple[Chunk, Tensor]], float] | None = None

    def skipped(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The minibatches of an epoch except those trained on before this was saved."""
        batches = iter(batches)
        self._ahead.skip(batches)
        return batches

    def count_step(self) -> None:
        """Count a step, after which it may be time to merge."""
        if self._under_way or self._answer is not None:
            self._ahead.steps += 1
            if self._ahead.steps == self._overlap:
                self.merge()

    def merge(self) -> None:
        """Merge the answer of the round under way, if there is one, waiting if need be."""
        if self._answer is not None:
            (parts, local), segments, self._answer = self._answer, self._segments(), None
            for part, answer in parts:
                merge(part.of(segments), answer, local)
        if self._under_way:
            self._under_way, self._due = False, None
            self._run.averager.end_exchange(self._segments(), self._merge)
        self._ahead.steps = 0

    def send(self) -> None:
        """Begin the next fragment's round; no other may be under way."""
        if not (self._overlap or self._merge):
            self._exchange(last=False)
            return
        window = self._run.close_window(last=False, group_weight=self._count())
        self._due, self._under_way = (self._overlap, self._merge), True
        self._run.averager.begin_exchange(self._segments(), window)
        if not self._overlap:
            self.merge()

    def end_epoch(self) -> None:
        """Send all fragments once more, and take the epoch's final center."""
        self.merge()
        for left in reversed(range(self._fragments)):
            self._exchange(last=left == 0)

    def saved(self) -> dict[str, Any]:
        """For ``restore``; empty if the worker goes on with the center alone."""
        if self._ends_epoch:
            return {}
        own = {f"own.{index}": values for index, values in enumerate(self._segments())}
        return {
            **own,
            "rows": list(self._rows),
            **self._ahead.saved(),
            "due": None if self._due is None else list(self._due),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what was ``saved``, while the replica holds the center of that commit."""
        run, segments = self._run, self._segments()
        if saved["due"] is not None:
            steps, local = saved["due"]
            fragment = (run.averager.next_fragment - 1) % self._fragments
            layout = tuple(Segment("state", each.dtype, len(each)) for each in segments)
            parts = plan_fragments(layout, sys.maxsize, self._fragments)[fragment]
            self._answer = [(part, part.of(segments).clone()) for part in parts], local
        for index, values in enumerate(segments):
            values.copy_(saved[f"own.{index}"])
        self._rows = list(saved["rows"])
        self._ahead.restore(saved)
        if saved["due"] is not None and steps == 0:
            self.merge()

    def _exchange(self, *, last: bool) -> None:
        """Take part in the next fragment's round, and wait for it."""
        window = self._run.close_window(last=last, group_weight=self._count())
        # Whether this is saved before the answer or after it, the fragment is the center's.
        self._due, self._ends_epoch = (0, 0.0), last
        self._run.averager.exchange(self._segments(), window)
        self._due, self._ends_epoch = None, False

    def _count(self) -> float:
        """Count what was trained on since the last round; returns the next fragment's weight."""
        weight = self._run.window().weight
        self._rows = [rows + weight for rows in self._rows]
        fragment = self._run.averager.next_fragment
        rows, self._rows[fragment] = self._rows[fragment], 0
        return rows

    def _segments(self) -> list[Tensor]:
        return self._run.replica.segments(with_optimizer=False)
