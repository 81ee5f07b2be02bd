"""Arguments that several strategies have: their checks, ``cutoff``, and momentum.

``cutoff`` says which workers synchronous rounds through the driver do without.

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
(``averager.policies.cutoff``), it waits for the number of workers that gives the most contributions
per second.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Literal, TypeGuard

from sparkdl.arguments import require_whole
from sparkdl.averager.policies.cutoff import BackupWorkers, PredictedCutoff
from sparkdl.averager.policies.round_policy import All, RoundPolicy
from sparkdl.errors import ConfigError
from sparkdl.replica import Replica

logger = logging.getLogger(__name__)

Cutoff = Literal["none", "predicted"] | int
"""``none``, ``predicted``, or how many workers are not waited for."""
FARTHEST = 2.0
"""How many times the workers' change the center may move without a warning. With SGD at a momentum
of 0.9 and a round every 5 steps, a CNN on scikit-learn's digits reached 95.6 % at 2 times and 9 %
at 7 times, with which Adam and plain SGD reached 96.4 and 97.5 %."""


def is_number(value: object) -> TypeGuard[float]:
    """Whether an argument is an int or float; a bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def require_fraction(name: str, value: object) -> None:
    """Refuse an argument that is no number in [0, 1)."""
    if not is_number(value) or not 0 <= value < 1:
        raise ConfigError(f"{name} must be a number >= 0 and < 1, got {value!r}")


def require_steps(name: str, steps: object) -> None:
    """Refuse an argument that is neither None nor a whole number of steps >= 1."""
    if steps is not None and (type(steps) is not int or steps < 1):
        raise ConfigError(f"{name} must be None or a whole number of steps >= 1, got {steps!r}")


def require_period(period: object) -> None:
    """Refuse a period that is no whole number of steps >= 1."""
    require_whole("period", period, 1, "steps")


def require_bools(owner: object, *names: str) -> None:
    """Refuse fields that are no truth values."""
    for name in names:
        if not isinstance(value := getattr(owner, name), bool):
            raise ConfigError(f"{name} must be a bool, got {value!r}")


def require_one_of(name: str, value: object, known: Iterable[str]) -> None:
    """Refuse an argument that is none of these."""
    if value not in (names := tuple(known)):
        raise ConfigError(f"{name} must be one of {', '.join(names)}, got {value!r}")


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


def warn_of_inner_momentum(
    replica: Replica, learning_rate: float, momentum: float, *, may_reset: bool
) -> None:
    """Warn if the workers' optimizer has momentum, and the center moves far beyond their changes.

    Args:
        replica: as every worker builds it.
        learning_rate: of the outer optimizer.
        momentum: of the outer optimizer.
        may_reset: whether the workers' momentum can start over in each round.
    """
    reach = learning_rate / (1 - momentum)
    momenta = [group.get("momentum") for group in replica.optimizer.param_groups]
    inner = max((each for each in momenta if is_number(each)), default=0)
    if inner > 0 and reach > FARTHEST:
        logger.warning(
            "the optimizer's own momentum of %g is multiplied by the outer one of %g, which moves "
            "the center by %.3g times the workers' change: short windows may diverge. Set %san "
            "outer momentum of at most 0.5 with an outer learning rate of at most 1",
            inner,
            momentum,
            reach,
            "inner_state='reset', or " if may_reset else "",
        )
