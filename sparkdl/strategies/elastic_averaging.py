"""Elastic averaging: each replica keeps its own parameters, tied to the center by a spring.

Zhang, Choromanska, LeCun 2015, "Deep learning with Elastic Averaging SGD": EASGD, and EAMSGD with
Nesterov's momentum (Algorithms 1 and 2; their a is learning rate * rho, and b = workers * a is the
rate at which the center moves to the replicas' mean). As there, a gradient is taken before the
replica gives up what the center has received.

The modes of You, Buluc, Demmel 2017 ("Scaling Deep Learning on GPU and Knights Landing clusters")
differ in which center a replica is pulled to:

    synchronous     the one before the round, of everyone: Sync EASGD; with aggregation="executors"
                    it is their Sync EASGD3, whose exchange is hidden behind the steps that follow
    asynchronous    the one it meets, one worker at a time, first come first served: Async EASGD
    round_robin     the same in the order of ranks, which wait for their turns: their baseline
    hogwild         the one it has read before, and nobody waits for the reply: Hogwild EASGD
                    (``elastic_springs`` says what differs)

The optimizer's momentum is a different one: with ``SGD(momentum=m)`` this is MEASGD (You et al.,
equations 5 and 6). With ``SGD(momentum=m, nesterov=True)`` it is nearly EAMSGD: torch's parameters
are the paper's x + m * v, where gradients are taken, and the spring ends there. With the argument
``momentum`` it is EAMSGD itself, whatever the optimizer; see ``elastic_springs``.

The center is what is saved and validated; a replica takes up its own parameters again when the next
epoch starts. Buffers, such as BatchNorm's statistics, are each replica's own; the center's become
the replicas' mean or, where workers come one by one, move towards a worker's at rate a. The
optimizers' state stays with the workers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from sparkdl.averager.round_policy import All, Nobody, RoundPolicy, RoundRobin
from sparkdl.averager.values.center_update import CenterUpdate, Contributions, Kept, ReplaceByMean
from sparkdl.averager.values.wire_format import CHANGES, FULL_PRECISION, WireFormat
from sparkdl.errors import ConfigError
from sparkdl.protocols import Batch, Segment
from sparkdl.replica import Replica
from sparkdl.strategies.arguments import FRACTION, STEPS, argument, must, number, one_of
from sparkdl.strategies.base import Needs, PeriodicStrategy, Run
from sparkdl.strategies.elastic_springs import HogwildSpring, Spring, SpringAmongWorkers

CENTER_RATE = 0.9
"""b = workers * a in the experiments of Zhang et al."""
MEETING = ("asynchronous", "round_robin")
"""The modes in which a replica is pulled to the center that it meets, known only from the reply."""
_RATE = number("> 0 and <= 1", lambda rate: 0 < rate <= 1)


@dataclass(frozen=True)
class ElasticAveraging(PeriodicStrategy[Spring]):
    """Pull replicas and center together after steps p, 2p, ... and at the end of each epoch.

    Rule:
        With the moving rate a, the optimizer's step u on a gradient, and old values on the right,
        after each window of p steps of worker i::

            d_i     <-  a * (x_i - center)
            center  <-  center + d_i         synchronously + the sum of all d_i

        and in every step, where d_i is given up once::

            v_i  <-  momentum * v_i + u(x_i + momentum * v_i)
            x_i  <-  x_i + v_i - d_i

    Phases:
        1. A worker trains its own x_i for ``period`` steps.
        2. It sends x_i; in ``hogwild`` mode x_i - c_i, with c_i the center that it read last.
        3. The driver adds the pulls to the center: once everyone's have arrived, or in the order in
           which they come, or in ``round_robin`` mode in the order of ranks.
        4. The worker is sent the center, and finds d_i, which it gives up with its next step. In
           ``hogwild`` mode it trains on meanwhile, and takes the center before it sends again.
        5. When the epoch ends, all wait for each other, and validate the center.

    When:
        Where rounds must be rare and replicas gain from searching apart: in the paper it kept its
        accuracy up to periods of 64.

    When not:
        Where the result must be that of one process; where a fit has few rounds, as the center
        follows the replicas from a distance; or where a worker has no memory for two more copies of
        the parameters, five in ``hogwild`` mode, and another two with ``momentum``.

    A worker that was lost and comes back by itself begins at the center. One that resumes from a
    checkpoint, or is restarted with all others, begins where its replica was.

    Args:
        period: local minibatches between two rounds, >= 1; the paper's tau, which it studied at 1,
            4, 16 and 64; 10 is usual. Beyond 100, lower the learning rate along the way.
        moving_rate: part of the distance to the center that a replica and the center move towards
            each other, the paper's alpha; None for 0.9 / workers, as in the paper's experiments.
            Less lets replicas roam. More than 2 / (1 + workers) is refused in the synchronous mode,
            where the center would overshoot ever further, and more than 1 / workers in ``hogwild``
            mode; the others take less than 1.
        momentum: Nesterov's, applied to the optimizer's steps, in [0, 1): the paper's delta, 0.99
            in its authors' code with a learning rate of 0.01. 0 for none; keep it 0 for an
            optimizer that has momentum of its own, or scales its steps as Adam does.
        mode: ``synchronous`` gives the same bits each time; use it unless workers differ in speed.
            In ``asynchronous`` each worker meets the center by itself, so that nobody waits for
            slow ones except at an epoch's end, and the result depends on who comes first.
            ``hogwild`` does not even wait for the center, for where the round trip takes as long as
            some steps; with short ones it only pulls to older centers. ``round_robin`` has each
            wait for its turn, with the same bits each time: the baseline that the others were
            measured against (You et al.), slowest of all.
        aggregation: ``driver`` keeps the center there; a lost worker affects no other. With
            ``executors`` each worker keeps the center, and they sum among themselves, over NCCL
            (gloo on CPUs), while they train on to the next round; the driver receives one copy at
            the end of each epoch. It is for many workers or large models, in the synchronous mode,
            with the same results except for rounding. If one is lost, all are restarted from the
            end of the last epoch.

    Raises:
        ConfigError: an argument is out of range, or some do not go together.
    """

    period: int = argument(10, STEPS)
    moving_rate: float | None = argument(
        None,
        must(
            f"None, for {CENTER_RATE} / workers, or {_RATE['must']}",
            lambda rate: rate is None or _RATE["holds"](rate),
        ),
    )
    momentum: float = argument(0.0, FRACTION)
    mode: Literal["synchronous", "asynchronous", "hogwild", "round_robin"] = argument(
        "synchronous", one_of("synchronous", "asynchronous", "hogwild", "round_robin")
    )
    aggregation: Literal["driver", "executors"] = argument("driver", one_of("driver", "executors"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.aggregation == "executors" and self.mode != "synchronous":
            raise ConfigError(
                f"mode={self.mode!r} is for aggregation='driver': among executors the sums are "
                "all-reduced, in step"
            )
        if self.moving_rate == 1 and self.mode in MEETING:
            raise ConfigError(
                f"moving_rate must be < 1 in {self.mode} mode, got {self.moving_rate!r}"
            )

    @property
    def needs(self) -> Needs:
        """Only the driver, if it has the center; each worker keeps its optimizer's state."""
        return Needs(
            exchanges_optimizer_state=False,
            collective=self.aggregation == "executors",
            steps_ahead=self.period if self.mode == "hogwild" else 0,
        )

    @property
    def wire_format(self) -> WireFormat:
        """The replicas' values, if they are pulled to the center as it is at that moment."""
        return CHANGES if self.mode == "hogwild" else FULL_PRECISION

    @property
    def center_update(self) -> CenterUpdate:
        """The center's end of the springs; among executors, the driver is sent the center."""
        if self.aggregation == "executors":
            return ReplaceByMean()
        return ElasticPull(self.moving_rate, buffers=self.mode != "synchronous")

    @property
    def round_policy(self) -> RoundPolicy:
        """Waits for everyone, nobody, or whoever comes before."""
        if self.mode == "round_robin":
            return RoundRobin(self.period)
        return All() if self.mode == "synchronous" else Nobody()

    def require_workers(self, num_workers: int) -> None:
        """Check that pulls to one and the same center do not make it overshoot ever further."""
        rate = rate_of(self.moving_rate, num_workers)
        limits = {
            "synchronous": ("2 / (1 + workers)", 2 / (1 + num_workers)),
            "hogwild": ("1 / workers", 1 / num_workers),
        }
        what, limit = limits.get(self.mode, ("", 1.0))
        if rate > limit:
            raise ConfigError(
                f"moving_rate={rate:g} is too high for {num_workers} workers that move the same "
                f"center: it must be at most {what} = {limit:g}; {CENTER_RATE} / workers = "
                f"{CENTER_RATE / num_workers:g} is usual"
            )

    def require_fits(self, replica: Replica) -> None:
        """Check that there are not two kinds of momentum."""
        groups = replica.optimizer.param_groups
        if self.momentum and any(group.get("momentum") for group in groups):
            raise ConfigError(
                f"ElasticAveraging(momentum={self.momentum:g}) adds momentum to the optimizer's "
                f"steps, but this {type(replica.optimizer).__name__} already has its own. Drop "
                "one of the two"
            )

    def start(self, run: Run) -> Spring:
        """Begin at the center.

        Raises:
            ConfigError: the center would overshoot at any learning rate.
        """
        self.require_workers(run.world_size)
        rate = rate_of(self.moving_rate, run.world_size)
        if self.aggregation == "executors":
            return SpringAmongWorkers(run, rate, self.momentum, self.period)
        if self.mode == "hogwild":
            return HogwildSpring(run, rate, self.momentum)
        return Spring(run.replica, rate, self.momentum, from_last=self.mode not in MEETING)

    def train_epoch(self, run: Run, state: Spring, batches: Iterable[Batch]) -> None:
        """Train the replica's own parameters, and leave it with the epoch's final center."""
        state.swap()
        batches = iter(batches)
        skipped = state.skip(batches)
        if skipped is not None:
            super().after_step(run, state, skipped)
        super().train_epoch(run, state, batches)
        state.swap()

    def after_step(self, run: Run, state: Spring, batch: Batch) -> None:
        """Give up what the center has received; exchange after every ``period`` steps."""
        state.move()
        super().after_step(run, state, batch)

    def exchange(self, run: Run, state: Spring, *, last: bool) -> None:
        """Move both ends of the spring, and in the epoch's last window take its final center."""
        if last and self.mode in MEETING and run.examples:
            # The final center includes what others did, so that this one's part cannot be told.
            state.exchange(run, last=False)
        state.exchange(run, last=last)


@dataclass(frozen=True)
class ElasticPull(CenterUpdate):
    """The replicas pull the center towards them, as often as they exchange (Zhang et al. 2015).

    Attributes:
        moving_rate: as in ``ElasticAveraging``.
        buffers: whether they pull its buffers too, which otherwise become their mean.
    """

    moving_rate: float | None
    buffers: bool
    by_share = False  # the springs' two ends have to move alike

    def updates(self, segment: Segment) -> bool:
        """Parameters; and buffers, if they would otherwise become those of one replica."""
        return self.buffers or segment.kind == "parameters"

    def step(
        self, center: Tensor, change: Tensor, memory: Kept, contributions: Contributions
    ) -> None:
        """Turn the mean distance into the sum of the pulls of all replicas that contribute."""
        rate = rate_of(self.moving_rate, contributions.world_size)
        change.mul_(rate * len(contributions.weights))


def rate_of(moving_rate: float | None, world_size: int) -> float:
    """The moving rate of a run with this many workers; the same at both ends of a spring."""
    return CENTER_RATE / world_size if moving_rate is None else moving_rate
