"""``cutoff``: which workers synchronous rounds through the driver do without.

With k backup workers (Chen et al. 2016, "Revisiting Distributed Synchronous SGD"), a round of R
workers is over when R - k of those that began with its center have contributed. There the others'
gradients are thrown away, which loses nothing where each worker draws from all rows. Here every
worker has its own rows, and each row must be trained on once per epoch: a late contribution joins
the next round, as a change from the center that it began with. How late it is, is its staleness.
A round moves the center by the share of a full round's rows that it has, so that each row weighs as
much as any other, as in both papers; were it the mean of whoever is in it, a slow worker's last
windows of an epoch, which are rounds of its own, would count several times. Buffers and optimizer
state move that part of the way to their mean.

``predicted`` chooses k again in each round, after Teng & Wood 2018, "High Throughput Synchronous
Distributed Stochastic Gradient Descent": by a model of how long workers take
(``averager.run_times``), it waits for the number of workers that gives the most contributions per
second.
"""

from __future__ import annotations

from typing import Literal

from sparkdl.averager.policies.cutoff import BackupWorkers, PredictedCutoff
from sparkdl.averager.policies.round_policy import All, RoundPolicy
from sparkdl.errors import ConfigError

Cutoff = Literal["none", "predicted"] | int
"""``none``, ``predicted``, or how many workers are not waited for."""


def require_cutoff(cutoff: object, others: dict[str, bool]) -> None:
    """Check the argument.

    Args:
        cutoff: as given.
        others: other arguments that need everyone in every round, and whether they were given.

    Raises:
        ConfigError: it is not a cut-off, or is given together with such an argument.
    """
    if cutoff not in ("none", "predicted") and (type(cutoff) is not int or cutoff < 1):
        raise ConfigError(
            "cutoff must be 'none', 'predicted' or a whole number >= 1, the workers not waited "
            f"for, got {cutoff!r}"
        )
    needing = [name for name, given in others.items() if given]
    if cutoff != "none" and needing:
        raise ConfigError(
            f"{needing[0]} needs every worker in every round, and with cutoff={cutoff!r} some "
            f"are left out: set cutoff='none', or drop {needing[0]}"
        )


def cutoff_policy(cutoff: Cutoff) -> RoundPolicy:
    """Who is waited for in a run."""
    if isinstance(cutoff, int):
        return BackupWorkers(cutoff)
    return PredictedCutoff() if cutoff == "predicted" else All()
