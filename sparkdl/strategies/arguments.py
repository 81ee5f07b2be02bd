"""Arguments of strategies: how they are declared and checked; ``cutoff``, and momentum.

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
(``averager.cutoff``), it waits for the number of workers that gives the most contributions
per second.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import field, fields
from typing import Any, Literal, TypeVar, cast

from sparkdl.arguments import as_number, convert_numbers
from sparkdl.averager.cutoff import BackupWorkers, PredictedCutoff
from sparkdl.averager.round_policy import All, RoundPolicy
from sparkdl.errors import ConfigError
from sparkdl.replica import Replica

logger = logging.getLogger(__name__)

Cutoff = Literal["none", "predicted"] | int
"""``none``, ``predicted``, or how many workers are not waited for."""
FARTHEST = 2.0
"""How many times the workers' change the center may move without a warning. With SGD at a momentum
of 0.9 and a round every 5 steps, a CNN on scikit-learn's digits reached 95.6 % at 2 times and 9 %
at 7 times, with which Adam and plain SGD reached 96.4 and 97.5 %."""


T = TypeVar("T")
Rule = dict[str, Any]
"""What an argument must be, as the metadata of its field: in words, and as a function."""


class CheckedFields:
    """Base of dataclasses whose fields have rules: numbers are converted, and all are checked.

    Raises:
        ConfigError: an argument is not what its rule says.
    """

    def __post_init__(self) -> None:
        ruled = [each for each in fields(cast(Any, self)) if "must" in each.metadata]
        convert_numbers(self, ruled)
        for each in ruled:
            value, be = getattr(self, each.name), each.metadata["must"]
            if not each.metadata["holds"](value):
                raise ConfigError(f"{each.name} must be {be}, got {value!r:.200}")


def argument(default: T, rule: Rule) -> T:
    """A field with a default and a rule."""
    return field(default=default, metadata=rule)


def must(be: str, holds: Callable[[Any], bool]) -> Rule:
    """A rule."""
    return {"must": be, "holds": holds}


def whole(least: int, of: str = "") -> Rule:
    """A whole number, of what is counted."""
    words = f"a whole number{' of ' if of else ''}{of} >= {least}"
    return must(words, lambda value: type(value) is int and value >= least)


def number(words: str, holds: Callable[[float], bool]) -> Rule:
    """A finite number, in a range."""

    def is_in_range(value: Any) -> bool:
        found = as_number(value)
        return found is not None and holds(found)

    return must(f"a number {words}", is_in_range)


def one_of(*names: str) -> Rule:
    """One of some texts."""
    return must(f"one of {', '.join(names)}", lambda value: value in names)


def instance(kind: Any, words: str) -> Rule:
    """An object of a class, or of one of several."""
    return must(words, lambda value: isinstance(value, kind))


def or_none(rule: Rule) -> Rule:
    """What another rule says, or None."""
    return must(f"None or {rule['must']}", lambda value: value is None or rule["holds"](value))


BOOL = instance(bool, "a bool")
STEPS = whole(1, "steps")
FRACTION = number(">= 0 and < 1", lambda value: 0 <= value < 1)
POSITIVE = number("> 0", lambda value: value > 0)
CUTOFF = must(
    "'none', 'predicted' or a whole number >= 1, the workers not waited for",
    lambda value: value in ("none", "predicted") or (type(value) is int and value >= 1),
)


def require_everyone(cutoff: Cutoff, needing: dict[str, bool]) -> None:
    """Refuse a cut-off beside arguments that need everyone in every round.

    Args:
        cutoff: who is not waited for.
        needing: such arguments, and whether they were given.

    Raises:
        ConfigError: it is given together with one of them.
    """
    for name in [name for name, given in needing.items() if given and cutoff != "none"]:
        raise ConfigError(
            f"{name} needs every worker in every round, and with cutoff={cutoff!r} some are left "
            f"out: set cutoff='none', or drop {name}"
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
    groups = replica.optimizer.param_groups
    inner = max((as_number(group.get("momentum")) or 0 for group in groups), default=0)
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
