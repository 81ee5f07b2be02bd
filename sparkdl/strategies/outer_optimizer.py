"""Outer optimizers: train alone for many minibatches, then step the center with an optimizer.

With c the center, d how far the workers have moved from it on average, and v the velocity, the rule
(in ``OuterOptimizer``) has been found several times. -d is the outer optimizer's gradient. v is
kept with the center: it is in every checkpoint and outlives lost workers.

- Local SGD: Stich 2019, "Local SGD Converges Fast and Communicates Little". The center becomes the
  mean. Post-local SGD: Lin et al. 2020, "Don't Use Large Mini-Batches, Use Local SGD", where the
  period is 1 in the first epochs.
- BMUF: Chen and Huo 2016, "Scalable Training of Deep Learning Machines by Incremental Block
  Training". The model W moves by D <- momentum * D + learning_rate * d. With Nesterov's momentum
  the workers are sent W + momentum * D, which is c.
- SlowMo: Wang et al. 2019, "SlowMo: Improving Communication-Efficient Distributed SGD with Slow
  Momentum". With the inner learning rate g, u <- momentum * u - d / g and
  c <- c - learning_rate * g * u. While g is constant, v = -g * u. When a schedule changes it,
  SlowMo rescales what is left of earlier changes; here they stay.
- DiLoCo: Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language
  Models". Nesterov's momentum, after windows of hundreds of AdamW steps. Streaming DiLoCo sends the
  parameters a fragment at a time, while the workers train on; see ``outer_streaming``.

Rounds come after steps p, 2p, ... of an epoch, and once at its end for the remaining steps, which
is an outer step as well. Workers with fewer rows finish earlier: the last rounds of an epoch are of
those that still train.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from torch import Tensor

from sparkdl.averager.round_policy import RoundPolicy
from sparkdl.averager.values.center_update import CenterUpdate, Contributions, Kept
from sparkdl.averager.values.wire_format import NARROW_FORMATS, PARAMETER_CHANGES, WireFormat
from sparkdl.errors import ConfigError
from sparkdl.protocols import Batch, Segment
from sparkdl.replica import Replica
from sparkdl.strategies.arguments import (
    BOOL,
    CUTOFF,
    FRACTION,
    POSITIVE,
    CheckedFields,
    Cutoff,
    argument,
    cutoff_policy,
    instance,
    must,
    one_of,
    require_everyone,
    warn_of_inner_momentum,
    whole,
)
from sparkdl.strategies.base import Needs, Run, Strategy
from sparkdl.strategies.outer_streaming import Stream

Periods = tuple[tuple[int, int], ...]
"""Pairs of an epoch, counted from 1, and the period from that epoch on."""


@dataclass(frozen=True)
class OuterSGD(CheckedFields, CenterUpdate):
    """SGD on the center, as ``torch.optim.SGD`` takes it with the workers' mean change reversed.

    ============== ============= ========================= ======== ==============================
    algorithm      learning_rate momentum                  nesterov source
    ============== ============= ========================= ======== ==============================
    DiLoCo         0.7           0.9                       True     the paper
    local SGD      1             0                         either   by definition
    SlowMo         1             0 to 0.6                  False    the paper, WMT'16: 0 below 4
                                                                    nodes of 8 GPUs, 0.2 for 4,
                                                                    0.5 for 8, 0.6 for 16
    BMUF           1             1 - 1 / number of workers either   the defaults of CNTK, which
                                                                    takes Nesterov's
    ============== ============= ========================= ======== ==============================

    A change that is the same in every round eventually moves the center
    ``learning_rate / (1 - momentum)`` times as far: 7 times with DiLoCo's settings, as many times
    as there are workers with BMUF's.

    Args:
        learning_rate: > 0; 1 takes the mean change unscaled.
        momentum: of earlier steps, in [0, 1). 0 keeps nothing; otherwise the driver needs memory
            for another copy of the parameters, and for two while it writes a checkpoint.
        nesterov: whether the center looks ahead by one momentum step.

    Raises:
        ConfigError: an argument is out of range.
    """

    learning_rate: float = argument(0.7, POSITIVE)
    momentum: float = argument(0.9, FRACTION)
    nesterov: bool = argument(True, BOOL)

    @property
    def keeps(self) -> tuple[str, ...]:
        """The velocity, if there is momentum."""
        return ("velocity",) if self.momentum else ()

    def updates(self, segment: Segment) -> bool:
        """Parameters; none if they become the mean, where a change would only add rounding."""
        becomes_mean = self.learning_rate == 1 and self.momentum == 0
        return super().updates(segment) and not becomes_mean

    def step(
        self, center: Tensor, change: Tensor, memory: Kept, contributions: Contributions
    ) -> None:
        """One step of SGD."""
        if self.momentum:
            velocity = memory["velocity"]
            velocity.mul_(self.momentum).add_(change)
            if self.nesterov:
                change.add_(velocity, alpha=self.momentum)
            else:
                change.copy_(velocity)
        change.mul_(self.learning_rate)


@dataclass(frozen=True)
class OuterOptimizer(Strategy["Stream | None"]):
    """Train ``period`` steps alone, then have an outer optimizer move the center.

    Rule:
        With the center c, after each window of p local minibatches, in which worker r went from c
        to w_r on n_r examples::

            d   <-  sum_r n_r * (w_r - c) / sum_r n_r     how they have moved, on average
            v   <-  momentum * v + d
            c   <-  c + learning_rate * v                 or * (d + momentum * v), Nesterov's
            w_r <-  c                                     or merge * w_r + (1 - merge) * c

    Phases:
        1. Each worker trains for ``period`` steps by itself, or for those left in its epoch.
        2. It sends how far it has moved, in all parameters or in the fragment that is due.
        3. The driver forms the mean in the order of ranks, once all that have rows left have sent
           theirs, and takes the outer step.
        4. The workers are sent the center, or how far it has moved, and go on from it; with
           ``overlap`` they train that many steps meanwhile, and merge what comes with what they
           have.
        5. At an epoch's end all take one more outer step, for the remaining steps; with
           ``fragments``, one for each. That center is validated.

    When:
        Where rounds are expensive, so that windows are hundreds of steps long, or where with many
        workers the plain mean learns too little in an epoch.

    When not:
        Where windows are a few steps and the inner optimizer has momentum of its own, unless with
        ``inner_state="reset"`` or an outer momentum of at most 0.5: the two multiply, of which the
        driver warns. Nor where an epoch, or the whole fit, has few rounds.

    Parameters take outer steps. Floating-point buffers (BatchNorm's statistics) become the workers'
    mean, of where they were and not of where the center goes, and integers the first worker's.

    Args:
        period: local steps between two rounds, >= 1; 500 by default as in DiLoCo; SlowMo has 12 to
            48. Epochs with fewer steps have one round. Or pairs of an epoch and the period from
            there on, starting with epoch 1: ``((1, 1), (31, 16))`` is post-local SGD, which takes
            16 to 32 once the learning rate has decayed for the first time.
        outer: what moves the center; DiLoCo's ``OuterSGD(0.7, 0.9, nesterov=True)`` by default. Any
            ``CenterUpdate``.
        inner_state: what becomes of the workers' own optimizer state (momentum, Adam's moments) in
            a round. With ``keep`` each goes on with its own, as in DiLoCo; a lost worker comes back
            without. With ``average`` the floating-point part is averaged too, and its bytes are
            sent. With ``reset`` each starts over, as in CNTK's BMUF. SlowMo considers all three.
        wire_dtype: ``float32`` sends values in the replica's own precision; ``bfloat16`` sends
            changes rounded to bfloat16, half the bytes; ``float8`` a quarter, in blocks of 128 that
            share a scale; ``float4`` an eighth up, as in Streaming DiLoCo, and a quarter down. Sums
            are formed in float32 at least, and the velocity is never rounded.
        fragments: the number of parts in which the parameters are sent, one after another, each
            again after ``period`` steps: rounds have that many times fewer bytes, and come that
            many times more often. 1 sends all at once, as in DiLoCo; a fragment of Streaming DiLoCo
            has 3 of a transformer's layers, so their number is a third of the layers'. It pays off
            where even rare rounds are felt.
        overlap: steps trained while a round is under way; fewer than ``period // fragments``, those
            between two rounds. 0 waits for each. Use as many as a round lasts, but fewer than 5
            (Streaming DiLoCo loses little below that).
        merge: how much of its own fragment a worker keeps when it takes the center's, in [0, 1);
            the paper's alpha, 0.5 in its experiments with overlap. 0 takes the center's, and drops
            what was trained while the round was under way.
        cutoff: which workers rounds do without, as in ``ParameterAveraging``: ``none`` waits for
            everyone, a number for all but that many, ``predicted`` for as many as pay off. The
            others take part in the next outer step. d is then divided by the examples of a full
            round.

    Raises:
        ConfigError: an argument is out of range, or fragments, overlap or merge are given with an
            ``inner_state`` other than ``keep``, or with a cut-off.
    """

    period: int | Periods = argument(
        500,
        must(
            "a whole number of steps >= 1, or pairs of an epoch and the period from that epoch on, "
            "such as ((1, 1), (31, 16)), starting with epoch 1",
            lambda value: _is_whole(value) or _are_periods(value),
        ),
    )
    outer: CenterUpdate = argument(
        OuterSGD(), instance(CenterUpdate, "a CenterUpdate such as OuterSGD()")
    )
    inner_state: Literal["keep", "average", "reset"] = argument(
        "keep", one_of("keep", "average", "reset")
    )
    wire_dtype: Literal["float32", "bfloat16", "float8", "float4"] = argument(
        "float32", one_of(*NARROW_FORMATS)
    )
    fragments: int = argument(1, whole(1))
    overlap: int = argument(0, whole(0, "steps"))
    merge: float = argument(0.0, FRACTION)
    cutoff: Cutoff = argument("none", CUTOFF)

    def __post_init__(self) -> None:
        super().__post_init__()
        periods = [self.period] if isinstance(self.period, int) else [p for _, p in self.period]
        apart = min(periods) // self.fragments
        if apart <= self.overlap:
            raise ConfigError(
                f"with period={self.period!r} and fragments={self.fragments} there are {apart} "
                f"steps between two rounds; there must be more than overlap={self.overlap}"
            )
        if self._streams and self.inner_state != "keep":
            raise ConfigError(
                f"inner_state={self.inner_state!r} needs blocking rounds over all parameters; "
                "with fragments, overlap or merge each worker keeps its own optimizer's state: "
                "set inner_state='keep'"
            )
        require_everyone(
            self.cutoff,
            {
                f"wire_dtype={self.wire_dtype!r}": self.wire_dtype != "float32",
                "fragments, overlap or merge": self._streams,
            },
        )

    @property
    def _streams(self) -> bool:
        return self.fragments > 1 or self.overlap > 0 or self.merge > 0

    @property
    def needs(self) -> Needs:
        """Only the driver."""
        return Needs(
            exchanges_optimizer_state=self.inner_state == "average", steps_ahead=self.overlap
        )

    @property
    def wire_format(self) -> WireFormat:
        """According to ``wire_dtype``; changes, if some may be from an older center."""
        return NARROW_FORMATS[self.wire_dtype] if self.cutoff == "none" else PARAMETER_CHANGES

    @property
    def round_policy(self) -> RoundPolicy:
        """According to the cut-off."""
        return cutoff_policy(self.cutoff)

    @property
    def center_update(self) -> CenterUpdate:
        """The outer optimizer."""
        return self.outer

    def require_fits(self, replica: Replica) -> None:
        """Warn if outer momentum is multiplied by the workers' own."""
        if isinstance(self.outer, OuterSGD) and self.inner_state == "keep":
            outer = self.outer
            warn_of_inner_momentum(
                replica, outer.learning_rate, outer.momentum, may_reset=not self._streams
            )

    def period_in(self, epoch: int) -> int:
        """Steps between two rounds in an epoch, counted from 1."""
        if isinstance(self.period, int):
            return self.period
        return [period for first, period in self.period if first <= epoch][-1]

    def start(self, run: Run) -> Stream | None:
        """Begin at the center."""
        if not self._streams:
            return None
        return Stream(run, self.fragments, self.overlap, self.merge)

    def train_epoch(self, run: Run, state: Stream | None, batches: Iterable[Batch]) -> None:
        """Train on an epoch's minibatches, except those trained on before a restart."""
        super().train_epoch(run, state, batches if state is None else state.skipped(batches))

    def after_step(self, run: Run, state: Stream | None, batch: Batch) -> None:
        """Take part in a round after every ``period`` steps, ``fragments`` times as often."""
        if state is not None:
            state.count_step()
        if batch.last or not self._is_due(run.step_of_epoch, self.period_in(run.epoch)):
            return
        if state is None:
            self._exchange(run, last=False)
        else:
            state.send()

    def end_epoch(self, run: Run, state: Stream | None) -> None:
        """Contribute the tail, 0 to ``period`` steps, and take the epoch's final center."""
        if state is None:
            self._exchange(run, last=True)
        else:
            state.end_epoch()

    def _is_due(self, step: int, period: int) -> bool:
        """Whether a fragment is due after a step of the epoch, counted from 1."""
        return step * self.fragments // period > (step - 1) * self.fragments // period

    def _exchange(self, run: Run, *, last: bool) -> None:
        if self.inner_state == "reset":
            # Before the round, so that its checkpoint has workers that have started over.
            run.replica.reset_optimizer_state()
        segments = run.replica.segments(with_optimizer=self.needs.exchanges_optimizer_state)
        run.averager.exchange(segments, run.close_window(last=last))


def _is_whole(value: object) -> bool:
    return type(value) is int and value >= 1


def _are_periods(value: object) -> bool:
    if not isinstance(value, tuple) or not value:
        return False
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        return False
    epochs = [epoch for epoch, _ in value]
    whole = all(_is_whole(number) for pair in value for number in pair)
    return whole and epochs[0] == 1 and all(first < then for first, then in pairwise(epochs))
