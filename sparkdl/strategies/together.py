"""What strategies share whose workers exchange among themselves: shares, means, signs of life."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from sparkdl.collective import Collective
from sparkdl.errors import TrainingError
from sparkdl.strategies.base import Run

SIGN_OF_LIFE_S = 5.0
"""Seconds between two signs of life to the driver, which hears nothing of the collective; a sixth
of the deadline of an operation if that is less."""
HALVES = (torch.float16, torch.bfloat16)


class Together:
    """One worker among the others of its run.

    Args:
        run: this worker's, with its group; every worker has to make one at the same time.

    Attributes:
        collective: the group.
        shares: rows an epoch of each worker, by rank.
    """

    def __init__(self, run: Run) -> None:
        assert run.collective is not None
        self.collective: Collective = run.collective
        self.shares = [int(share["rows"]) for share in run.averager.gather({"rows": run.rows})]
        self._turns = 0
        self._next_sign = 1
        self._last_sign = time.monotonic()

    def examples_of(self, rows: range) -> list[int]:
        """How many of their ``rows``, counted from the start of an epoch, the ranks have."""
        return [max(0, min(share, rows.stop) - rows.start) for share in self.shares]

    def average(self, segments: Sequence[Tensor], examples: Sequence[int]) -> None:
        """Overwrite every rank's values with the mean weighted by examples.

        Integers and booleans become those of the first rank that has examples. Weights are
        relative to that rank's, as in the averager, so equal windows are pure additions.

        Args:
            segments: flat tensors, the same number and kinds on every rank.
            examples: how much each rank's values count, by rank; not all zero.
        """
        first = next(rank for rank, count in enumerate(examples) if count)
        total = sum(count / examples[first] for count in examples)
        weight = examples[self.collective.rank] / examples[first]
        for values in segments:
            if not values.is_floating_point():
                self.collective.broadcast(values, first)
                continue
            # Sums of half precision are formed in float32, as in the averager.
            wide = values.float() if values.dtype in HALVES else values
            if weight == 0.0:
                wide.zero_()  # a product would keep NaN
            elif weight != 1.0:
                wide.mul_(weight)
            self.collective.all_reduce(wide)
            if total != 1.0:
                wide.div_(total)
            if wide is not values:
                values.copy_(wide)

    def give_sign_of_life(self, run: Run) -> None:
        """Let the driver hear of every rank now and then; to be called as often by all of them."""
        self._turns += 1
        if self._turns < self._next_sign:
            return
        seconds = time.monotonic() - self._last_sign
        # The clocks differ; rank 0's decides for all after how many turns the next sign is due.
        signs = run.averager.gather({"seconds": seconds, "turns": self._turns})
        pace = signs[0]["seconds"] / signs[0]["turns"]
        interval_s = min(SIGN_OF_LIFE_S, self.collective.deadline_s / 6)
        self._next_sign = max(1, round(interval_s / max(pace, 1e-6)))
        self._turns = 0
        self._last_sign = time.monotonic()

    def hand_over(self, run: Run, segments: Sequence[Tensor]) -> None:
        """End an epoch: equal replicas need one contribution, with everybody's examples.

        Raises:
            TrainingError: this worker did not train on the rows that it had announced, by which
                its contributions were weighed.
        """
        if run.examples != run.rows:
            raise TrainingError(
                f"rank {run.rank} trained on {run.examples} rows in epoch {run.epoch}, but had "
                f"announced {run.rows} to the others, who weighed its contributions by that"
            )
        sums = torch.stack([run.loss_sum.double(), torch.tensor(run.examples).double()])
        loss_sum, examples = self.collective.all_reduce(sums.to(self.collective.device)).tolist()
        first = self.collective.rank == 0
        run.loss_sum = torch.tensor(loss_sum if first else 0.0, dtype=torch.float64)
        run.examples = round(examples) if first else 0
        run.averager.exchange(segments, run.close_window(last=True))
