"""Barrier control: who waits for whom between two windows, as a value and as a round policy.

A worker that has contributed its k-th window of an epoch goes on from the current center if

    k - k_j <= s        for every j in a sample of beta of the other workers

and otherwise waits until that holds; k_j counts what j has contributed in the epoch. Wang,
Catterall & Mortier 2017, "Probabilistic Synchronous Parallel" (arXiv 1709.07772), of which the
others are limits:

    SSP(s)      all others, s > 0: stale synchronous parallel (Ho et al. 2013)
    PBSP(beta)  a sample, s = 0             SSP(0), PBSP(all)    everyone waits for everyone
    ASP()       nobody, or s = infinity     PSSP(beta, s)        a sample within a bound

Two more say how many contributions make an update of the center, from which their workers go on:
``BSP()`` takes everyone's, ``Softsync(n)`` the first n.

Only workers that are present and have not ended the epoch are waited for: not one that was lost,
but one that has come back, from its last commit until it is within the bound. Each of the others
contributes the window that it has begun, and waits. A worker that comes back, or is resumed, too
far ahead itself trains at once, but waits before it contributes.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

from sparkdl.averager.round_policy import All, Nobody, RoundPolicy
from sparkdl.averager.run_events import Position
from sparkdl.events import WindowReport
from sparkdl.strategies.arguments import CheckedFields, whole

Clock = tuple[int, int]
"""An epoch, and its committed windows; after an epoch's last window, the next one's start."""


class Barrier(CheckedFields, ABC):
    """Who waits for whom; a value that a strategy is given."""

    @abstractmethod
    def policy(self, period: int) -> RoundPolicy:
        """What decides in one run who waits.

        Args:
            period: steps in a window, except an epoch's last.
        """


@dataclass(frozen=True)
class BSP(Barrier):
    """Bulk synchronous parallel: the center moves by the mean of everyone's changes.

    When:
        For the same bits each time, and the best result for each row trained on.

    When not:
        Where some workers are slower than others, as all wait for the slowest in each window.
    """

    def policy(self, period: int) -> RoundPolicy:
        """Everyone in every round."""
        return All()


@dataclass(frozen=True)
class ASP(Barrier):
    """Asynchronous parallel: nobody waits.

    When:
        Where workers differ in speed and their changes are scaled by staleness.

    When not:
        With large steps: the fastest may be arbitrarily far ahead, which may diverge.
    """

    def policy(self, period: int) -> RoundPolicy:
        """Each worker alone with the center."""
        return Nobody()


@dataclass(frozen=True)
class SSP(Barrier):
    """Stale synchronous parallel: nobody begins a window over ``s`` ahead of the slowest.

    When:
        Where speeds vary from window to window, so that the slowest is not always the same one.

    When not:
        Where one is always slow: it sets everyone's pace, only ``s`` windows later.

    Args:
        s: windows, >= 0; 4 in the PSP paper's comparison. With 0, everyone waits for everyone.

    Raises:
        ConfigError: it is not such a number.
    """

    s: int = field(metadata=whole(0, "windows"))

    def policy(self, period: int) -> RoundPolicy:
        """Bounded by the slowest of all."""
        return BoundedStaleness(self.s, period)


@dataclass(frozen=True)
class PBSP(Barrier):
    """Probabilistic BSP: nobody goes on before ``beta`` others, drawn each time, are as far.

    When:
        For many workers of which some are slow: most steps meet none of these.

    When not:
        For a few workers, where a sample is soon everyone.

    Args:
        beta: how many others are sampled, >= 0; 1 to 5 % of the workers in the paper, where even 1
            keeps most together. With 0 it is ``ASP``.

    Raises:
        ConfigError: it is not such a number.
    """

    beta: int = field(metadata=whole(0, "workers"))

    def policy(self, period: int) -> RoundPolicy:
        """Bounded by a sample."""
        return SampledStaleness(self.beta, 0, period)


@dataclass(frozen=True)
class PSSP(Barrier):
    """Probabilistic SSP: nobody is more than ``s`` ahead of ``beta`` others, drawn each time.

    When:
        Where ``SSP`` waits too long for a few slow workers.

    When not:
        Where the bound must be certain, as with ``SSP``: here it holds only on average.

    Args:
        beta: how many others are sampled, >= 0; 1 to 5 % of the workers in the paper.
        s: windows, >= 0; 4 in the paper.

    Raises:
        ConfigError: they are not such numbers.
    """

    beta: int = field(metadata=whole(0, "workers"))
    s: int = field(metadata=whole(0, "windows"))

    def policy(self, period: int) -> RoundPolicy:
        """Bounded by a sample."""
        return SampledStaleness(self.beta, self.s, period)


@dataclass(frozen=True)
class Softsync(Barrier):
    """Soft synchronization: an update is the mean of the first ``n`` changes (Zhang et al. 2016).

    When:
        For many workers, where single changes are noisy and the last few not worth waiting for.

    When not:
        For few workers, where each is a large part, and contributions that miss an update are
        stale.

    Args:
        n: contributions in an update, >= 1, each from a different worker; from all, if fewer are
            present. The paper's "N-softsync" of R workers is n = R / N. With all of them it is
            ``BSP``, with 1 ``ASP`` at a higher cost.

    Raises:
        ConfigError: it is not such a number.
    """

    n: int = field(metadata=whole(1, "contributions"))

    def policy(self, period: int) -> RoundPolicy:
        """The first to come."""
        return FirstToCome(self.n)


class FirstToCome(All):
    """Rounds of the first few; the others contribute what they have trained to the next.

    Args:
        n: how many.
    """

    in_step = False

    def __init__(self, n: int) -> None:
        self._n = n

    def is_enough(self, entered: int, late: int, group: int) -> bool:
        """With ``n`` of them, or all that are present."""
        return entered >= min(self._n, group)


class _Clocks(Nobody):
    """Each worker alone with the center; keeps how far each of them is.

    Args:
        bound: windows by which a rank may be ahead.
        period: steps in a window.
    """

    def __init__(self, bound: int, period: int) -> None:
        self._bound = bound
        self._period = period
        self._clocks: list[Clock] = []

    def begin(self, positions: Sequence[Position]) -> None:
        """Note where the ranks stand."""
        self._clocks = [self._clock(each) for each in positions]

    def _clock(self, at: Position | WindowReport) -> Clock:
        return at.epoch, at.step_of_epoch // self._period

    def _after(self, window: WindowReport) -> Clock:
        return (window.epoch + 1, 0) if window.last else self._clock(window)

    def _needed(self, rank: int) -> Clock | None:
        """How far others must be for a rank to go on; None at the start, where all are."""
        epoch, windows = self._clocks[rank]
        return (epoch, windows - self._bound) if windows > self._bound else None


class BoundedStaleness(_Clocks):
    """A worker too far ahead of the slowest one present waits for it.

    An answer takes time linear in the number of distinct clocks: few, since they are bounded.

    Args:
        bound: windows by which a rank may be ahead.
        period: steps in a window.
    """

    def begin(self, positions: Sequence[Position]) -> None:
        """Note where the ranks stand."""
        super().begin(positions)
        self._ranks_at: dict[Clock, set[int]] = {}
        for rank, clock in enumerate(self._clocks):
            self._ranks_at.setdefault(clock, set()).add(rank)
        # Who waits, by the clock that the slowest must reach.
        self._waiting: dict[Clock, set[int]] = {}

    def goes_on(self, rank: int, active: Set[int]) -> bool:
        """Whether the slowest is near enough."""
        needed = self._needed(rank)
        if needed is None or needed <= self._slowest(active):
            return True
        self._waiting.setdefault(needed, set()).add(rank)
        return False

    def committed(self, windows: Iterable[WindowReport], active: Set[int]) -> Iterable[int]:
        """Advance the clocks; returns those who waited for that, to be asked about again."""
        for window in windows:
            rank, before = window.rank, self._clocks[window.rank]
            self._clocks[rank] = after = self._after(window)
            self._ranks_at[before].discard(rank)
            if not self._ranks_at[before]:
                del self._ranks_at[before]
            self._ranks_at.setdefault(after, set()).add(rank)
        if not self._waiting:
            return ()
        slowest = self._slowest(active)
        reached = [clock for clock in self._waiting if clock <= slowest]
        return sorted(rank for clock in reached for rank in self._waiting.pop(clock))

    def _slowest(self, active: Set[int]) -> Clock:
        for clock in sorted(self._ranks_at):
            if not self._ranks_at[clock].isdisjoint(active):
                return clock
        return max(self._ranks_at)


class SampledStaleness(_Clocks):
    """A worker too far ahead of any in a sample waits; the sample stays until all are near.

    An answer takes time linear in the sample's size. A rank waits for one of its sample at a time,
    so that a commit concerns only those who wait for exactly that rank.

    Args:
        size: of a sample; all others, if those are fewer.
        bound: windows by which a rank may be ahead.
        period: steps in a window.
        seed: for the samples, which are the same if the ranks come in the same order.
    """

    def __init__(self, size: int, bound: int, period: int, seed: int = 0) -> None:
        super().__init__(bound, period)
        self._size = size
        self._draw = random.Random(seed)
        self._samples: dict[int, list[int]] = {}
        # Who waits for a rank, by the clock that it must reach.
        self._waiting: dict[int, dict[Clock, set[int]]] = {}

    def goes_on(self, rank: int, active: Set[int]) -> bool:
        """Whether all of the sample that are present are near enough."""
        needed = self._needed(rank)
        if needed is None:
            return True
        if rank not in self._samples:
            self._samples[rank] = self._sample(rank)
        for other in self._samples[rank]:
            if other in active and self._clocks[other] < needed:
                self._waiting.setdefault(other, {}).setdefault(needed, set()).add(rank)
                return False
        return True

    def committed(self, windows: Iterable[WindowReport], active: Set[int]) -> Iterable[int]:
        """Advance the clocks; returns those who waited for that, to be asked about again."""
        reached: set[int] = set()
        for window in windows:
            self._clocks[window.rank] = clock = self._after(window)
            self._samples.pop(window.rank, None)
            waiting = self._waiting.get(window.rank, {})
            for needed in [each for each in waiting if each <= clock]:
                reached |= waiting.pop(needed)
        return sorted(reached)

    def _sample(self, rank: int) -> list[int]:
        others = range(len(self._clocks) - 1)
        drawn = self._draw.sample(others, min(self._size, len(others)))
        return [other + (other >= rank) for other in drawn]
