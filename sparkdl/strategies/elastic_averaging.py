"""Elastic averaging: each replica keeps its own parameters, on a spring that ties it to the center.

Zhang, Choromanska, LeCun 2015, "Deep learning with Elastic Averaging SGD", EASGD. With a moving
rate a, after each window of p local minibatches, the center as it was before on the right:

    d_i  <-  a * (x_i - center)          center  <-  center + sum_i d_i

and each replica i gives up what the center has received from it, with its next step, the gradient
of which is taken before (Algorithm 1):

    x_i  <-  x_i - (optimizer step on the gradient at x_i) - d_i

The paper writes a = learning rate * rho, and b = workers * a for the rate at which the center moves
to the replicas' mean. In the synchronous mode a sum has every worker's d_i, added in the order of
ranks; in the asynchronous one each d_i is a sum of its own, of the center of that moment. These are
Sync EASGD and Async EASGD of You, Buluc, Demmel 2017; with ``aggregation="executors"`` it is their
Sync EASGD3, whose exchange is hidden behind the steps that follow. Their round robin would only
make workers wait for their turns, and their Hogwild has no lock to do without here, where one
thread adds.

Momentum is the optimizer's. With ``SGD(momentum=m)`` this is MEASGD (You et al., equations 5 and
6). EAMSGD (Zhang et al., Algorithm 2) is ``SGD(momentum=m, nesterov=True)``, but for one thing:
torch's parameters are the paper's x + m * v, where gradients are taken, so there the spring ends.

The center is what is saved and validated; a replica takes its own parameters up again when the next
epoch starts. Buffers, such as BatchNorm's statistics, are each replica's own; the center's become
the replicas' mean, or asynchronously move to a worker's at rate a. The optimizers' state stays with
the workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from sparkdl.averager.coordination.round_policy import All, Nobody, RoundPolicy, RoundRobin
from sparkdl.averager.values.center_update import CenterUpdate, Contributions, ReplaceByMean
from sparkdl.averager.values.wire_format import Changes, FullPrecision, WireFormat
from sparkdl.errors import ConfigError
from sparkdl.protocols import Batch, Segment
from sparkdl.replica import Replica
from sparkdl.strategies.base import Needs, Run, Strategy, require_period
from sparkdl.strategies.hogwild import HogwildSpring
from sparkdl.strategies.springs import Spring, SpringAmongWorkers

MODES = ("synchronous", "asynchronous", "hogwild", "round_robin")
AGGREGATIONS = ("driver", "executors")
CENTER_RATE = 0.9
"""b = workers * a in the experiments of Zhang et al."""


@dataclass(frozen=True)
class ElasticAveraging(Strategy[Spring]):
    """Pull replicas and center together after steps p, 2p, ... and at the end of each epoch.

    Choose it where rounds have to be rare and replicas gain from searching apart: in the paper it
    kept its accuracy to periods of 64. Choose another where the result has to be that of one
    process, where a fit is of few rounds, for the center follows the replicas from a distance, or
    where a worker has no memory for two more copies of the parameters.

    A worker that was lost and comes back by itself begins at the center. One that resumes from a
    checkpoint, or is started again with all others, begins where its replica was.

    Args:
        period: local minibatches between two rounds, >= 1; the paper's tau, of which it studied 1,
            4, 16 and 64, and 10 is usual. Beyond 100 lower the learning rate on the way.
        moving_rate: part of the distance to the center that a replica and the center move towards
            each other, the paper's alpha; None for 0.9 / workers, as in the paper's experiments.
            Less lets replicas roam. More than 2 / (1 + workers) is refused in the synchronous mode,
            as there the center overshoots ever further; the asynchronous mode takes less than 1.
        mode: ``synchronous`` gives the same bits each time; in ``asynchronous`` each worker is
            with the center by itself, so that nobody waits for the slow ones but at an epoch's end,
            and the result depends on who comes first.
        aggregation: ``driver`` has the center there; a lost worker is only that worker's loss.
            With ``executors`` each worker keeps the center, and they add up among themselves, over
            NCCL (gloo on CPUs), while they train on to the next round; the driver receives one copy
            at the end of each epoch. For many workers or large models, in the synchronous mode: the
            results are the same but for rounding. All workers then have to run at once, in Spark's
            barrier mode; if one is lost, all are started again from the end of the last epoch.

    Raises:
        ConfigError: an argument is out of range, or they do not go together.
    """

    period: int = 10
    moving_rate: float | None = None
    momentum: float = 0.0
    mode: Literal["synchronous", "asynchronous", "hogwild", "round_robin"] = "synchronous"
    aggregation: Literal["driver", "executors"] = "driver"

    def __post_init__(self) -> None:
        require_period(self.period)
        if self.mode not in MODES:
            raise ConfigError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        if self.aggregation not in AGGREGATIONS:
            raise ConfigError(
                f"aggregation must be one of {', '.join(AGGREGATIONS)}, got {self.aggregation!r}"
            )
        if self._together and not self._in_step:
            raise ConfigError(
                f"mode={self.mode!r} is for aggregation='driver': among executors all add up "
                "together, in step"
            )
        if not _is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise ConfigError(f"momentum must be a number >= 0 and < 1, got {self.momentum!r}")
        rate, most = self.moving_rate, f"< 1 in {self.mode} mode" if self._meets else "<= 1"
        if rate is None:
            return
        if not _is_number(rate) or not 0 < rate <= 1 or (rate == 1 and self._meets):
            raise ConfigError(
                f"moving_rate must be None, for {CENTER_RATE} / workers, or a number > 0 and "
                f"{most}, got {rate!r}"
            )

    @property
    def _in_step(self) -> bool:
        return self.mode == "synchronous"

    @property
    def _meets(self) -> bool:
        """Whether a replica is pulled to the center that it meets, which only the reply tells."""
        return self.mode in ("asynchronous", "round_robin")

    @property
    def _overlaps(self) -> bool:
        return self.mode == "hogwild"

    @property
    def _together(self) -> bool:
        return self.aggregation == "executors"

    @property
    def needs(self) -> Needs:
        """Nothing but the driver, if it has the center; each worker keeps its optimizer's state."""
        return Needs(
            exchanges_optimizer_state=False,
            collective=self._together,
            gang_start=self._together,
            equal_steps=self._together,
            resumes_alone=not self._together,
            steps_ahead=self.period if self._overlaps else 0,
        )

    @property
    def wire_format(self) -> WireFormat:
        """The replicas' values, where it is the center of that moment that they are pulled to."""
        return Changes() if self._overlaps else FullPrecision()

    @property
    def center_update(self) -> CenterUpdate:
        """The center's end of the springs; among executors the driver is handed the center."""
        if self._together:
            return ReplaceByMean()
        return ElasticPull(self.moving_rate, buffers=not self._in_step)

    @property
    def round_policy(self) -> RoundPolicy:
        """Everyone, nobody, or who comes before."""
        if self.mode == "round_robin":
            return RoundRobin(self.period)
        return All() if self._in_step else Nobody()

    def require_workers(self, num_workers: int) -> None:
        """Check that pulls to one and the same center do not have it overshoot ever further."""
        rate = rate_of(self.moving_rate, num_workers)
        limits = {
            "synchronous": ("2 / (1 + workers)", 2 / (1 + num_workers)),
            "hogwild": ("1 / workers", 1 / num_workers),
        }
        what, limit = limits.get(self.mode, ("", 1.0))
        if rate > limit:
            raise ConfigError(
                f"moving_rate={rate:g} is too much for {num_workers} workers, which may move the "
                f"same center: it has to be at most {what} = {limit:g}; "
                f"{CENTER_RATE} / workers = {CENTER_RATE / num_workers:g} is usual"
            )

    def require_fits(self, replica: Replica) -> None:
        """Check that there are not two momenta."""
        groups = replica.optimizer.param_groups
        if self.momentum and any(group.get("momentum") for group in groups):
            raise ConfigError(
                f"ElasticAveraging(momentum={self.momentum:g}) is momentum of what the optimizer "
                f"does, and this {type(replica.optimizer).__name__} has momentum of its own. Leave "
                "out one of the two"
            )

    def start(self, run: Run) -> Spring:
        """Begin at the center.

        Raises:
            ConfigError: the center would overshoot whatever the learning rate.
        """
        self.require_workers(run.world_size)
        rate = rate_of(self.moving_rate, run.world_size)
        if self._together:
            return SpringAmongWorkers(run, rate, self.momentum, self.period)
        if self._overlaps:
            return HogwildSpring(run, rate, self.momentum)
        return Spring(run.replica, rate, self.momentum, from_last=not self._meets)

    def saved_state(self, state: Spring) -> Mapping[str, Any]:
        """The replica's own parameters and buffers, and how far it has still to move."""
        return state.saved()

    def restore_state(self, state: Spring, saved: Mapping[str, Any]) -> None:
        """Put the replica back where it was."""
        state.restore(saved)

    def rows_changed(self, run: Run, state: Spring) -> None:
        """Learn how many windows all workers have now."""
        state.rows_changed(run)

    def train_epoch(self, run: Run, state: Spring, batches: Iterable[Batch]) -> None:
        """Train the replica's own parameters, and leave it with the epoch's final center."""
        state.swap()
        batches = iter(batches)
        skipped = state.skip(batches)
        if skipped is not None:
            self._exchange_if_due(run, state, skipped)
        super().train_epoch(run, state, batches)
        state.swap()

    def after_step(self, run: Run, state: Spring, batch: Batch) -> None:
        """Give up what the center has received; exchange after every ``period`` steps."""
        state.move()
        self._exchange_if_due(run, state, batch)

    def _exchange_if_due(self, run: Run, state: Spring, batch: Batch) -> None:
        if run.step_of_epoch % self.period == 0 and not batch.last:
            state.exchange(run, last=False)

    def end_epoch(self, run: Run, state: Spring) -> None:
        """Exchange the tail, 0 to ``period`` steps, and take the epoch's final center."""
        if self._meets and run.examples:
            # The final center has what others did meanwhile, and no longer tells this one's part.
            state.exchange(run, last=False)
        state.exchange(run, last=True)


@dataclass(frozen=True)
class ElasticPull(CenterUpdate):
    """The replicas pull the center towards them.

    Attributes:
        moving_rate: as in ``ElasticAveraging``.
        buffers: whether they pull its buffers too, which become their mean otherwise.
    """

    moving_rate: float | None
    buffers: bool

    def updates(self, segment: Segment) -> bool:
        """Parameters; and buffers, where they would become those of one replica."""
        return self.buffers or segment.kind == "parameters"

    def step(
        self,
        center: Tensor,
        change: Tensor,
        memory: Mapping[str, Tensor],
        contributions: Contributions,
    ) -> None:
        """From the mean distance to the sum of the pulls, of as many replicas as contribute."""
        rate = rate_of(self.moving_rate, contributions.world_size)
        change.mul_(rate * len(contributions.weights))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def rate_of(moving_rate: float | None, world_size: int) -> float:
    """The moving rate of a run with so many workers; the same at both ends of a spring."""
    return CENTER_RATE / world_size if moving_rate is None else moving_rate
