"""Gradient sharing: workers send each other only changes that are large enough.

Strom 2015, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", as in
Deeplearning4j's SharedTrainingMaster. In Strom's paper changes are added: that equals this with
learning rate and threshold multiplied by the number of workers. All workers take part in every
round, so that replicas stay equal and the same seed gives the same bits; Strom's, and
Deeplearning4j's, do not wait.

A round in the driver (``aggregation="driver"``) sends the q_r up and the change of c down. Among
the workers (``"executors"``), each sends its q_r to every other, the paper's mesh, and the driver
receives a copy of c at the end of each epoch.

Floating-point buffers (BatchNorm's statistics) become the workers' mean, unencoded, and integers
the first worker's. The optimizer's state stays with the workers.

The large entries of a change are sent, and the rest is kept for later. With d a change of the
parameters, t the threshold and r the residual, initially 0:

    r  <-  r + d          q  <-  sign(r) * t where |r| >= t, else 0          r  <-  r - q

and q is sent. Large entries are sent more than once; only what is clipped is lost. A threshold has
8 significant bits, so that r - q is exact while r < 65,536 * t: all q and the residual then add up,
to the bit, to what has gone in.

What goes beyond Strom is Deeplearning4j's (``AdaptiveThresholdAlgorithm``,
``ResidualClippingPostProcessor``, ``EncodingHandler``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sparkdl.arguments import as_number
from sparkdl.averager.values.replica_codec import require_finite
from sparkdl.averager.values.sparse import Sparse
from sparkdl.averager.values.wire_format import FULL_PRECISION, SPARSE_CHANGES, WireFormat, as_held
from sparkdl.collective import Collective
from sparkdl.errors import ConfigError
from sparkdl.events import WindowReport
from sparkdl.strategies.arguments import STEPS, argument, must, number, one_of, or_none
from sparkdl.strategies.base import Needs, PeriodicStrategy, Run
from sparkdl.strategies.worker_group import WorkerGroup

DECAY = 0.5 ** (1 / 20)
"""The factor by which a threshold changes from one message to the next: it doubles in 20."""
CLIP_EVERY = 5
"""Messages between two clippings of the residual."""
SHAKE = 3
"""The divisor for the threshold of a shake-up message."""
_BLOCK = 1 << 15
"""Values encoded together: three stretches of this size fit in the cache."""
_MANY = 1 / 32
"""If more of a block is sent, whole blocks are faster than positions in them."""


class ThresholdEncoder:
    """One worker's residual, and the threshold of its next message.

    Args:
        encoding: says how changes are encoded.
        center: what the first change is measured from; a float32 or float64 tensor for each that is
            encoded, 1-D, on the CPU.

    Attributes:
        threshold: of the next message.
        messages: how many there have been.
        residuals: what was not sent, in tensors like the center's.
    """

    def __init__(self, encoding: ThresholdGradientSharing, center: Sequence[Tensor]) -> None:
        self.threshold = short(encoding.threshold)
        self.messages = 0
        self.residuals = [torch.zeros_like(values) for values in center]
        self._encoding = encoding
        self._values = max(1, sum(len(values) for values in center))

    def encode(
        self, values: Sequence[Tensor], center: Sequence[Tensor], out: Sequence[Tensor]
    ) -> None:
        """Find out what to send.

        Args:
            values: what the worker has trained, 1-D, on any device.
            center: what it began with.
            out: overwritten with what to send; may be ``center``.
        """
        encoding = self._encoding
        self.messages += 1
        shake = bool(encoding.shake_every) and self.messages % (encoding.shake_every or 1) == 0
        threshold = short(self.threshold / SHAKE) if shake else self.threshold
        sent = 0
        for mine, held, residual, share in zip(values, center, self.residuals, out, strict=True):
            here = mine.detach().to("cpu", residual.dtype)
            arrays = (here.numpy(), held.numpy(), residual.numpy(), share.numpy())
            sent += _encode(*arrays, residual.numpy().dtype.type(threshold))
        if encoding.clip is not None and self.messages % CLIP_EVERY == 0 and threshold:
            most = encoding.clip * self.threshold
            for residual in self.residuals:
                residual.clamp_(-most, most)
        if encoding.sparsity is not None and not shake:
            self._adapt(sent / self._values, *encoding.sparsity)

    def _adapt(self, part: float, least: float, most: float) -> None:
        """Change the threshold after a message with this part of the entries."""
        if part > most:
            self.threshold = short(self.threshold / DECAY)
        elif part < least:
            self.threshold = short(self.threshold * DECAY)

    def saved(self) -> dict[str, Any]:
        """For ``restore``."""
        residuals = {f"residual.{index}": values for index, values in enumerate(self.residuals)}
        return {**residuals, "threshold": self.threshold, "messages": self.messages}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what was ``saved``."""
        for index, residual in enumerate(self.residuals):
            residual.copy_(saved[f"residual.{index}"])
        self.threshold, self.messages = saved["threshold"], saved["messages"]


def short(threshold: float) -> float:
    """The nearest threshold with 8 significant bits; no less than float32's smallest."""
    least = float(torch.finfo(torch.bfloat16).tiny)
    rounded = float(torch.tensor(threshold, dtype=torch.float64).bfloat16())
    return max(rounded, least) if threshold else 0.0


def _encode(
    values: np.ndarray,
    center: np.ndarray,
    residual: np.ndarray,
    out: np.ndarray,
    threshold: np.floating[Any],
) -> int:
    """Encode a stretch; returns how many entries to send.

    It takes three reads and two writes of each value, with no other pass over memory.
    """
    sent = 0
    magnitude = np.empty(min(_BLOCK, len(values)), residual.dtype)
    large = np.empty(len(magnitude), bool)
    for start in range(0, len(values), _BLOCK):
        part = slice(start, start + _BLOCK)
        share, rest = out[part], residual[part]
        np.subtract(values[part], center[part], out=share)
        rest += share
        if not threshold:
            share[:], rest[:] = rest, 0
            sent += len(share)
            continue
        sizes, is_large = magnitude[: len(rest)], large[: len(rest)]
        np.greater_equal(np.abs(rest, out=sizes), threshold, out=is_large)
        count = int(np.count_nonzero(is_large))
        sent += count
        if count > len(rest) * _MANY:
            np.copysign(np.multiply(is_large, threshold, out=sizes), rest, out=share)
            rest -= share
            continue
        places = is_large.nonzero()[0]
        signed = np.copysign(threshold, rest[places])
        share.fill(0)
        share[places] = signed
        rest[places] -= signed
    return sent


_SPARSITY = must(
    "two numbers, the smallest and largest share of entries in a message, such as (1e-4, 1e-2)",
    lambda value: (
        isinstance(value, tuple)
        and len(value) == 2
        and None not in map(as_number, value)
        and 0 < value[0] <= value[1] <= 1
    ),
)


@dataclass(frozen=True)
class ThresholdGradientSharing(PeriodicStrategy["_Sharing"]):
    """Send the part of each change that is above a threshold, and keep the rest for later.

    Rule:
        After every ``period`` local steps, in which worker r went from the center c to w_r on n_r
        examples, with its residual r_r and its threshold t_r::

            r_r  <-  r_r + w_r - c
            q_r  <-  sign(r_r) * t_r where |r_r| >= t_r, else 0
            r_r  <-  r_r - q_r
            c    <-  c + sum_r n_r * q_r / sum_r n_r              w_r  <-  c

    Phases:
        1. Each worker trains for ``period`` steps, adds its change to its residual, and takes out
           of that what is above its threshold.
        2. It sends that to the driver or to every other worker.
        3. The mean of all, in the order of ranks, moves the center; all wait for it.
        4. Thresholds and residuals are adapted by how much was sent; all go on from the center.

    When:
        On slow links, for models of millions of parameters that are synchronized in every step:
        with the default settings a message has a thousandth of the bytes or less.

    When not:
        Where ``OuterOptimizer`` with a long period does as well, since its rounds are rarer and its
        replicas lose nothing; nor for small models, where the messages' latency dominates a round.

    Residuals are in checkpoints. If a lost worker comes back alone, its residual is gone, at most
    ``clip * threshold`` per entry; so is what is left in residuals when the fit ends.

    Args:
        threshold: the size at which an entry of a change, learning rate included, is sent, and the
            amount that is sent; Deeplearning4j's examples have 1e-3, and it adapts. 0 sends
            everything, which is parameter averaging after ``period`` steps.
        sparsity: the range for the part of the entries in a message; the threshold doubles in 20
            messages with more, and halves in 20 with fewer. Deeplearning4j's is (1e-4, 1e-2). None
            keeps the threshold constant, as Strom does.
        clip: the number of thresholds to which every fifth message clips the residual, 5 by
            default, both as in Deeplearning4j: old changes must not explode. None keeps everything.
        shake_every: after this many messages, one has a third of the threshold, to release small
            entries; None for none, Deeplearning4j's default.
        period: local steps between two exchanges, >= 1; 1 in the paper.
        aggregation: ``driver`` forms the center in the driver; a lost worker affects no other.
            ``executors`` has each worker send to all others over NCCL (gloo on CPUs): for few
            workers with a fast network between them. If one is lost, all are restarted from the
            driver's last copy.
        commit_every: with ``executors``, steps after which the driver takes an extra copy, rounded
            up to whole periods, and so the most that are repeated after the loss of a worker.

    Raises:
        ConfigError: an argument is out of range.
    """

    threshold: float = argument(
        1e-3, number("> 0, or 0 to send everything", lambda threshold: threshold >= 0)
    )
    sparsity: tuple[float, float] | None = argument((1e-4, 1e-2), or_none(_SPARSITY))
    clip: float | None = argument(
        5.0, or_none(number("of thresholds >= 1", lambda clip: clip >= 1))
    )
    shake_every: int | None = argument(None, or_none(STEPS))
    period: int = argument(1, STEPS)
    aggregation: Literal["driver", "executors"] = argument("driver", one_of("driver", "executors"))
    commit_every: int | None = argument(None, or_none(STEPS))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.commit_every is not None and self.aggregation == "driver":
            raise ConfigError(
                "commit_every is for aggregation='executors'; the driver has every round's center"
            )

    @property
    def wire_format(self) -> WireFormat:
        """Sparse; the driver's copy of what executors have agreed on is complete."""
        return SPARSE_CHANGES if self.aggregation == "driver" else FULL_PRECISION

    @property
    def needs(self) -> Needs:
        """Only the driver, if the center is formed there."""
        return Needs(exchanges_optimizer_state=False, collective=self.aggregation == "executors")

    def start(self, run: Run) -> _Sharing:
        """Begin at the center, with nothing left over."""
        return _Sharing(run, self)

    def exchange(self, run: Run, state: _Sharing, *, last: bool) -> None:
        """Share what is above the threshold, among executors also without rows."""
        state.exchange(run, last=last)


class _Sharing:
    """One worker's part.

    Args:
        run: the worker's; its replica holds the center.
        strategy: says how to encode, and where the center is formed.

    Attributes:
        encoder: encodes its parameters.
    """

    def __init__(self, run: Run, strategy: ThresholdGradientSharing) -> None:
        layout = run.replica.layout(with_optimizer=False)
        self._is_encoded = [segment.kind == "parameters" and segment.averaged for segment in layout]
        self._center = [
            values.detach().to("cpu", segment.center_dtype, copy=True)
            for segment, values in zip(layout, self._mine(run), strict=True)
        ]
        self.encoder = ThresholdEncoder(strategy, self._encoded(self._center))

        self._strategy = strategy
        among_workers = strategy.aggregation == "executors"
        self._group = WorkerGroup(run, run.batch_size) if among_workers else None
        self._shares = list(map(torch.zeros_like, self._center)) if among_workers else self._center
        # The driver is sent the center in the replicas' precision.
        mine = self._mine(run) if among_workers else []
        self._rounded = [i for i, v in enumerate(mine) if v.dtype != self._center[i].dtype]

    def saved(self) -> dict[str, Any]:
        """For ``restore``; the center too if nobody else has it without rounding."""
        centers = {f"center.{index}": self._center[index] for index in self._rounded}
        return self.encoder.saved() | centers

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what was ``saved``, while the replica holds the center of that commit."""
        self.encoder.restore(saved)
        for index in self._rounded:
            self._center[index].copy_(saved[f"center.{index}"])

    def exchange(self, run: Run, *, last: bool) -> None:
        """Take part in the next round, or in all that are left in the epoch."""
        group, every = self._group, self._strategy.commit_every
        if group is None:
            # Without rows, nothing is sent, so nothing may leave the residual.
            if run.examples:
                self._find_shares(run, run.window())
            run.averager.exchange(self._center, run.close_window(last=last))
            self._take_center(run)
            return
        for window in group.rounds(
            run, self._strategy.period, every, lambda: self._mine(run), last=last
        ):
            self._share(run, group, group.weights_of(run, window))
            self._take_center(run)

    def _find_shares(self, run: Run, window: WindowReport) -> None:
        """Write what to send for a window into the shares, which are the center in the driver."""
        mine = self._mine(run)
        for values in mine:
            # NaN is not above the threshold either, and would stay forever.
            require_finite(values, window)
        learned, known, shares = map(self._encoded, (mine, self._center, self._shares))
        held = [as_held(c, v.dtype) for c, v in zip(known, learned, strict=True)]
        self.encoder.encode(learned, held, shares)
        parts = zip(mine, self._center, self._shares, self._is_encoded, strict=True)
        for values, center, share, is_encoded in parts:
            if not is_encoded:
                here = values.detach().to("cpu", center.dtype)
                if here.is_floating_point():
                    torch.sub(here, center, out=share)
                else:
                    share.copy_(here)

    def _take_center(self, run: Run) -> None:
        for values, center in zip(self._mine(run), self._center, strict=True):
            values.copy_(center)

    def _encoded(self, segments: Sequence[Tensor]) -> list[Tensor]:
        return [s for s, encoded in zip(segments, self._is_encoded, strict=True) if encoded]

    def _mine(self, run: Run) -> list[Tensor]:
        return run.replica.segments(with_optimizer=False)

    def _share(self, run: Run, group: WorkerGroup, weights: Sequence[float]) -> None:
        """Form the center from everyone's shares, on each worker in the same order."""
        collective = group.collective
        if weights[collective.index]:
            self._find_shares(run, run.window())
        messages = [_message(share) for share in self._shares]
        if not weights[collective.index]:
            messages = [message[:0] for message in messages]
        mine = torch.tensor([len(message) for message in messages])
        lengths = [sizes.tolist() for sizes in _everyones(collective, mine)]
        room = torch.zeros(max(map(sum, lengths)), dtype=torch.uint8)
        torch.cat(messages, out=room[: sum(lengths[collective.index])])
        bodies = _everyones(collective, room)
        first, total = next(i for i, weight in enumerate(weights) if weight), sum(weights)
        for index, weight in enumerate(weights):
            if not weight:
                continue
            parts = torch.split(bodies[index][: sum(lengths[index])], lengths[index])
            for center, part in zip(self._center, parts, strict=True):
                if center.is_floating_point():
                    Sparse(center.dtype).add(part, center.numpy(), weight / total)
                elif index == first:
                    center.copy_(part.clone().view(center.dtype))


def _everyones(collective: Collective, mine: Tensor) -> list[Tensor]:
    return [each.cpu() for each in collective.all_gather(mine.to(collective.device))]


def _message(share: Tensor) -> Tensor:
    if not share.is_floating_point():
        return share.view(torch.uint8)
    return Sparse(share.dtype).pack(share)
