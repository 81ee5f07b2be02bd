"""Rounds with a cutoff: workers that are too slow contribute to the next one instead.

A round is over as soon as enough workers that began with its center have contributed. Latecomers
take part in the next round, with what they trained from an earlier center: no row is left out, and
none counts twice. Late contributions are taken whenever they come, but are not waited for, and do
not stand in for one that is due: most of a round is never stale just because a few were slow
before.

How long workers take for a window is predicted by a model that is fitted to past times.
With t_rk the seconds taken by the window that rank r ended in round k, and independent e_rk:

    log t_rk = a_rk + f_k + e_rk

f_k is common to all workers in a round, and is removed before the rest is fitted, since it does not
change who is slow. a_rk is the worker's own level, which drifts: exponential smoothing of log t - f
with one gain for all, the one with the smallest prediction errors over the last rounds. Gain 0
gives the mean, for noise that is fresh each time; with gain 1 a worker will be as slow as it just
was. e is drawn from the prediction errors of all workers, so it may have any distribution.

The time of an unfinished window is censored, so it is imputed: drawn from the prediction truncated
at the time it has already lasted. Teng & Wood 2018 ("High Throughput Synchronous Distributed
Stochastic Gradient Descent") use a deep generative state-space model with amortized inference here;
this one has two parameters, needs no training, and takes a millisecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

import numpy as np

from sparkdl.averager.round_policy import All
from sparkdl.averager.run_events import Position
from sparkdl.events import WindowReport

ROUNDS = 20
"""For how many rounds times are remembered."""
GAINS = np.array([0.0, 0.1, 0.3, 0.6, 1.0])
SAMPLES = 128
DRAWS = 200_000
"""The most numbers to draw: with many workers fewer samples do, as order statistics vary little."""

Numbers = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


class RunTimes:
    """The times of the last rounds, and what they predict for the next.

    Args:
        workers: how many workers there are.
        seed: seed of the random numbers.
    """

    def __init__(self, workers: int, seed: int = 0) -> None:
        self._generator = np.random.default_rng(seed)
        # Logarithms of seconds, round k in row k % ROUNDS; NaN where unknown.
        self._logs = np.full((ROUNDS, workers), np.nan)
        self._rounds = np.full(ROUNDS, -1)
        self._levels = np.full(workers, np.nan)
        self._errors = np.empty(0)

    def note(self, rank: int, round: int, seconds: float) -> None:
        """Take note of a window's time.

        Args:
            rank: the worker's rank.
            round: the round in which it ended, counted from 0; never less than in the previous
                call.
            seconds: how long it took.
        """
        row = round % ROUNDS
        if self._rounds[row] < round:
            self._rounds[row] = round
            self._logs[row] = np.nan
        self._logs[row, rank] = np.log(max(seconds, 1e-6))

    def fit(self) -> None:
        """Fit the model to the times known so far."""
        ages = np.argsort(self._rounds)
        logs = self._logs[ages][self._rounds[ages] >= 0]
        if not len(logs):
            return
        known = ~np.isnan(logs)
        errors, levels = _smoothed(np.where(known, logs - _common(logs, known), 0.0), known)
        gain = np.argmin(np.sum(errors**2, axis=1))
        self._levels = np.where(known.any(axis=0), levels[gain], np.nan)
        self._errors = np.sort(errors[gain])

    def knows(self, ranks: Sequence[int]) -> bool:
        """Whether enough is known to predict some ranks: on average two times of each."""
        enough = len(self._errors) >= 2 * len(ranks)
        return enough and not np.isnan(self._levels[list(ranks)]).any()

    def draw(self, ranks: Sequence[int], lasted: Numbers) -> Numbers:
        """Draw how long windows take, given how long they have lasted.

        Args:
            ranks: the ranks, for which ``knows`` has to hold.
            lasted: seconds that each has lasted so far; at most 0 if it has yet to begin.

        Returns:
            Seconds, shape (samples, ranks).
        """
        samples = min(SAMPLES, max(8, DRAWS // max(len(ranks), 1)))
        levels, errors = self._levels[list(ranks)], self._errors
        least = np.log(np.maximum(lasted, 1e-9))
        # Errors are sorted, so those still possible are the largest ones.
        ruled_out = np.searchsorted(errors, least - levels)
        possible = len(errors) - ruled_out
        chosen = self._generator.random((samples, len(levels))) * possible
        drawn = levels + errors[np.minimum(ruled_out + chosen.astype(int), len(errors) - 1)]
        # Longer than anything seen: extrapolate with an exponential tail of the logarithm.
        beyond = self._generator.exponential(errors.std(), drawn.shape)
        seconds: Numbers = np.exp(np.where(possible > 0, drawn, least + beyond))
        return seconds


def _common(logs: Numbers, known: np.ndarray) -> Numbers:
    """What is common to all workers in each round, shape (rounds, 1); 0 on average."""
    count = np.maximum(known.sum(axis=1, keepdims=True), 1)
    filled = np.where(known, logs, 0.0)
    common = np.zeros((len(logs), 1))
    for _ in range(2):  # the second pass allows for workers absent from a round
        own = np.where(known, filled - common, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
        rest = np.where(known, filled - own, 0.0)
        common = rest.sum(axis=1, keepdims=True) / count
    # Part of that is the mean of the workers' own noise; with few workers, most of it.
    noise = np.sum(np.where(known, rest - common, 0.0) ** 2) / max(known.sum() - len(logs), 1)
    variance = max(float(np.mean(common**2 - noise / count)), 0.0)
    share = variance / np.maximum(variance + noise / count, 1e-12)
    return np.asarray(share * common)


def _smoothed(logs: Numbers, known: np.ndarray) -> tuple[Numbers, Numbers]:
    """Track the workers' levels with each gain.

    Args:
        logs: shape (rounds, workers), the oldest first.
        known: which of them are known.

    Returns:
        The errors of all predictions, shape (gains, predictions), and the final levels, shape
        (gains, workers).
    """
    levels = np.zeros((len(GAINS), logs.shape[1]))
    seen = np.zeros(logs.shape[1])
    errors: list[Numbers] = []
    for row, present in zip(logs, known, strict=True):
        error = row - levels
        errors.append(error[:, present & (seen > 0)])
        seen += present
        gain = np.maximum(GAINS[:, None], 1 / np.maximum(seen, 1))
        levels += np.where(present, gain * error, 0.0)
    return np.concatenate(errors, axis=1), levels


def best_cutoff(due: Numbers, late: Numbers, between_s: float = 0.0) -> int:
    """The number of contributions to wait for that yields the most per second.

        argmax over c of  E[c + how many late ones come meanwhile] / (E[x_(c)] + between_s)

    with x_(c) the c-th smallest time of those due.

    Args:
        due: times at which awaited contributions come, shape (samples, due), in seconds from the
            beginning of the round.
        late: the same for those that are taken whenever they come, shape (samples, late).
        between_s: seconds from the end of a round to the beginning of the next.
    """
    samples, count = due.shape
    times = np.concatenate([due, late], axis=1)
    order = np.argsort(times, axis=1)
    is_due = order < count
    ordered = np.take_along_axis(times, order, axis=1)[is_due].reshape(samples, count)
    come = (np.nonzero(is_due)[1] + 1).reshape(samples, count)
    rates = come.mean(axis=0) / np.maximum(ordered.mean(axis=0) + between_s, 1e-9)
    # If all times are equal, everyone is waited for, whatever the last bit says.
    best = np.nonzero(rates >= rates.max() * (1 - 1e-9))[0]
    return int(best[-1]) + 1


class BackupWorkers(All):
    """A fixed number of workers are not waited for, as proposed by Chen et al. 2016.

    No more than that are ever late, so the others are always enough.

    Args:
        spared: how many, >= 1; at least one contribution is waited for in any case.
    """

    in_step = False

    def __init__(self, spared: int) -> None:
        self._spared = spared

    def is_enough(self, entered: int, late: int, group: int) -> bool:
        """Enough is all but ``spared`` of those that began with the round's center."""
        return entered - late >= max(1, group - self._spared)


class PredictedCutoff(BackupWorkers):
    """Waits for as many as maximize the contributions per second, as predicted in each round.

    Once per round, when its first contribution comes, deciding takes time proportional to the
    workers: a few milliseconds for hundreds. Until enough times are known, everyone is waited for.

    Args:
        seed: seed of the random numbers.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(0)
        self._seed = seed

    def begin(self, positions: Sequence[Position]) -> None:
        """Forget everything: the workers may be different ones."""
        workers = len(positions)
        self._times = RunTimes(workers, self._seed)
        self._round = 0
        self._began, self._closed = np.zeros(workers), np.full(workers, np.nan)
        self._now = self._over = np.inf

    def began(self, rank: int, now: float) -> None:
        """Start the rank's clock."""
        self._began[rank], self._closed[rank] = now, np.nan

    def closed(self, window: WindowReport, now: float) -> None:
        """Remember the rank's time; an epoch's last window may have fewer steps."""
        self._now, rank = now, window.rank
        if not np.isnan(self._closed[rank]):
            return  # it is resending what it trained before
        self._closed[rank] = now
        if not window.last:
            self._times.note(rank, self._round, now - self._began[rank])

    def opened(self, group: Set[int], late: Set[int]) -> None:
        """Decide how many to wait for."""
        due = sorted(group - late)
        self._spared = len(group) - self._cutoff(due, sorted(group & late)) if due else 0

    def _cutoff(self, due: list[int], late: list[int]) -> int:
        self._times.fit()
        if not self._times.knows(due):
            return len(due)
        # One that has been late for longer than is remembered is not expected in this round.
        late = [rank for rank in late if self._times.knows([rank])]
        begins = self._began[due].min()
        times = self._draw(due + late) - begins
        between_s = max(begins - self._over, 0.0)
        return best_cutoff(times[:, : len(due)], times[:, len(due) :], between_s)

    def _draw(self, ranks: list[int]) -> Numbers:
        """Draw when contributions will come, or take when they came."""
        began, closed = self._began[ranks], self._closed[ranks]
        drawn = began + self._times.draw(ranks, self._now - began)
        return np.where(np.isnan(closed), drawn, closed)

    def committed(self, windows: Iterable[WindowReport], active: Set[int]) -> Iterable[int]:
        """The round was over when the last of these had come."""
        self._round += 1
        self._over = max((self._closed[window.rank] for window in windows), default=np.inf)
        return ()
