"""Streaming: a round is of one fragment of the parameters, and may be under way for some steps.

Douillard et al. 2025, "Streaming DiLoCo with overlapping communication" (arXiv 2501.18512). With
period p, F fragments, overlap tau and merge factor alpha, after steps p/F, 2p/F, ... of an epoch
the next fragment f is sent, and after tau more steps its center c_f, moved by the outer optimizer,
is merged with what the worker r has trained since:

    w_r,f  <-  alpha * w_r,f + (1 - alpha) * c_f

so that each fragment is synchronized after p steps, and the others go on meanwhile. What a fragment
has changed counts by the rows since it was sent last. At the end of an epoch each worker sends its
F fragments once more, one round after the other, so that nothing that was trained is left out and
all begin the next epoch with the center. Who has fewer rows does so earlier.

A fragment is a stretch of the flat parameters, in the order of ``module.parameters()``: layers that
follow each other. All are of the same size, so that rounds are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from sparkdl.averager.client.overlapped import merge
from sparkdl.averager.values.chunks import plan_fragments
from sparkdl.protocols import Batch, Segment
from sparkdl.strategies.base import Run
from sparkdl.strategies.steps_ahead import StepsAhead


class Stream:
    """One worker's rounds of fragments.

    Args:
        run: the worker's; its replica holds the center.
        fragments: how many there are.
        overlap: steps between sending a fragment and merging what came of it.
        merge: the merge factor.
    """

    def __init__(self, run: Run, fragments: int, overlap: int, merge: float) -> None:
        self._run = run
        self._fragments = fragments
        self._overlap = overlap
        self._merge = merge
        # Of each fragment, the rows since it was sent last.
        self._rows = [0] * fragments
        # Whether a round is under way; steps since it began, or, once restored, since a commit.
        self._under_way = False
        self._ahead = StepsAhead(run)
        # Of what is sent, but not merged in what is saved now: steps until then, merge factor.
        self._due: tuple[int, float] | None = None
        self._ends_epoch = False
        self._answer: _Answer | None = None

    def skipped(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The minibatches of an epoch without those that were trained on before this was saved."""
        batches = iter(batches)
        self._ahead.skip(batches)
        return batches

    def count_step(self) -> None:
        """Take note of a step, after which it may be time to merge."""
        if self._under_way or self._answer is not None:
            self._ahead.steps += 1
            if self._ahead.steps == self._overlap:
                self.merge()

    def merge(self) -> None:
        """Merge what has come, or will come, of a round that is under way; if there is one."""
        if self._answer is not None:
            self._answer.merge(self._segments())
            self._answer = None
        if self._under_way:
            self._under_way, self._due = False, None
            self._run.averager.end_exchange(self._segments(), self._merge)
        self._ahead.steps = 0

    def send(self) -> None:
        """Have the next fragment's round begin; no other may be under way."""
        if not (self._overlap or self._merge):
            self._exchange(last=False)
            return
        window = self._run.close_window(last=False, stands_for=self._count())
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
            self._answer = _Answer(segments, self._fragments, fragment, local)
        for index, values in enumerate(segments):
            values.copy_(saved[f"own.{index}"])
        self._rows = list(saved["rows"])
        self._ahead.restore(saved)
        if saved["due"] is not None and steps == 0:
            self.merge()

    def _exchange(self, *, last: bool) -> None:
        """Take part in the next fragment's round, and wait for it."""
        window = self._run.close_window(last=last, stands_for=self._count())
        # Whether that is saved before the answer or after it, the fragment is the center's.
        self._due, self._ends_epoch = (0, 0.0), last
        self._run.averager.exchange(self._segments(), window)
        self._due, self._ends_epoch = None, False

    def _count(self) -> int:
        """Count the rows since the last round; returns how many the next fragment stands for."""
        self._rows = [rows + self._run.examples for rows in self._rows]
        fragment = self._run.averager.next_fragment
        rows, self._rows[fragment] = self._rows[fragment], 0
        return rows

    def _segments(self) -> list[Tensor]:
        return self._run.replica.segments(with_optimizer=False)


class _Answer:
    """What came of a round that was under way when all were started again.

    Args:
        center: the center's segments.
        fragments: how many there are.
        fragment: the round's.
        local: the merge factor.
    """

    def __init__(
        self, center: Sequence[Tensor], fragments: int, fragment: int, local: float
    ) -> None:
        layout = tuple(Segment("state", values.dtype, len(values)) for values in center)
        self._local = local
        self._parts = [
            (part, part.of(list(center)).clone())
            for part in plan_fragments(layout, sys.maxsize, fragments)[fragment]
        ]

    def merge(self, segments: list[Tensor]) -> None:
        """Merge it with the replica's."""
        for part, answer in self._parts:
            merge(part.of(segments), answer, self._local)
