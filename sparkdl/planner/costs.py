"""What a step and an exchange cost: fitted to profiles, and predicted for other numbers of workers.

An exchange of N workers takes ``fixed + per_byte * passing(N) + message * hops(N)`` seconds: what
it takes whatever is sent, what the busiest link and the processors take for each byte that passes,
and the messages that wait for each other.

In the driver a message takes the link's latency. Two profiles with different numbers of workers
tell the rest apart; with one there are two limits, all of it fixed or all of it by bytes; the
second one is the prediction, the first one the lower end of what is possible. Rounds take somewhat
less than this with many workers: their replies are taken to end together, as they would with equal
shares of the link, but some end early, whose workers then send while others receive.

Among workers, who pass a sum around a ring, a message also takes the processors' time, which no
fit tells from the bytes'. Where the wire is known, a profile's exchange is the bytes' up to
``OVERHEAD``, and the messages' beyond that; where it is not, and at the lower end, it is all the
bytes'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sparkdl.errors import ConfigError
from sparkdl.planner.links import Link
from sparkdl.planner.profile import Profile
from sparkdl.planner.traffic import Traffic

Numbers = NDArray[np.float64]

OVERHEAD = 1.2
"""The most that a byte takes on a link / what the link's name says: headers, acknowledgements."""


@dataclass(frozen=True)
class Parts:
    """Where the seconds of an epoch go.

    Attributes:
        computing: forward, backward, optimizer steps, minibatches.
        uneven: waiting for the slowest worker.
        passing: bytes on the busiest link, the processors' part included, beyond what steps hide.
        fixed: what rounds take whatever is sent, latency included.
        link: of ``passing``, what the link itself takes; None if its speed is not known.
    """

    computing: float
    uneven: float
    passing: float
    fixed: float
    link: float | None = None

    @property
    def seconds(self) -> float:
        """Of the epoch."""
        return self.computing + self.uneven + self.passing + self.fixed


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a training costs on a network.

    Attributes:
        step_fixed: seconds of a step with no rows.
        step_per_row: seconds that each row of a minibatch adds.
        slowest: how many times as long as the mean the slowest worker takes.
        fixed: seconds of an exchange that do not depend on what is sent.
        per_byte: seconds for each byte that passes the busiest link, the processors' included.
        message: seconds of each message that others wait for, beside its bytes.
        wire: of ``per_byte``, what the link itself takes; None if its speed is not known.
    """

    step_fixed: float
    step_per_row: float
    slowest: float
    fixed: float = 0.0
    per_byte: float = 0.0
    message: float = 0.0
    wire: float | None = None

    def step_s(self, batch_size: int) -> float:
        """Seconds of a step of a worker that is as fast as the mean."""
        return self.step_fixed + self.step_per_row * batch_size

    def exchange(self, traffic: Traffic, workers: int, per_host: int = 1) -> tuple[float, float]:
        """Seconds of an exchange that nothing hides.

        Returns:
            What the bytes take, and the rest.
        """
        rest = self.fixed + self.message * traffic.hops(workers)
        return self.per_byte * traffic.passing(workers, per_host), rest

    def epoch(
        self, traffic: Traffic, *, rows: int, workers: int, batch_size: int, per_host: int = 1
    ) -> Parts:
        """Predict an epoch.

        Args:
            traffic: what is exchanged.
            rows: of all workers together.
            workers: how many.
            batch_size: rows per minibatch of each.
            per_host: how many of them are on one host.
        """
        steps = math.ceil(rows / (workers * batch_size))
        rounds = math.ceil(steps / traffic.every)
        step, slowest = self.step_s(batch_size), self.slowest if workers > 1 else 1.0
        computing, uneven = steps * step, steps * step * (slowest - 1)
        by_bytes, rest = self.exchange(traffic, workers, per_host)
        if not traffic.waits:
            # Each waits for its own exchange only, until the driver's link is full.
            window = steps * step / rounds
            by_bytes = self.per_byte * traffic.passing(1)
            full = self.per_byte * traffic.bytes_a_step(workers) * traffic.every
            by_bytes, uneven = max(by_bytes, full - window - rest), 0.0
        elif traffic.hidden == "steps":
            by_bytes = max(0.0, by_bytes - (computing + uneven) / rounds)
        elif sums := by_bytes + rest - self.fixed:
            shown = traffic.shown(sums, step * slowest) / sums
            by_bytes, rest = by_bytes * shown, self.fixed + (rest - self.fixed) * shown
        passing = rounds * by_bytes + self.per_byte * traffic.state
        link = None if self.wire is None else passing * self.wire / self.per_byte
        return Parts(computing, uneven, passing, rounds * rest, link)


def fit(
    profiles: Sequence[Profile],
    where: str | None,
    link: Link | None,
    measured_on: Link | None,
    *,
    low: bool = False,
) -> Costs:
    """Costs that agree with profiles.

    Args:
        profiles: of one training, for whose traffic there are formulas.
        where: where means are formed, as in some of them; all of them tell what a step takes.
        link: to predict for; None for the network on which the profiles were taken.
        measured_on: that network's links; None if they are not known, which with ``link`` means
            that they were too fast to matter.
        low: whether to take the lower end of what the profiles leave open.

    Raises:
        ConfigError: the profiles do not tell what a step or an exchange costs.
    """
    target, own = link or measured_on, [each for each in profiles if each.aggregation == where]
    traffic = own[0].traffic
    assert traffic is not None
    wire = 0.0 if measured_on is None else 1 / measured_on.bandwidth
    ring = traffic.through == "workers"
    untold = f"these fits with {own[0].strategy:.80} do not tell"
    if ring and all(each.workers == 1 for each in own):
        raise ConfigError(
            f"{untold} what workers take to exchange anything, since one worker exchanges nothing: "
            "add the profile of a fit with 2 workers"
        )
    pure = [(each.batch_size, each.step_s) for each in profiles if each.only_computes]
    if not pure:
        raise ConfigError(
            f"{untold} computing from sending gradients, which goes on at the same time: add the "
            "profile of a fit with 1 worker"
        )
    fixed, per_row = _line(*np.array(pure).T)
    slowest = max(each.slowest for each in profiles)
    costs = Costs(step_fixed=fixed, step_per_row=per_row, slowest=slowest)
    alone, (passed, hops, took) = _exchanges(own, traffic, costs, measured_on)
    if target is None and not len(passed):
        raise ConfigError(
            f"{untold} what exchanging a byte takes: it exchanges while it trains on. Name the "
            "network, as in link='1 Gbit/s'"
        )
    extra = per_byte = message = 0.0
    if ring and len(passed):
        per_byte = float((took / passed).min())
        if wire and not low:
            per_byte = min(per_byte, OVERHEAD * wire)
        message = float(hops @ (took - per_byte * passed) / (hops @ hops))
    elif len(set(passed.tolist())) == 1:
        # All of it for bytes, or no more than the wire takes for them.
        per_byte = float(took.mean() / passed[0])
        if low:
            per_byte, all_of_it = min(wire, per_byte), per_byte
            extra = (all_of_it - per_byte) * float(passed[0])
    elif len(passed):
        extra, per_byte = _line(passed, took)
    costs = replace(costs, fixed=alone + extra, per_byte=per_byte, message=message)
    if target is None:
        return costs
    # What the bytes took beyond the wire, they take there too.
    beyond, there = max(per_byte - wire, 0.0), 1 / target.bandwidth
    return replace(costs, per_byte=beyond + there, message=message + target.latency, wire=there)


def _exchanges(
    profiles: Sequence[Profile], traffic: Traffic, costs: Costs, link: Link | None
) -> tuple[float, Numbers]:
    """What the profiles' exchanges took on their own links, if these are known.

    Returns:
        Seconds of an exchange in which nothing passes a link, the mean; and of each in which
        something does, the bytes that pass the busiest link, the messages that wait for each other,
        and the seconds that both took beyond that, without the link's latency where it is known.
    """
    wire, latency = (0.0, 0.0) if link is None else (1 / link.bandwidth, link.latency)
    alone, found = [], []
    for each in profiles:
        step_s, hops = costs.step_s(each.batch_size), traffic.hops(each.workers)
        seconds = each.round_s - wire * traffic.state * len(each.epoch_seconds) / each.rounds
        if traffic.hidden == "backward":
            seconds += max(each.step_s - step_s, 0.0) * traffic.every
        passing = traffic.passing(each.workers if traffic.waits else 1, each.per_host)
        # What shows of what is exchanged behind steps is only what takes longer than they do.
        if passing and traffic.hidden != "steps":
            found.append((passing, hops, seconds, step_s * each.slowest))
        else:
            alone.append(max(seconds - latency * hops, 0.0))
    rest = float(np.mean(alone)) if alone else 0.0
    took = [
        (passing, hops, max(traffic.whole(max(s - rest, 0.0), step_s) - latency * hops, 0.0))
        for passing, hops, s, step_s in found
    ]
    return rest, np.array(took, dtype=np.float64).reshape(-1, 3).T


def _line(at: Numbers, values: Numbers) -> tuple[float, float]:
    """The line a + b x nearest to some points with a, b >= 0; b is 0 if all have the same x."""
    if len(set(at.tolist())) < 2:
        return float(values.mean()), 0.0
    slope, start = np.polyfit(at, values, 1)
    if slope < 0:
        return float(values.mean()), 0.0
    if start < 0:
        return 0.0, float(at @ values / (at @ at))
    return float(start), float(slope)
