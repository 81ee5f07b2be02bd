"""A model of how long workers take for a window, fitted to their past times.

With t_rk the seconds of the window that rank r ended in round k, and e_rk independent:

    log t_rk = a_rk + f_k + e_rk

f_k is common to all in a round, and is removed before the rest is fitted: it does not change who is
slow. a_rk is the worker's own level, which drifts: exponential smoothing of log t - f with one gain
for all, the one with the smallest prediction errors over the last rounds. Gain 0 is the mean, for
noise that is new each time; with 1, a worker will be as slow as it just was. e is drawn from these
prediction errors of all workers, so that it may have any shape.

The time of an unfinished window is drawn given how long it has lasted: it is censored, and imputed
from the truncated prediction. Teng & Wood 2018 ("High Throughput Synchronous Distributed Stochastic
Gradient Descent") use a deep generative state-space model with amortized inference here; this one
has two parameters, no training, and takes a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ROUNDS = 20
"""The number of rounds whose times are remembered."""
GAINS = np.array([0.0, 0.1, 0.3, 0.6, 1.0])
SAMPLES = 128
DRAWS = 200_000
"""With many workers fewer samples suffice, as their order statistics vary little."""

Numbers = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


class RunTimes:
    """The times of the last rounds, and what they predict for the next.

    Args:
        workers: how many there are.
        seed: for the draws.
    """

    def __init__(self, workers: int, seed: int = 0) -> None:
        self._generator = np.random.default_rng(seed)
        # Logarithms of seconds, of round k in row k % ROUNDS; NaN where none is known.
        self._logs = np.full((ROUNDS, workers), np.nan)
        self._rounds = np.full(ROUNDS, -1)
        self._levels = np.full(workers, np.nan)
        self._errors = np.empty(0)

    def note(self, rank: int, round: int, seconds: float) -> None:
        """Note a window's time.

        Args:
            rank: the worker's.
            round: the one in which it ended, counted from 0; never less than in the previous call.
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
        """Whether enough is known about some ranks to predict: on average two times of each."""
        enough = len(self._errors) >= 2 * len(ranks)
        return enough and not np.isnan(self._levels[list(ranks)]).any()

    def draw(self, ranks: Sequence[int], lasted: Numbers) -> Numbers:
        """Draw how long windows take, given how long they have lasted.

        Args:
            ranks: the workers; ``knows`` must be true for them.
            lasted: seconds until now for each; at most 0 if it is about to begin.

        Returns:
            Seconds, of shape (samples, ranks).
        """
        samples = min(SAMPLES, max(8, DRAWS // max(len(ranks), 1)))
        levels, errors = self._levels[list(ranks)], self._errors
        least = np.log(np.maximum(lasted, 1e-9))
        # Only the largest errors are still possible.
        ruled_out = np.searchsorted(errors, least - levels)
        possible = len(errors) - ruled_out
        chosen = self._generator.random((samples, len(levels))) * possible
        drawn = levels + errors[np.minimum(ruled_out + chosen.astype(int), len(errors) - 1)]
        # Longer than anything seen: extrapolated by a tail of the logarithm.
        beyond = self._generator.exponential(errors.std(), drawn.shape)
        seconds: Numbers = np.exp(np.where(possible > 0, drawn, least + beyond))
        return seconds


def _common(logs: Numbers, known: np.ndarray) -> Numbers:
    """The part common to all in each round, of shape (rounds, 1); 0 on average."""
    count = np.maximum(known.sum(axis=1, keepdims=True), 1)
    filled = np.where(known, logs, 0.0)
    common = np.zeros((len(logs), 1))
    for _ in range(2):  # the second pass allows for those that were not in each round
        own = np.where(known, filled - common, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
        rest = np.where(known, filled - own, 0.0)
        common = rest.sum(axis=1, keepdims=True) / count
    # Part of that is the mean of the workers' own parts: with few workers, most of it.
    noise = np.sum(np.where(known, rest - common, 0.0) ** 2) / max(known.sum() - len(logs), 1)
    variance = max(float(np.mean(common**2 - noise / count)), 0.0)
    share = variance / np.maximum(variance + noise / count, 1e-12)
    return np.asarray(share * common)


def _smoothed(logs: Numbers, known: np.ndarray) -> tuple[Numbers, Numbers]:
    """Follow the workers' levels with each gain.

    Args:
        logs: of shape (rounds, workers), the oldest first.
        known: which of them are known.

    Returns:
        The errors of all predictions, of shape (gains, predictions), and the levels in the end, of
        shape (gains, workers).
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
    """The number of contributions to wait for that gives the most per second.

        argmax over c of  E[c + how many late ones come meanwhile] / (E[x_(c)] + between_s)

    with x_(c) the c-th smallest time of those that are due.

    Args:
        due: times at which contributions that are waited for come, of shape (samples, due), in
            seconds from the beginning of the round.
        late: the same for those that are taken when they come, of shape (samples, late).
        between_s: seconds from the end of a round to the beginning of the next.
    """
    samples, count = due.shape
    times = np.concatenate([due, late], axis=1)
    order = np.argsort(times, axis=1)
    is_due = order < count
    ordered = np.take_along_axis(times, order, axis=1)[is_due].reshape(samples, count)
    come = (np.nonzero(is_due)[1] + 1).reshape(samples, count)
    rates = come.mean(axis=0) / np.maximum(ordered.mean(axis=0) + between_s, 1e-9)
    # If all times are the same, everyone is waited for, whatever the last bit says.
    best = np.nonzero(rates >= rates.max() * (1 - 1e-9))[0]
    return int(best[-1]) + 1
